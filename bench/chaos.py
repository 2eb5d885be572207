"""A storm of kills, freezes, rescales and snapshots over a flow: its output must be that of a calm one, byte by byte.

Workers are killed, or frozen for up to twice the time that is borne; the flow is rescaled and saved at any moment; the
program that runs it is killed, and started again with another number of workers. The storm is drawn from `--seed`; when
exactly its blows fall is the machine's. `--spark` has it over local Spark, else workers are plain processes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

from verification.chaos import ChaosError, Storm, storm_over
from verification.report import Report, options

SECONDS, QUICK_SECONDS = 120.0, 30.0


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--spark", action="store_true", help="on local Spark")
    parser.add_argument("--seed", type=int, default=1, help="of the storm (default: 1)")
    parser.add_argument("--seconds", type=float, help="how long it lasts")


def main(argv: Sequence[str] | None = None) -> int:
    """Let it storm, and report; the exit code tells whether the output is right."""
    told = (__doc__ or "").partition("\n")[0]
    chosen, console = options("bench chaos", told, argv, more=_more)
    seconds = chosen.seconds or (QUICK_SECONDS if chosen.quick else SECONDS)
    report = Report("chaos")
    with tempfile.TemporaryDirectory(prefix="railgun-chaos-") as directory:
        storm = Storm(
            directory,
            seconds,
            chosen.seed,
            pause=3.0 if chosen.spark else 1.0,
            spark=chosen.spark,
        )
        report.check("seed", storm.seed)
        report.check("records", storm.count)
        try:
            outcome = storm_over(storm, lambda text: console.print(f"{text} …", style="dim"))
        except ChaosError as error:
            console.print(str(error))
            report.check("comes to its end", "no", "", "yes", False)
        else:
            report.check("comes to its end", "yes", "", "yes", outcome.finished)
            outcome.check(report)
    return report.finish(chosen)
