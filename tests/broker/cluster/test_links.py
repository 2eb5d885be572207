"""Connections between nodes: what becomes of a call that is given up in the middle."""

from __future__ import annotations

import asyncio
from typing import Any

from verification.stream_server import StreamServer

from railgun.broker.cluster.links import Identity, Lane, Links
from railgun.transport.commands import Blob


class Deaf:
    """Hears nothing of what others send."""

    def received(self, sender: str, lane: Lane, command: Any, blob: Blob) -> None:
        """Nothing."""

    def up(self, peer: str, lane: Lane) -> None:
        """Nothing."""

    def down(self, peer: str, lane: Lane) -> None:
        """Nothing."""

    async def called(self, sender: str, name: str, arguments: dict[str, Any]) -> Any:
        """Nothing."""


def test_a_node_that_is_forgotten_while_it_is_dialled_leaves_no_error() -> None:
    assert asyncio.run(_forgotten()) == []


async def _forgotten() -> list[dict[str, Any]]:
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, told: wrong.append(told))
    called = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()
        await reader.read()  # until the other side goes
        writer.close()

    async with StreamServer(silent) as server:
        links = Links(Identity("one"), b"secret", Deaf())
        try:
            links.know({"two": ("127.0.0.1", server.port)})
            await asyncio.wait_for(called.wait(), 10)
            links.know({})
            for _ in range(20):
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
        finally:
            await links.close()
    return wrong
