"""What tests of admin calls share: disks that fail, messages that die, and what a restart finds."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

from tests.broker.running import DEADLINE, Running, take

from railgun.broker.log.disk import NodeDisk
from railgun.client.client import Client


async def again(running: Running) -> Client:
    """The node is stopped and started; a client of the new one."""
    await running.again()
    return await running.client()


async def stored(client: Client, stream: str) -> dict[int, bytes]:
    """All messages of a stream, by their offsets."""
    told = await client.describe(stream)
    async with await client.subscribe(stream) as sub:
        found = await take(sub, told["end"] - told["first"])
    return {message.offset: message.payload for message in found}


async def bury(client: Client, stream: str, count: int, **headers: str) -> None:
    """So many messages of the stream die."""
    await client.ensure(stream, dead_deliveries=1)
    for n in range(count):
        await client.publish(stream, b"%d" % n, id=f"id{n}", headers=headers)
    async with await client.subscribe(stream, group="g") as sub:
        for message in await take(sub, count):
            message.nack(reason="no")
        await sub.flush()
        await settled(client, stream, "g")


async def settled(client: Client, stream: str, group: str) -> None:
    """The group has finished with everything."""
    async with asyncio.timeout(DEADLINE):
        while (await client.group(stream, group))["lag"]:
            await asyncio.sleep(0.01)


class BadDisk(NodeDisk):
    """A disk that refuses some steps while a test says so."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.refuses: dict[str, OSError] = {}

    def _step(self, step: str, path: str) -> None:
        for known, error in self.refuses.items():
            verb, _, part = known.partition(" ")
            if verb == step and part in path:
                raise error

    def create(self, path: str) -> Any:
        """Refused or done."""
        self._step("create", path)
        return super().create(path)

    def remove(self, path: str) -> None:
        """Refused or done."""
        self._step("remove", path)
        super().remove(path)

    def rename(self, path: str, to: str) -> None:
        """Refused or done."""
        self._step("rename", path)
        super().rename(path, to)

    def sync_directory(self, path: str) -> None:
        """Refused or done."""
        self._step("sync", path)
        super().sync_directory(path)


def spoil(running: Running) -> BadDisk:
    """Let the node work with such a disk from now on."""
    assert running.server is not None
    disk = BadDisk(running.data)
    running.server.node._disk = disk
    return disk


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))
