"""Bytewax: two processes with recovery partitions, killed and started again: from the kill to the first new output.

The records and the state are those of `verification.numbered_load`: a number per key and 100 bytes; the
source brings every key in once, as fast as it can, and then has a record due at fixed times. Keys are text, for
Bytewax has no others. Both processes are killed a second after an epoch is committed in all recovery partitions, as the
partitions themselves tell, and started again at that moment.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.operators import StatefulBatchLogic
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.run import cli_main

from bench._outage import AFTER, EVERY, KEYS, NEW, RATE, Outage
from bench._workload import CORES
from bench.peers.bytewax_sum import free_ports

PARTS = 8
HOT = 1_000  # keys of a part that get half of its records
PARTITIONS = 100  # of the recovery store; with few it loads many times slower (docs/benchmarks.md)
FILL = 5_000  # records at once while keys are brought in
MOST = 5_000  # records at once afterwards
LINGER = timedelta(milliseconds=2)
PATIENCE = 240.0
UP, OUTPUT = "Python is up", "first output"

Record = tuple[str, tuple[int, int]]
"""The key; the number within the key, and when it is due (µs; 0: at once)."""
Position = tuple[int, int]


class Part(StatefulSourcePartition[Record, Position]):
    """One part of the load: its keys are its own."""

    def __init__(self, number: int, keys: int, rate: float, position: Position | None) -> None:
        self.keys = keys // PARTS
        self.base = number * self.keys
        self.hot = min(HOT, self.keys // 2)
        self.rate = rate / PARTS
        self.i, self.began = position or (0, 0)
        self.few = False

    def next_batch(self) -> list[Record]:
        i, keys, base = self.i, self.keys, self.base
        self.few = False
        if i < keys:
            self.i = min(keys, i + FILL)
            return [(str(base + k), (1, 0)) for k in range(i, self.i)]
        now = time.time_ns() // 1000
        if not self.began:
            self.began = now
        j = i - keys
        due = min(int((now - self.began) * self.rate / 1e6) + 1, j + MOST)
        self.few = due < j + MOST
        self.i = keys + max(due, j)
        each, began, hot, others = 1e6 / self.rate, self.began, self.hot, keys - self.hot
        return [
            (str(base + hot + (x >> 1) % others), (2 + (x >> 1) // others, began + int(x * each)))
            if x & 1
            else (str(base + (x >> 1) % hot), (2 + (x >> 1) // hot, began + int(x * each)))
            for x in range(j, due)
        ]

    def next_awake(self) -> datetime | None:
        return datetime.now(UTC) + LINGER if self.few else None

    def snapshot(self) -> Position:
        return self.i, self.began


class Source(FixedPartitionedSource[Record, Position]):
    def __init__(self, keys: int, rate: float) -> None:
        self.keys, self.rate = keys, rate

    def list_parts(self) -> list[str]:
        return list(map(str, range(PARTS)))

    def build_part(self, step_id: str, for_part: str, resume_state: Position | None) -> Part:
        return Part(int(for_part), self.keys, self.rate, resume_state)


class Follow(StatefulBatchLogic[tuple[int, int], int, tuple[int, bytes]]):
    """The state: the number of the last record, and 100 bytes. What comes out is when a record was due."""

    def __init__(self, state: tuple[int, bytes] | None) -> None:
        self.last, self.ballast = state or (0, os.urandom(100))

    def on_batch(self, values: list[tuple[int, int]]) -> tuple[list[int], bool]:
        out = []
        for number, due in values:
            if number != self.last + 1:
                raise ValueError(f"number {number} follows {self.last}")
            self.last = number
            out.append(due)
        return out, False

    def snapshot(self) -> tuple[int, bytes]:
        return self.last, self.ballast


class Watch(StatelessSinkPartition[tuple[str, int]]):
    """Tells when the first record came, and the first one that was due after the kill."""

    def __init__(self, killed: int) -> None:
        self.killed = killed
        self.first = True
        self.new = False

    def write_batch(self, items: list[tuple[str, int]]) -> None:
        if self.first:
            self.first = False
            tell(OUTPUT)
        if not self.new and any(due > self.killed for _, due in items):
            self.new = True
            tell(NEW)


class Sink(DynamicSink[tuple[str, int]]):
    def __init__(self, killed: int) -> None:
        self.killed = killed

    def build(self, step_id: str, worker_index: int, worker_count: int) -> Watch:
        return Watch(self.killed)


def tell(mark: str) -> None:
    """To the one who leads."""
    print(json.dumps([mark, time.time()]), flush=True)


def work(chosen: argparse.Namespace) -> None:
    """One of the processes."""
    tell(UP)
    flow = Dataflow("recovery")
    records = op.input("load", flow, Source(chosen.keys, chosen.rate))
    followed = op.stateful_batch("follow", records, Follow)
    op.output("watch", followed, Sink(chosen.killed))
    cli_main(
        flow,
        process_id=chosen.process,
        addresses=chosen.addresses.split(";"),
        epoch_interval=timedelta(seconds=EVERY),
        recovery_config=RecoveryConfig(Path(chosen.directory)),
    )


def start(
    chosen: argparse.Namespace, directory: str, killed: int = 0
) -> list[subprocess.Popen[str]]:
    """Start both processes; `killed` is when the ones before were (µs)."""
    addresses = ";".join(f"127.0.0.1:{port}" for port in free_ports(CORES))
    command = [sys.executable, "-m", "bench.peers.bytewax_recovery", "--addresses", addresses]
    command += ["--keys", str(chosen.keys), "--rate", str(chosen.rate)]
    command += ["--directory", directory, "--killed", str(killed)]
    return [
        subprocess.Popen([*command, "--process", str(number)], stdout=subprocess.PIPE, text=True)
        for number in range(CORES)
    ]


def committed(directory: str) -> tuple[int, int]:
    """The last epoch that all partitions have committed, and how many keys are saved."""
    epochs, keys = [], 0
    for path in sorted(Path(directory).glob("*.sqlite3")):
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30) as database:
            epochs += [epoch for (epoch,) in database.execute("SELECT commit_epoch FROM commits")]
            query = "SELECT count(DISTINCT state_key) FROM snaps WHERE step_id LIKE '%follow%'"
            keys += database.execute(query).fetchone()[0]
    return min(epochs, default=0), keys


def lead(chosen: argparse.Namespace) -> Outage:
    """Start, kill, start again."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        init_db_dir(Path(directory), chosen.partitions)
        running = start(chosen, directory)
        try:
            await_commits(chosen, directory, running)
            time.sleep(AFTER)
            killed = time.time()
            for process in running:
                os.kill(process.pid, signal.SIGKILL)
            running += start(chosen, directory, int(killed * 1e6))
            marks = [read_marks(process) for process in running[CORES:]]
        finally:
            for process in running:
                process.kill()
                process.wait()
    first = {mark: min(found[mark] for found in marks) - killed for mark in (OUTPUT, NEW)}
    up = max(found[UP] for found in marks) - killed
    return Outage({UP: up, **first}, f"Bytewax {importlib.metadata.version('bytewax')}")


def await_commits(
    chosen: argparse.Namespace, directory: str, running: list[subprocess.Popen[str]]
) -> None:
    """Until all keys are saved, and one more epoch is."""
    deadline = time.monotonic() + PATIENCE
    whole = None
    while time.monotonic() < deadline:
        if any(process.poll() is not None for process in running):
            raise RuntimeError("a process has ended")
        epoch, keys = committed(directory)
        if whole is None:
            whole = epoch if keys >= chosen.keys // PARTS * PARTS else None
        elif epoch > whole + 1:
            return
        time.sleep(0.2)
    raise TimeoutError(f"nothing was saved in {PATIENCE:.0f} s")


def read_marks(process: subprocess.Popen[str]) -> dict[str, float]:
    """What a process tells, up to its first new output."""
    assert process.stdout is not None
    marks: dict[str, float] = {}
    while NEW not in marks:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a process has ended before it came to its first new output")
        if not line.startswith("["):
            print(line, end="", file=sys.stderr)
            continue
        mark, at = json.loads(line)
        marks[mark] = at
    return marks


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--partitions", type=int, default=PARTITIONS, help="of the recovery store")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--killed", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.process is None:
        print(lead(chosen).as_line())
    else:
        work(chosen)


if __name__ == "__main__":
    main()
