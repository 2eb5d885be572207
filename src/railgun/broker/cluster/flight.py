"""What is on its way to another node, of all streams: those that lag behind wait for their turns.

A node that was away has many streams that lag behind. Were each of them fed as fast as it can be, what is read from
their logs would fill the memory of both nodes. So it is read when enough of what was sent before is on the other disk.
What is new is not kept waiting: it is in memory anyway.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

MOST: Final = 64 << 20  # bytes that a node has not confirmed; a piece that is larger goes alone


class Flight:
    """Bytes that are on their way to a node."""

    def __init__(self, most: int = MOST) -> None:
        self.size = 0
        self._most = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Wait for so much room, behind those who have waited longer; it is to be given back."""
        if not self._waiting and self._fits(size):
            self.size += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was its turn just now
                self.give(size)
            raise

    def add(self, size: int) -> None:
        """So much is on its way, be there room or not."""
        self.size += size

    def give(self, size: int) -> None:
        """So much is not on its way any more."""
        self.size -= size
        while self._waiting and (self._waiting[0][1].done() or self._fits(self._waiting[0][0])):
            wanted, turn = self._waiting.popleft()
            if not turn.done():  # it waits still
                self.size += wanted
                turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self.size or self.size + size <= self._most
