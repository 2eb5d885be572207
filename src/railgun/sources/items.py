"""Use an iterable as a source, for tests and small jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from railgun.flows.errors import ConnectorError
from railgun.flows.source import Reader, Source

T = TypeVar("T")


class Items(Source[T]):
    """A source of the items of an iterable, in order; with several `partitions`, several workers read them.

    >>> reader = Items("abc").open(0, None)
    >>> reader.read(2, now=0), reader.position, reader.read(2, now=0), reader.read(2, now=0)
    (['a', 'b'], 2, ['c'], None)
    """

    def __init__(self, items: Iterable[T], *, partitions: int = 1) -> None:
        if partitions < 1:
            raise ConnectorError(f"Items needs at least one partition, not {partitions}")
        self.items = list(items)
        self.count = partitions

    def partitions(self) -> Sequence[int]:
        """Return the numbers of the parts; part `p` has every `count`-th item, from item `p` on."""
        return range(self.count)

    def layout(self) -> dict[str, int]:
        """Return how items are divided over parts, and how many there are."""
        return {"partitions": int(self.count), "items": len(self.items)}

    def as_of_now(self) -> Source[T]:
        """Return this source: its items are fixed."""
        return self

    def open(self, partition: Any, position: Any) -> Reader[T]:
        """Read the items of one part, from a position on."""
        return _Reader(self.items[partition :: self.count], position or 0)


class _Reader(Reader[T]):
    def __init__(self, items: list[T], position: int) -> None:
        self.items = items
        self.position: int = position

    def read(self, most: int, now: int) -> Sequence[T] | None:
        if self.position >= len(self.items):
            return None
        read = self.items[self.position : self.position + most]
        self.position += len(read)
        return read
