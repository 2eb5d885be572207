"""One worker of a flow, without its process: stages at work, fed by what comes from links and controller.

`Runtime` has no sockets and no clock: `now` is an argument, and what goes out goes through `Outside`. So the same class
runs in a Spark task (`process.py`) and, many at a time, in one process under test (`railgun.testing.FlowTester`).

Its driver's duties:

1. Give what links bring to `receive`, in the order of each link; what the controller orders to `tell`, `begin`,
   `end_sources`, `stop_sources`.
2. Call `pump` again and again: at once while it returns 0, else after the delay it returns, or sooner if anything came.
   After `receive`, call `flush_outlets` before long: a few records may wait for others to travel with.
3. Set `paused` while sources have to rest, and say in `Outside.calm` whether there is room to move keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from railgun.engine.operators.calls import attempt
from railgun.engine.operators.keyed import Keyed
from railgun.engine.operators.operator import DeadLetter, Setting
from railgun.engine.operators.reading import BATCH
from railgun.engine.operators.receiving import Receiving
from railgun.engine.operators.writing import Writing
from railgun.engine.protocol.frontier import MIN
from railgun.engine.protocol.lifecycle import messages as orders
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.read_size import ReadSize
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.distributor import Distributor
from railgun.engine.snapshots.store import SnapshotStore
from railgun.engine.state.disk import Disk
from railgun.engine.worker.saver import Saver, Then, Work
from railgun.engine.worker.stage import StageRunner
from railgun.flows.plan import DEAD, Plan, build
from railgun.flows.sink import Place
from railgun.transport.rows import RowBatch

if TYPE_CHECKING:
    from railgun.engine.snapshots.table import Rows

TICK: Final = 20_000  # µs between two looks at the clocks of sources
FEW: Final = 256  # records; when sources bring fewer, they are read again after LINGER only
FEW_MOVING: Final = 500  # records read at once while keys move: what is behind must not wait long
RESTLESS: Final = 3_000_000  # µs
LINGER: Final = 2_000  # µs
COUNT_EVERY: Final = 2.0  # a piece of counting keys is done in one part of the time of this many
MOVE_EVERY: Final = 5.0  # and a piece of moving them, if each who gives keys has one who takes them
FLUSH: Final = 1_000_000  # µs between two flushes of sinks
IDLE: Final = (0.001, 0.016)  # seconds to wait when there is nothing to do: at first, and at most


def at_once(work: Work, then: Then) -> None:
    """Do it here and now."""
    then(*attempt(work))


@dataclass(frozen=True, slots=True)
class Outside:
    """What a runtime needs of its surroundings."""

    send: Callable[[Worker, int, m.Message], None]
    """Send a message to a worker's stage."""
    report: Callable[[int, m.Command], None]
    """Tell the controller what a stage's distributor reports."""
    to_driver: Callable[[int, str, Sequence[Any]], None]
    """Give items of a stage's step to the program that started the flow."""
    clock: Callable[[], int]
    """The time now (µs)."""
    calm: Callable[[], bool] = lambda: True
    """Whether there is room to send more than records."""
    tell: Callable[[orders.WorkerReport], None] = lambda report: None
    """Tell the controller."""
    mark: Callable[[int, str, int], None] = lambda stage, step, snapshot: None
    """Say that what goes to the driver from a stage's step from now on is not part of a snapshot."""
    keep: Callable[[], None] = lambda: None
    """What is in memory now is here to stay: the collector need not look through it."""
    warn: Callable[[str, str], None] = lambda text, about: None
    """Tell people of something that may be wrong."""
    background: Callable[[Work, Then], None] = at_once
    """Do something in another thread, then call the second function here with its result, or what it raised."""


