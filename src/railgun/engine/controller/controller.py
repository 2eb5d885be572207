"""The controller: drives the `Lifecycle` machine in the program that started the flow.

It runs in a thread of its own, with an event loop: workers call it, it orders them. Whoever is in the same program uses
its methods, from any thread; everybody else its HTTP API (`http.py`).

Its duties towards the machine:

1. Every event goes to the machine when it happens, and the orders that follow are carried out before the next event:
   an order carried out late would meet workers that are no longer who they were.
2. What cannot be carried out (a launch that raises, a worker that cannot be reached) is an event of its own, never an
   exception in the middle of orders.
3. A process that was launched is the launcher's until it has ended; the machine is told of the end exactly once.

A process that is forked from the program has a copy of all this, and no part in it: whatever it asks is refused
(`ForkedJobError`), and it has none of the connections, so it can neither disturb the workers nor keep them alive.
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
from railgun.engine.controller.storekeeper import Storekeeper, told_of
from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.protocol.lifecycle.machine import Lifecycle, LifecycleError, Member
from railgun.engine.protocol.lifecycle.snapshots import State
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.worker import breadcrumb
from railgun.engine.worker import control_messages as control
from railgun.engine.worker.liveness import (
    BEAT,
    BESIDE,
    IN_STEP,
    MOST_CHARACTERS,
    MOST_STUCK_CHARACTERS,
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

TICK: Final = 0.1
APART: Final = 1.0  # seconds between snapshots that are taken because somebody waits for one
REMEMBERED: Final = 200  # events
SLOTS_WITHIN_S: Final = 3.0  # a worker that waits for a slot for longer is told of
SLOTS_EVERY_S: Final = 1.0  # between two looks at whether workers wait for slots
LAST_WORDS_S: Final = 1.0  # that what a process said before it ended is waited for
HUNG: Final = "frozen, or in a function that does not return"
HUNG_LOADING: Final = (
    "frozen, or loading the flow, which imports its modules, does not come to an end"
)
R = TypeVar("R")


class FlowFailedError(RailgunError):
    """The flow has failed; the text says why."""


class WorkersError(RailgunError):
    """A number of workers, or a worker, that cannot be."""

    exit_code = ExitCode.USAGE
    kind = "usage"


class ListenError(RailgunError):
    """A port cannot be listened at."""


class ForkedJobError(RailgunError):
    """The job belongs to the process that this one was forked from."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something people may want to know."""

    number: int
    at: float
    kind: str
    text: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Settings:
    """How a job is run."""

    host: str = "127.0.0.1"
    """Where workers reach the controller."""
    hang_after: float = 30.0
    """Seconds after which a worker is given up that is frozen, or inside one call of one function; time in which it
    imports a module or unpickles the flow does not count, up to ten minutes."""
    restarts: int = 5
    """How many failures within `restarts_within` are borne; all workers that are lost of one generation are one."""
    restarts_within: float = 300.0
    """Seconds after which a failure is forgotten."""
    start_within: float = 120.0
    """Seconds after which a worker that has a slot, but has not called, or loads the flow without a sign of life, is
    given up."""
    most_workers: int = 1024
    """More are refused: a slip of the keyboard should not order a million processes."""


@dataclass(slots=True)
class Seen:
    """What was last seen of a worker's process."""

    spec: WorkerSpec
    connection: Connection | None = None
    pulse: Connection | None = None
    unread: bytes = b""
    """The beginning of a line of its pulse."""
    waits: str = ""
    """What its sources and sinks wait for; empty: nothing."""
    messages: Messages = field(default_factory=Messages)
    who: dict[str, Any] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    launched: float = field(default_factory=time.monotonic)
    loaded: bool = False
    """Whether it has said that it has the flow, or cannot have it."""
    stuck: str = ""
    """Where its thread is, if it has been in one call for a while."""
    beside: str = ""
    """Where another of its threads is, if that has been in one call for a while: a sink that commits."""
    beside_since: float = 0.0
    told_waiting: bool = False
    """Whether people were told that it waits for a slot."""
    given_up: bool = False
    ended: str = ""
    """Why its process has ended, while its last words are waited for."""
    metrics: dict[str, Any] = field(default_factory=dict)
    doors: dict[str, o.Address] = field(default_factory=dict)
    """Where it listens for connectors, by step."""


