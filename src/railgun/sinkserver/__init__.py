"""Sinks outside of a flow: a server that takes part in two phases, and where records go."""
