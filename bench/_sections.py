"""What benches of several sections have in common: which of them run, where their files lie, and how they end."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar

from rich.console import Console
from verification.report import Report, options

from bench._peers import PeerError


class Sectioned(Protocol):
    """A bench that has sections."""

    engines: set[str]

    def leave_out(self, name: str, work: str, error: PeerError) -> None:
        """Somebody does not take part."""

    def say(self, text: str) -> None:
        """Tell people."""


B = TypeVar("B", bound=Sectioned)


def chosen_of(told: str, known: Sequence[str]) -> list[str]:
    """What is typed after --only.

    >>> chosen_of("consume,publish", ["publish", "single", "consume"])
    ['publish', 'consume']
    """
    asked = {name.strip() for name in told.split(",")}
    unknown = sorted(asked - set(known))
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
    return [name for name in known if name in asked]


def measure(
    name: str,
    doc: str | None,
    argv: Sequence[str] | None,
    sections: Mapping[str, Callable[[B], None]],
    ours: str,
    made: Callable[[Path, Report, Console, Any], B],
) -> int:
    """Run the sections that were asked for, and report; `made` makes the bench, of what was typed."""
    known = list(sections)

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--only", type=lambda told: chosen_of(told, known), default=known, metavar="NAME,...",
            help=f"some of {', '.join(known)}",
        )  # fmt: skip
        parser.add_argument("--ours", action="store_true", help="leave the peers out")

    chosen, console = options(f"bench {name}", (doc or "").partition("\n")[0], argv, more=more)
    signal.signal(signal.SIGTERM, _terminated)  # so that servers are ended, and files removed
    report = Report(name)
    home = Path(tempfile.mkdtemp(prefix="railgun-bench-", dir=Path.cwd()))
    bench = made(home, report, console, chosen)
    try:
        for section in chosen.only:
            try:
                sections[section](bench)
            except PeerError as error:  # our own nodes or client
                bench.leave_out(ours, section, error)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    bench.say(", ".join(sorted(bench.engines)))
    return report.finish(chosen)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
