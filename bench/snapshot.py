"""What a snapshot costs while records flow: the pause with a small and a large state, and the throughput lost.

- *Pause*: 10,000 keys change between two snapshots, whether there are 10,000 keys or a million. Of each snapshot the
  longest latency of any record due while it was under way counts; of several snapshots the median. The load is
  open-loop: every record is due at a fixed time. *Cut* is what workers tell: the time they did nothing but put things
  aside.
- *Throughput*: the work of `bench throughput` without snapshots and with one every ten seconds, in turn; of the rounds
  the best counts.
- *Beside other work* (`--busy N`, which measures nothing else): the same with a snapshot every second beside N
  processes that only compute, in turn. Of each round the run with snapshots is divided by the one without, which
  follows it or goes before it; the median of these ratios counts. The goal is about processor time a record: where
  cores are scarce it is what throughput is lost by, and records a second follow whatever else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from verification.numbered_load import Log, Record, follow, nothing, read_logs
from verification.report import Report, options
from verification.rescale_run import Latency

from bench._ours import ours
from bench._workload import Rate
from railgun import Flow, Reader, Source, run
from railgun.engine.snapshots.store import SnapshotStore
from railgun.job import Job, Snapshots
from railgun.spark.session import session

PARTS = 8
CHANGED = 10_000
SMALL, LARGE, QUICK_LARGE = 10_000, 1_000_000, 100_000
RATE = 20_000
SNAPSHOTS, QUICK_SNAPSHOTS = 7, 3
BETWEEN = 1.5  # seconds
LONGER = 1.5  # times
LONGEST = 100  # ms beyond the steady state
LOSS = 0.1
SIZE = 5_000
ROUNDS, SECONDS, EVERY = 2, 25.0, 10.0
QUICK_SECONDS, QUICK_EVERY = 6.0, 2.0
NEVER = 1e6
BUSY_ROUNDS, BUSY_SECONDS, BUSY_EVERY = 5, 10.0, 1.0
QUICK_BUSY_ROUNDS, QUICK_BUSY_SECONDS = 3, 4.0


@dataclass(frozen=True, slots=True)
class Touching(Source[Record]):
    """Every key once, as fast as possible; then records of the first `changed` keys, in turn, `rate` a second."""

    keys: int
    changed: int
    rate: float

    def partitions(self) -> Sequence[int]:
        """Each part has keys of its own."""
        return range(PARTS)

    def open(self, partition: Any, position: Any) -> Reader[Record]:
        """Read one part."""
        return _Toucher(self, partition, position)


class _Toucher(Reader[Record]):
    def __init__(self, source: Touching, part: int, position: tuple[int, int] | None) -> None:
        self.source = source
        self.part = part
        self.i, self.began = position or (0, 0)

    @property
    def position(self) -> tuple[int, int]:
        return self.i, self.began

    def read(self, most: int, now: int) -> list[Record]:
        keys, changed = self.source.keys // PARTS, self.source.changed // PARTS
        base, i = self.part * keys, self.i
        if i < keys:
            self.i = min(keys, i + most)
            return [(base + k, 1, 0) for k in range(i, self.i)]
        self.began = self.began or now
        rate, j = self.source.rate / PARTS, i - keys
        due = min(int((now - self.began) * rate / 1e6) + 1, j + most)
        self.i = keys + max(due, j)
        began, each = self.began, 1e6 / rate
        return [
            (base + x % changed, 2 + x // changed, began + int(x * each)) for x in range(j, due)
        ]


@dataclass(slots=True)
class Pauses:
    """What snapshots did to the latency of records."""

    steady: Latency
    longest: float  # ms; of each snapshot the longest, of all the median
    cut: float  # ms
    rows: int
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    about = (__doc__ or "").partition("\n")[0]
    chosen, console = options("bench snapshot", about, argv, more=_add_options)
    report = Report("snapshot")
    if chosen.busy:
        beside_others(report, console, chosen.busy, quick=chosen.quick)
        return report.finish(chosen)
    large = QUICK_LARGE if chosen.quick else LARGE
    pauses = {}
    for keys in (SMALL, large):
        console.print(f"{keys:,} keys …", style="dim")
        pauses[keys] = pause(keys, QUICK_SNAPSHOTS if chosen.quick else SNAPSHOTS)
        tell(report, keys, pauses[keys])
    judge(report, pauses[SMALL], pauses[large])
    seconds, every = (QUICK_SECONDS, QUICK_EVERY) if chosen.quick else (SECONDS, EVERY)
    throughput(report, console, 1 if chosen.quick else ROUNDS, seconds, every)
    return report.finish(chosen)


def pause(keys: int, snapshots: int) -> Pauses:
    """Take snapshots of a flow with so many keys, of which CHANGED change between two of them."""
    with tempfile.TemporaryDirectory(prefix="railgun-bench-") as directory:
        logs, store = Path(directory) / "logs", Path(directory) / "snapshots"
        logs.mkdir()
        flow = Flow("touching")
        records = flow.source(Touching(keys, CHANGED, RATE), name="load")
        by_key = records.key_by(itemgetter(0), name="by key")
        by_key.stateful_map(follow, nothing, name="follow").sink(Log(str(logs)), name="log")
        spark = session("railgun bench snapshot")
        try:
            kept = Snapshots(str(store), every=NEVER, keep=snapshots + 2)
            with run(flow, 2, spark=spark, http=False, snapshots=kept) as job:
                steady, spans, numbers = _take(job, keys, snapshots)
                job.stop()
        finally:
            spark.stop()
        manifests = [SnapshotStore(str(store), "touching").get(n) for n in numbers]
        rows = read_logs(str(logs))
    rows = rows[rows[:, 2] > 0]
    during = [Latency.of(_due(rows, *span)) for span in spans]
    return Pauses(
        Latency.of(_due(rows, *steady)),
        statistics.median(latency.longest for latency in during),
        statistics.median(manifest.phases["cut"] * 1000 for manifest in manifests),
        manifests[-1].parts[-1].rows,
        statistics.median(end - begin for begin, end in spans),
    )


def _take(
    job: Job, keys: int, snapshots: int
) -> tuple[tuple[float, float], list[tuple[float, float]], list[int]]:
    """When the load was steady, when each snapshot was under way, and their numbers."""
    while _keys(job) < keys:
        time.sleep(0.1)
    job.snapshot()  # of all keys: the others build upon it
    time.sleep(BETWEEN)
    begin = time.time()
    time.sleep(2 * BETWEEN)
    steady = begin, time.time()
    spans, numbers = [], []
    for _ in range(snapshots):
        began = time.time()
        numbers.append(job.snapshot())
        spans.append((began, time.time()))
        time.sleep(BETWEEN)
    return steady, spans, numbers


def _keys(job: Job) -> int:
    workers = [worker for worker in job.status()["workers"] if worker.get("stages")]
    return sum(int(worker["stages"]["by key"]["keys"]) for worker in workers)


def _due(rows: Any, begin: float, end: float) -> Any:
    return rows[(rows[:, 2] >= begin * 1e6) & (rows[:, 2] <= end * 1e6)]


def tell(report: Report, keys: int, found: Pauses) -> None:
    """The figures of one size."""
    name = f"{keys:,} keys"
    report.check(f"{name}, steady p99", round(found.steady.p99, 1), "ms")
    report.check(f"{name}, steady longest", round(found.steady.longest, 1), "ms")
    report.check(f"{name}, longest with a snapshot", round(found.longest, 1), "ms")
    report.check(f"{name}, cut", round(found.cut, 2), "ms")
    report.check(f"{name}, a snapshot takes", round(found.seconds, 2), "s")


def judge(report: Report, small: Pauses, large: Pauses) -> None:
    """The goals of the pause."""
    more = large.longest / small.longest
    goal = f"<= {LONGER:g} times"
    report.check("pause, many keys against few", round(more, 2), "times", goal, more <= LONGER)
    beyond = large.longest - large.steady.p99
    goal = f"< {LONGEST} ms"
    report.check("pause beyond the steady state", round(beyond, 1), "ms", goal, beyond < LONGEST)


def throughput(report: Report, console: Console, rounds: int, seconds: float, every: float) -> None:
    """The work of `bench throughput`, without snapshots and with them."""
    best = {"without": 0.0, "with": 0.0}
    for _ in range(rounds):
        for name in best:
            console.print(f"throughput {name} snapshots …", style="dim")
            with tempfile.TemporaryDirectory(prefix="railgun-bench-") as directory:
                kept = Snapshots(directory, every=every) if name == "with" else None
                rate = ours(SIZE, seconds, kept).records_per_second
            best[name] = max(best[name], rate)
    for name, rate in best.items():
        report.check(f"throughput {name} snapshots", round(rate), "records/s")
    loss = 1 - best["with"] / best["without"]
    goal = f"<= {LOSS:.0%}"
    report.check("throughput lost", round(100 * loss, 1), "%", goal, loss <= LOSS)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        metavar="N",
        help="measure only the cost of a snapshot every second, beside N busy processes",
    )


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processes computing."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def beside_others(report: Report, console: Console, processes: int, *, quick: bool) -> None:
    """Measure throughput without snapshots and with one every second, in turn, beside busy processes."""
    rounds, seconds = (
        (QUICK_BUSY_ROUNDS, QUICK_BUSY_SECONDS) if quick else (BUSY_ROUNDS, BUSY_SECONDS)
    )
    rates: dict[str, list[Rate]] = {"without": [], "with": []}
    with busy(processes):
        for number in range(rounds):
            for name in list(rates)[:: 1 if number % 2 == 0 else -1]:
                with tempfile.TemporaryDirectory(prefix="railgun-bench-") as directory:
                    kept = Snapshots(directory, every=BUSY_EVERY) if name == "with" else None
                    rate = ours(SIZE, seconds, kept)
                rates[name].append(rate)
                console.print(
                    f"{name} snapshots: {rate.records_per_second:,.0f} records/s, "
                    f"{rate.processor_ns:,.0f} ns a record",
                    style="dim",
                )
    speed = {n: statistics.median(r.records_per_second for r in some) for n, some in rates.items()}
    spent = {n: statistics.median(r.processor_ns for r in some) for n, some in rates.items()}
    for name in rates:
        report.check(f"beside {processes}, {name} snapshots", round(speed[name]), "records/s")
        report.check(f"beside {processes}, {name} snapshots", round(spent[name]), "ns/record")
    rounds_made = list(zip(rates["with"], rates["without"], strict=True))
    ratio = statistics.median(w.records_per_second / o.records_per_second for w, o in rounds_made)
    report.check("throughput lost, as measured", round(100 * (1 - ratio), 1), "%")
    loss = 1 - statistics.median(o.processor_ns / w.processor_ns for w, o in rounds_made)
    goal = f"<= {LOSS:.0%}"
    report.check("lost by processor time", round(100 * loss, 1), "%", goal, loss <= LOSS)
