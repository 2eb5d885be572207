"""Bound the bytes on their way to another node, of all streams: streams that lag behind wait for their turns.

A node that was away has many streams that lag behind. If each of them were fed as fast as possible, the data read from
their logs would fill the memory of both nodes. So a stream is read only when enough of what was sent before is on the
other node's disk. New messages do not wait: they are in memory anyway.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

MAX_UNCONFIRMED_BYTES: Final = 64 << 20  # by a node; a larger piece goes alone


class Flight:
    """Bytes on their way to a node."""

    def __init__(self, max_bytes: int = MAX_UNCONFIRMED_BYTES) -> None:
        self.size = 0
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Wait for room for `size` bytes, in order of the calls. Give it back with `give`."""
        if not self._waiting and self._fits(size):
            self.size += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            # The room was granted just before the cancellation: give it back.
            if turn.done() and not turn.cancelled():
                self.give(size)
            raise

    def add(self, size: int) -> None:
        """Count `size` bytes as on their way, whether there is room or not."""
        self.size += size

    def give(self, size: int) -> None:
        """Count `size` bytes as no longer on their way, and let waiting callers proceed."""
        self.size -= size
        while self._waiting and (self._waiting[0][1].done() or self._fits(self._waiting[0][0])):
            wanted, turn = self._waiting.popleft()
            if not turn.done():  # it was not cancelled
                self.size += wanted
                turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self.size or self.size + size <= self._max_bytes
