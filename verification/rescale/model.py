"""Model of a worker for the proof: production distributors, chained stage by stage, around model operators.

The model operator keeps, for each key, how many records of each origin it has processed. Records are numbered, so the
operator itself notices the moment a record is lost, doubled or out of order, or meets the wrong state: it raises a
`Violation`. The exhaustive explorer and the simulator use the same worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from railgun.engine.protocol.frontier import MAX, MIN
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.distributor import Distributor
from railgun.engine.protocol.rescale.order import Order
from railgun.errors import ProtocolError
from railgun.hashing import Hashes
from verification.rescale.rows import Item, Rows

Counts = dict[int, int]
"""By origin: the number of the last record processed."""

SCATTER = 0x9E37_79B9_7F4A_7C15
"""The factor that puts keys in another order: k1, k2 and k3 become k2, k1, k3."""

TIMER = -1
"""The origin under which a key's state counts its own timers."""


class Moved(NamedTuple):
    """The state of a key that moves: its counts, whether it has ended, and the time it has been brought to."""

    counts: Counts
    ended: bool
    time: int


class Violation(Exception):  # noqa: N818 - it is found, not made
    """A property does not hold: `kind` names the property, the text describes the case."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class CountingOperator:
    """Counts records by key and origin, checks them, and emits one record for each to the next stage.

    An operator that `forgets` keeps no state and passes records on as they are: the next stage checks their order. An
    operator with `timers` emits one more record for each key whenever the key is brought to its time before it moves.
    """

    __slots__ = (
        "ended", "endings", "forgets", "frontier", "onward", "states", "timers", "times", "worker",
    )  # fmt: skip
    constant = ("forgets", "onward", "timers", "worker")

    def __init__(
        self,
        worker: Worker,
        onward: Callable[[int], int] | None = None,
        forgets: bool = False,
        timers: bool = False,
    ) -> None:
        self.worker = worker
        self.onward = onward
        self.forgets = forgets
        self.timers = timers
        self.endings: Counts = {}  # how often each key was ended here
        self.states: dict[int, Counts] = {}
        self.times: Counts = {}  # how far keys had been brought that came from elsewhere
        self.ended: set[int] = set()
        self.frontier = MIN

    def process(self, rows: Rows) -> Rows | None:
        """Count each record; return the records for the next stage, or None without a next stage."""
        emitted = []
        for item in rows.items:
            if item.time < self.frontier:
                raise Violation(
                    "late",
                    f"worker {self.worker} processed {tell(item)} after frontier {self.frontier}",
                )
            if self.forgets:
                emitted.append(item)
                continue
            counts = self.states.setdefault(item.key, {})
            expected = counts.get(item.origin, 0) + 1
            if item.seq != expected:
                kind = "twice" if item.seq < expected else "out of order"
                raise Violation(
                    kind,
                    f"worker {self.worker} processed {tell(item)} when {tell(item._replace(seq=expected))} "
                    "was next",
                )
            counts[item.origin] = item.seq
            if self.onward is not None:
                emitted.append(self.emit(item.key, item.time))
        return Rows(emitted) if emitted else None

    def emit(self, key: int, time: int) -> Item:
        """Return the next record of a key for the next stage: its number is the count of the key's state."""
        assert self.onward is not None
        return Item(self.onward(key), key, sum(self.states[key].values()), time)

    def fire(self, hashes: Hashes) -> Rows | None:
        """Return what the timers of these keys emit before the keys move; no timer is in the past of its key."""
        if not self.timers or self.onward is None:
            return None
        emitted = []
        for key in hashes.tolist():
            if key in self.states and key not in self.ended:
                counts = self.states[key]
                counts[TIMER] = counts.get(TIMER, 0) + 1
                emitted.append(self.emit(key, max(0, self.frontier, self.times.get(key, MIN))))
        return Rows(emitted) if emitted else None

    def keys(self) -> Hashes:
        """Return all keys that have state, some of them twice, in an order unrelated to that of their hashes.

        A real operator names keys in the order of its table, and a stage has several operators. Here the order depends
        on the keys alone: the explorer takes states for equal that have the same keys.
        """
        keys = sorted(self.states, key=lambda key: key * SCATTER % (1 << 64))
        return np.array([*keys, *sorted(keys)[::2]], dtype=np.uint64)

    def collect(self, hashes: Hashes, frontier: int) -> dict[int, Moved]:
        """Return the state of these keys, brought to `frontier`."""
        keys = [key for key in hashes.tolist() if key in self.states]
        if frontier == MAX:
            self.end(keys)
        now = max(frontier, self.frontier)
        return {key: Moved(dict(self.states[key]), key in self.ended, now) for key in keys}

    def end(self, keys: Iterable[int]) -> None:
        """End these keys, which get no more records; each must be ended once, wherever it is."""
        for key in keys:
            if key not in self.ended:
                self.ended.add(key)
                self.endings[key] = self.endings.get(key, 0) + 1

    def take(self, state: dict[int, Moved]) -> None:
        """Add state from another worker, which must not come from the past of this worker: its timers would be late."""
        for key, (counts, ended, time) in state.items():
            if key in self.states:
                raise Violation(
                    "split state", f"worker {self.worker} got a second state of {name(key)}"
                )
            if time < self.frontier or (self.frontier == MAX and not ended):
                raise Violation(
                    "late", f"worker {self.worker} at {self.frontier} got {name(key)} from {time}"
                )
            self.states[key] = dict(counts)
            if self.timers:
                self.times[key] = time
            if ended:
                self.ended.add(key)

    def drop(self, hashes: Hashes) -> None:
        """Forget these keys."""
        for key in hashes.tolist():
            self.states.pop(key, None)
            self.times.pop(key, None)
            self.ended.discard(key)

    def snapshot(self) -> dict[int, Counts]:
        """Return a copy of all state."""
        return {key: dict(counts) for key, counts in self.states.items()}

    def advance(self, frontier: int) -> int:
        """Advance to `frontier`; return how far the next stage may advance."""
        self.frontier = frontier
        if frontier == MAX:
            self.end(self.states)
        return frontier


