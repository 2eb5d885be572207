"""Timers of keys: set for a time, fired in order of time when the frontier has come there, moved with their keys."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any


class Timers:
    """A heap of times, and for each key the times that still count; what was cancelled stays in the heap unheeded.

    >>> timers = Timers()
    >>> timers.set("a", 5); timers.set("b", 3); timers.set("a", 4); timers.cancel("a", 4)
    >>> list(timers.due(5))
    [('b', 3), ('a', 5)]
    """

    __slots__ = ("_count", "_heap", "_of")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Any]] = []
        self._of: dict[Any, set[int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __bool__(self) -> bool:
        return bool(self._of)

    def set(self, key: Any, at: int) -> None:
        """Fire for this key at this time."""
        times = self._of.setdefault(key, set())
        if at not in times:
            times.add(at)
            self._count += 1  # keys need not be comparable
            heapq.heappush(self._heap, (at, self._count, key))

    def cancel(self, key: Any, at: int) -> None:
        """Do not fire for this key at this time."""
        times = self._of.get(key)
        if times is not None:
            times.discard(at)
            if not times:
                del self._of[key]

    def forget(self, key: Any) -> None:
        """Do not fire for this key at all."""
        self._of.pop(key, None)

    def due(self, frontier: int) -> Iterator[tuple[Any, int]]:
        """Those whose time has come, in order; also ones that are set meanwhile and are due."""
        heap = self._heap
        while heap and heap[0][0] <= frontier:
            at, _, key = heapq.heappop(heap)
            if at in self._of.get(key, ()):
                self.cancel(key, at)
                yield key, at

    def due_of(self, key: Any, frontier: int) -> Iterator[int]:
        """The times that have come for one key, in order."""
        while True:
            times = [at for at in self._of.get(key, ()) if at <= frontier]
            if not times:
                return
            at = min(times)
            self.cancel(key, at)
            yield at

    def leave(self, keys: Sequence[Any]) -> dict[Any, list[int]]:
        """The timers of keys that leave."""
        if not self._of:
            return {}
        return {key: sorted(self._of.pop(key)) for key in keys if key in self._of}

    def enter(self, timers: dict[Any, list[int]]) -> None:
        """The timers of keys that have come."""
        for key, times in timers.items():
            for at in times:
                self.set(key, at)
