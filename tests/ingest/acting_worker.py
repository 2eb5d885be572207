"""A worker that does what a test says: it takes streams, and grants, acknowledges and refuses when it is told to.

So what a connector does in a moment that seldom comes can be tested in that moment, without a flow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from google.protobuf.message import Message

from railgun.ingest import Connector
from railgun.transport.commands import FrameReader, encode
from railgun.transport.connection import Connection
from railgun.transport.ingest_batch import unpack
from railgun.transport.listener import Listener
from railgun.transport.proto import connectors_pb2 as c

SECRET = bytes(32)
DEADLINE = 10.0


class Worker:
    """Grants streams at what it `has` of them; `acks` is whether it acknowledges all at once."""

    def __init__(self) -> None:
        self.has: dict[str, int] = {}
        self.came: dict[str, list[tuple[int, bytes]]] = {}
        self.ended: list[str] = []
        self.asked: list[str] = []
        self.grants = True
        self.acks = True
        self.bad: set[bytes] = set()  # payloads that are refused
        self.credits = 1 << 20
        self.connections: list[Connection] = []
        self._names: dict[int, str] = {}
        self._readers: dict[Connection, FrameReader] = {}
        self._listener = Listener(
            lambda: Connection(SECRET, self._opened, self._received, self._closed)
        )

    async def open(self) -> str:
        return f"127.0.0.1:{await self._listener.open('127.0.0.1', 0)}"

    async def close(self) -> None:
        await self._listener.close()

    def lose(self) -> None:
        """All connections are lost."""
        for one in self.connections:
            one.transport.abort()

    def grant(self, stream: str) -> None:
        told = c.NotifyAck(stream=self._number(stream), granted=True)
        if stream in self.has:
            told.por = self.has[stream]
        self._send(told)

    def ack(self, stream: str) -> None:
        """A snapshot is committed."""
        if stream in self.has:
            self._send(c.Ack(points=[c.Point(stream=self._number(stream), por=self.has[stream])]))

    def _number(self, stream: str) -> int:
        return next(number for number, name in self._names.items() if name == stream)

    def _send(self, command: Message) -> None:
        self.connections[-1].send(b"".join(encode(command, ())))

    def _opened(self, connection: Connection) -> None:
        self.connections.append(connection)
        self._readers[connection] = FrameReader()
        connection.send(b"".join(encode(c.Welcome(credits=self.credits, largest=1 << 20), ())))

    def _closed(self, connection: Connection, error: Exception | None) -> None:
        if connection in self.connections:
            self.connections.remove(connection)

    def _received(self, connection: Connection, data: bytes) -> None:
        for frame in self._readers[connection].feed(data):
            command = frame.command
            if connection in self.connections and not isinstance(command, c.Notify | c.Messages):
                self._end(command)
            elif isinstance(command, c.Notify):
                self._names[command.stream] = command.name
                self.asked.append(command.name)
                if self.grants:
                    self.grant(command.name)
            elif isinstance(command, c.Messages) and not self._take(command, bytes(frame.blob)):
                connection.close()
                self.connections.remove(connection)
                return

    def _end(self, command: Message) -> None:
        if isinstance(command, c.Eos):
            self.ended.append(self._names[command.stream])
            if self.acks:
                self.ack(self._names[command.stream])

    def _take(self, command: Any, blob: bytes) -> bool:
        name = self._names[command.stream]
        ids, _, _, payloads = unpack(blob)
        for id_, payload in zip(ids.tolist(), payloads, strict=True):
            if payload in self.bad:
                refused = c.Refused(code="BAD_PAYLOAD", text="it is bad", stream=name, id=id_)
                self._send(refused)
                return False
            if id_ > self.has.get(name, -1):
                self.has[name] = id_
                self.came.setdefault(name, []).append((id_, bytes(payload)))
        self._send(c.Ack(credits=len(blob) + 64))
        if self.acks:
            self.ack(name)
        return True


@asynccontextmanager
async def worker(**settings: Any) -> AsyncIterator[tuple[Worker, str]]:
    """A worker, and where it listens."""
    made = Worker()
    for name, value in settings.items():
        setattr(made, name, value)
    where = await made.open()
    try:
        yield made, where
    finally:
        await made.close()


def client(where: str, **options: Any) -> Connector:
    return Connector(where, secret=SECRET, **options)


def acted(work: Coroutine[Any, Any, None]) -> None:
    """Run a test, which does not hang."""

    async def run() -> None:
        task = asyncio.create_task(work)
        await asyncio.wait([task], timeout=DEADLINE)
        assert task.done(), f"it hangs: {task}"  # said here: what hangs may swallow a cancellation
        await task

    asyncio.run(run())


async def until(done: Any) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(DEADLINE):
        while not done():
            await asyncio.sleep(0.001)
