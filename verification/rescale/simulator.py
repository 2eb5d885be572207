"""A seeded simulator of whole clusters, with the production machines in every worker.

A job of three stages runs on simulated workers and links, in simulated time:

    lister → [ readers, by partition ] → [ counts, by key ] → [ counts of counts, by another key ]

Readers are keyed state like any other: their position moves with them. While records flow, the number of workers
changes, snapshots are taken, links and operators are slow, and workers crash and the job is loaded from its last
snapshot onto another number of workers. Timers emit when keys are collected, all readers fall idle and wake, and
the sources may end while a rescale is under way or waits for its turn. Every record is numbered, so the first one
lost, doubled, out of order or late is noticed where it happens; every snapshot is checked to be an exact cut; and
at the end every count is compared with what the sources held, and every key must have ended once.

All choices come from the seed: the same seed gives the same trace, on any machine and in any process.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from railgun.engine.protocol.frontier import LAST, MAX, MIN
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import coordinator as c
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.coordinator import Coordinator
from railgun.engine.protocol.rescale.distributor import Distributor
from railgun.errors import ProtocolError
from railgun.hashing import Hashes, key_hash
from verification.rescale.model import (
    TIMER,
    CountingOperator,
    Counts,
    ModelStage,
    ModelWorker,
    Violation,
)
from verification.rescale.rows import Item, Rows

STAGES = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan that a seed stands for. Every field is drawn from the seed; `shrink` changes them one by one."""

    seed: int
    workers: int
    most_workers: int
    partitions: int
    keys: int
    records: int
    skew: float
    burst: int
    chunk: int
    rescales: int
    snapshots: int
    crashes: int
    slow_links: float
    slow_operators: bool
    swaps: bool
    pins: bool
    timers: bool = False
    tail: int = 0
    abrupt: bool = False

    @staticmethod
    def of(seed: int, size: float = 1.0) -> Plan:
        """Draw the plan of a seed; `size` scales how many records and keys there are."""
        draw = random.Random(f"plan {seed}")
        return Plan(
            seed=seed,
            workers=draw.choice((1, 2, 3, 3, 4, 5)),
            most_workers=draw.choice((3, 5, 8)),
            partitions=draw.randint(1, 10),
            keys=max(2, int(size * draw.choice((3, 30, 300, 3000)))),
            records=max(20, int(size * draw.choice((100, 400, 1500)))),
            skew=draw.choice((0.0, 0.8, 1.3)),
            burst=draw.choice((1, 5, 40)),
            chunk=draw.choice((1, 7, 100, 1000)),
            rescales=draw.choice((1, 2, 3, 5)),
            snapshots=draw.choice((0, 1, 3, 8)),
            crashes=draw.choice((0, 0, 0, 1, 2)),
            slow_links=draw.choice((0.0, 0.2, 0.5, 1.0)),
            slow_operators=draw.random() < 0.3,
            swaps=draw.random() < 0.3,
            pins=draw.random() < 0.2,
            timers=draw.random() < 0.5,
            tail=draw.choice((0, 0, 20)),
            abrupt=draw.random() < 0.4,
        )


@dataclass(slots=True)
class Outcome:
    """The result of one seed."""

    plan: Plan
    violation: Violation | None = None
    trace: list[str] = field(default_factory=list)
    digest: str = ""
    records: int = 0
    rescales: int = 0
    moved: int = 0
    snapshots: int = 0
    during: int = 0
    crashes: int = 0
    abrupt: int = 0
    steps: int = 0

    def tally(self) -> Counter[str]:
        """Return the result as numbers that can be added up over many runs."""
        return Counter(
            schedules=1,
            records=self.records,
            rescales=self.rescales,
            moved=self.moved,
            snapshots=self.snapshots,
            during=self.during,
            crashes=self.crashes,
            abrupt=self.abrupt,
            violations=int(self.violation is not None),
        )

    def story(self, lines: int = 40) -> str:
        """Return the failure for a reader: the plan, and the last `lines` of the trace."""
        if self.violation is None:
            return f"seed {self.plan.seed}: all is well"
        shown = self.trace[-lines:]
        left_out = len(self.trace) - len(shown)
        head = [f"seed {self.plan.seed}: {self.violation}", f"plan: {self.plan}"]
        if left_out:
            head.append(f"... {left_out} earlier lines")
        return "\n".join([*head, *shown])


