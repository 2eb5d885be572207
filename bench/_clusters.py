"""Clusters of three nodes on loopback, each node a process with a directory of its own: ours, and NATS JetStream.

Nodes of ours run as `railgun serve` runs them, with the settings that a cluster has by itself. A node can be killed,
stopped for a while, and started again. Who leads, who is master and how far replicas are, is asked as nodes ask each
other. On Linux all processes end with this one, whatever becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verification.ports import free_ports

from bench._peers import PeerError, end_with_parent, interpreter
from bench._servers import PATIENCE, _answers, _running, _wait
from railgun.broker.cluster.config import ClusterConfig
from railgun.broker.cluster.links import Identity, Lane, Links
from railgun.client.client import Client, connect
from railgun.errors import RailgunError
from railgun.transport.commands import Blob

NODES = 3
SOON = 0.04  # seconds between two looks: each is a new connection to every node


class _Nobody:
    """The one who asks is no node, and nobody sends it anything."""

    def received(self, sender: str, lane: Lane, command: Any, blob: Blob) -> None:
        """Never called."""

    def up(self, peer: str, lane: Lane) -> None:
        """Never called."""

    def down(self, peer: str, lane: Lane) -> None:
        """Never called."""

    async def called(self, sender: str, name: str, arguments: dict[str, Any]) -> Any:
        """Never called."""


@dataclass(slots=True)
class NodeProcess:
    """A node, and its process if it runs."""

    data: Path
    port: int
    cluster_port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run it."""
        command = [sys.executable, "-m", "railgun", "serve", "--config", f"{self.data}.toml"]
        with open(f"{self.data}.log", "ab") as words:
            self.process = subprocess.Popen(
                [*command, "--json"],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                preexec_fn=end_with_parent,
            )

    def signal(self, number: int) -> None:
        """Send its process a signal; SIGKILL is waited for."""
        assert self.process is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """End it in order, if it can be."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


@dataclass(slots=True)
class State:
    """What a node says of its cluster."""

    node: NodeProcess
    id: str
    leads: bool
    leader: str
    term: int
    masters: bool
    """Whether it is the master, and serves."""
    epoch: int
    caught_up: list[str]


@dataclass(slots=True)
class OurCluster:
    """Three nodes of ours."""

    home: Path
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    nodes: list[NodeProcess] = field(default_factory=list)
    settings: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        """Write their files, and run them."""
        self.home.mkdir(parents=True)
        (self.home / "secret").write_text(self.secret.hex(), "ascii")
        ports = free_ports(2 * NODES)
        self.nodes = [
            NodeProcess(self.home / f"node{n}", ports[2 * n], ports[2 * n + 1])
            for n in range(NODES)
        ]
        where = ",".join(f"127.0.0.1:{node.cluster_port}" for node in self.nodes)
        more = "".join(f"{key} = {value}\n" for key, value in self.settings.items())
        for node in self.nodes:
            Path(f"{node.data}.toml").write_text(
                f'[node]\ndata = "{node.data.name}"\nport = {node.port}\nhttp_port = "none"\n'
                f"cluster_port = {node.cluster_port}\n"
                f'[cluster]\nsecret_file = "secret"\ndiscovery = "static://{where}"\n'
                f"bootstrap_expect = {NODES}\n{more}",
                "utf-8",
            )
            node.start()

    def stop(self) -> None:
        """End them all."""
        for node in self.nodes:
            node.stop()

    def words(self) -> str:
        """What the nodes have said last."""
        return "\n".join(
            line
            for node in self.nodes
            for line in Path(f"{node.data}.log").read_text("utf-8", "replace").splitlines()[-4:]
        )

    async def client(self, *nodes: NodeProcess, timeout: float = 30.0) -> Client:
        """A client of one node or of several, over TCP."""
        where = [f"127.0.0.1:{node.port}" for node in nodes or self.nodes]
        known = ClusterConfig(self.secret).client_secret
        return await connect(where, secret=known, timeout=timeout)

    # ------------------------------------------------------------ how it is

    async def state(self, node: NodeProcess) -> State | None:
        """How a node sees its cluster; None if it does not answer."""
        links = Links(Identity("bench"), self.secret, _Nobody())
        try:
            told = await links.ask(("127.0.0.1", node.cluster_port), "here", {}, 1.0)
        except RailgunError:
            return None
        finally:
            await links.close()
        region = told["regions"].get("global", {})
        return State(
            node,
            told["node"],
            told["leader"] == told["node"],
            told["leader"] or "",
            told["term"],
            bool(region.get("active") and region["acting"]),
            region.get("epoch", 0),
            [node for node, lag in region.get("lag", {}).items() if lag["caught_up"]],
        )

    async def states(self, nodes: Sequence[NodeProcess] = ()) -> list[State]:
        """How these see it, or all that run."""
        running = [node for node in nodes or self.nodes if node.process is not None]
        told = await asyncio.gather(*map(self.state, running))
        return [state for state in told if state is not None]

    async def until(
        self,
        good: Callable[[list[State]], bool],
        patience: float = 60.0,
        nodes: Sequence[NodeProcess] = (),
    ) -> float:
        """Wait until that is so, as these see it; when it was."""
        end = time.monotonic() + patience
        while not good(states := await self.states(nodes)):
            if time.monotonic() > end or any(n.process and n.process.poll() for n in self.nodes):
                found = "\n".join(map(str, states))
                raise PeerError(f"the cluster is not as it should be:\n{found}\n{self.words()}")
            await asyncio.sleep(SOON)
        return time.perf_counter()

    async def settled(self, patience: float = 60.0) -> State:
        """Wait until there are a leader and a master, and all have all; who is master."""
        await self.until(_whole, patience)
        return next(state for state in await self.states() if state.masters)

    async def roles(self) -> tuple[NodeProcess, NodeProcess, NodeProcess]:
        """The leader, the master, and one that is neither."""
        await self.settled()
        states = await self.states()
        leader = next(state for state in states if state.leads)
        master = next(state for state in states if state.masters)
        other = next(state for state in states if not state.leads and not state.masters)
        return leader.node, master.node, other.node


def _whole(states: list[State]) -> bool:
    masters = [state for state in states if state.masters]
    one_leader = len({state.leader for state in states}) == 1 and any(s.leads for s in states)
    one_term = len({state.term for state in states}) == 1
    return (
        len(states) == NODES
        and one_leader
        and one_term
        and len(masters) == 1
        and len(masters[0].caught_up) == NODES - 1
    )


@contextlib.contextmanager
def ours(home: Path, **settings: float) -> Iterator[OurCluster]:
    """Three nodes of ours, which may not have found each other yet."""
    cluster = OurCluster(home, settings=settings)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@contextlib.contextmanager
def nats(home: Path) -> Iterator[list[int]]:
    """Three NATS servers with JetStream that know each other; the ports for clients, of n0, n1 and n2."""
    program = interpreter("nats").parent / "nats-server"
    ports = free_ports(2 * NODES)
    clients, routes = ports[:NODES], ports[NODES:]
    urls = [f"nats://127.0.0.1:{port}" for port in routes]
    with contextlib.ExitStack() as stack:
        for n in range(NODES):
            data = home / f"n{n}"
            command = [str(program), "--jetstream", "--store_dir", str(data), "--name", f"n{n}"]
            command += ["--addr", "127.0.0.1", "--port", str(clients[n])]
            command += ["--cluster_name", "bench", "--cluster", urls[n]]
            command += ["--routes", ",".join(urls)]
            process, _ = stack.enter_context(_running(command, data))
            _wait(process, data, lambda n=n: _answers(clients[n]))  # type: ignore[misc]
        yield clients
