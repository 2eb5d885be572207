"""Replication of a stream: several nodes have copies, of which one writes at a time.

The rules say which messages are safe, and what a new master must find out. `standing` describes a copy and compares
two; `replica` has the rules of a copy that follows; `master` those of the copy that writes; `messages` the messages and
commands, and the duties of a driver.
"""
