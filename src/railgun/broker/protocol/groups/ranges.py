"""Sorted disjoint ranges of offsets, each with a value: what a group knows of a million messages in a few lines.

A group hands out, takes back and settles messages by the thousand, so nothing here is done message by message:

1. A range is [first, end). Ranges do not overlap, and two that touch and have equal values are one.
2. The ranges lie in chunks of at most `2 * LOAD`, each an array of starts and one of ends (8 bytes each) beside a
   list of values. Finding is a bisection; a change moves the rest of one chunk at most, however many ranges there
   are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Generic, TypeVar

V = TypeVar("V")
LOAD: Final = 256


class Ranges(Generic[V]):
    """Disjoint ranges with values, lowest first.

    >>> ranges = Ranges([(0, 10, "a"), (20, 30, "b")])
    >>> ranges.set(10, 20, "a")
    >>> list(ranges)
    [(0, 20, 'a'), (20, 30, 'b')]
    >>> ranges.remove(5, 22)
    [(5, 20, 'a'), (20, 22, 'b')]
    >>> list(ranges), ranges.total
    ([(0, 5, 'a'), (22, 30, 'b')], 13)
    """

    __slots__ = ("_ends", "_lows", "_starts", "_values", "total")

    def __init__(self, pieces: Iterable[tuple[int, int, V]] = ()) -> None:
        self.total = 0  # offsets in all ranges
        self._lows: list[int] = []  # where each chunk begins
        self._starts: list[array[int]] = []
        self._ends: list[array[int]] = []
        self._values: list[list[V]] = []
        for first, end, value in pieces:
            self.set(first, end, value)

    def __len__(self) -> int:
        return sum(map(len, self._values))

    def __bool__(self) -> bool:
        return bool(self._lows)

    def __iter__(self) -> Iterator[tuple[int, int, V]]:
        for starts, ends, values in zip(self._starts, self._ends, self._values, strict=True):
            yield from zip(starts, ends, values, strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"Ranges({list(self)!r})"

    @property
    def first(self) -> int | None:
        """The lowest offset, if there is any."""
        return self._lows[0] if self._lows else None

    @property
    def end(self) -> int | None:
        """One past the highest offset, if there is any."""
        return self._ends[-1][-1] if self._lows else None

    @classmethod
    def of(cls, starts: array[int], ends: array[int], values: Sequence[V]) -> Ranges[V]:
        """Those that `columns` told."""
        made: Ranges[V] = cls()
        made.total = sum(ends) - sum(starts)
        for at in range(0, len(starts), LOAD):
            to = at + LOAD
            made._lows.append(starts[at])
            made._starts.append(starts[at:to])
            made._ends.append(ends[at:to])
            made._values.append(list(values[at:to]))
        return made

    def columns(self) -> tuple[array[int], array[int], list[V]]:
        """Where the ranges begin, where they end, and their values.

        >>> Ranges([(0, 10, "a"), (20, 30, "b")]).columns()
        (array('q', [0, 20]), array('q', [10, 30]), ['a', 'b'])
        """
        starts, ends, values = array("q"), array("q"), list[V]()
        for some_starts, some_ends, some in zip(
            self._starts, self._ends, self._values, strict=True
        ):
            starts += some_starts
            ends += some_ends
            values += some
        return starts, ends, values

    def copy(self) -> Ranges[V]:
        """Another one that is equal."""
        twin: Ranges[V] = Ranges()
        twin.total = self.total
        twin._lows = self._lows.copy()
        twin._starts = [starts[:] for starts in self._starts]
        twin._ends = [ends[:] for ends in self._ends]
        twin._values = [values.copy() for values in self._values]
        return twin

    def clear(self) -> None:
        """No ranges."""
        self.total = 0
        self._lows.clear()
        self._starts.clear()
        self._ends.clear()
        self._values.clear()

    def pieces(self, first: int, end: int) -> list[tuple[int, int, V]]:
        """What lies in [first, end), cut to it.

        >>> Ranges([(0, 10, "a"), (20, 30, "b")]).pieces(8, 21)
        [(8, 10, 'a'), (20, 21, 'b')]
        """
        found: list[tuple[int, int, V]] = []
        chunk = max(bisect_right(self._lows, first) - 1, 0)
        while chunk < len(self._lows) and self._lows[chunk] < end:
            starts, ends, values = self._starts[chunk], self._ends[chunk], self._values[chunk]
            low, high = bisect_right(ends, first), bisect_left(starts, end)
            for at in range(low, high):
                found.append((max(starts[at], first), min(ends[at], end), values[at]))
            chunk += 1
        return found

    def set(self, first: int, end: int, value: V) -> None:
        """[first, end) has this value from now on, whatever was there."""
        if first >= end:
            raise ValueError(f"a range has at least one offset, not [{first}, {end})")
        self.remove(first, end)
        self._insert(first, end, value)

    def remove(self, first: int, end: int) -> list[tuple[int, int, V]]:
        """Take [first, end) out; what was there."""
        found: list[tuple[int, int, V]] = []
        if first >= end:
            return found
        lows = self._lows
        chunk = max(bisect_right(lows, first) - 1, 0)
        while chunk < len(lows) and lows[chunk] < end:
            starts, ends, values = self._starts[chunk], self._ends[chunk], self._values[chunk]
            low = bisect_right(ends, first)
            if low == len(ends):
                chunk += 1
                continue
            high = bisect_left(starts, end, low)
            if low == high:
                break
            start, stop = starts[low], ends[high - 1]
            for at in range(low, high):
                found.append((max(starts[at], first), min(ends[at], end), values[at]))
            if start < first:  # it sticks out below, and stays so far
                if stop > end and high == low + 1:  # and above: it becomes two
                    starts.insert(high, end)
                    ends.insert(high, stop)
                    values.insert(high, values[low])
                    stop = end
                ends[low] = first
                low += 1
            if stop > end:  # it sticks out above
                high -= 1
                starts[high] = end
            del starts[low:high], ends[low:high], values[low:high]
            chunk += self._tidy(chunk)
        for first, end, _ in found:
            self.total -= end - first
        return found

    def pop(self, most: int, below: int) -> tuple[int, int, V] | None:
        """Take out the lowest range, of it at most `most` offsets, and those below `below` only.

        >>> ranges = Ranges([(3, 10, "a")])
        >>> ranges.pop(4, 100), ranges.pop(4, 9), ranges.pop(4, 9)
        ((3, 7, 'a'), (7, 9, 'a'), None)
        """
        if not self._lows or self._lows[0] >= below:
            return None
        starts, ends, values = self._starts[0], self._ends[0], self._values[0]
        first, value = starts[0], values[0]
        end = min(ends[0], first + most, below)
        if end < ends[0]:
            starts[0] = self._lows[0] = end
        else:
            del starts[0], ends[0], values[0]
            self._tidy(0)
        self.total -= end - first
        return first, end, value

    def _insert(self, first: int, end: int, value: V) -> None:
        """Add a range where there is none, as one with its neighbours if they are equal."""
        self.total += end - first
        if not self._lows:
            self._lows.append(first)
            self._starts.append(array("q", [first]))
            self._ends.append(array("q", [end]))
            self._values.append([value])
            return
        chunk = max(bisect_right(self._lows, first) - 1, 0)
        starts, ends, values = self._starts[chunk], self._ends[chunk], self._values[chunk]
        at = bisect_right(starts, first)
        # The one after it may be the first of the next chunk; the one before it never lies in another.
        after, place = (chunk, at) if at < len(starts) else (chunk + 1, 0)
        before = at > 0 and ends[at - 1] == first and _same(values[at - 1], value)
        joins = (
            after < len(self._lows)
            and self._starts[after][place] == end
            and _same(self._values[after][place], value)
        )
        if before and joins:
            ends[at - 1] = self._ends[after][place]
            del self._starts[after][place], self._ends[after][place], self._values[after][place]
            self._tidy(after)
        elif before:
            ends[at - 1] = end
        elif joins:
            self._starts[after][place] = first
            self._tidy(after)
        else:
            starts.insert(at, first)
            ends.insert(at, end)
            values.insert(at, value)
            self._tidy(chunk)

    def _tidy(self, chunk: int) -> int:
        """After a chunk changed: drop it if it is empty, halve it if it is large. How many there are in its place."""
        starts, ends, values = self._starts[chunk], self._ends[chunk], self._values[chunk]
        if not values:
            del self._lows[chunk], self._starts[chunk], self._ends[chunk], self._values[chunk]
            return 0
        self._lows[chunk] = starts[0]
        if len(values) <= 2 * LOAD:
            return 1
        self._lows.insert(chunk + 1, starts[LOAD])
        self._starts.insert(chunk + 1, starts[LOAD:])
        self._ends.insert(chunk + 1, ends[LOAD:])
        self._values.insert(chunk + 1, values[LOAD:])
        del starts[LOAD:], ends[LOAD:], values[LOAD:]
        return 2


def _same(one: object, other: object) -> bool:
    return one is other or one == other
