"""Run one worker of a flow, without its process: the stages, which receive messages from links and the controller.

`Runtime` has no sockets and no clock: `now` is an argument, and messages leave through `Environment`. So the same class
runs in a Spark task (`process.py`) and, many at a time, in one process under test (`railgun.testing.FlowTester`).

Its driver's duties:

1. Pass messages from links to `receive`, in the order of each link, and orders of the controller to `tell`, `begin`,
   `end_sources`, `stop_sources`.
2. Call `pump` again and again: at once while it returns 0, otherwise after the delay it returns, or sooner if a message
   has arrived. After `receive`, call `flush_outlets` soon: a few records may wait for others to be sent with.
3. Set `paused` while sources have to pause, and tell in `Environment.has_room` whether there is room to move keys.
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

TICK_US: Final = 20_000  # between two looks at the clocks of sources
# If sources bring fewer records, they are read again only after LINGER_US.
MIN_RECORDS: Final = 256
# Read at once while keys move: fewer, so that messages behind them do not wait long.
MAX_RECORDS_MOVING: Final = 500
MOVING_LATELY_US: Final = 3_000_000  # after a move, in which the next one may follow
LINGER_US: Final = 2_000  # between two reads that bring few records
COUNT_DIVISOR: Final = 2.0  # counting keys takes at most one part in so many of the time
# Moving keys takes at most one part in so many of the time, with one taker for each giver.
MOVE_DIVISOR: Final = 5.0
FLUSH_EVERY_US: Final = 1_000_000  # between two flushes of sinks
IDLE_S: Final = (0.001, 0.016)  # to wait when there is nothing to do: at first, and at most


def at_once(work: Work, then: Then) -> None:
    """Do the work in the calling thread."""
    then(*attempt(work))


@dataclass(frozen=True, slots=True)
class Environment:
    """Functions that a runtime needs from its driver."""

    send: Callable[[Worker, int, m.Message], None]
    """Send a message to a worker's stage."""
    report: Callable[[int, m.Command], None]
    """Send a report of a stage's distributor to the controller."""
    to_driver: Callable[[int, str, Sequence[Any]], None]
    """Send items of a stage's step to the program that started the flow."""
    clock: Callable[[], int]
    """Return the present time (µs)."""
    has_room: Callable[[], bool] = lambda: True
    """Return whether there is room to move keys."""
    tell: Callable[[orders.WorkerReport], None] = lambda report: None
    """Send a report to the controller."""
    mark: Callable[[int, str, int], None] = lambda stage, step, snapshot: None
    """Report that items which a stage's step sends to the program from now on are not part of a snapshot."""
    keep: Callable[[], None] = lambda: None
    """Exclude the present objects, which stay in memory, from garbage collection."""
    warn: Callable[[str, str], None] = lambda text, about: None
    """Send people a warning; the second argument identifies it, so that it is shown once."""
    background: Callable[[Work, Then], None] = at_once
    """Do work in another thread; then call the second function in this thread with its result and its error."""


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
        environment: Environment,
        now: int,
        store: SnapshotStore | None = None,
    ) -> None:
        self.plan = plan
        self.timed = plan.timed
        self.worker = worker
        self.generation = generation
        self.environment = environment
        self.send = environment.send
        self.report = environment.report
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
            to_driver = partial(environment.to_driver, stage.index)
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
        self.work = 0  # increases whenever work was done
        self._idle = IDLE_S[0]
        self._read_size = ReadSize(BATCH)
        self._moved = MIN
        self._next_read = now
        self._next_step = now
        self._next_tick = now
        self._next_flush = now + FLUSH_EVERY_US
        self._next_listing = {runner.stage.index: now for runner in self.sources}

    def place_of(self, step: str) -> Place:
        """Return the place of a step's sink: flow, step, worker and generation."""
        return replace(self._place, step=step)

    # ------------------------------------------------------------ messages and orders

    def receive(self, sender: Worker, stage: int, message: m.Message) -> None:
        """Handle a message from a link."""
        self._idle = IDLE_S[0]
        self.stages[stage].handle(m.Received(sender, message))

    def tell(self, stage: int, event: m.Join | m.Rescale | m.Depart) -> None:
        """Pass an order of the controller to a stage's distributor."""
        self._idle = IDLE_S[0]
        self.stages[stage].handle(event)

    def begin(self, now: int, snapshot: int = 0) -> None:
        """Let the sources begin, because all workers are ready. `snapshot` is the last one that began before."""
        self.begun = True
        self.saver.follow(snapshot)
        self.now = now
        for runner in self.sources:
            self._list(runner, now)

    def unload(self, step: str, keys: list[Any]) -> None:
        """Delete keys of a step that a snapshot says are deleted."""
        for operator in self.keyed():
            if operator.step == step:
                operator.unload(keys)

    def load(self, step: str, rows: Rows) -> None:
        """Load saved rows of a step before the sources begin; rows of older snapshots come first."""
        for operator in self.keyed():
            if operator.step == step:
                operator.load(rows)

    def restore(self, frontiers: Iterable[tuple[str, int]]) -> None:
        """Set the watermark of steps to that of a snapshot, before the first record is processed."""
        saved = dict(frontiers)
        for operator in self.keyed():
            if operator.step in saved:
                operator.restore(saved[operator.step])

    def loaded(self) -> None:
        """Tell all operators that the snapshot is loaded."""
        for operator in self.keyed():
            operator.loaded()

    def be_strict(self, strict: bool = True) -> None:
        """Raise an error, instead of copying, if user code changes results or items that others have (`FlowTester`)."""
        for operator in self.keyed():
            operator.sharing.strict = strict
        for runner in self.stages:
            for consumers in runner.operators.consumers:
                consumers.strict = strict

    def check_items(self) -> None:
        """Raise `SharedItemError` in strict mode if a step has changed items that other steps received."""
        for runner in self.stages:
            for consumers in runner.operators.consumers:
                consumers.check()

    def receiving(self) -> Iterator[Receiving]:
        """Yield the sources that programs push to."""
        for runner in self.sources:
            if isinstance(runner.operators.reading, Receiving):
                yield runner.operators.reading

    def keyed(self) -> Iterator[Keyed]:
        """Return an iterator over all operators that have state."""
        return (operator for runner in self.stages for operator in runner.operators.keyed)

    def end_sources(self) -> None:
        """Stop listing parts, because this worker is to leave; the parts it reads move to other workers."""
        for runner in self.sources:
            assert runner.operators.reading is not None
            runner.operators.reading.leave()
            runner.end_listing()

    def stop_sources(self) -> None:
        """Stop reading, because the flow is to end."""
        self.stopped = True
        for runner in self.sources:
            reading = runner.operators.reading
            assert reading is not None
            reading.stop()
            runner.end_listing()
            runner.tell_bound(self.now)

    # ------------------------------------------------------------ work

    def pump(self, now: int) -> float:
        """Do a bounded amount of work. Return the seconds until there may be more work (0: at once)."""
        self.now = now
        if self.moving:
            self._moved = now
        if not self.begun:
            return IDLE_S[1]
        if now >= self._next_tick:
            self._tick(now)
        delay = min(self._read(now), self._step(now))
        if self.flush_outlets():
            delay = min(delay, LINGER_US / 1_000_000)
        return delay

    def _step(self, now: int) -> float:
        """Do a piece of a rescale's or a snapshot's work, then pause it, because records come first."""
        busy: list[StageRunner | Saver] = [
            runner for runner in self.stages if runner.busy(self.environment.has_room)
        ]
        if self.saver.busy:
            busy.append(self.saver)
        if not busy:
            return IDLE_S[1]
        gap = self._next_read - now
        if 0 < gap < LINGER_US // 2:  # records that are read next must not wait for this work
            return gap / 1_000_000
        if now >= self._next_step:
            began = self.environment.clock()
            first, every = busy[0], COUNT_DIVISOR
            if isinstance(first, StageRunner) and not first.counting:
                every = MOVE_DIVISOR * first.givers_per_taker
            first.step()
            self.work += 1
            self._next_step = now + int(every * (self.environment.clock() - began))
        return max(0.0, (self._next_step - now) / 1_000_000)

    def _read(self, now: int) -> float:
        """Read all sources. Return the seconds until the next read is worthwhile."""
        if self.paused or self.stopped:
            return IDLE_S[0]
        if now < self._next_read:
            return (self._next_read - now) / 1_000_000
        rows, began = 0, self.environment.clock()
        most = (
            min(self._read_size.next, MAX_RECORDS_MOVING)
            if self.moving_lately
            else self._read_size.next
        )
        for runner in self.sources:
            reading = runner.operators.reading
            assert reading is not None
            active_before = len(reading.active)
            rows += reading.read(now, most)
            if len(reading.active) < active_before:
                self.work += 1
                self._idle = IDLE_S[0]
                runner.tell_bound(now)
            elif reading.woke:  # it holds the watermark back again, before a later one is sent
                runner.tell_bound(now)
            reading.woke = False
        self.work += rows
        if rows:
            self.flush_outlets()
            self._read_size.record(rows, most, self.environment.clock() - began)
        if rows >= min(MIN_RECORDS, most):
            return 0.0
        if rows:
            self._idle = IDLE_S[0]
            self._next_read = now + LINGER_US
            return LINGER_US / 1_000_000
        self._idle, delay = min(2 * self._idle, IDLE_S[1]), self._idle
        return delay

    def flush_outlets(self) -> bool:
        """Pass on what waits between stages, from the first to the last. Return False if nothing was waiting."""
        flushed = sum(runner.flush_outlets() for runner in self.stages)
        self.work += flushed
        return flushed > 0

    def hurry(self) -> None:
        """Check everything at the next `pump`, whatever the time."""
        self._next_read = self._next_tick = self._next_step = self.now

    def _tick(self, now: int) -> None:
        self._next_tick = now + TICK_US
        for runner in self.sources:
            if now >= self._next_listing[runner.stage.index]:
                self._list(runner, now)
            runner.tell_bound(now)
        if now >= self._next_flush:
            self._next_flush = now + FLUSH_EVERY_US
            self.flush()

    def _list(self, runner: StageRunner, now: int) -> None:
        reading = runner.operators.reading
        assert reading is not None
        self._next_listing[runner.stage.index] = now + int(reading.source.poll * 1_000_000)
        runner.list_parts(now)

    def flush(self) -> None:
        """Make visible what sinks have written."""
        for runner in self.stages:
            for writing in runner.operators.writing:
                writing.flush()

    # ------------------------------------------------------------ between stages

    def _deliver(self, origin: int, stage: int, batch: RowBatch) -> None:
        batch.origin = None  # it refers to rows of the stage before
        self.stages[stage].from_upstream(origin, m.Local(batch))

    def confirm(self, to: Worker, stage: str, message: m.Fenced) -> None:
        """Send the confirmation of a fence to the stage that raised it."""
        runner = self._by_name[stage]
        if to == self.worker:
            runner.handle(m.Received(self.worker, message))
        else:
            self.send(to, runner.stage.index, message)

    def _dead_letter(self, dead: Writing | None, letter: DeadLetter) -> None:
        assert dead is not None
        self.dead_letters += 1
        dead.write([letter])

    # ------------------------------------------------------------ status

    @property
    def ended(self) -> bool:
        """Return whether all stages have ended."""
        return all(runner.ended for runner in self.stages)

    @property
    def keys(self) -> int:
        """Return the number of states of all steps."""
        return sum(len(operator.store) for operator in self.keyed())

    @property
    def moving(self) -> bool:
        """Return whether keys of a stage are moving."""
        return any(runner.distributor.migration is not None for runner in self.stages)

    @property
    def moving_lately(self) -> bool:
        """Return whether keys are moving or did a moment ago; the next stage may follow."""
        return self.now - self._moved < MOVING_LATELY_US

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of this worker."""
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
        """Close everything; an error of one stage does not keep the others open."""
        with contextlib.ExitStack() as closing:  # closes in reverse order
            if self._disk is not None:
                closing.callback(self._disk.close)
            for runner in reversed(self.stages):
                closing.callback(runner.close)
