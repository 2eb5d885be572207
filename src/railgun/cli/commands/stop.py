"""`railgun stop`: stop a running job."""

from __future__ import annotations

import argparse

from railgun.cli.arguments import add_job_name
from railgun.cli.errors import DONE
from railgun.cli.jobs import find
from railgun.cli.output import Output
from railgun.transport.registry import Registry


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Ask the job to stop after a final snapshot, to drain its sources, or to end at once."""
    client = find(options.name, registry)
    taken = client.post("/abort") if options.now else client.post("/stop", drain=options.drain)
    out.data(accepted=True, status=taken["status"])
    how = "ends at once" if options.now else f"stops: {taken['how']}"
    out.line(f"{options.name} {how}")
    return DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the job, and how it stops."""
    add_job_name(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--drain", action="store_true",
        help="end the sources, process what they have read, and finish the flow for good",
    )  # fmt: skip
    how.add_argument(
        "--now", action="store_true", help="end at once, without waiting for work in progress"
    )
