"""Real `railgun serve` processes, alone or as a cluster, for tests that stop, freeze and restart nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from tests.broker.clustered import retried
from verification.ports import free_ports

from railgun.client.client import Client, connect
from railgun.client.sync import SyncClient, connect_sync

DEADLINE = 90.0
FIRST = 21


class ServeProcess:
    """One node: `railgun serve --config`, on the same ports whenever it is started."""

    def __init__(self, home: Path, name: str, host: str, port: int) -> None:
        self.name, self.host, self.port = name, host, port
        self.data = home / name
        self.config = home / f"{name}.toml"
        self.log = home / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "railgun", "serve", "--config", str(self.config), "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert b"listening" in line, (line, self.log.read_text())

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def terminate(self) -> None:
        """Stop it in order, and wait until it has ended."""
        self.signal(signal.SIGTERM)
        assert self.process is not None
        self.process.wait(DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill(self) -> None:
        """End it without a word, also if it is frozen."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    @property
    def address(self) -> str:
        """Where clients reach it."""
        return f"{self.host}:{self.port}"


class Processes:
    """Some nodes. They are named n1, n2, …"""

    def __init__(self, home: Path, count: int, **settings: Any) -> None:
        home.mkdir(parents=True, exist_ok=True)
        ports = free_ports(2 * count)
        (home / "cluster-secret").write_text(secrets.token_hex(32), "ascii")
        # Addresses of their own: no connection of somebody else takes the port of a node that is down.
        hosts = [f"127.0.0.{FIRST + n}" for n in range(count)]
        made = [ServeProcess(home, f"n{n + 1}", hosts[n], ports[n]) for n in range(count)]
        self.nodes = {node.name: node for node in made}
        others = ",".join(
            f"{node.host}:{port}" for node, port in zip(made, ports[count:], strict=True)
        )
        for (name, node), cluster_port in zip(self.nodes.items(), ports[count:], strict=True):
            lines = ["[node]", f'data = "{name}"', f'host = "{node.host}"']
            lines += [f"port = {node.port}", 'http_port = "none"']
            if count > 1:
                lines += [f'name = "{name}"', f"cluster_port = {cluster_port}"]
                lines += ["[cluster]", 'secret_file = "cluster-secret"']
                lines += [f'discovery = "static://{others}"', f"bootstrap_expect = {count}"]
                lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
            node.config.write_text("\n".join(lines) + "\n", "utf-8")

    def __getitem__(self, name: str) -> ServeProcess:
        return self.nodes[name]

    def where(self, *names: str) -> list[str]:
        """The addresses of these nodes; of all, if none is named."""
        return [self.nodes[name].address for name in names or self.nodes]

    @property
    def secret(self) -> str:
        """What clients have to know."""
        found = next(iter(self.nodes.values())).data / "secret"
        return found.read_text("ascii").strip()

    async def client(self, *names: str, **options: Any) -> Client:
        """A client of these nodes, of all if none is named; it begins with the first."""
        options.setdefault("timeout", DEADLINE)
        return await connect(self.where(*names), secret=self.secret, **options)

    def sync_client(self, *names: str) -> SyncClient:
        """As `client`, without an event loop."""
        return connect_sync(self.where(*names), secret=self.secret, timeout=DEADLINE)

    async def ready(self, stream: str, **settings: Any) -> str:
        """Make a stream and wait until there is a master that takes messages; its name ("" for one node alone)."""
        async with await self.client() as client:
            await retried(lambda: client.ensure(stream, **settings))
            await retried(lambda: client.describe(stream))
            return await self.master() if len(self.nodes) > 1 else ""

    async def master(self, *names: str) -> str:
        """The name of the master of the region `global`, as these nodes know."""
        async with await self.client(*names) as client:
            return str(await retried(lambda: _master(client)))


async def _master(client: Client) -> str:
    told = await client.admin("cluster")
    region = next(one for one in told["regions"] if one["name"] == "global")
    return str({one["id"]: one["name"] for one in told["nodes"]}[region["master"]])


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for a condition that has to be asked for."""
    end = time.monotonic() + DEADLINE
    while not await holds():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.05)


@contextlib.contextmanager
def processes(home: Path, count: int = 3, **settings: Any) -> Iterator[Processes]:
    """So many nodes within this, as a cluster if there are several."""
    made = Processes(home, count, **settings)
    try:
        for node in made.nodes.values():
            node.start()
        yield made
    finally:
        for node in made.nodes.values():
            node.kill()
