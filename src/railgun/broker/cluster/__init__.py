"""A node's part in a cluster: consensus, replication, and membership. See docs/design/cluster.md."""
