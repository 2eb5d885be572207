"""`railgun snapshots`: list the snapshots of a job that runs, or of a directory."""

from __future__ import annotations

import argparse

from railgun.cli import job_view as view
from railgun.cli.arguments import add_job_name
from railgun.cli.errors import DONE, USAGE, CommandError
from railgun.cli.jobs import find
from railgun.cli.output import Output
from railgun.transport.registry import Registry


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """List the snapshots of a job or of a directory."""
    if options.dir is None and options.name is None:
        raise CommandError(
            USAGE,
            "usage",
            "snapshots of which job? Give the name of a running job, or --dir with a directory",
        )
    if options.dir is None:
        attempts = find(options.name, registry).get("/snapshots")["snapshots"]
    else:
        from railgun.engine.controller.snapshot_directory import attempts_as_dicts, find_store

        attempts = attempts_as_dicts(find_store(options.dir, options.name)[1])
    out.data(snapshots=attempts)
    if attempts:
        out.show(view.snapshots(attempts, out.console.width))
    else:
        out.line("there are no snapshots yet")
    return DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the job and the directory."""
    add_job_name(parser, nargs="?")
    parser.add_argument(
        "--dir",
        metavar="DIR",
        help="list the snapshots in a directory, whether the job runs or not",
    )
