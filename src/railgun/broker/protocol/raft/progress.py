"""A leader's view of one other node: how far its log has got, and how to send it entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from railgun.broker.protocol.raft.messages import Snapshot


class Mode(Enum):
    """How a node is sent entries."""

    PROBE = "probe"  # one message at a time, until it is known where its log ends
    STREAM = "stream"  # many messages, ahead of the answers
    SNAPSHOT = "snapshot"  # a snapshot, as the entries it needs are no longer in the log


@dataclass(slots=True)
class Progress:
    """The progress of one node, as its leader knows it."""

    next: int
    """The index of the entry to send next."""
    match: int = 0
    """The highest index up to which the node's log on disk is known to equal the leader's."""
    mode: Mode = Mode.PROBE
    paused: bool = False
    """Whether a probe or a piece of a snapshot is in flight."""
    flight: list[int] = field(default_factory=list)
    """The last index of each message in flight."""
    snapshot: Snapshot | None = None
    offset: int = 0
    """How many bytes of the snapshot the node has."""
    round: int = 0
    """The last round that the node answered."""

    def probe(self, next: int) -> None:
        """Start to find out where the node's log agrees with the leader's."""
        self.mode, self.next, self.paused = Mode.PROBE, max(next, self.match + 1), False
        self.flight.clear()
        self.snapshot = None

    def send_snapshot(self, snapshot: Snapshot) -> None:
        """Switch to sending a snapshot."""
        self.mode, self.snapshot, self.offset, self.paused = Mode.SNAPSHOT, snapshot, 0, False
        self.flight.clear()

    def has(self, index: int) -> bool:
        """Record that the node has the log up to `index`. Return whether that is new."""
        is_new = index > self.match
        self.match = max(self.match, index)
        if self.mode is Mode.STREAM:
            self.next = max(self.next, index + 1)
            self.flight = [last for last in self.flight if last > index]
        elif self.mode is Mode.PROBE or (self.snapshot and index >= self.snapshot.index):
            self.mode, self.next, self.paused = Mode.STREAM, self.match + 1, False
            self.snapshot = None
        return is_new
