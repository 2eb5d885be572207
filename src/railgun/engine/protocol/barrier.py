"""Align a snapshot at one worker of one stage.

A snapshot is a cut: everything sent before it is in it, nothing sent after it is. Its rules:

1. On the barrier of its own upstream a worker stops taking events from upstream (`stopped`).
2. A worker whose stage is not migrating sends BAR2 on all its links at once: it forwards no records.
3. A worker that may still forward records for others sends BAR1 at once, and BAR2 when it has BAR1 (or BAR2)
   from all peers and holds no key: then everything sent before the cut has arrived and been forwarded. Links
   from senders to homes and from homes to new owners form no cycle, so this always ends.
4. From the moment it has BAR1 from all, it moves no further keys (else its hold might never be empty).
5. Messages behind a link's BAR2 belong after the cut and wait (`behind`).
6. With BAR2 from all peers, its own BAR2 sent, and no arrival waiting, the worker takes its snapshot. Then it handles
   the messages that waited: links first, then its own upstream.

One worker can have completed a migration while another still migrates: BAR2 stands for BAR1 too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from railgun.engine.protocol.placement import Worker
from railgun.errors import ProtocolError

Event = TypeVar("Event")
Message = TypeVar("Message")


class Barrier(Generic[Event, Message]):
    """The snapshot being aligned, if any, and the events and messages that wait behind it."""

    __slots__ = (
        "after",
        "backlog",
        "behind",
        "first",
        "last",
        "sent_first",
        "sent_last",
        "snapshot",
        "stopped",
    )

    def __init__(self, after: int = -1) -> None:
        self.after = after  # the last snapshot taken
        self.snapshot: int | None = None
        self.stopped = False
        self.sent_first = False
        self.sent_last = False
        self.first: set[Worker] = set()
        self.last: set[Worker] = set()
        self.backlog: list[Event] = []
        self.behind: dict[Worker, list[Message]] = {}

    def stop(self, snapshot: int) -> None:
        """Take the barrier of the worker's own upstream."""
        self._enter(snapshot)
        self.stopped = True

    def arrive(self, sender: Worker, snapshot: int, last: bool) -> None:
        """Take BAR1 or BAR2 (`last`) from a link; raise `ProtocolError` if it came twice."""
        self._enter(snapshot)
        if sender in self.last or (not last and sender in self.first):
            raise ProtocolError(f"worker {sender} sent the barrier of snapshot {snapshot} twice")
        (self.last if last else self.first).add(sender)

    def blocks(self, sender: Worker) -> bool:
        """Return whether messages from this link belong after the cut."""
        return sender in self.last

    def wait_behind(self, sender: Worker, message: Message) -> None:
        """Keep a message that belongs after the cut."""
        self.behind.setdefault(sender, []).append(message)

    def all_first(self, peers: Iterable[Worker]) -> bool:
        """Return whether everything these peers sent before the cut has come."""
        return all(peer in self.first or peer in self.last for peer in peers)

    def all_last(self, peers: Iterable[Worker]) -> bool:
        """Return whether everything these peers sent or forwarded before the cut has come."""
        return all(peer in self.last for peer in peers)

    def _enter(self, snapshot: int) -> None:
        if snapshot <= self.after:
            raise ProtocolError(
                f"a barrier of snapshot {snapshot} came after {self.after} was taken"
            )
        if self.snapshot is None:
            self.snapshot = snapshot
        elif self.snapshot != snapshot:
            raise ProtocolError(
                f"a barrier of snapshot {snapshot} came while {self.snapshot} is being aligned"
            )
