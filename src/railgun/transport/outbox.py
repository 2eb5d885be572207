"""Send frames over a connection: a single frame at once, frames in quick succession together.

So a single request or answer does not wait for the next turn of the event loop, and costs no extra turn, which is
another system call. A thousand frames in one turn cost two writes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from railgun.transport.commands import Blob

CLOSE_TOGETHER_S: Final = 50e-6  # frames at most so far apart are sent together
LARGE_PIECE_BYTES: Final = 64 << 10  # a piece of this size is not joined with others


class Outbox:
    """The frames that are written to one transport."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        flushed: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._flushed = flushed  # called when the frames of a turn have been written
        self._pieces: list[Blob] = []
        self._scheduled = False  # whether a flush is scheduled
        self._last = 0.0  # when the last frame was sent
        self._waiting = 0  # bytes in `_pieces`
        self.frames = 0
        """The number of frames passed to `send`."""
        self.written = 0
        """The number of frames written to the transport, in order. Later frames never left this process."""

    @property
    def unsent(self) -> int:
        """The number of bytes that wait, here and in the transport."""
        return self._waiting + self._transport.get_write_buffer_size()

    def send(self, pieces: list[Blob]) -> None:
        """Send a frame, given as pieces: now if it comes alone, else at the end of this turn of the event loop."""
        self.frames += 1
        now = time.perf_counter()
        alone, self._last = now - self._last > CLOSE_TOGETHER_S, now
        if alone and not self._scheduled:
            self._write(pieces)
            return
        self._pieces += pieces
        self._waiting += sum(map(len, pieces))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write the frames of this turn to the transport."""
        self._scheduled = False
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
            if len(piece) < LARGE_PIECE_BYTES:
                small.append(piece)
                continue
            if small:
                self._transport.write(b"".join(small))
                small = []
            self._transport.write(piece)  # one call more is cheaper than a copy
        if small:
            self._transport.write(b"".join(small))
