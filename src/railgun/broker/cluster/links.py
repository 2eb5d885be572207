"""Connect a node to the other nodes of its cluster: one connection for each lane and direction.

Rules:

1. A node dials every other node, once for each lane. It sends on the connections it has dialled, and receives on those
   that others have dialled. So a lane never waits for another lane, and a one-way network cut affects one way only.
2. Both sides prove that they know the cluster's secret before anything is read. The hello names the cluster, the node,
   the node it believes to call, and the lane. A caller of another cluster is refused, and so is a caller that meant
   another node: an address may have a new owner.
3. Messages go out in order, or are lost with their connection: `down` is called, then `up` when there is a new
   connection. `send` returns False without a connection.
4. A lost connection is dialled again, with growing pauses, and at once when the other node calls. So is a connection
   over which nothing has come for `SILENCE_S` seconds: each side sends something every `PULSE_S` seconds on the
   connections it has accepted, because a dead link gives no notice.
5. `call` waits for an answer on the lane `control`; a handler of calls may take its time without delaying others. An
   error of a handler goes to the caller; no call can end a node.
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
PULSE_S: Final = 0.5
SILENCE_S: Final = 3.0
DIAL_PAUSES_S: Final = (0.05, 1.0)  # pause before the next attempt to dial: first, and longest
# Between nodes: a frame has the states of all groups of a stream.
MAX_FRAME_BYTES: Final = 256 << 20
OTHER_CLUSTER: Final = "OTHER_CLUSTER"
OTHER_NODE: Final = "OTHER_NODE"
_LOG: Final = logging.getLogger(__name__)


class PeerError(RailgunError):
    """A call to another node failed: `code` is UNREACHABLE, or the code of that node's error."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Receiver(Protocol):
    """The receiver of what other nodes send."""

    def received(self, sender: str, lane: Lane, command: Any, blob: Blob) -> None:
        """Handle a message of any lane but `control`."""

    def up(self, peer: str, lane: Lane) -> None:
        """Note a new connection to a node: messages sent before may be lost."""

    def down(self, peer: str, lane: Lane) -> None:
        """Note that the connection to a node is lost."""

    async def called(self, sender: str, name: str, arguments: dict[str, Any]) -> Any:
        """Run a call of another node, and return its result; `sender` may not be a member (yet)."""


@dataclass(slots=True)
class Identity:
    """The IDs that this node sends in hellos. `cluster` is empty until the node belongs to a cluster."""

    node: str
    cluster: str = ""


@dataclass(slots=True)
class _Peer:
    """Another node: its address, and the connections dialled to it."""

    address: Address
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    lines: dict[Lane, _Line] = field(default_factory=dict)
    has_called: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # set when that node has called


