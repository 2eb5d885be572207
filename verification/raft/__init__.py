"""The proof of Raft."""
