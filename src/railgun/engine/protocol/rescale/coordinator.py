"""Order rescales and snapshots over all workers and stages: one coordinator for a job.

Its rules:

1. **One rescale at a time** (rule 9). A request made meanwhile waits; of several waiting requests, the last one wins.
2. **Join first.** New workers are started and announced to all members; once all have confirmed, the new ones begin.
3. **Top-down, stage by stage** (rule 12). A stage begins to move when the preceding stage has completed on every
   worker, so an output fence never crosses a stage that is moving itself.
4. **Leave last.** Departing workers end their sources when the rescale begins. They are stopped when every remaining
   worker has received their last message in every stage, and not before they know whether the snapshot they took part
   in counts: what they hand over then belongs entirely after its cut, so to the next snapshot.
5. **Snapshots go on**, but for two short moments: no snapshot begins between the start of a stage's move and the report
   of all workers that they have heard of it, nor while workers join; and no stage begins to move, and no worker joins,
   while a snapshot is under way. Each waits for the other; a move that waits goes first.

A failure ends the coordinator; after the rollback a new one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import messages as m
from railgun.errors import ProtocolError

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Launch:
    """Start these workers, as members of every stage at its current placement and epoch."""

    workers: tuple[Worker, ...]
    members: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """Let a new worker begin: all members know it."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Tell:
    """Give an event to the distributor of a stage on a worker."""

    worker: Worker
    stage: int
    event: m.Join | m.Rescale | m.Depart


@dataclass(frozen=True, slots=True)
class EndSources:
    """End the sources of a departing worker."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Put the barrier of a snapshot behind the records a worker's sources have sent."""

    worker: Worker
    snapshot: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Every worker has saved its part: the snapshot is complete."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop this worker: it has left every stage."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Rescaled:
    """The rescale to this placement is complete."""

    placement: Placement


Order = Launch | Begin | Tell | EndSources | TakeSnapshot | Commit | Stop | Rescaled