class ReaderOperator:
    """Keyed readers: the state of a partition is the position in it."""

    __slots__ = ("frontier", "source", "states", "stopped")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.states: dict[int, int] = {}
        self.stopped: set[int] = set()  # collected, not yet dropped: not to be read
        self.frontier = MIN

    def process(self, rows: Rows) -> Rows | None:
        """Open the partitions that the lister named; an open partition stays where it is."""
        for item in rows.items:
            self.states.setdefault(item.key, 0)
        return None

    def read(self, partition: int, count: int) -> Rows | None:
        """Return the next records of an open partition."""
        if partition in self.stopped:
            return None
        position = self.states[partition]
        end = min(position + count, self.source.available(partition))
        items = self.source.records[partition][position:end]
        self.states[partition] = position + len(items)
        return Rows(items) if items else None

    def bound(self) -> int:
        """Return the earliest time at which a reader of this worker may still emit."""
        return min((self.source.bound(p, at) for p, at in self.states.items()), default=MAX)

    def fire(self, hashes: Hashes) -> Rows | None:
        """Return None: readers have no timers."""
        return None

    def keys(self) -> Hashes:
        """Return all open partitions, in the order in which they were opened."""
        return np.array(list(self.states), dtype=np.uint64)

    def collect(self, hashes: Hashes, frontier: int) -> dict[int, int]:
        """Return the positions of these partitions."""
        self.stopped.update(hashes.tolist())
        return {p: self.states[p] for p in hashes.tolist() if p in self.states}

    def take(self, state: dict[int, int]) -> None:
        """Add positions from another worker."""
        for partition, position in state.items():
            if partition in self.states:
                raise Violation("split state", f"partition {partition:x} is read twice")
            self.states[partition] = position

    def drop(self, hashes: Hashes) -> None:
        """Close these partitions."""
        for partition in hashes.tolist():
            self.states.pop(partition, None)
        self.stopped.difference_update(hashes.tolist())

    def snapshot(self) -> dict[int, int]:
        """Return all positions."""
        return dict(self.states)

    def advance(self, frontier: int) -> int:
        """Return the time of the slowest reader on any worker."""
        self.frontier = frontier
        return frontier


