"""Start a flow on workers (`run`), and control it while it runs (`Job`).

>>> from railgun import Flow, run
>>> from railgun.sinks.collect import Collect
>>> from railgun.sources.items import Items
>>> from railgun.testing.local_workers import SubprocessLauncher
>>> flow = Flow("totals")
>>> numbers = flow.source(Items(range(10)), name="numbers")
>>> numbers.key_by(lambda n: n % 2).reduce(lambda a, b: a + b).sink(Collect(), name="out")
>>> with run(flow, workers=2, launcher=SubprocessLauncher(), http=False) as job:
...     job.wait()
...     sorted(job.collected("out"))[-2:]
True
[20, 25]

Without a launcher, which is for tests, workers are Spark tasks. They run in the session that is given or active, or
else in a new session, which is stopped after the job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from railgun.engine.controller.controller import (
    Controller,
    Event,
    FlowFailedError,
    ForkedJobError,
    Settings,
    check_workers,
)
from railgun.engine.controller.launcher import Launcher
from railgun.engine.controller.state_queries import NoAnswerError, NoKeyError, NoStepError, state_of
from railgun.engine.controller.storekeeper import FinishedError, Snapshots, Storekeeper
from railgun.errors import ExitCode, RailgunError
from railgun.flows.errors import FlowError
from railgun.flows.flow import Flow
from railgun.flows.shipping import ship
from railgun.transport.registry import Entry, Registry

if TYPE_CHECKING:
    from railgun.engine.controller.http import Api
    from railgun.flows.plan import Plan
    from railgun.spark.initial import State
    from railgun.spark.session import DataFrame, SparkSession

__all__ = [
    "Event", "FinishedError", "FlowFailedError", "ForkedJobError", "Job", "JobError", "NoAnswerError", "NoKeyError",
    "NoStepError", "NotRescaledError", "NotSavedError", "Settings", "Snapshots", "run",
]  # fmt: skip

MIN_TOKEN_CHARACTERS = 16


class JobError(RailgunError):
    """A job cannot be started with these arguments."""

    exit_code = ExitCode.USAGE
    kind = "usage"


class NotSavedError(RailgunError):
    """A snapshot failed; the text says why."""


class NotRescaledError(RailgunError):
    """A rescale failed; the text says why."""


def run(
    flow: Flow,
    workers: int = 2,
    *,
    master: str | None = None,
    spark: SparkSession | None = None,
    launcher: Launcher | None = None,
    conf: Mapping[str, str] | None = None,
    settings: Settings | None = None,
    snapshots: Snapshots | str | os.PathLike[str] | None = None,
    initial_state: Mapping[str, DataFrame | State] | None = None,
    name: str | None = None,
    registry: Registry | str | os.PathLike[str] | None = None,
    http: bool = True,
    port: int = 0,
    token: str | None = None,
    by_value: Iterable[ModuleType] = (),
    watch: Callable[[Event], None] | None = None,
    begun: Callable[[Job], None] | None = None,
) -> Job:
    """Start a flow and return its `Job` while the workers are being launched.

    - `workers`: how many workers to start.
    - `master`: URL of a Spark master (default: local mode, inside this program). `spark`: an existing session. `conf`:
      settings that override Spark's.
    - `launcher`: starts workers without Spark, for tests. Give at most one of `master`, `spark` and `launcher`.
    - `settings`: timeouts and limits of the job.
    - `snapshots`: where to keep snapshots (a directory, or a URL that pyarrow opens), or a `Snapshots` with more
      options. A flow that has snapshots there goes on from the latest. Without snapshots, a flow that fails starts
      again from its sources.
    - `initial_state`: by step, the state of keys at the very beginning, from DataFrames with the columns `key` and
      `state`, or as a `State`. It becomes the first snapshot.
    - `name`: the name of the job (default: the flow's name). `registry`: where other programs find the job by name (a
      directory, default ~/.railgun/jobs).
    - `http`: whether to serve the HTTP API and enter the job in the registry. `port`, `token`: of the HTTP API, for
      clients that do not use the registry, such as Prometheus (default: a free port, a new token).
    - `by_value`: modules that workers cannot import; their functions and classes are sent along.
    - `watch`: called with every event. `begun`: called with the job as soon as it can be controlled, before Spark has
      started. If the job is stopped before that, from any thread, starting Spark is cancelled, and the returned job is
      over.

    Other programs can find, rescale and stop the job before this function returns. Errors in the flow or in these
    arguments are raised before anything is started.
    """
    if not isinstance(flow, Flow):
        raise JobError(f"run needs a Flow, not {flow!r}")
    settings = settings or Settings()
    check_workers(workers, settings.most_workers)
    _check_name(name)
    if token is not None and (len(token) < MIN_TOKEN_CHARACTERS or not token.isprintable()):
        raise JobError(f"a token has at least {MIN_TOKEN_CHARACTERS} printable characters")
    if sum(option is not None for option in (master, spark, launcher)) > 1:
        raise JobError("give at most one of master, spark and launcher: a job runs on one of them")
    plan = flow.plan()
    if plan.pushed and snapshots is None:
        source = next(iter(plan.pushed.values()))
        raise JobError(
            f"{source} acknowledges records once a snapshot holds them, so it needs snapshots: snapshots=..."
        )
    shipped = ship(flow, plan, by_value)
    if http and not isinstance(registry, Registry):
        registry = Registry(registry)
    job_name = name or flow.name
    if initial_state and snapshots is None:
        raise JobError(
            "initial state becomes the first snapshot of the flow, so it needs a place: snapshots=..."
        )
    with ExitStack() as stack:
        keeper = None
        if snapshots is not None:
            if not isinstance(snapshots, Snapshots):
                snapshots = Snapshots(os.fspath(snapshots))
            if initial_state:
                _begin_with(initial_state, plan, snapshots, job_name)
            hang_after_s = (settings or Settings()).hang_after
            keeper = Storekeeper(plan, snapshots, job_name, hang_after_s=hang_after_s)
            stack.callback(keeper.close)
        below = stack.enter_context(
            ExitStack()
        )  # closes what starts later, such as Spark, after the controller has ended
        controller = Controller(plan, shipped, launcher, workers, settings, job_name, keeper)
        stack.callback(controller.close)
        if keeper is not None:
            controller.when_over(keeper.release)
        controller.open()
        if watch is not None:
            controller.watch(watch)
        api = None
        if http:
            assert isinstance(registry, Registry)
            api = _serve(stack, controller, registry, port, token)
        job = Job(controller, api)
        if begun is not None:
            begun(job)
        if launcher is not None:
            controller.begin(launcher)
        elif launched := _on_spark(below, controller, workers, master, spark, conf):
            controller.begin(*launched)
        return job.opened(stack.pop_all())


def _begin_with(
    states: Mapping[str, DataFrame | State], plan: Plan, snapshots: Snapshots, job: str
) -> None:
    """Make the first snapshot from these states."""
    from railgun.spark.initial import write_initial_state

    if snapshots.begin is not None or snapshots.fresh:
        raise JobError(
            "a flow begins with initial state, or with a snapshot, or afresh: choose one"
        )
    write_initial_state(plan, states, os.fspath(snapshots.url), job)


def _check_name(name: str | None) -> None:
    if name is not None:
        try:
            Flow(name)
        except FlowError:
            raise JobError(
                f"a job's name is made of letters, digits, '-', '_' and '.', not {name!r}"
            ) from None


def _on_spark(
    stack: ExitStack,
    controller: Controller,
    workers: int,
    master: str | None,
    spark: SparkSession | None,
    conf: Mapping[str, str] | None,
) -> tuple[Launcher, str] | None:
    """Return a launcher on a Spark session, and the address at which workers reach this program.

    Return None if the job ends before Spark has started. Starting Spark takes a while, during which the job can be
    controlled.
    """
    # Imported here, so that jobs without Spark do not wait for the import.
    from railgun.spark.launcher import SparkLauncher
    from railgun.spark.session import Start, StartGivenUpError, driver_host, opened

    if spark is None:
        start = Start()
        controller.when_over(start.give_up)
        if controller.ended:
            return None
        master = master or "local[*]"
        starting = opened(
            controller.name, master, workers=workers, conf=dict(conf or {}), start=start
        )
        try:
            spark = stack.enter_context(starting)
        except StartGivenUpError:
            return None
    return SparkLauncher(spark, workers=workers), driver_host(spark)


def _serve(
    stack: ExitStack, controller: Controller, registry: Registry, port: int, token: str | None
) -> Api:
    """Serve the HTTP API, and enter the job in the registry."""
    from railgun.engine.controller.http import Api

    token = token or secrets.token_urlsafe(32)
    api = Api(controller, token, port=port)
    controller.call(api.start())
    stack.callback(lambda: controller.call(api.close()))
    entry = Entry.of_this_process(controller.name, api.url, token)
    registry.add(entry)
    stack.callback(registry.remove, entry)
    controller.when_over(lambda: registry.end(entry))
    return api


class Job:
    """A flow that runs. Leaving its `with` block ends the flow at once if it is still running."""

    def __init__(self, controller: Controller, api: Api | None) -> None:
        self._controller = controller
        self._api = api
        self._ending = ExitStack()
        self._changed = threading.Condition()
        controller.watch(self._notify)

    def opened(self, ending: ExitStack) -> Self:
        """Set what is to be closed with the job; `run` calls this."""
        self._ending = ending
        _OPEN_JOBS.add(self)
        return self

    def __repr__(self) -> str:
        return f"<Job {self.name!r}, {self._controller.shown}>"

    @property
    def name(self) -> str:
        """Return the name by which other programs find the job."""
        return self._controller.name

    @property
    def url(self) -> str | None:
        """Return the URL of its HTTP API, or None."""
        return self._api.url if self._api else None

    @property
    def token(self) -> str | None:
        """Return the token that its HTTP API requires, or None."""
        return self._api.token if self._api else None

    @property
    def over(self) -> bool:
        """Return whether the job has ended: its processes are gone, and its snapshots and its name are free for another
        job.
        """
        return self._controller.over

    def status(self) -> dict[str, Any]:
        """Return the status of the job, as plain data."""
        return self._controller.status()

    def events(self, after: int = 0) -> list[Event]:
        """Return the events after the event with the number `after`."""
        return self._controller.events(after)

    def collected(self, step: str) -> list[Any]:
        """Return the items that the `Collect` sink `step` has received so far."""
        return self._controller.collected(step)

    def scale(self, workers: int, *, wait: bool = False, timeout: float | None = None) -> None:
        """Ask for this number of workers; with `wait`, return when the rescale is done.

        A request that has not begun is replaced by the next one. Raises `WorkersError` for an invalid number, also for
        more workers than a local master has slots. With `wait` it raises `NotRescaledError` if the rescale fails or
        takes longer than `timeout` seconds: also if the flow failed and restarted instead, with whatever size.
        """
        after = self._controller.last_event
        self._controller.scale(workers)
        if wait:
            self._await_size(workers, timeout, after)

    def pin(self, key: Any, worker: int) -> None:
        """Assign a key to a worker, whatever its hash says."""
        self._controller.pin(key, worker)

    def snapshot(self, *, timeout: float | None = None) -> int:
        """Take a snapshot and return its number when it is committed. Raises `NotSavedError` if it fails."""
        after = self._controller.last_event
        before = self._controller.snapshot()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            status = self.status()
            for event in self.events(after):
                after = event.number
                if event.kind in ("snapshot", "snapshot-failed"):
                    number = int(event.data["snapshot"])
                    if number > before and event.kind == "snapshot":
                        return number
                    if number > before:
                        raise NotSavedError(event.text)
            if status["cause"]:
                raise NotSavedError(f"the flow is failed: {status['cause']}")
            if status["state"] == "finished":
                raise NotSavedError("the flow is finished")
            left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            if left <= 0:
                raise NotSavedError(f"no snapshot was committed within {timeout} s")
            with self._changed:
                self._changed.wait(left)

    def snapshots(self) -> list[dict[str, Any]]:
        """Return how each snapshot ended, newest first, as plain data."""
        return self._controller.attempts().result()

    def state(self, step: str, key: Any) -> Any:
        """Return a copy of the state that a step has of a key now. Raises `NoKeyError` if it has none.

        The copy is made between two records. The keys of a source are its parts, and their states its positions in
        them.
        """
        inquiries = self._controller.inquiries
        inquiries.check(step)
        return state_of(self._controller.call(inquiries.key(step, key, whole=True)))

    def stop(self, *, drain: bool = False, wait: bool = True, timeout: float | None = None) -> bool:
        """Stop the flow. Return whether it has ended within `timeout` seconds.

        With snapshots it takes a final snapshot, from which it goes on when it is run again. Without snapshots, or with
        `drain`, its sources end, and everything they have read is processed and written.
        """
        self._controller.stop(drain=drain)
        return self.wait(timeout) if wait else False

    def abort(self, why: str = "aborted") -> None:
        """End the flow at once, even in the middle of a rescale or a snapshot."""
        self._controller.abort(why)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the flow to end; return False if it does not within `timeout` seconds. Raises `FlowFailedError`."""
        return self._controller.wait(timeout)

    def close(self) -> None:
        """Close the job. A flow that still runs is ended at once.

        In a forked process this does nothing: the job belongs to the parent process.
        """
        _OPEN_JOBS.discard(self)
        if self._controller.is_forked:
            self._ending.pop_all()
            return
        # The flow ends before its API does, so that listeners receive its end.
        if not self._controller.over:
            with contextlib.suppress(RailgunError):
                self._controller.abort("the job was closed")
            with contextlib.suppress(FlowFailedError):
                self._controller.wait(5)
        self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------ waiting

    def _notify(self, event: Event) -> None:
        with self._changed:
            self._changed.notify_all()

    def _await_size(self, workers: int, timeout: float | None, after: int) -> None:
        """Wait for the rescale that was requested after the event `after`. Raises `NotRescaledError` if it failed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            status = self.status()
            if status["state"] not in ("starting", "rescaling"):
                break
            left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            if left <= 0:
                raise NotRescaledError(f"it did not come to {workers} workers within {timeout} s")
            with self._changed:
                self._changed.wait(left)  # at most a second, in case a notification was missed
        if status["cause"]:  # it has failed, though some of its processes may still be running
            raise FlowFailedError(status["cause"])
        ends = [e for e in self.events(after) if e.kind in ("rescaled", "not-rescaled")]
        if ends and ends[-1].kind == "not-rescaled":
            raise NotRescaledError(ends[-1].text)
        if status["size"] != workers:
            raise NotRescaledError(f"the flow is {status['state']} on {status['size']} workers")


_OPEN_JOBS: weakref.WeakSet[Job] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the jobs that are still open when the program ends."""
    for job in list(_OPEN_JOBS):
        with contextlib.suppress(Exception):
            job.close()
