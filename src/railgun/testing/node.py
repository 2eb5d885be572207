"""Run a real broker in a thread of its own, for synchronous code such as tests and the demo."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from railgun.broker.server.server import Server, ServerConfig

DEADLINE = 10.0  # seconds


class Served:
    """A broker in a thread that can be stopped and started again on the same port."""

    def __init__(self, data: Path, clock: Callable[[], int] | None = None) -> None:
        self.data = data
        self.clock = clock
        self.port = 0
        self.loop: asyncio.AbstractEventLoop
        self.server: Server
        self._stop: asyncio.Event
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the broker, on the same port as before."""
        started = threading.Event()

        async def main() -> None:
            self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            server = Server(ServerConfig(self.data, port=self.port), clock=self.clock)
            self.server = server
            await server.start()
            self.port = server.port
            started.set()
            await self._stop.wait()
            await server.stop()

        self._thread = threading.Thread(target=asyncio.run, args=(main(),))
        self._thread.start()
        assert started.wait(DEADLINE)

    def stop(self) -> None:
        """Stop the broker in good order."""
        if self._thread is not None:
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._thread = None


@contextlib.contextmanager
def served(data: Path, clock: Callable[[], int] | None = None) -> Iterator[Served]:
    """Run a broker within this block; `clock` returns the time (µs)."""
    broker = Served(data, clock)
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()
