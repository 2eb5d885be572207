"""Producers: messages that are staged for a stream, and committed to it exactly once."""
