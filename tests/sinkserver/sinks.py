"""Sinks outside of flows, for tests: in a thread, or in a process that can be killed; and what the tests share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from railgun.flows.sink import Place
from railgun.sinks.external import Outside
from railgun.sinkserver.server import SinkServer
from railgun.sinkserver.targets import Records, Target

DEADLINE = 60.0


class Shelf(Target):
    """Keeps what it gets in memory, in order, with the transactions it came by."""

    def __init__(self) -> None:
        self.applied: list[str] = []
        self.items: list[bytes] = []
        self.before_check: Callable[[], None] = lambda: None
        self.before_apply: Callable[[], None] = lambda: None

    def check(self, records: Records) -> None:
        self.before_check()

    def apply(self, transaction: str, records: Records) -> None:
        self.before_apply()
        if transaction not in self.applied:
            self.items += records
            self.applied.append(transaction)


class Served:
    """A sink in a thread of its own, which can be stopped and started again on its port."""

    def __init__(
        self, data: Path, target: Target, kind: type[SinkServer] = SinkServer, **options: Any
    ) -> None:
        self.data, self.target, self.kind, self.options = data, target, kind, options
        self.port = 0
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.server: SinkServer
        self.loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        started = threading.Event()
        trouble: list[BaseException] = []

        async def main() -> None:
            self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()

            def told(kind: str, data: dict[str, Any]) -> None:
                self.heard.append((kind, data))

            options: dict[str, Any] = {"port": self.port, "told": told} | self.options
            self.server = self.kind(self.target, self.data, **options)
            try:
                await self.server.start()
            except BaseException as error:
                trouble.append(error)
                started.set()
                return
            self.port = self.server.port
            started.set()
            await self._stop.wait()
            await self.server.stop()

        self._thread = threading.Thread(target=asyncio.run, args=(main(),))
        self._thread.start()
        assert started.wait(DEADLINE)
        if trouble:
            self._thread.join()
            self._thread = None
            raise trouble[0]

    def stop(self) -> None:
        if self._thread is not None:
            self.loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._thread = None

    def cut(self) -> None:
        """End all connections at once, from any thread."""
        done = threading.Event()

        def cut() -> None:
            for connection in list(self.server._sessions):
                connection.transport.abort()
            done.set()

        self.loop.call_soon_threadsafe(cut)
        assert done.wait(DEADLINE)


@contextlib.contextmanager
def served(data: Path, target: Target, **options: Any) -> Iterator[Served]:
    made = Served(data, target, **options)
    made.start()
    try:
        yield made
    finally:
        made.stop()


PROGRAM = """
import asyncio, sys
from railgun.sinkserver import FileTarget, SinkServer, TableTarget
kind, data, port, *where = sys.argv[1:]
target = FileTarget(*where) if kind == "files" else TableTarget(*where)
asyncio.run(SinkServer(target, data, port=int(port)).run())
"""


class Process:
    """A sink in a process of its own, which can be killed."""

    def __init__(self, data: Path, *what: str) -> None:
        self.data, self.what = data, what
        self.port = 0
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.data.joinpath("sink.json").unlink(missing_ok=True)  # of one that was killed
        kind, *where = self.what
        line = [sys.executable, "-c", PROGRAM, kind, str(self.data), str(self.port), *where]
        process = self._process = subprocess.Popen(line)
        self.starts += 1

        def listening() -> bool:
            assert process.poll() is None, "the sink has ended"
            return (self.data / "sink.json").exists()

        eventually(listening, "the sink listens")

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            assert self._process.wait(DEADLINE) == 0
            self._process = None


def eventually(condition: Callable[[], Any], what: str = "") -> Any:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    pytest.fail(f"in vain: {what or condition}")


def outside(sink: Served | Process, **options: Any) -> Outside:
    return Outside(data=sink.data, **({"timeout": 20.0} | options))


def place(generation: int = 1, worker: int = 0, **options: Any) -> Place:
    return Place("demo", "out", worker, generation, **({"transactional": True} | options))


def new() -> str:
    return uuid.uuid4().hex
