"""The runtime of one worker: one Python process in one Spark task."""
