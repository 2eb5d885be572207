"""The coordinator: one for a job; it orders rescales and snapshots over all workers and stages.

Its rules:

1. **One rescale at a time** (rule 9). A request that comes meanwhile waits; of several, the last one wins.
2. **Join first.** New workers are started and made known to all; when all have said so, the new ones begin.
3. **Top-down, stage by stage** (rule 12). A stage begins to move when the one before is through everywhere, so an
   output fence never crosses a stage that is in motion itself.
4. **Leave last.** Departing workers end their sources at the beginning; they are let go when every remaining worker
   has their last word in every stage, and not before they know what became of a snapshot they took part in: what
   they hand over then is all of after its cut, so it belongs to the next one.
5. **Snapshots go on**, but for two short moments: none begins between the start of a stage's move and the report
   of all workers that they have heard of it, nor while workers join; and no stage begins to move, and nobody
   joins, while a snapshot is under way. Either waits for the other; a move that waits goes first.

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
    """Start these workers, as members of every stage at its present placement and epoch."""

    workers: tuple[Worker, ...]
    members: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class Begin:
    """Let a new worker begin: everybody knows it."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Tell:
    """Give an event to the distributor of a stage on a worker."""

    worker: Worker
    stage: int
    event: m.Join | m.Rescale | m.Depart


@dataclass(frozen=True, slots=True)
class EndSources:
    """Let the sources of a departing worker end."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Put the barrier of a snapshot behind what a worker's sources have sent."""

    worker: Worker
    snapshot: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Every worker has saved its part: the snapshot is whole."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Nobody needs this worker any more."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class Rescaled:
    """The rescale to this placement is over."""

    placement: Placement


Order = Launch | Begin | Tell | EndSources | TakeSnapshot | Commit | Stop | Rescaled


class Coordinator:
    """Orders the rescales and snapshots of one job. Methods take what happened and return orders."""

    __slots__ = (
        "epochs", "members", "moving", "out", "phase", "placement", "queued", "saving", "snapshot",
        "snapshot_wanted", "target", "unsettled", "waiting",
    )  # fmt: skip

    def __init__(self, placement: Placement, stages: int, snapshot: int = 0) -> None:
        self.placement = placement
        self.members = placement.workers
        self.epochs = [0] * stages
        self.phase = "idle"  # idle, joining, starting, moving, leaving
        self.moving = 0  # the stage in motion
        self.target: Placement | None = None
        self.queued: Placement | None = None
        self.waiting: set[tuple[Worker, tuple[object, ...]]] = set()  # reports the phase waits for
        self.snapshot = snapshot  # the last one begun
        self.saving: set[Worker] = set()  # workers that have not saved it yet
        self.snapshot_wanted: int | None = None
        self.unsettled = False  # whether the snapshot is one that `settled` will be said of
        self.out: list[Order] = []

    # ------------------------------------------------------------ what happens

    def rescale(self, placement: Placement) -> list[Order]:
        """Someone wants this placement. Replaces a request that has not begun."""
        self.queued = placement
        return self._orders()

    def want_snapshot(self, snapshot: int | None = None, *, settles: bool = False) -> list[Order]:
        """It is time for a snapshot, or someone wants one; its number, if it is not just the next.

        With `settles`, nobody leaves until `settled` is called.
        """
        self.snapshot_wanted = self.snapshot + 1 if snapshot is None else snapshot
        self.unsettled = settles
        return self._orders()

    def settled(self) -> list[Order]:
        """Whether the snapshot counts is known, and everybody has been told."""
        self.unsettled = False
        return self._orders()

    def joined(self, worker: Worker) -> list[Order]:
        """A worker knows the new members; a new one is up."""
        self._arrived(worker, ("joined",))
        return self._orders()

    def reported(self, worker: Worker, stage: int, report: m.Command) -> list[Order]:
        """A worker's distributor reported."""
        match report:
            case m.Started(epoch):
                self._arrived(worker, ("started", stage, epoch))
            case m.Completed(epoch):
                self._arrived(worker, ("completed", stage, epoch))
            case m.Left(gone):
                if gone != worker:
                    self.waiting.discard((worker, ("left", stage, gone)))
            case m.Snapshot(snapshot):
                if snapshot != self.snapshot or worker not in self.saving:
                    raise ProtocolError(f"worker {worker} saved snapshot {snapshot} out of turn")
                self.saving.discard(worker)
                if not self.saving:
                    self._give(Commit(snapshot))
            case _:
                raise ProtocolError(f"worker {worker} reported {report}")
        return self._orders()

    def _arrived(self, worker: Worker, what: tuple[object, ...]) -> None:
        if (worker, what) not in self.waiting:
            raise ProtocolError(f"worker {worker} reported {what[0]}, which was not to be expected")
        self.waiting.discard((worker, what))

    # ------------------------------------------------------------ what follows

    @property
    def idle(self) -> bool:
        """Whether nothing is under way or asked for."""
        quiet = self.phase == "idle" and self.queued is None
        return quiet and not self.saving and self.snapshot_wanted is None

    def _orders(self) -> list[Order]:
        while self._advance():
            pass
        if self.snapshot_wanted is not None and not self.saving and self._quiet():
            self.snapshot, self.snapshot_wanted = self.snapshot_wanted, None
            self.saving = set(self.members)
            for worker in self.members:
                self._give(TakeSnapshot(worker, self.snapshot))
        out, self.out = self.out, []
        return out

    def _quiet(self) -> bool:
        """Whether a snapshot may begin."""
        return self.phase not in ("joining", "starting")

    def _advance(self) -> bool:
        """Do the next thing that can be done now; False if there is none."""
        if self.phase == "idle":
            return self._start()
        assert self.target is not None
        if self.phase == "joining" and not self._open("joined"):
            for worker in sorted(set(self.target.workers) - set(self.placement.workers)):
                self._give(Begin(worker))
            return self._move(0)
        if self.phase == "starting" and not self._open("started"):
            self.phase = "moving"
            return True
        if self.phase == "moving" and not self._open("completed") and not self.saving:
            if self.moving + 1 < len(self.epochs):
                return self._move(self.moving + 1)
            self.phase = "leaving"
            return True
        if self.phase == "leaving" and not self.waiting and not self.saving:
            return not self._held() and self._finish()
        return False

    def _start(self) -> bool:
        """Begin the queued rescale: make new workers known, or else move the first stage."""
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
        for gone in departing:
            self._tell_all_stages(gone, m.Depart())
            self._give(EndSources(gone))
            for worker in self.members:
                if worker not in departing:
                    stages = range(len(self.epochs))
                    self.waiting |= {(worker, ("left", stage, gone)) for stage in stages}

    def _held(self) -> bool:
        """Whether someone who is to leave has a part in a snapshot, and nobody knows yet if that counts."""
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

    def _open(self, kind: str) -> bool:
        """Whether a report of this kind is still missing."""
        return any(what[0] == kind for _, what in self.waiting)

    def _tell_all_stages(self, worker: Worker, event: m.Join | m.Depart) -> None:
        for stage in range(len(self.epochs)):
            self._give(Tell(worker, stage, event))

    def _give(self, order: Order) -> None:
        self.out.append(order)
