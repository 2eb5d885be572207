"""Mutants: the production rules with one rule changed. A proof that lets one of them pass proves nothing.

Each is a subclass of the production distributor or coordinator; the explorer or the simulator must catch it by its
effects, so the machines' own checks (`validate`) are off for mutants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from railgun.engine.protocol.barrier import Barrier
from railgun.engine.protocol.batch import Batch
from railgun.engine.protocol.frontier import MAX, MIN, Emissions, Frontiers
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.arrivals import Arrivals, Gate
from railgun.engine.protocol.rescale.chunks import Chunks
from railgun.engine.protocol.rescale.collect import Collect, forward
from railgun.engine.protocol.rescale.coordinator import Coordinator
from railgun.engine.protocol.rescale.distributor import Distributor
from railgun.engine.protocol.rescale.interrogate import Interrogate
from railgun.engine.protocol.rescale.machine import Machine
from railgun.engine.protocol.rescale.order import Order
from railgun.engine.protocol.rescale.phase import Phase
from railgun.hashing import Hashes
from verification.mutation import registrar

Kind = TypeVar("Kind", bound=type[Distributor] | type[Coordinator])

MUTANTS: dict[str, tuple[type[Distributor] | type[Coordinator], str]] = {}
"""By name: the class, and where to check it first (a family of scenarios, or the simulator)."""


def mutant(look_at: str) -> Callable[[Kind], Kind]:
    """Register a mutant under the first line of its docstring; `look_at` is where it shows its fault."""
    return registrar(MUTANTS, lambda kind: (kind, look_at))


def with_phase(phase: type[Phase]) -> dict[str, type[Phase]]:
    """Return the production phases with one replaced."""
    return {**Distributor.phases, phase.name: phase}


class _WithArrivals(Distributor):
    """A distributor whose arrivals are of another class."""

    __slots__ = ()
    arrivals: type[Arrivals] = Arrivals

    def _rescale(self, epoch: int, placement: Placement) -> None:
        super()._rescale(epoch, placement)
        migration = self.migration_now()
        migration.arrivals = self.arrivals(
            self.worker, migration.old, migration.members, migration.arrivals.confirmations
        )


class _FlushedAnyTime(Distributor):
    """A home that takes Flush in every phase, as a mutant may need."""

    __slots__ = ()

    def _on_flush(self, sender: Worker) -> None:
        migration = self.migration_now()
        migration.flushes.add(sender)
        for owner in migration.new.workers:
            if owner != self.worker:
                self.send(owner, m.Flushed(migration.epoch, sender))


# ---------------------------------------------------------------- the sender


@mutant("plain")
class SwitchBeforeDone(_FlushedAnyTime):
    """A sender switches when it hears of the rescale, before Done (rule 6)."""

    __slots__ = ()

    def _rescale(self, epoch: int, placement: Placement) -> None:
        super()._rescale(epoch, placement)
        for home in self.migration_now().old.workers:
            super()._switch(home)

    def _switch(self, home: Worker) -> None:
        pass


@mutant("plain")
class FlushAfterSwitch(Distributor):
    """A sender switches without sending Flush, and the home does not wait for it (rules 6, 7)."""

    __slots__ = ()

    def _switch(self, home: Worker) -> None:
        self.migration_now().switched.add(home)

    def _try_done(self) -> None:
        finished = isinstance(self.phase, Collect) and self.phase.finished
        super()._try_done()
        if finished:
            for sender in self.members:
                self._on_flush(sender)


@mutant("snapshot")
class SendInsideBarrier(Distributor):
    """A sender continues to send between its barrier and its snapshot (rule 10)."""

    __slots__ = ()

    def _upstream(self, event: m.UpstreamEvent) -> None:
        stopped, self.barrier.stopped = self.barrier.stopped, False
        super()._upstream(event)
        self.barrier.stopped = self.barrier.stopped or stopped


# ---------------------------------------------------------------- the home


@mutant("plain")
class NoRecording(Distributor):
    """Interrogate does not record the keys of records that arrive meanwhile (rule 2)."""

    __slots__ = ()

    class _Interrogate(Interrogate):
        __slots__ = ()

        def on_old(self, worker: Machine, batch: Batch) -> None:
            worker.process(batch)

    phases = with_phase(_Interrogate)


@mutant("plain")
class ForgetfulInterrogate(Distributor):
    """Interrogate forgets the operators' answers (rule 2)."""

    __slots__ = ()

    class _Interrogate(Interrogate):
        __slots__ = ()

        def answer(self, named: Order) -> None:
            self.named = Order.of(())

    phases = with_phase(_Interrogate)


