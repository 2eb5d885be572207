"""Files that survive crashes: atomic writes to local disks and object stores, locks, format files."""
