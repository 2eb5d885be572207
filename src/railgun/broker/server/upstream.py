"""Open a session at another node on behalf of a client's session: one connection to that node's client port.

Rules:

1. It is dialled once. If that fails nothing was sent, and the waiting frame gets the error; a break later calls
   `upstream_lost`.
2. Its hello says that the session is forwarded, and for which client.
3. It pings several times a second, so that the other node soon notices when this one is frozen, and is dead if pings
   are not answered for `SILENCE_S` seconds while it is read (`transport.heartbeat`). Pings of the other node are
   answered after all frames that came before them were handled.
4. It is not read while the client takes no more. When it is closed, what was sent before still goes out.
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

MAX_UNSENT_BYTES: Final = 4 << 20  # not yet taken by the other node
DIAL_TIMEOUT_S: Final = 3.0  # for the connection and the hello
SILENCE_S: Final = 2.5
CLOSING_S: Final = 20.0  # time for sending the rest before a connection is aborted
PING_KIND: Final = NUMBERS[p.Ping]
PONG_KIND: Final = NUMBERS[p.Pong]
GOING_AWAY_KIND: Final = NUMBERS[p.GoingAway]


class UpstreamError(RailgunError):
    """The other node could not be reached, or it refuses this node (`refused`)."""

    def __init__(self, text: str, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class _Wire(Connection):
    """A connection that calls `resumed` when there is room to write again."""

    resumed: Callable[[], None] = staticmethod(lambda: None)

    def resume_writing(self) -> None:
        """Report that the transport's buffer has been sent."""
        self.resumed()


class Upstream:
    """A session at another node. Construction begins to connect."""

    def __init__(self, relay: Relay, session: Session, place: There) -> None:
        self.node = place.node
        self.address = (place.host, place.port)
        self.open = False
        self.going = False
        """Whether the other node is about to end, and takes nothing more."""
        self.publishes: dict[int, str] = {}
        """The streams of unanswered publishes, by request number."""
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
        """Done when the connection is open, or has failed."""
        self.dialling.add_done_callback(_retrieve_error)

    # ------------------------------------------------------------ begin and end

    def check(self) -> None:
        """Raise `UpstreamError` if the connection has failed."""
        if self.dialling.cancelled():
            raise UpstreamError("it was closed")
        if self.dialling.done():
            self.dialling.result()

    async def _dial(self) -> None:
        opened: asyncio.Future[None] = self._loop.create_future()
        passage = self._session.node.passage
        if passage is None:
            raise UpstreamError("this node has no secret for other nodes")

        def on_open(connection: Connection) -> None:
            connection.filling = self._reader
            if not opened.done():
                opened.set_result(None)

        def on_close(connection: Connection, error: Exception | None) -> None:
            self._lost = error or UpstreamError("the connection was closed")
            if not opened.done():
                opened.set_exception(self._lost)
            self._gone()

        name = self._session.connection.who.get("name") or ""
        who: dict[str, Any] = {"version": VERSION, "name": name, "forwarded": True}
        wire: _Wire | None = None
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                _, wire = await self._loop.create_connection(
                    lambda: _Wire(passage.secret, on_open, self._received, on_close, who),
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
        wire.transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES - 1)
        wire.resumed = self._relay.resume_client
        self._outbox = Outbox(self._loop, wire.transport, self._flushed)
        self._heartbeat = Heartbeat(SILENCE_S, self._loop.time())
        self._beating = self._loop.call_later(self._heartbeat.interval_s, self._beat)
        self.open = True

    def _gone(self) -> None:
        was_open, self.open = self.open, False
        if self._beating is not None:
            self._beating.cancel()
        if was_open and not self._closed:
            self._relay.upstream_lost(self)

    def client_gone(self) -> None:
        """Tell the other node that the client itself has left, and will not come back by another node."""
        self.send(b"".join(encode(p.GoingAway())))

    def close(self) -> None:
        """Close the connection after all sent data has gone out."""
        self._closed = True
        self.dialling.cancel()
        if self._beating is not None:
            self._beating.cancel()
        if self._wire is not None and self._outbox is not None:
            self._outbox.flush()
            self._wire.close()
            # Abort the connection if the other node does not take the rest.
            self._loop.call_later(CLOSING_S, self._wire.abort)

    def _beat(self) -> None:
        assert self._wire is not None
        if self._paused:  # pongs are not read now
            self._heartbeat.heard_s = self._loop.time()
        if self._heartbeat.tick(self._loop.time()) is Beat.DEAD:
            self._wire.abort()
            return
        self.send(b"".join(encode(p.Ping(number=0))))
        self._beating = self._loop.call_later(self._heartbeat.interval_s, self._beat)

    # ------------------------------------------------------------ frames

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent."""
        return 0 if self._outbox is None else self._outbox.unsent

    def send(self, data: Blob) -> None:
        """Send an encoded frame to the other node."""
        if self._outbox is not None:
            self._outbox.send([data])

    def _flushed(self) -> None:
        if self.unsent < MAX_UNSENT_BYTES and not self._closed:
            self._relay.resume_client()

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
                self._relay.frame_received(self, raw)
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
        """Resume reading, now that the client has room again."""
        if self._paused and self._wire is not None:
            self._paused = False
            self._heartbeat.heard_s = self._loop.time()
            with contextlib.suppress(RuntimeError):
                self._wire.transport.resume_reading()


def _retrieve_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # mark it as retrieved: `check` raises it
