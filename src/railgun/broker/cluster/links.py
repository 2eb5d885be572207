"""Connections to the other nodes of a cluster, one for each lane and direction.

Rules:

1. A node dials every other one, once for each lane, and sends on what it has dialled; what it was called on, it hears.
   So a lane never waits for another one, and a one-way cut cuts one way.
2. Both sides know the cluster's secret before anything is read. The hello says which cluster, which node, whom it
   believes to call, and which lane. Whoever is of another cluster is refused, and whoever meant another node: an
   address may have a new owner.
3. What is sent goes out in order, or is lost with its connection: `down` is told, then `up` when there is a new one.
   `send` says False where there is none.
4. A connection that was lost is dialled again, with growing pauses, and at once when that node calls. So is one over
   which nothing has come for `SILENCE` seconds: each side says something every `PULSE` on what it was called on, for a
   dead link tells nobody.
5. `call` waits for an answer on the lane `control`; a handler of calls may take its time, and hinders nobody. An error
   of a handler is the caller's to hear; no call can end a node.
6. Bytes that are no frame end the connection, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import logging
import os
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Protocol, get_args

from google.protobuf.message import Message

from railgun.broker.discovery.plugin import Address
from railgun.errors import RailgunError
from railgun.transport.commands import VERSION, Blob, FrameError, FrameReader, encode
from railgun.transport.connection import Connection, Gate
from railgun.transport.hello import BAD_VERSION, HelloError
from railgun.transport.listen_rules import is_loopback
from railgun.transport.listener import Listener
from railgun.transport.outbox import Outbox
from railgun.transport.proto import cluster_pb2 as n
from railgun.transport.proto import streams_pb2 as p

Lane = Literal["raft", "data", "events", "control"]
LANES: Final[tuple[Lane, ...]] = get_args(Lane)
PULSE: Final = 0.5
SILENCE: Final = 3.0
AGAIN: Final = (0.05, 1.0)  # seconds to the next try: at first, and at most
LARGEST: Final = (
    256 << 20
)  # bytes of a frame between nodes: the states of all groups of a stream are in one
OTHER_CLUSTER: Final = "OTHER_CLUSTER"
OTHER_NODE: Final = "OTHER_NODE"
_LOG: Final = logging.getLogger(__name__)


class PeerError(RailgunError):
    """What another node answered, or that it did not: `code` is UNREACHABLE, or its own."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Receiver(Protocol):
    """Who gets what other nodes send."""

    def received(self, sender: str, lane: Lane, command: Any, blob: Blob) -> None:
        """A message has come; of all lanes but `control`."""

    def up(self, peer: str, lane: Lane) -> None:
        """There is a new connection to that node, so what was sent before may be lost."""

    def down(self, peer: str, lane: Lane) -> None:
        """The connection is lost."""

    async def called(self, sender: str, name: str, arguments: dict[str, Any]) -> Any:
        """Do what another node asks for; `sender` may be no member (yet)."""


@dataclass(slots=True)
class Identity:
    """Who this node is. `cluster` is empty until it belongs to one."""

    node: str
    cluster: str = ""


@dataclass(slots=True)
class _Peer:
    """Another node: where it is, and what was dialled."""

    address: Address
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    lines: dict[Lane, _Line] = field(default_factory=dict)
    called: asyncio.Event = field(default_factory=asyncio.Event)  # it is there (again)


