"""Links between nodes that can be cut, deaf, held up or slow, each direction by itself.

Every node listens on an address of its own, and the others are told another one, where a `Proxy` of it listens. Who
calls is known by the address they call from. So there is a link for each pair of nodes and direction, though
every node is told the same address of a node.

Rules:

1. A link is about bytes that go from one to another, in whichever connection: `a` to `b` in those that `a` made, and
   the answers in those that `b` made.
2. `open`: bytes pass, in order, after `delay` seconds and up to `jitter` more.
3. `cut`: connections that `a` made to `b` are reset, and new ones too. Answers in those that `b` made are dropped.
4. `drop`: bytes vanish, and nobody is told: connections stay open on both sides, and new ones are accepted by nobody.
   A connection that has lost something is reset when the link opens: it could not go on.
5. `hold`: nothing passes, and all of it does when the link opens, the end of a connection too: so TCP does, if nobody
   gives up before.
6. What waits is bounded: a sender is not read when too much does.
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
"""Chunks of a connection that are under way, each direction."""
OTHERS: Final = "clients"
"""Who calls from an address that is no node's."""


class Link:
    """From one to another."""

    __slots__ = ("_opened", "delay", "jitter", "lost", "mode")

    def __init__(self) -> None:
        self.mode: Mode = "open"
        self.delay = self.jitter = 0.0
        self.lost = 0
        """Bytes that have vanished."""
        self._opened = asyncio.Event()
        self._opened.set()

    def become(self, mode: Mode) -> None:
        """Let it be so from now on."""
        self.mode = mode
        if mode == "hold":
            self._opened.clear()
        else:
            self._opened.set()

    async def passable(self) -> None:
        """Wait while it is held up."""
        while self.mode == "hold":
            await self._opened.wait()


class Links:
    """All links, and the connections that use them."""

    def __init__(self, chance: Random | None = None) -> None:
        self.chance = chance or Random(0)
        self._links: dict[tuple[str, str], Link] = {}
        self._connections: set[_Connection] = set()

    def of(self, a: str, b: str) -> Link:
        """The one from `a` to `b`."""
        found = self._links.get((a, b))
        if found is None:
            found = self._links[(a, b)] = Link()
        return found

    def set(self, a: str, b: str, mode: Mode) -> None:
        """Let the link from `a` to `b` be so."""
        link = self.of(a, b)
        before = link.mode
        link.become(mode)
        for one in list(self._connections):
            if (mode == "cut" and (one.caller, one.target) == (a, b)) or (
                before != mode and mode != "drop" and (a, b) in one.holes
            ):
                one.abort()

    def slow(self, a: str, b: str, delay: float, jitter: float = 0.0) -> None:
        """Let bytes from `a` to `b` take so long."""
        link = self.of(a, b)
        link.delay, link.jitter = delay, jitter

    def heal(self) -> None:
        """Everything is open and quick."""
        for (a, b), link in list(self._links.items()):
            link.delay = link.jitter = 0.0
            self.set(a, b, "open")

    def enter(self, connection: _Connection) -> None:
        """One more."""
        self._connections.add(connection)

    def leave(self, connection: _Connection) -> None:
        """One less."""
        self._connections.discard(connection)

    @property
    def connections(self) -> list[tuple[str, str]]:
        """Who called whom, of all that are open."""
        return sorted((one.caller, one.target) for one in self._connections)


class _Connection:
    """From a caller to its target, and back."""

    def __init__(self, links: Links, caller: str, target: str) -> None:
        self.links, self.caller, self.target = links, caller, target
        self.holes: set[tuple[str, str]] = set()
        """Directions in which something has vanished."""
        self._aborted = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    def abort(self) -> None:
        """End it at once."""
        self._aborted.set()
        for writer in self._writers:
            writer.transport.abort()

    async def run(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: tuple[str, int]
    ) -> None:
        """Be the connection, until it ends."""
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
            self.holes.add(there)  # nobody has heard of it: it ends when the link opens
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
        """Bytes of one direction, and the end of them."""
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
                    if not data:  # not even the end is heard
                        await self._aborted.wait()
                        return
                    continue
                if not data:
                    sink.close()
                    return
                sink.write(data)
                await sink.drain()


class Proxy:
    """Stands before one port of one node."""

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
        """Listen."""
        await self._server.open(*self._listen)
        self.port = self._server.port

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = writer.get_extra_info("peername")[0]
        connection = _Connection(self.links, self._callers.get(host, OTHERS), self.target)
        await connection.run(reader, writer, self._to)

    async def close(self) -> None:
        """Listen no more, and end all connections."""
        await self._server.close()

    async def __aenter__(self) -> Proxy:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
