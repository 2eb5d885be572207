"""Sinks of flows: items a second into a stream exactly once, beside at-least-once and files, and what a commit takes.

One worker's writer is given items of 100 bytes in batches of 1,000, as a flow gives them. After each `EVERY` items it
prepares, and what it has prepared is committed: so often a flow of that rate would take a snapshot every second or
two. The rate counts items from the first write to the last commit, and the node is a process of its own. All kinds take
turns; of the rounds the best counts, and ratios are of the same run.

*Through kills*: the node is killed again and again while the sink stages and commits, and each commit is repeated until
it is done. What is in the stream then has to be just what was written, in its order.
"""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verification.ports import free_port
from verification.report import Report, options

from bench._servers import PATIENCE, ours
from railgun import Files, Place, StreamSink
from railgun.client.errors import StreamsError
from railgun.client.sync import connect_sync

SIZE, EVERY = 100, 500_000
ITEMS, QUICK_ITEMS = 2_000_000, 200_000
ROUNDS, QUICK_ROUNDS = 5, 2
KILLS, QUICK_KILLS = 20, 4
BATCH = 1_000
GOAL = 0.8


def place(generation: int = 1, transactional: bool = True) -> Place:
    """Return where the writer of the only worker is."""
    return Place("bench", "out", 0, generation, transactional=transactional)


def drive(sink: Any, items: Sequence[str], every: int) -> tuple[float, list[float]]:
    """Write all items, prepare and commit after each `every`; return items a second, and what each commit took (ms)."""
    writer = sink.open(place())
    commits: list[float] = []
    began = time.perf_counter()
    for first in range(0, len(items), every):
        for at in range(first, min(first + every, len(items)), BATCH):
            writer.write(items[at : at + BATCH])
        token = writer.prepare(first)
        if token is not None:
            before = time.perf_counter()
            sink.commit(token)
            commits.append(1e3 * (time.perf_counter() - before))
    writer.flush()
    took = time.perf_counter() - began
    writer.close()
    return len(items) / took, commits


def measure(report: Report, home: Path, count: int, rounds: int, every: int) -> None:
    """Measure all kinds of sinks in turn, and add what came out to `report`."""
    items = [f"{n:0{SIZE}}" for n in range(count)]
    rates: dict[str, list[float]] = {"exactly once": [], "at least once": [], "files": []}
    commits: list[float] = []
    for turn in range(rounds):
        data = home / f"node{turn}"
        data.mkdir()
        with ours(data):
            kinds: dict[str, Callable[[], Any]] = {
                "exactly once": lambda data=data: StreamSink("exactly", "text", data=data),  # type: ignore[misc]
                "at least once": lambda data=data: StreamSink(  # type: ignore[misc]
                    "least", "text", "at-least-once", data=data
                ),
                "files": lambda data=data: Files(data / "files"),  # type: ignore[misc]
            }
            for kind, make in kinds.items():
                rate, told = drive(make(), items, every)
                rates[kind].append(rate)
                commits += told if kind == "exactly once" else []
            with connect_sync(data=data) as client:
                stored = client.admin("describe", name="exactly")["end"]
            report.check(
                f"round {turn + 1}, stored", stored, "messages", f"= {count:,}", stored == count
            )
        shutil.rmtree(data)
    best = {kind: max(found) for kind, found in rates.items()}
    for kind, rate in best.items():
        report.check(kind, round(rate), "items/s")
    ratio = best["exactly once"] / best["at least once"]
    report.check("of at least once", round(ratio, 2), "times", f">= {GOAL}", passed=ratio >= GOAL)
    report.check(f"commit of {every:,} items", round(statistics.median(commits), 1), "ms")
    report.check("longest commit", round(max(commits), 1), "ms")


def through_kills(report: Report, home: Path, kills: int) -> None:
    """Kill the node while the sink stages and commits."""
    data, port, chance, over = home / "killed", free_port(), random.Random(1), threading.Event()
    command = [sys.executable, "-m", "railgun", "serve", "--data", str(data), "--port", str(port)]
    written: list[str] = []
    troubles: list[BaseException] = []

    def work() -> None:
        sink = StreamSink("out", "text", node=f"127.0.0.1:{port}", data=data)
        try:
            writer: Any = sink.open(place())
            while not over.is_set():
                items = [f"{len(written) + n:0{SIZE}}" for n in range(5_000)]
                writer.write(items)
                token = writer.prepare(len(written))
                sink.commit(token)
                sink.commit(token)
                written.extend(items)
            writer.close()
        except BaseException as error:
            troubles.append(error)

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        connect_when_up(data, port).close()
        return process

    process, worker = start(), threading.Thread(target=work)
    try:
        worker.start()
        for _ in range(kills):
            time.sleep(0.1 + chance.random() * 0.4)
            process.kill()
            process.wait()
            process = start()
        over.set()
        worker.join()
        found = _everything(data, port)
    finally:
        over.set()
        process.kill()
        process.wait()
    report.check("kills of the node", kills, "kills")
    same = found == written and not troubles
    report.check("items through kills", len(found), "items", f"= {len(written):,}, in order", same)


def connect_when_up(data: Path, port: int) -> Any:
    """Return a client of a node that is being started."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return connect_sync(f"127.0.0.1:{port}", data=data)
        except (StreamsError, OSError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _everything(data: Path, port: int) -> list[str]:
    with connect_sync(f"127.0.0.1:{port}", data=data) as client:
        end = client.admin("describe", name="out")["end"]
        found: list[str] = []
        with client.subscribe("out") as reader:
            while len(found) < end:
                found += [payload.decode() for payload in reader.records(30.0).payloads()]
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit code."""
    chosen, _ = options("bench sinks", __doc__.partition("\n")[0], argv)
    report = Report("sinks")
    home = Path(tempfile.mkdtemp(prefix="railgun-sinks-"))
    try:
        count = QUICK_ITEMS if chosen.quick else ITEMS
        rounds = QUICK_ROUNDS if chosen.quick else ROUNDS
        measure(report, home, count, rounds, EVERY // 10 if chosen.quick else EVERY)
        through_kills(report, home, QUICK_KILLS if chosen.quick else KILLS)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return report.finish(chosen)
