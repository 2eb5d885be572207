"""Raft: some nodes agree on a log of entries, and go on as long as a majority of them can talk to each other.

What the paper says (Ongaro and Ousterhout, 2014; Ongaro's thesis for members, transfer and reads), with pre-vote,
check-quorum, leases, learners and snapshots in chunks. A pure machine: see `machine.Raft` for the rules, and
`messages` for the vocabulary and what a driver has to do.
"""

from railgun.broker.protocol.raft.machine import Raft

__all__ = ["Raft"]
