"""The proof of consumer groups."""
