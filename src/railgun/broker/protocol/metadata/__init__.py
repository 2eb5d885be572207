"""Cluster metadata: the state on which all nodes agree (`machine`), and the decisions of the leader (`steering`)."""
