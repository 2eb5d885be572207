"""Files that survive crashes: object stores, locks, format files."""
