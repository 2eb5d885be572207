"""Real nodes with links to each other on loopback, without Raft."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.broker.running import Running, until

from railgun.broker.cluster.events import Events
from railgun.broker.cluster.links import Identity, Lane, Links
from railgun.broker.protocol.interest import Remote
from railgun.broker.streams.node import Ephemeral
from railgun.client.client import Client
from railgun.transport.commands import Blob

SECRET = b"of the cluster"


class Member:
    """A node with links to others; it counts what it hears, and can be deaf to some of it."""

    def __init__(self, name: str, data: Path) -> None:
        self.name = name
        self.running = Running(data)
        self.heard: Counter[str] = Counter()
        self.deaf: set[str] = set()
        self.links: Links
        self.events: Events

    async def start(self) -> None:
        await self.running.start()
        assert self.running.server is not None
        self.links = Links(Identity(self.name, "test"), SECRET, self)
        self.events = Events(self.running.server.node, self.links, self.name)
        await self.links.listen("127.0.0.1", 0)

    async def stop(self) -> None:
        await self.links.close()
        self.events.close()
        await self.running.end()

    def received(self, sender: str, lane: Lane, command: Any, blob: Blob) -> None:
        kind = type(command).__name__
        self.heard[kind] += 1
        if lane == "events" and kind not in self.deaf:
            self.events.received(sender, command, blob)

    def up(self, peer: str, lane: Lane) -> None:
        if lane == "events":
            self.events.up(peer)

    def down(self, peer: str, lane: Lane) -> None:
        if lane == "events":
            self.events.down(peer)

    async def called(self, sender: str, name: str, arguments: dict[str, Any]) -> Any:
        raise NotImplementedError

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.links.port

    @property
    def node(self) -> Any:
        assert self.running.server is not None
        return self.running.server.node

    def listeners(self, stream: str = "news") -> int:
        """Those it knows of, its own and those of others."""
        found = self.node.streams[stream]
        assert isinstance(found, Ephemeral)
        return len(found.exchange)

    def believes(self, stream: str = "news") -> list[int]:
        """The credit of those elsewhere, for all it knows."""
        exchange = self.node.streams[stream].exchange
        return [exchange.credit(one) for one in exchange.members() if isinstance(one, Remote)]

    async def client(self) -> Client:
        return await self.running.client()

    async def cut(self, peer: str) -> None:
        """Its connection for events to that node breaks."""
        neighbour = self.events._neighbours[peer]
        was = neighbour.line
        self.links._peers[peer].lines["events"].connection.abort()
        await until(lambda: neighbour.line != was)


class Cluster:
    """Some members that know each other."""

    def __init__(self, data: Path, names: str) -> None:
        self.members = {name: Member(name, data / name) for name in names}

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    async def start(self, *streams: str) -> None:
        for member in self.members.values():
            await member.start()
            for stream in streams:
                await member.node.ensure(stream, {"kind": "ephemeral"})
        self.meet()
        await self.whole()

    def meet(self) -> None:
        addresses = {name: member.address for name, member in self.members.items()}
        for member in self.members.values():
            member.links.know(addresses)

    async def whole(self) -> None:
        """Everybody has heard everybody."""
        others = len(self.members) - 1
        for member in self.members.values():
            await until(
                lambda member=member: (  # type: ignore[misc]
                    sum(bool(one.line and one.heard) for one in member.events._neighbours.values())
                    == others
                )
            )

    async def lose(self, name: str) -> None:
        """One of them is gone from one moment to the next."""
        await self.members.pop(name).stop()

    async def know(self, count: int, stream: str = "news") -> None:
        """Everybody knows so many listeners, and that all have credit."""
        for member in self.members.values():
            await until(
                lambda member=member: (  # type: ignore[misc]
                    member.listeners(stream) == count and all(member.believes(stream))
                )
            )


@contextlib.asynccontextmanager
async def cluster(data: Path, names: str, *streams: str) -> AsyncIterator[Cluster]:
    made = Cluster(data, names)
    try:
        await made.start(*(streams or ("news",)))
        yield made
    finally:
        for member in made.members.values():
            await member.stop()
