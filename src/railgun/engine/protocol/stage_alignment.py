"""Where several stages lead into one on a worker: what they send waits for the barrier of them all.

A stage puts the barrier of a snapshot behind what it has sent. What it sends after that belongs after the cut, so it
waits until the barriers of the other stages before have come as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from railgun.errors import ProtocolError

Event = TypeVar("Event")


class Alignment(Generic[Event]):
    """The stages before, which of them have sent the barrier, and what came from those since.

    >>> alignment = Alignment([0, 1])
    >>> alignment.barrier(0, 7), alignment.waits(0), alignment.waits(1)
    (False, True, False)
    >>> alignment.wait(0, "a")
    >>> alignment.barrier(1, 7), alignment.release()
    (True, [(0, 'a')])
    """

    __slots__ = ("_before", "_here", "_snapshot", "_waiting")

    def __init__(self, before: Iterable[int]) -> None:
        self._before = frozenset(before)
        self._here: set[int] = set()
        self._snapshot: int | None = None
        self._waiting: list[tuple[int, Event]] = []

    def waits(self, origin: int) -> bool:
        """Whether what comes from this stage has to wait."""
        return origin in self._here

    def wait(self, origin: int, event: Event) -> None:
        """Keep it."""
        self._waiting.append((origin, event))

    def barrier(self, origin: int, snapshot: int) -> bool:
        """A stage has sent its barrier; whether all have now."""
        if self._snapshot not in (None, snapshot) or origin in self._here:
            raise ProtocolError(
                f"the barrier of snapshot {snapshot} came from stage {origin} while {self._snapshot} is aligned"
            )
        self._snapshot = snapshot
        self._here.add(origin)
        return self._here >= self._before

    def release(self) -> list[tuple[int, Event]]:
        """The barrier has gone on: what waited, in order."""
        self._here, self._snapshot = set(), None
        waiting, self._waiting = self._waiting, []
        return waiting
