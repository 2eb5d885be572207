"""The door of a worker and what is behind it, and callers that speak frame by frame, for tests."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from google.protobuf.message import Message

from railgun.engine.operators.operator import Operator, Setting
from railgun.engine.operators.reading import Clock
from railgun.engine.operators.receiving import Receiving
from railgun.engine.protocol.frontier import MIN
from railgun.engine.worker import control_messages as control
from railgun.engine.worker.ingest_listener import IngestListener
from railgun.sources.connectors import Connectors
from railgun.transport import ingest_batch as outside
from railgun.transport.commands import FrameReader, encode
from railgun.transport.connection import Connection
from railgun.transport.proto import connectors_pb2 as c
from railgun.transport.rows import RowBatch

SECRET = bytes(32)


class Seen(Operator):
    """What comes behind the source."""

    def __init__(self) -> None:
        super().__init__(Setting("seen"))
        self.values: list[Any] = []
        self.batches: list[RowBatch] = []

    def push(self, batch: RowBatch) -> None:
        self.values += batch.values
        self.batches.append(batch)


class Behind:
    """A door, what is behind it, and a controller that grants whatever is asked for."""

    def __init__(
        self, on_error: str = "stop", time: Callable[[Any], int] | None = None, share: int = 1
    ) -> None:
        self.source = Connectors("feed", decode="text", secret=SECRET)
        self.letters: list[Any] = []
        setting = Setting("in", on_error, self.letters.append)
        self.receiving = Receiving(setting, self.source, Clock(time), 0)
        self.seen = Seen()
        self.receiving.outs.append(self.seen)
        self.told: list[Any] = []
        self.door = IngestListener(self.source, "in", self._tell, lambda: None, share)
        self.address = ("", 0)

    async def open(self) -> None:
        self.address = await self.door.open("127.0.0.1", 0)
        self.door.attach(self.receiving, 1)

    def _tell(self, report: Any) -> None:
        self.told.append(report)
        if isinstance(report, control.Asked):
            granted = control.Granted(1, "in", report.stream, report.session, -1, MIN)
            asyncio.get_running_loop().call_soon(self.door.obey, granted)

    def read(self) -> list[Any]:
        """Let the source be read; all that came so far."""
        while self.receiving.read(0):
            pass
        return self.seen.values


class Caller:
    """The other end, frame by frame."""

    every: ClassVar[list[Caller]] = []

    def __init__(self) -> None:
        self.every.append(self)
        self.frames: asyncio.Queue[Message | None] = asyncio.Queue()
        self.reader = FrameReader()
        self.connection: Connection
        self.error: Exception | None = None

    async def dial(self, address: tuple[str, int], **who: Any) -> Caller:
        told = {"version": outside.VERSION, "instance": os.urandom(4).hex(), **who}
        opened = asyncio.get_running_loop().create_future()

        def lost(connection: Connection, error: Exception | None) -> None:
            self.error = error
            self.frames.put_nowait(None)
            if not opened.done():
                opened.set_result(None)

        def greeted(connection: Connection) -> None:
            self.connection = connection
            opened.set_result(None)

        def received(connection: Connection, data: bytes) -> None:
            for frame in self.reader.feed(data):
                self.frames.put_nowait(frame.command)

        self.transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: Connection(SECRET, greeted, received, lost, told), *address
        )
        await opened
        return self

    def send(self, command: Message, blob: bytes = b"") -> None:
        self.connection.send(b"".join(encode(command, [blob] if blob else [])))

    async def next(self) -> Message | None:
        return await asyncio.wait_for(self.frames.get(), 10)

    async def until(self, kind: Any) -> Any:
        """The next frame of a kind; None if the connection ends before."""
        while (frame := await self.next()) is not None:
            if isinstance(frame, kind):
                return frame
        return None

    async def opened(self, address: tuple[str, int], stream: str = "a") -> Caller:
        """Connected, and a stream open, as number 1."""
        await self.dial(address)
        self.send(c.Notify(stream=1, name=stream))
        answer = await self.until(c.NotifyAck)
        assert answer.granted
        return self

    def messages(self, *ids: int, stream: int = 1, text: str = "x") -> None:
        self.send(c.Messages(stream=stream), outside.pack(ids, [text.encode()] * len(ids)))


@asynccontextmanager
async def behind(on_error: str = "stop", **options: Any) -> AsyncIterator[Behind]:
    made = Behind(on_error, **options)
    await made.open()
    try:
        yield made
    finally:
        await made.door.close()
        for caller in Caller.every:
            caller.transport.abort()
        Caller.every.clear()
        await asyncio.sleep(0)


async def until(done: Callable[[], Any], what: str = "") -> None:
    """Wait for something to become true."""
    for _ in range(10_000):
        if done():
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"it did not happen: {what}")


async def settle() -> None:
    """Let all that was sent over loopback arrive."""
    for _ in range(20):
        await asyncio.sleep(0.002)


def run(work: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


def frame(size: int, kind: int, length: int, body: bytes = b"") -> bytes:
    return struct.pack("<IIII", size, 0, kind, length) + body