@mutant("slow")
class NoHoldAtHome(Distributor):
    """The home continues to process keys whose state is being collected (rule 2)."""

    __slots__ = ()

    class _Collect(Collect):
        __slots__ = ()

        def whitelisted_and_held(
            self, hashes: Hashes
        ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
            whitelisted, held = super().whitelisted_and_held(hashes)
            return whitelisted | held, np.zeros_like(held)

    phases = with_phase(_Collect)


@mutant("keys")
class TurnByHash(Distributor):
    """The home takes keys in the order of their hashes, and not in the order in which they leave (rule 2)."""

    __slots__ = ()

    class _Collect(Collect):
        __slots__ = ()

        def whitelisted_and_held(
            self, hashes: Hashes
        ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
            in_order = self.order.find(hashes) >= 0
            at = np.searchsorted(self.order.sorted, hashes)
            return in_order & (at >= self.high), in_order & (at >= self.low) & (at < self.high)

    phases = with_phase(_Collect)


@mutant("plain")
class DropBeforeAcquire(Distributor):
    """The home drops the state before it is collected (rule 4)."""

    __slots__ = ()

    class _Collect(Collect):
        __slots__ = ()

        def move(self, worker: Machine, keys: int) -> None:
            worker.emit(m.Drop(self.order.hashes[self.low : self.low + keys]))
            super().move(worker, keys)

    phases = with_phase(_Collect)


@mutant("slow")
class ForwardBeforeAcquire(Distributor):
    """The home forwards buffered records before it sends the state (rule 4)."""

    __slots__ = ()

    class _Collect(Collect):
        __slots__ = ()

        def collected(self, worker: Machine, states: tuple[Any, ...]) -> None:
            buffered, self.buffer = self.buffer, []
            for batch in buffered:
                forward(worker, batch)
            super().collected(worker, states)

    phases = with_phase(_Collect)


@mutant("plain")
class NoDrop(Distributor):
    """The home keeps the state it has given away (rule 4)."""

    __slots__ = ()

    def emit(self, command: m.Command) -> None:
        if not isinstance(command, m.Drop):
            super().emit(command)


@mutant("slow")
class DoneTooSoon(_FlushedAnyTime):
    """The home says Done while its last chunk is still on hold (rule 5)."""

    __slots__ = ()

    class _Collect(Collect):
        __slots__ = ()

        def move(self, worker: Machine, keys: int) -> None:
            super().move(worker, keys)
            if self.high == len(self.order):
                worker.broadcast(worker.peers, m.Done(worker.migration_now().epoch))
                assert isinstance(worker, Distributor)
                worker._on_done(worker.worker)

    phases = with_phase(_Collect)

    def _try_done(self) -> None:
        phase = self._collecting()
        if phase.finished:
            if len(phase.order) == 0:
                super()._try_done()
            else:
                self.enter_phase("no key left, Done is sent")


@mutant("plain")
class FlushedForAll(Distributor):
    """The home says Flushed for all senders on the first Flush (rule 7)."""

    __slots__ = ()

    def _on_flush(self, sender: Worker) -> None:
        migration = self.migration_now()
        first = not migration.flushes
        migration.flushes.add(sender)
        if first:
            for owner in migration.new.workers:
                for origin in self.members:
                    if owner != self.worker:
                        self.send(owner, m.Flushed(migration.epoch, origin))


@mutant("plain")
class NoHeard(Distributor):
    """The home collects before all have heard of the rescale."""

    __slots__ = ()

    def _try_collect(self) -> None:
        heard, self.heard = self.heard, dict.fromkeys(self.peers, MIN)
        super()._try_collect()
        self.heard = heard


# ---------------------------------------------------------------- the new owner


@mutant("plain")
class NoHoldAtNewOwner(_WithArrivals):
    """The new owner processes NEW records at once (rule 8)."""

    __slots__ = ()

    class _Arrivals(Arrivals):
        __slots__ = ()

        def gate(self, home: Worker, origin: Worker | None) -> Gate | None:
            return super().gate(home, None)

    arrivals = _Arrivals


@mutant("fence")
class DirectBeforeForwarded(_WithArrivals):
    """Records that wait at the new owner are released in the order of arrival (rules 8, 12)."""

    __slots__ = ()

    class _Arrivals(Arrivals):
        __slots__ = ()

        def gate(self, home: Worker, origin: Worker | None) -> Gate | None:
            return super().gate(home, None) or super().gate(home, origin)

    arrivals = _Arrivals


@mutant("plain")
class CompleteTooSoon(Distributor):
    """A worker finishes before all senders have flushed it (rule 9)."""

    __slots__ = ()

    def _try_complete(self) -> None:
        migration = self.migration
        if migration is not None and migration.switched.issuperset(migration.old.workers):
            migration.flushes.update(self.members)
        super()._try_complete()


# ---------------------------------------------------------------- snapshots


@mutant("snapshot")
class OneLayer(Distributor):
    """The barrier has one layer: BAR2 at once, during a migration too (rule 10)."""

    __slots__ = ()

    def _forwarded_all(self) -> bool:
        return not self.phase.holding


@mutant("snapshot")
class CollectInsideBarrier(Distributor):
    """Chunks are moved between BAR2 and the snapshot (rule 10)."""

    __slots__ = ()

    def _cut_is_near(self) -> bool:
        return False


@mutant("slow snapshot")
class LastBarrierWhileHolding(Distributor):
    """BAR2 is sent while keys are on hold (rule 10)."""

    __slots__ = ()

    def _forwarded_all(self) -> bool:
        return not self.may_forward or self.barrier.all_first(self.peers)


@mutant("simulator")
class NothingWaitsBehind(Distributor):
    """Records behind BAR2 are processed before the snapshot (rule 10)."""

    __slots__ = ()

    class _Barrier(Barrier[m.UpstreamEvent, m.Message]):
        __slots__ = ()

        def blocks(self, sender: Worker) -> bool:
            return False

    def handle(self, event: m.Event) -> list[m.Command]:
        if type(self.barrier) is Barrier:
            self.barrier = self._Barrier()
        return super().handle(event)


@mutant("snapshot")
class SnapshotWhileWaiting(Distributor):
    """The snapshot is taken while records wait at the new owner (rule 10)."""

    __slots__ = ()

    def _nothing_waits(self) -> bool:
        return True

    def _forwarded_all(self) -> bool:
        return True


# ---------------------------------------------------------------- frontiers


@mutant("simulator")
class FrontierOvertakesHold(_WithArrivals):
    """Frontiers overtake records that wait at the new owner (rule 11)."""

    __slots__ = ()

    class _Arrivals(Arrivals):
        __slots__ = ()

        @property
        def lowest(self) -> int:
            return MAX

    arrivals = _Arrivals


@mutant("times")
class FrontierIgnoresHomes(Distributor):
    """Frontiers overtake records that are forwarded (rule 11)."""

    __slots__ = ()

    class _Frontiers(Frontiers):
        __slots__ = ()

        def begin(self, homes: Iterable[Worker]) -> None:
            super().begin(())

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.frontiers = self._Frontiers(self.members)


@mutant("bystander times")
class BelieveTooSoon(Distributor):
    """A frontier from a worker that knows of the rescale counts at a worker that does not (rule 11)."""

    __slots__ = ()

    def _receive(self, sender: Worker, message: m.Message) -> None:
        if isinstance(message, m.Frontier):
            message = m.Frontier(self.epoch, message.value)
        super()._receive(sender, message)


@mutant("slow times")
class RelayOvertakesHold(Distributor):
    """A home relays a frontier past what it has on hold (rule 11)."""

    __slots__ = ()

    class _Collect(Collect):
        __slots__ = ()

        @property
        def holding(self) -> bool:
            return False

    def _relay(self) -> None:
        phase = self.phase
        if isinstance(phase, Collect) and phase.holding:
            stand_in = self._Collect(phase.order, phase.reached)
            self.phase = stand_in
            super()._relay()
            self.phase = phase
        else:
            super()._relay()


@mutant("times stuck")
class NoRelay(Distributor):
    """A home relays nothing: time stands still at the new owners until the rescale is over (rule 11)."""

    __slots__ = ()

    def _relay(self) -> None:
        pass


@mutant("simulator")
class IdleIsAPromise(Distributor):
    """The frontier runs ahead when all readers are idle (rule 11)."""

    __slots__ = ()

    class _Emissions(Emissions):
        __slots__ = ()

        def advance(self, members: Iterable[Worker]) -> int | None:
            value = min(self.of(worker) for worker in members)
            if value <= self.announced:
                return None
            self.announced = value
            return value

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.emissions is not None:
            self.emissions = self._Emissions(self.epoch)


@mutant("slow times")
class EndsTwice(Distributor):
    """A home that still has keys to give ends its operators (rule 11)."""

    __slots__ = ()

    def _may_end(self) -> bool:
        return True


@mutant("times")
class KeysInThePast(Distributor):
    """Keys are brought only to the time of the home's own senders before they move (rule 11)."""

    __slots__ = ()

    class _Collect(Collect):
        __slots__ = ()

        def __init__(self, order: Order, reached: int) -> None:
            super().__init__(order, MIN)

    phases = with_phase(_Collect)


# ---------------------------------------------------------------- order into the next stage


@mutant("fence")
class NoFence(Distributor):
    """Keys continue at their new owner without a fence (rule 12)."""

    __slots__ = ()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "downstream": 0})


