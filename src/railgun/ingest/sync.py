"""The synchronous connector: push streams into a flow from a program without an event loop.

A `Connector` runs in a background thread. `send` validates a message and packs it with others in the calling thread;
the background thread takes over what is packed. So `send` raises if a message is invalid, and a message for which it
does not raise is accepted, as with `Connector`, whatever other threads send and whatever error its stream gets later.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from railgun.engine.protocol.ingest.sender import Sent
from railgun.ingest.client import Connector
from railgun.ingest.errors import FeedError
from railgun.ingest.items import ChunkReader, Item, Payload, item_fields, iterator_of
from railgun.ingest.stream import Kept, Stream, check_name

R = TypeVar("R")
CLOSE_TIMEOUT_S: Final = 2.0  # for tasks to end before they are cancelled
MAX_BUFFERED_MESSAGES: Final = 10_000  # that wait to be handed over


class SyncConnector:
    """A synchronous `Connector`, with the same arguments.

    with SyncConnector("orders") as c:
        c.send("gateway-7", 0, b'{"price": 3}')

    Threads may share a connector. `on_ack` and `on_passed` are called in the connector's thread: they must not wait,
    and may use only those calls of the connector that return at once (`acked`, `connected`).
    """

    def __init__(self, flow: str, **options: Any) -> None:
        self._connector = Connector(flow, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="railgun-connector", daemon=True
        )
        self._lock = threading.Lock()
        self._buffers: dict[str, Stream] = {}  # messages that are not handed over, by stream
        self._fresh: dict[str, Stream] = {}  # the buffers that are not empty
        self._handing = False  # whether a task hands messages over, or will
        self._sent = self._handed = 0  # number of messages so far
        self._step = asyncio.Event()  # pulsed when messages were handed over
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
            if kind is None and self._thread.is_alive():
                self.flush()
        finally:
            self.close()

    def open(self) -> None:
        """Connect; raise `NoFlowError` if that fails within the timeout."""
        if self._thread.ident is not None:
            raise FeedError("a connector is opened once: make another one")
        self._thread.start()
        try:
            self._do(self._connector.open())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection. Messages that are not acknowledged may reach the flow or not."""
        if self._thread.is_alive():
            self._do(self._shut())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    async def _shut(self) -> None:
        await self._connector.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for timeout_s in (
            CLOSE_TIMEOUT_S,
            None,
        ):  # waiting calls raise that the connector is closed
            if left:
                _, left = await asyncio.wait(left, timeout=timeout_s)
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
        """Send a message; wait while there is no room. If the call raises, the message was not accepted."""
        self._check_thread()
        with self._lock:
            buffer = self._fresh.get(stream) or self._buffer(stream)
            self._check(buffer)
            buffer.add(id, payload, key, time)
            self._fresh[stream] = buffer
            self._sent += 1
            handing, self._handing = self._handing, True
            full = self._sent - self._handed >= MAX_BUFFERED_MESSAGES
            if full:
                self._room.clear()
        if not handing:
            self._loop.call_soon_threadsafe(self._begin)
        if full:
            self._room.wait()

    def _buffer(self, name: str) -> Stream:
        buffer = self._buffers.get(name)
        if buffer is None:
            check_name(name)
            buffer = self._buffers[name] = Stream(Sent(name, 0), Kept())
        return buffer

    def _check(self, buffer: Stream) -> None:
        """Raise the error of a stream, or of the connector."""
        if buffer.busy:
            raise FeedError(f"{buffer.name!r} is being {buffer.busy}: one at a time")
        self._connector._check(outgoing := self._connector._streams.get(buffer.name))
        if outgoing is not None and not buffer.waiting.ids and not buffer.kept:
            buffer.last = outgoing.last

    def _begin(self) -> None:
        self._handing_over = self._loop.create_task(self._hand_over())

    async def _hand_over(self) -> None:
        """Hand the buffered messages to the connector, until there are no more."""
        while self._handing:
            with self._lock:
                fresh, self._fresh = self._fresh, {}
                for buffer in fresh.values():
                    buffer.seal()
            try:
                for name, buffer in fresh.items():
                    await self._hand(self._connector._stream(name), buffer)
            except Exception:  # the connector is closed or has failed: every call raises that
                break
            with self._lock:
                self._handing = bool(self._fresh)
        self._handing = False
        self._tell_step()
        self._room.set()

    async def _hand(self, outgoing: Stream, buffer: Stream) -> None:
        while buffer.kept:
            try:
                await self._connector._make_room(outgoing)
            except Exception:
                self._connector._check()  # an error of only this stream may be cleared: keep its messages
            with self._lock:
                self._handed += self._connector._hand(outgoing, buffer.forget_first())
                if self._sent - self._handed < MAX_BUFFERED_MESSAGES // 2:
                    self._room.set()
            self._tell_step()

    def _tell_step(self) -> None:
        self._step.set()
        self._step.clear()

    async def _all_handed(self) -> None:
        """Wait until all messages sent so far are handed over."""
        wanted = self._sent
        while self._handing and self._handed < wanted:
            await self._step.wait()

    async def _after(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        await self._all_handed()
        return await work()

    def flush(self) -> None:
        """Wait until all messages sent so far are acknowledged; raise as `Connector.flush` does."""
        self._do(self._after(self._connector.flush))

    def wait(self, stream: str, id: int) -> None:
        """Wait until the message with this id, and all before it, are acknowledged."""
        self._do(self._after(lambda: self._connector.wait(stream, id)))

    def skip(self, stream: str, id: int) -> bool:
        """Drop a message that the flow has refused (`RefusedError`), and continue; return False if it is not kept."""

        async def skip() -> bool:
            return self._connector.skip(stream, id)

        return self._do(self._after(skip))

    def end(self, stream: str) -> None:
        """End a stream: wait until all of it is acknowledged. Then this or another connector may continue it."""
        with self._alone(stream, "ended"):
            self._do(self._after(lambda: self._connector.end(stream)))

    def feed(
        self,
        stream: str,
        source: Iterable[Item] | Callable[[int | None], Iterable[Item]],
        *,
        end: bool = True,
    ) -> None:
        """Send all items of an iterable, or of a function of the id after which to continue; see `Connector.feed`.

        The function is called, and its result is read, in another thread.
        """
        if callable(source):
            feed = self._connector.feed
            with self._alone(stream, "fed"):
                self._do(
                    self._after(
                        lambda: feed(stream, lambda after: _elsewhere(source, after), end=end)
                    )
                )
            return
        for item in iterator_of(source):
            id_, payload, key, time = item_fields(item)
            self.send(stream, id_, payload, key=key, time=time)
        if end:
            self.end(stream)

    @contextlib.contextmanager
    def _alone(self, stream: str, busy: str) -> Iterator[None]:
        """Keep other threads from sending this stream during the block."""
        self._check_thread()
        with self._lock:
            buffer = self._buffer(stream)
            if buffer.busy:
                raise FeedError(f"{stream!r} is being {buffer.busy}: one at a time")
            buffer.busy = busy
        try:
            yield
        finally:
            buffer.busy = ""

    def position(self, stream: str) -> int | None:
        """Return the id after which the flow wants a stream to continue; None: from its start."""
        return self._do(self._connector.position(stream))

    def acked(self, stream: str) -> int | None:
        """Return the id up to which all messages of a stream are known to be in a committed snapshot, or None."""
        return self._connector.acked(stream)

    @property
    def connected(self) -> bool:
        """Whether the connector is connected to a worker now."""
        return self._connector.connected

    @property
    def connections(self) -> int:
        """The number of connections made so far."""
        return self._connector.connections

    @property
    def error(self) -> Exception | None:
        """The error after which nothing can be sent any more, or None."""
        return self._connector.error

    def _check_thread(self) -> None:
        if not self._thread.is_alive():
            how = "not open" if self._thread.ident is None else "closed"
            raise FeedError(f"this connector is {how}")
        if threading.get_ident() == self._thread.ident:
            raise FeedError("on_ack and on_passed must not wait: let another thread do that")

    def _do(self, work: Coroutine[Any, Any, R]) -> R:
        try:
            self._check_thread()
        except FeedError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _elsewhere(
    source: Callable[[int | None], Iterable[Item]], after: int | None
) -> AsyncIterator[list[Item]]:
    """Yield the items of a function that is called and read in a thread of its own, so that it may block."""
    loop = asyncio.get_running_loop()
    requests: queue.SimpleQueue[asyncio.Future[list[Item]] | None] = queue.SimpleQueue()

    def answer(
        future: asyncio.Future[list[Item]], chunk: list[Item], error: Exception | None
    ) -> None:
        if not future.done():
            if error is None:
                future.set_result(chunk)
            else:
                future.set_exception(error)

    def run() -> None:
        reader: ChunkReader | None = None
        while (future := requests.get()) is not None:
            chunk, error = list[Item](), None
            try:
                reader = reader or ChunkReader(source(after))
                chunk = reader.take()
            except Exception as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(answer, future, chunk, error)
            except RuntimeError:  # the connector is closed
                return

    # A daemon thread: it cannot keep the program from ending if the function blocks for ever.
    threading.Thread(target=run, name="railgun-feed", daemon=True).start()
    try:
        while True:
            future: asyncio.Future[list[Item]] = loop.create_future()
            requests.put(future)
            if not (chunk := await future):
                return
            yield chunk
    finally:
        requests.put(None)
