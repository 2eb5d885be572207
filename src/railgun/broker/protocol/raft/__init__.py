"""Raft consensus: some nodes agree on a log of entries, as long as a majority of them can talk to each other.

Follows the paper (Ongaro and Ousterhout, 2014; Ongaro's thesis for members, transfer and reads), with pre-vote,
check-quorum, leases, learners and snapshots in chunks. A pure machine: `machine.Raft` has the rules, `messages` has the
messages and the duties of a driver.
"""

from railgun.broker.protocol.raft.machine import Raft

__all__ = ["Raft"]
