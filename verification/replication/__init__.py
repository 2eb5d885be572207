"""The proof of replication of streams."""
