"""A million keys under a steady load, rescaled live 2 → 4 → 1: what is lost, what waits, how fast keys move.

The load is open-loop: every record is due at a fixed time, and its latency counts from then. Each is numbered; an
oracle looks at the logs afterwards. The timeline is drawn to railgun-rescale.svg.

- *Longest wait*: the longest latency of any record that was due while keys moved, less the p99 of the steady state.
- *p99, unmoved*: of the records of keys that stayed where they were, while others moved, against the p99 of the steady
  state. Both runs of workers share two cores: 4 workers have half a core each.
- *Keys a second*: all keys that changed their worker, by the time from the order to move until all was settled.

A p99 of a few seconds hangs on what else the machine does just then. So there are three rounds, each from the start; of
what is faster or slower the one in the middle counts, against the lowest steady p99 of all, and all are told; so is
the processor time that the host of a virtual machine gave to others meanwhile.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from verification.numbered_load import Load, numbered_flow
from verification.report import Report, options
from verification.rescale_picture import draw
from verification.rescale_run import RescaleRun, Result

from railgun.job import run
from railgun.spark.session import session

FULL = (1_000_000, 20_000, 6.0, 3)  # keys, records/s, seconds between two rescales, rounds
QUICK = (200_000, 10_000, 3.0, 1)
SIZES = (4, 1)
PICTURE = Path("railgun-rescale.svg")
LONGEST_WAIT = 250  # ms
SLOWER = 2.0  # times
KEYS_A_SECOND = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; the exit code tells whether the goals are met."""
    chosen, console = options("bench rescale", (__doc__ or "").partition("\n")[0], argv)
    keys, rate, pause, rounds = QUICK if chosen.quick else FULL
    told: list[str] = []

    def show(what: str, status: object) -> None:
        if told[-1:] != [what]:
            told.append(what)
            console.print(f"{what} …", style="dim")

    title = "Rescaled live: 2 → 4 → 1 workers"
    subtitle = f"{keys:,} keys of about 100 bytes, {rate:,} records/s offered, two cores"
    results: list[Result] = []
    before = stolen()
    spark = session("railgun bench rescale")
    try:
        for number in range(rounds):
            told.clear()
            console.print(f"Round {number + 1} of {rounds}", style="bold")
            with tempfile.TemporaryDirectory(prefix="railgun-bench-") as directory:
                load = Load(keys, rate, directory)
                with run(numbered_flow("rescale", load), 2, spark=spark, http=False) as job:
                    results.append(RescaleRun(job, load, SIZES, title, subtitle, pause, show).run())
    finally:
        spark.stop()
    middle = sorted(results, key=lambda result: result.spans[0].unmoved.p99)[len(results) // 2]
    PICTURE.write_text(draw(middle.story), "utf-8")
    console.print(f"The timeline of the middle round is in {PICTURE}.", style="dim")
    report = Report("rescale")
    judge(report, results)
    report.check("stolen by the host", round(stolen() - before, 1), "s of two processors")
    return report.finish(chosen)


def stolen() -> float:
    """The seconds of processor time so far that the machine's host gave to others (0 where it does not tell)."""
    try:
        fields = Path("/proc/stat").read_text("ascii").split(maxsplit=9)
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def judge(report: Report, results: Sequence[Result]) -> None:
    """The goals: those that no round may miss, and those that half of them have to reach."""
    for number, result in enumerate(results):
        result.check(report, f", round {number + 1}" if len(results) > 1 else "")
    for name in ("p50", "p99", "longest"):
        each = [getattr(result.steady, name) for result in results]
        report.check(f"steady, {name}", round(median(each), 1), f"ms{_all(each)}")
    steady = min(result.steady.p99 for result in results)  # what the machine can do, undisturbed
    for move, span in enumerate(results[0].spans):
        name = f"{span.before} → {span.after}"
        spans = [result.spans[move] for result in results]
        report.check(f"{name}, keys moved", span.moved_keys, "keys")
        each = [span.seconds for span in spans]
        report.check(f"{name}, took", round(median(each), 2), f"s{_all(each)}")
        each = [span.moved_keys / span.seconds for span in spans]
        goal, fast = f">= {KEYS_A_SECOND:,}", median(each) >= KEYS_A_SECOND
        report.check(f"{name}, keys a second", round(median(each)), _all(each), goal, fast)
        each = [max(span.moved.longest, span.unmoved.longest) - steady for span in spans]
        goal, short = f"< {LONGEST_WAIT} ms, each", max(each) < LONGEST_WAIT
        report.check(f"{name}, longest wait", round(max(each), 1), f"ms{_all(each)}", goal, short)
        each = [span.unmoved.p99 / steady for span in spans]
        goal, smooth = f"<= {SLOWER:g} times", median(each) <= SLOWER
        value = round(median(each), 2)
        report.check(f"{name}, p99 of unmoved keys", value, f"times{_all(each)}", goal, smooth)
        for part in ("p50", "p99"):
            each = [getattr(span.moved, part) for span in spans]
            report.check(f"{name}, {part} of moved keys", round(median(each), 1), f"ms{_all(each)}")


def _all(each: Sequence[float]) -> str:
    """The values of all rounds, beside the one that counts."""
    if len(each) == 1:
        return ""
    return (
        " ("
        + ", ".join(f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in each)
        + ")"
    )
