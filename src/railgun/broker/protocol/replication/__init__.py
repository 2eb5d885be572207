"""Replication of a stream: several nodes have copies, of which one writes at a time.

The rules say which messages are safe, and what a new master must find out. `standing` describes a copy and compares
two; `replica` has the rules of a copy that follows; `master` those of the copy that writes; `messages` the messages and
commands, and the duties of a driver.

Terms:

- A *copy* is what one node has of the stream: a log of batches, and the states of the consumer groups.
- An *epoch* is the term of one master with one set of voters; its number only grows.
- The *label* of a copy is the last epoch whose log it has had in full; `LOST`: it has lost messages since.
- The *standing* of a copy describes it for comparison: its label, its first offset and end, and its epochs.
- A message is *safe* when it cannot be lost any more: a majority has it on disk, in copies labelled with the epoch.
- A *session* is the connection of a master with one replica, and begins with a fence. A *turn* begins each time the
  replica sends a new standing in a session.
- A *unit* is a sequence of batches that readers see together or not at all.
"""
