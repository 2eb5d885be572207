"""A connection that is accepted while its listener closes is closed: by every listener there is."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.engine.worker.listener_callers import Behind
from tests.sinkserver.sinks import Shelf
from verification.faults.proxy import Links as ProxyLinks
from verification.faults.proxy import Proxy
from verification.stream_server import StreamServer

from railgun import Collect, Flow, Items
from railgun.broker.cluster.links import Identity, Links
from railgun.broker.server.server import Server, ServerConfig
from railgun.engine.controller.controller import Controller
from railgun.flows.plan import compile_flow
from railgun.sinkserver.server import SinkServer
from railgun.transport.connection import Connection, Gate
from railgun.transport.http import HttpPort
from railgun.transport.listener import Listener

DEADLINE = 30.0
TURNS = 7  # of the loop: more than it takes to accept a connection and to say hello

Opened = tuple[int, Callable[[], Awaitable[Any]]]
"""A port, and how to close what listens on it."""


def _connection() -> Connection:
    return Connection(b"x", lambda _: None, lambda _, data: None, lambda _, error: None)


async def listener(path: Path) -> Opened:
    made = Listener(_connection)
    return await made.open("127.0.0.1", 0), made.close


async def aborted(path: Path) -> Opened:
    made = Listener(_connection)

    async def close() -> None:
        made.abort()
        for _ in range(5):
            await asyncio.sleep(0)

    return await made.open("127.0.0.1", 0), close


async def lingering(path: Path) -> Opened:
    made = Listener(_connection)
    return await made.open("127.0.0.1", 0), lambda: made.close(DEADLINE)


async def full(path: Path) -> Opened:
    """Turns the next one away."""
    made = Listener(_connection, Gate(1))
    assert made.gate is not None
    made.gate.admit(_connection())
    return await made.open("127.0.0.1", 0), made.close


async def streams(path: Path) -> Opened:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    made = StreamServer(silent)
    await made.open()
    return made.port, made.close


async def proxy(path: Path) -> Opened:
    behind, close_behind = await streams(path)
    made = Proxy(ProxyLinks(), "b", ("127.0.0.1", 0), ("127.0.0.1", behind))
    await made.start()

    async def close() -> None:
        await made.close()
        await close_behind()

    return made.port, close


async def http(path: Path) -> Opened:
    made = HttpPort(web.Application(), "127.0.0.1", 0)
    await made.open()
    return made.port, made.close


async def node(path: Path) -> Opened:
    made = Server(ServerConfig(path / "node", port=0))
    await made.start()
    return made.port, made.stop


async def links(path: Path) -> Opened:
    made = Links(Identity("a", "c"), b"x", None)  # type: ignore[arg-type]  # nobody gets so far
    await made.listen("127.0.0.1", 0)
    return made.port, made.close


async def door(path: Path) -> Opened:
    made = Behind()
    await made.open()
    return made.address[1], made.door.close


async def sink(path: Path) -> Opened:
    made = SinkServer(Shelf(), path / "sink", port=0)
    await made.start()
    return made.port, made.stop


async def controller(path: Path) -> Opened:
    flow = Flow("listening")
    flow.source(Items([1])).sink(Collect(), name="out")
    made = Controller(compile_flow(flow), b"", None, 1)
    made._loop.close()  # the test's own loop is the one that it listens in
    made._loop = asyncio.get_running_loop()  # type: ignore[assignment]
    await made._listen()
    return made._port, made._close_connections


EVERY = [
    *(listener, aborted, lingering, full, streams, proxy),
    *(http, node, links, door, sink, controller),
]


@pytest.mark.parametrize("turns", range(TURNS))
@pytest.mark.parametrize("opened", EVERY, ids=lambda one: one.__name__)
def test_a_connection_that_comes_at_the_last_moment_is_closed(
    opened: Callable[[Path], Awaitable[Opened]], turns: int, tmp_path: Path
) -> None:
    """The end comes so many turns of the loop after a connection: before it is accepted, just then, or later."""

    async def main() -> socket.socket:
        port, close = await opened(tmp_path)
        came = socket.create_connection(
            ("127.0.0.1", port)
        )  # the system lets it in; the loop has yet to see it
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE):
            await close()
        _ends(came)  # before the loop does: what closes with that was not closed
        return came

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert not [str(one.message) for one in warned]


def _ends(came: socket.socket) -> None:
    with came:
        came.settimeout(DEADLINE)
        try:
            while came.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
