"""What is sent over a connection: a frame that comes alone at once, those that follow closely together.

So a single request or answer does not wait for the next turn of the event loop, and takes no turn more than it needs:
each is another call of the system. A thousand in one turn cost two writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from railgun.transport.commands import Blob

CLOSELY: Final = 50e-6  # seconds
LARGE: Final = 64 << 10  # bytes that are not put together with others


class Outbox:
    """Frames on their way into one transport."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        flushed: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._flushed = flushed  # called when what was sent in a turn has gone to the transport
        self._pieces: list[Blob] = []
        self._turn = False  # whether there will be a flush
        self._last = 0.0  # when the last frame came
        self._waiting = 0
        self.frames = 0
        """Frames that were given to `send`."""
        self.written = 0
        """Those of them that the transport has taken: the first so many. The others never left this process."""

    @property
    def unsent(self) -> int:
        """Bytes that wait, here and in the transport."""
        return self._waiting + self._transport.get_write_buffer_size()

    def send(self, pieces: list[Blob]) -> None:
        """Send the pieces of a frame."""
        self.frames += 1
        now = time.perf_counter()
        alone, self._last = now - self._last > CLOSELY, now
        if alone and not self._turn:
            self._write(pieces)
            return
        self._pieces += pieces
        self._waiting += sum(map(len, pieces))
        if not self._turn:
            self._turn = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Let go what was sent in this turn."""
        self._turn = False
        if self._pieces:
            pieces, self._pieces, self._waiting = self._pieces, [], 0
            self._write(pieces)
        if self._flushed is not None:
            self._flushed()

    def _write(self, pieces: list[Blob]) -> None:
        if self._transport.is_closing():
            return
        self.written = self.frames
        small: list[Blob] = []
        for piece in pieces:
            if len(piece) < LARGE:
                small.append(piece)
                continue
            if small:
                self._transport.write(b"".join(small))
                small = []
            self._transport.write(piece)  # one call more is cheaper than a copy
        if small:
            self._transport.write(b"".join(small))
