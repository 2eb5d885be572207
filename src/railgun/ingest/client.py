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
3. An id that the flow has already is not sent (`on_passed` tells which). That is how a program that was restarted goes
   on: it sends everything again, or asks (`position`) where to begin.
4. What cannot pass (a wrong secret, a payload that the flow refuses) is raised by whatever waits; what may pass is
   waited for, with longer and longer pauses. What is wrong with one stream stops that stream only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from google.protobuf.message import Message

from railgun.engine.protocol.ingest.messages import NONE
from railgun.engine.protocol.ingest.sender import Phase, Sender
from railgun.ingest.connection import Line
from railgun.ingest.errors import FeedError, NoFlowError, RefusedError, RewindError
from railgun.ingest.find_flow import Flow
from railgun.ingest.items import Item, Items, Payload, chunks, parts
from railgun.ingest.stream import ASK_AGAIN, PIECE, Kept, Piece, Stream, check_name
from railgun.transport.ingest_batch import COST, VERSION
from railgun.transport.proto import connectors_pb2 as c
from railgun.transport.proto import streams_pb2 as p

KEEP: Final = 256 << 20
AHEAD: Final = 16  # pieces of a stream that wait to be sent, if there are few streams
ROOM: Final = 64 << 20  # bytes of pieces that wait, of all streams together


