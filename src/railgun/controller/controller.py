"""The controller: drives the `Lifecycle` machine in the program that started the flow.

It runs in a thread of its own, with an event loop: workers call it, it orders them. Whoever is in the same program uses
its methods, from any thread; everybody else its HTTP API (`http.py`).
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from railgun.controller.launcher import Launcher
from railgun.core import orders as o
from railgun.core.errors import RailgunError
from railgun.core.hashing import key_hash
from railgun.core.lifecycle import Lifecycle, LifecycleError, StaleWorkerError
from railgun.core.placement import Placement, Worker
from railgun.flow.plan import Plan
from railgun.wire import control
from railgun.wire.columns import DecodingError
from railgun.wire.connection import Connection, Messages
from railgun.wire.hello import HelloError
from railgun.worker.spec import WorkerSpec

TICK: Final = 0.1
REMEMBERED: Final = 200  # events
R = TypeVar("R")


class FlowFailedError(RailgunError):
    """The flow has failed; the text says why."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something people may want to know."""

    number: int
    at: float
    kind: str
    text: str


@dataclass(slots=True)
class Settings:
    """How a job is run."""

    host: str = "127.0.0.1"
    """Where workers reach the controller."""
    hang_after: float = 30.0
    """Seconds without a sign of life after which a worker is given up."""
    restarts: int = 5
    """How many failures within five minutes are borne."""


@dataclass(slots=True)
class Seen:
    """What was last seen of a worker's process."""

    spec: WorkerSpec
    connection: Connection | None = None
    messages: Messages = field(default_factory=Messages)
    who: dict[str, Any] = field(default_factory=dict)
    heard: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)


