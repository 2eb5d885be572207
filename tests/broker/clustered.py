"""Real nodes of a cluster in one process, each with its own directory and ports, and ways to treat them badly."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from verification.ports import free_ports

from railgun.broker.cluster.config import ClusterConfig
from railgun.broker.cluster.member import Member
from railgun.broker.cluster.replicated import Replicated
from railgun.broker.log.disk import Disk
from railgun.broker.server.server import Server, ServerConfig
from railgun.client.client import Client, connect

DEADLINE = 40.0
SECRET = bytes(range(32))
QUICK: dict[str, Any] = {
    "election": 0.8,
    "patience": 1.0,
}  # shorter ones end by mistake on a busy machine


class Clustered:
    """Some nodes. They are named n1, n2, …"""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.ports = free_ports(size + 3)
        self.expect = size
        self.servers: dict[str, Server] = {}
        self.disks: dict[str, Disk] = {}
        """Of nodes that have another one than their directory."""
        self.clocks: dict[str, Callable[[], int]] = {}
        """Of nodes that have another time of day (µs) than this machine."""
        self.configs: dict[str, ServerConfig] = {}
        self._clients: list[Client] = []

    @property
    def discovery(self) -> str:
        """Where they are."""
        return "static://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def config(self, name: str, **changes: Any) -> ServerConfig:
        """Of a node; the same whenever it is started."""
        if name not in self.configs:
            cluster = ClusterConfig(
                SECRET,
                name,
                port=self.ports[len(self.configs)],
                discovery=self.discovery,
                bootstrap_expect=self.expect,
                settings=QUICK,
            )
            self.configs[name] = ServerConfig(self.path / name, port=0, cluster=cluster)
        found = self.configs[name]
        if changes:
            assert found.cluster is not None
            found = self.configs[name] = replace(found, cluster=replace(found.cluster, **changes))
        return found

    async def start(self, name: str, **changes: Any) -> Server:
        """Start a node, or start it again."""
        config, disk, clock = (
            self.config(name, **changes),
            self.disks.get(name),
            self.clocks.get(name),
        )
        server = self.servers[name] = Server(config, disk, clock)
        await server.start()
        return server

    async def stop(self, name: str) -> None:
        """Stop a node in order."""
        await self.servers.pop(name).stop()

    async def kill(self, name: str) -> None:
        """A node is gone at once: it says and writes nothing more."""
        server = self.servers.pop(name)
        member = member_of(server)
        assert member.consensus is not None
        member.consensus.abandon()
        for task in member._tasks:
            task.cancel()
        await member.links.close()
        server._listener.abort()
        await server.stop()

    def member(self, name: str) -> Member:
        """A node, as a member."""
        return member_of(self.servers[name])

    def name_of(self, id: str | None) -> str:
        """Of a node by its id; one that is up."""
        return next((n for n in self.servers if self.member(n).me == id), "")

    def master(self, region: str = "global") -> str:
        """The name of the master, as those who are up believe; "" if they do not agree, or it is not up."""
        told = {
            self.member(name).metadata.regions[region].master
            for name in self.servers
            if region in self.member(name).metadata.regions
        }
        return self.name_of(told.pop()) if len(told) == 1 else ""

    def copy(self, name: str, stream: str) -> Replicated:
        """What a node has of a stream."""
        member = self.member(name)
        info = member.metadata.streams[stream]
        return member.regions.get(info.region).streams[info.id]

    async def client(self, *names: str, **options: Any) -> Client:
        """A client of these nodes, which fails over; of all, if none is named."""
        where = [f"127.0.0.1:{self.servers[name].port}" for name in names or self.servers]
        secret = next(iter(self.servers.values())).secret
        made = await connect(where, secret=secret, **options)
        self._clients.append(made)
        return made

    async def ready(self, stream: str) -> str:
        """Wait until a stream has a master that acts; its name."""

        def acts() -> bool:
            name = self.master()
            with contextlib.suppress(KeyError):
                return bool(name) and self.copy(name, stream).acting
            return False

        await until(acts, f"{stream} has no master")
        return self.master()

    async def serving(self, stream: str) -> tuple[Client, str]:
        """A client of all nodes, and the master of a new stream that all have."""
        client = await self.client()
        await client.ensure(stream)
        master = await self.ready(stream)
        await self.in_step(stream)
        return client, master

    async def in_step(self, stream: str) -> None:
        """Wait until all copies are the same, and all of it is safe."""
        await self.in_step_of(stream, list(self.servers))

    async def in_step_of(self, stream: str, names: list[str]) -> None:
        """Wait until the copies of these nodes are."""

        def same() -> bool:
            try:
                copies = [self.copy(name, stream) for name in names]
            except KeyError:
                return False
            ends = {(c.copy.end, c.copy.durable, c.copy.safe, c.copy.first) for c in copies}
            labels = {c.copy.label for c in copies}
            groups = {c.copy.groups for c in copies}
            return (
                len(ends) == len(labels) == len(groups) == 1
                and copies[0].copy.end == copies[0].copy.safe
            )

        await until(same, lambda: str([(n, self.copy(n, stream).copy) for n in names]))

    async def close(self) -> None:
        for client in self._clients:
            client._closing = True  # nobody has to be told
            if client._running is not None:
                client._running.cancel()
            if client._connection is not None:
                client._connection.abort()
        for name in list(self.servers):
            await self.stop(name)


@contextlib.asynccontextmanager
async def clustered(
    path: Path, size: int = 3, cluster: Clustered | None = None
) -> AsyncIterator[Clustered]:
    """So many nodes that have formed a cluster, within this; of a cluster that was prepared, if one is given."""
    made = cluster or Clustered(path, size)
    try:
        for n in range(size):
            await made.start(f"n{n + 1}")
        await until(
            lambda: (
                all(made.member(n).metadata.cluster for n in made.servers) and made.master() != ""
            ),
            "no cluster was formed",
        )
        yield made
    finally:
        await made.close()


def member_of(server: Server) -> Member:
    assert server.member is not None
    return server.member


async def until(holds: Callable[[], bool], what: str | Callable[[], str] = "") -> None:
    """Wait for a condition."""
    end = time.monotonic() + DEADLINE
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(what if isinstance(what, str) else what())
        await asyncio.sleep(0.01)


async def retried(call: Callable[[], Awaitable[Any]]) -> Any:
    """What a patient caller gets in the end."""
    end = time.monotonic() + DEADLINE
    while True:
        try:
            return await call()
        except Exception:
            if time.monotonic() > end:
                raise
        await asyncio.sleep(0.05)
