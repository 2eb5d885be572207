"""SyncConnector: a `Connector` for programs without an event loop. It works in a thread of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from railgun.connector.client import Connector
from railgun.connector.errors import FeedError
from railgun.connector.items import Item, Payload, Taking

R = TypeVar("R")
PATIENCE: Final = 2.0
TOGETHER: Final = 500  # messages that are handed over at once


class SyncConnector:
    """Pushes streams into a flow; takes what `Connector` takes.

    with SyncConnector("orders") as c:
        c.send("gateway-7", 0, b'{"price": 3}')
    """

    def __init__(self, flow: str, **options: Any) -> None:
        self._connector = Connector(flow, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="railgun-connector", daemon=True
        )
        self._waiting: list[tuple[str, int, Payload, str | None, int | None]] = []
        self._handing = False
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._room = threading.Event()
        self._room.set()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def open(self) -> None:
        """Connect; raises `NoFlowError` if that does not succeed in time."""
        if self._thread.ident is not None:
            raise FeedError("a connector is opened once: make another one")
        self._thread.start()
        try:
            self._do(self._connector.open())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the connection; what is not acknowledged may or may not be taken."""
        if self._thread.is_alive():
            self._do(self._shut())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    async def _shut(self) -> None:
        await self._connector.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for patience in (PATIENCE, None):  # who waits hears that it is closed
            if left:
                _, left = await asyncio.wait(left, timeout=patience)
            for task in left:
                task.cancel()

    def send(
        self,
        stream: str,
        id: int,
        payload: Payload,
        *,
        key: str | None = None,
        time: int | None = None,
    ) -> None:
        """Send a message; waits while there is no room. What is wrong with one may be raised by a later call."""
        self._check()
        if not self._thread.is_alive():
            raise FeedError("this connector is closed, or not open")
        with self._lock:
            self._waiting.append((stream, id, payload, key, time))
            handing, self._handing = self._handing, True
            full = len(self._waiting) >= 20 * TOGETHER
            if full:
                self._room.clear()
        if not handing:
            self._loop.call_soon_threadsafe(self._hand_over)
        if full:
            self._room.wait()

    def _hand_over(self) -> None:
        self._handed = self._loop.create_task(self._send_waiting())

    async def _send_waiting(self) -> None:
        send = self._connector.send
        while True:
            with self._lock:
                some, self._waiting = self._waiting[:TOGETHER], self._waiting[TOGETHER:]
                if not some:
                    self._handing = False
                    self._room.set()
                    return
            for stream, id_, payload, key, time in some:
                try:
                    await send(stream, id_, payload, key=key, time=time)
                except Exception as error:  # of this message; the others go their way
                    self._error = self._error or error
                    self._room.set()
            if len(self._waiting) < 10 * TOGETHER:
                self._room.set()

    def flush(self) -> None:
        """Wait until all that was sent is acknowledged."""
        self._do(self._flush())

    async def _flush(self) -> None:
        await self._all_handed()
        await self._connector.flush()

    async def _all_handed(self) -> None:
        while self._handing:
            await asyncio.sleep(0.001)
        self._check()

    def _check(self) -> None:
        """Raise what was wrong with an earlier message, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def end(self, stream: str) -> None:
        """A stream is complete, for now: wait until all of it is acknowledged."""

        async def end() -> None:
            await self._all_handed()
            await self._connector.end(stream)

        self._do(end())

    def feed(
        self,
        stream: str,
        source: Iterable[Item] | Callable[[int | None], Iterable[Item]],
        *,
        end: bool = True,
    ) -> None:
        """Send all that an iterable brings, or a function of the id after which to go on; see `Connector.feed`.

        What a function returns is read by other threads, one item after the other.
        """
        if callable(source):
            self._do(self._connector.feed(stream, lambda after: _elsewhere(source(after)), end=end))
            return
        for item in source:
            self.send(
                stream,
                item[0],
                item[1],
                key=item[2] if len(item) > 2 else None,
                time=item[3] if len(item) > 3 else None,
            )
        if end:
            self.end(stream)

    def position(self, stream: str) -> int | None:
        """After which id the flow wants a stream to go on; None: from its start."""
        return self._do(self._connector.position(stream))

    def acked(self, stream: str) -> int | None:
        """The id up to which all messages are in a committed snapshot."""
        return self._connector.acked(stream)

    def _do(self, work: Coroutine[Any, Any, R]) -> R:
        if not self._thread.is_alive():
            work.close()
            raise FeedError("this connector is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _elsewhere(items: Iterable[Item]) -> AsyncIterator[list[Item]]:
    """What an iterable brings, read by a thread of its own: it may wait as long as it likes."""
    loop = asyncio.get_running_loop()
    taking = Taking(items)
    asked: queue.SimpleQueue[asyncio.Future[list[Item]] | None] = queue.SimpleQueue()

    def answer(
        future: asyncio.Future[list[Item]], some: list[Item], error: Exception | None
    ) -> None:
        if not future.done():
            if error is None:
                future.set_result(some)
            else:
                future.set_exception(error)

    def run() -> None:
        while (future := asked.get()) is not None:
            some, error = list[Item](), None
            try:
                some = taking.take()
            except Exception as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(answer, future, some, error)
            except RuntimeError:  # the connector is closed
                return

    # It does not keep the program from ending, should it wait for something for ever.
    threading.Thread(target=run, name="railgun-feed", daemon=True).start()
    try:
        while True:
            future: asyncio.Future[list[Item]] = loop.create_future()
            asked.put(future)
            if not (some := await future):
                return
            yield some
    finally:
        asked.put(None)
