"""A node as a member of a cluster: see docs/design/cluster.md."""
