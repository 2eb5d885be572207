"""Keep the timers of keys: set for a time, fired in order of time as the frontier advances, moved with their keys."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final

_FEW_ENTRIES: Final = 64


class Timers:
    """A heap of times, and for each key the times that are set; cancelled times stay in the heap and are skipped.

    >>> timers = Timers()
    >>> timers.set("a", 5); timers.set("b", 3); timers.set("a", 4); timers.cancel("a", 4)
    >>> list(timers.due(5))
    [('b', 3), ('a', 5)]
    """

    __slots__ = ("_count", "_heap", "_live", "_of", "touch")

    def __init__(self) -> None:
        self.touch: Callable[[list[Any]], None] | None = None
        """Called with a key before one of its timers fires."""
        self._heap: list[tuple[int, int, Any]] = []
        self._of: dict[Any, set[int]] = {}
        self._count = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def __bool__(self) -> bool:
        return bool(self._of)

    def set(self, key: Any, at: int) -> None:
        """Set a timer for this key at this time."""
        times = self._of.setdefault(key, set())
        if at not in times:
            times.add(at)
            self._live += 1
            self._count += 1  # keys need not be comparable
            heapq.heappush(self._heap, (at, self._count, key))
            if len(self._heap) > 2 * self._live + _FEW_ENTRIES:
                self._clear_out()

    def earliest(self, key: Any) -> float:
        """Return when the first timer of a key is due; infinity if it has none."""
        return min(self._of.get(key, ()), default=math.inf)

    def cancel(self, key: Any, at: int) -> None:
        """Cancel the timer of this key at this time, if it is set."""
        times = self._of.get(key)
        if times is not None and at in times:
            times.discard(at)
            self._live -= 1
            if not times:
                del self._of[key]

    def forget(self, key: Any) -> None:
        """Cancel all timers of this key."""
        self._live -= len(self._of.pop(key, ()))

    def _clear_out(self) -> None:
        """Drop cancelled entries: a key that moves its timer with every item would fill the heap."""
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
        """Yield and fire the due timers, in order of time; also due ones that are set meanwhile."""
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
        """Yield and fire the due timers of one key, in order of time."""
        while True:
            times = [at for at in self._of.get(key, ()) if at <= frontier]
            if not times:
                return
            yield self._fire(key, min(times))[1]

    def soon(self, frontier: int, most: int) -> list[Any]:
        """Return the keys of up to `most` heap entries due next, in order; cancelled entries may be among them."""
        heap, keys = self._heap, list[Any]()
        front = [(heap[0], 0)] if heap else []
        while front and len(keys) < most:
            (at, _, key), place = heapq.heappop(front)
            if at > frontier:
                break
            keys.append(key)
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(heap):
                    heapq.heappush(front, (heap[below], below))
        return keys

    def in_order(self) -> list[Any]:
        """Return the keys of all timers set now, in order of time: a key as often as it has timers."""
        entries = ((at, key) for key, times in self._of.items() for at in times)
        return [key for _, key in sorted(entries, key=itemgetter(0))]

    def left(self) -> Iterator[tuple[Any, int]]:
        """Yield and fire all timers set now, in order, unless one is cancelled before its turn.

        Timers that are set meanwhile are not among them: a timer that sets the next one would never come to an end.
        """
        left = [(at, key) for key, times in self._of.items() for at in times]
        left.sort(key=itemgetter(0))
        self._heap.clear()  # with cancelled entries: one of these that is set anew is not fired either
        for at, key in left:
            if at in self._of.get(key, ()):
                yield self._fire(key, at)

    def left_of(self, key: Any) -> Iterator[int]:
        """Yield and fire all timers of one key that are set now, as `left` does."""
        for at in sorted(self._of.get(key, ())):
            if at in self._of.get(key, ()):
                yield self._fire(key, at)[1]

    def of(self, keys: Sequence[Any]) -> list[list[int]]:
        """Return the timers of each of these keys."""
        of = self._of
        return [sorted(of.get(key, ())) for key in keys]

    def leave(self, keys: Sequence[Any]) -> dict[Any, list[int]]:
        """Remove and return the timers of keys that leave."""
        if not self._of:
            return {}
        left = {key: sorted(self._of.pop(key)) for key in keys if key in self._of}
        self._live -= sum(map(len, left.values()))
        return left

    def enter(self, timers: dict[Any, list[int]]) -> None:
        """Set the timers of keys that have come from another worker."""
        for key, times in timers.items():
            for at in times:
                self.set(key, at)
