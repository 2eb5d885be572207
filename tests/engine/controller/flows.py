"""Flows, and what tests of jobs share: they run on real processes, and wait for conditions, never for a time."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from railgun import Collect, Flow, Generate
from railgun.engine.controller.controller import Settings
from railgun.job import Job, run
from railgun.testing.local_workers import SubprocessLauncher

DEADLINE = 60.0
KEYS = 200
Record = tuple[int, int]  # key, number within the key


def record(index: int, chance: Random) -> Record:
    return index % KEYS, index // KEYS


def in_order(last: int, item: Record) -> tuple[int, Record]:
    if item[1] != last + 1:
        raise AssertionError(f"{item} came after {last}")
    return item[1], item


def counting(name: str, *, rate: float | None = 20_000, count: int | None = None) -> Flow:
    """Numbered records of each key, which have to come in order."""
    flow = Flow(name)
    source = Generate(record, rate=rate, count=count)
    records = flow.source(source, name="records")
    ordered = records.key_by(lambda item: item[0], name="keys").stateful_map(
        in_order, initial=lambda: -1, name="order"
    )
    ordered.sink(Collect(), name="out")
    return flow


def check_whole(job: Job) -> int:
    """Each key's records are there once, with none left out; how many there are.

    Whether they came in order is checked where their state is: on the way to the driver, what the worker a key came to
    sends may overtake what the worker it left has sent.
    """
    found = job.collected("out")
    for key, numbers in _by_key(found).items():
        assert sorted(numbers) == list(range(len(numbers))), f"key {key}"
    counts = Counter(key for key, _ in found)
    assert max(counts.values()) - min(counts.values()) <= 1
    return len(found)


def _by_key(found: list[Record]) -> dict[int, list[int]]:
    by_key: dict[int, list[int]] = {}
    for key, number in found:
        by_key.setdefault(key, []).append(number)
    return by_key


@contextlib.contextmanager
def started(flow: Flow, workers: int = 2, **options: Any) -> Iterator[Job]:
    """A job on plain processes, of which none is left afterwards."""
    launcher = SubprocessLauncher()
    options.setdefault("by_value", [sys.modules[__name__]])
    options.setdefault("http", False)
    job = run(flow, workers, launcher=launcher, **options)
    try:
        yield job
    except BaseException:
        for event in job.events():  # a test that fails shows what became of the flow
            print(event)
        raise
    finally:
        job.close()
        left = [p.pid for p in launcher.processes.values() if p.poll() is None]
        assert left == []


def eventually(condition: Callable[[], Any], what: str = "") -> Any:
    """Wait for a condition, and return what it gives."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    pytest.fail(f"in vain: {what or condition}")


def running(job: Job, records: int = 1) -> dict[str, Any]:
    """Wait until all workers run, and some records have come out."""
    eventually(lambda: job.status()["state"] == "running", "it runs")
    eventually(lambda: len(job.collected("out")) >= records, "records come out")
    return job.status()


def more(job: Job, records: int = 100) -> None:
    """Wait until more records have come out."""
    before = len(job.collected("out"))
    eventually(lambda: len(job.collected("out")) >= before + records, "it goes on")


def pids(job: Job) -> list[int]:
    return [worker["pid"] for worker in job.status()["workers"] if worker["pid"]]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        if Path("/proc/self").exists():
            return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def kinds(job: Job) -> list[str]:
    return [event.kind for event in job.events()]


def impatient(**options: Any) -> Settings:
    return Settings(**options)
