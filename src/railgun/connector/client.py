"""Connector: a program outside pushes streams of messages into a flow, each message exactly once.

    async with Connector("orders") as c:
        await c.send("gateway-7", 0, b'{"price": 3}')
        await c.flush()

Messages of a stream have ids that go up. A message is *acknowledged* when it is in a committed snapshot of the flow; up
to then it may be asked for again, so it is kept. Rules:

1. Connections are lost, workers come and go, the flow goes back to a snapshot: the connector connects again, announces
   its streams, and sends each from the point the flow names.
2. What is sent and not acknowledged is kept in memory, up to `keep` bytes; then `send` waits. `feed` with a function
   keeps nothing: it calls the function again, with the id after which to go on, as soon as the flow names another.
3. An id that the flow has already is not sent. That is how a program that was restarted goes on: it sends
   everything again, or asks (`position`) where to begin.
4. What cannot pass (a wrong secret, a payload that the flow refuses) is raised by whatever waits; what may pass is
   waited for, with longer and longer pauses. What is wrong with one stream stops that stream only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import countOf
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import numpy as np
from google.protobuf.message import Message

from railgun.connector.errors import (
    FeedError,
    NoFlowError,
    RefusedError,
    RewindError,
    TooLargeError,
)
from railgun.connector.find import Flow, Found
from railgun.core.sources.messages import LAST_ID, NONE
from railgun.core.sources.sender import Phase, Sender, Sent
from railgun.wire.commands import FrameError, FrameReader, encode
from railgun.wire.connection import Connection
from railgun.wire.hello import HelloError
from railgun.wire.outside import (
    COST,
    EARLIEST,
    LARGEST,
    LATEST,
    LONGEST_NAME,
    VERSION,
    pack,
    unpack,
)
from railgun.wire.proto import connectors_pb2 as c
from railgun.wire.proto import streams_pb2 as p

Payload: TypeAlias = bytes | str
Item: TypeAlias = tuple[int, Payload] | tuple[int, Payload, str | None] | tuple[Any, ...]
"""An id and a payload; then a key and a time (µs), if they are wanted."""


Items: TypeAlias = Iterable[Item] | AsyncIterable[Item] | AsyncIterable[list[Item]]
"""An async iterable may bring lists of items: what is in one is sent together."""

PIECE: Final = 64 << 10  # bytes that are sent at once
MOST: Final = 4_000  # messages in a piece
HEADROOM: Final = 4 << 10  # bytes of a frame that are not of messages
KEEP: Final = 256 << 20
PAUSES: Final = (0.05, 2.0)  # seconds until the next attempt: at first, and at most
ASK_AGAIN: Final = (0.05, 1.0)  # for a stream that is not free
SILENT: Final = (10.0, 30.0)  # seconds after which the worker is asked, and given up
HELLO: Final = 10.0
CHUNK: Final = 1_000  # items that are taken at once from who brings them quickly
QUICK: Final = 0.002  # seconds
HUGE: Final = 512 << 10  # bytes
AHEAD: Final = 16  # pieces of a stream that wait to be sent, if there are few streams
ROOM: Final = 64 << 20  # bytes of pieces that wait, of all streams together


@dataclass(slots=True)
class Piece:
    """Messages that are sent together."""

    last: int
    blob: bytes


@dataclass(slots=True)
class Waiting:
    """Messages that are not a piece yet."""

    ids: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    times: list[int | None] = field(default_factory=list)
    size: int = 0


class Stream:
    """A stream of this connector."""

    def __init__(self, sent: Sent) -> None:
        self.sent = sent
        self.last = NONE  # the last id that was given to be sent
        self.keeps = True  # whether what is sent is kept until it is acknowledged
        self.kept: deque[Piece] = deque()  # not acknowledged
        self.next = 0  # of these, the first that has not been sent
        self.waiting = Waiting()
        self.ending: Callable[[], bool] | None = None  # whether its end is to be said
        self.changed: asyncio.Future[None] | None = None  # who waits for this stream
        self.feeding = False
        self.first: int | None = None  # the first id that was given to be sent
        self.floor = NONE  # what the flow had when it was granted last
        self.base = NONE  # up to here nothing can be sent again
        self.wanted = False  # whether it is to be open
        self.queued = False  # whether it is among those that have something to send
        self.grants = 0
        self.pause = ASK_AGAIN[0]
        self.error: Exception | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.sent.name

    def give(self, first: int, last: int) -> None:
        """Messages are given, from `first` to `last`; `first` is the last one that the flow has, if it is among them.

        Who goes on after what the flow has, without giving that, relies on the flow having it.
        """
        if self.first is None:
            self.first = first
        if self.last < self.floor < first:
            self.base = max(self.base, self.floor)
        self.last = last

    @property
    def is_open(self) -> bool:
        """Whether it can be sent now."""
        return self.sent.phase is Phase.OPEN


class Connector:
    """Pushes streams into a flow.

    `flow`: the name of a job on this machine; or the URL of a job's HTTP API, with its `token`; or `host:port` of a
    worker (several: with commas), with the `secret` of the source. `source`: its name, if the flow has several.
    `keep`: bytes of messages that are kept until they are acknowledged. `on_ack` is called with a stream and an id.
    """

    def __init__(
        self,
        flow: str,
        *,
        source: str | None = None,
        token: str | None = None,
        secret: bytes | str | None = None,
        registry: str | os.PathLike[str] | None = None,
        timeout: float = 30.0,
        keep: int = KEEP,
        program: str = "connector",
        on_ack: Callable[[str, int], None] | None = None,
    ) -> None:
        self._flow = Flow(flow, source, token, secret, registry)
        self._flow.check()
        if keep < 1:
            raise FeedError(
                f"something has to be kept until it is acknowledged, not {keep!r} bytes"
            )
        self._timeout = timeout
        self._keep = keep
        self._who = {
            "version": VERSION,
            "program": program,
            "instance": f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}",
            **({} if source is None else {"source": source}),
        }
        self.on_ack = on_ack
        """Called with a stream and an id: all up to it is acknowledged."""
        self._sender = Sender()
        self._streams: dict[str, Stream] = {}
        self._ready: deque[Stream] = deque()  # have something to send
        self._kept = 0
        self._connection: Connection | None = None
        self._opened = False
        self._frames = FrameReader(LARGEST)
        self._heard = 0.0
        self._next_address = ""
        self._lost: asyncio.Event
        self._failed: Exception | None = None  # why the connection closed
        self._changed: asyncio.Future[None] | None = None  # who waits for anything
        self._unsealed: dict[str, Stream] = {}  # have messages that are not a piece yet
        self._error: Exception | None = None
        self._cause: Exception | None = None  # why there is no connection
        self._task: asyncio.Task[None] | None = None
        self._sealing = False
        self._pumping = False  # whether `_pump` will be called
        self._closed = False
        self.connections = 0
        """How many there were so far."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and not self._closed:
            try:
                await self.flush()
            finally:
                await self.close()
        else:
            await self.close()

    # ------------------------------------------------------------ for users

    async def open(self) -> None:
        """Connect; raises `NoFlowError` if that does not succeed in time."""
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = self._loop.create_task(self._run())
        try:
            await self._await_opening(self._loop.time() + self._timeout)
        except BaseException:
            await self.close()
            raise

    async def _await_opening(self, deadline: float) -> None:
        while not self._opened:
            self._check()
            left = deadline - self._loop.time()
            if left <= 0:
                cause = self._cause
                why = f": {cause}" if cause is not None else ""
                raise NoFlowError(
                    f"no connection to {self._flow.where} within {self._timeout:.0f} s{why}"
                )
            await asyncio.wait([self._change()], timeout=left)

    async def close(self) -> None:
        """Let go of the connection; what is not acknowledged may or may not be taken."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._connection is not None:
            self._connection.close()
        self._wake()
        await asyncio.sleep(0)

    async def position(self, stream: str) -> int | None:
        """After which id the flow wants a stream to go on; None: from its start."""
        found = self._stream(stream)
        await self._until(lambda: found.is_open, found)
        return None if found.sent.at == NONE else found.sent.at

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._opened

    @property
    def error(self) -> Exception | None:
        """Why nothing can be sent any more, if that is so; what is wrong with one stream is raised where it is used."""
        return self._error

    def acked(self, stream: str) -> int | None:
        """The id up to which all messages are in a committed snapshot; None: none is known to be."""
        found = self._streams.get(stream)
        return None if found is None or found.sent.acked == NONE else found.sent.acked

    async def send(
        self,
        stream: str,
        id: int,
        payload: Payload,
        *,
        key: str | None = None,
        time: int | None = None,
    ) -> None:
        """Send a message. Returns at once while there is room to keep it; it goes with those that follow closely."""
        found = self._streams.get(stream)
        if found is None or not found.wanted or self._closed:
            found = self._stream(stream)
        if found.feeding:
            self._check_free(found)
        if self._kept >= self._keep or found.error is not None or self._error is not None:
            await self._until(lambda: self._kept < self._keep, found, room=True)
        self._add(found, id, payload, key, time)
        if found.waiting.size >= PIECE:
            self._seal(found)
            self._pump()
            await asyncio.sleep(0)
        elif not self._sealing:
            self._sealing = True
            self._loop.call_soon(self._seal_all)

    async def flush(self) -> None:
        """Wait until all that was sent is acknowledged."""
        self._seal_all()
        await self._until(lambda: all(s.sent.acked >= s.last for s in self._streams.values()))

    async def wait(self, stream: str, id: int) -> None:
        """Wait until this message, and all before it, are acknowledged."""
        found = self._stream(stream)
        await self._until(lambda: found.sent.acked >= id, found)

    def skip(self, stream: str, id: int) -> bool:
        """Go on without a message that the flow has refused (`RefusedError`); False: it is not kept here."""
        found = self._stream(stream)
        self._seal(found)
        for at, piece in enumerate(found.kept):
            if id > piece.last:
                continue
            ids, times, keys, payloads = unpack(piece.blob)
            rows = [row for row, known in enumerate(ids.tolist()) if known != id]
            if len(rows) == len(payloads):
                return False
            self._kept -= len(piece.blob)
            if rows:
                found.kept[at] = Piece(
                    int(ids[rows[-1]]),
                    pack(
                        ids[rows],
                        [payloads[row] for row in rows],
                        None if times is None else times[rows].tolist(),
                        None if keys is None else [keys[row] for row in rows],
                    ),
                )
                self._kept += len(found.kept[at].blob)
            else:
                del found.kept[at]
                found.next -= found.next > at
            if found.last == id:
                found.last = found.kept[-1].last if found.kept else found.sent.acked
            if isinstance(found.error, RefusedError) and found.error.id == id:
                found.error = None
            self._notify(found)
            self._wake(found)
            return True
        return False

    async def end(self, stream: str) -> None:
        """A stream is complete, for now: wait until all of it is acknowledged. Another connector may go on with it."""
        found = self._stream(stream)
        self._check_free(found)
        await self._finish(found)

    async def feed(
        self, stream: str, source: Items | Callable[[int | None], Items], *, end: bool = True
    ) -> None:
        """Send all that an iterable brings, or a function of the id after which to go on (None: from the start).

        Items are `(id, payload)`, or with a key and a time. With a function nothing is kept here: when the flow goes
        back, it is called again. Returns when all is acknowledged; `end=False`: when all was sent.
        """
        found = self._stream(stream)
        self._check_free(found)
        found.feeding = True
        try:
            if callable(source):
                await self._replay(found, source, end)
                return
            async for some in _chunks(source):
                self._add_all(found, some)
                self._pump()
                await self._until(lambda: self._kept < self._keep, found, room=True)
            if end:
                await self._finish(found)
        finally:
            found.feeding = False

    async def _replay(
        self, found: Stream, source: Callable[[int | None], Items], end: bool
    ) -> None:
        """Send what a function brings, again and again, until the flow wants nothing else any more."""
        if found.kept or found.waiting.ids:
            await self._until(lambda: found.sent.acked >= found.last, found)
        found.keeps = False
        try:
            while True:
                await self._until(lambda: found.is_open, found)
                grant, at = found.grants, found.sent.at
                found.last = at
                items = source(None if at == NONE else at)
                bringing = self._loop.create_task(self._bring(found, grant, items))
                bringing.add_done_callback(lambda _: self._wake(found))
                try:
                    await self._until(
                        lambda g=grant, b=bringing: b.done() or found.grants != g,  # type: ignore[misc]
                        found,
                    )
                finally:
                    if not bringing.done():
                        bringing.cancel()
                        await asyncio.wait([bringing])
                whole = not bringing.cancelled() and bringing.result()
                if whole and await self._finish(found, grant, end=end):
                    return
        finally:
            found.keeps = True
            found.base = max(found.base, found.sent.at)
            self._drop(found)

    async def _bring(self, found: Stream, grant: int, items: Items) -> bool:
        """Send these, all of them; False: the flow wants something else meanwhile."""
        iterator = _chunks(items)
        async with contextlib.aclosing(iterator):
            async for some in iterator:
                if found.grants != grant:
                    return False
                self._add_all(found, some)
                self._pump()
                most = max(1, min(AHEAD, ROOM // PIECE // len(self._streams)))
                await self._until(
                    lambda most=most: len(found.kept) < most or found.grants != grant,  # type: ignore[misc]
                    found,
                )
        return found.grants == grant

    async def _finish(self, found: Stream, grant: int | None = None, *, end: bool = True) -> bool:
        """Wait until all of a stream is acknowledged, and say that it ends; False: it is wanted again before that."""

        def is_done() -> bool:
            ended = not end or found.sent.phase is Phase.ENDED
            return ended and found.sent.acked >= found.last

        def is_over() -> bool:
            return is_done() or (grant is not None and found.grants != grant)

        self._seal(found)
        if end:
            # The end is that of what was sent for this grant; for another one it is yet to be sent.
            found.ending = lambda: grant is None or found.grants == grant
        self._want(found)
        try:
            await self._until(is_over, found)
        finally:
            found.ending = None
        if not is_done():
            return False
        if end:
            found.wanted = False
            self._sender.refused(found.sent)  # it is not ours any more
        return True

    def _check_free(self, found: Stream) -> None:
        if found.feeding:
            raise FeedError(f"{found.name!r} is being fed: one at a time")

    def _drop(self, found: Stream) -> None:
        """Forget what waits to be sent."""
        self._kept -= sum(len(piece.blob) for piece in found.kept)
        found.kept.clear()
        found.next = 0
        found.waiting = Waiting()

    # ------------------------------------------------------------ messages

    def _stream(self, name: str) -> Stream:
        if self._closed or self._task is None:
            raise FeedError(f"this connector is {'closed' if self._closed else 'not open'}")
        found = self._streams.get(name)
        if found is None:
            check_name(name)
            found = self._streams[name] = Stream(self._sender.stream(name))
        if not found.wanted:
            found.wanted = True
            self._notify(found)
        return found

    def _add(
        self, found: Stream, id: int, payload: Payload, key: str | None, time: int | None
    ) -> None:
        if type(id) is not int or not found.last < id <= LAST_ID:
            raise _bad_id(found, id)
        if type(payload) is bytes:
            data = payload
        elif isinstance(payload, str):
            data = payload.encode(errors="surrogatepass")
        elif isinstance(payload, bytes | bytearray | memoryview):
            data = bytes(payload)
        else:
            raise FeedError(
                f"message {id} of {found.name!r}: a payload is bytes or text, not {payload!r:.80}"
            )
        if key is not None and _text(key) is None:
            raise FeedError(f"message {id} of {found.name!r}: a key is text, not {key!r:.80}")
        if time is not None and (type(time) is not int or not EARLIEST <= time <= LATEST):
            raise FeedError(
                f"message {id} of {found.name!r}: a time is a whole number of microseconds, not {time!r:.80}"
            )
        size = len(data) + 32 + (len(_text(key)) if key is not None else 0)
        if size > LARGEST - HEADROOM:
            raise TooLargeError(
                f"message {id} of {found.name!r} has {size - 32:,} bytes, with its key: "
                f"{LARGEST - HEADROOM - 32:,} are the most"
            )
        found.give(id, id)
        self._unsealed[found.name] = found
        waiting = found.waiting
        if waiting.size + size > LARGEST - HEADROOM:
            self._seal(found)
            waiting = found.waiting
        waiting.ids.append(id)
        waiting.payloads.append(data)
        waiting.keys.append(key)
        waiting.times.append(time)
        waiting.size += size
        if len(waiting.ids) >= MOST:
            self._seal(found)

    def _add_all(self, found: Stream, items: Sequence[Item]) -> None:
        """As `_add` for each; those that are plain ids and bytes are not looked at one by one."""
        if len(items) == 1:
            self._add(found, items[0][0], items[0][1], _key(items[0]), _time(items[0]))
            if not self._sealing:
                self._sealing = True
                self._loop.call_soon(self._seal_all)
            return
        ids, payloads = [item[0] for item in items], [item[1] for item in items]
        count = len(items)
        plain = (
            countOf(map(len, items), 2) == count
            and countOf(map(type, ids), int) == count
            and countOf(map(type, payloads), bytes) == count
            and found.last < ids[0]
            and max(ids) == ids[-1] <= LAST_ID
        )
        sizes = np.fromiter(map(len, payloads), np.int64, count) if plain else np.zeros(1)
        numbers = np.array(ids, np.int64) if plain else np.zeros(1)
        if not plain or sizes.max() > PIECE or bool((numbers[1:] <= numbers[:-1]).any()):
            try:
                for item in items:
                    self._add(found, item[0], item[1], _key(item), _time(item))
            finally:
                self._seal(found)
            return
        self._seal(found)
        before = numbers[numbers <= found.floor]
        found.give(int(before[-1]) if len(before) else ids[0], ids[-1])
        pieces = (np.cumsum(sizes + 32) // PIECE).astype(np.int64)
        stops = [*(np.flatnonzero(pieces[1:] != pieces[:-1]) + 1).tolist(), count]
        for begin, stop in zip([0, *stops[:-1]], stops, strict=True):
            blob = pack(numbers[begin:stop], payloads[begin:stop])  # type: ignore[arg-type]
            self._keep_piece(found, Piece(ids[stop - 1], blob))

    def _keep_piece(self, found: Stream, piece: Piece) -> None:
        """A piece is to be sent."""
        found.kept.append(piece)
        self._kept += len(piece.blob)
        if found.is_open and piece.last <= found.sent.at:
            self._skip(found)
        self._want(found)

    def _seal(self, found: Stream) -> None:
        """What waits becomes a piece, to be sent."""
        waiting = found.waiting
        if not waiting.ids:
            return
        found.waiting = Waiting()
        times: Sequence[int | None] | None = waiting.times
        if not any(waiting.times) and waiting.times.count(None) == len(waiting.times):
            times = None
        elif None in waiting.times:
            now = time.time_ns() // 1000
            times = [now if moment is None else moment for moment in waiting.times]
        keys = waiting.keys if any(key is not None for key in waiting.keys) else None
        blob = pack(waiting.ids, waiting.payloads, times, keys)  # type: ignore[arg-type]
        self._keep_piece(found, Piece(waiting.ids[-1], blob))

    def _seal_all(self) -> None:
        self._sealing = False
        unsealed, self._unsealed = self._unsealed, {}
        for found in unsealed.values():
            self._seal(found)
        self._pump()

    def _want(self, found: Stream) -> None:
        if not found.queued:
            found.queued = True
            self._ready.append(found)
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _skip(self, found: Stream) -> None:
        """Pass over what the flow has already."""
        while found.next < len(found.kept) and found.kept[found.next].last <= found.sent.at:
            found.next += 1

    def _pump(self) -> None:
        """Send what there are credits for."""
        self._pumping = False
        sender, ready = self._sender, self._ready
        while ready and sender.credits > 0 and self._opened:
            found = ready.popleft()
            found.queued = False
            if not found.is_open:
                continue  # it comes back when it is granted
            if found.next < len(found.kept):
                self._send_piece(found)
            if found.next < len(found.kept):
                found.queued = True
                ready.append(found)
            elif found.ending is not None and found.ending() and not found.waiting.ids:
                self._eos(found)
                self._wake(found)

    def _eos(self, found: Stream) -> None:
        """Say that a stream ends."""
        told = c.Eos(stream=found.sent.number)
        if found.sent.at != NONE:
            told.last = found.sent.at
        self._send(told)
        self._sender.sent(found.sent, found.sent.at, COST)
        self._sender.ended(found.sent)

    def _send_piece(self, found: Stream) -> None:
        piece = found.kept[found.next]
        assert self._connection is not None
        frame = encode(c.Messages(stream=found.sent.number), [piece.blob])
        self._connection.transport.writelines(frame)
        self._sender.sent(found.sent, piece.last, len(piece.blob) + COST)
        if found.keeps:
            found.next += 1
        else:
            found.kept.popleft()
            self._kept -= len(piece.blob)
            self._wake(found)

    def _send(self, command: Message) -> None:
        if self._connection is not None and self._opened:
            self._connection.send(b"".join(encode(command)))

    def _notify(self, found: Stream) -> None:
        idle = found.sent.phase is Phase.IDLE and found.error is None
        if self._opened and found.wanted and idle:
            self._sender.asks(found.sent)
            acked = found.sent.acked
            told = c.Notify(stream=found.sent.number, name=found.name)
            if acked != NONE:
                told.por = acked
            self._send(told)

    # ------------------------------------------------------------ waiting

    async def _until(
        self, done: Callable[[], bool], found: Stream | None = None, room: bool = False
    ) -> None:
        """Wait for something of a stream; or of any (`room`: whatever is wrong with others)."""
        while not done():
            self._check(found)
            await asyncio.wait([self._change(None if room else found)])
        self._check(found)

    def _check(self, found: Stream | None = None) -> None:
        streams = [found] if found is not None else self._streams.values()
        for error in (self._error, *(one.error for one in streams)):
            if error is not None:
                raise error
        if self._closed:
            raise FeedError("this connector is closed")

    def _change(self, found: Stream | None = None) -> asyncio.Future[None]:
        """Done with the next change of a stream, or of anything. Many wait for it: none may cancel it."""
        future = self._changed if found is None else found.changed
        if future is None:
            future = self._loop.create_future()
            if found is None:
                self._changed = future
            else:
                found.changed = future
        return future

    def _wake(self, found: Stream | None = None) -> None:
        """Something has changed: of a stream, or of all. Of thousands of streams only the one's waiters are woken."""
        streams = self._streams.values() if found is None else (found,)
        waited = [self._changed, *(one.changed for one in streams)]
        self._changed = None
        for one in streams:
            one.changed = None
        for future in waited:
            if future is not None and not future.done():
                future.set_result(None)

    # ------------------------------------------------------------ the connection

    async def _run(self) -> None:
        """Be connected, one connection after the other."""
        pause = PAUSES[0]
        while not self._closed:
            try:
                found = await self._flow.find()
                before = self.connections
                await self._connect(found)
                if self.connections > before:
                    pause = PAUSES[0]
            except (NoFlowError, OSError) as error:
                self._cause = error
            except HelloError as error:
                if error.code in ("BAD_SECRET", "BAD_VERSION", "NO_SOURCE"):
                    self._give_up(RefusedError(error.code, str(error)))
                    return
                self._cause = error
            except FeedError as error:
                self._give_up(error)
                return
            except Exception as error:
                self._give_up(FeedError(f"{self._flow.where} cannot be looked for: {error!r}"))
                raise
            if self._error is not None:
                return
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, PAUSES[1])

    def _give_up(self, error: Exception) -> None:
        self._error = error
        self._wake()

    async def _connect(self, found: Found) -> None:
        """One connection, to the address we were sent to, or to any; returns when it is lost."""
        addresses = list(found.addresses)
        random.shuffle(addresses)
        host, _, port = self._next_address.rpartition(":")
        self._next_address = ""
        if host and port.isdigit():
            addresses.insert(0, (host, int(port)))
        failed: Exception = NoFlowError("there is no address")
        for address in addresses:
            try:
                await self._dial(*address, found.secret)
            except OSError as error:
                failed = error
            else:
                return
        raise failed

    async def _dial(self, host: str, port: int, secret: bytes) -> None:
        """Connect there; returns when the connection is lost. Raises if it never opened."""
        self._lost = asyncio.Event()
        self._failed = None
        self._frames = FrameReader(LARGEST)
        before = self.connections
        async with asyncio.timeout(HELLO):
            transport, _ = await self._loop.create_connection(
                lambda: Connection(
                    secret, self._greeted, self._received, self._closed_by, self._who
                ),
                host,
                port,
            )
        try:
            await self._watch(self._lost)
        finally:
            transport.close()
            self._disconnected()
        if self.connections == before:
            raise self._failed or ConnectionError("the connection was lost before it was open")

    def _greeted(self, connection: Connection) -> None:
        self._connection = connection

    async def _watch(self, lost: asyncio.Event) -> None:
        """Until the connection is lost; a worker that says nothing for long is asked."""
        self._heard = self._loop.time()
        while not lost.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lost.wait(), SILENT[0] / 2)
            silent = self._loop.time() - self._heard
            if silent > SILENT[1]:
                return
            if silent > SILENT[0]:
                self._send(p.Ping(number=1))

    def _disconnected(self) -> None:
        self._connection, self._opened = None, False
        self._sender.lost()
        self._wake()

    def _closed_by(self, connection: Connection, error: Exception | None) -> None:
        if self._connection in (None, connection):
            self._failed = error
            self._opened = False
            self._lost.set()

    def _received(self, connection: Connection, data: bytes) -> None:
        if connection is not self._connection:
            return
        self._heard = self._loop.time()
        try:
            for frame in self._frames.feed(data):
                self._handle(frame.command)
        except FrameError as error:
            self._cause = error
            connection.close()

    def _handle(self, command: Message) -> None:
        match command:
            case c.Ack():
                self._sender.granted_credits(command.credits)
                for point in command.points:
                    self._acked(point.stream, point.por)
                self._pump()
            case c.NotifyAck():
                self._answered(command)
            case c.Welcome():
                self._sender.opened(command.credits)
                self._opened = True
                self.connections += 1
                for found in self._streams.values():
                    self._notify(found)
                self._wake()
            case c.Restart():
                self._next_address = command.address
                self._leave()
            case c.Refused():
                self._refused(command)
            case p.Ping():
                self._send(p.Pong(number=command.number))

    def _leave(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _answered(self, answer: c.NotifyAck) -> None:
        sent = self._sender.numbers.get(answer.stream)
        if sent is None:
            return
        found = self._streams[sent.name]
        if answer.granted:
            found.pause = ASK_AGAIN[0]
            self._granted(found, answer.por if answer.HasField("por") else NONE)
        else:
            self._sender.refused(sent)
            if answer.reason == c.REDIRECT:
                self._next_address = answer.address
                self._leave()
            else:
                self._loop.call_later(found.pause * random.uniform(0.5, 1.0), self._notify, found)
                found.pause = min(2 * found.pause, ASK_AGAIN[1])

    def _granted(self, found: Stream, por: int) -> None:
        """Go on after that id."""
        known = found.sent.acked
        self._sender.granted(found.sent, por)
        found.grants += 1
        found.floor = por
        if not found.keeps:
            self._drop(found)
        elif por < found.base:
            after = "from its start" if por == NONE else f"after {por}"
            why = "it began with an older snapshot" if por < known else "it has gone back"
            found.error = RewindError(
                f"the flow wants {found.name!r} {after}: {why}. What is here begins after {found.base}; "
                "send all of it again, by another connector, or feed a function"
            )
            found.wanted = False
            self._eos(found)  # others may send it
        else:
            if found.first is not None and found.first > por > found.base:
                found.base = por
            found.next = 0
            self._skip(found)
        self._want(found)
        self._wake(found)

    def _acked(self, number: int, por: int) -> None:
        sent = self._sender.numbers.get(number)
        if sent is None or not self._sender.acknowledged(sent, por):
            return
        found = self._streams[sent.name]
        while found.keeps and found.kept and found.kept[0].last <= por:
            piece = found.kept.popleft()
            self._kept -= len(piece.blob)
            found.next = max(0, found.next - 1)
            found.base = max(found.base, piece.last)
        if self.on_ack is not None:
            try:
                self.on_ack(sent.name, por)
            except Exception as error:  # whoever waits is to hear of it
                self._give_up(error)
        self._wake(found)

    def _refused(self, told: c.Refused) -> None:
        error = RefusedError(
            told.code, told.text, told.stream, told.id if told.HasField("id") else None
        )
        found = self._streams.get(told.stream) if told.stream else None
        if found is not None:
            found.error = error
        else:
            self._error = error
        self._leave()
        self._wake()


def check_name(name: Any) -> None:
    """Refuse what cannot be the name of a stream."""
    try:
        plain = isinstance(name, str) and 0 < len(name.encode()) <= LONGEST_NAME
    except UnicodeEncodeError:
        plain = False
    if not plain:
        raise FeedError(f"a stream's name is text of up to {LONGEST_NAME} bytes, not {name!r:.80}")


def _bad_id(found: Stream, id: Any) -> FeedError:
    if type(id) is not int or id < 0 or id > LAST_ID:
        return FeedError(
            f"an id of {found.name!r} is a whole number from 0 to {LAST_ID}, not {id!r}"
        )
    return FeedError(f"ids of {found.name!r} go up: {id} does not come after {found.last}")


def _text(key: Any) -> bytes:
    """A key as bytes; None if it cannot be."""
    try:
        return key.encode() if isinstance(key, str) else None  # type: ignore[return-value]
    except UnicodeEncodeError:
        return None  # type: ignore[return-value]


def _key(item: Sequence[Any]) -> str | None:
    return item[2] if len(item) > 2 else None


def _time(item: Sequence[Any]) -> int | None:
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


async def _chunks(items: Items) -> AsyncGenerator[Sequence[Item], None]:
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
