"""Several real nodes that serve each other's streams: who is the master of what is told them here, by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tests.broker.running import DEADLINE, Running

from railgun.broker.errors import NoMasterError, NoStreamError
from railgun.broker.streams.node import Ephemeral
from railgun.broker.streams.routing import Here, Nobody, Place, There
from railgun.client.client import Client, connect

SECRET = "5e" * 32


class Several:
    """Some nodes, and who serves which stream."""

    def __init__(self, home: Path, names: str) -> None:
        self.running = {name: Running(home / name) for name in names}
        for one in self.running.values():
            one.data.mkdir(parents=True)
            (one.data / "secret").write_text(SECRET)
        self.masters: dict[str, str | None] = {}
        """By stream; None: nobody is."""
        self.copies: dict[str, set[str]] = {}
        self.believes: dict[tuple[str, str], str | None] = {}
        """What a node takes for the master of a stream, where that is not so."""
        self.told: list[tuple[str, int]] | None = None
        """What nodes tell of the others; None: where they are."""
        self.asked: Counter[str] = Counter()
        """How often a node wanted to know who serves a stream."""
        self.changed = asyncio.Event()
        self.wait = 5.0
        self._clients: list[Client] = []

    async def start(self, name: str) -> None:
        """Start a node, where it was before."""
        one = self.running[name]
        await one.start()
        assert one.server is not None
        one.server.node.routing = Routes(name, self)

    async def ensure(self, stream: str, master: str) -> None:
        """Make a stream at a node, which is its master."""
        server = self.running[master].server
        assert server is not None
        await server.node.ensure(stream)
        self.masters[stream] = master
        self.moved(stream)

    def moved(self, stream: str) -> None:
        """All hear that something has changed."""
        self.changed.set()
        self.changed = asyncio.Event()
        for one in self.running.values():
            if one.server is not None:
                one.server.moved({stream}.__contains__)

    async def client(
        self, names: str, timeout: float = DEADLINE, ports: Sequence[int] = ()
    ) -> Client:
        """A client of these nodes, in this order."""
        ports = ports or [self.running[name].port for name in names]
        where = [f"127.0.0.1:{port}" for port in ports]
        made = await connect(where, secret=SECRET, timeout=timeout, name="test")
        self._clients.append(made)
        return made

    def sessions(self, name: str) -> int:
        """How many there are at a node."""
        server = self.running[name].server
        return 0 if server is None else len(server.sessions)

    def kill(self, name: str) -> None:
        """All connections of a node end without a word, and it listens no more."""
        server = self.running[name].server
        assert server is not None
        server._listener.abort()

    async def end(self) -> None:
        """Let all go."""
        for client in self._clients:
            client.timeout = min(client.timeout, 1.0)
            await client.close()
        for one in self.running.values():
            await one.end()


class Routes:
    """What one of them knows."""

    def __init__(self, name: str, several: Several) -> None:
        self._name, self._several = name, several

    @property
    def master_wait(self) -> float:
        return self._several.wait

    def serves(self, stream: str, write: bool) -> Place:
        several, me = self._several, self._name
        several.asked[stream] += 1
        server = several.running[me].server
        if server is not None and isinstance(server.node.streams.get(stream), Ephemeral):
            return Here()
        if stream not in several.masters:
            raise NoStreamError(f"there is no stream {stream!r}")
        if not write and me in several.copies.get(stream, ()):
            return Here()
        master = several.believes.get((me, stream), several.masters[stream])
        if master is None:
            return Nobody(NoMasterError("it was taken away"))
        if master == me:
            return Here()
        return There(master, "127.0.0.1", several.running[master].port)

    async def end(self, stream: str) -> int | None:
        place = self.serves(stream, write=True)
        server = self._several.running[place.node].server if isinstance(place, There) else None
        return None if server is None else server.node.get_persistent(stream).end

    async def wait(self, stream: str, write: bool) -> None:
        await self._several.changed.wait()

    def nodes(self) -> list[tuple[str, int]]:
        if self._several.told is not None:
            return self._several.told
        return [("127.0.0.1", one.port) for one in self._several.running.values()]


@contextlib.asynccontextmanager
async def several(home: Path, names: str = "ab") -> AsyncIterator[Several]:
    """Nodes of these names within this, one letter each."""
    made = Several(home, names)
    try:
        for name in names:
            await made.start(name)
        yield made
    finally:
        await made.end()
