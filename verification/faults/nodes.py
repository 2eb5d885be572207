"""Run nodes as processes: their files, addresses and proxies, and the faults of a process.

Rules:

1. A node listens on a loopback address of its own, 127.0.0.11 for the first, and calls others from there. All others
   get another address, 127.0.1.11, where proxies stand before its ports: for other nodes and for clients.
2. Everything of a run is in one directory: for each node its configuration, its data, the orders for its disk and clock
   (`n1.orders`), and its stdout and stderr (`n1.log`).
3. A node that ends without being asked to is remembered (`died`), and so are unexpected errors in its log
   (`tracebacks`).
4. A single node has no `[cluster]`; nor have several that must not know each other, to test that this is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from pathlib import Path
from random import Random
from typing import IO, Final

from railgun.client.client import Client, connect
from railgun.errors import RailgunError
from verification.faults.proxy import Links, Proxy
from verification.faults.shim import Orders
from verification.ports import free_ports

START: Final = 30.0
"""Seconds that a node may take to listen."""
STOP: Final = 15.0
"""Seconds that a node may take to end in order."""
FIRST: Final = 11


class NodeDiedError(RailgunError):
    """Raised when a node ended by itself."""


class NodeProcess:
    """One node: its process and its files."""

    def __init__(self, directory: Path, name: str, number: int) -> None:
        self.name = name
        self.host, self.outside = f"127.0.0.{FIRST + number}", f"127.0.1.{FIRST + number}"
        self.port, self.cluster_port = free_ports(2, self.host)
        self.data = directory / name
        self.config = directory / f"{name}.toml"
        self.control = directory / f"{name}.orders"
        self.log = directory / f"{name}.log"
        self.orders = Orders()
        self.starts = 0
        self.deaths = 0
        """How often the process was found dead."""
        self._process: asyncio.subprocess.Process | None = None
        self._told_to_end = False

    def order(self, orders: Orders) -> None:
        """Set the faults of the node's disk and clock."""
        self.orders = orders
        orders.write(self.control)

    @property
    def up(self) -> bool:
        """Return whether the process runs; it may be paused."""
        return self._process is not None and self._process.returncode is None

    @property
    def died(self) -> bool:
        """Return whether the process ended without being told to."""
        return self._process is not None and not self.up and not self._told_to_end

    async def start(self) -> list[str]:
        """Start the process, and wait until it listens; return what recovery reported."""
        if self.up:
            return []
        self.deaths += self.died
        self.starts += 1
        self._told_to_end = False
        with self.log.open("ab") as log:
            log.write(f"--- start {self.starts}\n".encode())
            log.flush()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "verification.faults.node"),
                *("--config", str(self.config), "--shim", str(self.control)),
                *("--clock", str(self.control)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START):
                line = await self._process.stdout.readline()
        except TimeoutError:
            return [f"does not listen after {START:g} s"]  # it may listen later
        try:
            return [str(finding) for finding in json.loads(line)["found"]]
        except (ValueError, KeyError) as error:
            await self._gone()
            raise NodeDiedError(f"{self.name} ended at its start: see {self.log}") from error

    async def _gone(self) -> None:
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP):
                    await self._process.wait()

    async def kill(self) -> None:
        """End the process with SIGKILL, and wait for its end."""
        if self.up:
            self._told_to_end = True
            self._signal(signal.SIGKILL)
            await self._gone()

    async def stop(self) -> None:
        """End the process in order; kill it if that takes too long."""
        if self.up:
            self._told_to_end = True
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            await self._gone()
            await self.kill()

    def pause(self) -> None:
        """Stop the process without ending it (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a paused process."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def connect(self, timeout: float = 5.0, name: str = "", direct: bool = False) -> Client:
        """Connect a client to the node, through its proxy unless `direct`."""
        host = self.host if direct else self.outside
        return await connect(f"{host}:{self.port}", data=self.data, timeout=timeout, name=name)


class Nodes:
    """All nodes, and the links between them."""

    def __init__(
        self, directory: Path, count: int, seed: int = 0, clustered: bool | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.links = Links(Random(seed))
        nodes = [NodeProcess(directory, f"n{n + 1}", n) for n in range(count)]
        self.by_name = {node.name: node for node in nodes}
        self._proxies: list[Proxy] = []
        self._clustered = count > 1 if clustered is None else clustered
        if self._clustered:
            (directory / "cluster-secret").write_text(secrets.token_hex(32), "ascii")
        for node in nodes:
            node.config.write_text(self._config(node), "utf-8")
            node.order(Orders())

    def __getitem__(self, name: str) -> NodeProcess:
        return self.by_name[name]

    @property
    def names(self) -> list[str]:
        """Return the names of all nodes."""
        return list(self.by_name)

    def _config(self, node: NodeProcess) -> str:
        lines = ["[node]", f'data = "{node.name}"', f'host = "{node.host}"', f"port = {node.port}"]
        lines.append('http_port = "none"')
        if self._clustered:
            others = ",".join(f"{n.outside}:{n.cluster_port}" for n in self.by_name.values())
            lines += [
                f'name = "{node.name}"',
                f"cluster_port = {node.cluster_port}",
                f'advertise = "{node.outside}:{node.cluster_port}"',
                f'advertise_client = "{node.outside}:{node.port}"',
                "[cluster]",
                'secret_file = "cluster-secret"',
                f'discovery = "static://{others}"',
                f"bootstrap_expect = {len(self.by_name)}",
            ]
        return "\n".join(lines) + "\n"

    async def start(self) -> None:
        """Start the proxies and all nodes."""
        callers = {node.host: node.name for node in self.by_name.values()}
        for node in self.by_name.values():
            for port in (node.port, node.cluster_port):
                proxy = Proxy(
                    self.links, node.name, (node.outside, port), (node.host, port), callers
                )
                self._proxies.append(proxy)
                await proxy.start()
        await asyncio.gather(*(node.start() for node in self.by_name.values()))

    async def stop(self) -> None:
        """Stop all nodes and proxies."""
        await asyncio.gather(*(node.stop() for node in self.by_name.values()))
        for proxy in self._proxies:
            await proxy.close()

    @property
    def died(self) -> list[str]:
        """Return the names of nodes that ended by themselves, now or before."""
        return [name for name, node in self.by_name.items() if node.died or node.deaths]

    @property
    def tracebacks(self) -> dict[str, int]:
        """Return how many unexpected errors each node logged."""
        counts = {
            name: node.log.read_bytes().count(b"Traceback (most recent call last)")
            for name, node in self.by_name.items()
            if node.log.exists()
        }
        return {name: count for name, count in counts.items() if count}

    def log_ends(self, size: int = 2_000) -> str:
        """Return the end of each node's log, for people."""
        ends = []
        for node in self.by_name.values():
            with contextlib.suppress(OSError), node.log.open("rb") as file:
                ends.append(f"--- {node.name}\n{_end_of(file, size)}")
        return "\n".join(ends)


def _end_of(file: IO[bytes], size: int) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - size))
    return file.read().decode(errors="replace")
