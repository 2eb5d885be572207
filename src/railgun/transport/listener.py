"""Open listening sockets, track the connections accepted on them, and close all of them without missing one.

asyncio accepts a connection in one turn of its loop and creates the transport in the next. A transport created after
`Server.close` raises in its constructor, unseen, and leaves its socket to the garbage collector. So a listener first
removes its sockets from the loop, then lets the pending transports be created, and closes after that.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Final

from railgun.transport.connection import Connection, Gate

BACKLOG: Final = 1024


def close_soon(servers: Iterable[asyncio.AbstractServer]) -> None:
    """Accept no more, and close the listening sockets of `servers` in the next turn of the loop."""
    loop = asyncio.get_running_loop()
    for server in servers:
        if isinstance(server, asyncio.Server) and isinstance(loop, asyncio.SelectorEventLoop):
            for listening in server.sockets:
                loop.remove_reader(listening.fileno())
            loop.call_soon(server.close)  # pending transports are created before that
        else:
            server.close()  # uvloop creates a transport as it accepts


async def stop_accepting(servers: Iterable[asyncio.AbstractServer]) -> None:
    """Close the listening sockets of `servers`; return after `connection_made` of all connections they accepted.

    A connection whose TLS handshake is under way has its `connection_made` later, or never.
    """
    close_soon(servers)
    await asyncio.sleep(0)  # the sockets are closed, and transports created
    await asyncio.sleep(0)  # `connection_made` is called


class Listener:
    """Accepts connections, and tracks each of them until it is closed.

    `make` returns the protocol of a new connection; `gate` limits how many may wait to say hello.
    """

    def __init__(self, make: Callable[[], Connection], gate: Gate | None = None) -> None:
        self.gate = gate
        self._make = make
        self._servers: list[asyncio.AbstractServer] = []
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._closed = False

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen on another address; return the port. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._accept, host, port, ssl=tls, backlog=BACKLOG)
        self._servers.append(server)
        bound_port: int = server.sockets[0].getsockname()[1]
        return bound_port

    async def open_socket(self, listening: socket.socket) -> None:
        """Listen also on a socket that is already bound."""
        loop = asyncio.get_running_loop()
        self._servers.append(
            await loop.create_server(self._accept, sock=listening, backlog=BACKLOG)
        )

    async def open_unix(self, path: str) -> None:
        """Listen also on a Unix socket. Raises `OSError`, or `NotImplementedError` where there are none."""
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_unix_server(self._accept, path, backlog=BACKLOG))

    def _accept(self) -> asyncio.BaseProtocol:
        connection = self._make()
        if self._closed:
            connection.abort()
        self._connections.add(connection)
        return connection if self.gate is None else self.gate.admit(connection)

    def abort(self) -> None:
        """Accept no more, and begin to close all connections at once; `close` waits until that is done."""
        self._closed = True
        self.stop()
        for connection in list(self._connections):
            connection.abort()

    def stop(self) -> None:
        """Accept no more, and close the listening sockets in the next turn of the loop; keep accepted connections."""
        servers, self._servers = self._servers, []
        close_soon(servers)

    async def close(self, linger_s: float = 0.0) -> None:
        """Accept no more, and close all connections; return when their sockets are closed.

        Connections that are already closing have `linger_s` seconds to send what was written.
        """
        self._closed = True
        self.stop()
        await stop_accepting([])  # lets connections accepted before get their transports
        for connection in self._left():
            if not linger_s or not connection.closing:
                connection.abort()
        until_s = time.monotonic() + linger_s
        await asyncio.sleep(0)
        while self._left() and time.monotonic() < until_s:
            await asyncio.sleep(0.002)
        self.abort()
        while self._left():
            await asyncio.sleep(0)

    def _left(self) -> list[Connection]:
        return [connection for connection in self._connections if connection.there]