class Runtime:
    """The stages of a flow on one worker, in one generation of the flow."""

    def __init__(
        self,
        plan: Plan,
        worker: Worker,
        generation: int,
        placement: Placement,
        members: Iterable[Worker],
        epochs: Sequence[int],
        outside: Outside,
        now: int,
        store: SnapshotStore | None = None,
    ) -> None:
        self.plan = plan
        self.timed = plan.timed
        self.worker = worker
        self.generation = generation
        self.outside = outside
        self.send = outside.send
        self.report = outside.report
        self.now = now
        self.paused = False
        self.begun = False
        self.stopped = False
        self.dead_letters = 0
        members = tuple(members)
        self._disk = None if plan.state is None else Disk(plan.state)
        keep = None if self._disk is None else self._disk.store
        self._place = Place(plan.flow, "", worker, generation, transactional=store is not None)
        if store is not None:
            self._place = replace(self._place, store=store.identity())
        self.stages: list[StageRunner] = []
        for stage in plan.stages:
            distributor = Distributor(
                worker,
                placement,
                members,
                stage=stage.name,
                epoch=epochs[stage.index],
                downstream=len(stage.after),
                emits=stage.is_source,
            )
            deliver = partial(self._deliver, stage.index)
            to_driver = partial(outside.to_driver, stage.index)
            place = replace(self.place_of(DEAD), to_driver=to_driver)
            dead = (
                None
                if plan.dead_letters is None
                else Writing(Setting(DEAD), plan.dead_letters, place)
            )
            letter = partial(self._dead_letter, dead)
            operators = build(plan, stage, place, deliver, now, letter, keep)
            if dead is not None:
                operators.writing += (dead,)
            self.stages.append(StageRunner(self, stage, distributor, operators))
        self.saver = Saver(self, store)
        self.sources = [runner for runner in self.stages if runner.stage.is_source]
        self.saver.watch()
        self._by_name = {runner.stage.name: runner for runner in self.stages}
        self.work = 0  # goes up whenever something was done
        self._idle = IDLE[0]
        self._read_size = ReadSize(BATCH)
        self._moved = MIN
        self._next_read = now
        self._next_step = now
        self._next_tick = now
        self._next_flush = now + FLUSH
        self._next_listing = {runner.stage.index: now for runner in self.sources}

    def place_of(self, step: str) -> Place:
        """Return where a sink of a step is."""
        return replace(self._place, step=step)

    # ------------------------------------------------------------ what comes in

    def receive(self, sender: Worker, stage: int, message: m.Message) -> None:
        """A message from a link."""
        self._idle = IDLE[0]
        self.stages[stage].handle(m.Received(sender, message))

    def tell(self, stage: int, event: m.Join | m.Rescale | m.Depart) -> None:
        """An order of the controller to a stage's distributor."""
        self._idle = IDLE[0]
        self.stages[stage].handle(event)

    def begin(self, now: int, snapshot: int = 0) -> None:
        """Everybody is ready: let the sources begin. `snapshot` is the last one that began before."""
        self.begun = True
        self.saver.follow(snapshot)
        self.now = now
        for runner in self.sources:
            self._list(runner, now)

    def unload(self, step: str, keys: list[Any]) -> None:
        """Take keys of a step out that a snapshot says are deleted."""
        for operator in self.keyed():
            if operator.step == step:
                operator.unload(keys)

    def load(self, step: str, rows: Rows) -> None:
        """Put saved rows of a step in, before anything begins; those of older snapshots come first."""
        for operator in self.keyed():
            if operator.step == step:
                operator.load(rows)

    def restore(self, frontiers: Iterable[tuple[str, int]]) -> None:
        """Let time have come as far as a snapshot says, by step, before the first record is worked on."""
        saved = dict(frontiers)
        for operator in self.keyed():
            if operator.step in saved:
                operator.restore(saved[operator.step])

    def loaded(self) -> None:
        """All that was saved is in."""
        for operator in self.keyed():
            operator.loaded()

    def be_strict(self, strict: bool = True) -> None:
        """Let it be an error, and not mended, if user code changes results or items that others have (`FlowTester`)."""
        for operator in self.keyed():
            operator.sharing.strict = strict
        for runner in self.stages:
            for consumers in runner.operators.consumers:
                consumers.strict = strict

    def check_items(self) -> None:
        """Raise `SharedItemError` if a step has changed items that others got, where that is an error."""
        for runner in self.stages:
            for consumers in runner.operators.consumers:
                consumers.check()

    def receiving(self) -> Iterator[Receiving]:
        """What programs outside push to."""
        for runner in self.sources:
            if isinstance(runner.operators.reading, Receiving):
                yield runner.operators.reading

    def keyed(self) -> Iterator[Keyed]:
        """All operators that have state."""
        return (operator for runner in self.stages for operator in runner.operators.keyed)

    def end_sources(self) -> None:
        """This worker is to leave: its part in listing ends; what it reads moves away."""
        for runner in self.sources:
            assert runner.operators.reading is not None
            runner.operators.reading.leave()
            runner.end_listing()

    def stop_sources(self) -> None:
        """The flow is to end: read nothing more."""
        self.stopped = True
        for runner in self.sources:
            reading = runner.operators.reading
            assert reading is not None
            reading.stop()
            runner.end_listing()
            runner.tell_bound(self.now)

    # ------------------------------------------------------------ work

    def pump(self, now: int) -> float:
        """Do a bounded amount of work; the seconds until there may be more (0: at once)."""
        self.now = now
        if self.moving:
            self._moved = now
        if not self.begun:
            return IDLE[1]
        if now >= self._next_tick:
            self._tick(now)
        delay = min(self._read(now), self._step(now))
        if self.flush_outlets():
            delay = min(delay, LINGER / 1_000_000)
        return delay

    def _step(self, now: int) -> float:
        """Do a piece of what a rescale has to do, and then rest from it: records come first."""
        busy: list[StageRunner | Saver] = [
            runner for runner in self.stages if runner.busy(self.outside.calm)
        ]
        if self.saver.busy:
            busy.append(self.saver)
        if not busy:
            return IDLE[1]
        gap = self._next_read - now
        if 0 < gap < LINGER // 2:  # what is read must not wait for it
            return gap / 1_000_000
        if now >= self._next_step:
            began = self.outside.clock()
            first, every = busy[0], COUNT_EVERY
            if isinstance(first, StageRunner) and not first.counting:
                every = MOVE_EVERY * first.crowd
            first.step()
            self.work += 1
            self._next_step = now + int(every * (self.outside.clock() - began))
        return max(0.0, (self._next_step - now) / 1_000_000)

    def _read(self, now: int) -> float:
        """Read all sources; the seconds until it is worth doing again."""
        if self.paused or self.stopped:
            return IDLE[0]
        if now < self._next_read:
            return (self._next_read - now) / 1_000_000
        rows, began = 0, self.outside.clock()
        most = min(self._read_size.next, FEW_MOVING) if self.restless else self._read_size.next
        for runner in self.sources:
            reading = runner.operators.reading
            assert reading is not None
            active = len(reading.active)
            rows += reading.read(now, most)
            if len(reading.active) < active:
                self.work += 1
                self._idle = IDLE[0]
                runner.tell_bound(now)
            elif reading.woke:  # it holds time back again, before anyone can be told a later one
                runner.tell_bound(now)
            reading.woke = False
        self.work += rows
        if rows:
            self.flush_outlets()
            self._read_size.record(rows, most, self.outside.clock() - began)
        if rows >= min(FEW, most):
            return 0.0
        if rows:
            self._idle = IDLE[0]
            self._next_read = now + LINGER
            return LINGER / 1_000_000
        self._idle, delay = min(2 * self._idle, IDLE[1]), self._idle
        return delay

    def flush_outlets(self) -> bool:
        """Hand on what waits between stages, from the first to the last; False if nothing does."""
        flushed = sum(runner.flush_outlets() for runner in self.stages)
        self.work += flushed
        return flushed > 0

    def hurry(self) -> None:
        """Look at everything at the next `pump`, whatever the time."""
        self._next_read = self._next_tick = self._next_step = self.now

    def _tick(self, now: int) -> None:
        self._next_tick = now + TICK
        for runner in self.sources:
            if now >= self._next_listing[runner.stage.index]:
                self._list(runner, now)
            runner.tell_bound(now)
        if now >= self._next_flush:
            self._next_flush = now + FLUSH
            self.flush()

    def _list(self, runner: StageRunner, now: int) -> None:
        reading = runner.operators.reading
        assert reading is not None
        self._next_listing[runner.stage.index] = now + int(reading.source.poll * 1_000_000)
        runner.list_parts(now)

    def flush(self) -> None:
        """Let others see what sinks have written."""
        for runner in self.stages:
            for writing in runner.operators.writing:
                writing.flush()

    # ------------------------------------------------------------ between stages

    def _deliver(self, origin: int, stage: int, batch: RowBatch) -> None:
        batch.origin = None  # rows of the stage that is left
        self.stages[stage].from_upstream(origin, m.Local(batch))

    def confirm(self, to: Worker, stage: str, message: m.Fenced) -> None:
        """Carry the confirmation of a fence to the stage that raised it."""
        runner = self._by_name[stage]
        if to == self.worker:
            runner.handle(m.Received(self.worker, message))
        else:
            self.send(to, runner.stage.index, message)

    def _dead_letter(self, dead: Writing | None, letter: DeadLetter) -> None:
        assert dead is not None
        self.dead_letters += 1
        dead.write([letter])

    # ------------------------------------------------------------ what the process asks

    @property
    def ended(self) -> bool:
        """Whether every stage has come to its end."""
        return all(runner.ended for runner in self.stages)

    @property
    def keys(self) -> int:
        """How many states there are, of all steps."""
        return sum(len(operator.store) for operator in self.keyed())

    @property
    def moving(self) -> bool:
        """Whether a stage is in motion."""
        return any(runner.distributor.migration is not None for runner in self.stages)

    @property
    def restless(self) -> bool:
        """Whether a stage is in motion, or was a moment ago: the next one may follow."""
        return self.now - self._moved < RESTLESS

    def metrics(self) -> dict[str, Any]:
        """Figures of this worker, for people and for the controller."""
        stages = {}
        for runner in self.stages:
            migration = runner.distributor.migration
            waiting = 0 if migration is None else migration.arrivals.records
            reading = runner.operators.reading
            stages[runner.stage.name] = {
                "phase": runner.distributor.phase.name,
                "epoch": runner.distributor.epoch,
                "records": runner.records if reading is None else reading.records,
                "written": sum(writing.records for writing in runner.operators.writing),
                "keys": runner.keys,
                "moving": runner.moving_keys,
                "moved": runner.moved_keys,
                "taken": runner.taken_keys,
                "bytes": runner.moved_bytes,
                "held": waiting,
                "longest_hold": runner.longest_hold,
                "ended": runner.ended,
            }
        errors = {k: v for runner in self.stages for k, v in runner.operators.errors.items()}
        return {"stages": stages, "dead_letters": self.dead_letters, "errors": errors}

    def close(self) -> None:
        """Let go of everything; a stage that raises keeps no other."""
        with contextlib.ExitStack() as closing:  # the last one that is named is the first to go
            if self._disk is not None:
                closing.callback(self._disk.close)
            for runner in reversed(self.stages):
                closing.callback(runner.close)
