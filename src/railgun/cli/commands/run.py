"""`railgun run`: run a flow in this terminal, until it ends or Ctrl-C stops it."""

from __future__ import annotations

import argparse
import os
import queue
import signal
import threading
from dataclasses import asdict
from types import FrameType
from typing import Any, Final, Self

from railgun.cli.arguments import add_running
from railgun.cli.errors import DONE, FAILED, INTERRUPTED, USAGE, CommandError
from railgun.cli.loading import load
from railgun.cli.output import Output
from railgun.engine.controller.controller import Event
from railgun.engine.controller.storekeeper import DEFAULT_EVERY_S, DEFAULT_KEEP, Snapshots
from railgun.job import FlowFailedError, Job, run
from railgun.transport.registry import Registry

STOP: Final = (signal.SIGINT, signal.SIGTERM)
DEFAULT_DIRECTORY: Final = "railgun-snapshots"
NEED_SNAPSHOTS: Final = {
    "snapshots": "--snapshots", "every": "--every", "keep": "--keep", "begin": "--from", "fresh": "--fresh",
    "rename": "--rename", "drop_state": "--drop-state", "allow_older": "--allow-older",
}  # fmt: skip
Happenings = queue.SimpleQueue[Event | signal.Signals]


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Run a flow until it ends, fails or is stopped."""
    conf = settings_of(options.set)
    snapshots = snapshots_of(options)
    loaded = load(options.flow)
    happenings: Happenings = queue.SimpleQueue()
    out.line(f"{loaded.flow.name}: starting on {options.master or 'local Spark'}")
    with (
        _Signals(happenings) as signals,
        run(
            loaded.flow,
            options.workers,
            master=options.master,
            conf=conf,
            snapshots=snapshots,
            name=options.name,
            registry=registry,
            port=options.port,
            token=os.environ.get("RAILGUN_TOKEN") or None,
            by_value=loaded.modules,
            watch=happenings.put,
            begun=signals.begun,
        ) as job,
    ):
        stop_requests = signals.started()
        snapshot_status = job.status()["snapshots"]
        out.data(job={"name": job.name, "url": job.url, "snapshots": snapshot_status})
        if not job.over:
            out.line(announced(snapshot_status, options.master))
        return follow(job, happenings, out, stop_requests)


def announced(snapshots: dict[str, Any] | None, master: str | None) -> str:
    """Describe where snapshots are kept, and which state the flow begins with."""
    if snapshots is None:
        return "no snapshots: if it fails, it begins anew"
    begin = snapshots["from"]
    if begin is None:
        begins = "begins afresh"
    else:
        elsewhere = "" if begin["where"] == snapshots["where"] else f" of {begin['where']}"
        begins = f"goes on from snapshot {begin['snapshot']}{elsewhere}"
    text = f"snapshots every {snapshots['every']:g} s in {snapshots['where']}; {begins}"
    if master and not master.startswith("local") and "://" not in snapshots["where"]:
        text += "\n(all machines of the cluster need access to this directory; --snapshots takes a URL, too)"
    return text


def snapshots_of(options: argparse.Namespace) -> Snapshots | None:
    """Return the settings of snapshots from the options; None for `--no-snapshots`."""
    if options.no_snapshots:
        conflicting = [typed for name, typed in NEED_SNAPSHOTS.items() if getattr(options, name)]
        if conflicting:
            raise CommandError(USAGE, "usage", f"--no-snapshots does not go with {conflicting[0]}")
        return None
    rename: dict[str, str] = {}
    for argument in options.rename:
        old, equals, new = argument.partition("=")
        if not equals or not old or not new:
            raise CommandError(USAGE, "usage", f"--rename takes OLD=NEW, not {argument!r}")
        if rename.setdefault(old, new) != new:
            raise CommandError(USAGE, "usage", f"--rename: {old!r} cannot have two new names")
    snapshots = Snapshots(
        options.snapshots or DEFAULT_DIRECTORY,
        every=options.every or DEFAULT_EVERY_S,
        keep=options.keep or DEFAULT_KEEP,
        begin=options.begin,
        fresh=options.fresh,
        allow_older=options.allow_older,
        rename=rename,
        drop=frozenset(options.drop_state),
    )
    snapshots.check()
    return snapshots


def follow(job: Job, happenings: Happenings, out: Output, stop_requests: int = 0) -> int:
    """Print the events of a job until it is over, and return the exit code.

    Ctrl-C stops the job in order; a second one ends it at once. `stop_requests` counts those from before.
    """
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
            stop_requests += 1
            _end(job, stop_requests)
    try:
        while not job.wait(1.0):  # for processes to end; Ctrl-C still counts until then
            while not happenings.empty():
                if isinstance(happened := happenings.get(), Event):
                    out.event(asdict(happened))
                else:
                    stop_requests += 1
                    _end(job, stop_requests)
    except FlowFailedError as error:
        while not happenings.empty():  # a finished flow may still fail while it closes its sinks
            if isinstance(happened := happenings.get(), Event):
                out.event(asdict(happened))
        if stop_requests < 2:
            out.data(error={"kind": "flow-failed", "message": str(error)}, status=job.status())
        _tell_next_start(job, out)
        return INTERRUPTED if stop_requests > 1 else FAILED
    out.data(status=job.status())
    if stop_requests:
        _tell_next_start(job, out)
    return DONE


def _tell_next_start(job: Job, out: Output) -> None:
    """Print which snapshot the next run begins with."""
    snapshots = job.status()["snapshots"]
    if snapshots is not None and snapshots["last"] is not None:
        out.line(f"run it again, and it goes on from snapshot {snapshots['last']['snapshot']}")


def _end(job: Job, stop_requests: int) -> None:
    if stop_requests == 1:
        job.stop(wait=False)
    else:
        job.abort("interrupted")


class _Signals:
    """A context that puts SIGINT and SIGTERM into `happenings`, from before Spark starts until the job is closed.

    They must not interrupt the code that runs: PySpark's start would leave a JVM behind, and Spark's own handler would
    kill all workers. While `run` starts the job, nobody reads `happenings`, so a thread stops the job, as soon as there
    is one. A third signal interrupts this program at any point.
    """

    def __init__(self, happenings: Happenings) -> None:
        self._happenings = happenings
        self._job: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._early: queue.SimpleQueue[int] = (
            queue.SimpleQueue()
        )  # counts of requests; 0: the start is over
        self._stop_requests = 0
        self._is_starting = True
        self._thread = threading.Thread(
            target=self._stop_early, name="railgun-signals", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        self._before = {number: signal.signal(number, self._put) for number in STOP}
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._job.put(None)
        self._early.put(0)

    def begun(self, job: Job) -> None:
        """Take the job that signals stop from now on, while it starts."""
        self._job.put(job)

    def started(self) -> int:
        """Put further signals into `happenings`, and return how many came before."""
        self._is_starting = False
        self._job.put(None)
        self._early.put(0)
        self._thread.join()
        return self._stop_requests

    def _put(self, number: int, frame: FrameType | None) -> None:
        self._stop_requests += 1
        if self._stop_requests > 2:
            raise KeyboardInterrupt
        if self._is_starting:
            self._early.put(self._stop_requests)
        else:
            self._happenings.put(signal.Signals(number))

    def _stop_early(self) -> None:
        job = self._job.get()
        while job is not None and (stop_requests := self._early.get()):
            _end(job, stop_requests)


def settings_of(arguments: list[str]) -> dict[str, str]:
    """Parse Spark properties from `name=value` arguments."""
    conf = {}
    for setting in arguments:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise CommandError(USAGE, "usage", f"--set takes name=value, not {setting!r}")
        conf[name.strip()] = value
    return conf


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flow, how it runs, and what it begins with."""
    add_running(parser)
    parser.add_argument(
        "--from", dest="begin", metavar="SNAPSHOT",
        help="begin with this snapshot: a number, DIR#NUMBER, or the latest in DIR (default: the latest)",
    )  # fmt: skip
    parser.add_argument(
        "--fresh", action="store_true", help="begin without state; existing snapshots are kept"
    )
    parser.add_argument(
        "--rename", action="append", default=[], metavar="OLD=NEW",
        help="load the state of step OLD into step NEW; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--drop-state", action="append", default=[], metavar="STEP",
        help="discard the state of this step in the snapshot; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--allow-older", action="store_true",
        help="if the latest snapshot is damaged, begin with the one before",
    )  # fmt: skip
    parser.add_argument(
        "--no-snapshots", action="store_true", help="neither take snapshots nor begin with one"
    )
