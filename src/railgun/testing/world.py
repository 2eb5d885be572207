"""A world in one process: the lifecycle machine, simulated workers with the production runtime, links, and a store.

What happens next (a message arrives, a worker works, a thread comes to its end, a disk has written something) is drawn
from a seed, so the same seed gives the same run. `FlowTester` lets users do things to it; the simulation of crashes
lets chance do them.
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
from railgun.engine.worker.runtime import Outside, Runtime
from railgun.engine.worker.saver import Then, Work
from railgun.errors import RailgunError, pass_interrupt
from railgun.flows.errors import is_permanent
from railgun.flows.plan import Plan
from railgun.transport.columns import encode_column

MOMENT: Final = 1_000_000  # µs that pass for the lifecycle machine when nothing else happens


PATIENCE: Final = 1000  # such moments in a row


class StuckError(RailgunError):
    """The world has come to a standstill."""


class Process:
    """A worker's process: its runtime, orders on their way to it, reports on their way from it."""

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
        self.told_ended = False
        self.generation = 0  # that it was last told to start
        self.ending = False

    # ------------------------------------------------------------ what happens to it

    def obey(self) -> None:
        """Take the next order."""
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
                self.world.told_of_stream(self, order)
        self.look()

    def _start(self, start: o.Start) -> None:
        if self.runtime is not None:
            self.runtime.close()
            self.runtime = None
        self.world.strays += [work for _, work, _ in self.threads]
        self.threads.clear()
        self.joins, self.told_ended = 0, False
        self.generation = start.generation
        world = self.world
        outside = Outside(
            send=partial(world.send, self.worker, start.generation),
            report=lambda stage, told: self.tell(o.Report(start.generation, stage, told)),  # type: ignore[arg-type]
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
            *(start.epochs, outside, world.now, world.store),
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
        """What another thread had to do is done."""
        generation, work, then = self.threads.popleft()
        with self.acting():
            result, error = attempt(work)
            if self.runtime is not None and self.runtime.generation == generation:
                then(result, error)
            self.look()

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """What is done inside is done by this process; what goes wrong it tells the controller, if the world is so."""
        self.world.acting = self
        try:
            yield
        except BaseException as error:
            pass_interrupt(error)
            if not self.world.forgiving:
                raise
            self.fail(error)
        self.world.acting = None  # after a crash it is known who it was
        if self.ending:
            self._end()

    def fail(self, error: BaseException) -> None:
        """Tell the controller, and rest until it says what to do."""
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            attempt(runtime.close)
        final = is_permanent(error, self.world.store is not None)
        self.tell(o.Failed(self.generation, str(error) or repr(error), final))

    def tell(self, report: Any) -> None:
        """Say something to the controller."""
        self.world.activity += 1
        self.reports.append(report)

    def look(self) -> None:
        """After anything was done: is it the end?"""
        runtime = self.runtime
        if runtime is not None and runtime.ended and not self.told_ended:
            self.told_ended = True
            runtime.flush()
            self.tell(o.Ended(runtime.generation))

    def end(self) -> None:
        """The process is to end."""
        self.ending = True

    def _end(self) -> None:
        """In order: what it said is heard."""
        if self.runtime is not None and not self.world.life.over:
            self.runtime.close()
        elif self.runtime is not None:  # its state can still be looked at
            for runner in self.runtime.stages:
                runner.close()
        while self.reports:
            self.world.hear(self)
        self.world.gone(self, "its process ended")


class World:
    """Everything there is of one flow, but the disk, which outlives it."""

    def __init__(
        self,
        plan: Plan,
        workers: int,
        chance: random.Random,
        now: int,
        keeper: Storekeeper | None = None,
        *,
        forgiving: bool = False,
    ) -> None:
        self.plan = plan
        self.strict = False  # whether results that change after they were returned are an error
        self.forgiving = forgiving  # whether an error fails a worker, or else the test
        self.acting: Process | None = None  # who does something now
        self.chance = chance
        self.now = now
        self.keeper = keeper
        self.store: SnapshotStore | None = None if keeper is None else keeper.store
        self.processes: dict[Worker, Process] = {}
        self.links: dict[tuple[Worker, Worker], deque[tuple[int, bytes]]] = {}
        self.happened: list[o.Happened] = []
        self.activity = 0
        self.life_now = 0
        self.strays: list[Work] = []  # what threads of an older generation had still to do
        self.left: dict[Worker, Runtime] = {}  # of workers that were let go when all was over
        self._store_work: deque[Callable[[], None]] = deque()
        self._coming: list[tuple[Worker, int]] = []
        self._todo: deque[Worker] = deque()
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
        """The runtimes there are; when all is over, those there were."""
        running = {w: p.runtime for w, p in self.processes.items() if p.runtime is not None}
        return self.left | running

    # ------------------------------------------------------------ orders

    def do(self, orders: Sequence[o.Order]) -> None:
        """Carry out what the machine wants."""
        self.activity += len(orders)
        for order in orders:
            match order:
                case o.Launch(worker, incarnation):
                    self._coming.append((worker, incarnation))
                case o.Cancel(worker, incarnation):
                    self._coming = [coming for coming in self._coming if coming[0] != worker]
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

    # ------------------------------------------------------------ what workers do

    def send(
        self, sender: Worker, generation: int, to: Worker, stage: int, message: m.Message
    ) -> None:
        """A worker sends to another."""
        self.activity += 1
        queue = self.links.setdefault((sender, to), deque())
        queue.append((generation, encode(generation, stage, message)))

    def hear(self, process: Process) -> None:
        """The controller hears the next report of a worker."""
        report = process.reports.popleft()
        if isinstance(report, control.FromStreams):
            self._fed((process.worker, process.incarnation), report)
            return
        heard = self.ledger.heard(process.worker, report)
        if heard is not None:
            self.do(self.life.reported(process.worker, heard, self.life_now))

    def _fed(self, owner: tuple[Worker, int], report: control.FromStreams) -> None:
        """A worker asks for a stream of connectors, or gives one back."""
        hasten = isinstance(report, control.Hastened) and report.generation == self.life.generation
        if not isinstance(report, control.Hastened):
            answers, hasten = self.ledger.feeds.heard(owner, report)
            for worker, answer in answers:
                if worker in self.processes:
                    self.processes[worker].orders.append(answer)
        if hasten and not self.life.over and not self.life.saving.requests:
            self.do(self.life.snapshot(self.life_now))

    def begun(self, process: Process) -> None:
        """A worker's sources begin."""

    def told_of_stream(self, process: Process, order: control.Streams) -> None:
        """The controller tells a worker of a stream that connectors push."""

    def gone(self, process: Process, why: str) -> None:
        """A process has ended."""
        if self.processes.get(process.worker) is process:
            del self.processes[process.worker]
            there = process.worker in self.life.placement.workers
            if self.life.over and there and process.runtime is not None:
                self.left[process.worker] = process.runtime
        self.do(self.life.down(process.worker, process.incarnation, why, self.life_now))

    # ------------------------------------------------------------ chance

    def _things(self) -> list[Callable[[], None]]:
        """What could happen now, apart from workers working."""
        things: list[Callable[[], None]] = [partial(self._up, coming) for coming in self._coming]
        if self._store_work:
            things.append(self._run_store)
        for process in self.processes.values():
            if process.orders:
                things.append(process.obey)
            if process.reports:
                things.append(partial(self.hear, process))
            if process.threads:
                things.append(process.run_thread)
        things += [partial(self._arrive, *link) for link in self._full_links()]
        return things

    def _full_links(self) -> Iterator[tuple[Worker, Worker]]:
        for (sender, to), queue in self.links.items():
            while queue and queue[0][0] < self.ledger.started:
                queue.popleft()  # from one who had not heard yet that its generation is over
            if not queue:
                continue
            process = self.processes.get(to)
            if process is None:
                queue.clear()
            elif process.runtime is not None and process.runtime.generation == queue[0][0]:
                yield sender, to

    def _up(self, coming: tuple[Worker, int]) -> None:
        self._coming.remove(coming)
        worker, incarnation = coming
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
            process.look()

    def happen(self) -> bool:
        """Let one thing happen; False: nothing is left to do at this time."""
        things = self._things()
        if things and (not self._todo or self.chance.random() < 0.7):
            self.chance.choice(things)()
            self._idle = False
            return True
        if not self._todo:
            workers = sorted(self.processes)
            self._todo = deque(self.chance.sample(workers, len(workers)))
            self._idle = True
        if self._todo and self._work(self._todo.popleft()):
            self._idle = False
        if self._todo or not self._idle:
            return True
        return bool(self._things()) or self._tick()

    def _work(self, worker: Worker) -> bool:
        process = self.processes.get(worker)
        if process is None or process.runtime is None:
            return False
        runtime = process.runtime
        runtime.hurry()
        before = self.activity + runtime.work
        with process.acting():
            runtime.pump(self.now)
            process.look()
        return self.activity + runtime.work != before

    def _tick(self) -> bool:
        """Nothing happens: perhaps the machine waits for time to pass."""
        if self.life.gone or (self.life.coordinator is not None and not self.life.saving.busy):
            return False
        self._ticks += 1
        if self._ticks > PATIENCE:
            raise StuckError(f"nothing happens any more: {self.life.state}, {self.life.saving}")
        before = self.activity
        self.life_now += MOMENT
        self.do(self.life.tick(self.life_now))
        if self.activity != before:
            self._ticks = 0
        return not self.life.gone

    def stir(self) -> None:
        """Something was done from outside."""
        self._idle = False