class _Line:
    """A connection that was dialled, and is open."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        self.connection = connection
        self.outbox = Outbox(loop, connection.transport)
        self.heard = time.monotonic()


class Links:
    """All connections of a node to others. Made within an event loop; `listen`, then `know` who is there."""

    _requests: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(
        self,
        identity: Identity,
        secret: bytes,
        receiver: Receiver,
        *,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
    ) -> None:
        self.identity = identity
        self.port = 0
        self._loop = asyncio.get_running_loop()
        self._secret, self._receiver = secret, receiver
        self._server_tls, self._client_tls = server_tls, client_tls
        self._listener = Listener(
            lambda: Connection(secret, self._welcome, self._hear, self._left), Gate()
        )
        self._from: Address | None = None  # the address that others see, where that matters
        self._peers: dict[str, _Peer] = {}
        self._callers: set[Connection] = set()
        self._answers: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pulse: asyncio.Task[None] | None = None
        self._closed = False

    # ------------------------------------------------------------ begin and end

    async def listen(self, host: str, port: int) -> None:
        """Let others connect."""
        self.port = await self._listener.open(host, port, self._server_tls)
        self._from = (host, 0) if is_loopback(host) and host != "localhost" else None
        self._pulse = self._loop.create_task(self._beat())

    async def close(self) -> None:
        """Leave all."""
        self._closed = True
        self.know({})
        if self._pulse is not None:
            self._pulse.cancel()
        await self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def know(self, addresses: Mapping[str, Address]) -> None:
        """These are the others, and there they are: dial them, and leave all who are not among them."""
        for id in list(self._peers):
            if addresses.get(id) != self._peers[id].address:
                self._leave(id)
        for id, address in addresses.items():
            if id not in self._peers and id != self.identity.node:
                peer = self._peers[id] = _Peer(address)
                peer.tasks = [self._spawn(self._keep(id, peer, lane)) for lane in LANES]

    @property
    def known(self) -> dict[str, Address]:
        """The others, and where they are."""
        return {id: peer.address for id, peer in self._peers.items()}

    def is_up(self, id: str, lane: Lane = "control") -> bool:
        """Whether there is a connection to that node."""
        return id in self._peers and lane in self._peers[id].lines

    def _leave(self, id: str) -> None:
        peer = self._peers.pop(id)
        for task in peer.tasks:
            task.cancel()
        for line in list(peer.lines.values()):
            line.connection.abort()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------ sending

    def send(self, to: str, lane: Lane, command: Message, blobs: Sequence[Blob] = ()) -> bool:
        """Send a message; whether there is a connection to send it on."""
        peer = self._peers.get(to)
        line = peer.lines.get(lane) if peer is not None else None
        if line is None:
            return False
        line.outbox.send(encode(command, blobs, largest=LARGEST))
        return True

    def unsent(self, to: str, lane: Lane) -> int:
        """Bytes that wait to be sent."""
        peer = self._peers.get(to)
        line = peer.lines.get(lane) if peer is not None else None
        return 0 if line is None else line.outbox.unsent

    async def call(
        self, to: str, name: str, arguments: Mapping[str, Any], timeout: float = 5.0
    ) -> Any:
        """Ask another node for something; `PeerError` if it refuses, or does not answer."""
        request = next(self._requests)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._answers[request] = (to, future)
        told = n.Call(request=request, name=name, arguments=json.dumps(arguments))
        try:
            if not self.send(to, "control", told):
                raise PeerError("UNREACHABLE", f"there is no connection to node {to}")
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise PeerError("UNREACHABLE", f"node {to} did not answer in time") from None
        finally:
            self._answers.pop(request, None)

    async def ask(
        self, where: Address, name: str, arguments: Mapping[str, Any], timeout: float = 5.0
    ) -> Any:
        """Call a node by its address, on a connection of its own: it may be no member, or not be known."""
        lost: asyncio.Future[Any] = self._loop.create_future()
        reader = FrameReader(LARGEST)

        def heard(connection: Connection, data: bytes) -> None:
            for frame in reader.feed(data):
                if isinstance(frame.command, n.Answer) and not lost.done():
                    _settle(lost, frame.command)

        def left(connection: Connection, error: Exception | None) -> None:
            if not lost.done():
                code = error.code if isinstance(error, HelloError) else "UNREACHABLE"
                lost.set_exception(PeerError(code, f"{where[0]}:{where[1]}: {error or 'it left'}"))

        told = n.Call(request=1, name=name, arguments=json.dumps(arguments))
        connection: Connection | None = None
        try:
            async with asyncio.timeout(timeout):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(
                        self._secret,
                        lambda made: made.send(b"".join(encode(told))),
                        *(heard, left, self._who("", "control")),
                    ),
                    *where,
                    ssl=self._client_tls,
                    local_addr=self._from,
                )
                return await lost
        except TimeoutError:
            raise PeerError("UNREACHABLE", f"{where[0]}:{where[1]} did not answer") from None
        except (OSError, ValueError) as error:
            code = "TLS" if isinstance(error, ssl.SSLError) else "UNREACHABLE"
            number = getattr(error, "errno", 0) if code != "TLS" else 0
            why = os.strerror(number) if number in errno.errorcode else error
            raise PeerError(code, f"{where[0]}:{where[1]}: {why}") from error
        finally:
            lost.cancel()
            if connection is not None:
                connection.abort()

    # ------------------------------------------------------------ what was dialled

    def _who(self, to: str, lane: Lane) -> dict[str, Any]:
        me = self.identity
        return {"version": VERSION, "cluster": me.cluster, "node": me.node, "to": to, "lane": lane}

    async def _keep(self, id: str, peer: _Peer, lane: Lane) -> None:
        """Keep a connection to a node, as long as it is known."""
        pause, told = AGAIN[0], ""
        while True:
            try:
                lost = await self._dial(id, peer, lane)
                pause, told = AGAIN[0], ""
                self._receiver.up(id, lane)
                await asyncio.wait([lost])
                error = lost.exception()
            except (OSError, ValueError, RailgunError) as wrong:  # also a host that is no name
                error = wrong
            finally:
                if peer.lines.pop(lane, None) is not None and not self._closed:
                    self._fail_calls(id) if lane == "control" else None
                    self._receiver.down(id, lane)
            code = getattr(error, "code", "")
            if code in (OTHER_CLUSTER, "BAD_SECRET", BAD_VERSION) and str(error) != told:
                told = str(error)
                _LOG.warning("node %s at %s:%d refuses us: %s", id, *peer.address, told)
            peer.called.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await peer.called.wait()
            pause = min(2 * pause, AGAIN[1])

    async def _dial(self, id: str, peer: _Peer, lane: Lane) -> asyncio.Future[None]:
        opened: asyncio.Future[None] = self._loop.create_future()
        lost: asyncio.Future[None] = self._loop.create_future()
        reader = FrameReader(LARGEST)
        line: _Line | None = None

        def made(connection: Connection) -> None:
            if not opened.done():
                opened.set_result(None)

        def heard(connection: Connection, data: bytes) -> None:
            if line is not None:
                line.heard = time.monotonic()
            try:
                for frame in reader.feed(data):
                    if isinstance(frame.command, n.Answer):
                        _, future = self._answers.pop(frame.command.request, ("", None))
                        if future is not None:
                            _settle(future, frame.command)
            except FrameError as error:
                connection.close(error)

        def gone(connection: Connection, error: Exception | None) -> None:
            told = error or PeerError("UNREACHABLE", "the connection was closed")
            for future in (opened, lost):
                if not future.done():
                    future.set_exception(told)
                if not future.cancelled():
                    future.exception()

        connection: Connection | None = None
        try:
            async with asyncio.timeout(SILENCE):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._secret, made, heard, gone, self._who(id, lane)),
                    *peer.address,
                    ssl=self._client_tls,
                    local_addr=self._from,
                )
                await opened
        except BaseException as error:
            if connection is not None:
                connection.abort()
            if isinstance(error, TimeoutError):
                raise PeerError("UNREACHABLE", "no hello in time") from None
            raise
        line = peer.lines[lane] = _Line(self._loop, connection)
        return lost

    def _fail_calls(self, id: str) -> None:
        for to, future in list(self._answers.values()):
            if to == id and not future.done():
                future.set_exception(PeerError("UNREACHABLE", f"the connection to {id} was lost"))

    async def _beat(self) -> None:
        """Say something to those who called, and see whether those who were called still say something."""
        pulse = b"".join(encode(p.Pong(number=0)))
        while True:
            await asyncio.sleep(PULSE)
            for caller in self._callers:
                if not caller.unsent:
                    caller.send(pulse)
            now = time.monotonic()
            for peer in self._peers.values():
                for line in peer.lines.values():
                    if now - line.heard > SILENCE:
                        line.connection.abort()

    # ------------------------------------------------------------ who called

    def _welcome(self, connection: Connection) -> None:
        who = connection.who
        version, to, lane = who.get("version"), who.get("to"), who.get("lane")
        theirs, node = who.get("cluster"), who.get("node")
        if self._closed:  # it was let in before, and has only now said hello
            raise HelloError("this node is about to end")
        if version != VERSION:
            raise HelloError(f"this node speaks version {VERSION}, not {version!r}", BAD_VERSION)
        if lane not in LANES or not isinstance(node, str) or not node:
            raise HelloError("the hello does not say which node it is from, or which lane it is")
        mine = self.identity
        if theirs and mine.cluster and theirs != mine.cluster:
            told = f"this is a node of the cluster {mine.cluster}, and you are of {theirs}"
            raise HelloError(told, OTHER_CLUSTER)
        if to and to != mine.node:
            raise HelloError(f"this is node {mine.node}, not {to}", OTHER_NODE)
        if node in self._peers:
            self._peers[node].called.set()
        connection.filling = reader = FrameReader(LARGEST)
        connection.tag = (reader, node, lane)
        self._callers.add(connection)

    def _hear(self, connection: Connection, data: bytes) -> None:
        reader, sender, lane = connection.tag
        try:
            for frame in reader.feed(data):
                if lane != "control":
                    self._receiver.received(sender, lane, frame.command, frame.blob)
                elif isinstance(frame.command, n.Call):
                    self._spawn(self._answer(connection, sender, frame.command))
        except FrameError as error:
            connection.close(error)
        except Exception:
            _LOG.exception("what node %s said on %s cannot be dealt with", sender, lane)
            connection.abort()

    async def _answer(self, connection: Connection, sender: str, call: n.Call) -> None:
        try:
            arguments = json.loads(call.arguments or "{}")
            result = await self._receiver.called(sender, call.name, arguments)
            told = n.Answer(request=call.request, result=json.dumps(result))
        except RailgunError as error:
            code = str(getattr(error, "code", "REFUSED"))
            told = n.Answer(request=call.request, code=code, text=str(error))
        except Exception as error:
            _LOG.exception("the call %s of node %s has failed", call.name, sender)
            told = n.Answer(request=call.request, code="INTERNAL", text=repr(error))
        with contextlib.suppress(FrameError):
            connection.send(b"".join(encode(told, largest=LARGEST)))

    def _left(self, connection: Connection, error: Exception | None) -> None:
        self._callers.discard(connection)


def _settle(future: asyncio.Future[Any], answer: n.Answer) -> None:
    if future.done():
        return
    if answer.code:
        future.set_exception(PeerError(answer.code, answer.text))
    else:
        future.set_result(json.loads(answer.result))
