"""From the kill of a worker to the first new output, beside peers; and a live rescale beside a stop and a load.

Everyone has the state and the load of `_outage`, and is killed soon after something was saved.

- *Railgun*: one of two workers on local Spark gets SIGKILL. The other keeps its process; both go back to the snapshot.
- *Bytewax*: both processes get SIGKILL and are started again at once, with its recovery partitions.
- *Spark*: Structured Streaming, twelve sums per key in the JVM; the program is killed and started again at once, from
  its checkpoint, with either of its two state stores. *Once Spark is up* leaves out the start of JVM and session.

For peers nobody has to notice the kill: they are started again at the same moment. Then the same state is rescaled from
2 to 4 workers, live, and by a stop (which ends with a snapshot) and another run in the same Spark session: the longest
time in which no record arrives at any sink.

Everything is done in several rounds, and the median counts. A quick run leaves the peers out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from verification.numbered_load import Load
from verification.report import Report, options

from bench._outage import KEYS, NEW, RATE, Outage
from bench._peers import Peer, PeerError
from bench._recovering import Outcome, Recovering
from railgun.spark.session import session

ROUNDS, PAUSE = 3, 3.0
QUICK_KEYS, QUICK_RATE, QUICK_PAUSE = 100_000, 10_000, 1.0
PATIENCE = 900.0  # seconds for a peer to bring its state in, save it and come back
OURS = "Railgun"
SPARK_UP = "Spark is up"
FASTER = 2.0
"""How many times as fast as each peer we mean to be back."""
SHORTER = 10.0
"""How many times shorter than with a stop we mean the gap of a rescale to be."""
PEERS = {
    "Bytewax": Peer("bytewax", "bytewax_recovery"),
    "Spark, state in memory": Peer("spark", "spark_recovery", ("--store", "memory")),
    "Spark, state in RocksDB": Peer("spark", "spark_recovery", ("--store", "rocksdb")),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    chosen, console = options("bench recovery", (__doc__ or "").partition("\n")[0], argv)
    keys, rate, pause = (
        (QUICK_KEYS, QUICK_RATE, QUICK_PAUSE) if chosen.quick else (KEYS, RATE, PAUSE)
    )
    rounds = 1 if chosen.quick else ROUNDS
    report = Report("recovery")
    outcome = ours(keys, rate, pause, rounds, console)
    tell_ours(report, outcome)
    everyone = {OURS: outcome.outages}
    if not chosen.quick:
        everyone |= peers(keys, rate, rounds, report, console)
    for name, outages in everyone.items():
        tell(report, name, outages)
    for name in () if chosen.quick else PEERS:
        compare(report, everyone, name)
    live, reload = median(outcome.rescales), median(outcome.reloads)
    report.check("2 → 4 live, longest gap", round(live * 1000, 1), "ms")
    report.check("2 → 4 by stop and run, longest gap", round(reload * 1000), "ms")
    times = reload / live
    goal = f">= {SHORTER:g} times"
    report.check("gap, live against stop and run", round(times, 1), "times", goal, times >= SHORTER)
    return report.finish(chosen)


def ours(keys: int, rate: float, pause: float, rounds: int, console: Console) -> Outcome:
    """Our flow, on one Spark session."""
    spark = session("railgun bench recovery")
    try:
        with tempfile.TemporaryDirectory(prefix="railgun-bench-") as directory:
            home = Path(directory)
            (home / "logs").mkdir()
            load = Load(keys, rate, str(home / "logs"))
            work = Recovering(spark, load, home / "snapshots", console, pause)
            for number in range(rounds):
                work.round(number, last=number == rounds - 1)
            return work.outcome()
    finally:
        spark.stop()


def peers(
    keys: int, rate: float, rounds: int, report: Report, console: Console
) -> dict[str, list[Outage]]:
    """The peers, in turn. Who fails is a failed check, and is not asked again."""
    found: dict[str, list[Outage]] = {}
    failed = set()
    for _ in range(rounds):
        for name, peer in PEERS.items():
            if name in failed:
                continue
            try:
                size = ("--keys", str(keys), "--rate", str(rate))
                outage = Outage.of_line(peer.ask(*size, patience=PATIENCE))
            except PeerError as error:
                console.print(f"{name}: {error}", style="red", markup=False)
                report.check(name, "did not run", goal="runs", passed=False)
                failed.add(name)
                found.pop(name, None)
                continue
            console.print(f"{name}: {outage.seconds:.2f} s ({outage.engine})", style="dim")
            found.setdefault(name, []).append(outage)
    return found


def tell_ours(report: Report, outcome: Outcome) -> None:
    """What must be in any run, and how long it took to be as before."""
    report.check("records", outcome.records, "records", "> 0", outcome.records > 0)
    for name, count in (
        ("lost", outcome.lost),
        ("doubled within a generation", outcome.doubled),
        ("reordered in the state", outcome.reordered),
    ):
        report.check(name, count, "", "= 0", count == 0)
    caught_up = median(outcome.caught_up)
    report.check(f"{OURS}, latency back under 2 times", round(caught_up, 2), "s after the kill")


def tell(report: Report, name: str, outages: Sequence[Outage]) -> None:
    """The median of all rounds, and of each part of it."""
    report.check(f"{name}, kill to {NEW}", round(middle(outages), 2), "s")
    for part in outages[0].split():
        took = median(outage.split()[part] for outage in outages)
        report.check(f"{name}, until: {part}", round(took, 3), "s")


def middle(outages: Sequence[Outage]) -> float:
    """The median."""
    return median(outage.seconds for outage in outages)


def compare(report: Report, everyone: Mapping[str, Sequence[Outage]], name: str) -> None:
    """How many times as fast as a peer we are back.

    >>> report = Report("example")
    >>> theirs = [Outage({SPARK_UP: 4.0, NEW: 9.0}, "")]
    >>> compare(report, {OURS: [Outage({NEW: 2.0}, "")], "Spark": theirs}, "Spark")
    >>> for check in report.checks:
    ...     print(check.name, "|", check.value, check.unit, "|", check.goal, check.passed)
    Railgun / Spark | 4.5 times | >= 2 times True
    Railgun / Spark, once Spark is up | 2.5 times |  True
    """
    goal = f">= {FASTER:g} times"
    if name not in everyone:
        report.check(f"{OURS} / {name}", "not measured", goal=goal, passed=False)
        return
    theirs, us = everyone[name], middle(everyone[OURS])
    times = middle(theirs) / us
    report.check(f"{OURS} / {name}", round(times, 2), "times", goal, times >= FASTER)
    if SPARK_UP in theirs[0].marks:
        times = median(outage.since(SPARK_UP) for outage in theirs) / us
        report.check(f"{OURS} / {name}, once Spark is up", round(times, 2), "times")
