"""Streams at work on a node: persistent and ephemeral ones, their groups and producers, and calls that manage them."""
