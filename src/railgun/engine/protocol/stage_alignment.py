"""Align the barriers of several stages that lead into one stage, on one worker.

A stage sends the barrier of a snapshot behind its records. Records it sends later belong after the cut, so they wait
until the barriers of the other preceding stages have come as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from railgun.errors import ProtocolError

Event = TypeVar("Event")


class Alignment(Generic[Event]):
    """The preceding stages: which of them have sent the barrier, and the events they sent after it.

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
        """Return whether events from this stage have to wait."""
        return origin in self._here

    def wait(self, origin: int, event: Event) -> None:
        """Keep an event until `release`."""
        self._waiting.append((origin, event))

    def barrier(self, origin: int, snapshot: int) -> bool:
        """Take the barrier of a preceding stage; return whether all stages have sent theirs.

        Raise `ProtocolError` if the stage sent the barrier already, or another snapshot is being aligned.
        """
        if self._snapshot not in (None, snapshot) or origin in self._here:
            raise ProtocolError(
                f"the barrier of snapshot {snapshot} came from stage {origin} while {self._snapshot} is aligned"
            )
        self._snapshot = snapshot
        self._here.add(origin)
        return self._here >= self._before

    def release(self) -> list[tuple[int, Event]]:
        """Return the events that waited, in order: the barrier has gone on."""
        self._here, self._snapshot = set(), None
        waiting, self._waiting = self._waiting, []
        return waiting
