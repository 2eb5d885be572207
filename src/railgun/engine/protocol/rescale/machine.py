"""State and basic actions that all parts of a distributor share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from railgun.engine.protocol.barrier import Barrier
from railgun.engine.protocol.batch import Batch
from railgun.engine.protocol.frontier import MAX, MIN, Emissions, Frontiers
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.collect import Collect
from railgun.engine.protocol.rescale.interrogate import Interrogate
from railgun.engine.protocol.rescale.migration import Migration
from railgun.engine.protocol.rescale.normal import Normal
from railgun.engine.protocol.rescale.phase import TRANSITIONS, Phase
from railgun.engine.protocol.rescale.settle import Settle
from railgun.errors import ProtocolError


class Machine:
    """The state of one stage's distributor on one worker.

    `downstream` is the number of stages that follow this one. `emits` says whether the operators emit on their own, at
    times of their own, as readers do.
    """

    __slots__ = (
        "barrier", "bound", "deferred", "departing", "downstream", "early", "emissions", "epoch",
        "frontiers", "heard", "left", "local", "members", "migration", "out", "peers", "phase",
        "placement", "relayed", "stage", "worker",
    )  # fmt: skip

    phases: ClassVar[dict[str, type[Phase]]] = {
        phase.name: phase for phase in (Normal, Interrogate, Collect, Settle)
    }

    def __init__(
        self,
        worker: Worker,
        placement: Placement,
        members: Iterable[Worker] | None = None,
        *,
        stage: str = "",
        epoch: int = 0,
        downstream: int = 0,
        emits: bool = False,
    ) -> None:
        self.worker = worker
        self.stage = stage
        self.downstream = downstream
        self.epoch = epoch
        self.placement = placement
        self.members = tuple(sorted({worker, *placement.workers, *(members or ())}))
        self.peers = tuple(peer for peer in self.members if peer != worker)
        self.phase: Phase = Normal()
        self.migration: Migration | None = None
        self.heard: dict[Worker, int] = {}  # peers that know the next epoch → their frontiers
        self.early: dict[Worker, int] = {}  # frontiers from peers that know of a later epoch
        self.frontiers = Frontiers(self.members)
        self.local = MIN  # the frontier of this worker's own upstream
        self.bound = MIN if emits else MAX  # the earliest time operators may emit at on their own
        self.emissions = Emissions(epoch) if emits else None
        self.relayed = MIN  # the last frontier this home relayed
        self.barrier: Barrier[m.UpstreamEvent, m.Message] = Barrier()
        self.deferred: list[Worker] = []  # homes to switch for once the snapshot is taken
        self.departing = False
        self.left = False
        self.out: list[m.Command] = []

    def __repr__(self) -> str:
        return f"worker {self.worker}, stage {self.stage or '-'}, {self.phase.name} {self.epoch}"

    def _set_members(self, members: set[Worker]) -> None:
        self.members = tuple(sorted(members))
        self.peers = tuple(peer for peer in self.members if peer != self.worker)

    @property
    def known_epoch(self) -> int:
        """Return the last epoch this worker has heard of."""
        return self.epoch if self.migration is None else self.migration.epoch

    @property
    def may_forward(self) -> bool:
        """Return whether records of other workers may still pass through this home."""
        migration = self.migration
        if migration is None or self.worker not in migration.old.workers:
            return False
        return not migration.all_flushed

    @property
    def movable(self) -> bool:
        """Return whether a `Move` would start moving a chunk of keys now."""
        phase = self.phase
        if not isinstance(phase, Collect) or phase.holding or phase.finished:
            return False
        return not self._cut_is_near()

    def _cut_is_near(self) -> bool:
        """Return whether rule 10 forbids a new chunk: from BAR1 of all peers until this worker's snapshot."""
        return self.barrier.stopped and self.barrier.all_first(self.peers)

    def process(self, batch: Batch) -> None:
        """Hand records to the operators; the driver must give `Bound` again before the stage's frontier goes on."""
        self.emit(m.Process(batch))
        self.bound = MAX if self.emissions is None else MIN

    def take(self, acquire: m.Acquire) -> None:
        """Hand state to the operators; the driver must give `Bound` again before the stage's frontier goes on."""
        self.emit(m.Take(acquire.hashes, acquire.state))
        self.bound = MAX if self.emissions is None else MIN

    def send(self, to: Worker, message: m.Message) -> None:
        """Send a message to one peer."""
        self.emit(m.Send(to, message))

    def broadcast(self, to: Iterable[Worker], message: m.Message) -> None:
        """Send a message to several peers."""
        for worker in to:
            self.send(worker, message)

    def raise_fence(self, chunk: int, owners: tuple[Worker, ...]) -> None:
        """Apply rule 12: have everything this home emitted for a chunk confirmed to the chunk's new owners."""
        if self.downstream and owners:
            epoch = self.migration_now().epoch
            self.emit(m.RaiseFence(m.Fence(self.stage, epoch, self.worker, chunk, owners)))

    def _confirm(self, fence: m.Fence) -> None:
        for owner in fence.owners:
            self.emit(m.Confirm(owner, fence.stage, m.Fenced(fence.epoch, fence.home, fence.chunk)))

    def emit(self, command: m.Command) -> None:
        """Add a command to those the current event returns."""
        self.out.append(command)

    def enter_phase(self, why: str, *arguments: Any) -> None:
        """Enter the phase that follows the current one after the event `why`.

        Raise `ProtocolError` if no phase follows.
        """
        following = TRANSITIONS.get((self.phase.name, why))
        if following is None:
            raise ProtocolError(f"{self}: no phase follows when: {why}")
        self.phase = self.phases[following](*arguments)

    def migration_now(self) -> Migration:
        """Return the migration under way; raise `ProtocolError` if none is."""
        if self.migration is None:
            raise ProtocolError(f"{self}: no rescale is under way")
        return self.migration

    def _current(self, epoch: int, message: m.Message) -> Migration:
        """Return the migration under way; raise `ProtocolError` if the message is not of its epoch."""
        migration = self.migration
        if migration is None or migration.epoch != epoch:
            raise ProtocolError(
                f"{self}: {type(message).__name__} of epoch {epoch}, which is not the epoch under way"
            )
        return migration

    def _of_home(self, sender: Worker, epoch: int, message: m.Message) -> Migration:
        """Return the migration under way, for a message that only a home may send; raise `ProtocolError` otherwise."""
        migration = self._current(epoch, message)
        if sender not in migration.old.workers:
            raise ProtocolError(f"{self}: {type(message).__name__} from {sender}, which is no home")
        return migration

    def _interrogating(self) -> Interrogate:
        if not isinstance(self.phase, Interrogate) or self.phase.named is not None:
            raise ProtocolError(f"{self}: Interrogated without Interrogate")
        return self.phase

    def _collecting(self) -> Collect:
        if not isinstance(self.phase, Collect):
            raise ProtocolError(f"{self}: not collecting")
        return self.phase

    def validate(self) -> None:
        """Check the invariants. This is slow: for tests, after every step."""
        assert not self.out, "all commands handed over"
        assert self.worker in self.members
        assert (self.migration is None) == isinstance(self.phase, Normal)
        self.phase.validate(self)
        if self.migration is not None:
            self.migration.validate(self)
        if self.barrier.sent_last:
            assert not self.phase.holding, "no key between two owners behind BAR2"
        assert self.barrier.stopped or not (self.barrier.backlog or self.deferred)
        assert set(self.barrier.behind) <= self.barrier.last
