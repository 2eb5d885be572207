"""Read items for a connector from iterables of any kind, in chunks."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeAlias

from railgun.ingest.errors import FeedError

Payload: TypeAlias = bytes | str
Item: TypeAlias = tuple[int, Payload] | tuple[int, Payload, str | None] | tuple[Any, ...]
"""An id and a payload, optionally followed by a key and a time (µs)."""
Items: TypeAlias = Iterable[Item] | AsyncIterable[Item] | AsyncIterable[list[Item]]
"""An async iterable may yield lists of items: the items of a list are sent together."""

MAX_CHUNK_ITEMS: Final = 1_000  # read at once from an iterable that yields quickly
QUICK_S: Final = 0.002  # a chunk read within this time doubles the size of the next
BIG_CHUNK_BYTES: Final = 512 << 10  # a chunk of this size halves the size of the next


def item_fields(item: Any) -> tuple[Any, Any, Any, Any]:
    """Return id, payload, key and time of an item; raise `FeedError` if it is no tuple of these.

    >>> item_fields((7, b"seven"))
    (7, b'seven', None, None)
    """
    try:
        count = len(item)
        return item[0], item[1], item[2] if count > 2 else None, item[3] if count > 3 else None
    except (TypeError, LookupError) as error:
        raise FeedError(
            f"an item is (id, payload), or (id, payload, key, time), not {item!r:.80}"
        ) from error


def iterator_of(items: Iterable[Item]) -> Iterator[Item]:
    """Return an iterator over `items`; raise `FeedError` if they are not iterable."""
    try:
        return iter(items)
    except TypeError as error:
        if inspect.iscoroutine(items):
            items.close()
        raise FeedError(
            f"feed takes an iterable of (id, payload), or a function that returns one, not {items!r:.80}"
        ) from error


class ChunkReader:
    """Reads items from an iterable in chunks: as many as it yields quickly, and not too large."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._iterator = iterator_of(items)
        self._count = 1
        self._error: Exception | None = None

    def take(self) -> list[Item]:
        """Return the next items; an empty list at the end. An error is raised after the items that preceded it."""
        if self._error is not None:
            raise self._error
        chunk, began = list[Item](), time.perf_counter()
        try:
            chunk.extend(islice(self._iterator, self._count))
        except Exception as error:
            if not chunk:
                raise
            self._error = error
        quick = time.perf_counter() - began < QUICK_S
        try:
            size = sum(len(item[1]) for item in chunk)
        except (TypeError, LookupError):  # malformed items raise an error where they are sent
            size = 0
        next_count = 2 * self._count if quick and size < BIG_CHUNK_BYTES else self._count // 2
        self._count = max(1, min(next_count, MAX_CHUNK_ITEMS))
        return chunk


async def chunks(items: Items) -> AsyncGenerator[Sequence[Item], None]:
    """Yield the items of an iterable in chunks; of an async iterable, as they come."""
    if isinstance(items, AsyncIterable):
        try:
            async for item in items:
                if not isinstance(item, list):
                    yield (item,)
                elif item:
                    yield item
        finally:
            if isinstance(items, AsyncGenerator):
                await items.aclose()
        return
    reader = ChunkReader(items)
    while chunk := reader.take():
        yield chunk
        await asyncio.sleep(0)
