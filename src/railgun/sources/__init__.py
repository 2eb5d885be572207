"""Sources of flows, one file each."""
