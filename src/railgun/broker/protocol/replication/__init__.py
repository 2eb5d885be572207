"""Copies of a stream on several nodes, of which one writes at a time: what is safe, and what a new master has to know.

`standing` is how a copy stands, and where two of them agree; `replica` the rules of a copy that follows; `master` those
of the one that writes; `messages` the vocabulary, and the duties of a driver.
"""