class Controller:
    """Runs one flow."""

    def __init__(
        self,
        plan: Plan,
        plan_bytes: bytes,
        launcher: Launcher,
        workers: int,
        settings: Settings | None = None,
    ) -> None:
        self.plan = plan
        self.name = plan.flow
        self.settings = settings or Settings()
        self.started = time.time()
        self._launcher = launcher
        self._setup = Messages.encode(control.Setup(plan_bytes))
        self._secret = secrets.token_bytes(32)
        self.lifecycle = Lifecycle(
            len(plan.stages), Placement.of(range(workers)), restarts=self.settings.restarts
        )
        self._seen: dict[tuple[Worker, int], Seen] = {}
        self._items: dict[str, list[Any]] = {}
        self._events: deque[Event] = deque(maxlen=REMEMBERED)
        self._watchers: list[Callable[[Event], None]] = []
        self._port = 0
        self._over = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, name=f"railgun-{self.name}-controller", daemon=True
        )
        self._extra: list[Callable[[asyncio.AbstractEventLoop], Any]] = []

    # ------------------------------------------------------------ for the program

    def start(self) -> None:
        """Listen for workers, and launch them."""
        self._thread.start()
        self.call(self._begin())

    def scale(self, workers: int) -> None:
        """Ask for this number of workers; returns when the request is taken."""
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise LifecycleError(f"a flow needs at least one worker, not {workers!r}")
        self._do(lambda: self._scale(range(workers)))

    def pin(self, key: Any, worker: Worker) -> None:
        """Give a key to a worker, whatever its hash says."""
        number = key_hash(key)

        def pinned() -> list[o.Order]:
            goal = self._goal()
            if worker not in goal.workers:
                raise LifecycleError(f"there is no worker {worker}: there are {goal.workers}")
            keys = {**dict(goal.keys), number: worker}
            placement = Placement.of(goal.workers, slots=dict(goal.slots), keys=keys)
            return self.lifecycle.scale(placement, _now())

        self._do(pinned)

    def stop(self) -> None:
        """Let the sources end, and the flow with them; returns when the request is taken."""
        self._do(lambda: self.lifecycle.stop(_now()))

    def abort(self, why: str) -> None:
        """End at once."""
        self._do(lambda: self.lifecycle.abort(why, _now()))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False if it has not come in time. Raises `FlowFailedError` if the flow failed."""
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
        return self._ask(lambda: list(self._items.get(step, ())))

    def events(self, after: int = 0) -> list[Event]:
        """What happened, after the event of this number."""
        return self._ask(lambda: [event for event in self._events if event.number > after])

    def watch(self, watcher: Callable[[Event], None]) -> None:
        """Call this, in the controller's thread, for everything that happens from now on."""
        self._ask(lambda: self._watchers.append(watcher))

    def close(self) -> None:
        """End everything that is left, at once."""
        if self._thread.is_alive():
            if not self._over.is_set():
                self.abort("the program that started it ends")
                self._over.wait(5)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
        self._launcher.close()

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine in the controller's loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _ask(self, question: Callable[[], R]) -> R:
        """Call a function in the controller's thread."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return question()
        answer: Future[R] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return answer.result()

    def _do(self, decide: Callable[[], Sequence[o.Order]]) -> None:
        self._ask(lambda: self._obey(decide()))

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(self._secret, self._called, self._received, self._lost),
            self.settings.host,
            0,
        )
        self._port = server.sockets[0].getsockname()[1]
        self._obey(self.lifecycle.start(_now()))
        loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        for (worker, incarnation), seen in list(self._seen.items()):
            silent = now - seen.heard
            if seen.connection is not None and silent > self.settings.hang_after:
                why = f"no sign of life for {silent:.0f} s"
                seen.connection.close()
                seen.connection = None
                self._launcher.cancel(seen.spec)
                self._obey(self.lifecycle.down(worker, incarnation, why, _now()))
        self._obey(self.lifecycle.tick(_now()))
        self._loop.call_later(TICK, self._tick)

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
                    self._launcher.cancel(self._seen[worker, incarnation].spec)
                case o.To(worker, what):
                    self._send(worker, what)
                case o.Happened(kind, text):
                    self._happened(kind, text)
        if self.lifecycle.gone and not self._over.is_set():
            self._over.set()

    def _launch(self, worker: Worker, incarnation: int) -> None:
        spec = WorkerSpec(
            self.name, worker, incarnation, self.settings.host, self._port, self._secret
        )
        self._seen[worker, incarnation] = Seen(spec)
        self._launcher.launch(spec, self._process_ended)

    def _process_ended(self, spec: WorkerSpec, error: str | None) -> None:
        """From any thread: a worker's process has ended."""
        why = error or "its process ended"
        self._loop.call_soon_threadsafe(self._down, spec.worker, spec.incarnation, why)

    def _down(self, worker: Worker, incarnation: int, why: str) -> None:
        self._seen.pop((worker, incarnation), None)
        self._obey(self.lifecycle.down(worker, incarnation, why, _now()))

    def _send(self, worker: Worker, order: o.WorkerOrder) -> None:
        seen = self._seen.get((worker, self.lifecycle.members[worker].incarnation))
        if seen is not None and seen.connection is not None:
            if isinstance(order, o.Start):
                self._items.clear()
            seen.connection.send(Messages.encode(order))

    # ------------------------------------------------------------ workers

    def _called(self, connection: Connection) -> None:
        who = connection.who
        worker, incarnation = who.get("worker"), who.get("incarnation")
        seen = self._seen.get((worker, incarnation))  # type: ignore[arg-type]
        if seen is None:
            raise HelloError(f"worker {worker}, incarnation {incarnation}, is not expected")
        assert isinstance(worker, int)
        assert isinstance(incarnation, int)
        try:
            address = (str(who.get("host")), int(who.get("port", 0)))
            following = self.lifecycle.up(worker, incarnation, address, _now())
        except StaleWorkerError as error:
            raise HelloError(str(error)) from error
        seen.connection, seen.who, seen.heard = connection, who, time.monotonic()
        connection.tag = (worker, incarnation)
        # The hello has to be answered before the first order.
        self._loop.call_soon(self._welcome, connection, following)

    def _welcome(self, connection: Connection, following: Sequence[o.Order]) -> None:
        connection.send(self._setup)
        self._obey(following)

    def _received(self, connection: Connection, data: bytes) -> None:
        worker, incarnation = connection.tag
        seen = self._seen.get((worker, incarnation))
        if seen is None or seen.connection is not connection:
            return
        seen.heard = time.monotonic()
        try:
            for message in seen.messages.feed(data):
                self._hear(worker, seen, message)
        except (DecodingError, RailgunError) as error:
            connection.close(error)

    def _hear(self, worker: Worker, seen: Seen, message: control.FromWorker) -> None:
        match message:
            case control.Beat(generation, metrics):
                if generation == self.lifecycle.generation:
                    seen.metrics = metrics
            case control.Items(generation, step, items):
                if generation == self.lifecycle.generation:
                    self._items.setdefault(step, []).extend(items)
            case _:
                self._obey(self.lifecycle.reported(worker, message, _now()))

    def _lost(self, connection: Connection, error: Exception | None) -> None:
        if connection.tag is None:
            return
        worker, incarnation = connection.tag
        seen = self._seen.get((worker, incarnation))
        if seen is None or seen.connection is not connection:
            return
        seen.connection = None
        member = self.lifecycle.members.get(worker)
        if member is not None and member.incarnation == incarnation and member.leaving:
            return  # its launcher tells when the process has ended
        self._launcher.cancel(seen.spec)
        why = "its connection closed" + (f": {error}" if error else "")
        self._obey(self.lifecycle.down(worker, incarnation, why, _now()))

    # ------------------------------------------------------------ what people see

    def _happened(self, kind: str, text: str) -> None:
        number = self._events[-1].number + 1 if self._events else 1
        event = Event(number, time.time(), kind, text)
        self._events.append(event)
        for watcher in self._watchers:
            watcher(event)

    def _status(self) -> dict[str, Any]:
        life = self.lifecycle
        coordinator = life.coordinator
        moving = None
        if coordinator is not None and coordinator.target is not None:
            moving = self.plan.stages[coordinator.moving].name
        workers = []
        for worker, member in sorted(life.members.items()):
            seen = self._seen.get((worker, member.incarnation))
            workers.append(
                {
                    "worker": worker,
                    "incarnation": member.incarnation,
                    "state": self._state_of(member, seen),
                    "pid": seen.who.get("pid") if seen else None,
                    "machine": seen.who.get("machine") if seen else None,
                    **(seen.metrics if seen else {}),
                }
            )
        goal = self._goal()
        return {
            "name": self.name,
            "state": life.shown,
            "cause": life.cause,
            "generation": life.generation,
            "uptime": round(time.time() - self.started, 3),
            "size": len(life.placement.workers),
            "goal": len(goal.workers),
            "pinned": {str(key): worker for key, worker in goal.keys},
            "moving": moving,
            "progress": _progress(workers, moving),
            "stages": [stage.name for stage in self.plan.stages],
            "workers": workers,
            "failures": len(life.failures),
        }

    def _state_of(self, member: Any, seen: Seen | None) -> str:
        if member.leaving:
            return "leaving"
        if member.address is None:
            pending = seen is not None and self._launcher.pending(seen.spec)
            return "pending" if pending else "starting"
        if member.ended:
            return "ended"
        return "running" if member.ready else "starting"


def _progress(workers: Sequence[dict[str, Any]], moving: str | None) -> dict[str, Any]:
    """Of the stage in motion, or of the whole of the last rescale."""
    figures = [
        stage
        for worker in workers
        for name, stage in worker.get("stages", {}).items()
        if moving is None or name == moving
    ]
    return {
        "keys": sum(stage["keys"] for stage in figures),
        "moving": sum(stage["moving"] for stage in figures),
        "moved": sum(stage["moved"] for stage in figures),
        "held": sum(stage["held"] for stage in figures),
        "bytes": sum(stage["bytes"] for stage in figures),
        "longest_hold_ms": max((stage["longest_hold"] for stage in figures), default=0) / 1000,
    }


def _now() -> int:
    return time.monotonic_ns() // 1000
