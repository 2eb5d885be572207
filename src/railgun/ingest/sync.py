"""SyncConnector: a `Connector` for programs without an event loop. It works in a thread of its own.

`send` looks at a message, and packs it with others, where it is called; the connector's thread takes what is packed. So
what is wrong with a message is raised where it is sent, and what is not raised is taken, as with `Connector`: whatever
other threads send, and whatever becomes wrong with its stream meanwhile.
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
from railgun.ingest.items import Item, Payload, Taking, iterated, parts
from railgun.ingest.stream import Kept, Stream, check_name

R = TypeVar("R")
PATIENCE: Final = 2.0
MOST: Final = 10_000  # messages that wait to be handed over


class SyncConnector:
    """Pushes streams into a flow; takes what `Connector` takes.

    with SyncConnector("orders") as c:
        c.send("gateway-7", 0, b'{"price": 3}')

    Threads may share one. `on_ack` and `on_passed` are called in the connector's thread: they must not wait, and of the
    connector they may ask only what is known at once (`acked`, `connected`).
    """

    def __init__(self, flow: str, **options: Any) -> None:
        self._connector = Connector(flow, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="railgun-connector", daemon=True
        )
        self._lock = threading.Lock()
        self._given: dict[str, Stream] = {}  # holds what is not handed over
        self._fresh: dict[str, Stream] = {}  # of these, who got something
        self._handing = False
        self._sent = self._handed = 0  # messages, so far
        self._step = asyncio.Event()  # for a moment, when something was handed over
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
        """Send a message; waits while there is no room. If it raises, the message was not taken."""
        self._check_thread()
        with self._lock:
            given = self._fresh.get(stream) or self._give(stream)
            self._check(given)
            given.add(id, payload, key, time)
            self._fresh[stream] = given
            self._sent += 1
            handing, self._handing = self._handing, True
            full = self._sent - self._handed >= MOST
            if full:
                self._room.clear()
        if not handing:
            self._loop.call_soon_threadsafe(self._begin)
        if full:
            self._room.wait()

    def _give(self, name: str) -> Stream:
        given = self._given.get(name)
        if given is None:
            check_name(name)
            given = self._given[name] = Stream(Sent(name, 0), Kept())
        return given

    def _check(self, given: Stream) -> None:
        """Raise what is wrong with a stream."""
        if given.busy:
            raise FeedError(f"{given.name!r} is being {given.busy}: one at a time")
        self._connector._check(found := self._connector._streams.get(given.name))
        if found is not None and not given.waiting.ids and not given.kept:
            given.last = found.last

    def _begin(self) -> None:
        self._handing_over = self._loop.create_task(self._hand_over())

    async def _hand_over(self) -> None:
        """Let the connector take what was given, until there is no more."""
        while self._handing:
            with self._lock:
                some, self._fresh = self._fresh, {}
                for given in some.values():
                    given.seal()
            try:
                for name, given in some.items():
                    await self._hand(self._connector._stream(name), given)
            except (
                Exception
            ):  # it is closed, or has an error, which all hear of who ask for anything
                break
            with self._lock:
                self._handing = bool(self._fresh)
        self._handing = False
        self._tell_step()
        self._room.set()

    async def _hand(self, found: Stream, given: Stream) -> None:
        while given.kept:
            try:
                await self._connector._make_room(found)
            except Exception:
                self._connector._check()  # if only this stream stands still, it may go on some time: it is kept
            with self._lock:
                self._handed += self._connector._hand(found, given.forget_first())
                if self._sent - self._handed < MOST // 2:
                    self._room.set()
            self._tell_step()

    def _tell_step(self) -> None:
        self._step.set()
        self._step.clear()

    async def _all_handed(self) -> None:
        """What was sent up to now."""
        wanted = self._sent
        while self._handing and self._handed < wanted:
            await self._step.wait()

    async def _after(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        await self._all_handed()
        return await work()

    def flush(self) -> None:
        """Wait until all that was sent up to now is acknowledged; raises as `Connector.flush` does."""
        self._do(self._after(self._connector.flush))

    def wait(self, stream: str, id: int) -> None:
        """Wait until this message, and all before it, are acknowledged."""
        self._do(self._after(lambda: self._connector.wait(stream, id)))

    def skip(self, stream: str, id: int) -> bool:
        """Go on without a message that the flow has refused (`RefusedError`); False: it is not kept here."""

        async def skip() -> bool:
            return self._connector.skip(stream, id)

        return self._do(self._after(skip))

    def end(self, stream: str) -> None:
        """A stream is complete, for now: wait until all of it is acknowledged. Another connector may go on with it."""
        with self._alone(stream, "ended"):
            self._do(self._after(lambda: self._connector.end(stream)))

    def feed(
        self,
        stream: str,
        source: Iterable[Item] | Callable[[int | None], Iterable[Item]],
        *,
        end: bool = True,
    ) -> None:
        """Send all that an iterable brings, or a function of the id after which to go on; see `Connector.feed`.

        A function is called, and what it returns is read, by other threads, one item after the other.
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
        for item in iterated(source):
            id_, payload, key, time = parts(item)
            self.send(stream, id_, payload, key=key, time=time)
        if end:
            self.end(stream)

    @contextlib.contextmanager
    def _alone(self, stream: str, busy: str) -> Iterator[None]:
        """No other thread sends this stream meanwhile."""
        self._check_thread()
        with self._lock:
            given = self._give(stream)
            if given.busy:
                raise FeedError(f"{stream!r} is being {given.busy}: one at a time")
            given.busy = busy
        try:
            yield
        finally:
            given.busy = ""

    def position(self, stream: str) -> int | None:
        """After which id the flow wants a stream to go on; None: from its start."""
        return self._do(self._connector.position(stream))

    def acked(self, stream: str) -> int | None:
        """The id up to which all messages are in a committed snapshot; None: none is known to be."""
        return self._connector.acked(stream)

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._connector.connected

    @property
    def connections(self) -> int:
        """How many there were so far."""
        return self._connector.connections

    @property
    def error(self) -> Exception | None:
        """Why nothing can be sent any more, if that is so."""
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
    """What a function brings, called and read by a thread of its own: it may wait as long as it likes."""
    loop = asyncio.get_running_loop()
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
        taking: Taking | None = None
        while (future := asked.get()) is not None:
            some, error = list[Item](), None
            try:
                taking = taking or Taking(source(after))
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
