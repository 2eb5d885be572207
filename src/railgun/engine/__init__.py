"""The engine: runs flows on workers, rescales them, saves and restores their state."""