class Coordinator:
    """Orders the rescales and snapshots of one job. Methods take events and return orders."""

    __slots__ = (
        "epochs", "members", "moving", "out", "phase", "placement", "queued", "saving", "snapshot",
        "snapshot_wanted", "target", "unsettled", "waiting",
    )  # fmt: skip

    def __init__(self, placement: Placement, stages: int, snapshot: int = 0) -> None:
        self.placement = placement
        self.members = placement.workers
        self.epochs = [0] * stages
        self.phase = "idle"  # idle, joining, starting, moving, leaving
        self.moving = 0  # index of the stage that moves
        self.target: Placement | None = None
        self.queued: Placement | None = None
        self.waiting: set[tuple[Worker, tuple[object, ...]]] = set()  # reports the phase waits for
        self.snapshot = snapshot  # number of the last snapshot begun
        self.saving: set[Worker] = set()  # workers that have not saved that snapshot yet
        self.snapshot_wanted: int | None = None
        self.unsettled = False  # whether a call of `settled` is still to come for the snapshot
        self.out: list[Order] = []

    # ------------------------------------------------------------ events

    def rescale(self, placement: Placement) -> list[Order]:
        """Request this placement, in place of a request that has not begun."""
        self.queued = placement
        return self._orders()

    def want_snapshot(self, snapshot: int | None = None, *, settles: bool = False) -> list[Order]:
        """Request a snapshot, with the number `snapshot` (default: the next).

        With `settles`, no worker leaves until `settled` is called.
        """
        self.snapshot_wanted = self.snapshot + 1 if snapshot is None else snapshot
        self.unsettled = settles
        return self._orders()

    def settled(self) -> list[Order]:
        """Take note that all workers have been told whether the snapshot counts."""
        self.unsettled = False
        return self._orders()

    def joined(self, worker: Worker) -> list[Order]:
        """Take note that a worker knows the new members, or that a new worker is up."""
        self._arrived(worker, ("joined",))
        return self._orders()

    def reported(self, worker: Worker, stage: int, report: m.Command) -> list[Order]:
        """Take a report of a worker's distributor; raise `ProtocolError` if it is out of turn."""
        match report:
            case m.Started(epoch):
                self._arrived(worker, ("started", stage, epoch))
            case m.Completed(epoch):
                self._arrived(worker, ("completed", stage, epoch))
            case m.Left(leaver):
                if leaver != worker:
                    self.waiting.discard((worker, ("left", stage, leaver)))
            case m.Snapshot(snapshot):
                if snapshot != self.snapshot or worker not in self.saving:
                    raise ProtocolError(f"worker {worker} saved snapshot {snapshot} out of turn")
                self.saving.discard(worker)
                if not self.saving:
                    self._give(Commit(snapshot))
            case _:
                raise ProtocolError(f"worker {worker} reported {report}")
        return self._orders()

    def _arrived(self, worker: Worker, report: tuple[object, ...]) -> None:
        if (worker, report) not in self.waiting:
            raise ProtocolError(
                f"worker {worker} reported {report[0]}, which was not to be expected"
            )
        self.waiting.discard((worker, report))

    # ------------------------------------------------------------ orders

    @property
    def idle(self) -> bool:
        """Return whether no rescale or snapshot is under way or requested."""
        quiet = self.phase == "idle" and self.queued is None
        return quiet and not self.saving and self.snapshot_wanted is None

    def _orders(self) -> list[Order]:
        while self._advance():
            pass
        if self.snapshot_wanted is not None and not self.saving and self._may_begin_snapshot():
            self.snapshot, self.snapshot_wanted = self.snapshot_wanted, None
            self.saving = set(self.members)
            for worker in self.members:
                self._give(TakeSnapshot(worker, self.snapshot))
        out, self.out = self.out, []
        return out

    def _may_begin_snapshot(self) -> bool:
        """Return whether a snapshot may begin."""
        return self.phase not in ("joining", "starting")

    def _advance(self) -> bool:
        """Take the next step that is possible now; return False if there is none."""
        if self.phase == "idle":
            return self._start()
        assert self.target is not None
        if self.phase == "joining" and not self._is_missing("joined"):
            for worker in sorted(set(self.target.workers) - set(self.placement.workers)):
                self._give(Begin(worker))
            return self._move(0)
        if self.phase == "starting" and not self._is_missing("started"):
            self.phase = "moving"
            return True
        if self.phase == "moving" and not self._is_missing("completed") and not self.saving:
            if self.moving + 1 < len(self.epochs):
                return self._move(self.moving + 1)
            self.phase = "leaving"
            return True
        if self.phase == "leaving" and not self.waiting and not self.saving:
            return not self._departure_must_wait() and self._finish()
        return False

    def _start(self) -> bool:
        """Begin the queued rescale: announce new workers, or else move the first stage."""
        if self.queued is None or self.saving:
            return False
        self.target, self.queued = self.queued, None
        if self.target == self.placement:
            self.target = None
            self._give(Rescaled(self.placement))
            return True
        joining = tuple(w for w in self.target.workers if w not in self.members)
        if not joining:
            return self._move(0)
        self.phase = "joining"
        old, self.members = self.members, tuple(sorted({*self.members, *joining}))
        self._give(Launch(joining, self.members))
        for worker in old:
            self._tell_all_stages(worker, m.Join(joining))
        self.waiting |= {(worker, ("joined",)) for worker in self.members}
        return True

    def _move(self, stage: int) -> bool:
        """Let a stage begin to move."""
        assert self.target is not None
        self.phase, self.moving = "starting", stage
        self.epochs[stage] += 1
        epoch = self.epochs[stage]
        for worker in self.members:
            self._give(Tell(worker, stage, m.Rescale(epoch, self.target)))
            self.waiting |= {
                (worker, ("started", stage, epoch)),
                (worker, ("completed", stage, epoch)),
            }
        if stage == 0:
            self._dismiss(sorted(set(self.members) - set(self.target.workers)))
        return True

    def _dismiss(self, departing: Sequence[Worker]) -> None:
        for leaver in departing:
            self._tell_all_stages(leaver, m.Depart())
            self._give(EndSources(leaver))
            for worker in self.members:
                if worker not in departing:
                    stages = range(len(self.epochs))
                    self.waiting |= {(worker, ("left", stage, leaver)) for stage in stages}

    def _departure_must_wait(self) -> bool:
        """Return whether a departing worker must stay until it is known whether the snapshot counts."""
        assert self.target is not None
        going = not set(self.members) <= set(self.target.workers)
        return going and self.unsettled and self.snapshot_wanted is None

    def _finish(self) -> bool:
        assert self.target is not None
        for worker in self.members:
            if worker not in self.target.workers:
                self._give(Stop(worker))
        self.placement, self.members = self.target, self.target.workers
        self.target, self.phase = None, "idle"
        self._give(Rescaled(self.placement))
        return True

    def _is_missing(self, kind: str) -> bool:
        """Return whether a report of this kind is still missing."""
        return any(report[0] == kind for _, report in self.waiting)

    def _tell_all_stages(self, worker: Worker, event: m.Join | m.Depart) -> None:
        for stage in range(len(self.epochs)):
            self._give(Tell(worker, stage, event))

    def _give(self, order: Order) -> None:
        self.out.append(order)
