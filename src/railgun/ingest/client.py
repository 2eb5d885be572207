"""Push streams of messages from another program into a flow, each message exactly once.

    async with Connector("orders") as c:
        await c.send("gateway-7", 0, b'{"price": 3}')
        await c.flush()

The ids of a stream's messages increase. A message is *acknowledged* when it is in a committed snapshot of the flow;
until then the flow may request it again, so it is kept. Rules:

1. When a connection is lost, workers come and go, or the flow returns to a snapshot, the connector connects again,
   announces its streams, and sends each stream from the position that the flow names.
2. Messages that were sent and not acknowledged are kept in memory, up to `keep` bytes; then `send` waits. `feed` with a
   function keeps nothing: it calls the function again, with the id after which to continue, as soon as the flow names
   another position.
3. A message whose id the flow already has is not sent (`on_passed` reports it). So a restarted program can continue: it
   sends everything again, or queries the `position` where to begin.
4. Permanent errors (a wrong secret, a payload that the flow refuses) are raised by the call that waits. Transient
   errors are retried, with growing pauses. An error of one stream stops only that stream.
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
from railgun.ingest.connection import WorkerLink
from railgun.ingest.errors import FeedError, NoFlowError, RefusedError, RewindError
from railgun.ingest.find_flow import Flow
from railgun.ingest.items import Item, Items, Payload, chunks, item_fields
from railgun.ingest.stream import PIECE_BYTES, REOPEN_PAUSES_S, Kept, Piece, Stream, check_name
from railgun.transport.ingest_batch import FRAME_COST, VERSION
from railgun.transport.proto import connectors_pb2 as c
from railgun.transport.proto import streams_pb2 as p

KEEP_BYTES: Final = 256 << 20  # of messages that are not acknowledged
READ_AHEAD_PIECES: Final = 16  # the most pieces of a stream that wait to be sent
READ_AHEAD_BYTES: Final = 64 << 20  # the most bytes of pieces that wait, of all streams together


class Connector:
    """A client that pushes streams of messages into a flow.

    `flow`: the name of a job on this machine; or the URL of a job's HTTP API, with its `token`; or `host:port` of a
    worker (several are separated by commas), with the `secret` of the source. `source`: the name of the source, if the
    flow has several. `timeout`: seconds to connect. `keep`: the most bytes of messages kept until they are
    acknowledged. `on_ack` is called with a stream and an id, `on_passed` with a stream and the ids of messages that
    were not sent; both are called in the event loop, so they must not wait.
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
        keep: int = KEEP_BYTES,
        program: str = "connector",
        on_ack: Callable[[str, int], None] | None = None,
        on_passed: Callable[[str, list[int]], None] | None = None,
    ) -> None:
        self._flow = Flow(flow, source, token, secret, registry)
        self._flow.check()
        if keep < 1:
            raise FeedError(
                f"keep is at least 1 byte, not {keep!r}: messages are kept until they are acknowledged"
            )
        self._timeout = timeout
        self._keep = keep
        who = {
            "version": VERSION,
            "program": program,
            "instance": f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}",
            **({} if source is None else {"source": source}),
        }
        self._link = WorkerLink(self._flow, who, self._handle, self._lost, self._give_up)
        self.on_ack = on_ack
        """Called with a stream and an id: all messages up to this id are acknowledged."""
        self.on_passed = on_passed
        """Called with a stream and ids of messages that were not sent: the flow had them from another connector."""
        self._sender = Sender()
        self._streams: dict[str, Stream] = {}
        self._ready: deque[Stream] = deque()  # streams with something to send
        self._kept = Kept()
        self._changed: asyncio.Future[None] | None = None  # done at the next change of anything
        self._unsealed: dict[str, Stream] = {}  # streams with messages that are not in a piece yet
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self._sealing = False
        self._pumping = False  # whether a call of `_pump` is scheduled
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
        """Connect; raise `NoFlowError` if that fails within the timeout."""
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = self._loop.create_task(self._link.run())
        try:
            await self._await_opening(self._loop.time() + self._timeout)
        except BaseException:
            await self.close()
            raise

    async def _await_opening(self, deadline: float) -> None:
        while not self._link.opened:
            self._check()
            left = deadline - self._loop.time()
            if left <= 0:
                cause = self._link.cause
                why = f": {cause}" if cause is not None else ""
                raise NoFlowError(
                    f"no connection to {self._flow.where} within {self._timeout:.0f} s{why}"
                )
            await asyncio.wait([self._change()], timeout=left)

    async def close(self) -> None:
        """Close the connection. Messages that are not acknowledged may reach the flow or not."""
        self._closed = True
        self._link.end()
        self._wake()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.sleep(0)

    async def position(self, stream: str) -> int | None:
        """Return the id after which the flow wants a stream to continue; None: from its start."""
        outgoing = self._stream(stream)
        settled = (Phase.OPEN, Phase.ENDED)
        await self._until(lambda: outgoing.sent.phase in settled, outgoing)
        return None if outgoing.sent.at == NONE else outgoing.sent.at

    @property
    def connected(self) -> bool:
        """Whether the connector is connected to a worker now."""
        return self._link.opened

    @property
    def connections(self) -> int:
        """The number of connections made so far."""
        return self._link.connections

    @property
    def error(self) -> Exception | None:
        """The error after which nothing can be sent any more, or None. Errors of one stream are raised by its calls."""
        return self._error

    def acked(self, stream: str) -> int | None:
        """Return the id up to which all messages of a stream are known to be in a committed snapshot, or None."""
        outgoing = self._streams.get(stream)
        return None if outgoing is None or outgoing.sent.acked == NONE else outgoing.sent.acked

    async def send(
        self,
        stream: str,
        id: int,
        payload: Payload,
        *,
        key: str | None = None,
        time: int | None = None,
    ) -> None:
        """Send a message; return at once unless `keep` bytes are waiting for their acknowledgement.

        Messages sent in quick succession travel together. `key` and `time` (µs since 1970) are optional. If the call
        raises, or is cancelled, the message was not accepted.
        """
        outgoing = self._streams.get(stream)
        if outgoing is not None and outgoing.waiting.size >= PIECE_BYTES:
            outgoing.seal()
            self._want(outgoing)
            await asyncio.sleep(0)
        if outgoing is None or not outgoing.wanted or self._closed:
            outgoing = self._stream(stream)
        if outgoing.busy:
            self._check_free(outgoing)
        if self._kept.size >= self._keep or outgoing.error is not None or self._error is not None:
            await self._make_room(outgoing)
            self._check_free(self._stream(stream))
        outgoing.add(id, payload, key, time)
        self._seal_soon(outgoing)

    async def flush(self) -> None:
        """Wait until all messages sent so far are acknowledged.

        Errors of streams are raised after the other streams are done: the first error, with notes about the rest.
        """
        self._seal_all()
        errors: list[Exception] = []
        for outgoing, last in [(outgoing, outgoing.last) for outgoing in self._streams.values()]:
            try:
                await self._until(
                    lambda outgoing=outgoing, last=last: (
                        outgoing.sent.acked >= min(last, outgoing.last)
                    ),  # type: ignore[misc]
                    outgoing,
                )
            except Exception as error:
                self._check()
                errors.append(error)
        if errors:
            for more in errors[1:]:
                note = f"and {type(more).__name__}: {more}"
                if note not in getattr(errors[0], "__notes__", ()):
                    errors[0].add_note(note)
            raise errors[0]

    async def wait(self, stream: str, id: int) -> None:
        """Wait until the message with this id, and all before it, are acknowledged."""
        outgoing = self._stream(stream)
        await self._until(lambda: outgoing.sent.acked >= id, outgoing)

    def skip(self, stream: str, id: int) -> bool:
        """Drop a message that the flow has refused (`RefusedError`), and continue; return False if it is not kept here.

        Messages from a function given to `feed` are not kept: feed a function that corrects or omits the message.
        """
        outgoing = self._stream(stream)
        if not outgoing.leave_out(id):
            return False
        if isinstance(outgoing.error, RefusedError) and outgoing.error.id == id:
            outgoing.go_on()
        self._notify(outgoing)
        self._want(outgoing)
        self._wake(outgoing)
        return True

    async def end(self, stream: str) -> None:
        """End a stream: wait until all of it is acknowledged. Then this or another connector may continue it."""
        outgoing = self._stream(stream)
        self._check_free(outgoing)
        outgoing.busy = "ended"
        try:
            await self._finish(outgoing)
        finally:
            outgoing.busy = ""

    async def feed(
        self, stream: str, source: Items | Callable[[int | None], Items], *, end: bool = True
    ) -> None:
        """Send all items of `source`: an iterable, or a function that returns one.

        Items are `(id, payload)`, or `(id, payload, key, time)`. The function is called with the id after which to
        continue (None: from the start). Its items are not kept: when the flow goes back, the function is called again.
        Since it provides all that the flow lacks, a stream that an error has stopped continues. Returns when all items
        are acknowledged; with `end=False`, when all were sent, and the stream does not end.
        """
        outgoing = self._stream(stream)
        self._check_free(outgoing)
        outgoing.busy = "fed"
        try:
            if callable(source):
                await self._replay(outgoing, source, end)
                return
            self._check(outgoing)
            async for chunk in chunks(source):
                self._add_all(outgoing, chunk)
                self._pump()
                await self._make_room(outgoing)
            if end:
                await self._finish(outgoing)
        finally:
            outgoing.busy = ""

    async def _replay(
        self, stream: Stream, source: Callable[[int | None], Items], end: bool
    ) -> None:
        """Send the items of a function, and call it again whenever the flow names another position, until all is sent.

        With `end`, also until all of it is acknowledged.
        """
        if stream.error is not None:
            stream.go_on()
            stream.drop()
            self._notify(stream)
        elif stream.kept or stream.waiting.ids:
            await self._until(lambda: stream.sent.acked >= stream.last, stream)
        stream.keeps = False
        try:
            while True:
                await self._until(lambda: stream.is_open, stream)
                grant, at = stream.grants, stream.sent.at
                stream.last = at
                items = source(None if at == NONE else at)
                bringing = self._loop.create_task(self._bring(stream, grant, items))
                bringing.add_done_callback(lambda _: self._wake(stream))
                try:
                    await self._until(
                        lambda g=grant, b=bringing: b.done() or stream.grants != g,  # type: ignore[misc]
                        stream,
                    )
                finally:
                    if not bringing.done():
                        bringing.cancel()
                        await asyncio.wait([bringing])
                    if not bringing.cancelled():
                        bringing.exception()  # mark it as retrieved, though another error may be raised
                whole = not bringing.cancelled() and bringing.result()
                if whole and await self._finish(stream, grant, end=end):
                    return
        finally:
            # Drop what was not sent; what was sent cannot be sent again.
            stream.keeps = True
            stream.drop()
            stream.base = stream.sent.at
            stream.last = min(stream.last, stream.sent.at)

    async def _bring(self, stream: Stream, grant: int, items: Items) -> bool:
        """Send all of `items`; return False if the flow names another position meanwhile."""
        iterator = chunks(items)
        async with contextlib.aclosing(iterator):
            async for chunk in iterator:
                if stream.grants != grant:
                    return False
                self._add_all(stream, chunk)
                self._pump()
                most = max(
                    1, min(READ_AHEAD_PIECES, READ_AHEAD_BYTES // PIECE_BYTES // len(self._streams))
                )
                await self._until(
                    lambda most=most: len(stream.kept) < most or stream.grants != grant,  # type: ignore[misc]
                    stream,
                )
        return stream.grants == grant

    async def _finish(self, stream: Stream, grant: int | None = None, *, end: bool = True) -> bool:
        """Wait until all of a stream is acknowledged, and with `end` announce its end.

        Return False if the flow names another position (another `grant`) before that.
        """

        def is_done() -> bool:
            ended = not end or stream.sent.phase is Phase.ENDED
            return ended and stream.sent.acked >= stream.last

        def is_over() -> bool:
            return is_done() or (grant is not None and stream.grants != grant)

        stream.seal()
        if end:
            # This end belongs to this grant: after another grant, messages are yet to be sent.
            stream.ending = lambda: grant is None or stream.grants == grant
        self._want(stream)
        try:
            await self._until(is_over, stream)
        finally:
            stream.ending = None
            done = is_done()
            if stream.sent.phase is Phase.ENDED:  # the stream no longer belongs to this connector
                self._sender.refused(stream.sent)
                stream.wanted = not done  # a caller that stops waiting may continue it
                self._notify(stream)
        return done

    def _check_free(self, stream: Stream) -> None:
        if stream.busy:
            raise FeedError(f"{stream.name!r} is being {stream.busy}: one at a time")

    # ------------------------------------------------------------ messages

    def _stream(self, name: str) -> Stream:
        if self._closed or self._task is None:
            raise FeedError(f"this connector is {'closed' if self._closed else 'not open'}")
        stream = self._streams.get(name)
        if stream is None:
            check_name(name)
            stream = self._streams[name] = Stream(self._sender.stream(name), self._kept)
        if not stream.wanted:
            stream.wanted = True
            self._notify(stream)
        return stream

    def _add_all(self, stream: Stream, items: Sequence[Item]) -> None:
        try:
            if len(items) > 1:
                stream.add_all(items)
            else:
                stream.add(*item_fields(items[0]))
        finally:
            self._seal_soon(stream)

    def _hand(self, stream: Stream, piece: Piece) -> int:
        """Take over a piece packed by another thread, even if its stream has an error; return its message count."""
        count = stream.take_over(piece)
        self._seal_soon(stream)
        return count

    def _seal_soon(self, stream: Stream) -> None:
        """Pack the waiting messages into a piece at the end of this turn of the event loop."""
        self._unsealed[stream.name] = stream
        if not self._sealing:
            self._sealing = True
            self._loop.call_soon(self._seal_all)

    def _seal_all(self) -> None:
        self._sealing = False
        unsealed, self._unsealed = self._unsealed, {}
        for stream in unsealed.values():
            stream.seal()
            self._want(stream)
            self._tell_passed(stream)
        self._pump()

    def _want(self, stream: Stream) -> None:
        if not stream.queued:
            stream.queued = True
            self._ready.append(stream)
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send as many pieces as there are credits for."""
        self._pumping = False
        sender, ready = self._sender, self._ready
        while ready and sender.credits > 0 and self._link.opened:
            stream = ready.popleft()
            stream.queued = False
            if not stream.is_open:
                continue  # the next grant queues it again
            if stream.has_more:
                self._send_piece(stream)
            if stream.has_more:
                stream.queued = True
                ready.append(stream)
            elif stream.ending is not None and stream.ending() and not stream.waiting.ids:
                self._eos(stream)
                self._wake(stream)

    def _eos(self, stream: Stream) -> None:
        """Announce the end of a stream."""
        command = c.Eos(stream=stream.sent.number)
        if stream.sent.at != NONE:
            command.last = stream.sent.at
        self._link.send(command)
        self._sender.sent(stream.sent, stream.sent.at, FRAME_COST)
        self._sender.ended(stream.sent)

    def _send_piece(self, stream: Stream) -> None:
        piece = stream.take()
        self._link.send(c.Messages(stream=stream.sent.number), piece.blob)
        self._sender.sent(stream.sent, piece.last, len(piece.blob) + FRAME_COST)
        if not stream.keeps:
            self._wake(stream)

    def _notify(self, stream: Stream) -> None:
        idle = stream.sent.phase is Phase.IDLE and stream.error is None
        if self._link.opened and stream.wanted and idle:
            self._sender.asks(stream.sent)
            acked = stream.sent.acked
            command = c.Notify(stream=stream.sent.number, name=stream.name)
            if acked != NONE:
                command.por = acked
            self._link.send(command)

    # ------------------------------------------------------------ waiting

    async def _make_room(self, stream: Stream) -> None:
        await self._until(lambda: self._kept.size < self._keep, stream, room=True)

    async def _until(
        self, done: Callable[[], bool], stream: Stream | None = None, room: bool = False
    ) -> None:
        """Wait until `done` returns True, checking after each change of `stream`; raise the stream's error.

        `room`: check after changes of any stream.
        """
        while not done():
            self._check(stream)
            await asyncio.wait([self._change(None if room else stream)])
        self._check(stream)

    def _check(self, stream: Stream | None = None) -> None:
        error = self._error or (stream.error if stream is not None else None)
        if error is not None:
            raise error
        if self._closed:
            raise FeedError("this connector is closed")

    def _change(self, stream: Stream | None = None) -> asyncio.Future[None]:
        """Return a future that is done at the next change of a stream, or of anything. Shared: never cancel it."""
        future = self._changed if stream is None else stream.changed
        if future is None:
            future = self._loop.create_future()
            if stream is None:
                self._changed = future
            else:
                stream.changed = future
        return future

    def _wake(self, stream: Stream | None = None) -> None:
        """Wake the calls that wait for a change of `stream`, or of any stream if it is None.

        Only the waiters of the one stream are woken, since there may be thousands of streams.
        """
        streams = self._streams.values() if stream is None else (stream,)
        waited = [self._changed, *(changed.changed for changed in streams)]
        self._changed = None
        for changed in streams:
            changed.changed = None
        for future in waited:
            if future is not None and not future.done():
                future.set_result(None)

    # ------------------------------------------------------------ commands of workers

    def _lost(self) -> None:
        self._sender.lost()
        self._wake()

    def _give_up(self, error: Exception) -> None:
        """Stop all streams because of a permanent error."""
        self._error = error
        self._link.end()
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
                self._link.welcome()
                for stream in self._streams.values():
                    self._notify(stream)
                self._wake()
            case c.Restart():
                self._link.leave(command.address)
            case c.Refused():
                self._refused(command)
            case p.Ping():
                self._link.send(p.Pong(number=command.number))

    def _answered(self, answer: c.NotifyAck) -> None:
        sent = self._sender.numbers.get(answer.stream)
        if sent is None:
            return
        stream = self._streams[sent.name]
        if answer.granted:
            stream.pause = REOPEN_PAUSES_S[0]
            self._granted(stream, answer.por if answer.HasField("por") else NONE)
        else:
            self._sender.refused(sent)
            if answer.reason == c.REDIRECT:
                self._link.leave(answer.address)
            else:
                self._loop.call_later(stream.pause * random.uniform(0.5, 1.0), self._notify, stream)
                stream.pause = min(2 * stream.pause, REOPEN_PAUSES_S[1])

    def _granted(self, stream: Stream, por: int) -> None:
        """Continue a stream after the id `por`, or stop it if messages before that are no longer kept."""
        acked = stream.sent.acked
        self._sender.granted(stream.sent, por)
        stream.grants += 1
        if not stream.granted(por):
            after = "from its start" if por == NONE else f"after {por}"
            why = "it began with an older snapshot" if por < acked else "it has gone back"
            begins = stream.base if stream.base > por or stream.first is None else stream.first - 1
            error = RewindError(
                f"the flow wants {stream.name!r} {after}: {why}. The messages kept here begin after {begins}; "
                "send all of it again, by another connector, or feed a function"
            )
            stream.drop()
            stream.stop(error)
            stream.wanted = False
            self._eos(stream)  # so that another connector may send it
            self._sender.refused(stream.sent)
            self._wake()  # its messages no longer take room
        self._tell_passed(stream)
        self._want(stream)
        self._wake(stream)

    def _tell_passed(self, stream: Stream) -> None:
        """Report messages that were not sent because the flow had them, before they are acknowledged."""
        passed, stream.passed = stream.passed, []
        if passed and self.on_passed is not None:
            self._call(self.on_passed, stream.name, [id_ for ids in passed for id_ in ids.tolist()])

    def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            callback(*arguments)
        except Exception as error:  # the calls that wait raise it
            self._give_up(error)

    def _acked(self, number: int, por: int) -> None:
        sent = self._sender.numbers.get(number)
        if sent is None or not self._sender.acknowledged(sent, por):
            return
        stream = self._streams[sent.name]
        if self.on_passed is not None:
            stream.seal()
            self._want(stream)
            self._tell_passed(stream)
        stream.acknowledged(por)
        if self.on_ack is not None:
            self._call(self.on_ack, sent.name, por)
        self._wake(stream)

    def _refused(self, refusal: c.Refused) -> None:
        error = RefusedError(
            refusal.code,
            refusal.text,
            refusal.stream,
            refusal.id if refusal.HasField("id") else None,
        )
        stream = self._streams.get(refusal.stream) if refusal.stream else None
        if stream is None:
            self._give_up(error)
        else:
            stream.stop(error)
            self._link.leave()
            self._wake()
