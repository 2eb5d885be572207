"""A playbook of lifecycles: what happens, and what is ordered, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.protocol.lifecycle.machine import Lifecycle
from railgun.engine.protocol.lifecycle.snapshot_rounds import Phase, SnapshotRounds
from railgun.engine.protocol.lifecycle.snapshots import MAX_BACK_OFF_US
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import messages as m


def word(order: o.Order) -> str:
    """An order in words."""
    match order:
        case o.Launch(worker, incarnation):
            return f"launch {worker}#{incarnation}"
        case o.Cancel(worker, incarnation):
            return f"cancel {worker}#{incarnation}"
        case o.To(worker, o.Start(generation, placement, members, _, dial, snapshot, recover)):
            owners = ",".join(map(str, placement.workers))
            known = ",".join(map(str, members))
            called = ",".join(str(other) for other, _ in dial)
            begun = f" from {snapshot}" * (snapshot is not None) + " recovering" * recover
            return f"→{worker} start {generation} on {owners} among {known} calling {called or '-'}{begun}"
        case o.To(worker, o.TakeSnapshot(generation, snapshot, full)):
            return f"→{worker} take {generation}/{snapshot} {'full' if full else 'changes'}"
        case o.To(worker, o.Settled(generation, snapshot, committed)):
            return f"→{worker} settled {generation}/{snapshot} {'well' if committed else 'not'}"
        case o.To(worker, o.Tell(generation, stage, event)):
            return f"→{worker} {type(event).__name__.lower()} {generation}/{stage}"
        case o.To(worker, o.Stop(handing_over)):
            return f"→{worker} stop{' handing over' * handing_over}"
        case o.To(worker, told):
            assert not isinstance(told, o.Stop)
            return f"→{worker} {type(told).__name__.lower()} {told.generation}"
        case o.Happened(kind):
            return f"told {kind}"
        case o.Record(snapshot, full, why):
            return f"record {snapshot} {'full' if full else 'changes'}: {why}"
        case o.Write(snapshot, finished):
            return f"write {snapshot}{' finished' * finished}"
        case o.GiveUp(snapshot, why):
            return f"give up {snapshot}: {why}"


class Play:
    """Tells a lifecycle what happens, and compares its orders, in words."""

    def __init__(
        self,
        workers: int = 2,
        stages: int = 1,
        restarts: int = 5,
        saving: SnapshotRounds | None = None,
    ) -> None:
        self.now = 0
        self.life = Lifecycle(stages, placement(workers), restarts=restarts, saving=saving)
        self.heard: list[o.Happened] = []

    def expect(self, orders: Iterable[o.Order], *expected: str) -> Self:
        orders = list(orders)
        self.heard += [order for order in orders if isinstance(order, o.Happened)]
        assert [word(order) for order in orders] == list(expected)
        return self

    def any(self, orders: Iterable[o.Order]) -> Self:
        self.heard += [order for order in orders if isinstance(order, o.Happened)]
        return self

    def up(self, worker: int, incarnation: int) -> list[o.Order]:
        return self.life.up(worker, incarnation, ("here", worker), self.now)

    def down(self, worker: int, incarnation: int, why: str = "killed") -> list[o.Order]:
        return self.life.down(worker, incarnation, why, self.now)

    def report(self, worker: int, report: o.WorkerReport) -> list[o.Order]:
        return self.life.reported(worker, report, self.now)

    def scale(self, workers: int) -> list[o.Order]:
        return self.life.scale(placement(workers), self.now)

    def stop(self, *, drain: bool = False) -> list[o.Order]:
        return self.life.stop(self.now, drain=drain)

    def snapshot(self) -> list[o.Order]:
        return self.life.snapshot(self.now)

    def recorded(self, snapshot: int, error: str = "") -> list[o.Order]:
        return self.life.recorded(snapshot, error, self.now)

    def written(self, snapshot: int, error: str = "") -> list[o.Order]:
        return self.life.written(snapshot, error, self.now)

    def after(self, time: int) -> list[o.Order]:
        self.now += time
        return self.life.tick(self.now)

    @property
    def shown(self) -> str:
        return self.life.shown

    @property
    def state(self) -> str:
        return self.life.state

    def kinds(self) -> list[str]:
        return [told.kind for told in self.heard]

    # What a test that is about something else needs first.

    def running(self) -> Self:
        self.any(self.life.start(self.now))
        for worker, member in list(self.life.members.items()):
            self.any(self.up(worker, member.incarnation))
        return self.ready()

    def ready(self) -> Self:
        for worker in self.life.placement.workers:
            self.any(self.report(worker, o.Ready(self.life.generation)))
        assert self.life.state == "running"
        return self

    def come_up(self) -> Self:
        """Whoever is launched comes."""
        for worker, member in list(self.life.members.items()):
            if self.life.expects(worker, member.incarnation):
                self.any(self.up(worker, member.incarnation))
        return self

    def begin_again(self) -> Self:
        """The next generation begins, as soon as it may."""
        self.any(self.after(MAX_BACK_OFF_US)).come_up()
        for worker in self.life.placement.workers:
            self.any(self.report(worker, o.Ready(self.life.generation)))
        assert self.life.coordinator is not None
        return self

    def at(self, phase: Phase, *, last: bool = False) -> Self:
        """A snapshot comes as far as this, if it can."""
        saving = self.life.saving
        if not saving.busy and not last:
            self.any(self.snapshot())
        assert saving.last == last
        if phase in ("waiting", "recording"):
            return self.any(self.recorded(saving.number)) if phase == "waiting" else self
        self.any(self.recorded(saving.number))
        if phase == "saving":
            return self
        self.save()
        if phase in ("whole", "writing"):
            return self
        return self.any(self.written(saving.number))

    def save(self, *workers: Worker) -> Self:
        """These save their part, or all who have not."""
        coordinator = self.life.coordinator
        assert coordinator is not None
        for worker in workers or sorted(coordinator.saving):
            self.any(self.report(worker, self.saved()))
        return self

    def saved(self, snapshot: int | None = None, **what: Any) -> o.Saved:
        saving = self.life.saving
        return o.Saved(self.life.generation, snapshot or saving.number, **what)

    def complete(self, stage: int = 0, epoch: int = 1) -> Self:
        """Let a stage move."""
        coordinator = self.life.coordinator
        assert coordinator is not None
        members = coordinator.members
        for report in (m.Started(epoch), m.Completed(epoch)):
            for worker in members:
                self.any(self.moved(worker, report, stage))
        return self

    def moved(
        self, worker: Worker, report: m.Started | m.Completed | m.Left, stage: int = 0
    ) -> list[o.Order]:
        return self.report(worker, o.Report(self.life.generation, stage, report))


def placement(workers: int) -> Placement:
    return Placement.of(range(workers))
