"""`railgun run`: a flow in this terminal, until it ends or Ctrl-C stops it."""

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
DIRECTORY: Final = "railgun-snapshots"
NEED_SNAPSHOTS: Final = {
    "snapshots": "--snapshots", "every": "--every", "keep": "--keep", "begin": "--from", "fresh": "--fresh",
    "rename": "--rename", "drop_state": "--drop-state", "allow_older": "--allow-older",
}  # fmt: skip
Happenings = queue.SimpleQueue[Event | signal.Signals]


def execute(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Run a flow to its end."""
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
        asked = signals.started()
        told = job.status()["snapshots"]
        out.data(job={"name": job.name, "url": job.url, "snapshots": told})
        if not job.over:
            out.line(announced(told, options.master))
        return follow(job, happenings, out, asked)


def announced(told: dict[str, Any] | None, master: str | None) -> str:
    """Where snapshots are, and what the flow begins with."""
    if told is None:
        return "no snapshots: if it fails, it begins anew"
    begin = told["from"]
    if begin is None:
        begins = "begins afresh"
    else:
        elsewhere = "" if begin["where"] == told["where"] else f" of {begin['where']}"
        begins = f"goes on from snapshot {begin['snapshot']}{elsewhere}"
    text = f"snapshots every {told['every']:g} s in {told['where']}; {begins}"
    if master and not master.startswith("local") and "://" not in told["where"]:
        text += "\n(all machines of the cluster have to see this directory; --snapshots takes a URL, too)"
    return text


def snapshots_of(options: argparse.Namespace) -> Snapshots | None:
    """What was said about snapshots."""
    if options.no_snapshots:
        given = [typed for name, typed in NEED_SNAPSHOTS.items() if getattr(options, name)]
        if given:
            raise CommandError(USAGE, "usage", f"--no-snapshots does not go with {given[0]}")
        return None
    rename: dict[str, str] = {}
    for told in options.rename:
        old, equals, new = told.partition("=")
        if not equals or not old or not new:
            raise CommandError(USAGE, "usage", f"--rename takes OLD=NEW, not {told!r}")
        if rename.setdefault(old, new) != new:
            raise CommandError(USAGE, "usage", f"--rename: {old!r} cannot have two new names")
    snapshots = Snapshots(
        options.snapshots or DIRECTORY,
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


def follow(job: Job, happenings: Happenings, out: Output, asked: int = 0) -> int:
    """Tell what happens until it is over. Ctrl-C stops; a second one ends at once. `asked`: so often before."""
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
            _end(job, asked)
    try:
        while not job.wait(1.0):  # for processes to end; so long Ctrl-C still counts
            while not happenings.empty():
                if isinstance(happened := happenings.get(), Event):
                    out.event(asdict(happened))
                else:
                    asked += 1
                    _end(job, asked)
    except FlowFailedError as error:
        while not happenings.empty():  # a flow that has finished may fail as it closes its sinks
            if isinstance(happened := happenings.get(), Event):
                out.event(asdict(happened))
        if asked < 2:
            out.data(error={"kind": "flow-failed", "message": str(error)}, status=job.status())
        _tell_where(job, out)
        return INTERRUPTED if asked > 1 else FAILED
    out.data(status=job.status())
    if asked:
        _tell_where(job, out)
    return DONE


def _tell_where(job: Job, out: Output) -> None:
    """What the next run begins with."""
    told = job.status()["snapshots"]
    if told is not None and told["last"] is not None:
        out.line(f"run it again, and it goes on from snapshot {told['last']['snapshot']}")


def _end(job: Job, asked: int) -> None:
    if asked == 1:
        job.stop(wait=False)
    else:
        job.abort("interrupted")


class _Signals:
    """Ctrl-C and the like become things that happen, from before Spark is started until the job is closed.

    What they would interrupt is not made for it: PySpark's start would leave a JVM behind, Spark's own handler would
    kill all workers. While `run` starts the job, and nobody looks at what happens, a thread does what is asked, as soon
    as there is a job. A third signal interrupts whatever this program does.
    """

    def __init__(self, happenings: Happenings) -> None:
        self._happenings = happenings
        self._job: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._early: queue.SimpleQueue[int] = queue.SimpleQueue()  # which one it is; 0: no more
        self._asked = 0
        self._is_starting = True
        self._thread = threading.Thread(target=self._obey, name="railgun-signals", daemon=True)

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
        """There is a job that can be asked to end."""
        self._job.put(job)

    def started(self) -> int:
        """How often it was asked to end; from now on that is among what happens."""
        self._is_starting = False
        self._job.put(None)
        self._early.put(0)
        self._thread.join()
        return self._asked

    def _put(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1
        if self._asked > 2:
            raise KeyboardInterrupt
        if self._is_starting:
            self._early.put(self._asked)
        else:
            self._happenings.put(signal.Signals(number))

    def _obey(self) -> None:
        job = self._job.get()
        while job is not None and (asked := self._early.get()):
            _end(job, asked)


def settings_of(given: list[str]) -> dict[str, str]:
    """Settings of Spark, as they were typed."""
    conf = {}
    for setting in given:
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
