"""The broker (`railgun serve`): streams, their groups, and the cluster that replicates them."""