class ModelStage:
    """One stage on one worker: its distributor, its operator, and its snapshot."""

    __slots__ = ("distributor", "operator", "saved")

    def __init__(self, distributor: Distributor, operator: Any) -> None:
        self.distributor = distributor
        self.operator = operator
        self.saved: dict[int, Any] = {}


class ModelWorker:
    """One worker: carries out the commands of its distributors as a real driver would.

    With `prompt` the operators answer Interrogate and Collect at once (as real operators do unless they wait for
    something); without, they answer when `answer` is called, so that anything can happen in between.
    """

    __slots__ = ("outbox", "pending", "prompt", "queue", "reports", "stages", "validate", "worker")
    constant = ("prompt", "validate", "worker")

    def __init__(self, worker: Worker, stages: Iterable[ModelStage], prompt: bool = True) -> None:
        self.worker = worker
        self.stages = tuple(stages)
        self.prompt = prompt
        self.validate = True
        self.pending: list[tuple[int, m.Interrogated | m.Collected]] = []
        self.queue: list[tuple[int, m.Event]] = []
        self.outbox: list[tuple[Worker, int, m.Message]] = []
        self.reports: list[tuple[int, m.Command]] = []

    def feed(self, stage: int, event: m.Event) -> None:
        """Give an event to the distributor of a stage, and carry out the commands that follow.

        What the commands themselves lead to (answers, records for the next stage) comes after all commands have been
        carried out, in order: the first duty of a driver.
        """
        self.queue.append((stage, event))
        if len(self.queue) > 1:
            return  # called within a command
        try:
            while self.queue:
                self._take(*self.queue[0])
                self.queue.pop(0)
        finally:
            self.queue.clear()

    def _take(self, stage: int, event: m.Event) -> None:
        distributor = self.stages[stage].distributor
        try:
            commands = distributor.handle(event)
            if self.validate:
                distributor.validate()
        except (ProtocolError, AssertionError) as error:
            raise Violation("protocol", f"worker {self.worker}: {error or repr(error)}") from error
        for command in commands:
            self.carry_out(stage, command)
        if distributor.emissions is not None and distributor.bound == MIN:
            self._take(stage, m.Bound(self.stages[stage].operator.bound()))

    def carry_out(self, index: int, command: m.Command) -> None:
        """Carry out one command of a distributor."""
        stage = self.stages[index]
        operator = stage.operator
        match command:
            case m.Process(batch):
                self.pass_on(index, operator.process(batch))
            case m.Send(to, message):
                self.outbox.append((to, index, message))
            case m.Interrogate():
                keys, migration = operator.keys(), stage.distributor.migration_now()
                named = Order.of([keys[migration.leaving(self.worker, keys)]])
                self.ask(index, m.Interrogated(named))
            case m.Collect(parts, frontier):
                for _, hashes in parts:
                    self.pass_on(index, operator.fire(hashes))
                states = tuple(operator.collect(hashes, frontier) for _, hashes in parts)
                self.ask(index, m.Collected(states))
            case m.Take(_, state):
                operator.take(state)
            case m.Drop(hashes):
                operator.drop(hashes)
            case m.RaiseFence(fence):
                if index + 1 < len(self.stages):
                    self.feed(index + 1, m.PassFence(fence))
            case m.Confirm(to, name_, message):
                target = next(i for i, s in enumerate(self.stages) if s.distributor.stage == name_)
                if to == self.worker:
                    self.feed(target, m.Received(self.worker, message))
                else:
                    self.outbox.append((to, target, message))
            case m.Snapshot(snapshot):
                stage.saved[snapshot] = operator.snapshot()
                if index + 1 < len(self.stages):
                    self.feed(index + 1, m.StartSnapshot(snapshot))
                else:
                    self.reports.append((index, command))
            case m.Advance(frontier):
                self.advance(index, operator.advance(frontier))
            case m.Started() | m.Completed() | m.Left():
                self.reports.append((index, command))

    def ask(self, index: int, answer: m.Interrogated | m.Collected) -> None:
        """Queue the operators' answer, which holds what they had when they were asked, whenever it is given."""
        self.pending.append((index, answer))
        if self.prompt:
            self.answer()

    def answer(self) -> None:
        """Let the operators give their oldest answer."""
        index, answer = self.pending.pop(0)
        self.feed(index, answer)

    def pass_on(self, index: int, emitted: Rows | None) -> None:
        """Give the records that a stage emitted to the next stage."""
        if emitted is not None and index + 1 < len(self.stages):
            self.feed(index + 1, m.Local(emitted))

    def advance(self, index: int, frontier: int) -> None:
        """Advance the frontier of what a stage emits."""
        if index + 1 < len(self.stages) and frontier > self.stages[index + 1].distributor.local:
            self.feed(index + 1, m.Advanced(frontier))

    @property
    def settled(self) -> bool:
        """Return whether nothing is left to do on this worker."""
        return not self.pending and all(
            stage.distributor.migration is None and stage.distributor.barrier.snapshot is None
            for stage in self.stages
        )


def counting_worker(
    worker: Worker,
    placements: Iterable[Placement],
    members: Iterable[Worker],
    onward: Callable[[int], int] | None = None,
    prompt: bool = True,
    forgets: bool = False,
    timers: bool = False,
    make: type[Distributor] = Distributor,
) -> ModelWorker:
    """Return a worker of counting stages, one for each placement."""
    placements, members = tuple(placements), tuple(members)
    stages = []
    for index, placement in enumerate(placements):
        last = index == len(placements) - 1
        distributor = make(worker, placement, members, stage=f"s{index}", downstream=int(not last))
        operator = CountingOperator(worker, None if last else onward, forgets and not last, timers)
        stages.append(ModelStage(distributor, operator))
    model = ModelWorker(worker, stages, prompt)
    model.validate = make is Distributor  # a mutant must be caught by its effects
    return model


def name(key: int) -> str:
    """Return a key's name in stories: k1, k2, ..."""
    return f"k{key}"


def tell(item: Item) -> str:
    """Return an item for stories: record 2 of worker 1 for key k1."""
    return f"{name(item.key)}#{item.seq} of {item.origin}"
