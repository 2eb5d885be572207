"""Proxies between nodes whose links can be cut, silent, held up or slow, each direction by itself.

Every node listens on an address of its own, and all others use a second address, where a `Proxy` of the node listens.
A caller is known by the address of its connection. So each pair of nodes and direction has a link, though all callers
use the same address of a node.

Rules:

1. A link is about bytes from one node to another, in whichever connection: `a` to `b` in those that `a` made, and the
   answers in those that `b` made.
2. `open`: bytes pass, in order, after `delay` seconds and up to `jitter` more.
3. `cut`: connections that `a` made to `b` are reset, and new ones too. Answers in those that `b` made are dropped.
4. `drop`: bytes vanish silently: connections stay open on both sides, and new ones are never answered. A connection
   that has lost bytes is reset when the link opens: it could not continue.
5. `hold`: nothing passes, and all of it does when the link opens, the end of a connection too: so does TCP, if neither
   side gives up before.
6. Waiting bytes are bounded: a sender is not read while too many wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from random import Random
from typing import Final, Literal

from verification.stream_server import StreamServer

Mode = Literal["open", "cut", "drop", "hold"]
CHUNK: Final = 1 << 16
WAITING: Final = 64
"""Chunks of a connection that are under way, in each direction."""
OTHERS: Final = "clients"
"""The caller's name for addresses that belong to no node."""


class Link:
    """The link from one node to another."""

    __slots__ = ("_opened", "delay", "jitter", "lost", "mode")

    def __init__(self) -> None:
        self.mode: Mode = "open"
        self.delay = self.jitter = 0.0
        self.lost = 0
        """Bytes that have vanished."""
        self._opened = asyncio.Event()
        self._opened.set()

    def become(self, mode: Mode) -> None:
        """Set the mode of the link."""
        self.mode = mode
        if mode == "hold":
            self._opened.clear()
        else:
            self._opened.set()

    async def passable(self) -> None:
        """Wait while the link is held."""
        while self.mode == "hold":
            await self._opened.wait()


class Links:
    """All links, and the connections that use them."""

    def __init__(self, chance: Random | None = None) -> None:
        self.chance = chance or Random(0)
        self._links: dict[tuple[str, str], Link] = {}
        self._connections: set[_Connection] = set()

    def of(self, a: str, b: str) -> Link:
        """Return the link from `a` to `b`."""
        link = self._links.get((a, b))
        if link is None:
            link = self._links[(a, b)] = Link()
        return link

    def set(self, a: str, b: str, mode: Mode) -> None:
        """Set the mode of the link from `a` to `b`."""
        link = self.of(a, b)
        before = link.mode
        link.become(mode)
        for connection in list(self._connections):
            if (mode == "cut" and (connection.caller, connection.target) == (a, b)) or (
                before != mode and mode != "drop" and (a, b) in connection.holes
            ):
                connection.abort()

    def slow(self, a: str, b: str, delay: float, jitter: float = 0.0) -> None:
        """Delay bytes from `a` to `b`, in seconds."""
        link = self.of(a, b)
        link.delay, link.jitter = delay, jitter

    def heal(self) -> None:
        """Open all links, without delays."""
        for (a, b), link in list(self._links.items()):
            link.delay = link.jitter = 0.0
            self.set(a, b, "open")

    def enter(self, connection: _Connection) -> None:
        """Register an open connection."""
        self._connections.add(connection)

    def leave(self, connection: _Connection) -> None:
        """Forget a connection that has ended."""
        self._connections.discard(connection)

    @property
    def connections(self) -> list[tuple[str, str]]:
        """Return the caller and target of all open connections."""
        return sorted((connection.caller, connection.target) for connection in self._connections)


class _Connection:
    """A connection from a caller to its target, and back."""

    def __init__(self, links: Links, caller: str, target: str) -> None:
        self.links, self.caller, self.target = links, caller, target
        self.holes: set[tuple[str, str]] = set()
        """Directions in which bytes have vanished."""
        self._aborted = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    def abort(self) -> None:
        """Reset the connection at once."""
        self._aborted.set()
        for writer in self._writers:
            writer.transport.abort()

    async def run(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: tuple[str, int]
    ) -> None:
        """Serve the connection until it ends."""
        self._writers.append(writer)
        self.links.enter(self)
        working = asyncio.ensure_future(self._work(reader, writer, to))
        aborted = asyncio.ensure_future(self._aborted.wait())
        try:
            await asyncio.wait([working, aborted], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, aborted):
                task.cancel()
            await asyncio.gather(working, aborted, return_exceptions=True)
            self.links.leave(self)
            self.abort()

    async def _work(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: tuple[str, int]
    ) -> None:
        there, back = (self.caller, self.target), (self.target, self.caller)
        out = self.links.of(*there)
        if out.mode == "cut":
            return
        await out.passable()
        if out.mode == "drop":
            self.holes.add(
                there
            )  # the target never saw the connection: reset it when the link opens
            while data := await reader.read(CHUNK):
                out.lost += len(data)
            await self._aborted.wait()
            return
        try:
            theirs, ours = await asyncio.open_connection(*to)
        except OSError:
            return
        self._writers.append(ours)
        await asyncio.gather(self._pump(reader, ours, there), self._pump(theirs, writer, back))

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: tuple[str, str]
    ) -> None:
        """Forward the bytes of one direction, and their end."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(WAITING)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._send(waiting, sink, way))
            both.create_task(self._receive(source, waiting, way))

    async def _receive(
        self,
        source: asyncio.StreamReader,
        waiting: asyncio.Queue[tuple[float, bytes]],
        way: tuple[str, str],
    ) -> None:
        link, loop = self.links.of(*way), asyncio.get_running_loop()
        while True:
            try:
                data = await source.read(CHUNK)
            except OSError:
                data = b""
            due = 0.0
            if link.delay or link.jitter:
                due = loop.time() + link.delay + self.links.chance.random() * link.jitter
            await waiting.put((due, data))
            if not data:
                return

    async def _send(
        self,
        waiting: asyncio.Queue[tuple[float, bytes]],
        sink: asyncio.StreamWriter,
        way: tuple[str, str],
    ) -> None:
        link, loop = self.links.of(*way), asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while True:
                due, data = await waiting.get()
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                await link.passable()
                if link.mode in ("drop", "cut") or way in self.holes:
                    link.lost += len(data)
                    self.holes.add(way)
                    if not data:  # the end of the connection vanishes too
                        await self._aborted.wait()
                        return
                    continue
                if not data:
                    sink.close()
                    return
                sink.write(data)
                await sink.drain()


class Proxy:
    """Listens before one port of one node, and forwards to it."""

    def __init__(
        self,
        links: Links,
        target: str,
        listen: tuple[str, int],
        to: tuple[str, int],
        callers: Mapping[str, str] | None = None,
    ) -> None:
        self.links, self.target = links, target
        self.port = listen[1]
        self._listen, self._to, self._callers = listen, to, callers or {}
        self._server = StreamServer(self._talk)

    async def start(self) -> None:
        """Listen on the address that others use."""
        await self._server.open(*self._listen)
        self.port = self._server.port

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = writer.get_extra_info("peername")[0]
        connection = _Connection(self.links, self._callers.get(host, OTHERS), self.target)
        await connection.run(reader, writer, self._to)

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        await self._server.close()

    async def __aenter__(self) -> Proxy:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
