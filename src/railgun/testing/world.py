"""Simulate a flow in one process: the lifecycle machine, workers with the production runtime, links, and a store.

What happens next (a message arrives, a worker works, a thread finishes, a disk has written a file) is drawn from a
seed, so the same seed gives the same run. In `FlowTester` a test adds events; in the simulation of crashes chance does.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from railgun.engine.controller.ledger import Ledger
from railgun.engine.controller.storekeeper import Storekeeper
from railgun.engine.operators.calls import Unpickling, attempt
from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.protocol.lifecycle.machine import Lifecycle
from railgun.engine.protocol.lifecycle.snapshot_rounds import SnapshotRounds
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.snapshots.store import SnapshotStore
from railgun.engine.worker import control_messages as control
from railgun.engine.worker import loading
from railgun.engine.worker.frames import FrameReader, Pressure, Taken, encode
from railgun.engine.worker.runtime import Environment, Runtime
from railgun.engine.worker.saver import Then, Work
from railgun.errors import RailgunError, pass_interrupt
from railgun.flows.errors import is_permanent
from railgun.flows.plan import Plan
from railgun.transport.columns import encode_column

TICK_US: Final = 1_000_000  # that pass for the lifecycle machine when nothing else happens


MAX_IDLE_TICKS: Final = 1000  # in a row


class StuckError(RailgunError):
    """The simulation has come to a standstill."""


class Process:
    """A worker's process: its runtime, orders on their way to it, and reports on their way from it."""

    def __init__(self, world: World, worker: Worker, incarnation: int) -> None:
        self.world = world
        self.worker = worker
        self.incarnation = incarnation
        self.runtime: Runtime | None = None
        self.orders: deque[o.WorkerOrder | control.Load | control.Streams] = deque()
        self.reports: deque[Any] = deque()
        self.threads: deque[tuple[int, Work, Then]] = deque()
        self.load: control.Load | None = None
        self.joins = 0
        self.reported_end = False
        self.generation = 0  # of the last order to start
        self.ending = False

    # ------------------------------------------------------------ events

    def obey(self) -> None:
        """Carry out the next order."""
        with self.acting():
            self._obey(self.orders.popleft())

    def _obey(self, order: o.WorkerOrder | control.Load | control.Streams) -> None:
        runtime = self.runtime
        match order:
            case control.Load():
                self.load = order
            case o.Start():
                self._start(order)
            case o.Stop(handing_over):
                if handing_over and runtime is not None:
                    runtime.saver.hand_over(self.end)
                else:
                    self.end()
            case _ if runtime is None or order.generation != runtime.generation:
                pass
            case o.Begin(_, snapshot):
                runtime.begin(self.world.now, snapshot)
                self.world.begun(self)
            case o.Tell(_, stage, event):
                runtime.tell(stage, event)
                if isinstance(event, m.Join):
                    self.joins += 1
                    if self.joins == len(self.world.plan.stages):
                        self.joins = 0
                        self.tell(o.Joined(runtime.generation))
            case o.TakeSnapshot(_, snapshot, full):
                runtime.saver.take(snapshot, full)
            case o.Settled():
                runtime.saver.settle(order)
            case o.EndSources():
                runtime.end_sources()
            case o.StopSources():
                runtime.stop_sources()
            case control.Granted() | control.Rejected() | control.Wanted():
                self.world.on_stream_order(self, order)
        self.check_ended()

    def _start(self, start: o.Start) -> None:
        if self.runtime is not None:
            self.runtime.close()
            self.runtime = None
        self.world.stray_work += [work for _, work, _ in self.threads]
        self.threads.clear()
        self.joins, self.reported_end = 0, False
        self.generation = start.generation
        world = self.world
        environment = Environment(
            send=partial(world.send, self.worker, start.generation),
            report=lambda stage, event: self.tell(o.Report(start.generation, stage, event)),  # type: ignore[arg-type]
            to_driver=lambda stage, step, items: self.tell(
                control.Items(start.generation, stage, step, encode_column(list(items)), len(items))
            ),
            clock=lambda: world.now,
            tell=self.tell,
            mark=lambda *mark: self.tell(control.Mark(start.generation, *mark)),
            background=lambda work, then: self.threads.append((start.generation, work, then)),
        )
        runtime = Runtime(
            *(world.plan, self.worker, start.generation, start.placement, start.members),
            *(start.epochs, environment, world.now, world.store),
        )
        runtime.be_strict(world.strict)
        load = self.load if start.snapshot is not None else None
        if start.recover and world.store is not None:
            runtime.saver.recover(list(load.tokens) if load is not None else [])
        if load is not None:
            assert world.store is not None
            runtime.restore(load.frontiers)
            loading.load_at_once(runtime, world.store, load.parts, start.placement)
        self.runtime = runtime
        self.tell(o.Ready(start.generation))

    def run_thread(self) -> None:
        """Do the next work of the other thread, and pass its result on."""
        generation, work, then = self.threads.popleft()
        with self.acting():
            result, error = attempt(work)
            if self.runtime is not None and self.runtime.generation == generation:
                then(result, error)
            self.check_ended()

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Run this block as code of this process. With `World.report_errors`, report its errors to the controller."""
        self.world.acting = self
        try:
            yield
        except BaseException as error:
            pass_interrupt(error)
            if not self.world.report_errors:
                raise
            self.fail(error)
        self.world.acting = None  # after a crash it still names the process
        if self.ending:
            self._end()

    def fail(self, error: BaseException) -> None:
        """Report a failure to the controller, and wait for its orders."""
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            attempt(runtime.close)
        final = is_permanent(error, self.world.store is not None)
        self.tell(o.Failed(self.generation, str(error) or repr(error), final))

    def tell(self, report: Any) -> None:
        """Send a report to the controller."""
        self.world.activity += 1
        self.reports.append(report)

    def check_ended(self) -> None:
        """Report the end of the worker's stages once they have all ended."""
        runtime = self.runtime
        if runtime is not None and runtime.ended and not self.reported_end:
            self.reported_end = True
            runtime.flush()
            self.tell(o.Ended(runtime.generation))

    def end(self) -> None:
        """Let the process end after the present order."""
        self.ending = True

    def _end(self) -> None:
        """End in good order: the controller receives all reports."""
        if self.runtime is not None and not self.world.life.over:
            self.runtime.close()
        elif self.runtime is not None:  # its state can still be queried
            for runner in self.runtime.stages:
                runner.close()
        while self.reports:
            self.world.hear(self)
        self.world.gone(self, "its process ended")


