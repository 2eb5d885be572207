"""Logs of the broker on disk: segments of messages, and logs of small records."""
