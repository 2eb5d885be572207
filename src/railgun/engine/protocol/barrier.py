"""Alignment of a snapshot at one worker of one stage.

A snapshot is a cut: everything sent before it is in it, nothing sent after it is. Its rules:

1. On the barrier of its own upstream a worker stops taking from upstream (`stopped`).
2. A worker whose stage is not in motion sends BAR2 on all its links at once: it forwards nothing.
3. A worker that may still forward records for others sends BAR1 at once, and BAR2 when it has BAR1 (or BAR2)
   from all and holds no key: then everything sent before the cut has come and has been passed on. Links
   from senders to homes and from homes to new owners form no circle, so this always ends.
4. From the moment it has BAR1 from all, it begins to move no further keys (else its hold might never be empty).
5. What arrives on a link behind that link's BAR2 belongs after the cut and waits (`behind`).
6. With BAR2 from all, its own sent, and nothing waiting, the worker takes its snapshot, and goes on with what
   waited: links first, then its own upstream.

One worker can be through with a migration while another is in the midst of it: BAR2 stands for BAR1 too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from railgun.engine.protocol.placement import Worker
from railgun.errors import ProtocolError

Event = TypeVar("Event")
Message = TypeVar("Message")


class Barrier(Generic[Event, Message]):
    """The snapshot being aligned, if there is one, and what waits behind it."""

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
        self.after = after  # the last snapshot that was taken
        self.snapshot: int | None = None
        self.stopped = False
        self.sent_first = False
        self.sent_last = False
        self.first: set[Worker] = set()
        self.last: set[Worker] = set()
        self.backlog: list[Event] = []
        self.behind: dict[Worker, list[Message]] = {}

    def stop(self, snapshot: int) -> None:
        """The barrier of the own upstream."""
        self._enter(snapshot)
        self.stopped = True

    def arrive(self, sender: Worker, snapshot: int, last: bool) -> None:
        """BAR1 or BAR2 (`last`) from a link."""
        self._enter(snapshot)
        if sender in self.last or (not last and sender in self.first):
            raise ProtocolError(f"worker {sender} sent the barrier of snapshot {snapshot} twice")
        (self.last if last else self.first).add(sender)

    def blocks(self, sender: Worker) -> bool:
        """Whether what comes from this link belongs after the cut."""
        return sender in self.last

    def wait_behind(self, sender: Worker, message: Message) -> None:
        """Keep a message that belongs after the cut."""
        self.behind.setdefault(sender, []).append(message)

    def all_first(self, peers: Iterable[Worker]) -> bool:
        """Whether everything sent before the cut has come."""
        return all(peer in self.first or peer in self.last for peer in peers)

    def all_last(self, peers: Iterable[Worker]) -> bool:
        """Whether everything forwarded before the cut has come as well."""
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
