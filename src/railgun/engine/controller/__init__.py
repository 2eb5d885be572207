"""Control a flow in the program that started it: order workers, take snapshots, serve the HTTP API."""
