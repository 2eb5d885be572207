"""What a connector is given to send: items, from iterables of any kind, some at a time."""

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
"""An id and a payload; then a key and a time (µs), if they are wanted."""
Items: TypeAlias = Iterable[Item] | AsyncIterable[Item] | AsyncIterable[list[Item]]
"""An async iterable may bring lists of items: what is in one is sent together."""

CHUNK: Final = 1_000  # items that are taken at once from who brings them quickly
QUICK: Final = 0.002  # seconds
HUGE: Final = 512 << 10  # bytes


def parts(item: Any) -> tuple[Any, Any, Any, Any]:
    """Id, payload, key and time of an item; raises `FeedError` if it is none.

    >>> parts((7, b"seven"))
    (7, b'seven', None, None)
    """
    try:
        count = len(item)
        return item[0], item[1], item[2] if count > 2 else None, item[3] if count > 3 else None
    except (TypeError, LookupError) as error:
        raise FeedError(
            f"what is sent is (id, payload), or (id, payload, key, time), not {item!r:.80}"
        ) from error


def iterated(items: Iterable[Item]) -> Iterator[Item]:
    """What an iterable brings; raises `FeedError` if it is none."""
    try:
        return iter(items)
    except TypeError as error:
        if inspect.iscoroutine(items):
            items.close()
        raise FeedError(
            f"what is fed is an iterable of (id, payload), or what yields them, not {items!r:.80}"
        ) from error


class Taking:
    """Takes items from an iterable, some at a time: as many as it brings quickly, and not too large."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._iterator = iterated(items)
        self._many = 1
        self._error: Exception | None = None

    def take(self) -> list[Item]:
        """Some; none: it has come to its end. What it raises comes after what it brought before."""
        if self._error is not None:
            raise self._error
        some, began = list[Item](), time.perf_counter()
        try:
            some.extend(islice(self._iterator, self._many))
        except Exception as error:
            if not some:
                raise
            self._error = error
        quick = time.perf_counter() - began < QUICK
        try:
            size = sum(len(item[1]) for item in some)
        except (TypeError, LookupError):  # odd ones, which are told of where they are sent
            size = 0
        many = 2 * self._many if quick and size < HUGE else self._many // 2
        self._many = max(1, min(many, CHUNK))
        return some


async def chunks(items: Items) -> AsyncGenerator[Sequence[Item], None]:
    """What an iterable brings, some at a time; of an async one, one at a time."""
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
    taking = Taking(items)
    while some := taking.take():
        yield some
        await asyncio.sleep(0)
