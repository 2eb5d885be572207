"""Commands between clients and nodes, as protobuf: `./run proto` makes the code of the schema."""
