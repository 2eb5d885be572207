"""`asyncio.start_server` that closes all connections it accepts, even those accepted at the last moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from railgun.transport.listener import stop_accepting

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class StreamServer:
    """Accepts connections, and calls `talk(reader, writer)` in a task for each of them.

    A connection stays open until `talk` or the other side closes it, or the server is closed: `close` ends all
    connections and tasks, and returns when they have ended. What `talk` raises goes to the loop's exception handler.
    """

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.port = 0
        self.closing = False
        self.transports: set[asyncio.Transport] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on `host` and `port`. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Accepted(self), host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop accepting, and end all connections and tasks."""
        self.closing = True
        server, self._server = self._server, None
        if server is not None:
            await stop_accepting([server])
        self.cut()
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        while self.transports:
            self.cut()
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # connections that tasks have opened are closed in the next turn

    def cut(self) -> None:
        """Reset all connections at once, whatever was written."""
        for transport in list(self.transports):
            transport.abort()

    async def __aenter__(self) -> StreamServer:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class _Accepted(asyncio.StreamReaderProtocol):
    """One connection of a server."""

    def __init__(self, server: StreamServer) -> None:
        self._accepted_by = server
        self._streams = asyncio.StreamReader()
        super().__init__(self._streams)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Call `talk`, unless the server is closing."""
        super().connection_made(transport)
        server, self._made = self._accepted_by, cast(asyncio.Transport, transport)
        server.transports.add(self._made)
        if server.closing:
            self._made.abort()
            return
        loop = asyncio.get_running_loop()
        # A writer without references closes its connection whenever it is collected.
        self._writer = asyncio.StreamWriter(self._made, self, self._streams, loop)
        task = loop.create_task(_talk(server.talk, self._streams, self._writer))
        server.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._accepted_by.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._made.abort()
            context = {"message": "a server's talk raised", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection: its socket is closed when this returns."""
        super().connection_lost(exc)
        self._accepted_by.transports.discard(self._made)


async def _talk(talk: Talk, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await talk(reader, writer)
