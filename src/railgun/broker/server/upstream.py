"""A session's own session at another node: one connection to the port of its clients.

Rules:

1. It is dialled once. If that fails nothing was sent, and whoever waits for it is told; if it breaks later, `broke`.
2. Its hello says that it is passed on, and for which client.
3. It pings several times a second, so that the other node knows soon when this one is frozen, and is dead if pings
   are not answered for `SILENCE_S` seconds while it is read (`transport.heartbeat`). Pings of the other node are
   answered after all that came before them was dealt with.
4. It is not read while the client has no room. When it is closed, what was sent before still goes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from railgun.broker.streams.routing import There
from railgun.errors import RailgunError
from railgun.transport.commands import NUMBERS, VERSION, Blob, FrameError, FrameReader, encode
from railgun.transport.connection import Connection
from railgun.transport.heartbeat import Beat, Heartbeat
from railgun.transport.hello import HelloError
from railgun.transport.outbox import Outbox
from railgun.transport.proto import streams_pb2 as p

if TYPE_CHECKING:
    from railgun.broker.server.relay import Relay
    from railgun.broker.server.session import Session

ROOM: Final = 4 << 20  # bytes that wait to be taken by the other node
PATIENCE: Final = 3.0  # seconds until a node that is dialled has answered
SILENCE_S: Final = 2.5
CLOSING_S: Final = 20.0  # for what was sent before a connection is closed
PING_KIND: Final = NUMBERS[p.Ping]
PONG_KIND: Final = NUMBERS[p.Pong]
GOING_AWAY_KIND: Final = NUMBERS[p.GoingAway]


class UpstreamError(RailgunError):
    """The other node could not be reached, or does not let us in (`refused`)."""

    def __init__(self, text: str, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class _Wire(Connection):
    """A connection that tells when there is room again."""

    resumed: Callable[[], None] = staticmethod(lambda: None)

    def resume_writing(self) -> None:
        """What waited has gone."""
        self.resumed()


class Upstream:
    """One session at one other node. It begins to connect as soon as it is made."""

    def __init__(self, relay: Relay, session: Session, place: There) -> None:
        self.node = place.node
        self.address = (place.host, place.port)
        self.open = False
        self.going = False
        """Whether the other node is about to end, and takes nothing more."""
        self.publishes: dict[int, str] = {}
        """The streams of publishes that were not answered, by their numbers."""
        self._relay, self._session = relay, session
        self._loop = session.node.loop
        self._reader = FrameReader()
        self._wire: _Wire | None = None
        self._outbox: Outbox | None = None
        self._paused = False
        self._heartbeat = Heartbeat(SILENCE_S, self._loop.time())
        self._beating: asyncio.TimerHandle | None = None
        self._lost: Exception | None = None
        self._closed = False
        self.dialling = self._loop.create_task(self._dial())
        """It is done when it is open, or will not be."""
        self.dialling.add_done_callback(_heard_of)

    # ------------------------------------------------------------ begin and end

    def check(self) -> None:
        """Raises `UpstreamError` if it will not be open."""
        if self.dialling.cancelled():
            raise UpstreamError("it was closed")
        if self.dialling.done():
            self.dialling.result()

    async def _dial(self) -> None:
        opened: asyncio.Future[None] = self._loop.create_future()
        passage = self._session.node.passage
        if passage is None:
            raise UpstreamError("this node does not know how to speak to others")

        def made(connection: Connection) -> None:
            connection.filling = self._reader
            if not opened.done():
                opened.set_result(None)

        def gone(connection: Connection, error: Exception | None) -> None:
            self._lost = error or UpstreamError("the connection was closed")
            if not opened.done():
                opened.set_exception(self._lost)
            self._gone()

        name = self._session.connection.who.get("name") or ""
        who: dict[str, Any] = {"version": VERSION, "name": name, "forwarded": True}
        wire: _Wire | None = None
        try:
            async with asyncio.timeout(PATIENCE):
                _, wire = await self._loop.create_connection(
                    lambda: _Wire(passage.secret, made, self._received, gone, who),
                    *self.address,
                    ssl=passage.tls,
                    local_addr=(passage.source, 0) if passage.source else None,
                )
                await opened
        except BaseException as error:
            if wire is not None:
                wire.abort()
            if opened.done() and not opened.cancelled():
                opened.exception()
            if isinstance(error, TimeoutError):
                raise UpstreamError("no hello in time") from None
            if isinstance(error, OSError | RailgunError):
                raise UpstreamError(str(error), isinstance(error, HelloError)) from error
            raise
        if self._lost is not None:
            raise UpstreamError(str(self._lost))
        self._wire = wire
        wire.transport.set_write_buffer_limits(high=ROOM - 1)
        wire.resumed = self._relay.room_there
        self._outbox = Outbox(self._loop, wire.transport, self._flushed)
        self._heartbeat = Heartbeat(SILENCE_S, self._loop.time())
        self._beating = self._loop.call_later(self._heartbeat.interval_s, self._beat)
        self.open = True

    def _gone(self) -> None:
        was_open, self.open = self.open, False
        if self._beating is not None:
            self._beating.cancel()
        if was_open and not self._closed:
            self._relay.broke(self)

    def client_gone(self) -> None:
        """Say that the client itself has gone: it will not come back by another node."""
        self.send(b"".join(encode(p.GoingAway())))

    def close(self) -> None:
        """End it, after what was sent."""
        self._closed = True
        self.dialling.cancel()
        if self._beating is not None:
            self._beating.cancel()
        if self._wire is not None and self._outbox is not None:
            self._outbox.flush()
            self._wire.close()
            self._loop.call_later(CLOSING_S, self._wire.abort)  # if it does not take it

    def _beat(self) -> None:
        assert self._wire is not None
        if self._paused:  # its answers are not read
            self._heartbeat.heard_s = self._loop.time()
        if self._heartbeat.tick(self._loop.time()) is Beat.DEAD:
            self._wire.abort()
            return
        self.send(b"".join(encode(p.Ping(number=0))))
        self._beating = self._loop.call_later(self._heartbeat.interval_s, self._beat)

    # ------------------------------------------------------------ frames

    @property
    def unsent(self) -> int:
        """Bytes that wait."""
        return 0 if self._outbox is None else self._outbox.unsent

    def send(self, data: Blob) -> None:
        """Send a frame."""
        if self._outbox is not None:
            self._outbox.send([data])

    def _flushed(self) -> None:
        if self.unsent < ROOM and not self._closed:
            self._relay.room_there()

    def _received(self, connection: Connection, data: bytes) -> None:
        if self._closed:
            return
        self._heartbeat.heard_s = self._loop.time()
        try:
            for raw in self._reader.raw(data):
                if raw.kind == PONG_KIND:
                    continue
                if raw.kind in (PING_KIND, GOING_AWAY_KIND):
                    self.going = self.going or raw.kind == GOING_AWAY_KIND
                    self.send(b"".join(encode(p.Pong(number=raw.command().number))))
                    continue
                self._relay.heard(self, raw)
                if self._closed:
                    return
        except FrameError as error:
            connection.close(error)
            return
        if not self._session.room and not self._paused:
            self._paused = True
            with contextlib.suppress(RuntimeError):
                connection.transport.pause_reading()

    def read(self) -> None:
        """The client has room again."""
        if self._paused and self._wire is not None:
            self._paused = False
            self._heartbeat.heard_s = self._loop.time()
            with contextlib.suppress(RuntimeError):
                self._wire.transport.resume_reading()


def _heard_of(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # whoever wants to hear of it asks
