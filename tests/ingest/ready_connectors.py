"""A flow that connectors feed, on real processes, and what it has committed: for tests of ready-made connectors.

The output is a `Files` sink: only what is in a committed snapshot is in it, once. It is compared with the input
strictly, stream by stream: content, order, nothing missing, nothing twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from railgun import Flow
from railgun.engine.controller.storekeeper import Snapshots
from railgun.job import Job, run
from railgun.sinks.files import Files
from railgun.sources.connectors import ConnectorMessage, Connectors
from railgun.testing.local_workers import SubprocessLauncher

DEADLINE = 90.0
RAILGUN = [sys.executable, "-m", "railgun"]


def as_row(message: ConnectorMessage) -> list[Any]:
    return [
        message.stream,
        message.id,
        message.key,
        message.time,
        message.payload.decode("latin-1"),
    ]


@dataclass
class Fed:
    """A flow that runs."""

    job: Job
    launcher: SubprocessLauncher
    directory: Path
    name: str

    @property
    def registry(self) -> Path:
        return self.directory / "registry"

    def rows(self) -> dict[str, list[list[Any]]]:
        """What is committed, by stream: (id, key, time, payload)."""
        found: dict[str, list[list[Any]]] = {}
        parts = (self.directory / "out").glob("part-out-*.jsonl")
        for part in sorted(parts, key=lambda part: int(part.name.split("-")[2])):
            for line in part.read_text("utf-8").splitlines():
                stream, *row = json.loads(line)
                found.setdefault(stream, []).append(row)
        return found

    def payloads(self) -> dict[str, list[bytes]]:
        return {
            stream: [row[3].encode("latin-1") for row in rows]
            for stream, rows in self.rows().items()
        }

    def count(self) -> int:
        return sum(map(len, self.rows().values()))

    def check(self, want: dict[str, list[bytes]]) -> None:
        """All of this is committed, or will be, and nothing else."""
        total = sum(map(len, want.values()))
        eventually(lambda: self.count() >= total, f"{self.count()} of {total} messages came")
        self.job.snapshot()
        assert self.payloads() == want

    def kill_worker(self) -> None:
        """As if its machine had gone: the flow goes back to its last snapshot."""
        next(
            process for process in self.launcher.processes.values() if process.poll() is None
        ).kill()

    def start(self, *words: str, **settings: Any) -> subprocess.Popen[str]:
        """A command `railgun connector`, told where the flow is."""
        kind, *rest = words
        return subprocess.Popen(
            [*RAILGUN, "connector", kind, self.name, *rest, "--json", "--registry", self.registry],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings,
        )  # fmt: skip

    def type(self, *words: str) -> tuple[int, list[Any]]:
        """Carry a command out: its exit code, and what it told."""
        process = self.start(*words)
        told, _ = process.communicate(timeout=DEADLINE)
        return process.returncode, [json.loads(line) for line in told.splitlines()]


@contextlib.contextmanager
def fed(directory: Path, name: str = "fed", every: float = 0.3, **source: Any) -> Iterator[Fed]:
    """A flow that connectors feed."""
    flow = Flow(name)
    told = flow.source(Connectors("feed", decode="message", **source), name="feed")
    told.map(as_row, name="rows").sink(Files(directory / "out"), name="out")
    launcher = SubprocessLauncher()
    snapshots = Snapshots(str(directory / "snapshots"), every=every)
    with run(
        flow, 1, launcher=launcher, snapshots=snapshots, registry=directory / "registry"
    ) as job:
        try:
            yield Fed(job, launcher, directory, name)
        finally:
            job.abort()
            launcher.close()


def eventually(holds: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, what or "it did not come about"
        time.sleep(0.02)


@contextlib.contextmanager
def running(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Ends with what it is for."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE)


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, list[Any]]:
    """End it in order: its exit code, and what it told."""
    os.kill(process.pid, number)
    told, _ = process.communicate(timeout=DEADLINE)
    return process.returncode, [json.loads(line) for line in told.splitlines()]
