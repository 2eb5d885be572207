"""`railgun snapshot`: take a snapshot of a running job now."""

from __future__ import annotations

import argparse
import time
from typing import Any

from railgun.cli import job_view as view
from railgun.cli.arguments import add_job_name, seconds
from railgun.cli.errors import DONE, FAILED, CommandError
from railgun.cli.jobs import Client, find
from railgun.cli.output import Output, event_text
from railgun.transport.registry import Registry


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Take a snapshot, and wait until it is committed, or has failed."""
    client = find(options.name, registry)
    taken = client.post("/snapshot")
    done = _await(client, taken, options.timeout)
    out.data(snapshot=done["data"])
    out.line(event_text(done), "green")
    out.line(f"  {view.phases(done['data']['phases'])}")
    return DONE


def _await(client: Client, taken: dict[str, Any], timeout: float | None) -> dict[str, Any]:
    """Wait for the event of a committed snapshot later than `taken["after"]`; raise `CommandError` if it failed."""
    deadline = None if timeout is None else time.monotonic() + timeout
    for kind, data in client.events(taken["last_event"]):
        if kind == "happened" and data["kind"] in ("snapshot", "snapshot-failed"):
            if data["data"]["snapshot"] > taken["after"]:
                if data["kind"] == "snapshot":
                    return data
                raise CommandError(FAILED, "not-saved", data["text"])
        elif kind == "end":
            why = f": {data['cause']}" if data["cause"] else ""
            raise CommandError(FAILED, "not-saved", f"the flow is {data['state']}{why}")
        if deadline is not None and time.monotonic() > deadline:
            raise CommandError(
                FAILED,
                "not-saved",
                f"no snapshot was committed within {timeout:g} s; it may still be committed later",
            )
    raise AssertionError("a stream of events ends with one")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the job and the timeout."""
    add_job_name(parser)
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS",
        help="give up waiting after this time (default: wait for ever)",
    )  # fmt: skip
