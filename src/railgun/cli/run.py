"""`railgun run`: a flow in this terminal, until it ends or Ctrl-C stops it."""

from __future__ import annotations

import argparse
import os
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Final

from railgun.cli.errors import DONE, FAILED, INTERRUPTED, USAGE, CommandError
from railgun.cli.loading import load
from railgun.cli.output import Output
from railgun.controller.controller import Event
from railgun.controller.registry import Registry
from railgun.job import FlowFailedError, Job, run

STOP: Final = (signal.SIGINT, signal.SIGTERM)
Happenings = queue.SimpleQueue[Event | signal.Signals]


def run_flow(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Run a flow to its end."""
    conf = _settings_of(options.set)
    loaded = load(options.flow)
    happenings: Happenings = queue.SimpleQueue()
    out.line(f"{loaded.flow.name}: starting on {options.master or 'local Spark'}")
    with (
        run(
            loaded.flow,
            options.workers,
            master=options.master,
            conf=conf,
            name=options.name,
            registry=registry,
            port=options.port,
            token=os.environ.get("RAILGUN_TOKEN") or None,
            by_value=loaded.modules,
            watch=happenings.put,
        ) as job,
        _signals(happenings),
    ):
        out.data(job={"name": job.name, "url": job.url})
        return follow(job, happenings, out)


def follow(job: Job, happenings: Happenings, out: Output) -> int:
    """Tell what happens until it is over. Ctrl-C stops; a second one ends at once."""
    asked = 0
    while True:
        try:
            happened = happenings.get(timeout=1.0)
        except queue.Empty:
            if not job.over:
                continue
            break
        if isinstance(happened, Event):
            out.event(asdict(happened))
            if happened.kind in ("finished", "failed"):
                break
        else:
            asked += 1
            if asked == 1:
                job.stop(wait=False)
            else:
                job.abort("interrupted")
    try:
        while not job.wait(1.0):  # for processes to end; so long Ctrl-C still counts
            while not happenings.empty():
                if not isinstance(happenings.get(), Event):
                    asked += 1
                    job.abort("interrupted")
    except FlowFailedError as error:
        if asked < 2:
            out.data(error={"kind": "flow-failed", "message": str(error)}, status=job.status())
        return INTERRUPTED if asked > 1 else FAILED
    out.data(status=job.status())
    return DONE


@contextmanager
def _signals(happenings: Happenings) -> Iterator[None]:
    """Ctrl-C and the like become things that happen; Spark's own handler would kill all workers."""

    def put(number: int, frame: FrameType | None) -> None:
        happenings.put(signal.Signals(number))

    before = {number: signal.signal(number, put) for number in STOP}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _settings_of(given: list[str]) -> dict[str, str]:
    conf = {}
    for setting in given:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise CommandError(USAGE, "usage", f"--set takes name=value, not {setting!r}")
        conf[name.strip()] = value
    return conf
