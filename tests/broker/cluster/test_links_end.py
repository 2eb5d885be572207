"""A node that ends takes nobody in any more, also not who came before and says hello only then."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from tests.broker.running import DEADLINE, run

from railgun.broker.cluster.links import Identity, Lane, Links
from railgun.transport.commands import VERSION, Blob
from railgun.transport.connection import Connection

SECRET = bytes(range(32))


class Nobody:
    """Gets what other nodes send, and does nothing with it."""

    def received(self, sender: str, lane: Lane, command: Any, blob: Blob) -> None:
        raise AssertionError("nothing was sent")

    def up(self, peer: str, lane: Lane) -> None:
        pass

    def down(self, peer: str, lane: Lane) -> None:
        pass

    async def called(self, sender: str, name: str, arguments: dict[str, Any]) -> Any:
        raise AssertionError("nothing was asked")


def test_a_node_that_was_let_in_before_the_end_is_left() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        links = Links(Identity("a", "c"), SECRET, Nobody())
        await links.listen("127.0.0.1", 0)
        made = socket.create_connection(("127.0.0.1", links.port))
        gate = links._listener.gate
        assert gate is not None
        async with asyncio.timeout(DEADLINE):
            while not gate._waiting:  # it is let in
                await asyncio.sleep(0.01)
        await links.close()
        ended: asyncio.Future[Exception | None] = loop.create_future()

        def opened(connection: Connection) -> None:
            ended.set_result(None)

        def gone(connection: Connection, error: Exception | None) -> None:
            if not ended.done():
                ended.set_result(error)

        who = {"version": VERSION, "cluster": "c", "node": "b", "to": "a", "lane": "control"}
        made.setblocking(False)
        _, connection = await loop.create_connection(
            lambda: Connection(SECRET, opened, lambda *_: None, gone, who), sock=made
        )
        async with asyncio.timeout(DEADLINE):
            assert await ended is not None
        connection.abort()

    run(main())
