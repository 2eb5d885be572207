"""`railgun status`: show a running job, or list all running jobs."""

from __future__ import annotations

import argparse

from railgun.cli import job_view as view
from railgun.cli.arguments import add_job_name
from railgun.cli.errors import DONE, FAILED, USAGE, CommandError
from railgun.cli.jobs import Client, find
from railgun.cli.output import Output
from railgun.transport.registry import Registry


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Show a job, or list all running jobs."""
    if options.name is None:
        return _all_jobs(options, out, registry)
    client = find(options.name, registry)
    if options.watch:
        return _watch_status(client, out)
    status = client.get("/status")
    out.data(status=status)
    out.show(view.job(status))
    return DONE


def _all_jobs(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    if options.watch:
        raise CommandError(USAGE, "usage", "--watch needs the name of a job")
    statuses = []
    for entry in registry.jobs():
        try:
            statuses.append(Client(entry).get("/status"))
        except CommandError as error:  # the job has just ended, or runs on another machine
            out.line(str(error), "yellow")
    out.listing("jobs", statuses, view.jobs, "no jobs are running")
    return DONE


def _watch_status(client: Client, out: Output) -> int:
    from rich.live import Live

    after = client.get("/status")["last_event"]
    with Live(console=out.console, refresh_per_second=8) as live:
        for kind, data in client.events(after):
            if kind == "happened":
                out.event(data)
            else:
                out.data(status=data)
                if not out.as_json:
                    live.update(view.job(data))
                if kind == "end":
                    return FAILED if data["state"] == "failed" else DONE
    raise AssertionError("a stream of events ends with one")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the job and the options."""
    add_job_name(parser, nargs="?")
    parser.add_argument("--watch", action="store_true", help="keep showing the job until it ends")
