"""run: start a flow on workers; Job: what can be done with it then.

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

Without a launcher, which is for tests, workers are tasks of Spark: of the session that is given or active, or else of
one that is started for the job, and stopped after it.
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

SHORTEST_TOKEN = 16


class JobError(RailgunError):
    """A job that cannot be started like that."""

    exit_code = ExitCode.USAGE
    kind = "usage"


class NotSavedError(RailgunError):
    """A snapshot did not come about; the text says why."""


class NotRescaledError(RailgunError):
    """A rescale did not come about; the text says why."""


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
    """Start a flow; returns when its workers are being launched. Others find it, and can rescale or stop it, before.

    `master` is a Spark master's URL (default: local mode, inside this program), `spark` a session there is already,
    `conf` goes over Spark's settings. `snapshots` is where they are kept (a directory, or a URL that pyarrow opens), or
    `Snapshots` to say more; a flow that has some there goes on from the latest. Without, a flow that fails begins anew.
    `initial_state`: what the keys of steps have at the very beginning, from DataFrames with the columns `key` and
    `state`, or as `State` says; it becomes the first snapshot. `name` is by what the job is found (default: the
    flow's name), in `registry` (a directory, default ~/.railgun/jobs). `http=False` leaves the HTTP API out, and
    with it the registry; `port` and `token` (default: a free one, a new one) are for those who look without the
    registry, such as Prometheus. `by_value` names modules the workers cannot import: their functions and classes
    are sent along. `watch` is called for every event, `begun` with the job, as soon as it can be talked to: if it is
    stopped before Spark is up, from whatever thread, Spark is given up, and the job that is returned is over.

    What is wrong with the flow or these arguments is told before anything is started.
    """
    if not isinstance(flow, Flow):
        raise JobError(f"run needs a Flow, not {flow!r}")
    settings = settings or Settings()
    check_workers(workers, settings.most_workers)
    _check_name(name)
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isprintable()):
        raise JobError(f"a token has at least {SHORTEST_TOKEN} printable characters")
    if sum(given is not None for given in (master, spark, launcher)) > 1:
        raise JobError("a job runs on a master, on a session or by a launcher: give one of them")
    plan = flow.plan()
    if plan.pushed and snapshots is None:
        source = next(iter(plan.pushed.values()))
        raise JobError(
            f"{source} acknowledges what is in a snapshot, so there have to be some: snapshots=..."
        )
    shipped = ship(flow, plan, by_value)
    if http and not isinstance(registry, Registry):
        registry = Registry(registry)
    job_name = name or flow.name
    if initial_state and snapshots is None:
        raise JobError(
            "initial state becomes the first snapshot of a flow: say where, snapshots=..."
        )
    with ExitStack() as stack:
        keeper = None
        if snapshots is not None:
            if not isinstance(snapshots, Snapshots):
                snapshots = Snapshots(os.fspath(snapshots))
            if initial_state:
                _begin_with(initial_state, plan, snapshots, job_name)
            patience_s = (settings or Settings()).hang_after
            keeper = Storekeeper(plan, snapshots, job_name, hang_after_s=patience_s)
            stack.callback(keeper.close)
        below = stack.enter_context(
            ExitStack()
        )  # what is started later, and ends after the controller
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
        elif found := _on_spark(below, controller, workers, master, spark, conf):
            controller.begin(*found)
        return job.opened(stack.pop_all())


def _begin_with(
    states: Mapping[str, DataFrame | State], plan: Plan, snapshots: Snapshots, job: str
) -> None:
    """Make the first snapshot of these states."""
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
    """A launcher on a session, and the address workers find this program at; None if the job is over before.

    To start Spark takes a while: others see the job meanwhile, and can talk to it.
    """
    # Here and not above: whoever does not run on Spark does not wait for it to be imported.
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
    """Serve the HTTP API, and tell others where."""
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
    """A flow that runs. Leaving its `with` block ends it, at once if it has not ended."""

    def __init__(self, controller: Controller, api: Api | None) -> None:
        self._controller = controller
        self._api = api
        self._ending = ExitStack()
        self._changed = threading.Condition()
        controller.watch(self._notify)

    def opened(self, ending: ExitStack) -> Self:
        """Have what it began let go of when it is closed; `run` does this."""
        self._ending = ending
        _LEFT.add(self)
        return self

    def __repr__(self) -> str:
        return f"<Job {self.name!r}, {self._controller.shown}>"

    @property
    def name(self) -> str:
        """By what it is found."""
        return self._controller.name

    @property
    def url(self) -> str | None:
        """Where its HTTP API is."""
        return self._api.url if self._api else None

    @property
    def token(self) -> str | None:
        """What its HTTP API asks for."""
        return self._api.token if self._api else None

    @property
    def over(self) -> bool:
        """Whether it has ended: no process is left, and another job may have its snapshots and its name."""
        return self._controller.over

    def status(self) -> dict[str, Any]:
        """What there is to know, as plain data."""
        return self._controller.status()

    def events(self, after: int = 0) -> list[Event]:
        """What happened, after the event of this number."""
        return self._controller.events(after)

    def collected(self, step: str) -> list[Any]:
        """What a `Collect` sink has got so far."""
        return self._controller.collected(step)

    def scale(self, workers: int, *, wait: bool = False, timeout: float | None = None) -> None:
        """Ask for this number of workers; with `wait` it returns when the rescale is over.

        A request that has not begun is replaced by the next one. Raises `WorkersError` for a number that cannot be,
        also for more workers than a local master has slots; and with `wait` `NotRescaledError` if the rescale does not
        come about: also if the flow failed and started again instead, at whatever size.
        """
        after = self._controller.last_event
        self._controller.scale(workers)
        if wait:
            self._await_size(workers, timeout, after)

    def pin(self, key: Any, worker: int) -> None:
        """Give a key to a worker, whatever its hash says."""
        self._controller.pin(key, worker)

    def snapshot(self, *, timeout: float | None = None) -> int:
        """Take a snapshot now; its number when it is committed. Raises `NotSavedError` if it is not."""
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
        """What became of each snapshot, newest first, as plain data."""
        return self._controller.attempts().result()

    def state(self, step: str, key: Any) -> Any:
        """The state that a step has of a key now. Raises `NoKeyError` if it has none.

        What comes is a copy, made between two records. Of a source the keys are its parts, the states where it is in
        them.
        """
        inquiries = self._controller.inquiries
        inquiries.check(step)
        return state_of(self._controller.call(inquiries.key(step, key, whole=True)))

    def stop(self, *, drain: bool = False, wait: bool = True, timeout: float | None = None) -> bool:
        """Let the flow end. False: not in time.

        With snapshots it ends with a last one, and goes on from there when it is run again. Without them, or with
        `drain`, its sources end, and what was read is written.
        """
        self._controller.stop(drain=drain)
        return self.wait(timeout) if wait else False

    def abort(self, why: str = "aborted") -> None:
        """End at once, whatever is under way."""
        self._controller.abort(why)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False if it has not come in time. Raises `FlowFailedError` if the flow failed."""
        return self._controller.wait(timeout)

    def close(self) -> None:
        """Let go of everything; a flow that still runs is ended at once.

        In a process that was forked from the one that started the job this does nothing: the job is the other's.
        """
        _LEFT.discard(self)
        if self._controller.is_forked:
            self._ending.pop_all()
            return
        # The flow ends before its API does, so that those who listen hear of it.
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
        """Wait for the rescale that was asked for after an event; raise if it did not come about."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            status = self.status()
            if status["state"] not in ("starting", "rescaling"):
                break
            left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            if left <= 0:
                raise NotRescaledError(f"it did not come to {workers} workers within {timeout} s")
            with self._changed:
                self._changed.wait(left)  # looks once a second, should it have missed a word
        if status["cause"]:  # it has failed, though perhaps not all of its processes are gone
            raise FlowFailedError(status["cause"])
        ends = [e for e in self.events(after) if e.kind in ("rescaled", "not-rescaled")]
        if ends and ends[-1].kind == "not-rescaled":
            raise NotRescaledError(ends[-1].text)
        if status["size"] != workers:
            raise NotRescaledError(f"the flow is {status['state']} on {status['size']} workers")


_LEFT: weakref.WeakSet[Job] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Nothing is left running when the program ends."""
    for job in list(_LEFT):
        with contextlib.suppress(Exception):
            job.close()