class Controller:
    """Runs one flow."""

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
        self.inquiries = Inquiries(plan, self.lifecycle, self._say)
        self._seen: dict[tuple[Worker, int], Seen] = {}
        self._ledger = Ledger(self.lifecycle, storekeeper, plan)
        self._move = nothing_moved()  # of the present rescale, or of the last
        self._moved_since = 0.0
        self._events: deque[Event] = deque(maxlen=REMEMBERED)
        self._watchers: list[Callable[[Event], None]] = []
        self._port = 0
        self._listener = Listener(self._answer)
        self._slots_seen = 0.0
        self._warned: set[str] = set()
        self._left_behind: dict[Worker, str] = {}  # where workers were lost on other machines
        self._hastened = 0.0  # when a snapshot was last taken because somebody waited
        self._hastening: asyncio.TimerHandle | None = None
        self._over = threading.Event()
        self._endings: list[Callable[[], None]] = []
        self._ending = False
        self._closing = threading.Lock()
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        _there.add(self)
        self._thread = threading.Thread(
            target=self._run, name=f"railgun-{self.name}-controller", daemon=True
        )

    # ------------------------------------------------------------ for the program

    def open(self) -> None:
        """Start the controller's thread: from now on it answers questions and takes requests."""
        self._thread.start()

    def begin(self, launcher: Launcher | None = None, host: str | None = None) -> None:
        """Listen for workers, and launch them.

        `launcher` and `host` (where workers reach this program) take the place of those it was made with: who needs
        long to start a cluster opens the controller before. Raises `ListenError`.
        """
        self._launcher = launcher or self._launcher
        if host is not None:
            self.settings = replace(self.settings, host=host)
        self.call(self._listen())
        self._do(self._start)

    def _start(self) -> list[o.Order]:
        life = self.lifecycle
        if life.wanted is not None:  # asked for before anybody knew how many slots there are
            try:
                self.launcher.refuse(len(life.wanted.workers))
            except RailgunError as error:
                life.wanted = None
                self._happened("not-rescaled", f"{error}; the flow starts as it was to")
        return life.start(_now())

    def when_over(self, ending: Callable[[], None]) -> None:
        """Call this, in a thread of its own, when the flow is over and no process is left; `wait` waits for it."""
        self._endings.append(ending)

    def scale(self, workers: int) -> None:
        """Ask for this number of workers; returns when the request is taken."""
        check_workers(workers, self.settings.most_workers)
        if (
            self._launcher is not None
        ):  # if it is not there yet, it looks at the number when it comes
            try:
                self._launcher.refuse(workers)
            except RailgunError as error:
                raise WorkersError(str(error)) from error
        self._do(lambda: self._scale(range(workers)))

    def pin(self, key: Any, worker: Worker) -> None:
        """Give a key to a worker, whatever its hash says."""
        number = key_hash(key)

        def pinned() -> list[o.Order]:
            goal = self._goal()
            if isinstance(worker, bool) or worker not in goal.workers:
                there = ", ".join(map(str, goal.workers))
                raise WorkersError(f"there is no worker {worker!r}: there are {there}")
            keys = {**dict(goal.keys), number: worker}
            placement = Placement.of(goal.workers, slots=dict(goal.slots), keys=keys)
            return self.lifecycle.scale(placement, _now())

        self._do(pinned)

    def stop(self, *, drain: bool = False) -> None:
        """Let the flow end, with a last snapshot, or (`drain`, or without snapshots) with its sources."""
        self._do(lambda: self.lifecycle.stop(_now(), drain=drain))

    def snapshot(self) -> int:
        """Ask for a snapshot; the number of the last one begun before it."""

        def ask() -> int:
            last = self.lifecycle.saving.number
            self._obey(self.lifecycle.snapshot(_now()))
            return last

        return self._ask(ask)

    def attempts(self) -> Future[list[dict[str, Any]]]:
        """The snapshots there are, and those that failed, newest first; they are read by another thread."""
        self._check_process()
        if self.storekeeper is None:
            raise LifecycleError(
                "the flow takes no snapshots: it was started without a place for them"
            )
        return self.storekeeper.attempts()

    def abort(self, why: str) -> None:
        """End at once."""
        self._do(lambda: self.lifecycle.abort(why, _now()))

    @property
    def launcher(self) -> Launcher:
        """What starts and ends workers; there is one when workers are launched."""
        assert self._launcher is not None
        return self._launcher

    @property
    def over(self) -> bool:
        """Whether it has ended, no process is left, and its snapshots and its name are free for another job."""
        return self._over.is_set()

    @property
    def ended(self) -> bool:
        """Whether the flow is over, and no process is left: what it held is being let go of, if it is not yet."""
        return self.lifecycle.gone

    @property
    def shown(self) -> State:
        """The state, for people: that it has ended is told when all that it held is free for another job."""
        if self.lifecycle.over and not self.over:
            return "stopping"
        return self.lifecycle.shown

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False if it has not come in time. Raises `FlowFailedError` if the flow failed."""
        self._check_process()
        if not self._over.wait(timeout):
            return False
        if self.lifecycle.state == "failed":
            raise FlowFailedError(self.lifecycle.cause)
        return True

    def status(self) -> dict[str, Any]:
        """What there is to know, as plain data."""
        return self._ask(self._status)

    def collected(self, step: str) -> list[Any]:
        """What a `Collect` sink has got so far."""
        return self._ask(lambda: self._ledger.collected.items(step))

    @property
    def last_event(self) -> int:
        """The number of the last event."""
        return self._ask(lambda: self._events[-1].number if self._events else 0)

    def events(self, after: int = 0) -> list[Event]:
        """What happened, after the event of this number."""
        return self._ask(lambda: [event for event in self._events if event.number > after])

    def watch(self, watcher: Callable[[Event], None]) -> None:
        """Call this, in the controller's thread, for everything that happens from now on."""
        self._ask(lambda: self._watchers.append(watcher))

    def close(self) -> None:
        """End everything that is left, at once; in a forked process this is nothing."""
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
        """Whether this process was forked from the one that has the controller, and has only a copy."""
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        """Raise `ForkedJobError` in a process that has only a copy of the controller."""
        if self.is_forked:
            raise ForkedJobError(
                f"the job {self.name!r} belongs to process {self._pid}, from which this one was forked: "
                "ask it there, or by the command line or the HTTP API"
            )

    def leave_to_parent(self) -> None:
        """In a forked process: let go of all connections, which remain those of the parent."""
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        registered = self._selector.get_map() or {}  # None, if the loop has been closed
        for key in list(registered.values()):
            with contextlib.suppress(OSError):
                os.dup2(nothing, key.fd, inheritable=False)  # who has the number may close it still
        os.close(nothing)

    def call(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine in the controller's loop, and wait for it."""
        if self.is_forked:
            coroutine.close()
        self._check_process()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _ask(self, question: Callable[[], R]) -> R:
        """Call a function in the controller's thread."""
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
        self._loop.run_until_complete(self._let_go())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _let_go(self) -> None:
        await self._listener.close()
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await asyncio.sleep(0)  # closed sockets are let go of in the next turn

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._port = await self._listener.open(self.settings.host, 0)
        except OSError as error:
            raise ListenError(f"cannot listen at {self.settings.host}: {error}") from error
        loop.call_later(TICK, self._tick)

    def _answer(self) -> Connection:
        return Connection(self._secret, self._called, self._received, self._lost)

    def _tick(self) -> None:
        self._loop.call_later(self._until_due(), self._tick)
        now = time.monotonic()
        for seen in list(self._seen.values()):
            silent = now - seen.heard
            if seen.connection is not None:
                if silent > self._hang_after(seen):
                    where = f": {seen.stuck}" if seen.stuck else ""
                    hung = HUNG if seen.loaded else HUNG_LOADING
                    self._give_up(seen, f"no sign of life for {silent:.0f} s ({hung}){where}")
                elif seen.beside and now - seen.beside_since > self.settings.hang_after:
                    stuck = now - seen.beside_since
                    self._give_up(seen, f"a call has not returned for {stuck:.0f} s: {seen.beside}")
            elif silent > self.settings.start_within and self._is_late(seen):
                self._give_up(seen, f"it did not call within {silent:.0f} s")
        if now >= self._slots_seen + SLOTS_EVERY_S:
            self._slots_seen = now
            self._look_for_slots()
        self._obey(self.lifecycle.tick(_now()))

    def _hang_after(self, seen: Seen) -> float:
        """Seconds of silence after which a worker is given up; to load the flow it has as long as to start."""
        settings = self.settings
        if seen.loaded:
            return settings.hang_after
        return max(settings.hang_after, settings.start_within)

    def _look_for_slots(self) -> None:
        """Tell people, once, which workers have waited for a slot of the cluster for a while."""
        long_ago = time.monotonic() - SLOTS_WITHIN_S
        waiting = [
            seen
            for seen in self._seen.values()
            if not seen.told_waiting
            and not seen.who
            and not seen.given_up
            and seen.launched <= long_ago
            and self.launcher.pending(seen.spec)
        ]
        for seen in waiting:
            seen.told_waiting = True
        if waiting:
            numbers = sorted(seen.spec.worker for seen in waiting)
            who = f"worker{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            wait = "wait for slots" if len(numbers) > 1 else "waits for a slot"
            self._happened(
                "waiting-for-slots", f"{who} {wait}: the cluster has no room for more tasks now"
            )

    def _until_due(self) -> float:
        """Seconds until the machine is to hear that time has passed; a snapshot begins when it is time for it."""
        saving = self.lifecycle.saving
        if saving.due is None or saving.busy:
            return TICK
        return min(TICK, max(0.0, (saving.due - _now()) / 1e6) or TICK)

    def _is_late(self, seen: Seen) -> bool:
        """Whether it should have called: it never has, and does not wait for a slot."""
        if seen.who or seen.given_up:
            return False
        if self.launcher.pending(seen.spec):
            seen.heard = time.monotonic()
            return False
        return True

    def _give_up(self, seen: Seen, why: str) -> None:
        """A process that cannot be talked to is as good as dead: end it, and go on without it."""
        connection, seen.connection = seen.connection, None
        seen.given_up = True
        if connection is not None:
            connection.close()
        self._cancel(seen.spec)
        self._is_down(seen, why)

    def _is_down(self, seen: Seen, why: str) -> None:
        """Let the machine know that a worker is gone; one that was to leave may not have come to the end of it."""
        worker, incarnation = seen.spec.worker, seen.spec.incarnation
        found = breadcrumb.read(seen.who)
        member = self.lifecycle.members.get(worker)
        if member is not None and member.incarnation == incarnation and member.leaving:
            self._lost_leaving(seen, why, found)
        else:
            why = self._with_breadcrumb(seen, why, found)
        self._obey(self.lifecycle.down(worker, incarnation, why, _now()))

    def _lost_leaving(self, seen: Seen, why: str, found: str) -> None:
        """Tell of a worker that was to leave, and ended inside user code: of a source or a sink that it closed."""
        if not found and not (seen.given_up and IN_STEP in why):
            return  # its process has ended, as it was to: a slow call of before is over
        text = self._with_breadcrumb(seen, why, found)
        self._obey(self.lifecycle.lost_leaving(seen.spec.worker, text, _now()))

    def _with_breadcrumb(self, seen: Seen, why: str, found: str) -> str:
        """Add which user code a worker was in when it was lost, unless `why` says where the worker hung.

        `found` is what its breadcrumb says.
        """
        before = self._left_behind.pop(seen.spec.worker, "")
        if not found and before:  # it was on another machine
            found = f"the time before, {before}"
        is_said = any(where and where in why for where in (seen.stuck, seen.beside))
        return f"{why}; {found}" if found and not is_said else why

    def _scale(self, workers: Sequence[Worker]) -> list[o.Order]:
        return self.lifecycle.scale(self._goal().resized(workers), _now())

    def _goal(self) -> Placement:
        """The placement that will be, when all that was asked for is done."""
        life = self.lifecycle
        coordinator = life.coordinator
        going = coordinator.target if coordinator is not None else None
        return life.wanted or going or life.placement

    # ------------------------------------------------------------ orders

    def _obey(self, orders: Sequence[o.Order]) -> None:
        for order in orders:
            match order:
                case o.Launch(worker, incarnation):
                    self._launch(worker, incarnation)
                case o.Cancel(worker, incarnation):
                    self._cancel(self._seen[worker, incarnation].spec)
                case o.To(worker, what):
                    self._send(worker, what)
                case o.Happened(kind, text):
                    self._happened(kind, text)
                case o.Record() | o.Write() | o.GiveUp():
                    self._ledger.keep(order, self._soon, _now)
        if self.lifecycle.gone and not self._ending:
            self._ending = True
            threading.Thread(target=self._end, name=f"railgun-{self.name}-end", daemon=True).start()

    def _end(self) -> None:
        """Let go of what others may have when the flow is over; then it is."""
        for ending in self._endings:
            try:
                ending()
            except Exception as error:
                told = f"cannot let go of something at the end: {error}"
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._happened, "trouble", told)
        self._over.set()

    def _soon(self, then: Callable[[], list[o.Order]]) -> None:
        """From any thread: let the machine hear of something, and do what it wants."""
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for this
            self._loop.call_soon_threadsafe(lambda: self._obey(then()))

    def _say(self, worker: Worker, message: control.Order) -> bool:
        """Send something to a worker, if it is there."""
        member = self.lifecycle.members.get(worker)
        seen = None if member is None else self._seen.get((worker, member.incarnation))
        if seen is None or seen.connection is None:
            return False
        seen.connection.send(Messages.encode(message))
        return True

    def _launch(self, worker: Worker, incarnation: int) -> None:
        spec = WorkerSpec(
            self.name, worker, incarnation, self.settings.host, self._port, self._secret
        )
        self._seen[worker, incarnation] = Seen(spec)
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
        """From any thread: a worker's process has ended."""
        why = error or "its process ended"
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for this
            self._loop.call_soon_threadsafe(self._down, spec.worker, spec.incarnation, why)

    def _down(self, worker: Worker, incarnation: int, why: str) -> None:
        seen = self._seen.get((worker, incarnation))
        if seen is None:
            self._obey(self.lifecycle.down(worker, incarnation, why, _now()))
            return
        if seen.connection is not None and not seen.ended:
            # Its last words may not have been read yet: its connection closes behind them.
            seen.ended = why
            self._loop.call_later(LAST_WORDS_S, self._down, worker, incarnation, why)
            return
        del self._seen[worker, incarnation]
        self.inquiries.lost(worker)
        self._is_down(seen, why)

    def _send(self, worker: Worker, order: o.WorkerOrder) -> None:
        seen = self._seen.get((worker, self.lifecycle.members[worker].incarnation))
        if isinstance(order, o.EndSources):
            self._elsewhere(worker)
        for message in self._ledger.sent(worker, order):
            if seen is not None and seen.connection is not None:
                seen.connection.send(Messages.encode(message))

    # ------------------------------------------------------------ workers

    def _called(self, connection: Connection) -> None:
        who = connection.who
        worker, incarnation = who.get("worker"), who.get("incarnation")
        host, port = who.get("host"), who.get("port")
        if not isinstance(worker, int) or not isinstance(incarnation, int):
            raise HelloError("a worker says which one it is")
        if who.get("pulse"):
            self._feel(connection, worker, incarnation)
            return
        if not isinstance(host, str) or not isinstance(port, int):
            raise HelloError(f"worker {worker} does not say where it is")
        seen = self._seen.get((worker, incarnation))
        if seen is None or seen.who or not self.lifecycle.expects(worker, incarnation):
            raise HelloError(f"worker {worker}, incarnation {incarnation}, is not expected")
        seen.connection, seen.who, seen.heard = connection, who, time.monotonic()
        connection.tag = (worker, incarnation)
        # The hello has to be answered before the first order.
        self._loop.call_soon(self._welcome, connection)

    def _feel(self, connection: Connection, worker: Worker, incarnation: int) -> None:
        """A worker that is here has a pulse from now on."""
        seen = self._seen.get((worker, incarnation))
        if seen is None or seen.connection is None or seen.pulse is not None:
            raise HelloError(f"worker {worker}, incarnation {incarnation}, is not expected")
        seen.pulse = connection
        connection.tag = (worker, incarnation)

    def _welcome(self, connection: Connection) -> None:
        worker, incarnation = connection.tag
        if self.lifecycle.expects(worker, incarnation):
            careful = self.lifecycle.failed_times > 0
            connection.send(Messages.encode(replace(self._setup, careful=careful)))
        else:
            connection.close()

    def _loaded(self, worker: Worker, seen: Seen, told: control.Loaded) -> None:
        """A worker has the flow, and counts from now on; or it cannot have it.

        What may pass is worth trying again when a flow restarts that had it once; people who start one want to know.
        """
        incarnation = seen.spec.incarnation
        if not self.lifecycle.expects(worker, incarnation):
            return
        if told.error is None:
            address = (seen.who["host"], seen.who["port"])
            self._obey(self.lifecycle.up(worker, incarnation, address, _now()))
        elif told.passing and self.lifecycle.failed_times:
            self._give_up(seen, told.error)
        else:
            self._obey(self.lifecycle.cannot_load(worker, told.error, _now()))

    def _received(self, connection: Connection, data: bytes) -> None:
        worker, incarnation = connection.tag
        seen = self._seen.get((worker, incarnation))
        if seen is None or connection not in (seen.connection, seen.pulse):
            return
        if connection is seen.pulse:
            self._felt(worker, seen, data)
            return
        seen.heard, seen.stuck = time.monotonic(), ""
        try:
            for message in seen.messages.feed(data):
                self._hear(worker, seen, message)
        except (DecodingError, RailgunError) as error:
            connection.close(error)

    def _felt(self, worker: Worker, seen: Seen, data: bytes) -> None:
        """Note a heartbeat of a worker, and the outages its sources and sinks wait for (`engine.worker.liveness`)."""
        if BEAT in data:
            seen.heard, seen.stuck = time.monotonic(), ""
        *lines, rest = (seen.unread + data.replace(BEAT, b"")).split(b"\n")
        seen.unread = rest[-4 * (MOST_CHARACTERS + MOST_STUCK_CHARACTERS) :]
        for line in lines:
            if line.startswith(STUCK):
                seen.stuck = line[1:].decode(errors="replace").replace("\r", "\n")
                continue
            if line.startswith(BESIDE):
                if not seen.beside:
                    seen.beside_since = time.monotonic()
                seen.beside = line[1:].decode(errors="replace").replace("\r", "\n")
                continue
            seen.heard = time.monotonic()
            waits = line.decode(errors="replace")
            if waits:
                self._happened("waiting", f"worker {worker} waits for {waits}")
            elif seen.waits:
                self._happened("goes-on", f"worker {worker} goes on")
            seen.waits = waits

    def _hear(self, worker: Worker, seen: Seen, message: control.FromWorker) -> None:
        match message:
            case control.Loaded():
                seen.loaded = True
                seen.doors = dict(message.doors)
                self._loaded(worker, seen, message)
            case control.Asked() | control.Relinquished():
                self._fed(worker, seen, message)
            case control.Hastened(generation):
                if generation == self.lifecycle.generation:
                    self._hasten()
            case control.Beat(generation, metrics):
                if generation == self.lifecycle.generation:
                    seen.metrics = metrics
                    self.totals.see(worker, (seen.spec.incarnation, generation), metrics)
            case control.Found():
                self.inquiries.answered(message)
            case control.LeftBehind(lost, incarnation, text):
                self._left_behind[lost] = text
                machine = seen.who.get("machine")
                told = f"worker {lost} (incarnation {incarnation}), which was lost on {machine}: {text}"
                self._happened("warning", told)
            case control.Warned(_, text, about):
                if about not in self._warned:  # other workers may see the same
                    self._warned.add(about)
                    self._happened("warning", text)
            case _:
                report = self._ledger.heard(worker, message)
                if report is None:
                    return
                if isinstance(report, o.Report) and isinstance(report.report, m.Completed):
                    self._moved(seen, self.plan.stages[report.stage].name)
                self._obey(self.lifecycle.reported(worker, report, _now()))

    def _fed(
        self, worker: Worker, seen: Seen, report: control.Asked | control.Relinquished
    ) -> None:
        """A worker asks for a stream of connectors, or gives one back."""
        owner = (worker, seen.spec.incarnation)
        answers, hasten = self._ledger.feeds.heard(owner, report)
        for to, answer in answers:
            self._say(to, answer)
        if hasten:
            self._hasten()

    def _hasten(self) -> None:
        """Somebody waits for a snapshot: it is soon, but not one follows the other."""
        if self._hastening is None:
            wait = max(0.0, self._hastened + APART - time.monotonic())
            self._hastening = self._loop.call_later(wait, self._snapshot_early)

    def _snapshot_early(self) -> None:
        life = self.lifecycle
        self._hastening, self._hastened = None, time.monotonic()
        if life.saving.on and not life.over and not life.saving.requests:
            self._obey(life.snapshot(_now()))

    def doors(self) -> dict[str, dict[str, Any]]:
        """By step: the name of a source that programs outside push to, its secret, and where workers listen."""
        return self._ask(self._doors)

    def _doors(self) -> dict[str, dict[str, Any]]:
        there = {
            worker: self._seen.get((worker, member.incarnation))
            for worker, member in sorted(self.lifecycle.members.items())
            if member.ready and not member.leaving
        }
        return {
            step: {
                "name": source.name,
                "secret": source.secret.hex(),
                "workers": [
                    f"{seen.doors[step][0]}:{seen.doors[step][1]}"
                    for seen in there.values()
                    if seen is not None and step in seen.doors
                ],
            }
            for step, source in self.plan.pushed.items()
        }

    def _elsewhere(self, worker: Worker) -> None:
        """Tell a worker that is to leave where connectors may go."""
        life = self.lifecycle
        goal = life.coordinator.target if life.coordinator is not None else None
        staying = (goal or life.placement).workers
        stays = staying[worker % len(staying)]
        member = life.members.get(stays)
        seen = None if member is None else self._seen.get((stays, member.incarnation))
        for step, (host, port) in (seen.doors if seen is not None else {}).items():
            self._say(worker, control.Elsewhere(life.generation, step, f"{host}:{port}"))

    def _moved(self, seen: Seen, stage: str) -> None:
        """A worker is through with a stage's move; the figures it sent last are those of the move."""
        figures = seen.metrics.get("stages", {}).get(stage)
        if figures is not None:
            move = self._move
            move["moved"] += figures["moved"]
            move["bytes"] += figures["bytes"]
            hold = figures["longest_hold"] / 1000
            move["longest_hold_ms"] = max(move["longest_hold_ms"], hold)

    def _lost(self, connection: Connection, error: Exception | None) -> None:
        if connection.tag is None:
            return
        worker, incarnation = connection.tag
        seen = self._seen.get((worker, incarnation))
        if seen is None or seen.connection is not connection:
            return
        seen.connection = None
        if seen.ended:
            self._down(worker, incarnation, seen.ended)
            return
        self.inquiries.lost(worker)
        member = self.lifecycle.members.get(worker)
        if member is not None and member.incarnation == incarnation and member.leaving:
            return  # its launcher tells when the process has ended
        self._give_up(seen, "its connection closed" + (f": {error}" if error else ""))

    # ------------------------------------------------------------ what people see

    def _happened(self, kind: str, text: str) -> None:
        number = self._events[-1].number + 1 if self._events else 1
        data: dict[str, Any] = {}
        if kind == "rescaling":
            self._move = nothing_moved()
            self._moved_since = time.monotonic()
        elif kind == "rescaled":
            self._move["seconds"] = round(time.monotonic() - self._moved_since, 3)
            data = dict(self._move)
        elif kind == "snapshot-failed":
            data = {"snapshot": self.lifecycle.saving.number}
        elif kind == "snapshot":
            assert self.storekeeper is not None
            assert self.storekeeper.manifest is not None
            data = told_of(self.storekeeper.manifest)
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
            seen = self._seen.get((worker, member.incarnation))
            workers.append(
                {
                    "worker": worker,
                    "incarnation": member.incarnation,
                    "state": self._state_of(member, seen),
                    "waits": seen.waits if seen else "",
                    "pid": seen.who.get("pid") if seen else None,
                    "machine": seen.who.get("machine") if seen else None,
                    **(seen.metrics if seen else {}),
                }
            )
        goal = self._goal()
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
            "progress": self._move if moving is None else progress(workers, moving, epoch),
            "stages": [stage.name for stage in self.plan.stages],
            "workers": workers,
            "failures": life.failed_times,
            "streams": self._ledger.feeds.status(),
            "snapshot": life.saving.committed,
            "saving": life.saving.phase if life.saving.busy else None,
            "snapshots": self.storekeeper.status(life.saving) if self.storekeeper else None,
            "last_event": self.last_event,
        }

    def _state_of(self, member: Member, seen: Seen | None) -> str:
        if member.leaving:
            return "leaving"
        if member.address is None:
            pending = seen is not None and self.launcher.pending(seen.spec)
            return "pending" if pending else "starting"
        if member.ended:
            return "ended"
        return "running" if member.ready else "starting"


_there: weakref.WeakSet[Controller] = weakref.WeakSet()


def _leave_all() -> None:
    for controller in list(_there):
        controller.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all)


def check_workers(workers: Any, most: int) -> None:
    """Refuse a number of workers that cannot be."""
    if isinstance(workers, bool) or not isinstance(workers, int):
        raise WorkersError(f"the number of workers is a whole number, not {workers!r}")
    if workers < 1:
        raise WorkersError(f"a flow needs at least one worker, not {workers}")
    if workers > most:
        raise WorkersError(f"{workers} workers are more than the {most} this job allows")


def _now() -> int:
    return time.monotonic_ns() // 1000
