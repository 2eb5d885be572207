"""Nodes as processes: their files, their addresses, their proxies, and what can be done to them.

Rules:

1. A node listens on a loopback address of its own, 127.0.0.11 for the first, and calls others from there. Everybody
   else is told another address, 127.0.1.11, where proxies stand before its ports: for other nodes and for clients.
2. Everything of a run is in one directory: for each node its configuration, its data, what is wrong with it
   (`n1.orders`), and what it wrote to stdout and stderr (`n1.log`).
3. A node that ends without being asked to is remembered (`died`), and so are errors that nobody has thought of, in its
   log (`tracebacks`).
4. One node alone has no `[cluster]`; nor have many that are to know nothing of each other, to see that this is noticed.
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
"""Seconds that it may take to end in order."""
FIRST: Final = 11


class NodeDiedError(RailgunError):
    """A node ended by itself."""


class NodeProcess:
    """One node."""

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
        """How often it was found dead."""
        self._process: asyncio.subprocess.Process | None = None
        self._asked = False  # to end

    def order(self, orders: Orders) -> None:
        """Let this be wrong with its disk and clock."""
        self.orders = orders
        orders.write(self.control)

    @property
    def up(self) -> bool:
        """Whether it is there; it may be stopped."""
        return self._process is not None and self._process.returncode is None

    @property
    def died(self) -> bool:
        """Whether it ended, and nobody had asked for it."""
        return self._process is not None and not self.up and not self._asked

    async def start(self) -> list[str]:
        """Start it, and wait until it listens; what recovery has found."""
        if self.up:
            return []
        self.deaths += self.died
        self.starts += 1
        self._asked = False
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
            return [f"does not listen after {START:g} s"]  # it may come yet
        try:
            return [str(one) for one in json.loads(line)["found"]]
        except (ValueError, KeyError) as error:
            await self._gone()
            raise NodeDiedError(f"{self.name} ended at its start: see {self.log}") from error

    async def _gone(self) -> None:
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP):
                    await self._process.wait()

    async def kill(self) -> None:
        """End it without a word."""
        if self.up:
            self._asked = True
            self._signal(signal.SIGKILL)
            await self._gone()

    async def stop(self) -> None:
        """End it in order; without a word if it takes too long."""
        if self.up:
            self._asked = True
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            await self._gone()
            await self.kill()

    def pause(self) -> None:
        """Let it do nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def connect(self, timeout: float = 5.0, name: str = "", direct: bool = False) -> Client:
        """A client of it, through its proxy unless told otherwise."""
        host = self.host if direct else self.outside
        return await connect(f"{host}:{self.port}", data=self.data, timeout=timeout, name=name)


class Nodes:
    """All of them, and the links between them."""

    def __init__(
        self, directory: Path, count: int, seed: int = 0, clustered: bool | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.links = Links(Random(seed))
        made = [NodeProcess(directory, f"n{n + 1}", n) for n in range(count)]
        self.by_name = {one.name: one for one in made}
        self._proxies: list[Proxy] = []
        self._clustered = count > 1 if clustered is None else clustered
        if self._clustered:
            (directory / "cluster-secret").write_text(secrets.token_hex(32), "ascii")
        for one in made:
            one.config.write_text(self._config(one), "utf-8")
            one.order(Orders())

    def __getitem__(self, name: str) -> NodeProcess:
        return self.by_name[name]

    @property
    def names(self) -> list[str]:
        """Of all nodes."""
        return list(self.by_name)

    def _config(self, one: NodeProcess) -> str:
        lines = ["[node]", f'data = "{one.name}"', f'host = "{one.host}"', f"port = {one.port}"]
        lines.append('http_port = "none"')
        if self._clustered:
            others = ",".join(f"{n.outside}:{n.cluster_port}" for n in self.by_name.values())
            lines += [
                f'name = "{one.name}"',
                f"cluster_port = {one.cluster_port}",
                f'advertise = "{one.outside}:{one.cluster_port}"',
                f'advertise_client = "{one.outside}:{one.port}"',
                "[cluster]",
                'secret_file = "cluster-secret"',
                f'discovery = "static://{others}"',
                f"bootstrap_expect = {len(self.by_name)}",
            ]
        return "\n".join(lines) + "\n"

    async def start(self) -> None:
        """Start the proxies and all nodes."""
        callers = {one.host: one.name for one in self.by_name.values()}
        for one in self.by_name.values():
            for port in (one.port, one.cluster_port):
                proxy = Proxy(self.links, one.name, (one.outside, port), (one.host, port), callers)
                self._proxies.append(proxy)
                await proxy.start()
        await asyncio.gather(*(one.start() for one in self.by_name.values()))

    async def stop(self) -> None:
        """End all of it."""
        await asyncio.gather(*(one.stop() for one in self.by_name.values()))
        for proxy in self._proxies:
            await proxy.close()

    @property
    def died(self) -> list[str]:
        """Those that ended by themselves, now or before."""
        return [name for name, one in self.by_name.items() if one.died or one.deaths]

    @property
    def tracebacks(self) -> dict[str, int]:
        """How often each wrote of an error nobody has thought of."""
        counts = {
            name: one.log.read_bytes().count(b"Traceback (most recent call last)")
            for name, one in self.by_name.items()
            if one.log.exists()
        }
        return {name: count for name, count in counts.items() if count}

    def log_ends(self, size: int = 2_000) -> str:
        """What each wrote last, for people."""
        told = []
        for one in self.by_name.values():
            with contextlib.suppress(OSError), one.log.open("rb") as file:
                told.append(f"--- {one.name}\n{_end_of(file, size)}")
        return "\n".join(told)


def _end_of(file: IO[bytes], size: int) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - size))
    return file.read().decode(errors="replace")
