"""The messaging node: streams on disk, and those who publish to them and read them."""
