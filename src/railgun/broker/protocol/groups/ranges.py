"""Sorted disjoint ranges of offsets, each with a value: the compact state of a group with millions of messages.

A group delivers, takes back and settles messages by the thousand, so no operation works message by message:

1. A range is [first, end). Ranges do not overlap, and adjacent ranges with equal values are merged.
2. Ranges are stored in chunks of at most `2 * CHUNK_RANGES`. Each chunk has an array of starts and one of ends (8 bytes
   each) and a list of values. A lookup is a bisection; a change moves at most the rest of one chunk, however many
   ranges there are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Generic, TypeVar

V = TypeVar("V")
CHUNK_RANGES: Final = 256  # ranges in a chunk after a split


class Ranges(Generic[V]):
    """Disjoint ranges with values, the lowest first.

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

    __hash__ = None  # type: ignore[assignment]  # ranges are mutable

    def __repr__(self) -> str:
        return f"Ranges({list(self)!r})"

    @property
    def first(self) -> int | None:
        """Return the lowest offset, or None if there are no ranges."""
        return self._lows[0] if self._lows else None

    @property
    def end(self) -> int | None:
        """Return one past the highest offset, or None if there are no ranges."""
        return self._ends[-1][-1] if self._lows else None

    @classmethod
    def of(cls, starts: array[int], ends: array[int], values: Sequence[V]) -> Ranges[V]:
        """Return the ranges from their `columns`."""
        ranges: Ranges[V] = cls()
        ranges.total = sum(ends) - sum(starts)
        for at in range(0, len(starts), CHUNK_RANGES):
            to = at + CHUNK_RANGES
            ranges._lows.append(starts[at])
            ranges._starts.append(starts[at:to])
            ranges._ends.append(ends[at:to])
            ranges._values.append(list(values[at:to]))
        return ranges

    def columns(self) -> tuple[array[int], array[int], list[V]]:
        """Return the starts, the ends and the values of all ranges.

        >>> Ranges([(0, 10, "a"), (20, 30, "b")]).columns()
        (array('q', [0, 20]), array('q', [10, 30]), ['a', 'b'])
        """
        starts, ends, values = array("q"), array("q"), list[V]()
        for chunk in zip(self._starts, self._ends, self._values, strict=True):
            starts += chunk[0]
            ends += chunk[1]
            values += chunk[2]
        return starts, ends, values

    def copy(self) -> Ranges[V]:
        """Return an independent copy."""
        copied: Ranges[V] = Ranges()
        copied.total = self.total
        copied._lows = self._lows.copy()
        copied._starts = [starts[:] for starts in self._starts]
        copied._ends = [ends[:] for ends in self._ends]
        copied._values = [values.copy() for values in self._values]
        return copied

    def clear(self) -> None:
        """Remove all ranges, and so all offsets."""
        self.total = 0
        self._lows.clear()
        self._starts.clear()
        self._ends.clear()
        self._values.clear()

    def pieces(self, first: int, end: int) -> list[tuple[int, int, V]]:
        """Return the ranges within [first, end), cut to it.

        >>> Ranges([(0, 10, "a"), (20, 30, "b")]).pieces(8, 21)
        [(8, 10, 'a'), (20, 21, 'b')]
        """
        pieces: list[tuple[int, int, V]] = []
        chunk = max(bisect_right(self._lows, first) - 1, 0)
        while chunk < len(self._lows) and self._lows[chunk] < end:
            starts, ends, values = self._starts[chunk], self._ends[chunk], self._values[chunk]
            low, high = bisect_right(ends, first), bisect_left(starts, end)
            for at in range(low, high):
                pieces.append((max(starts[at], first), min(ends[at], end), values[at]))
            chunk += 1
        return pieces

    def set(self, first: int, end: int, value: V) -> None:
        """Give [first, end) this value, replacing earlier values. Raises `ValueError` if the range is empty."""
        if first >= end:
            raise ValueError(f"a range has at least one offset, not [{first}, {end})")
        self.remove(first, end)
        self._insert(first, end, value)

    def remove(self, first: int, end: int) -> list[tuple[int, int, V]]:
        """Remove [first, end); return the removed ranges with their values."""
        removed: list[tuple[int, int, V]] = []
        if first >= end:
            return removed
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
                removed.append((max(starts[at], first), min(ends[at], end), values[at]))
            if start < first:  # the lowest range begins below `first`: keep that part of it
                if stop > end and high == low + 1:  # it ends above `end`, too: split it
                    starts.insert(high, end)
                    ends.insert(high, stop)
                    values.insert(high, values[low])
                    stop = end
                ends[low] = first
                low += 1
            if stop > end:  # the highest range ends above `end`: keep that part of it
                high -= 1
                starts[high] = end
            del starts[low:high], ends[low:high], values[low:high]
            chunk += self._tidy(chunk)
        for first, end, _ in removed:
            self.total -= end - first
        return removed

    def pop(self, most: int, below: int) -> tuple[int, int, V] | None:
        """Remove and return the lowest range, cut to at most `most` offsets and to offsets below `below`.

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
        """Add a range that overlaps no other, merging it with neighbours of an equal value."""
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
        # The next range may be the first of the next chunk; the previous one is always in this chunk.
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
        """Drop a chunk that has become empty, or halve it if it is too large. Return how many chunks replace it."""
        starts, ends, values = self._starts[chunk], self._ends[chunk], self._values[chunk]
        if not values:
            del self._lows[chunk], self._starts[chunk], self._ends[chunk], self._values[chunk]
            return 0
        self._lows[chunk] = starts[0]
        if len(values) <= 2 * CHUNK_RANGES:
            return 1
        self._lows.insert(chunk + 1, starts[CHUNK_RANGES])
        self._starts.insert(chunk + 1, starts[CHUNK_RANGES:])
        self._ends.insert(chunk + 1, ends[CHUNK_RANGES:])
        self._values.insert(chunk + 1, values[CHUNK_RANGES:])
        del starts[CHUNK_RANGES:], ends[CHUNK_RANGES:], values[CHUNK_RANGES:]
        return 2


def _same(first: object, second: object) -> bool:
    return first is second or first == second
