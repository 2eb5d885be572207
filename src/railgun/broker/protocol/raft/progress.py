"""How far a leader has come with one other node."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from railgun.broker.protocol.raft.messages import Snapshot


class Mode(Enum):
    """How a node is sent entries."""

    PROBE = "probe"  # one message at a time, until it is known where its log ends
    STREAM = "stream"  # one after the other, ahead of the answers
    SNAPSHOT = "snapshot"  # what it needs is not in the log any more


@dataclass(slots=True)
class Progress:
    """One node, as its leader knows it."""

    next: int
    """The entry it is sent next."""
    match: int = 0
    """Up to here its log is known to be the leader's, on its disk."""
    mode: Mode = Mode.PROBE
    paused: bool = False
    """A probe is under way."""
    flight: list[int] = field(default_factory=list)
    """The last entries of messages under way."""
    snapshot: Snapshot | None = None
    offset: int = 0
    """Bytes of the snapshot that it has."""
    round: int = 0
    """The last round that it answered."""

    def probe(self, next: int) -> None:
        """Find out where its log ends."""
        self.mode, self.next, self.paused = Mode.PROBE, max(next, self.match + 1), False
        self.flight.clear()
        self.snapshot = None

    def send_snapshot(self, snapshot: Snapshot) -> None:
        """Send it a snapshot."""
        self.mode, self.snapshot, self.offset, self.paused = Mode.SNAPSHOT, snapshot, 0, False
        self.flight.clear()

    def has(self, index: int) -> bool:
        """It has the log up to here; whether that is news."""
        news = index > self.match
        self.match = max(self.match, index)
        if self.mode is Mode.STREAM:
            self.next = max(self.next, index + 1)
            self.flight = [last for last in self.flight if last > index]
        elif self.mode is Mode.PROBE or (self.snapshot and index >= self.snapshot.index):
            self.mode, self.next, self.paused = Mode.STREAM, self.match + 1, False
            self.snapshot = None
        return news
