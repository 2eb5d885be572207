"""Records a second through a sum per key by a Python function: the limit of two processes, and peers.

Everyone does the work of `_workload` on two cores: records of one of 10,000 keys and a number, a
Python function that adds the number to the sum of its key, one output a record, counted and dropped.

- *Railgun*: a flow of two workers on local Spark.
- *limit*: two Python processes with no engine at all (`bench limit`).
- *Bytewax*: two processes, its fastest keyed operator, in the batches that we have, which is what the goal is about;
  and in those it is fastest with.
- *Spark, Python*: Structured Streaming, transformWithState on rows.
- *Spark, JVM*: Structured Streaming, groupBy.sum: no Python, and one output a key and micro-batch.

Everyone runs in turn, in several rounds, so that a neighbour who makes the machine slow does not
hit one alone; of the rounds the best counts. A quick run leaves Spark's own engines out. Ratios are
told by records a second and by processor time a record. On idle cores the first is the one that
counts; on a busy machine only the second means anything, and it is kind to an engine that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rich.console import Console
from verification.report import Report, options

from bench._ours import ours
from bench._peers import PEERS, PeerError
from bench._workload import Rate
from bench.limit import SIZES, limit

ROUNDS = 3
SECONDS = 8.0
QUICK_SECONDS = 2.0
OF_THE_LIMIT = 0.7
GOALS = {"Bytewax, batches of 5,000": 8.0, "Spark, Python": 25.0, "Spark, JVM": 4.0}
"""How many times as fast as each we mean to be."""

Runner = Callable[[float], Rate]
"""Does the work for so many seconds once it is warm."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    chosen, console = options("bench throughput", (__doc__ or "").partition("\n")[0], argv)
    rounds, seconds = (1, QUICK_SECONDS) if chosen.quick else (ROUNDS, SECONDS)
    report = Report("throughput")
    everyone = runners()
    if chosen.quick:  # Spark alone takes more than a minute to start, to become warm and to end
        everyone = {name: run for name, run in everyone.items() if name in QUICK}
    best = measure(everyone, rounds, seconds, report, console)
    for name, rate in best.items():
        report.check(name, round(rate.records_per_second), "records/s")
    for name, rate in best.items():
        report.check(f"{name}, processor time", round(rate.processor_ns), "ns/record")
    for size in SIZES[:1] if chosen.quick else SIZES:
        goal = OF_THE_LIMIT if size == SIZES[0] else None
        ratio(report, best, name_of_ours(size), name_of_limit(size), goal)
    for peer in [peer for peer in PEERS if peer in everyone]:
        ratio(report, best, name_of_ours(SIZES[0]), peer, GOALS.get(peer))
    return report.finish(chosen)


def runners() -> dict[str, Runner]:
    """Everyone who does the work; one more engine is one more entry here."""
    everyone: dict[str, Runner] = {}
    for size in SIZES:
        everyone[name_of_ours(size)] = partial(ours, size)
        everyone[name_of_limit(size)] = partial(limit, size)
    return everyone | {name: peer.run for name, peer in PEERS.items()}


def name_of_ours(size: int) -> str:
    """What our flow is called in the report."""
    return f"Railgun, batches of {size:,}"


def name_of_limit(size: int) -> str:
    """What the limit is called in the report."""
    return f"limit, batches of {size:,}"


QUICK = {name_of_ours(SIZES[0]), name_of_limit(SIZES[0]), "Bytewax, batches of 5,000"}
"""Who runs in a quick run."""


def measure(
    everyone: Mapping[str, Runner], rounds: int, seconds: float, report: Report, console: Console
) -> dict[str, Rate]:
    """The best of each in so many rounds. Who fails is a failed check, and is not asked again."""
    best: dict[str, Rate] = {}
    failed = set()
    for _ in range(rounds):
        for name, run in everyone.items():
            if name in failed:
                continue
            try:
                rate = run(seconds)
            except PeerError as error:
                console.print(f"{name}: {error}", style="red", markup=False)
                report.check(name, "did not run", goal="runs", passed=False)
                failed.add(name)
                best.pop(name, None)
                continue
            console.print(
                f"{name}: {rate.records_per_second:,.0f} records/s, "
                f"{rate.processor_ns:,.0f} ns of processor time a record, "
                f"{rate.cores:.1f} cores ({rate.engine})",
                style="dim",
            )
            best[name] = better(best[name], rate) if name in best else rate
    return best


def better(one: Rate, other: Rate) -> Rate:
    """The best that two rounds of one engine showed."""
    return Rate(
        max(one.records_per_second, other.records_per_second),
        min(one.processor_ns, other.processor_ns),
        one.engine,
    )


def ratio(
    report: Report, best: Mapping[str, Rate], one: str, other: str, at_least: float | None = None
) -> None:
    """Tell how many times as fast as `other` `one` is; with `at_least`, how many it must be.

    >>> report = Report("example")
    >>> best = {"ours": Rate(3.0e6, 600.0, ""), "theirs": Rate(1.0e6, 1_950.0, "")}
    >>> ratio(report, best, "ours", "theirs", at_least=4)
    >>> for check in report.checks:
    ...     print(check.name, "|", check.value, check.unit, "|", check.goal, check.passed)
    ours / theirs | 3.0 times | >= 4 times False
    ours / theirs, by processor time | 3.25 times |  True
    """
    name = f"{one} / {other}"
    goal = "" if at_least is None else f">= {at_least:g} times"
    if one not in best or other not in best:
        report.check(name, "not measured", goal=goal, passed=at_least is None)
        return
    times = best[one].records_per_second / best[other].records_per_second
    report.check(name, round(times, 2), "times", goal, at_least is None or times >= at_least)
    times = best[other].processor_ns / best[one].processor_ns
    report.check(f"{name}, by processor time", round(times, 2), "times")