@mutant("fence forgets")
class NoFenceForNewKeys(_WithArrivals):
    """Keys that come without state pass the fence (rule 12)."""

    __slots__ = ()

    class _Arrivals(Arrivals):
        __slots__ = ()

        def open(self, home: Worker, chunk: int) -> bool:
            return chunk == 0 or super().open(home, chunk)

    arrivals = _Arrivals


class _WithChunks(_WithArrivals):
    """A distributor whose arrivals use another class of chunks."""

    __slots__ = ()
    chunks: type[Chunks] = Chunks

    def _rescale(self, epoch: int, placement: Placement) -> None:
        super()._rescale(epoch, placement)
        arrivals = self.migration_now().arrivals
        arrivals.fenced = {home: self.chunks(home) for home in arrivals.homes}


@mutant("simulator")
class StaleChunks(_WithChunks):
    """The new owner looks for the chunk of a key only among those of its first look (rule 12)."""

    __slots__ = ()

    class _Chunks(Chunks):
        __slots__ = ()

        def gather(self) -> None:
            if not self.runs:
                super().gather()

    chunks = _Chunks


@mutant("simulator")
class LastingChunks(_WithChunks):
    """Records of a key wait for a fence that is already open (rule 12)."""

    __slots__ = ()

    class _Chunks(Chunks):
        __slots__ = ()

        @property
        def stale_keys(self) -> int:
            return 0

    chunks = _Chunks


