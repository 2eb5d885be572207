"""A real node on a free port of this machine, clients of it, and ways to treat both badly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from verification.stream_server import StreamServer

from railgun.broker.clock import time_of_day
from railgun.broker.log.disk import Disk
from railgun.broker.server.server import Server, ServerConfig
from railgun.broker.settings import SECOND
from railgun.client.client import Client, connect
from railgun.client.errors import StreamsError
from railgun.client.message import Message
from railgun.client.subscription import Subscription
from railgun.transport.commands import VERSION, Frame, FrameReader
from railgun.transport.connection import Connection

DEADLINE = 10.0
QUIET = 0.25  # so long nothing comes that should not

_SERVE = """
import asyncio, sys
from pathlib import Path
from railgun.broker.server.server import Server, ServerConfig
async def main():
    server = Server(ServerConfig(Path(sys.argv[1]), port=int(sys.argv[2])))
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def run(main: Coroutine[Any, Any, None], deadline: float = 3 * DEADLINE) -> None:
    """Run this, with a deadline; nothing may go wrong behind its back."""
    troubles: list[dict[str, Any]] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: troubles.append(told))
        async with asyncio.timeout(deadline):
            await main

    asyncio.run(bounded())
    assert not troubles, troubles


class Running:
    """A node that can be stopped and started again on its port."""

    def __init__(self, data: Path, http_port: int | None = None, disk: Disk | None = None) -> None:
        self.data = data
        self.disk = disk
        self.ahead = 0.0
        """How wrong its clock is (seconds)."""
        self.port = 0
        self.http_port = http_port
        self.server: Server | None = None
        self.told: list[str] = []
        """What recovery had to say."""
        self._clients: list[Client] = []

    async def start(self) -> None:
        """Start it, where it was before."""
        config = ServerConfig(self.data, port=self.port, http_port=self.http_port)
        self.server = Server(config, self.disk, self.now)
        self.told = await self.server.start()
        self.port = self.server.port
        if self.server.http is not None:
            self.http_port = self.server.http.port

    def now(self) -> int:
        """The time, as the node sees it."""
        return time_of_day() + int(self.ahead * SECOND)

    async def stop(self) -> None:
        """Stop it in order."""
        if self.server is not None:
            await self.server.stop()
            self.server = None

    async def again(self) -> None:
        """Stop it and start it."""
        await self.stop()
        await self.start()

    async def client(self, port: int = 0, timeout: float = DEADLINE) -> Client:
        """One more client; of the node, or of a proxy before it."""
        made = await connect(f"127.0.0.1:{port or self.port}", data=self.data, timeout=timeout)
        self._clients.append(made)
        return made

    async def end(self) -> None:
        """Let all go."""
        for client in self._clients:
            client.timeout = min(client.timeout, 1.0)
            await client.close()
        await self.stop()


@contextlib.asynccontextmanager
async def node(
    data: Path, http_port: int | None = None, disk: Disk | None = None
) -> AsyncIterator[Running]:
    """A node within this."""
    running = Running(data, http_port, disk)
    await running.start()
    try:
        yield running
    finally:
        await running.end()


class Process:
    """A node in a process of its own, which can be killed."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, where it was before."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _SERVE, str(self.data), str(self.port)),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            self.port = int(await self._process.stdout.readline())

    async def kill(self) -> None:
        """End it without a word."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.communicate()
            self._process = None


@contextlib.asynccontextmanager
async def process(data: Path) -> AsyncIterator[Process]:
    """A node in a process of its own within this."""
    running = Process(data)
    await running.start()
    try:
        yield running
    finally:
        await running.kill()


class Proxy:
    """Stands between a client and a node; can swallow what the node says, and cut."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.muted = False
        self.swallowed = 0
        self._to = port
        self._server = StreamServer(self._talk)
        self._ours: set[asyncio.StreamWriter] = set()

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._server.tasks)

    async def __aenter__(self) -> Proxy:
        await self._server.open()
        self.port = self._server.port
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, ours = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        self._ours.add(ours)
        try:
            await asyncio.gather(self._pump(reader, ours, False), self._pump(theirs, writer, True))
        finally:
            self._ours.discard(ours)
            ours.transport.abort()
            writer.transport.abort()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if answers and self.muted:
                    self.swallowed += len(data)
                else:
                    sink.write(data)
        sink.close()

    def cut(self) -> None:
        """End all connections at once."""
        self._server.cut()
        for writer in self._ours:
            writer.transport.abort()


class Raw:
    """A peer that knows the secret and speaks frames, or whatever it is told to."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.closed = asyncio.Event()
        self.error: Exception | None = None
        self.connection: Connection
        self._reader = FrameReader()

    @staticmethod
    async def dial(running: Running, secret: bytes | None = None, version: int = VERSION) -> Raw:
        """Connect; returns when the node has answered the hello, either way."""
        made, opened = Raw(), asyncio.Event()
        assert running.server is not None

        def gone(connection: Connection, error: Exception | None) -> None:
            made.error = error
            made.closed.set()
            opened.set()

        _, made.connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(
                secret or running.server.secret,  # type: ignore[union-attr]
                lambda _: opened.set(),
                lambda _, data: made.frames.extend(made._reader.feed(data)),
                gone,
                {"version": version, "name": "raw"},
            ),
            *("127.0.0.1", running.port),
        )
        async with asyncio.timeout(DEADLINE):
            await opened.wait()
        return made

    def codes(self) -> list[str]:
        """Of all failures it was told of."""
        return [f.command.code for f in self.frames if hasattr(f.command, "code")]


def die(client: Client) -> None:
    """A client that is gone from one moment to the next, and does not come back."""
    client._closing = True
    assert client._running is not None
    client._running.cancel()
    if client._connection is not None:
        client._connection.transport.abort()


async def take(sub: Subscription, count: int) -> list[Message]:
    """So many messages."""
    return [await sub.next(DEADLINE) for _ in range(count)]


async def stored(client: Client, stream: str) -> list[bytes]:
    """All payloads of a stream."""
    end = (await client.describe(stream))["end"]
    found: list[Message] = []
    async with await client.subscribe(stream) as sub:
        while len(found) < end:
            found += await sub.batch(end, DEADLINE)
    assert [message.offset for message in found] == list(range(end))
    return [message.payload for message in found]


async def refused(code: str, call: Awaitable[object]) -> StreamsError:
    """It is refused with this code."""
    with pytest.raises(StreamsError) as caught:
        await call
    assert caught.value.code == code, caught.value
    return caught.value


async def nothing(sub: Subscription) -> None:
    """Nothing comes."""
    try:
        message = await sub.next(QUIET)
    except TimeoutError:
        return
    raise AssertionError(f"{message} came")


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, "it did not come to pass"
        await asyncio.sleep(0.005)
