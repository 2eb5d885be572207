"""The proof of producers and transactions."""
