"""What tests of hard times share: slow disks, connections that are cut, and what a node has to send."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Awaitable

import pytest
from tests.broker.running import Proxy, Running

import railgun.broker.log.disk as disk_module
from railgun.broker.server.session import Session
from railgun.client.errors import StreamsError


async def code_of(call: Awaitable[object]) -> str:
    """What a call is refused with; nothing if it is not."""
    try:
        await call
    except StreamsError as error:
        return error.code
    return ""


def sessions(running: Running) -> list[Session]:
    """Those of the node."""
    assert running.server is not None
    return list(running.server.sessions.values())


class Gate:
    """The disk of a node: while it is shut, nothing that is committed gets to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow = 0.0
        self._open = threading.Event()
        self._open.set()
        sync = disk_module._NodeFile.sync

        def gated(file: disk_module._NodeFile) -> None:
            if threading.current_thread().name.startswith("railgun-commit"):
                self._open.wait()
                time.sleep(self.slow)
            sync(file)

        monkeypatch.setattr(disk_module._NodeFile, "sync", gated)

    def __enter__(self) -> Gate:
        self._open.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.set()


class Cutter(Proxy):
    """A proxy that cuts after so many bytes, drawn anew each time, in the middle of whatever it is."""

    def __init__(self, port: int, seed: int, cuts: int, least: int, most: int) -> None:
        super().__init__(port)
        self.cuts = 0
        self._draw = random.Random(seed)
        self._most_cuts, self._range = cuts, (least, most)
        self._left = 0

    async def __aenter__(self) -> Cutter:
        await super().__aenter__()
        return self

    def begin(self) -> None:
        """From now on."""
        self._left = self._draw.randint(*self._range)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if self._left and len(data) >= self._left:
                    sink.write(data[: self._left])
                    with contextlib.suppress(OSError):
                        await sink.drain()
                    self.cuts += 1
                    self._left = 0
                    if self.cuts < self._most_cuts:
                        self.begin()
                    self.cut()
                    return
                if self._left:
                    self._left -= len(data)
                sink.write(data)
        sink.close()
