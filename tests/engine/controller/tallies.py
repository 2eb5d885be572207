"""Flows whose committed output is known beforehand, line by line, and what tests of snapshots share."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.engine.controller.flows import DEADLINE, eventually, is_alive, pids

from railgun import FORGET, Files, Flow, Generate, Parquet, Reader, Source
from railgun.engine.snapshots.store import SnapshotStore
from railgun.job import Job, Snapshots

KEYS = 120
PARTS = 4  # of the source; each has keys of its own
LIVES = 7  # records after which a key is forgotten, and begins anew
Record = tuple[int, int]  # key, number within the key
Line = list[int]  # key, number, how many there were since the key was last forgotten


def record(index: int, chance: Random) -> Record:
    return index % KEYS, index // KEYS


def tally(seen: int, item: Record) -> tuple[Any, Line]:
    """Counts a key's records; every few of them it is forgotten, so a deleted key that comes back is seen."""
    seen += 1
    return FORGET if seen == LIVES else seen, [*item, seen]


def tallies(
    out: Path,
    count: int | None = None,
    rate: float | None = 4_000,
    *,
    name: str = "tallies",
    parquet: bool = False,
) -> Flow:
    """Numbered records, counted by key, in files."""
    flow = Flow(name)
    source = Generate(record, rate=rate, count=count, partitions=PARTS)
    lines = flow.source(source, name="records").key_by(lambda item: item[0], name="keys")
    counted = lines.stateful_map(tally, initial=int, name="tally")
    if parquet:
        rows = counted.map(lambda line: dict(zip("abc", line, strict=True)), name="rows")
        rows.sink(Parquet(out), name="out")
    else:
        counted.sink(Files(out), name="out")
    return flow


def expected(count: int) -> list[Line]:
    """What comes out of so many records."""
    return sorted(map(line_of, range(count)))


def line_of(index: int) -> Line:
    return [index % KEYS, index // KEYS, index // KEYS % LIVES + 1]


def lines_of(part: int, read: int) -> list[Line]:
    return [line_of(part + turn * PARTS) for turn in range(read)]


def output(out: Path) -> list[Line]:
    """What can be seen of it."""
    lines = [
        json.loads(line)
        for path in out.glob("part-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    if any(out.glob("*.parquet")):
        import pyarrow.parquet as pq

        tables = (pq.read_table(path) for path in out.glob("part-*.parquet"))
        lines += [list(row.values()) for table in tables for row in table.to_pylist()]
    return sorted(lines)


def check(out: Path, count: int | None = None) -> None:
    """Each line of it is there, once; without `count`, of as many records as were read of each part."""
    found = output(out)
    if count is None:
        read = [0] * PARTS
        for key, number, _ in found:
            read[key % PARTS] = max(read[key % PARTS], (number * KEYS + key) // PARTS + 1)
        whole = sorted(line for part in range(PARTS) for line in lines_of(part, read[part]))
    else:
        whole = expected(count)
    if found != whole:
        twice = len(found) - len(set(map(tuple, found)))
        lost = len(set(map(tuple, whole)) - set(map(tuple, found)))
        raise AssertionError(f"{len(found)} lines of {len(whole)}: {twice} twice, {lost} not there")


def drained(job: Job, out: Path) -> None:
    """Let it end, and look at what came out: all that was read, once."""
    assert job.stop(drain=True, timeout=DEADLINE)
    check(out)


class Tail(Source[Record]):
    """The lines of a file that grows, until one says `end`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def partitions(self) -> Sequence[str]:
        return [str(self.path)]

    def open(self, partition: Any, position: Any) -> Reader[Record]:
        return _TailReader(self.path, position or 0)


class _TailReader(Reader[Record]):
    def __init__(self, path: Path, position: int) -> None:
        self.path = path
        self.position: int = position

    def read(self, most: int, now: int) -> list[Record] | None:
        lines = self.path.read_text().splitlines()[self.position : self.position + most]
        if lines == ["end"]:
            return None
        items = [tuple(json.loads(line)) for line in lines if line != "end"]
        self.position += len(items)
        return items


# ---------------------------------------------------------------- what is done to jobs


def saved(path: Path, every: float = 0.3, **more: Any) -> Snapshots:
    return Snapshots(str(path / "snapshots"), every=every, **more)


def store(path: Path, flow: str = "tallies") -> SnapshotStore:
    return SnapshotStore(str(path / "snapshots"), flow)


def committed(job: Job, more: int = 1) -> int:
    """Wait until so many further snapshots are committed; the number of the last."""
    before = len(told(job, "snapshot"))
    eventually(lambda: len(told(job, "snapshot")) >= before + more, "snapshots are committed")
    return int(job.status()["snapshot"])


def told(job: Job, kind: str) -> list[str]:
    return [event.text for event in job.events() if event.kind == kind]


def kill(job: Job, which: int = 0, how: signal.Signals = signal.SIGKILL) -> int:
    pid = pids(job)[which]
    os.kill(pid, how)
    return pid


def recovered(job: Job, restarts: int = 1) -> None:
    """Wait until it has started again so many times, and runs or is through."""
    eventually(lambda: len(told(job, "restarting")) >= restarts, "it starts again")
    eventually(lambda: job.status()["state"] not in ("starting",), "it runs again")


def gone(processes: Sequence[int]) -> None:
    eventually(lambda: not any(map(is_alive, processes)), "they end")
