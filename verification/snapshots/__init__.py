"""The proof of snapshots and recovery."""