class Source:
    """The content of the partitions, and the counts that follow from any prefix of them.

    With a `tail` the first partition holds some records of a much later time that come only when all else has been read
    and no record has come for a while (`awake`).
    """

    def __init__(self, plan: Plan) -> None:
        draw = random.Random(f"source {plan.seed}")
        names = [key_hash(("key", i)) for i in range(plan.keys)]
        weights = [1.0 / (i + 1) ** plan.skew for i in range(plan.keys)]
        self.groups = [key_hash(("group", i)) for i in range(max(1, plan.keys // 3))]
        self.group_of = {name: self.groups[i % len(self.groups)] for i, name in enumerate(names)}
        self.records: dict[int, list[Item]] = {}
        for number in range(plan.partitions):
            partition = key_hash(("partition", number))
            seqs: Counts = {}
            items = []
            for at, key in enumerate(draw.choices(names, weights, k=plan.records)):
                seqs[key] = seqs.get(key, 0) + 1
                items.append(Item(key, partition, seqs[key], at + draw.randint(0, 3)))
            self.records[partition] = items
        self.tail = plan.tail
        self.lull = plan.records  # where the first partition pauses
        self.paused = key_hash(("partition", 0))
        self.awake = False
        late = self.records[self.paused]
        seqs = {item.key: item.seq for item in late}
        for at, key in enumerate(draw.choices(names, weights, k=plan.tail), len(late)):
            seqs[key] = seqs.get(key, 0) + 1
            late.append(Item(key, self.paused, seqs[key], at + 10 * plan.records))

    def available(self, partition: int) -> int:
        """Return how many records a partition has so far."""
        pauses = self.tail and partition == self.paused and not self.awake
        return self.lull if pauses else len(self.records[partition])

    def bound(self, partition: int, position: int) -> int:
        """Return a time below which no record from this position on lies; `LAST`: the reader is idle."""
        if position < self.available(partition):
            return position
        return MAX if position == len(self.records[partition]) else LAST

    def counts(
        self, positions: dict[int, int], timers: Counts
    ) -> tuple[dict[int, Counts], dict[int, Counts]]:
        """Return the states of both counting stages when the partitions are read up to these positions.

        `timers`: how often each key's timers have fired.
        """
        by_key: dict[int, Counts] = {}
        by_group: dict[int, Counts] = {}
        for partition, position in positions.items():
            for item in self.records[partition][:position]:
                by_key.setdefault(item.key, {})[partition] = item.seq
        for key, fired in timers.items():
            by_key.setdefault(key, {})[TIMER] = fired
        for key, counts in by_key.items():
            by_group.setdefault(self.group_of[key], {})[key] = sum(counts.values())
        return by_key, by_group


class Simulation:
    """One run of one plan."""

    def __init__(
        self,
        plan: Plan,
        make: type[Distributor] = Distributor,
        coordinate: type[Coordinator] = Coordinator,
        keep_trace: bool = True,
        watch: Callable[[Simulation], None] | None = None,
    ) -> None:
        self.plan = plan
        self.make = make
        self.coordinate = coordinate
        self.keep_trace = keep_trace
        self.watch = watch
        self.draw = random.Random(f"run {plan.seed}")
        self.source = Source(plan)
        self.outcome = Outcome(plan)
        self.now = 0
        self.order = 0
        self.agenda: list[tuple[int, int, int, Callable[[], None]]] = []
        self.generation = 0
        self.committed: dict[int, list[dict[int, Any]]] = {}
        self.digest = hashlib.sha256()
        self.workers: dict[Worker, ModelWorker] = {}
        self.begun: set[Worker] = set()
        self.ended: set[Worker] = set()
        self.endings: Counter[tuple[int, int]] = Counter()  # by stage and key, of workers that left
        self.waking = False
        self.busy: dict[tuple[Worker, Worker], int] = {}
        self.rescales_left = plan.rescales
        self.snapshots_left = plan.snapshots
        self.crashes_left = plan.crashes
        self.coordinator = self.coordinate(Placement.of(range(plan.workers)), STAGES)

    # ------------------------------------------------------------ running

    def run(self) -> Outcome:
        """Run to the end, or to the first violation."""
        try:
            self.load(self.coordinator.placement, [{}, {}, {}])
            self.plan_events()
            while self.agenda:
                self.now, _, generation, action = heapq.heappop(self.agenda)
                if generation in (self.generation, -1):
                    self.outcome.steps += 1
                    action()
                    if self.watch is not None:
                        self.watch(self)
                if self.outcome.steps > 400_000:
                    raise Violation("never ends", "the simulation does not come to its end")
            self.check_end()
        except Violation as violation:
            self.outcome.violation = violation
        except (ProtocolError, AssertionError) as error:
            self.outcome.violation = Violation("protocol", str(error) or repr(error))
        self.outcome.digest = self.digest.hexdigest()
        return self.outcome

    def later(self, delay: int, action: Callable[[], None], always: bool = False) -> None:
        """Schedule `action` after `delay`, if this generation still lives then, or `always`."""
        self.order += 1
        generation = -1 if always else self.generation
        heapq.heappush(self.agenda, (self.now + delay, self.order, generation, action))

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        line = f"{self.now:>7} {text}"
        self.digest.update(line.encode())
        if self.keep_trace:
            self.outcome.trace.append(line)

    def load(self, placement: Placement, states: list[dict[int, Any]]) -> None:
        """Start all workers, each with its part of the state."""
        self.workers = {}
        self.begun = set()
        self.ended = set()
        self.endings = Counter()
        self.busy = {}
        self.note(f"load {sum(map(len, states))} keys onto workers {placement.workers}")
        for worker in placement.workers:
            self.launch(worker, placement.workers, [placement] * STAGES, [0] * STAGES)
        for stage, table in enumerate(states):
            for key, state in table.items():
                operator = self.workers[placement.owner(key)].stages[stage].operator
                operator.states[key] = dict(state) if isinstance(state, dict) else state
        for worker in placement.workers:
            self.begin(worker)

    def launch(
        self,
        worker: Worker,
        members: Iterable[Worker],
        placements: list[Placement],
        epochs: list[int],
    ) -> None:
        """Start a new worker, with its stages as they stand."""
        stages = []
        for index in range(STAGES):
            distributor = self.make(
                worker,
                placements[index],
                members,
                stage=f"s{index}",
                epoch=epochs[index],
                downstream=int(index + 1 < STAGES),
                emits=index == 0,
            )
            operator: Any
            if index == 0:
                operator = ReaderOperator(self.source)
            else:
                onward = self.source.group_of.__getitem__ if index == 1 else None
                operator = CountingOperator(worker, onward, timers=self.plan.timers)
            stages.append(ModelStage(distributor, operator))
        model = ModelWorker(worker, stages, prompt=not self.plan.slow_operators)
        model.validate = self.make is Distributor
        self.workers[worker] = model
        self.begun.discard(worker)
        self.ended.discard(worker)

    def begin(self, worker: Worker) -> None:
        """Start the sources and readers of a worker."""
        self.begun.add(worker)
        if worker == min(self.workers) and self.workers[worker].stages[0].distributor.epoch == 0:
            self.later(self.draw.randint(0, 5), lambda: self.list_partitions(worker))
        else:
            self.act(worker, lambda model: model.feed(0, m.Advanced(LAST)))
        self.later(self.draw.randint(1, 10), lambda: self.tick(worker))

    def list_partitions(self, worker: Worker) -> None:
        """Name all partitions to the readers, repeatedly."""
        if worker in self.ended or worker not in self.workers:
            return
        rows = Rows(Item(partition, 0, 0, LAST) for partition in self.source.records)
        self.act(worker, lambda model: model.feed(0, m.Local(rows)))
        self.act(worker, lambda model: model.feed(0, m.Advanced(LAST)))
        if not self.exhausted():
            self.later(self.draw.randint(200, 2000), lambda: self.list_partitions(worker))

    def tick(self, worker: Worker) -> None:
        """Take a worker's turn: read on, move keys on, answer requests."""
        if worker not in self.workers:
            return
        self.act(worker, self.work)
        exhausted, idle = self.exhausted(), self.coordinator.idle
        if self.plan.tail and not self.waking and self.lulled():
            self.waking = True
            self.later(self.draw.randint(20, 300), self.wake, always=True)
        if not (exhausted and idle) or self.workers[worker].pending:
            self.later(self.draw.randint(1, 10), lambda: self.tick(worker))
        if exhausted and (idle or self.plan.abrupt):
            self.finish()

    def work(self, model: ModelWorker) -> None:
        """Do the work of one turn."""
        readers = model.stages[0].operator
        for partition in sorted(readers.states):
            if partition in readers.states and self.draw.random() < 0.7:
                model.pass_on(0, readers.read(partition, self.draw.randint(1, self.plan.burst)))
        if model.pending and self.draw.random() < 0.5:
            model.answer()
        for index, stage in enumerate(model.stages):
            if stage.distributor.movable and self.draw.random() < 0.8:
                model.feed(index, m.Move(self.plan.chunk))

    def act(self, worker: Worker, action: Callable[[ModelWorker], None]) -> None:
        """Let a worker act; carry its messages and its reports."""
        model = self.workers[worker]
        action(model)
        readers = model.stages[0]
        bound, last_bound = readers.operator.bound(), readers.distributor.bound
        if bound > last_bound or (
            bound != last_bound and last_bound == LAST
        ):  # when it rises, and when readers wake
            model.feed(0, m.Bound(bound))
        outbox, model.outbox = model.outbox, []
        for to, stage, message in outbox:
            self.carry(worker, to, stage, message)
        reports, model.reports = model.reports, []
        for stage, report in reports:
            self.note(f"worker {worker} stage {stage}: {report}")
            delay = self.draw.randint(1, 20)
            self.later(delay, self.report(worker, stage, report))

    def report(self, worker: Worker, stage: int, report: m.Command) -> Callable[[], None]:
        """Return an action that gives a report to the coordinator."""
        return lambda: self.obey(self.coordinator.reported(worker, stage, report))

    def carry(self, sender: Worker, to: Worker, stage: int, message: m.Message) -> None:
        """Send a message on its link: first in, first out, now and then very slowly."""
        delay = self.draw.randint(1, 6)
        if self.draw.random() < self.plan.slow_links * 0.2:
            delay += self.draw.randint(20, 400)
        arrival = max(self.now + delay, self.busy.get((sender, to), 0))
        self.busy[sender, to] = arrival
        if not isinstance(message, m.Data | m.Frontier):
            self.note(f"{sender} → {to} stage {stage}: {brief(message)}")
        if isinstance(message, m.Acquire):
            self.outcome.moved += len(message.hashes)

        source, receiver = self.workers.get(sender), self.workers.get(to)

        def deliver() -> None:
            # A link ends with either of its workers, and messages under way on it are lost; a worker that comes back
            # under its old name has new links.
            there = receiver is not None and self.workers.get(to) is receiver
            if there and self.workers.get(sender) is source:
                self.act(to, lambda model: model.feed(stage, m.Received(sender, message)))

        self.later(arrival - self.now, deliver)

    # ------------------------------------------------------------ the coordinator's orders

    def obey(self, orders: list[c.Order]) -> None:
        """Carry out the coordinator's orders; its links are slow too, but keep their order."""
        for order in orders:
            match order:
                case c.Launch(workers, members):
                    self.note(f"launch {workers}")
                    for worker in workers:
                        placements = [self.coordinator.placement] * STAGES
                        self.launch(worker, members, placements, list(self.coordinator.epochs))
                        self.command(worker, lambda w: self.obey(self.coordinator.joined(w)))
                case c.Begin(worker):
                    self.command(worker, self.begin)
                case c.Tell(worker, stage, m.Join() as event):
                    self.command(worker, self.teller(stage, event))
                    if stage == STAGES - 1:
                        self.command(worker, lambda w: self.obey(self.coordinator.joined(w)))
                case c.Tell(worker, stage, event):
                    self.command(worker, self.teller(stage, event))
                case c.EndSources(worker):
                    self.command(worker, self.end_sources)
                case c.TakeSnapshot(worker, snapshot):
                    self.command(worker, self.teller(0, m.StartSnapshot(snapshot)))
                case c.Commit(snapshot):
                    self.commit(snapshot)
                case c.Stop(worker):
                    self.note(f"stop worker {worker}")
                    self.check_empty(worker)
                    self.endings += self.ended_at(self.workers[worker])
                    del self.workers[worker]
                case c.Rescaled(placement):
                    self.note(f"rescaled to {placement.workers}")
                    self.outcome.rescales += 1

    def command(self, worker: Worker, action: Callable[[Worker], None]) -> None:
        """Let a worker carry out an order of the coordinator, some time later, in order."""
        link = (-1, worker)
        arrival = max(self.now + self.draw.randint(1, 30), self.busy.get(link, 0))
        self.busy[link] = arrival
        self.later(arrival - self.now, lambda: action(worker) if worker in self.workers else None)

    def teller(self, stage: int, event: m.Event) -> Callable[[Worker], None]:
        """Return an action that gives an event to a stage of a worker."""
        return lambda worker: self.act(worker, lambda model: model.feed(stage, event))

    def end_sources(self, worker: Worker) -> None:
        """Move the lister from a departing worker to the first of the others."""
        self.ended.add(worker)
        self.act(worker, lambda model: model.feed(0, m.Advanced(MAX)))
        heirs = [w for w in sorted(self.workers) if w not in self.ended]
        if heirs:
            self.later(self.draw.randint(1, 50), lambda: self.list_partitions(heirs[0]))

    # ------------------------------------------------------------ events of the cluster

    def plan_events(self) -> None:
        """Draw the times of resizes, snapshots and crashes."""
        reads = self.plan.partitions * self.plan.records
        horizon = max(60, 12 * reads // (self.plan.partitions * (1 + self.plan.burst)))
        for _ in range(self.plan.rescales):
            self.later(self.draw.randint(5, horizon), self.resize, always=True)
        for _ in range(self.plan.snapshots):
            self.later(self.draw.randint(5, horizon), self.want_snapshot, always=True)
        for _ in range(self.plan.crashes):
            self.later(self.draw.randint(20, horizon), self.crash, always=True)

    def resize(self) -> None:
        """Ask for another number of workers."""
        self.rescales_left -= 1
        size = self.draw.randint(1, self.plan.most_workers)
        first = self.draw.randint(0, 3) if self.plan.swaps else 0
        workers = tuple(range(first, first + size))
        keys = {}
        if self.plan.pins:
            pinned = self.draw.sample(sorted(self.source.group_of), 2)
            keys = {key: self.draw.choice(workers) for key in pinned}
        placement = Placement.of(workers, keys=keys)
        self.note(f"wanted: workers {workers}" + (f", {len(keys)} keys pinned" if keys else ""))
        self.obey(self.coordinator.rescale(placement))

    def want_snapshot(self) -> None:
        """Ask for a snapshot."""
        self.snapshots_left -= 1
        self.obey(self.coordinator.want_snapshot())

    def crash(self) -> None:
        """Crash a worker: everything since the last snapshot is forgotten, and the job is loaded anew."""
        self.crashes_left -= 1
        self.outcome.crashes += 1
        size = self.draw.randint(1, self.plan.most_workers)
        victim = self.draw.choice(sorted(self.workers))
        last = max(self.committed, default=0)
        self.note(f"worker {victim} dies: back to snapshot {last} on {size} workers")
        self.generation += 1
        placement = Placement.of(range(size))
        numbering = self.coordinator.snapshot
        self.coordinator = self.coordinate(placement, STAGES, numbering)
        self.load(placement, self.committed.get(last, [{}, {}, {}]))

    def exhausted(self) -> bool:
        """Return whether all planned events have happened and every record has been read."""
        if self.rescales_left or self.snapshots_left or self.crashes_left:
            return False
        read = self.positions()
        return all(read.get(p, -1) == len(items) for p, items in self.source.records.items())

    def positions(self) -> dict[int, int]:
        """Return the positions of the partitions that are open on a worker."""
        read: dict[int, int] = {}
        for model in self.workers.values():
            read |= model.stages[0].operator.states
        return read

    def lulled(self) -> bool:
        """Return whether everything except the tail has been read."""
        read = self.positions()
        return all(read.get(p, -1) == self.source.available(p) for p in self.source.records)

    def wake(self) -> None:
        """Release the tail of the first partition."""
        self.source.awake = True

    def finish(self) -> None:
        """End the sources after all is read, abruptly even while a rescale is under way."""
        ending = sorted((set(self.workers) & self.begun) - self.ended)
        if ending and not self.coordinator.idle:
            self.outcome.abrupt = 1
        for worker in ending:
            self.ended.add(worker)
            self.act(worker, lambda model: model.feed(0, m.Advanced(MAX)))

    # ------------------------------------------------------------ checks

    def merged(self, tables: Iterable[tuple[Worker, list[dict[int, Any]]]]) -> list[dict[int, Any]]:
        """Merge the states of all workers; a key in two places is a violation."""
        whole: list[dict[int, Any]] = [{}, {}, {}]
        for worker, stages in tables:
            for stage, table in enumerate(stages):
                for key, state in table.items():
                    if key in whole[stage]:
                        raise Violation("two states", f"{key:x} of stage {stage}, one at {worker}")
                    whole[stage][key] = state
        return whole

    def check(self, what: str, whole: list[dict[int, Any]]) -> None:
        """Check that both counting stages have counted exactly what the readers have read."""
        timers = {key: state[TIMER] for key, state in whole[1].items() if TIMER in state}
        by_key, by_group = self.source.counts(whole[0], timers)
        for stage, expected in ((1, by_key), (2, by_group)):
            if whole[stage] != expected:
                keys = {*whole[stage], *expected}
                wrong = sorted(k for k in keys if whole[stage].get(k) != expected.get(k))
                raise Violation(
                    f"wrong {what}",
                    f"stage {stage}: {len(wrong)} keys, first {wrong[0]:x} "
                    f"has {whole[stage].get(wrong[0])}, read were {expected.get(wrong[0])}",
                )

    def commit(self, snapshot: int) -> None:
        """Check a complete snapshot: it must be an exact cut."""
        members = sorted(self.workers)
        tables = ((w, [s.saved.pop(snapshot, {}) for s in self.workers[w].stages]) for w in members)
        whole = self.merged(tables)
        self.check("snapshot", whole)
        self.committed = {snapshot: whole}
        self.outcome.snapshots += 1
        if self.coordinator.phase != "idle":
            self.outcome.during += 1
        self.note(f"snapshot {snapshot} is whole: {[len(table) for table in whole]} keys")

    def check_empty(self, worker: Worker) -> None:
        """Check that a departing worker has nothing left."""
        for stage in self.workers[worker].stages:
            if stage.operator.states:
                raise Violation(
                    "stranded", f"worker {worker} leaves with {len(stage.operator.states)} keys"
                )

    def ended_at(self, model: ModelWorker) -> Counter[tuple[int, int]]:
        """Return how often each key of the counting stages was ended at a worker."""
        counting = list(enumerate(model.stages))[1:]
        return Counter({(i, k): n for i, s in counting for k, n in s.operator.endings.items()})

    def check_end(self) -> None:
        """Check that everything is counted, every key is at its owner, every operator at the end of time."""
        whole = self.merged(
            (w, [stage.operator.states for stage in self.workers[w].stages])
            for w in sorted(self.workers)
        )
        if set(whole[0]) != set(self.source.records):
            raise Violation("lost", "a partition is read nowhere")
        self.check("counts", whole)
        endings = sum(map(self.ended_at, self.workers.values()), self.endings)
        keys = {(stage, key) for stage in (1, 2) for key in whole[stage]}
        if set(endings) != keys or set(endings.values()) != {1}:
            wrong = sorted(at for at in keys | set(endings) if endings[at] != 1)
            raise Violation("ends", f"stage and key {wrong[0]} ended {endings[wrong[0]]} times")
        for worker, model in self.workers.items():
            for stage in model.stages:
                owners = stage.distributor.placement.owners(stage.operator.keys())
                if not bool((owners == worker).all()):
                    raise Violation("stranded", f"worker {worker} has keys of others")
                if stage.operator.frontier != MAX:
                    raise Violation(
                        "never ends", f"worker {worker} did not come to the end of time"
                    )
            if not model.settled:
                raise Violation("never ends", f"worker {worker} has not finished")
        self.outcome.records = sum(map(len, self.source.records.values()))
        self.note("all is counted")


def simulate(
    seed: int,
    size: float = 1.0,
    make: type[Distributor] = Distributor,
    coordinate: type[Coordinator] = Coordinator,
    keep_trace: bool = False,
) -> Outcome:
    """Simulate the cluster of one seed.

    >>> simulate(1, size=0.2).violation is None
    True
    """
    return Simulation(Plan.of(seed, size), make, coordinate, keep_trace).run()


def shrink(
    plan: Plan, make: type[Distributor] = Distributor, coordinate: type[Coordinator] = Coordinator
) -> Outcome:
    """Return the result of the simplest variation of a failing plan that still fails, with its trace."""
    best = Simulation(plan, make, coordinate).run()
    simpler = True
    while simpler and best.violation is not None:
        simpler = False
        for candidate in _simpler(best.plan):
            outcome = Simulation(candidate, make, coordinate).run()
            if outcome.violation is not None:
                best, simpler = outcome, True
                break
    return best


def _simpler(plan: Plan) -> Iterable[Plan]:
    for name in ("crashes", "snapshots", "rescales", "partitions", "records", "keys"):
        value = getattr(plan, name)
        lowest = 0 if name in ("crashes", "snapshots") else 2 if name == "keys" else 1
        if value > lowest:
            yield replace(plan, **{name: max(lowest, value // 2)})
    for name in ("slow_operators", "swaps", "pins", "timers", "abrupt"):
        if getattr(plan, name):
            yield replace(plan, **{name: False})
    if plan.tail:
        yield replace(plan, tail=0)
    if plan.slow_links:
        yield replace(plan, slow_links=0.0)


def brief(message: m.Message) -> str:
    """Format a message in one short line, without its content."""
    match message:
        case m.Forward(_, batch):
            return f"FWD of {len(batch)} records"
        case m.Acquire(_, chunk, hashes, _):
            return f"Acquire chunk {chunk}, {len(hashes)} keys"
        case m.Fence(stage, _, home, chunk, _):
            return f"Fence of worker {home}, {stage}, chunk {chunk}"
        case m.Fenced(_, home, chunk):
            return f"Fenced worker {home}, chunk {chunk}"
        case m.Flushed(_, origin):
            return f"Flushed({origin})"
        case m.Relay(_, value):
            return f"Relay({'MAX' if value == MAX else value})"
        case m.Bar1(snapshot) | m.Bar2(snapshot):
            return f"{type(message).__name__}({snapshot})"
        case _:
            return type(message).__name__
