"""Timers of keys: set for a time, fired in order of time when the frontier has come there, moved with their keys."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

_FEW: Final = 64


class Timers:
    """A heap of times, and for each key the times that still count; what was cancelled stays in the heap unheeded.

    >>> timers = Timers()
    >>> timers.set("a", 5); timers.set("b", 3); timers.set("a", 4); timers.cancel("a", 4)
    >>> list(timers.due(5))
    [('b', 3), ('a', 5)]
    """

    __slots__ = ("_count", "_heap", "_live", "_of", "touch")

    def __init__(self) -> None:
        self.touch: Callable[[list[Any]], None] | None = None
        """Called for a key before a timer of it fires."""
        self._heap: list[tuple[int, int, Any]] = []
        self._of: dict[Any, set[int]] = {}
        self._count = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def __bool__(self) -> bool:
        return bool(self._of)

    def set(self, key: Any, at: int) -> None:
        """Fire for this key at this time."""
        times = self._of.setdefault(key, set())
        if at not in times:
            times.add(at)
            self._live += 1
            self._count += 1  # keys need not be comparable
            heapq.heappush(self._heap, (at, self._count, key))
            if len(self._heap) > 2 * self._live + _FEW:
                self._clear_out()

    def earliest(self, key: Any) -> float:
        """When the first timer of a key is due; never, if it has none."""
        return min(self._of.get(key, ()), default=math.inf)

    def cancel(self, key: Any, at: int) -> None:
        """Do not fire for this key at this time."""
        times = self._of.get(key)
        if times is not None and at in times:
            times.discard(at)
            self._live -= 1
            if not times:
                del self._of[key]

    def forget(self, key: Any) -> None:
        """Do not fire for this key at all."""
        self._live -= len(self._of.pop(key, ()))

    def _clear_out(self) -> None:
        """Drop what no longer counts: a key that moves its timer with every item would fill the heap."""
        seen: set[tuple[Any, int]] = set()
        live = []
        for entry in sorted(self._heap, key=lambda entry: entry[1]):
            at, _, key = entry
            if at in self._of.get(key, ()) and (key, at) not in seen:
                seen.add((key, at))
                live.append(entry)
        heapq.heapify(live)
        self._heap[:] = live

    def due(self, frontier: int) -> Iterator[tuple[Any, int]]:
        """Those whose time has come, in order; also ones that are set meanwhile and are due."""
        heap = self._heap
        while heap and heap[0][0] <= frontier:
            at, _, key = heapq.heappop(heap)
            if at in self._of.get(key, ()):
                yield self._fire(key, at)

    def _fire(self, key: Any, at: int) -> tuple[Any, int]:
        if self.touch is not None:
            self.touch([key])
        self.cancel(key, at)
        return key, at

    def due_of(self, key: Any, frontier: int) -> Iterator[int]:
        """The times that have come for one key, in order."""
        while True:
            times = [at for at in self._of.get(key, ()) if at <= frontier]
            if not times:
                return
            yield self._fire(key, min(times))[1]

    def soon(self, frontier: int, most: int) -> list[Any]:
        """The keys of up to so many entries that are due next, in order; some of them may not count any more."""
        heap, found = self._heap, list[Any]()
        front = [(heap[0], 0)] if heap else []
        while front and len(found) < most:
            (at, _, key), place = heapq.heappop(front)
            if at > frontier:
                break
            found.append(key)
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(heap):
                    heapq.heappush(front, (heap[below], below))
        return found

    def in_order(self) -> list[Any]:
        """The keys of all that are set now, in order of time: a key as often as it has timers."""
        entries = ((at, key) for key, times in self._of.items() for at in times)
        return [key for _, key in sorted(entries, key=itemgetter(0))]

    def left(self) -> Iterator[tuple[Any, int]]:
        """All that are set now, in order, unless one is cancelled before its turn. Ones that are set meanwhile are not
        among them: a timer that sets the next one would never come to an end.
        """
        left = [(at, key) for key, times in self._of.items() for at in times]
        left.sort(key=itemgetter(0))
        self._heap.clear()  # with what was cancelled: one of these that is set anew is not among them either
        for at, key in left:
            if at in self._of.get(key, ()):
                yield self._fire(key, at)

    def left_of(self, key: Any) -> Iterator[int]:
        """The same, of one key."""
        for at in sorted(self._of.get(key, ())):
            if at in self._of.get(key, ()):
                yield self._fire(key, at)[1]

    def of(self, keys: Sequence[Any]) -> list[list[int]]:
        """The timers of each of these keys."""
        of = self._of
        return [sorted(of.get(key, ())) for key in keys]

    def leave(self, keys: Sequence[Any]) -> dict[Any, list[int]]:
        """The timers of keys that leave."""
        if not self._of:
            return {}
        left = {key: sorted(self._of.pop(key)) for key in keys if key in self._of}
        self._live -= sum(map(len, left.values()))
        return left

    def enter(self, timers: dict[Any, list[int]]) -> None:
        """The timers of keys that have come."""
        for key, times in timers.items():
            for at in times:
                self.set(key, at)
