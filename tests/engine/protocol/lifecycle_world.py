"""A world for a lifecycle: processes, a store, chance; and what must be true of it at every moment.

Processes make *items*, each of them once. With every snapshot they prepare those of before its cut, and publish them
when it is committed; who leaves hands over the rest. So what a snapshot has to hold can be told exactly: all that was
made before its cut, and nothing of after it. What is visible was committed, and at the end all that was committed is.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import pytest

from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.protocol.lifecycle.machine import (
    FAILURE_GRACE_US,
    LEAVE_TIMEOUT_US,
    Lifecycle,
    StaleWorkerError,
)
from railgun.engine.protocol.lifecycle.snapshot_rounds import SnapshotRounds
from railgun.engine.protocol.lifecycle.worker_processes import SECOND_US, Member
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import messages as m

Items = frozenset[int]
Way = Literal["stop", "drain", "natural", "abort", "fail"]


def placement(workers: int) -> Placement:
    return Placement.of(range(workers))


@dataclass
class Process:
    """A worker's process, as far as a lifecycle can tell."""

    worker: Worker
    incarnation: int
    up: bool = False
    inbox: deque[o.WorkerOrder] = field(default_factory=deque)
    jobs: list[o.WorkerOrder] = field(default_factory=list)  # that take a while, in no order
    reports: deque[o.WorkerReport] = field(default_factory=deque)
    generation: int = -1
    members: tuple[Worker, ...] = ()
    joins: int = 0
    begun: bool = False
    parted: bool = False  # whether it has nothing more to do here
    ended: bool = False
    told_stop: bool = False
    told_begin: bool = False  # in the generation it was started for last
    fresh: set[int] = field(default_factory=set)  # items that are not prepared
    prepared: set[int] = field(default_factory=set)  # that are, and not known to be published

    def tell(self, report: o.WorkerReport) -> None:
        self.reports.append(report)


@dataclass
class Cut:
    """A snapshot under way, as it should be."""

    number: int
    full: bool
    recorded: bool = False
    generation: int = -1
    participants: frozenset[int] = frozenset()  # incarnations
    items: set[int] = field(default_factory=set)
    all_ended: bool = True
    saved: dict[int, Items] = field(default_factory=dict)
    trouble: bool = False
    writing: bool = False


