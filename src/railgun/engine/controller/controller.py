"""Run a flow in the program that started it: the controller drives the `Lifecycle` machine.

It runs in a thread of its own, with an event loop. Workers connect to it and receive orders. The program itself uses
its methods, from any thread; other programs use its HTTP API (`http.py`).

Its duties towards the machine:

1. Every event goes to the machine when it happens, and the resulting orders are carried out before the next event: an
   order that is carried out late could reach a worker that has been replaced.
2. An order that cannot be carried out (a launch that raises, a worker that cannot be reached) becomes an event of its
   own, never an exception in the middle of orders.
3. A launched process belongs to the launcher until it has ended; the machine is told of the end exactly once.

A process that is forked from the program has a useless copy of all this: its requests are refused (`ForkedJobError`),
and its connections are closed, so it can neither disturb the workers nor keep them alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from railgun.engine.controller.launcher import Launcher
from railgun.engine.controller.ledger import Ledger
from railgun.engine.controller.metrics import Totals, nothing_moved, progress
from railgun.engine.controller.state_queries import Inquiries
from railgun.engine.controller.storekeeper import Storekeeper, summary_of
from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.protocol.lifecycle.machine import Lifecycle, LifecycleError, Member
from railgun.engine.protocol.lifecycle.snapshots import State
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.worker import breadcrumb
from railgun.engine.worker import control_messages as control
from railgun.engine.worker.liveness import (
    BEAT,
    IN_STEP,
    MAX_STUCK_CHARACTERS,
    MAX_WAITS_CHARACTERS,
    OTHER_STUCK,
    STUCK,
)
from railgun.engine.worker.spec import WorkerSpec
from railgun.errors import ExitCode, RailgunError
from railgun.flows.plan import Plan
from railgun.hashing import key_hash
from railgun.transport.columns import DecodingError
from railgun.transport.connection import Connection, Messages
from railgun.transport.hello import HelloError
from railgun.transport.listener import Listener

TICK_S: Final = 0.1
# Least time between snapshots that are taken because a stream waits for one.
SNAPSHOT_GAP_S: Final = 1.0
MAX_EVENTS: Final = 200  # that are kept
SLOTS_WITHIN_S: Final = 3.0  # a worker that waits for a slot for longer is reported
SLOTS_EVERY_S: Final = 1.0  # between two checks whether workers wait for slots
LAST_REPORTS_S: Final = 1.0  # to wait for reports that a process sent before it ended
HUNG: Final = "frozen, or in a function that does not return"
HUNG_LOADING: Final = (
    "frozen, or loading the flow, which imports its modules, does not come to an end"
)
R = TypeVar("R")


class FlowFailedError(RailgunError):
    """The flow has failed; the text says why."""


class WorkersError(RailgunError):
    """A number of workers, or the number of a worker, is invalid."""

    exit_code = ExitCode.USAGE
    kind = "usage"


class ListenError(RailgunError):
    """The controller cannot listen on a port."""


class ForkedJobError(RailgunError):
    """The job belongs to the process that this one was forked from."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the flow, for people."""

    number: int
    at: float
    kind: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Settings:
    """Timeouts and limits of a job."""

    host: str = "127.0.0.1"
    """The address at which workers reach the controller."""
    hang_after: float = 30.0
    """Seconds after which a worker is given up that is frozen, or does not return from one call of a function.
    Importing a module and unpickling the flow do not count, for up to ten minutes."""
    restarts: int = 5
    """Number of failures within `restarts_within` after which the flow still restarts. All workers lost from one
    generation count as one failure."""
    restarts_within: float = 300.0
    """Seconds after which a failure is forgotten."""
    start_within: float = 120.0
    """Seconds after which a worker is given up that has a slot but has not connected, or that loads the flow without a
    sign of life."""
    most_workers: int = 1024
    """Largest number of workers; a typing mistake should not start a million processes."""


