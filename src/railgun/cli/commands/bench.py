"""`railgun bench streams`: measure how fast a running node takes messages from this client and delivers them.

The benchmark creates streams with unique names. Publisher and subscriber, and requester and responder, are two
connections of this one process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from railgun.cli.arguments import add_node, positive, seconds
from railgun.cli.errors import DONE
from railgun.cli.node import connect_by, talk
from railgun.cli.output import Output
from railgun.cli.parsing import Subcommands
from railgun.client import load
from railgun.client.client import Client
from railgun.transport.registry import Registry

UNLIMITED_MESSAGES: Final = 1 << 62
"""No limit on messages: the time ends the load."""


LOADS: Final = ("publish", "consume", "pubsub", "request")


def measure(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Measure the selected loads, one after the other."""

    async def work(client: Client) -> int:
        async with await connect_by(options) as peer:
            return await _Bench(client, peer, options, out).run()

    return talk(options, work)


class _Bench:
    """One run of the benchmark against one node."""

    def __init__(
        self, client: Client, peer: Client, options: argparse.Namespace, out: Output
    ) -> None:
        self.client, self.peer = client, peer
        self.out = out
        self.only: tuple[str, ...] = options.only
        self.seconds: float = options.seconds
        self.tasks: int = options.tasks
        self.payloads = load.messages(options.batch, options.size)
        self.name = f"railgun-bench-{secrets.token_hex(4)}"
        self.ephemeral = f"{self.name}.ephemeral"
        self.table = Table("load", "how", "figure", "unit")
        self.table.columns[2].justify = "right"

    async def run(self) -> int:
        """Run the selected loads, and show their results."""
        size, count = len(self.payloads[0]), len(self.payloads)
        host, port = self.client.where
        self.out.line(
            f"{host}:{port}, messages of {size:,} bytes, {self.seconds:g} s for each load"
        )
        every = f"batches of {count:,}"
        async with self._streams():
            if "publish" in self.only:
                await self._rate("publish", every, self._publish)
                await self._rate("publish", f"{self.tasks:,} tasks", self._publish_singly)
            if "consume" in self.only:
                if "publish" not in self.only:
                    await self._rate("publish", "what is to be consumed", self._publish)
                await self._rate("consume", "batches, acked", self._consume)
                await self._rate("consume", "singly, acked", self._consume_singly)
            if "pubsub" in self.only:
                await self._rate("pubsub", every, self._scatter)
                await self._rate("pubsub", f"{self.tasks:,} tasks", self._scatter_singly)
            if "request" in self.only:
                await self._requests()
        self.out.show(self.table)
        return DONE

    # ------------------------------------------------------------ loads

    async def _publish(self, progress: load.Progress) -> load.Measured:
        return await load.publish_batches(
            self.client, self.name, self.payloads, self.seconds, progress=progress
        )

    async def _publish_singly(self, progress: load.Progress) -> load.Measured:
        payload = self.payloads[0]
        return await load.publish_singly(
            self.client, self.name, payload, self.seconds, self.tasks, progress
        )

    async def _consume(self, progress: load.Progress) -> load.Measured:
        return await load.consume_batches(
            self.client,
            self.name,
            "batches",
            await self._end_offset(),
            self.seconds,
            progress=progress,
        )

    async def _consume_singly(self, progress: load.Progress) -> load.Measured:
        return await load.consume_singly(
            self.client,
            self.name,
            "singly",
            await self._end_offset(),
            self.seconds,
            progress=progress,
        )

    async def _end_offset(self) -> int:
        return int((await self.client.admin("describe", name=self.name))["end"])

    async def _scatter(self, progress: load.Progress) -> load.Measured:
        return await load.scatter_batches(
            self.client, self.peer, self.ephemeral, self.payloads, self.seconds, progress=progress
        )

    async def _scatter_singly(self, progress: load.Progress) -> load.Measured:
        payload = self.payloads[0]
        return await load.scatter_singly(
            self.client, self.peer, self.ephemeral, payload, self.seconds, self.tasks, progress
        )

    async def _requests(self) -> None:
        ready = asyncio.Event()
        responding = asyncio.create_task(load.respond(self.peer, self.ephemeral, ready.set))
        try:
            await ready.wait()
            with self._progress("request, one at a time") as progress:
                waits = await load.requests(
                    self.client,
                    self.ephemeral,
                    self.payloads[0],
                    self.seconds,
                    UNLIMITED_MESSAGES,
                    progress,
                )
        finally:
            responding.cancel()
            await asyncio.wait([responding])
        p50, p99 = (waits.at(share) for share in (0.5, 0.99))
        count = len(waits.seconds)
        self.out.data(
            measured="request", way="one at a time", requests=count, p50_seconds=p50,
            p99_seconds=p99,
        )  # fmt: skip
        self.table.add_row("request", "one at a time", f"{1e6 * p50:,.0f}", "µs, p50")
        self.table.add_row("", "", f"{1e6 * p99:,.0f}", "µs, p99")

    async def _rate(
        self, name: str, way: str, work: Callable[[load.Progress], Awaitable[load.Measured]]
    ) -> None:
        with self._progress(f"{name}, {way}") as progress:
            measured = await work(progress)
        self.out.data(
            measured=name, way=way, messages=measured.messages, seconds=measured.seconds,
            messages_per_second=measured.rate,
        )  # fmt: skip
        self.table.add_row(name, way, f"{measured.rate:,.0f}", "messages/s")

    @contextlib.contextmanager
    def _progress(self, what: str) -> Iterator[load.Progress]:
        """Show progress on a terminal, for people only."""
        shown = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            console=self.out.console, transient=True,
            disable=self.out.as_json or not self.out.console.is_terminal,
        )  # fmt: skip
        with shown:
            task = shown.add_task(what, total=None)
            yield lambda count: shown.update(task, description=f"{what}: {count:,}")

    # ------------------------------------------------------------ streams of the benchmark

    @contextlib.asynccontextmanager
    async def _streams(self) -> AsyncIterator[None]:
        """Create the streams, and delete them at the end."""
        await self.client.ensure(self.name)
        await self.client.ensure(self.ephemeral, kind="ephemeral")
        try:
            yield
        finally:
            for name in (self.name, self.ephemeral):
                await self.client.delete(name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command `streams`."""
    command = Subcommands(parser).add(
        "streams", measure, "measure messages and requests per second, with this process as client"
    )
    command.add_argument(
        "--seconds", type=seconds, default=2.0, metavar="SECONDS",
        help="duration of each load (default: 2)",
    )  # fmt: skip
    command.add_argument(
        "--size", type=positive, default=100, metavar="BYTES",
        help="size of a message (default: 100)",
    )  # fmt: skip
    command.add_argument(
        "--batch", type=positive, default=1000, metavar="N",
        help="messages published in one call (default: 1000)",
    )  # fmt: skip
    command.add_argument(
        "--tasks", type=positive, default=1000, metavar="N",
        help="concurrent tasks that publish one message at a time (default: 1000)",
    )  # fmt: skip
    command.add_argument(
        "--only", type=_loads, default=LOADS, metavar="LOAD,…",
        help=f"run only these loads: {', '.join(LOADS)}",
    )  # fmt: skip
    add_node(command)


def _loads(text: str) -> tuple[str, ...]:
    names = {name.strip() for name in text.split(",")}
    unknown = sorted(names - set(LOADS))
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(map(repr, unknown))}: there are {', '.join(LOADS)}"
        )
    return tuple(name for name in LOADS if name in names)
