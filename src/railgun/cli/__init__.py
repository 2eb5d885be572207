"""The command line `railgun`: run flows and nodes, and manage running ones."""