class Connector:
    """Pushes streams into a flow.

    `flow`: the name of a job on this machine; or the URL of a job's HTTP API, with its `token`; or `host:port` of a
    worker (several: with commas), with the `secret` of the source. `source`: its name, if the flow has several.
    `keep`: bytes of messages that are kept until they are acknowledged. `on_ack` is called with a stream and an id,
    `on_passed` with a stream and ids of messages that were passed over; both in the event loop, so they must not wait.
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
        on_passed: Callable[[str, list[int]], None] | None = None,
    ) -> None:
        self._flow = Flow(flow, source, token, secret, registry)
        self._flow.check()
        if keep < 1:
            raise FeedError(
                f"something has to be kept until it is acknowledged, not {keep!r} bytes"
            )
        self._timeout = timeout
        self._keep = keep
        who = {
            "version": VERSION,
            "program": program,
            "instance": f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}",
            **({} if source is None else {"source": source}),
        }
        self._line = Line(self._flow, who, self._handle, self._lost, self._give_up)
        self.on_ack = on_ack
        """Called with a stream and an id: all up to it is acknowledged."""
        self.on_passed = on_passed
        """Called with a stream and ids that were given here, and not sent: the flow had them, from somebody else."""
        self._sender = Sender()
        self._streams: dict[str, Stream] = {}
        self._ready: deque[Stream] = deque()  # have something to send
        self._kept = Kept()
        self._changed: asyncio.Future[None] | None = None  # who waits for anything
        self._unsealed: dict[str, Stream] = {}  # have messages that are not a piece yet
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self._sealing = False
        self._pumping = False  # whether `_pump` will be called
        self._closed = False

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
            self._task = self._loop.create_task(self._line.run())
        try:
            await self._await_opening(self._loop.time() + self._timeout)
        except BaseException:
            await self.close()
            raise

    async def _await_opening(self, deadline: float) -> None:
        while not self._line.opened:
            self._check()
            left = deadline - self._loop.time()
            if left <= 0:
                cause = self._line.cause
                why = f": {cause}" if cause is not None else ""
                raise NoFlowError(
                    f"no connection to {self._flow.where} within {self._timeout:.0f} s{why}"
                )
            await asyncio.wait([self._change()], timeout=left)

    async def close(self) -> None:
        """Let go of the connection; what is not acknowledged may or may not be taken."""
        self._closed = True
        self._line.end()
        self._wake()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.sleep(0)

    async def position(self, stream: str) -> int | None:
        """After which id the flow wants a stream to go on; None: from its start."""
        found = self._stream(stream)
        known = (Phase.OPEN, Phase.ENDED)
        await self._until(lambda: found.sent.phase in known, found)
        return None if found.sent.at == NONE else found.sent.at

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._line.opened

    @property
    def connections(self) -> int:
        """How many there were so far."""
        return self._line.connections

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
        """Send a message. Returns at once while there is room to keep it; it goes with those that follow closely.

        If it raises, or is cancelled, the message was not taken.
        """
        found = self._streams.get(stream)
        if found is not None and found.waiting.size >= PIECE:
            found.seal()
            self._want(found)
            await asyncio.sleep(0)
        if found is None or not found.wanted or self._closed:
            found = self._stream(stream)
        if found.busy:
            self._check_free(found)
        if self._kept.size >= self._keep or found.error is not None or self._error is not None:
            await self._make_room(found)
            self._check_free(self._stream(stream))
        found.add(id, payload, key, time)
        self._seal_soon(found)

    async def flush(self) -> None:
        """Wait until all that was sent up to now is acknowledged.

        What is wrong with a stream is raised after the others are done: the first error, with notes of the rest.
        """
        self._seal_all()
        errors: list[Exception] = []
        for found, last in [(found, found.last) for found in self._streams.values()]:
            try:
                await self._until(
                    lambda found=found, last=last: found.sent.acked >= min(last, found.last),  # type: ignore[misc]
                    found,
                )
            except Exception as error:
                self._check()
                errors.append(error)
        if errors:
            for other in errors[1:]:
                note = f"and {type(other).__name__}: {other}"
                if note not in getattr(errors[0], "__notes__", ()):
                    errors[0].add_note(note)
            raise errors[0]

    async def wait(self, stream: str, id: int) -> None:
        """Wait until this message, and all before it, are acknowledged."""
        found = self._stream(stream)
        await self._until(lambda: found.sent.acked >= id, found)

    def skip(self, stream: str, id: int) -> bool:
        """Go on without a message that the flow has refused (`RefusedError`); False: it is not kept here.

        What a function brings is not kept: feed one that brings it right, or leaves it out.
        """
        found = self._stream(stream)
        if not found.leave_out(id):
            return False
        if isinstance(found.error, RefusedError) and found.error.id == id:
            found.go_on()
        self._notify(found)
        self._want(found)
        self._wake(found)
        return True

    async def end(self, stream: str) -> None:
        """A stream is complete, for now: wait until all of it is acknowledged. Another connector may go on with it."""
        found = self._stream(stream)
        self._check_free(found)
        found.busy = "ended"
        try:
            await self._finish(found)
        finally:
            found.busy = ""

    async def feed(
        self, stream: str, source: Items | Callable[[int | None], Items], *, end: bool = True
    ) -> None:
        """Send all that an iterable brings, or a function of the id after which to go on (None: from the start).

        Items are `(id, payload)`, or with a key and a time. With a function nothing is kept here: when the flow goes
        back, it is called again; and it brings all that the flow does not have, so a stream that stands still, for
        something was wrong with it, goes on. Returns when all is acknowledged; `end=False`: when all was sent.
        """
        found = self._stream(stream)
        self._check_free(found)
        found.busy = "fed"
        try:
            if callable(source):
                await self._replay(found, source, end)
                return
            self._check(found)
            async for some in chunks(source):
                self._add_all(found, some)
                self._pump()
                await self._make_room(found)
            if end:
                await self._finish(found)
        finally:
            found.busy = ""

    async def _replay(
        self, found: Stream, source: Callable[[int | None], Items], end: bool
    ) -> None:
        """Send what a function brings, again and again, until the flow wants nothing else any more."""
        if found.error is not None:
            found.go_on()
            found.drop()
            self._notify(found)
        elif found.kept or found.waiting.ids:
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
                    if not bringing.cancelled():
                        bringing.exception()  # whether it is raised here, or what else is wrong
                whole = not bringing.cancelled() and bringing.result()
                if whole and await self._finish(found, grant, end=end):
                    return
        finally:
            # What was not sent is forgotten; what was cannot be sent again.
            found.keeps = True
            found.drop()
            found.base = found.sent.at
            found.last = min(found.last, found.sent.at)

    async def _bring(self, found: Stream, grant: int, items: Items) -> bool:
        """Send these, all of them; False: the flow wants something else meanwhile."""
        iterator = chunks(items)
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

        found.seal()
        if end:
            # The end is that of what was sent for this grant; for another one it is yet to be sent.
            found.ending = lambda: grant is None or found.grants == grant
        self._want(found)
        try:
            await self._until(is_over, found)
        finally:
            found.ending = None
            done = is_done()
            if found.sent.phase is Phase.ENDED:  # it is not ours any more
                self._sender.refused(found.sent)
                found.wanted = not done  # who stops to wait may go on with it
                self._notify(found)
        return done

    def _check_free(self, found: Stream) -> None:
        if found.busy:
            raise FeedError(f"{found.name!r} is being {found.busy}: one at a time")

    # ------------------------------------------------------------ messages

    def _stream(self, name: str) -> Stream:
        if self._closed or self._task is None:
            raise FeedError(f"this connector is {'closed' if self._closed else 'not open'}")
        found = self._streams.get(name)
        if found is None:
            check_name(name)
            found = self._streams[name] = Stream(self._sender.stream(name), self._kept)
        if not found.wanted:
            found.wanted = True
            self._notify(found)
        return found

    def _add_all(self, found: Stream, items: Sequence[Item]) -> None:
        try:
            if len(items) > 1:
                found.add_all(items)
            else:
                found.add(*parts(items[0]))
        finally:
            self._seal_soon(found)

    def _hand(self, found: Stream, piece: Piece) -> int:
        """Messages that were packed elsewhere, whatever is wrong with their stream; how many."""
        count = found.take_over(piece)
        self._seal_soon(found)
        return count

    def _seal_soon(self, found: Stream) -> None:
        """At the end of this turn, what waits becomes a piece."""
        self._unsealed[found.name] = found
        if not self._sealing:
            self._sealing = True
            self._loop.call_soon(self._seal_all)

    def _seal_all(self) -> None:
        self._sealing = False
        unsealed, self._unsealed = self._unsealed, {}
        for found in unsealed.values():
            found.seal()
            self._want(found)
            self._tell_passed(found)
        self._pump()

    def _want(self, found: Stream) -> None:
        if not found.queued:
            found.queued = True
            self._ready.append(found)
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send what there are credits for."""
        self._pumping = False
        sender, ready = self._sender, self._ready
        while ready and sender.credits > 0 and self._line.opened:
            found = ready.popleft()
            found.queued = False
            if not found.is_open:
                continue  # it comes back when it is granted
            if found.has_more:
                self._send_piece(found)
            if found.has_more:
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
        self._line.send(told)
        self._sender.sent(found.sent, found.sent.at, COST)
        self._sender.ended(found.sent)

    def _send_piece(self, found: Stream) -> None:
        piece = found.take()
        self._line.send(c.Messages(stream=found.sent.number), piece.blob)
        self._sender.sent(found.sent, piece.last, len(piece.blob) + COST)
        if not found.keeps:
            self._wake(found)

    def _notify(self, found: Stream) -> None:
        idle = found.sent.phase is Phase.IDLE and found.error is None
        if self._line.opened and found.wanted and idle:
            self._sender.asks(found.sent)
            acked = found.sent.acked
            told = c.Notify(stream=found.sent.number, name=found.name)
            if acked != NONE:
                told.por = acked
            self._line.send(told)

    # ------------------------------------------------------------ waiting

    async def _make_room(self, found: Stream) -> None:
        await self._until(lambda: self._kept.size < self._keep, found, room=True)

    async def _until(
        self, done: Callable[[], bool], found: Stream | None = None, room: bool = False
    ) -> None:
        """Wait for something of a stream, and raise what is wrong with it; `room`: for something of any."""
        while not done():
            self._check(found)
            await asyncio.wait([self._change(None if room else found)])
        self._check(found)

    def _check(self, found: Stream | None = None) -> None:
        error = self._error or (found.error if found is not None else None)
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

    # ------------------------------------------------------------ what workers say

    def _lost(self) -> None:
        self._sender.lost()
        self._wake()

    def _give_up(self, error: Exception) -> None:
        """Nothing can be sent any more."""
        self._error = error
        self._line.end()
        self._wake()

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
                self._line.welcome()
                for found in self._streams.values():
                    self._notify(found)
                self._wake()
            case c.Restart():
                self._line.leave(command.address)
            case c.Refused():
                self._refused(command)
            case p.Ping():
                self._line.send(p.Pong(number=command.number))

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
                self._line.leave(answer.address)
            else:
                self._loop.call_later(found.pause * random.uniform(0.5, 1.0), self._notify, found)
                found.pause = min(2 * found.pause, ASK_AGAIN[1])

    def _granted(self, found: Stream, por: int) -> None:
        """Go on after that id."""
        known = found.sent.acked
        self._sender.granted(found.sent, por)
        found.grants += 1
        if not found.granted(por):
            after = "from its start" if por == NONE else f"after {por}"
            why = "it began with an older snapshot" if por < known else "it has gone back"
            begins = found.base if found.base > por or found.first is None else found.first - 1
            error = RewindError(
                f"the flow wants {found.name!r} {after}: {why}. What is here begins after {begins}; "
                "send all of it again, by another connector, or feed a function"
            )
            found.drop()
            found.stop(error)
            found.wanted = False
            self._eos(found)  # others may send it
            self._sender.refused(found.sent)
            self._wake()  # there is more room
        self._tell_passed(found)
        self._want(found)
        self._wake(found)

    def _tell_passed(self, found: Stream) -> None:
        """Messages were passed over; said before they are acknowledged."""
        passed, found.passed = found.passed, []
        if passed and self.on_passed is not None:
            self._call(self.on_passed, found.name, [id_ for ids in passed for id_ in ids.tolist()])

    def _call(self, theirs: Callable[..., None], *told: Any) -> None:
        try:
            theirs(*told)
        except Exception as error:  # whoever waits is to hear of it
            self._give_up(error)

    def _acked(self, number: int, por: int) -> None:
        sent = self._sender.numbers.get(number)
        if sent is None or not self._sender.acknowledged(sent, por):
            return
        found = self._streams[sent.name]
        if self.on_passed is not None:
            found.seal()
            self._want(found)
            self._tell_passed(found)
        found.acknowledged(por)
        if self.on_ack is not None:
            self._call(self.on_ack, sent.name, por)
        self._wake(found)

    def _refused(self, told: c.Refused) -> None:
        error = RefusedError(
            told.code, told.text, told.stream, told.id if told.HasField("id") else None
        )
        found = self._streams.get(told.stream) if told.stream else None
        if found is None:
            self._give_up(error)
        else:
            found.stop(error)
            self._line.leave()
            self._wake()