class World:
    """Processes that do what they are told, in any order, and die at any time; a store that is slow, and may fail."""

    def __init__(self, seed: int, kind: type[Lifecycle] = Lifecycle) -> None:
        self.random = random.Random(seed)
        self.inside = random.Random(f"inside of user code {seed}")
        self.stages = self.random.randint(1, 3)
        self.now = 0
        self.saves = self.random.random() < 0.8
        every = self.random.choice([1, SECOND_US // 2, 3 * SECOND_US, 60 * SECOND_US])
        self.first = self.random.choice([0, 7])
        self.committed = self.first or None
        saving = SnapshotRounds(every if self.saves else None, self.first, self.committed)
        self.life = kind(
            *(self.stages, placement(self.random.randint(1, 4))),
            restarts=10**9,
            window=self.random.choice([SECOND_US, 300 * SECOND_US]),
            saving=saving,
            generation=self.random.choice([0, 20]),
        )
        self.calm = False  # whether nothing fails any more
        self.clumsy = self.random.choice([0.0, 0.0, 0.1, 0.5])  # how often saving fails
        self.sources_over = False
        self.drained = False
        self.alive: dict[int, Process] = {}  # by incarnation
        self.talking: dict[int, Process] = {}  # whose end nobody has noticed
        self.pending: list[tuple[Worker, int]] = []  # deaths nobody has noticed yet
        self.launched: set[int] = set()
        self.generation = self.life.generation
        self.begun = -1  # the generation that was started last
        self.owes_farewell: set[int] = set()  # incarnations that left, and have not handed over
        # The store, and what the controller keeps for it.
        self.cut: Cut | None = None
        self.last_number = self.first
        self.store: deque[o.Record | o.Write | o.GiveUp] = deque()
        self.left: list[Items] = []
        self.in_manifest: list[Items] = []
        self.manifest: Items = frozenset()  # items of the last one committed
        self.writing: Items = frozenset()
        # What there is.
        self.made: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.count = 0
        self.safe: set[int] = set()  # items that are committed
        self.visible: set[int] = set()
        self.seen: Counter[str] = Counter()  # what happened in this world
        self.heard: list[o.Happened] = []
        self.lost_inside = False  # whether that has failed the flow when it had finished
        self.of_failed_generation: set[int] = (
            set()
        )  # incarnations of a generation that failed, not ready since
        self.obey(self.life.start(0))

    # ------------------------------------------------------------ what the lifecycle orders

    def obey(self, orders: Iterable[o.Order]) -> None:
        for order in orders:
            match order:
                case o.Launch(worker, incarnation):
                    assert incarnation not in self.launched
                    self.launched.add(incarnation)
                    process = Process(worker, incarnation)
                    self.alive[incarnation] = self.talking[incarnation] = process
                case o.Cancel(_, incarnation):
                    assert incarnation in self.launched
                    self.die(incarnation)
                case o.To(worker, what):
                    self.send(worker, what)
                case o.Happened(kind):
                    self.seen[kind] += 1
                    self.heard.append(order)
                    if kind == "restarting":
                        there = {member.incarnation for member in self.life.members.values()}
                        self.of_failed_generation = there & self.launched
                case o.Record():
                    self.record(order)
                case o.Write():
                    self.write(order)
                case o.GiveUp(number):
                    assert self.cut is not None, "nothing to give up"
                    assert number == self.cut.number
                    assert not any(isinstance(what, o.Write) for what in self.store)
                    self.cut = None
                    self.store.append(order)
        self.check()

    def check(self) -> None:
        life = self.life
        assert life.generation >= self.generation
        self.generation = life.generation
        assert life.saving.committed == self.committed, "what is committed, and what it believes"
        if life.coordinator is not None:
            assert set(life.coordinator.members) <= life.members.keys() or life.over
        assert self.visible <= self.safe, "visible, and not committed"
        if life.state == "finished" and self.seen["running"]:
            assert self.safe <= self.visible, "finished, and not all is visible"

    def send(self, worker: Worker, order: o.WorkerOrder) -> None:
        member = self.life.members[worker]
        assert member.address is not None, "an order to one that is not there"
        process = self.talking[member.incarnation]
        assert not process.told_stop, "an order to one that was let go"
        match order:
            case o.Start():
                self.check_start(order)
                process.told_begin = False
            case o.Begin():
                process.told_begin = True
            case o.Stop(handing_over):
                process.told_stop = True
                if handing_over:
                    self.owes_farewell.add(process.incarnation)
                    cut = self.cut
                    assert cut is None or process.incarnation not in cut.participants
            case o.TakeSnapshot(generation, number, full):
                cut = self.cut
                assert cut is not None
                assert cut.recorded
                assert (cut.number, cut.full) == (number, full)
                if not cut.participants:
                    self.begin_cut(cut, generation)
                assert process.incarnation in cut.participants
            case o.Settled(_, number, committed):
                assert number == self.committed if committed else self.cut is None
                coordinator = self.life.coordinator
                assert coordinator is not None
                if committed and worker == coordinator.members[0]:
                    orphans = frozenset[int]().union(*self.in_manifest)
                    order = replace(order, tokens=tuple(orphans))
        if not isinstance(order, o.Stop):
            assert order.generation == self.life.generation
        if process.incarnation in self.alive:
            process.inbox.append(order)

    def check_start(self, start: o.Start) -> None:
        """A generation begins with what was committed; who joins it, with nothing."""
        if start.generation == self.begun:
            first = self.life.coordinator is None
        else:
            assert start.generation > self.begun
            first, self.begun, self.recovering = True, start.generation, 0
            self.left, self.owes_farewell = [], set()
        if not first:
            assert (start.snapshot, start.recover) == (None, False)
            self.seen["joined"] += 1
            return
        assert not any(isinstance(what, o.Write) for what in self.store), "it does not wait"
        assert self.cut is None
        assert start.snapshot == self.committed
        self.recovering += start.recover
        assert self.recovering == (self.saves and start.members[0] in self.life.members)
        if start.snapshot is not None and start.snapshot != self.first:
            self.seen["rolled back"] += 1

    def begin_cut(self, cut: Cut, generation: int) -> None:
        """What those made who left before belongs to it."""
        coordinator = self.life.coordinator
        assert coordinator is not None
        who = frozenset(self.life.members[w].incarnation for w in coordinator.members)
        cut.generation, cut.participants = generation, who
        for incarnation, items in self.made[generation].items():
            if incarnation not in who:
                cut.items |= items
        self.seen[f"cut while {coordinator.phase}"] += 1

    # ------------------------------------------------------------ the store

    def record(self, record: o.Record) -> None:
        assert self.cut is None, "two at a time"
        assert record.snapshot > self.last_number, "a number is used again"
        assert record.full or self.committed is not None
        self.last_number = record.snapshot
        self.cut = Cut(record.snapshot, record.full)
        self.store.append(record)

    def write(self, write: o.Write) -> None:
        cut = self.cut
        assert cut is not None
        assert cut.number == write.snapshot
        assert not cut.writing
        assert cut.participants == cut.saved.keys(), "not everybody has saved"
        assert not cut.trouble
        assert not self.owes_farewell, "someone has still to hand over"
        cut.writing = True
        self.in_manifest = list(self.left)
        self.writing = frozenset().union(*cut.saved.values(), *self.in_manifest)
        here = {i for items in self.made[cut.generation].values() for i in items}
        assert (self.writing | self.safe) & here == cut.items, "what was made before its cut"
        assert self.writing <= here
        if write.finished:
            assert cut.all_ended
            assert self.sources_over or self.drained
            self.seen["the end is saved"] += 1
        self.store.append(write)

    def answer(self) -> None:
        """The store has done the next thing."""
        fails = not self.calm and self.random.random() < self.clumsy
        error = "no room" if fails else ""
        match self.store.popleft():
            case o.Record(number):
                if self.cut is not None and self.cut.number == number:
                    self.cut.recorded = not error
                self.obey(self.life.recorded(number, error, self.now))
            case o.Write(number):
                if not error:
                    self.commit(number)
                self.seen[f"written while {self.life.state}"] += 1
                self.obey(self.life.written(number, error, self.now))

    def commit(self, number: int) -> None:
        assert self.cut is not None
        assert self.committed is None or number > self.committed
        self.committed, self.manifest, self.cut = number, self.writing, None
        self.safe |= self.manifest
        self.left = [left for left in self.left if left not in self.in_manifest]

    # ------------------------------------------------------------ what happens

    def is_member(self, process: Process) -> bool:
        member = self.life.members.get(process.worker)
        return member is not None and member.incarnation == process.incarnation

    def die(self, incarnation: int) -> None:
        process = self.alive.pop(incarnation, None)
        if process is not None:
            self.pending.append((process.worker, incarnation))

    def crash(self, incarnation: int) -> None:
        """It says no more, and some of what it said gets lost."""
        process = self.alive[incarnation]
        for _ in range(self.random.randint(0, len(process.reports))):
            process.reports.pop()
        saving = self.life.saving
        self.seen[f"crash while {saving.phase}{', the last one' * saving.last}"] += 1
        self.die(incarnation)

    def step(self) -> bool:
        """Something that has to happen some time happens; False if there is nothing."""
        chances: list[Callable[[], None]] = []
        for process in self.alive.values():
            if not process.up:
                chances.append(partial(self.come, process))
            if process.inbox:
                chances.append(partial(self.work, process))
            if process.jobs:
                chances.append(partial(self.labour, process))
            if self.sources_over and process.begun and not process.ended:
                chances.append(partial(self.end, process))
        for process in self.talking.values():
            if process.reports:
                chances.append(partial(self.hear, process))
        if self.pending:
            chances.append(self.notice_death)
        if self.store:
            chances += [self.answer] * 2
        if not chances:
            return False
        self.random.choice(chances)()
        return True

    def notice_death(self) -> None:
        worker, incarnation = self.pending.pop(self.random.randrange(len(self.pending)))
        process = self.talking[incarnation]
        while process.reports and self.is_member(process):
            self.hear(process)
        del self.talking[incarnation]
        self.lose(worker, incarnation, "died")

    def lose(self, worker: Worker, incarnation: int, why: str) -> None:
        """Tell of a lost process; all that are lost of a generation that failed are one failure."""
        member, failed_times = self.life.members.get(worker), self.life.failed_times
        is_member = member is not None and member.incarnation == incarnation
        is_told = incarnation in self.of_failed_generation
        if member is not None and is_member and member.leaving:
            self.lose_inside(worker, member)
        orders = self.life.down(worker, incarnation, why, self.now)
        if is_told and is_member:
            self.seen["lost too"] += 1
            assert self.life.failed_times == failed_times, "a failure is counted twice"
        self.obey(orders)

    def lose_inside(self, worker: Worker, member: Member) -> None:
        """One that was to leave has ended inside user code: it loads the flow, or closes a sink."""
        has_begun = member.address is not None and member.begun
        if self.inside.random() < 0.5 or (has_begun and self.calm):
            return
        state, told = self.life.state, len(self.heard)
        self.obey(self.life.lost_leaving(worker, "inside", self.now))
        if member.address is None:
            self.seen["ended as it loads"] += 1
            assert len(self.heard) == told, "it was to end"
        elif not has_begun:
            self.seen["ended before it begins"] += 1
            assert self.life.state == state, "it has written nothing"
        else:
            self.seen[f"lost as it leaves, {state}"] += 1
            assert self.life.state == ("failed" if state == "finished" else state)
            self.lost_inside |= state == "finished"

    def come(self, process: Process) -> None:
        process.up = True
        expected = self.is_member(process)
        try:
            orders = self.life.up(
                process.worker, process.incarnation, ("here", process.incarnation), self.now
            )
        except StaleWorkerError:
            self.die(process.incarnation)
        else:
            assert expected, "one that was given up is accepted"
            others = [p for p in self.alive.values() if p.up and p.worker == process.worker]
            assert not any(p is not process and self.is_member(p) for p in others)
            self.obey(orders)

    def hear(self, process: Process) -> None:
        report = process.reports.popleft()
        if not self.is_member(process):
            return
        if report.generation == self.life.generation:
            cut = self.cut
            match report:
                case o.Ready():
                    self.of_failed_generation.discard(process.incarnation)
                case o.Saved(_, number) if cut is not None and cut.number == number:
                    cut.saved[process.incarnation] = frozenset(report.tokens)
                    cut.trouble |= bool(report.error)
                case o.Farewell(_, _, tokens):
                    self.left.append(frozenset(tokens))
                    self.owes_farewell.discard(process.incarnation)
                    self.seen["late farewell"] += self.life.saving.phase == "whole"
        self.obey(self.life.reported(process.worker, report, self.now))

    def end(self, process: Process) -> None:
        """There is nothing more to read."""
        process.ended = True
        process.tell(o.Ended(process.generation))

    # ------------------------------------------------------------ what processes do

    def work(self, process: Process) -> None:
        """A process carries out the next order it got."""
        self.make(process)
        match process.inbox.popleft():
            case o.Start(generation, _, members) as start:
                process.generation, process.members = generation, members
                process.joins, process.jobs = 0, [start]
                process.begun = process.parted = process.ended = False
                process.fresh, process.prepared = set(), set()
            case o.Begin():
                process.begun = True
            case o.Tell(generation, _, m.Join(workers)):
                process.joins += 1
                if process.joins == self.stages:
                    process.joins = 0
                    process.members = tuple(sorted({*process.members, *workers}))
                    process.tell(o.Joined(generation))
            case o.Tell(generation, stage, m.Rescale(epoch)) as tell:
                process.tell(o.Report(generation, stage, m.Started(epoch)))
                process.jobs.append(tell)
            case o.StopSources(generation):
                if not process.ended:
                    process.ended = True
                    process.tell(o.Ended(generation))
            case o.TakeSnapshot(_, number) as take:
                process.prepared |= process.fresh
                process.fresh = set()
                cut = self.cut
                if cut is not None and cut.number == number:
                    cut.items |= self.made[process.generation][process.incarnation]
                    cut.all_ended &= process.ended
                process.jobs.append(take)
            case o.Settled(_, _, committed, tokens) as settled:
                if committed:
                    process.prepared |= set(tokens)
                    now = tuple(process.prepared)
                    process.jobs.append(replace(settled, tokens=now))
            case o.Stop(handing_over) as stop:
                process.begun = False
                if handing_over:
                    process.jobs.append(stop)
                else:
                    self.die(process.incarnation)
            case _:
                pass

    def make(self, process: Process) -> None:
        """An item, perhaps."""
        if (
            process.begun
            and not process.ended
            and not process.parted
            and self.random.random() < 0.5
        ):
            self.count += 1
            process.fresh.add(self.count)
            self.made[process.generation][process.incarnation].add(self.count)

    def labour(self, process: Process) -> None:
        """A process is through with something that took a while."""
        generation = process.generation
        match process.jobs.pop(self.random.randrange(len(process.jobs))):
            case o.Start(_, _, _, _, _, _, recover):
                if recover:
                    self.visible |= self.manifest
                process.tell(o.Ready(generation))
            case o.Tell(_, stage, m.Rescale(epoch, new)):
                process.tell(o.Report(generation, stage, m.Completed(epoch)))
                for gone in sorted(set(process.members) - set(new.workers)):
                    process.tell(o.Report(generation, stage, m.Left(gone)))
                if stage == self.stages - 1:
                    process.parted = process.worker not in new.workers
                    process.members = new.workers
            case o.TakeSnapshot(_, number):
                error = "a full disk" if self.trips() else ""
                rows, keys = self.random.randint(0, 9), self.random.randint(0, 20)
                tokens = tuple(process.prepared)
                saved = o.Saved(generation, number, (), tokens, rows, keys, (), error)
                process.tell(saved)
                if self.random.random() < 0.05:
                    process.tell(saved)
            case o.Settled(_, number, _, tokens):
                self.visible |= set(tokens)
                process.prepared -= set(tokens)
                process.tell(o.Published(generation, number))
            case o.Stop():
                error = "a full disk" if self.trips() else ""
                tokens = (*process.prepared, *process.fresh)
                process.tell(o.Farewell(generation, (), tokens, error))
                self.die(process.incarnation)

    def trips(self) -> bool:
        return not self.calm and self.random.random() < self.clumsy

    # ------------------------------------------------------------ fate

    def fate(self) -> None:
        """Something that need not happen."""
        chance = self.random.random()
        life = self.life
        if chance < 0.35:
            if life.state == "running":
                self.obey(life.scale(placement(self.random.randint(1, 6)), self.now))
        elif chance < 0.7:
            if self.saves and not life.over:
                self.obey(life.snapshot(self.now))
        elif chance < 0.85:
            if self.alive:
                self.crash(self.random.choice(list(self.alive)))
        elif chance < 0.88:
            if life.members:
                # Given up for dead, while its process lives on.
                worker, member = self.random.choice(list(life.members.items()))
                self.lose(worker, member.incarnation, "silent")
        elif chance < 0.92:
            if life.members:
                worker = self.random.choice(list(life.members))
                lost = o.Failed(life.generation, "a link is lost", final=False)
                self.obey(life.reported(worker, lost, self.now))
        else:
            self.stale()

    def stale(self) -> None:
        """Something of long ago is heard of."""
        life = self.life
        incarnation = self.random.randint(1, max(1, len(self.launched)))
        worker = self.random.randint(0, 6)
        if not life.expects(worker, incarnation):
            with pytest.raises(StaleWorkerError):
                life.up(worker, incarnation, ("elsewhere", 0), self.now)
        self.obey(life.down(worker, -incarnation, "never was", self.now))
        old = life.generation - 1
        number = life.saving.number
        for report in (
            *(o.Saved(old, number), o.Published(old, number), o.Farewell(old, error="no room")),
            *(o.Saved(life.generation, number - 1), o.Published(life.generation, number + 1)),
        ):
            self.obey(life.reported(worker, report, self.now))
        for error in ("", "no room"):
            self.obey(life.recorded(number - 1, error, self.now))
            self.obey(life.written(number - 1, error, self.now))

    def some(self, fates: int) -> None:
        """Let some time pass."""
        for _ in range(fates):
            for _ in range(self.random.randint(0, 25)):
                self.step()
            self.now += self.random.choice([0, FAILURE_GRACE_US // 3, FAILURE_GRACE_US, SECOND_US])
            self.obey(self.life.tick(self.now))
            self.fate()

    def settle(self) -> None:
        """Nothing fails any more, and time goes by."""
        self.calm = True
        for _ in range(20):
            while self.step():
                pass
            if self.at_rest:
                return
            self.now += LEAVE_TIMEOUT_US
            self.obey(self.life.tick(self.now))
            # Zombies end in the end.
            for incarnation, process in list(self.alive.items()):
                if not self.is_member(process):
                    self.die(incarnation)

    @property
    def at_rest(self) -> bool:
        life = self.life
        strangers = any(not self.is_member(process) for process in self.alive.values())
        quiet = life.shown == "running" and not self.sources_over and life._pending_failure is None
        return not strangers and (life.gone or quiet)

    def finish(self, how: Way) -> None:
        """Let it end; not all at once."""
        life = self.life
        self.seen[f"{how} while {life.state}, {life.saving.phase}"] += 1
        match how:
            case "stop":
                self.drained = self.drained or (not self.saves and not life.over)
                self.obey(life.stop(self.now))
            case "drain":
                self.drained = True
                self.obey(life.stop(self.now, drain=True))
            case "natural":
                self.sources_over = True
            case "abort":
                self.obey(life.abort("enough", self.now))
            case "fail":
                while not life.over:
                    if life.members:
                        worker = self.random.choice(list(life.members))
                        raised = o.Failed(life.generation, "it raises", final=True)
                        self.obey(life.reported(worker, raised, self.now))
                    if not life.over:
                        self.step()
                        self.now += SECOND_US
                        self.obey(life.tick(self.now))


def calm_end(seed: int, kind: type[Lifecycle] = Lifecycle) -> World:
    """Whatever happens, it comes to rest at the last size asked for; then it is ended."""
    world = World(seed, kind)
    world.some(world.random.randint(2, 12))
    world.settle()
    life = world.life
    asked = placement(world.random.randint(1, 6))
    world.obey(life.scale(asked, world.now))
    world.settle()
    assert life.shown == "running"
    assert life.placement == asked
    assert sorted(p.worker for p in world.alive.values()) == list(asked.workers)
    world.finish(world.random.choice(["stop", "drain", "natural"]))
    world.settle()
    assert life.state == "finished", life.cause
    assert life.gone
    assert not world.alive
    return world


def wild_end(seed: int, kind: type[Lifecycle] = Lifecycle) -> World:
    """It is ended in the midst of all, and all goes on for a while."""
    world = World(seed, kind)
    world.some(world.random.randint(1, 12))
    for _ in range(world.random.randint(0, 25)):
        world.step()
    ways: list[Way] = ["stop", "stop", "drain", "natural", "natural", "abort", "fail"]
    way = world.random.choice(ways)
    world.finish(way)
    world.some(world.random.randint(0, 8))
    world.settle()
    life = world.life
    assert life.over
    assert life.gone
    assert not world.alive
    assert not world.store
    if life.state == "finished":
        assert world.cut is None
    elif way not in ("abort", "fail") and world.saves and not world.lost_inside:
        assert "the last snapshot cannot be saved" in life.cause
        assert world.clumsy
    return world