class _Line:
    """An open connection that this node has dialled."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        self.connection = connection
        self.outbox = Outbox(loop, connection.transport)
        self.heard = time.monotonic()


class Links:
    """All connections of a node to others. Create it within an event loop; call `listen`, then `know`."""

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
            lambda: Connection(
                secret, self._caller_opened, self._frames_received, self._caller_closed
            ),
            Gate(),
        )
        self._source: Address | None = None  # a fixed source address, for nodes on loopback
        self._peers: dict[str, _Peer] = {}
        self._callers: set[Connection] = set()
        self._answers: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pulse: asyncio.Task[None] | None = None
        self._closed = False

    # ------------------------------------------------------------ begin and end

    async def listen(self, host: str, port: int) -> None:
        """Listen for other nodes."""
        self.port = await self._listener.open(host, port, self._server_tls)
        self._source = (host, 0) if is_loopback(host) and host != "localhost" else None
        self._pulse = self._loop.create_task(self._send_pulses())

    async def close(self) -> None:
        """Close all connections and stop listening."""
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
        """Set the other nodes and their addresses: dial them, and disconnect from all others."""
        for id in list(self._peers):
            if addresses.get(id) != self._peers[id].address:
                self._disconnect(id)
        for id, address in addresses.items():
            if id not in self._peers and id != self.identity.node:
                peer = self._peers[id] = _Peer(address)
                peer.tasks = [self._spawn(self._keep(id, peer, lane)) for lane in LANES]

    @property
    def known(self) -> dict[str, Address]:
        """The other nodes and their addresses."""
        return {id: peer.address for id, peer in self._peers.items()}

    def is_up(self, id: str, lane: Lane = "control") -> bool:
        """Return whether there is a connection to node `id` on a lane."""
        return id in self._peers and lane in self._peers[id].lines

    def _disconnect(self, id: str) -> None:
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
        """Send a message. Return False without a connection."""
        peer = self._peers.get(to)
        line = peer.lines.get(lane) if peer is not None else None
        if line is None:
            return False
        line.outbox.send(encode(command, blobs, largest=MAX_FRAME_BYTES))
        return True

    def unsent(self, to: str, lane: Lane) -> int:
        """Return how many bytes wait to be sent."""
        peer = self._peers.get(to)
        line = peer.lines.get(lane) if peer is not None else None
        return 0 if line is None else line.outbox.unsent

    async def call(
        self, to: str, name: str, arguments: Mapping[str, Any], timeout: float = 5.0
    ) -> Any:
        """Call another node and return its result. Raise `PeerError` if it refuses, or does not answer within
        `timeout`."""
        request = next(self._requests)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._answers[request] = (to, future)
        call = n.Call(request=request, name=name, arguments=json.dumps(arguments))
        try:
            if not self.send(to, "control", call):
                raise PeerError("UNREACHABLE", f"there is no connection to node {to}")
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise PeerError("UNREACHABLE", f"node {to} did not answer in time") from None
        finally:
            self._answers.pop(request, None)

    async def ask(
        self, address: Address, name: str, arguments: Mapping[str, Any], timeout: float = 5.0
    ) -> Any:
        """Call a node by its address, on a connection of its own: the node may not be a member, or not be known."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        reader = FrameReader(MAX_FRAME_BYTES)

        def on_data(connection: Connection, data: bytes) -> None:
            for frame in reader.feed(data):
                if isinstance(frame.command, n.Answer) and not answer.done():
                    _settle(answer, frame.command)

        def on_close(connection: Connection, error: Exception | None) -> None:
            if not answer.done():
                code = error.code if isinstance(error, HelloError) else "UNREACHABLE"
                answer.set_exception(
                    PeerError(code, f"{address[0]}:{address[1]}: {error or 'it disconnected'}")
                )

        call = n.Call(request=1, name=name, arguments=json.dumps(arguments))
        connection: Connection | None = None
        try:
            async with asyncio.timeout(timeout):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(
                        self._secret,
                        lambda opened: opened.send(b"".join(encode(call))),
                        *(on_data, on_close, self._hello("", "control")),
                    ),
                    *address,
                    ssl=self._client_tls,
                    local_addr=self._source,
                )
                return await answer
        except TimeoutError:
            raise PeerError("UNREACHABLE", f"{address[0]}:{address[1]} did not answer") from None
        except (OSError, ValueError) as error:
            code = "TLS" if isinstance(error, ssl.SSLError) else "UNREACHABLE"
            number = getattr(error, "errno", 0) if code != "TLS" else 0
            why = os.strerror(number) if number in errno.errorcode else error
            raise PeerError(code, f"{address[0]}:{address[1]}: {why}") from error
        finally:
            answer.cancel()
            if connection is not None:
                connection.abort()

    # ------------------------------------------------------------ dialled connections

    def _hello(self, to: str, lane: Lane) -> dict[str, Any]:
        identity = self.identity
        return {
            "version": VERSION,
            "cluster": identity.cluster,
            "node": identity.node,
            "to": to,
            "lane": lane,
        }

    async def _keep(self, id: str, peer: _Peer, lane: Lane) -> None:
        """Keep a connection to a node on one lane, as long as the node is known."""
        pause, logged = DIAL_PAUSES_S[0], ""
        while True:
            try:
                lost = await self._dial(id, peer, lane)
                pause, logged = DIAL_PAUSES_S[0], ""
                self._receiver.up(id, lane)
                await asyncio.wait([lost])
                error = lost.exception()
            except (OSError, ValueError, RailgunError) as failure:
                error = failure  # a ValueError is about an invalid host name
            finally:
                if peer.lines.pop(lane, None) is not None and not self._closed:
                    self._fail_pending_calls(id) if lane == "control" else None
                    self._receiver.down(id, lane)
            code = getattr(error, "code", "")
            if code in (OTHER_CLUSTER, "BAD_SECRET", BAD_VERSION) and str(error) != logged:
                logged = str(error)
                _LOG.warning("node %s at %s:%d refuses this node: %s", id, *peer.address, logged)
            peer.has_called.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await peer.has_called.wait()
            pause = min(2 * pause, DIAL_PAUSES_S[1])

    async def _dial(self, id: str, peer: _Peer, lane: Lane) -> asyncio.Future[None]:
        opened: asyncio.Future[None] = self._loop.create_future()
        lost: asyncio.Future[None] = self._loop.create_future()
        reader = FrameReader(MAX_FRAME_BYTES)
        line: _Line | None = None

        def on_open(connection: Connection) -> None:
            if not opened.done():
                opened.set_result(None)

        def on_data(connection: Connection, data: bytes) -> None:
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

        def on_close(connection: Connection, error: Exception | None) -> None:
            reason = error or PeerError("UNREACHABLE", "the connection was closed")
            for future in (opened, lost):
                if not future.done():
                    future.set_exception(reason)
                if not future.cancelled():
                    future.exception()

        connection: Connection | None = None
        try:
            async with asyncio.timeout(SILENCE_S):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(
                        self._secret, on_open, on_data, on_close, self._hello(id, lane)
                    ),
                    *peer.address,
                    ssl=self._client_tls,
                    local_addr=self._source,
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

    def _fail_pending_calls(self, id: str) -> None:
        for to, future in list(self._answers.values()):
            if to == id and not future.done():
                future.set_exception(PeerError("UNREACHABLE", f"the connection to {id} was lost"))

    async def _send_pulses(self) -> None:
        """Send a pulse on accepted connections, and abort dialled connections that are silent."""
        pulse = b"".join(encode(p.Pong(number=0)))
        while True:
            await asyncio.sleep(PULSE_S)
            for caller in self._callers:
                if not caller.unsent:
                    caller.send(pulse)
            now = time.monotonic()
            for peer in self._peers.values():
                for line in peer.lines.values():
                    if now - line.heard > SILENCE_S:
                        line.connection.abort()

    # ------------------------------------------------------------ accepted connections

    def _caller_opened(self, connection: Connection) -> None:
        who = connection.who
        version, to, lane = who.get("version"), who.get("to"), who.get("lane")
        theirs, node = who.get("cluster"), who.get("node")
        if self._closed:  # it was accepted before, and has only now sent its hello
            raise HelloError("this node is about to end")
        if version != VERSION:
            raise HelloError(f"this node speaks version {VERSION}, not {version!r}", BAD_VERSION)
        if lane not in LANES or not isinstance(node, str) or not node:
            raise HelloError("the hello does not name its node, or a lane")
        identity = self.identity
        if theirs and identity.cluster and theirs != identity.cluster:
            error_text = (
                f"this is a node of the cluster {identity.cluster}, and the caller is of {theirs}"
            )
            raise HelloError(error_text, OTHER_CLUSTER)
        if to and to != identity.node:
            raise HelloError(f"this is node {identity.node}, not {to}", OTHER_NODE)
        if node in self._peers:
            self._peers[node].has_called.set()
        connection.filling = reader = FrameReader(MAX_FRAME_BYTES)
        connection.tag = (reader, node, lane)
        self._callers.add(connection)

    def _frames_received(self, connection: Connection, data: bytes) -> None:
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
            _LOG.exception("a message of node %s on lane %s could not be handled", sender, lane)
            connection.abort()

    async def _answer(self, connection: Connection, sender: str, call: n.Call) -> None:
        try:
            arguments = json.loads(call.arguments or "{}")
            result = await self._receiver.called(sender, call.name, arguments)
            answer = n.Answer(request=call.request, result=json.dumps(result))
        except RailgunError as error:
            code = str(getattr(error, "code", "REFUSED"))
            answer = n.Answer(request=call.request, code=code, text=str(error))
        except Exception as error:
            _LOG.exception("the call %s of node %s has failed", call.name, sender)
            answer = n.Answer(request=call.request, code="INTERNAL", text=repr(error))
        with contextlib.suppress(FrameError):
            connection.send(b"".join(encode(answer, largest=MAX_FRAME_BYTES)))

    def _caller_closed(self, connection: Connection, error: Exception | None) -> None:
        self._callers.discard(connection)


def _settle(future: asyncio.Future[Any], answer: n.Answer) -> None:
    if future.done():
        return
    if answer.code:
        future.set_exception(PeerError(answer.code, answer.text))
    else:
        future.set_result(json.loads(answer.result))
