"""What the nodes of a cluster agree on (`metadata`), and what the one that leads decides (`steering`)."""
