"""Producers: output that is staged and committed to a stream exactly once."""