@dataclass(slots=True)
class WorkerProcess:
    """The controller's view of a worker's process."""

    spec: WorkerSpec
    connection: Connection | None = None
    pulse: Connection | None = None
    unread: bytes = b""
    """The incomplete last line of its pulse."""
    waits: str = ""
    """The outages that its sources and sinks wait for; empty if there are none."""
    messages: Messages = field(default_factory=Messages)
    who: dict[str, Any] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    launched: float = field(default_factory=time.monotonic)
    loaded: bool = False
    """Whether it has reported that it has loaded the flow, or cannot load it."""
    stuck: str = ""
    """Position of its main thread, if that has been in one call for a while."""
    other_stuck: str = ""
    """Position of another thread, such as one in which a sink commits, if that has been in one call for a while."""
    other_stuck_since: float = 0.0
    reported_waiting: bool = False
    """Whether an event was emitted because it waits for a slot."""
    given_up: bool = False
    ended: str = ""
    """Why its process has ended, while the controller waits for its last reports."""
    metrics: dict[str, Any] = field(default_factory=dict)
    doors: dict[str, o.Address] = field(default_factory=dict)
    """The addresses where it listens for connectors, by step."""


class Controller:
    """Runs one flow: launches its workers, drives its lifecycle machine, and answers requests."""

    def __init__(
        self,
        plan: Plan,
        plan_bytes: bytes,
        launcher: Launcher | None,
        workers: int,
        settings: Settings | None = None,
        name: str = "",
        storekeeper: Storekeeper | None = None,
    ) -> None:
        self.plan = plan
        self.name = name or plan.flow
        self.settings = settings or Settings()
        self.started = time.time()
        self._launcher = launcher
        self._secret = secrets.token_bytes(32)
        self.storekeeper = storekeeper
        saving, generation, where = None, 0, None
        if storekeeper is not None:
            saving, generation = storekeeper.saving, storekeeper.generation
            where = (storekeeper.url, self.name)
        self._setup = control.Setup(plan_bytes, where)
        self.lifecycle = Lifecycle(
            len(plan.stages),
            Placement.of(range(workers)),
            restarts=self.settings.restarts,
            window=int(self.settings.restarts_within * 1_000_000),
            saving=saving,
            generation=generation,
        )
        self.totals = Totals()
        self.inquiries = Inquiries(plan, self.lifecycle, self._send_to)
        self._processes: dict[tuple[Worker, int], WorkerProcess] = {}
        self._ledger = Ledger(self.lifecycle, storekeeper, plan)
        self._move_figures = nothing_moved()  # of the present or the last rescale
        self._moved_since = 0.0
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._watchers: list[Callable[[Event], None]] = []
        self._port = 0
        self._listener = Listener(self._answer)
        self._slots_checked = 0.0
        self._warned: set[str] = set()
        self._lost_elsewhere: dict[Worker, str] = {}  # why workers on other machines were lost
        self._hastened = 0.0  # when a snapshot was last taken because a stream waited for one
        self._hastening: asyncio.TimerHandle | None = None
        self._over = threading.Event()
        self._endings: list[Callable[[], None]] = []
        self._ending = False
        self._closing = threading.Lock()
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        _controllers.add(self)
        self._thread = threading.Thread(
            target=self._run, name=f"railgun-{self.name}-controller", daemon=True
        )

    # ------------------------------------------------------------ for the program

    def open(self) -> None:
        """Start the controller's thread, which answers requests from now on."""
        self._thread.start()

    def begin(self, launcher: Launcher | None = None, host: str | None = None) -> None:
        """Listen for workers, and launch them.

        `launcher` and `host` (where workers reach this program) replace those given to the constructor: a program that
        needs a while to start a cluster opens the controller before. Raises `ListenError`.
        """
        self._launcher = launcher or self._launcher
        if host is not None:
            self.settings = replace(self.settings, host=host)
        self.call(self._listen())
        self._do(self._start)

    def _start(self) -> list[o.Order]:
        life = self.lifecycle
        if life.wanted is not None:  # requested before the number of slots was known
            try:
                self.launcher.refuse(len(life.wanted.workers))
            except RailgunError as error:
                life.wanted = None
                self._happened(
                    "not-rescaled",
                    f"{error}; the flow starts with its first number of workers",
                )
        return life.start(_now())

    def when_over(self, ending: Callable[[], None]) -> None:
        """Call `ending` in a thread of its own when the flow has ended and no process is left.

        `wait` returns after that.
        """
        self._endings.append(ending)

    def scale(self, workers: int) -> None:
        """Ask for this number of workers; return when the request is accepted. Raises `WorkersError`."""
        check_workers(workers, self.settings.most_workers)
        if self._launcher is not None:
            # Otherwise `begin` checks the number once there is a launcher.
            try:
                self._launcher.refuse(workers)
            except RailgunError as error:
                raise WorkersError(str(error)) from error
        self._do(lambda: self._scale(range(workers)))

    def pin(self, key: Any, worker: Worker) -> None:
        """Assign a key to a worker, whatever its hash says. Raises `WorkersError`."""
        number = key_hash(key)

        def pinned() -> list[o.Order]:
            goal = self._target_placement()
            if isinstance(worker, bool) or worker not in goal.workers:
                workers = ", ".join(map(str, goal.workers))
                raise WorkersError(f"there is no worker {worker!r}: there are {workers}")
            keys = {**dict(goal.keys), number: worker}
            placement = Placement.of(goal.workers, slots=dict(goal.slots), keys=keys)
            return self.lifecycle.scale(placement, _now())

        self._do(pinned)

    def stop(self, *, drain: bool = False) -> None:
        """Stop the flow, with a final snapshot; with `drain`, or without snapshots, by ending its sources."""
        self._do(lambda: self.lifecycle.stop(_now(), drain=drain))

    def snapshot(self) -> int:
        """Ask for a snapshot. Return the number of the last snapshot that began before."""

        def ask() -> int:
            last = self.lifecycle.saving.number
            self._obey(self.lifecycle.snapshot(_now()))
            return last

        return self._ask(ask)

    def attempts(self) -> Future[list[dict[str, Any]]]:
        """Return how each snapshot ended, newest first; another thread reads them from the store."""
        self._check_process()
        if self.storekeeper is None:
            raise LifecycleError(
                "the flow takes no snapshots: it was started without a place for them"
            )
        return self.storekeeper.attempts()

    def abort(self, why: str) -> None:
        """End the flow at once."""
        self._do(lambda: self.lifecycle.abort(why, _now()))

    @property
    def launcher(self) -> Launcher:
        """Return the launcher; there must be one when workers are launched."""
        assert self._launcher is not None
        return self._launcher

    @property
    def over(self) -> bool:
        """Return whether the flow has ended, no process is left, and its snapshots and name are free for other jobs."""
        return self._over.is_set()

    @property
    def ended(self) -> bool:
        """Return whether the flow has ended and no process is left; its resources may still be in use."""
        return self.lifecycle.gone

    @property
    def shown(self) -> State:
        """Return the state for people: `stopping` until everything the flow used is free for another job."""
        if self.lifecycle.over and not self.over:
            return "stopping"
        return self.lifecycle.shown

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the flow to end; return False if it does not within `timeout` seconds. Raises `FlowFailedError`."""
        self._check_process()
        if not self._over.wait(timeout):
            return False
        if self.lifecycle.state == "failed":
            raise FlowFailedError(self.lifecycle.cause)
        return True

    def status(self) -> dict[str, Any]:
        """Return the status of the flow, as plain data."""
        return self._ask(self._status)

    def collected(self, step: str) -> list[Any]:
        """Return the items that the `Collect` sink `step` has received so far."""
        return self._ask(lambda: self._ledger.collected.items(step))

    @property
    def last_event(self) -> int:
        """Return the number of the last event."""
        return self._ask(lambda: self._events[-1].number if self._events else 0)

    def events(self, after: int = 0) -> list[Event]:
        """Return the kept events after the event with the number `after`."""
        return self._ask(lambda: [event for event in self._events if event.number > after])

    def watch(self, watcher: Callable[[Event], None]) -> None:
        """Call `watcher` in the controller's thread with every event from now on."""
        self._ask(lambda: self._watchers.append(watcher))

    def close(self) -> None:
        """End everything that is left, at once. In a forked process this does nothing."""
        if self.is_forked:
            return
        with self._closing:
            if self._thread.is_alive():
                if not self._over.is_set():
                    self.abort("the program that started it ends")
                    self._over.wait(5)
                if self._launcher is not None:
                    self._launcher.close()
                self._over.wait(5)
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(5)
            else:
                if self._launcher is not None:
                    self._launcher.close()
                self._loop.close()

    @property
    def is_forked(self) -> bool:
        """Return whether this process was forked from the controller's process, and has only a copy of it."""
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        """Raise `ForkedJobError` in a forked process."""
        if self.is_forked:
            raise ForkedJobError(
                f"the job {self.name!r} belongs to process {self._pid}, from which this one was forked: "
                "ask it there, or by the command line or the HTTP API"
            )

    def leave_to_parent(self) -> None:
        """In a forked process, close all connections, which stay open in the parent."""
        null_device = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        registered = self._selector.get_map() or {}  # None, if the loop has been closed
        for key in list(registered.values()):
            with contextlib.suppress(OSError):
                os.dup2(
                    null_device, key.fd, inheritable=False
                )  # its owner may still close this number
        os.close(null_device)

    def call(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine in the controller's loop, and return its result."""
        if self.is_forked:
            coroutine.close()
        self._check_process()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _ask(self, question: Callable[[], R]) -> R:
        """Call a function in the controller's thread, and return its result."""
        self._check_process()
        if threading.current_thread() is self._thread:
            return question()
        answer: Future[R] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:  # the loop has ended
            return question()
        while not answer.done() and self._thread.is_alive():
            wait([answer], timeout=1)
        return answer.result() if answer.done() else question()

    def _do(self, decide: Callable[[], Sequence[o.Order]]) -> None:
        self._ask(lambda: self._obey(decide()))

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._close_connections())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _close_connections(self) -> None:
        await self._listener.close()
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await asyncio.sleep(0)  # the loop closes sockets in its next iteration

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._port = await self._listener.open(self.settings.host, 0)
        except OSError as error:
            raise ListenError(f"cannot listen at {self.settings.host}: {error}") from error
        loop.call_later(TICK_S, self._tick)

    def _answer(self) -> Connection:
        return Connection(self._secret, self._accept_worker, self._received, self._lost)

    def _tick(self) -> None:
        self._loop.call_later(self._until_due(), self._tick)
        now = time.monotonic()
        for process in list(self._processes.values()):
            silent = now - process.heard
            if process.connection is not None:
                if silent > self._hang_after(process):
                    where = f": {process.stuck}" if process.stuck else ""
                    hung = HUNG if process.loaded else HUNG_LOADING
                    self._give_up(process, f"no sign of life for {silent:.0f} s ({hung}){where}")
                elif (
                    process.other_stuck
                    and now - process.other_stuck_since > self.settings.hang_after
                ):
                    stuck = now - process.other_stuck_since
                    self._give_up(
                        process, f"a call has not returned for {stuck:.0f} s: {process.other_stuck}"
                    )
            elif silent > self.settings.start_within and self._is_late(process):
                self._give_up(process, f"it did not call within {silent:.0f} s")
        if now >= self._slots_checked + SLOTS_EVERY_S:
            self._slots_checked = now
            self._check_slots()
        self._obey(self.lifecycle.tick(_now()))

    def _hang_after(self, process: WorkerProcess) -> float:
        """Return the seconds of silence after which a worker is given up, longer while it loads the flow."""
        settings = self.settings
        if process.loaded:
            return settings.hang_after
        return max(settings.hang_after, settings.start_within)

    def _check_slots(self) -> None:
        """Emit one event for the workers that have waited for a slot of the cluster for a while."""
        long_ago = time.monotonic() - SLOTS_WITHIN_S
        waiting = [
            process
            for process in self._processes.values()
            if not process.reported_waiting
            and not process.who
            and not process.given_up
            and process.launched <= long_ago
            and self.launcher.pending(process.spec)
        ]
        for process in waiting:
            process.reported_waiting = True
        if waiting:
            numbers = sorted(process.spec.worker for process in waiting)
            who = f"worker{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            wait = "wait for slots" if len(numbers) > 1 else "waits for a slot"
            self._happened(
                "waiting-for-slots", f"{who} {wait}: the cluster has no room for more tasks now"
            )

    def _until_due(self) -> float:
        """Return the seconds until the machine's next tick: a snapshot begins when it is due."""
        saving = self.lifecycle.saving
        if saving.due is None or saving.busy:
            return TICK_S
        return min(TICK_S, max(0.0, (saving.due - _now()) / 1e6) or TICK_S)

    def _is_late(self, process: WorkerProcess) -> bool:
        """Return whether a worker should have connected by now: it has not, and does not wait for a slot."""
        if process.who or process.given_up:
            return False
        if self.launcher.pending(process.spec):
            process.heard = time.monotonic()
            return False
        return True

    def _give_up(self, process: WorkerProcess, why: str) -> None:
        """End a process that cannot be reached, and handle its worker as lost."""
        connection, process.connection = process.connection, None
        process.given_up = True
        if connection is not None:
            connection.close()
        self._cancel(process.spec)
        self._is_down(process, why)

    def _is_down(self, process: WorkerProcess, why: str) -> None:
        """Tell the machine that a worker is lost. One that was leaving may not have finished that."""
        worker, incarnation = process.spec.worker, process.spec.incarnation
        crumb = breadcrumb.read(process.who)
        member = self.lifecycle.members.get(worker)
        if member is not None and member.incarnation == incarnation and member.leaving:
            self._report_lost_leaving(process, why, crumb)
        else:
            why = self._with_breadcrumb(process, why, crumb)
        self._obey(self.lifecycle.down(worker, incarnation, why, _now()))

    def _report_lost_leaving(self, process: WorkerProcess, why: str, crumb: str) -> None:
        """Report a leaving worker that ended inside user code: while closing a source or a sink."""
        if not crumb and not (process.given_up and IN_STEP in why):
            return  # its process has ended as expected: the slow call before has returned
        text = self._with_breadcrumb(process, why, crumb)
        self._obey(self.lifecycle.lost_leaving(process.spec.worker, text, _now()))

    def _with_breadcrumb(self, process: WorkerProcess, why: str, crumb: str) -> str:
        """Return `why` with the user code that a worker was in when it was lost, unless it says so already.

        `crumb`: the text of its breadcrumb.
        """
        earlier = self._lost_elsewhere.pop(process.spec.worker, "")
        if not crumb and earlier:  # it was on another machine
            crumb = f"the previous time, {earlier}"
        is_included = any(where and where in why for where in (process.stuck, process.other_stuck))
        return f"{why}; {crumb}" if crumb and not is_included else why

    def _scale(self, workers: Sequence[Worker]) -> list[o.Order]:
        return self.lifecycle.scale(self._target_placement().resized(workers), _now())

    def _target_placement(self) -> Placement:
        """Return the placement after all requests have been carried out."""
        life = self.lifecycle
        coordinator = life.coordinator
        target = coordinator.target if coordinator is not None else None
        return life.wanted or target or life.placement

    # ------------------------------------------------------------ orders

    def _obey(self, orders: Sequence[o.Order]) -> None:
        for order in orders:
            match order:
                case o.Launch(worker, incarnation):
                    self._launch(worker, incarnation)
                case o.Cancel(worker, incarnation):
                    self._cancel(self._processes[worker, incarnation].spec)
                case o.To(worker, worker_order):
                    self._send(worker, worker_order)
                case o.Happened(kind, text):
                    self._happened(kind, text)
                case o.Record() | o.Write() | o.GiveUp():
                    self._ledger.keep(order, self._soon, _now)
        if self.lifecycle.gone and not self._ending:
            self._ending = True
            threading.Thread(target=self._end, name=f"railgun-{self.name}-end", daemon=True).start()

    def _end(self) -> None:
        """Call the functions given to `when_over`; then the flow is over."""
        for ending in self._endings:
            try:
                ending()
            except Exception as error:
                text = f"a cleanup after the end of the flow failed: {error}"
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._happened, "trouble", text)
        self._over.set()

    def _soon(self, then: Callable[[], list[o.Order]]) -> None:
        """From any thread: pass an event to the machine, and carry out its orders."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, so the event does not matter
            self._loop.call_soon_threadsafe(lambda: self._obey(then()))

    def _send_to(self, worker: Worker, message: control.Order) -> bool:
        """Send a message to a worker. Return False if it is not connected."""
        member = self.lifecycle.members.get(worker)
        process = None if member is None else self._processes.get((worker, member.incarnation))
        if process is None or process.connection is None:
            return False
        process.connection.send(Messages.encode(message))
        return True

    def _launch(self, worker: Worker, incarnation: int) -> None:
        spec = WorkerSpec(
            self.name, worker, incarnation, self.settings.host, self._port, self._secret
        )
        self._processes[worker, incarnation] = WorkerProcess(spec)
        try:
            self.launcher.launch(spec, self._process_ended)
        except Exception as error:
            self._process_ended(spec, f"it cannot be launched: {error}")

    def _cancel(self, spec: WorkerSpec) -> None:
        try:
            self.launcher.cancel(spec)
        except Exception as error:
            self._happened("trouble", f"worker {spec.worker} cannot be ended by force: {error}")

    def _process_ended(self, spec: WorkerSpec, error: str | None) -> None:
        """From any thread: handle the end of a worker's process."""
        why = error or "its process ended"
        with contextlib.suppress(RuntimeError):  # the loop has ended, so the event does not matter
            self._loop.call_soon_threadsafe(self._down, spec.worker, spec.incarnation, why)

    def _down(self, worker: Worker, incarnation: int, why: str) -> None:
        process = self._processes.get((worker, incarnation))
        if process is None:
            self._obey(self.lifecycle.down(worker, incarnation, why, _now()))
            return
        if process.connection is not None and not process.ended:
            # Its last reports may not have been read yet. Its connection closes after them.
            process.ended = why
            self._loop.call_later(LAST_REPORTS_S, self._down, worker, incarnation, why)
            return
        del self._processes[worker, incarnation]
        self.inquiries.lost(worker)
        self._is_down(process, why)

    def _send(self, worker: Worker, order: o.WorkerOrder) -> None:
        process = self._processes.get((worker, self.lifecycle.members[worker].incarnation))
        if isinstance(order, o.EndSources):
            self._send_alternatives(worker)
        for message in self._ledger.sent(worker, order):
            if process is not None and process.connection is not None:
                process.connection.send(Messages.encode(message))

    # ------------------------------------------------------------ workers

    def _accept_worker(self, connection: Connection) -> None:
        who = connection.who
        worker, incarnation = who.get("worker"), who.get("incarnation")
        host, port = who.get("host"), who.get("port")
        if not isinstance(worker, int) or not isinstance(incarnation, int):
            raise HelloError("the hello of a worker has no worker number and incarnation")
        if who.get("pulse"):
            self._accept_pulse(connection, worker, incarnation)
            return
        if not isinstance(host, str) or not isinstance(port, int):
            raise HelloError(f"the hello of worker {worker} has no host and port")
        process = self._processes.get((worker, incarnation))
        if process is None or process.who or not self.lifecycle.expects(worker, incarnation):
            raise HelloError(f"worker {worker}, incarnation {incarnation}, is not expected")
        process.connection, process.who, process.heard = connection, who, time.monotonic()
        connection.tag = (worker, incarnation)
        # The hello has to be answered before the first order.
        self._loop.call_soon(self._welcome, connection)

    def _accept_pulse(self, connection: Connection, worker: Worker, incarnation: int) -> None:
        """Accept the pulse connection of a worker that is connected."""
        process = self._processes.get((worker, incarnation))
        if process is None or process.connection is None or process.pulse is not None:
            raise HelloError(f"worker {worker}, incarnation {incarnation}, is not expected")
        process.pulse = connection
        connection.tag = (worker, incarnation)

    def _welcome(self, connection: Connection) -> None:
        worker, incarnation = connection.tag
        if self.lifecycle.expects(worker, incarnation):
            careful = self.lifecycle.failed_times > 0
            connection.send(Messages.encode(replace(self._setup, careful=careful)))
        else:
            connection.close()

    def _loaded(self, worker: Worker, process: WorkerProcess, report: control.Loaded) -> None:
        """Handle a worker's report that it has loaded the flow, and is a member now, or why it cannot load it.

        A passing error is retried when a flow that has run before restarts; at the first start it is reported.
        """
        incarnation = process.spec.incarnation
        if not self.lifecycle.expects(worker, incarnation):
            return
        if report.error is None:
            address = (process.who["host"], process.who["port"])
            self._obey(self.lifecycle.up(worker, incarnation, address, _now()))
        elif report.passing and self.lifecycle.failed_times:
            self._give_up(process, report.error)
        else:
            self._obey(self.lifecycle.cannot_load(worker, report.error, _now()))

    def _received(self, connection: Connection, data: bytes) -> None:
        worker, incarnation = connection.tag
        process = self._processes.get((worker, incarnation))
        if process is None or connection not in (process.connection, process.pulse):
            return
        if connection is process.pulse:
            self._receive_pulse(worker, process, data)
            return
        process.heard, process.stuck = time.monotonic(), ""
        try:
            for message in process.messages.feed(data):
                self._handle_report(worker, process, message)
        except (DecodingError, RailgunError) as error:
            connection.close(error)

    def _receive_pulse(self, worker: Worker, process: WorkerProcess, data: bytes) -> None:
        """Handle heartbeats of a worker, and lines about outages and hanging calls (`engine.worker.liveness`)."""
        if BEAT in data:
            process.heard, process.stuck = time.monotonic(), ""
        *lines, rest = (process.unread + data.replace(BEAT, b"")).split(b"\n")
        process.unread = rest[-4 * (MAX_WAITS_CHARACTERS + MAX_STUCK_CHARACTERS) :]
        for line in lines:
            if line.startswith(STUCK):
                process.stuck = line[1:].decode(errors="replace").replace("\r", "\n")
                continue
            if line.startswith(OTHER_STUCK):
                if not process.other_stuck:
                    process.other_stuck_since = time.monotonic()
                process.other_stuck = line[1:].decode(errors="replace").replace("\r", "\n")
                continue
            process.heard = time.monotonic()
            waits = line.decode(errors="replace")
            if waits:
                self._happened("waiting", f"worker {worker} waits for {waits}")
            elif process.waits:
                self._happened("goes-on", f"worker {worker} goes on")
            process.waits = waits

    def _handle_report(
        self, worker: Worker, process: WorkerProcess, message: control.FromWorker
    ) -> None:
        match message:
            case control.Loaded():
                process.loaded = True
                process.doors = dict(message.doors)
                self._loaded(worker, process, message)
            case control.Asked() | control.Relinquished():
                self._fed(worker, process, message)
            case control.Hastened(generation):
                if generation == self.lifecycle.generation:
                    self._hasten()
            case control.Beat(generation, metrics):
                if generation == self.lifecycle.generation:
                    process.metrics = metrics
                    self.totals.see(worker, (process.spec.incarnation, generation), metrics)
            case control.Found():
                self.inquiries.answered(message)
            case control.LeftBehind(lost, incarnation, text):
                self._lost_elsewhere[lost] = text
                machine = process.who.get("machine")
                warning = f"worker {lost} (incarnation {incarnation}), which was lost on {machine}: {text}"
                self._happened("warning", warning)
            case control.Warned(_, text, about):
                if about not in self._warned:  # other workers may report the same
                    self._warned.add(about)
                    self._happened("warning", text)
            case _:
                report = self._ledger.heard(worker, message)
                if report is None:
                    return
                if isinstance(report, o.Report) and isinstance(report.report, m.Completed):
                    self._add_moved(process, self.plan.stages[report.stage].name)
                self._obey(self.lifecycle.reported(worker, report, _now()))

    def _fed(
        self, worker: Worker, process: WorkerProcess, report: control.Asked | control.Relinquished
    ) -> None:
        """Handle a worker's request for a stream of connectors, or its return of one."""
        owner = (worker, process.spec.incarnation)
        answers, hasten = self._ledger.feeds.heard(owner, report)
        for to, answer in answers:
            self._send_to(to, answer)
        if hasten:
            self._hasten()

    def _hasten(self) -> None:
        """Take a snapshot soon because a stream waits for one, but not one right after the other."""
        if self._hastening is None:
            wait = max(0.0, self._hastened + SNAPSHOT_GAP_S - time.monotonic())
            self._hastening = self._loop.call_later(wait, self._snapshot_early)

    def _snapshot_early(self) -> None:
        life = self.lifecycle
        self._hastening, self._hastened = None, time.monotonic()
        if life.saving.on and not life.over and not life.saving.requests:
            self._obey(life.snapshot(_now()))

    def doors(self) -> dict[str, dict[str, Any]]:
        """Return, by step, the name and secret of a source that programs push to, and where workers listen."""
        return self._ask(self._doors)

    def _doors(self) -> dict[str, dict[str, Any]]:
        processes = {
            worker: self._processes.get((worker, member.incarnation))
            for worker, member in sorted(self.lifecycle.members.items())
            if member.ready and not member.leaving
        }
        return {
            step: {
                "name": source.name,
                "secret": source.secret.hex(),
                "workers": [
                    f"{process.doors[step][0]}:{process.doors[step][1]}"
                    for process in processes.values()
                    if process is not None and step in process.doors
                ],
            }
            for step, source in self.plan.pushed.items()
        }

    def _send_alternatives(self, worker: Worker) -> None:
        """Tell a leaving worker where its connectors may go."""
        life = self.lifecycle
        target = life.coordinator.target if life.coordinator is not None else None
        staying = (target or life.placement).workers
        successor = staying[worker % len(staying)]
        member = life.members.get(successor)
        process = None if member is None else self._processes.get((successor, member.incarnation))
        for step, (host, port) in (process.doors if process is not None else {}).items():
            self._send_to(worker, control.Elsewhere(life.generation, step, f"{host}:{port}"))

    def _add_moved(self, process: WorkerProcess, stage: str) -> None:
        """Add the last figures of a worker that has finished moving its keys of a stage."""
        figures = process.metrics.get("stages", {}).get(stage)
        if figures is not None:
            move = self._move_figures
            move["moved"] += figures["moved"]
            move["bytes"] += figures["bytes"]
            hold = figures["longest_hold"] / 1000
            move["longest_hold_ms"] = max(move["longest_hold_ms"], hold)

    def _lost(self, connection: Connection, error: Exception | None) -> None:
        if connection.tag is None:
            return
        worker, incarnation = connection.tag
        process = self._processes.get((worker, incarnation))
        if process is None or process.connection is not connection:
            return
        process.connection = None
        if process.ended:
            self._down(worker, incarnation, process.ended)
            return
        self.inquiries.lost(worker)
        member = self.lifecycle.members.get(worker)
        if member is not None and member.incarnation == incarnation and member.leaving:
            return  # its launcher reports when the process has ended
        self._give_up(process, "its connection closed" + (f": {error}" if error else ""))

    # ------------------------------------------------------------ events and status

    def _happened(self, kind: str, text: str) -> None:
        number = self._events[-1].number + 1 if self._events else 1
        data: dict[str, Any] = {}
        if kind == "rescaling":
            self._move_figures = nothing_moved()
            self._moved_since = time.monotonic()
        elif kind == "rescaled":
            self._move_figures["seconds"] = round(time.monotonic() - self._moved_since, 3)
            data = dict(self._move_figures)
        elif kind == "snapshot-failed":
            data = {"snapshot": self.lifecycle.saving.number}
        elif kind == "snapshot":
            assert self.storekeeper is not None
            assert self.storekeeper.manifest is not None
            data = summary_of(self.storekeeper.manifest)
        event = Event(number, time.time(), kind, text, data)
        self._events.append(event)
        for watcher in list(self._watchers):
            try:
                watcher(event)
            except Exception:
                self._watchers.remove(watcher)

    def _status(self) -> dict[str, Any]:
        life = self.lifecycle
        coordinator = life.coordinator
        moving, epoch = None, 0
        if coordinator is not None and coordinator.target is not None:
            moving = self.plan.stages[coordinator.moving].name
            epoch = coordinator.epochs[coordinator.moving]
        workers = []
        for worker, member in sorted(life.members.items()):
            process = self._processes.get((worker, member.incarnation))
            workers.append(
                {
                    "worker": worker,
                    "incarnation": member.incarnation,
                    "state": self._state_of(member, process),
                    "waits": process.waits if process else "",
                    "pid": process.who.get("pid") if process else None,
                    "machine": process.who.get("machine") if process else None,
                    **(process.metrics if process else {}),
                }
            )
        goal = self._target_placement()
        return {
            "name": self.name,
            "flow": self.plan.flow,
            "state": self.shown,
            "cause": life.cause,
            "generation": life.generation,
            "uptime": round(time.time() - self.started, 3),
            "size": len(life.placement.workers),
            "goal": len(goal.workers),
            "pinned": {str(key): worker for key, worker in goal.keys},
            "moving": moving,
            "progress": self._move_figures if moving is None else progress(workers, moving, epoch),
            "stages": [stage.name for stage in self.plan.stages],
            "workers": workers,
            "failures": life.failed_times,
            "streams": self._ledger.feeds.status(),
            "snapshot": life.saving.committed,
            "saving": life.saving.phase if life.saving.busy else None,
            "snapshots": self.storekeeper.status(life.saving) if self.storekeeper else None,
            "last_event": self.last_event,
        }

    def _state_of(self, member: Member, process: WorkerProcess | None) -> str:
        if member.leaving:
            return "leaving"
        if member.address is None:
            pending = process is not None and self.launcher.pending(process.spec)
            return "pending" if pending else "starting"
        if member.ended:
            return "ended"
        return "running" if member.ready else "starting"


_controllers: weakref.WeakSet[Controller] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for controller in list(_controllers):
        controller.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def check_workers(workers: Any, most: int) -> None:
    """Raise `WorkersError` for an invalid number of workers."""
    if isinstance(workers, bool) or not isinstance(workers, int):
        raise WorkersError(f"the number of workers is a whole number, not {workers!r}")
    if workers < 1:
        raise WorkersError(f"a flow needs at least one worker, not {workers}")
    if workers > most:
        raise WorkersError(f"{workers} workers are more than the {most} this job allows")


def _now() -> int:
    return time.monotonic_ns() // 1000
