"""Keep a connector connected to a worker of the flow: connect again whenever the connection is lost.

Transient errors (the flow does not run, a worker is lost) are retried, with growing pauses. Permanent errors (a wrong
secret, a source that the flow does not have) end the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import Message

from railgun.ingest.errors import FeedError, NoFlowError, RefusedError
from railgun.ingest.find_flow import Endpoints, Flow, addresses_of
from railgun.transport.commands import Blob, FrameError, FrameReader, encode
from railgun.transport.connection import Connection
from railgun.transport.hello import HelloError
from railgun.transport.ingest_batch import LARGEST
from railgun.transport.proto import streams_pb2 as p

RECONNECT_PAUSES_S: Final = (0.05, 2.0)  # until the next attempt: at first, and at most
SILENCE_S: Final = (10.0, 30.0)  # after which a silent worker is pinged, and given up
HELLO_TIMEOUT_S: Final = 10.0


class WorkerLink:
    """A link to the workers of a flow: one connection after the other.

    `handle` is called with each command of the worker, `lost` when the connection is lost, and `give_up` with a
    permanent error.
    """

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
        """Whether a worker has accepted the connection (`Welcome`)."""
        self.connections = 0
        """The number of connections made so far."""
        self.cause: Exception | None = None
        """Why the last attempt to connect failed."""
        self.elsewhere = ""
        """The address to connect to next, if the worker named one."""
        self.over = False
        """Whether the link has ended: no further connection is made."""
        self._who = who
        self._handle, self._lose, self._give_up = handle, lost, give_up
        self._frames = FrameReader(LARGEST)
        self._heard = 0.0
        self._lost: asyncio.Event
        self._failed: Exception | None = None  # why the connection closed

    def welcome(self) -> None:
        """Record that the worker has accepted the connection."""
        self.opened = True
        self.connections += 1

    def send(self, command: Message, *blobs: Blob) -> None:
        """Send a frame; drop it if there is no open connection."""
        if self.connection is not None and self.opened:
            self.connection.transport.writelines(encode(command, blobs))

    def leave(self, elsewhere: str = "") -> None:
        """Close this connection; the next one goes to the address `elsewhere`, if given, or to any worker."""
        self.elsewhere = elsewhere
        if self.connection is not None:
            self.connection.close()

    def end(self) -> None:
        """Close this connection, and make no further one."""
        self.over = True
        self.leave()

    async def run(self) -> None:
        """Connect, again and again, until `end` is called or a permanent error occurs."""
        pause = RECONNECT_PAUSES_S[0]
        while not self.over:
            try:
                endpoints = await self.flow.find()
                before = self.connections
                await self._connect(endpoints)
                if self.connections > before:
                    pause = RECONNECT_PAUSES_S[0]
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
                self._give_up(FeedError(f"the lookup of {self.flow.where} has failed: {error!r}"))
                return
            if self.over:
                return
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, RECONNECT_PAUSES_S[1])

    async def _connect(self, endpoints: Endpoints) -> None:
        """Connect to the address that a worker named, or to any worker; return when the connection is lost."""
        addresses = list(endpoints.addresses)
        random.shuffle(addresses)
        elsewhere, self.elsewhere = self.elsewhere, ""
        with contextlib.suppress(FeedError):
            addresses[:0] = addresses_of(elsewhere)
        failed: Exception = NoFlowError("there is no address")
        for address in addresses:
            try:
                await self._dial(*address, endpoints.secret)
            except OSError as error:
                failed = error
            else:
                return
        raise failed

    async def _dial(self, host: str, port: int, secret: bytes) -> None:
        """Connect to an address; return when the connection is lost. Raise if the worker never accepted it."""
        self._lost = asyncio.Event()
        self._failed = None
        self._frames = FrameReader(LARGEST)
        before = self.connections
        async with asyncio.timeout(HELLO_TIMEOUT_S):
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
        """Wait until the connection is lost; ping a silent worker, and return if it stays silent."""
        self._heard = asyncio.get_running_loop().time()
        while not lost.is_set():
            # Not `wait_for`: in Python 3.11 it misses a cancellation at the moment in which the connection is lost.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_S[0] / 2):
                    await lost.wait()
            silent = asyncio.get_running_loop().time() - self._heard
            if silent > SILENCE_S[1]:
                return
            if silent > SILENCE_S[0]:
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
