"""`railgun snapshot`: take one now. `railgun snapshots`: which there are, of a job that runs or in a directory."""

from __future__ import annotations

import argparse
import time
from typing import Any

from railgun.cli import view
from railgun.cli.client import Client, find
from railgun.cli.errors import DONE, FAILED, USAGE, CommandError
from railgun.cli.output import Output, told
from railgun.transport.registry import Registry


def take(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Take a snapshot, and wait until it is committed, or has failed."""
    client = find(options.name, registry)
    taken = client.post("/snapshot")
    done = _await(client, taken, options.timeout)
    out.data(snapshot=done["data"])
    out.line(told(done), "green")
    out.line(f"  {view.phases(done['data']['phases'])}")
    return DONE


def _await(client: Client, taken: dict[str, Any], timeout: float | None) -> dict[str, Any]:
    """The event that says that a snapshot later than this is committed."""
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
                f"no snapshot was committed within {timeout:g} s; it may still come about",
            )
    raise AssertionError("a stream of events ends with one")


def show(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Which snapshots there are."""
    if options.dir is None and options.name is None:
        raise CommandError(
            USAGE, "usage", "whose? The name of a job that runs, or --dir with a directory"
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
