"""The connection of a connector: to any worker of the flow, one after the other, as long as it is wanted.

What may pass (a flow that is not there, a worker that is lost) is waited for, with longer and longer pauses. What
cannot (a wrong secret, a source that the flow does not have) ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import Message

from railgun.ingest.errors import FeedError, NoFlowError, RefusedError
from railgun.ingest.find_flow import Flow, Found, addresses_of
from railgun.transport.commands import Blob, FrameError, FrameReader, encode
from railgun.transport.connection import Connection
from railgun.transport.hello import HelloError
from railgun.transport.ingest_batch import LARGEST
from railgun.transport.proto import streams_pb2 as p

PAUSES: Final = (0.05, 2.0)  # seconds until the next attempt: at first, and at most
SILENT: Final = (10.0, 30.0)  # seconds after which the worker is asked, and given up
HELLO: Final = 10.0


class Line:
    """One connection after the other. `handle` gets what the worker says, `lost` is called when there is none."""

    def __init__(
        self,
        flow: Flow,
        who: dict[str, Any],
        handle: Callable[[Message], None],
        lost: Callable[[], None],
        give_up: Callable[[Exception], None],
    ) -> None:
        self.flow = flow
        self.connection: Connection | None = None
        self.opened = False
        """Whether a worker has said welcome."""
        self.connections = 0
        """How many there were so far."""
        self.cause: Exception | None = None
        """Why there is none."""
        self.elsewhere = ""
        """Where to connect next, if the worker said so."""
        self.over = False
        """Whether no further one is to follow."""
        self._who = who
        self._handle, self._lose, self._give_up = handle, lost, give_up
        self._frames = FrameReader(LARGEST)
        self._heard = 0.0
        self._lost: asyncio.Event
        self._failed: Exception | None = None  # why the connection closed

    def welcome(self) -> None:
        """The worker takes us."""
        self.opened = True
        self.connections += 1

    def send(self, command: Message, *blobs: Blob) -> None:
        """Send a frame, if somebody is there."""
        if self.connection is not None and self.opened:
            self.connection.transport.writelines(encode(command, blobs))

    def leave(self, elsewhere: str = "") -> None:
        """Let go of this connection; another one will follow."""
        self.elsewhere = elsewhere
        if self.connection is not None:
            self.connection.close()

    def end(self) -> None:
        """Let go of this connection; no other one is to follow."""
        self.over = True
        self.leave()

    async def run(self) -> None:
        """Be connected, one connection after the other."""
        pause = PAUSES[0]
        while not self.over:
            try:
                found = await self.flow.find()
                before = self.connections
                await self._connect(found)
                if self.connections > before:
                    pause = PAUSES[0]
            except (NoFlowError, OSError) as error:
                self.cause = error
            except HelloError as error:
                if error.code in ("BAD_SECRET", "BAD_VERSION", "NO_SOURCE"):
                    self._give_up(RefusedError(error.code, str(error)))
                    return
                self.cause = error
            except FeedError as error:
                self._give_up(error)
                return
            except Exception as error:
                self._give_up(FeedError(f"{self.flow.where} cannot be looked for: {error!r}"))
                return
            if self.over:
                return
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, PAUSES[1])

    async def _connect(self, found: Found) -> None:
        """One connection, to the address we were sent to, or to any; returns when it is lost."""
        addresses = list(found.addresses)
        random.shuffle(addresses)
        elsewhere, self.elsewhere = self.elsewhere, ""
        with contextlib.suppress(FeedError):
            addresses[:0] = addresses_of(elsewhere)
        failed: Exception = NoFlowError("there is no address")
        for address in addresses:
            try:
                await self._dial(*address, found.secret)
            except OSError as error:
                failed = error
            else:
                return
        raise failed

    async def _dial(self, host: str, port: int, secret: bytes) -> None:
        """Connect there; returns when the connection is lost. Raises if it never opened."""
        self._lost = asyncio.Event()
        self._failed = None
        self._frames = FrameReader(LARGEST)
        before = self.connections
        async with asyncio.timeout(HELLO):
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: Connection(
                    secret, self._greeted, self._received, self._closed_by, self._who
                ),
                host,
                port,
            )
        try:
            await self._watch(self._lost)
        finally:
            transport.close()
            self._disconnected()
        if self.connections == before:
            raise self._failed or ConnectionError("the connection was lost before it was open")

    def _greeted(self, connection: Connection) -> None:
        self.connection = connection

    async def _watch(self, lost: asyncio.Event) -> None:
        """Until the connection is lost; a worker that says nothing for long is asked."""
        self._heard = asyncio.get_running_loop().time()
        while not lost.is_set():
            # Not `wait_for`: in Python 3.11 that hears no cancellation in the moment in which the connection is lost.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SILENT[0] / 2):
                    await lost.wait()
            silent = asyncio.get_running_loop().time() - self._heard
            if silent > SILENT[1]:
                return
            if silent > SILENT[0]:
                self.send(p.Ping(number=1))

    def _disconnected(self) -> None:
        self.connection, self.opened = None, False
        self._lose()

    def _closed_by(self, connection: Connection, error: Exception | None) -> None:
        if self.connection in (None, connection):
            self._failed = error
            self.opened = False
            self._lost.set()

    def _received(self, connection: Connection, data: bytes) -> None:
        if connection is not self.connection:
            return
        self._heard = asyncio.get_running_loop().time()
        try:
            for frame in self._frames.feed(data):
                self._handle(frame.command)
        except FrameError as error:
            self.cause = error
            connection.close()
