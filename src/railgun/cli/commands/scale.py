"""`railgun scale`: change the number of workers of a running job."""

from __future__ import annotations

import argparse

from railgun.cli import job_view as view
from railgun.cli.arguments import add_job_name, worker_count
from railgun.cli.errors import DONE, FAILED, CommandError
from railgun.cli.jobs import Client, find
from railgun.cli.output import Output
from railgun.transport.registry import Registry


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Ask the job for another number of workers; with `--watch`, follow the rescale."""
    client = find(options.name, registry)
    taken = client.post("/scale", workers=options.workers)
    if not options.watch:
        out.data(accepted=True, status=taken["status"])
        out.line(f"{options.name}: asked for {workers_text(options.workers)}")
        return DONE
    return _watch_scale(client, taken["last_event"], options.workers, out)


def _watch_scale(client: Client, after: int, workers: int, out: Output) -> int:
    """Show the progress of a rescale until it ends; return the exit code."""
    from rich.live import Live

    with Live(console=out.console, refresh_per_second=8, transient=True) as live:
        for kind, data in client.events(after):
            if kind == "happened":
                out.event(data)
                if data["kind"] == "not-rescaled":
                    return FAILED
                continue
            out.data(status=data)
            if not out.as_json:
                live.update(view.job(data))
            if data["state"] in ("starting", "rescaling"):
                continue
            if data["state"] == "running" and data["size"] == workers:
                return DONE
            raise CommandError(
                FAILED,
                "not-rescaled",
                data["cause"] or f"the flow is {data['state']} on {workers_text(data['size'])}",
            )
    raise AssertionError("a stream of events ends with one")


def workers_text(count: int) -> str:
    """Return a number of workers with its noun, as "1 worker" or "4 workers"."""
    return f"{count} worker{'s' * (count != 1)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the job, the number of workers and the options."""
    add_job_name(parser)
    parser.add_argument("workers", type=worker_count, metavar="N", help="new number of workers")
    parser.add_argument("--watch", action="store_true", help="show progress until the rescale ends")