@mutant("simulator")
class LostChunks(_WithChunks):
    """The new owner forgets waiting chunks when new ones arrive (rule 12)."""

    __slots__ = ()

    class _Chunks(Chunks):
        __slots__ = ()

        def gather(self) -> None:
            if self.fresh:
                self.runs = []
            super().gather()

    chunks = _Chunks


@mutant("fence timers")
class FenceBeforeTimers(Distributor):
    """The fence of a chunk is raised before its timers have fired (rule 12)."""

    __slots__ = ()

    class _Collect(Collect):
        __slots__ = ()

        def move(self, worker: Machine, keys: int) -> None:
            at = len(worker.out)
            super().move(worker, keys)
            worker.raise_fence(self.chunk, tuple(to for to, _ in self.parts))
            worker.out.insert(at, worker.out.pop())

        def collected(self, worker: Machine, states: tuple[Any, ...]) -> None:
            super().collected(worker, states)
            if isinstance(worker.out[-1], m.RaiseFence):
                worker.out.pop()

    phases = with_phase(_Collect)


@mutant("simulator")
class BoundOutlivesState(Distributor):
    """The lower bound of readers is not reported again when state arrives (rule 11)."""

    __slots__ = ()

    def take(self, acquire: m.Acquire) -> None:
        bound = self.bound
        super().take(acquire)
        self.bound = bound


# ---------------------------------------------------------------- the coordinator


@mutant("simulator")
class AllStagesAtOnce(Coordinator):
    """All stages move at the same time (rule 12)."""

    __slots__ = ()

    def _move(self, stage: int) -> bool:
        for index in range(len(self.epochs)):
            super()._move(index)
        return True


@mutant("simulator")
class NextRescaleTooSoon(Coordinator):
    """The next rescale begins before all workers have reported (rule 9)."""

    __slots__ = ()

    def _advance(self) -> bool:
        if self.phase == "moving" and self.queued is not None:
            self.waiting = {w for w in self.waiting if w[1][0] == "left"}
        return super()._advance()

    def _arrived(self, worker: Worker, what: tuple[object, ...]) -> None:
        self.waiting.discard((worker, what))


@mutant("simulator")
class SnapshotWhileStarting(Coordinator):
    """A snapshot begins before all workers have heard of the rescale (rule 10)."""

    __slots__ = ()

    def _may_begin_snapshot(self) -> bool:
        return self.phase != "joining"


@mutant("simulator")
class LeavesAfterTheFirstStage(Coordinator):
    """A worker is released when all workers have its last message of the first stage (rule 9)."""

    __slots__ = ()

    def _dismiss(self, departing: Sequence[Worker]) -> None:
        super()._dismiss(departing)
        self.waiting = {
            (worker, what) for worker, what in self.waiting if what[0] != "left" or what[1] == 0
        }