class World:
    """Everything that belongs to one flow, except the disk, which outlives it."""

    def __init__(
        self,
        plan: Plan,
        workers: int,
        chance: random.Random,
        now: int,
        keeper: Storekeeper | None = None,
        *,
        report_errors: bool = False,
    ) -> None:
        self.plan = plan
        self.strict = False  # whether results that change after they were returned are an error
        # Whether an error fails a worker; otherwise it fails the test.
        self.report_errors = report_errors
        self.acting: Process | None = None  # the process whose code runs now
        self.chance = chance
        self.now = now
        self.keeper = keeper
        self.store: SnapshotStore | None = None if keeper is None else keeper.store
        self.processes: dict[Worker, Process] = {}
        self.links: dict[tuple[Worker, Worker], deque[tuple[int, bytes]]] = {}
        self.happened: list[o.Happened] = []
        self.activity = 0
        self.life_now = 0
        self.stray_work: list[Work] = []  # unfinished work of threads of older generations
        self.left: dict[Worker, Runtime] = {}  # of workers that ended with the flow
        self._store_work: deque[Callable[[], None]] = deque()
        self._launching: list[tuple[Worker, int]] = []
        self._worker_queue: deque[Worker] = deque()
        self._idle = False
        self._ticks = 0
        saving, generation = SnapshotRounds(None), 0
        if keeper is not None:
            keeper.submit = self._store_work.append
            saving, generation = keeper.saving, keeper.generation
        self.life = Lifecycle(
            len(plan.stages), Placement.of(range(workers)), saving=saving, generation=generation
        )
        self.ledger = Ledger(self.life, keeper, plan)
        self.do(self.life.start(self.life_now))

    @property
    def runtimes(self) -> dict[Worker, Runtime]:
        """Return the runtimes of all workers; after the flow has ended, the last ones."""
        running = {w: p.runtime for w, p in self.processes.items() if p.runtime is not None}
        return self.left | running

    # ------------------------------------------------------------ orders

    def do(self, orders: Sequence[o.Order]) -> None:
        """Carry out the machine's orders."""
        self.activity += len(orders)
        for order in orders:
            match order:
                case o.Launch(worker, incarnation):
                    self._launching.append((worker, incarnation))
                case o.Cancel(worker, incarnation):
                    self._launching = [coming for coming in self._launching if coming[0] != worker]
                    process = self.processes.get(worker)
                    if process is not None and process.incarnation == incarnation:
                        self.gone(process, "cancelled")
                    else:
                        self.do(self.life.down(worker, incarnation, "cancelled", self.life_now))
                case o.To(worker, what):
                    self._send_order(worker, what)
                case o.Happened():
                    self.happened.append(order)
                case o.Record() | o.Write() | o.GiveUp():
                    self.ledger.keep(order, lambda then: self.do(then()), lambda: self.life_now)

    def _send_order(self, worker: Worker, order: o.WorkerOrder) -> None:
        if isinstance(order, o.Start) and order.generation != self.ledger.started:
            self.links.clear()
        self.processes[worker].orders.extend(self.ledger.sent(worker, order))

    # ------------------------------------------------------------ events of workers

    def send(
        self, sender: Worker, generation: int, to: Worker, stage: int, message: m.Message
    ) -> None:
        """Send a message from one worker to another."""
        self.activity += 1
        queue = self.links.setdefault((sender, to), deque())
        queue.append((generation, encode(generation, stage, message)))

    def hear(self, process: Process) -> None:
        """Let the controller receive the next report of a worker."""
        report = process.reports.popleft()
        if isinstance(report, control.FromStreams):
            self._fed((process.worker, process.incarnation), report)
            return
        heard = self.ledger.heard(process.worker, report)
        if heard is not None:
            self.do(self.life.reported(process.worker, heard, self.life_now))

    def _fed(self, owner: tuple[Worker, int], report: control.FromStreams) -> None:
        """Handle a report about a stream of connectors: a request, a return, or a wish for a snapshot."""
        hasten = isinstance(report, control.Hastened) and report.generation == self.life.generation
        if not isinstance(report, control.Hastened):
            answers, hasten = self.ledger.feeds.heard(owner, report)
            for worker, answer in answers:
                if worker in self.processes:
                    self.processes[worker].orders.append(answer)
        if hasten and not self.life.over and not self.life.saving.requests:
            self.do(self.life.snapshot(self.life_now))

    def begun(self, process: Process) -> None:
        """Do nothing; subclasses learn here that a worker's sources begin."""

    def on_stream_order(self, process: Process, order: control.Streams) -> None:
        """Do nothing; subclasses learn here what the controller tells a worker of a stream of connectors."""

    def gone(self, process: Process, why: str) -> None:
        """Handle the end of a process."""
        if self.processes.get(process.worker) is process:
            del self.processes[process.worker]
            is_member = process.worker in self.life.placement.workers
            if self.life.over and is_member and process.runtime is not None:
                self.left[process.worker] = process.runtime
        self.do(self.life.down(process.worker, process.incarnation, why, self.life_now))

    # ------------------------------------------------------------ random choice of the next event

    def _possible_events(self) -> list[Callable[[], None]]:
        """Return all events that could happen now, apart from workers working."""
        events: list[Callable[[], None]] = [partial(self._up, launch) for launch in self._launching]
        if self._store_work:
            events.append(self._run_store)
        for process in self.processes.values():
            if process.orders:
                events.append(process.obey)
            if process.reports:
                events.append(partial(self.hear, process))
            if process.threads:
                events.append(process.run_thread)
        events += [partial(self._arrive, *link) for link in self._deliverable_links()]
        return events

    def _deliverable_links(self) -> Iterator[tuple[Worker, Worker]]:
        for (sender, to), queue in self.links.items():
            while queue and queue[0][0] < self.ledger.started:
                queue.popleft()  # from a worker that did not know yet that its generation is over
            if not queue:
                continue
            process = self.processes.get(to)
            if process is None:
                queue.clear()
            elif process.runtime is not None and process.runtime.generation == queue[0][0]:
                yield sender, to

    def _up(self, launch: tuple[Worker, int]) -> None:
        self._launching.remove(launch)
        worker, incarnation = launch
        self.processes[worker] = Process(self, worker, incarnation)
        self.do(self.life.up(worker, incarnation, ("here", worker), self.life_now))

    def _run_store(self) -> None:
        self._store_work.popleft()()

    def _arrive(self, sender: Worker, to: Worker) -> None:
        generation, data = self.links[sender, to].popleft()
        process = self.processes[to]
        runtime = process.runtime
        assert runtime is not None
        assert runtime.generation == generation
        with process.acting():
            stages = self.plan.stages
            reader = FrameReader(unpickling=lambda stage: Unpickling(stages[stage].name))
            for frame in reader.feed(data):
                assert not isinstance(frame.message, Pressure | Taken)
                runtime.receive(sender, frame.stage, frame.message)
            process.check_ended()

    def happen(self) -> bool:
        """Let one event happen. Return False if nothing is left to do at this time."""
        events = self._possible_events()
        if events and (not self._worker_queue or self.chance.random() < 0.7):
            self.chance.choice(events)()
            self._idle = False
            return True
        if not self._worker_queue:
            workers = sorted(self.processes)
            self._worker_queue = deque(self.chance.sample(workers, len(workers)))
            self._idle = True
        if self._worker_queue and self._work(self._worker_queue.popleft()):
            self._idle = False
        if self._worker_queue or not self._idle:
            return True
        return bool(self._possible_events()) or self._tick()

    def _work(self, worker: Worker) -> bool:
        process = self.processes.get(worker)
        if process is None or process.runtime is None:
            return False
        runtime = process.runtime
        runtime.hurry()
        before = self.activity + runtime.work
        with process.acting():
            runtime.pump(self.now)
            process.check_ended()
        return self.activity + runtime.work != before

    def _tick(self) -> bool:
        """Let time pass for the machine, because nothing else happens. Return False if the flow is over."""
        if self.life.gone or (self.life.coordinator is not None and not self.life.saving.busy):
            return False
        self._ticks += 1
        if self._ticks > MAX_IDLE_TICKS:
            raise StuckError(f"nothing happens any more: {self.life.state}, {self.life.saving}")
        before = self.activity
        self.life_now += TICK_US
        self.do(self.life.tick(self.life_now))
        if self.activity != before:
            self._ticks = 0
        return not self.life.gone

    def wake(self) -> None:
        """Let idle workers work again, because a test has changed something."""
        self._idle = False
