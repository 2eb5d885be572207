"""A million keys under a steady load, rescaled live 2 → 4 → 1: what is lost, what waits, how fast keys move.

The load is open-loop: every record is due at a fixed time, and its latency counts from then. Each is numbered; an
oracle looks at the logs afterwards. The timeline is drawn to railgun-rescale.svg.

- *Longest wait*: the longest latency of any record that was due while keys moved, less the p99 of the steady state.
- *p99, unmoved*: of the records of keys that stayed where they were, while others moved, against the p99 of the steady
  state. Both runs of workers share two cores: 4 workers have half a core each.
- *Keys a second*: all keys that changed their worker, by the time from the order to move until all was settled.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from railgun.job import run
from railgun.spark.session import session
from railgun.testing.load import Load, numbered_flow
from railgun.testing.picture import draw
from railgun.testing.report import Report, options
from railgun.testing.rescale_run import RescaleRun, Result

KEYS, RATE, PAUSE = 1_000_000, 20_000, 6.0
QUICK_KEYS, QUICK_RATE, QUICK_PAUSE = 200_000, 10_000, 3.0
SIZES = (4, 1)
PICTURE = Path("railgun-rescale.svg")
LONGEST_WAIT = 250  # ms
SLOWER = 2.0  # times
KEYS_A_SECOND = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; the exit code tells whether the goals are met."""
    chosen, console = options("bench rescale", (__doc__ or "").partition("\n")[0], argv)
    keys, rate, pause = (
        (QUICK_KEYS, QUICK_RATE, QUICK_PAUSE) if chosen.quick else (KEYS, RATE, PAUSE)
    )
    told: list[str] = []

    def show(what: str, status: object) -> None:
        if told[-1:] != [what]:
            told.append(what)
            console.print(f"{what} …", style="dim")

    spark = session("railgun bench rescale")
    try:
        with tempfile.TemporaryDirectory(prefix="railgun-bench-") as directory:
            load = Load(keys, rate, directory)
            subtitle = f"{keys:,} keys of about 100 bytes, {rate:,} records/s offered, two cores"
            title = "Rescaled live: 2 → 4 → 1 workers"
            with run(numbered_flow("rescale", load), 2, spark=spark, http=False) as job:
                result = RescaleRun(job, load, SIZES, title, subtitle, pause, show).run()
    finally:
        spark.stop()
    PICTURE.write_text(draw(result.story), "utf-8")
    console.print(f"The timeline is in {PICTURE}.", style="dim")
    report = Report("rescale")
    judge(report, result)
    return report.finish(chosen)


def judge(report: Report, result: Result) -> None:
    """The goals."""
    steady = result.steady
    result.check(report)
    for name, value in (("p50", steady.p50), ("p99", steady.p99), ("longest", steady.longest)):
        report.check(f"steady, {name}", round(value, 1), "ms")
    for span in result.spans:
        name = f"{span.before} → {span.after}"
        report.check(f"{name}, keys moved", span.moved_keys, "keys")
        report.check(f"{name}, took", round(span.seconds, 2), "s")
        speed = span.moved_keys / span.seconds
        goal = f">= {KEYS_A_SECOND:,}"
        report.check(f"{name}, keys a second", round(speed), "", goal, speed >= KEYS_A_SECOND)
        longest = max(span.moved.longest, span.unmoved.longest) - steady.p99
        goal = f"< {LONGEST_WAIT} ms"
        report.check(f"{name}, longest wait", round(longest, 1), "ms", goal, longest < LONGEST_WAIT)
        slower = span.unmoved.p99 / steady.p99 if steady.p99 else 0.0
        goal = f"<= {SLOWER:g} times"
        report.check(
            f"{name}, p99 of unmoved keys", round(slower, 2), "times", goal, slower <= SLOWER
        )
        report.check(f"{name}, p50 of moved keys", round(span.moved.p50, 1), "ms")
        report.check(f"{name}, p99 of moved keys", round(span.moved.p99, 1), "ms")
