"""How long a record takes through two stages, at 10,000 records a second offered, on local Spark.

Source → by key → by another key → sink: every record is sent between workers up to twice. The load is open-loop, so
the time counts from when a record was due.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from operator import itemgetter

from verification.numbered_load import Load, Log, Record, follow, nothing, read_logs
from verification.report import Report, options
from verification.rescale_run import Latency

from railgun import Flow, run
from railgun.spark.session import session

KEYS, RATE = 10_000, 10_000
SECONDS, QUICK_SECONDS, WARM_UP = 20.0, 6.0, 4.0
GOAL = 5.0  # ms, p50


def second_key(record: Record) -> int:
    """Another key, which most often lives elsewhere."""
    return record[0] * 7919 % KEYS


def two_stages(load: Load) -> Flow:
    """By key, by another key, log."""
    flow = Flow("latency")
    first = flow.source(load, name="load").key_by(itemgetter(0), name="by key")
    followed = first.stateful_map(follow, initial=nothing, name="follow")
    again = followed.key_by(second_key, name="by another key")
    again.stateful_map(count, initial=int, name="count").sink(Log(load.directory), name="log")
    return flow


def count(so_far: int, record: Record) -> tuple[int, Record]:
    """State for the second stage."""
    return so_far + 1, record


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    chosen, console = options("bench latency", (__doc__ or "").partition("\n")[0], argv)
    seconds = QUICK_SECONDS if chosen.quick else SECONDS
    spark = session("railgun bench latency")
    try:
        with tempfile.TemporaryDirectory(prefix="railgun-bench-") as directory:
            with run(two_stages(Load(KEYS, RATE, directory)), 2, spark=spark, http=False) as job:
                while job.status()["state"] != "running":
                    time.sleep(0.1)
                time.sleep(WARM_UP)
                begin = time.time_ns() // 1000
                console.print(f"measuring for {seconds:.0f} s …", style="dim")
                time.sleep(seconds)
                end = time.time_ns() // 1000
                job.stop()
            rows = read_logs(directory)
    finally:
        spark.stop()
    took = Latency.of(rows[(rows[:, 2] >= begin) & (rows[:, 2] < end)])
    report = Report("latency")
    report.check("records", took.records, "records", "> 0", took.records > 0)
    report.check("p50", round(took.p50, 2), "ms", f"< {GOAL:g} ms", took.p50 < GOAL)
    report.check("p99", round(took.p99, 2), "ms")
    report.check("longest", round(took.longest, 1), "ms")
    return report.finish(chosen)
