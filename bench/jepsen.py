"""Kills, partitions, bad disks, wrong clocks and changing members over a cluster: no client may see what must not be.

Real processes on loopback; links go through proxies, files through a disk that forgets what was not synced. Clients
publish, consume, read and ask all the time, and write down what they see; then all is healed, and their history is
checked. The faults are drawn from a seed; when exactly they fall is the machine's. What is left of a run that fails is
kept.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from verification.faults.nemesis import Kind
from verification.faults.run import Run, perform
from verification.report import Report, options

SECONDS, QUICK_SECONDS = 60.0, 20.0


def seeds(text: str) -> list[int]:
    """Numbers, and ranges of them.

    >>> seeds("1,5-7")
    [1, 5, 6, 7]
    """
    found: list[int] = []
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _kinds(text: str) -> list[Kind]:
    known = get_args(Kind)
    for one in text.split(","):
        if one not in known:
            raise argparse.ArgumentTypeError(f"{one}: not among {', '.join(known)}")
    return [kind for kind in known if kind in text.split(",")]


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=seeds, help="as 1,5-7 (default: 1-5, quick: 1)")
    parser.add_argument("--nodes", type=seeds, help="how many, as 3,5 (default: 3,5, quick: 3)")
    parser.add_argument("--seconds", type=float, help="of faults, each run")
    parser.add_argument("--only", type=_kinds, help="only these kinds of faults")
    parser.add_argument("--keep", type=Path, help="where failing runs are kept")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and report; the exit code tells whether nothing was seen that must not be."""
    told = (__doc__ or "").partition("\n")[0]
    chosen, console = options("bench jepsen", told, argv, more=_more)
    seconds = chosen.seconds or (QUICK_SECONDS if chosen.quick else SECONDS)
    report = Report("jepsen")
    home = chosen.keep or Path(tempfile.mkdtemp(prefix="railgun-jepsen-"))
    for count in chosen.nodes or ([3] if chosen.quick else [3, 5]):
        for seed in chosen.seeds or ([1] if chosen.quick else [1, 2, 3, 4, 5]):
            run = Run(home / f"{count}-{seed}", seed, count, seconds, chosen.only)
            console.print(f"{count} nodes, seed {seed} …", style="dim")
            outcome = perform(run, lambda text: console.print(f"  {text} …", style="dim"))
            outcome.check(report)
            outcome.tell(lambda text: console.print(f"  {text}", markup=False))
            if not outcome.sound:
                console.print(outcome.logs, markup=False)
                console.print(f"  all of it is in {run.directory}")
    if home.exists() and not any(home.iterdir()):
        home.rmdir()
    return report.finish(chosen)
