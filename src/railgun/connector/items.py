"""What a connector is given to send: items, from iterables of any kind, some at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, TypeAlias

Payload: TypeAlias = bytes | str
Item: TypeAlias = tuple[int, Payload] | tuple[int, Payload, str | None] | tuple[Any, ...]
"""An id and a payload; then a key and a time (µs), if they are wanted."""
Items: TypeAlias = Iterable[Item] | AsyncIterable[Item] | AsyncIterable[list[Item]]
"""An async iterable may bring lists of items: what is in one is sent together."""

CHUNK: Final = 1_000  # items that are taken at once from who brings them quickly
QUICK: Final = 0.002  # seconds
HUGE: Final = 512 << 10  # bytes


def key_of(item: Sequence[Any]) -> Any:
    """The key of an item, if it has one."""
    return item[2] if len(item) > 2 else None


def time_of(item: Sequence[Any]) -> Any:
    """The time of an item, if it has one."""
    return item[3] if len(item) > 3 else None


class Taking:
    """Takes items from an iterable, some at a time: as many as it brings quickly, and not too large."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._iterator = iter(items)
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
        size = sum(len(item[1]) for item in some if len(item) > 1 and hasattr(item[1], "__len__"))
        many = 2 * self._many if quick and size < HUGE else self._many // 2
        self._many = max(1, min(many, CHUNK))
        return some


async def chunks(items: Items) -> AsyncGenerator[Sequence[Item], None]:
    """What an iterable brings, some at a time; of an async one, one at a time."""
    if isinstance(items, AsyncIterable):
        try:
            async for item in items:
                yield item if isinstance(item, list) else (item,)
        finally:
            if isinstance(items, AsyncGenerator):
                await items.aclose()
        return
    taking = Taking(items)
    while some := taking.take():
        yield some
        await asyncio.sleep(0)
