"""`./run demo`: a flow on local Spark, under a steady load, rescaled live from 2 workers to 4 and to 1.

Every record is numbered, and an oracle that knows nothing of the engine looks afterwards whether each one is there,
once and in order. What happened is drawn as a timeline.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from railgun.cli import view
from railgun.core.errors import RailgunError
from railgun.job import run
from railgun.spark.session import session
from railgun.testing.load import Load, numbered_flow
from railgun.testing.picture import draw
from railgun.testing.report import Report, options
from railgun.testing.rescale_run import RescaleRun, Result

KEYS, RATE, PAUSE = 100_000, 10_000, 4.0
QUICK_KEYS, QUICK_RATE, QUICK_PAUSE = 20_000, 5_000, 1.5
SIZES = (4, 1)
PICTURE = Path("railgun-demo.svg")
TITLE = "A flow on Spark is rescaled live: 2 → 4 → 1 workers"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code tells whether nothing was lost, doubled or reordered."""
    description = (__doc__ or "").partition("\n")[0].partition(": ")[2]
    chosen, console = options("demo", description, argv)
    began = time.monotonic()
    keys, rate, pause = (
        (QUICK_KEYS, QUICK_RATE, QUICK_PAUSE) if chosen.quick else (KEYS, RATE, PAUSE)
    )
    report = Report("demo")
    try:
        with tempfile.TemporaryDirectory(prefix="railgun-demo-") as directory:
            result = rescale_live(Load(keys, rate, directory), pause, console)
    except RailgunError as error:
        console.print(f"[red]The demo failed:[/] {error}")
        report.check("ran", "no", goal="= yes", passed=False)
        return report.finish(chosen)
    PICTURE.write_text(draw(result.story), "utf-8")
    judge(report, result)
    tell(console, result, keys, time.monotonic() - began)
    return report.finish(chosen)


def rescale_live(load: Load, pause: float, console: Console) -> Result:
    """Start Spark and the flow, and rescale it while people watch."""
    console.print("Starting Spark, local mode, in this process …", style="dim")
    spark = session("railgun demo", quick=True)
    try:
        flow = numbered_flow("demo", load)
        subtitle = (
            f"{load.keys:,} keys of about 100 bytes, {load.rate:,.0f} records/s, "
            "each worker a Python process in a Spark task"
        )
        with (
            Live(console=console, refresh_per_second=8, transient=True) as live,
            run(flow, workers=2, spark=spark, name="railgun-demo") as job,
        ):
            shown = _watcher(live, console)
            return RescaleRun(job, load, SIZES, TITLE, subtitle, pause, shown).run()
    finally:
        spark.stop()


def _watcher(live: Live, console: Console) -> Callable[[str, dict[str, Any]], None]:
    """Draws the job as it is; where nobody watches, one line for each thing that begins."""
    told: list[str] = []

    def show(what: str, status: dict[str, Any]) -> None:
        if console.is_terminal:
            live.update(Group(Text(f"Now: {what}", "bold"), view.job(status)))
        elif told[-1:] != [what]:
            told.append(what)
            console.print(f"{what} …", style="dim")

    return show


def judge(report: Report, result: Result) -> None:
    """What must be."""
    result.check(report)
    report.check("steady, p50", round(result.steady.p50, 1), "ms")
    report.check("steady, longest", round(result.steady.longest, 1), "ms")
    for span in result.spans:
        name = f"{span.before} → {span.after}"
        report.check(f"{name}, keys moved", span.moved_keys, "keys", "> 0", span.moved_keys > 0)
        report.check(f"{name}, took", round(span.seconds, 2), "s")
        report.check(f"{name}, longest wait", round(span.moved.longest, 1), "ms")


def tell(console: Console, result: Result, keys: int, seconds: float) -> None:
    """What happened, in five lines, and what to try next."""
    verdict, spans = result.verdict, result.spans
    moved = "; ".join(
        f"{span.before} → {span.after}: {span.moved_keys:,} keys in {span.seconds:.1f} s"
        for span in spans
    )
    waits = ", ".join(f"{span.moved.longest:.0f} ms" for span in spans)
    good = "every one there once, in order" if verdict.good else "NOT as it should be"
    for line in (
        f"A keyed flow ran on local Spark: each worker a Python process in a Spark task, {keys:,} keys.",
        f"While {verdict.records:,} records went through, it was rescaled live. {moved}.",
        f"Nothing stopped: the longest any record of a moving key took was {waits}"
        f" (steady: {result.steady.longest:.0f} ms).",
        f"The oracle looked at all records: {good}"
        f" ({verdict.lost} lost, {verdict.doubled} doubled, {verdict.reordered} reordered).",
        f"The timeline is in {PICTURE}; all this took {seconds:.0f} s.",
    ):
        console.print(line)
    console.print(
        "\nNext: [bold]./run railgun run examples/wordcount.py[/], and in another terminal "
        "[bold]./run railgun scale wordcount 4 --watch[/]."
    )


if __name__ == "__main__":
    sys.exit(main())
