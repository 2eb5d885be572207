"""Route keyed batches to the workers that own the keys, and move the keys while records flow.

There is one distributor for each stage on each worker. It plays three parts at once. During a rescale from placement F
to F′ these are the rules (the numbers are those of docs/design/rescale.md):

- **Sender** C, of records from its own upstream. Rule 1: route a key K to its home F(K), as OLD, until C has
  *switched* for that home; from then on to F′(K), as NEW. Rule 6: on `Done(A)` send `Flush` to A, then switch.
- **Home** A, of the keys F gives it. Its phase decides about OLD records (rule 2): `normal`, `interrogate`,
  `collect`, `settle`, one file each. Rule 5: with no key left, A sends `Done` to all. Rule 7: on `Flush` from C, A
  sends `Flushed(C)` to the new owners.
- **New owner** B, of the keys F′ gives it (`arrivals.py`). Rule 8: a NEW record from C waits until `Flushed(C)`
  has come from its key's home.

Rule 9: a worker has completed the rescale when it has switched for all homes, has been flushed by all senders, and no
message can come by way of a home any more. Snapshots (rule 10) are aligned by `barrier.py`, frontiers (rule 11) kept
by `frontier.py`. Like all machines of `protocol`, `handle(event)` returns commands, in order, and never blocks.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from railgun.engine.protocol.barrier import Barrier
from railgun.engine.protocol.batch import Batch, select, split
from railgun.engine.protocol.frontier import LAST, MAX, MIN, Emissions
from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.arrivals import Arrivals
from railgun.engine.protocol.rescale.collect import Collect
from railgun.engine.protocol.rescale.interrogate import Interrogate
from railgun.engine.protocol.rescale.machine import Machine
from railgun.engine.protocol.rescale.migration import Migration
from railgun.engine.protocol.rescale.settle import Settle
from railgun.errors import ProtocolError

ADDITIVE_EVENTS: Final = (m.Local, m.Data, m.Forward, m.Acquire)
"""Events that only add records or state: no waiting step becomes possible by them."""


class Distributor(Machine):
    """One stage's distributor on one worker: `handle(event)` returns the commands that follow."""

    __slots__ = ()

    # ------------------------------------------------------------ events

    def handle(self, event: m.Event) -> list[m.Command]:
        """Take one event and return the commands to carry out, in order.

        Raise `ProtocolError` if the event breaks the protocol.
        """
        try:
            self._take_event(event)
            if not isinstance(
                event.message if isinstance(event, m.Received) else event, ADDITIVE_EVENTS
            ):
                self._make_progress()
            return self.out
        finally:
            self.out = []

    def _take_event(self, event: m.Event) -> None:
        match event:
            case m.Received(sender, message):
                self._receive(sender, message)
            case m.Local() | m.Advanced() | m.StartSnapshot() | m.PassFence():
                self._upstream(event)
            case m.Move(keys):
                if self.movable and keys > 0:
                    self._collecting().move(self, keys)
            case m.Collected(states):
                self._collecting().collected(self, states)
                self._try_done()
            case m.Interrogated(named):
                self._interrogating().answer(named)
                self._try_collect()
            case m.Rescale(epoch, placement):
                self._rescale(epoch, placement)
            case m.Join(workers):
                self._join(workers)
            case m.Depart():
                self.departing = True
            case m.Bound(value):
                self.bound = value
            case _:
                raise ProtocolError(f"{self}: {event!r} is not an event")

    def _upstream(self, event: m.UpstreamEvent) -> None:
        """Take an event of the worker's own upstream, in order; behind a barrier it waits for the snapshot."""
        if self.barrier.stopped:
            self.barrier.backlog.append(event)
            return
        if self.left:
            self._upstream_after_leaving(event)
            return
        match event:
            case m.Local(batch):
                if self.local == MAX:
                    raise ProtocolError(f"{self}: records came from an upstream that had ended")
                if len(batch):
                    self._route(batch)
            case m.Advanced(value):
                if value < self.local:
                    raise ProtocolError(f"{self}: the upstream's frontier went back to {value}")
                self.local = value
                self.frontiers.sender(self.worker, value)
                self.broadcast(self.peers, m.Frontier(self.known_epoch, value))
            case m.StartSnapshot(snapshot):
                self.barrier.stop(snapshot)
            case m.PassFence(fence):
                self.broadcast(self.peers, fence)
                self._confirm(fence)

    def _upstream_after_leaving(self, event: m.UpstreamEvent) -> None:
        """Take an upstream event after leaving: pass barriers on, accept the end, refuse anything else."""
        if isinstance(event, m.StartSnapshot):
            self.emit(m.Snapshot(event.snapshot))
        elif not (isinstance(event, m.Advanced) and event.value == MAX):
            raise ProtocolError(
                f"{self}: {type(event).__name__} came from an upstream that had ended"
            )

    def _receive(self, sender: Worker, message: m.Message) -> None:
        """Take a peer's message. Only confirmations overtake a barrier: a snapshot waits for them."""
        if isinstance(message, m.Fenced):
            # Also from a worker that has left this stage but not the next, and must confirm there.
            migration = self._current(message.epoch, message)
            if sender not in migration.members or message.home not in migration.arrivals.homes:
                raise ProtocolError(
                    f"{self}: {message} from worker {sender} does not fit the state of the rescale"
                )
            migration.arrivals.on_fenced(self, message.home, message.chunk)
            return
        if sender not in self.peers:
            raise ProtocolError(f"{self}: {message} from worker {sender}, which is not a peer")
        if self.left:
            if isinstance(message, m.Bar1 | m.Bar2 | m.Frontier | m.Emission | m.Leave):
                return  # from a peer that has not heard yet that this worker left
            raise ProtocolError(f"{self}: {type(message).__name__} from {sender} after leaving")
        if self.barrier.blocks(sender):
            self.barrier.wait_behind(sender, message)
            return
        match message:
            case m.Data(epoch, batch):
                self._data(sender, epoch, batch)
            case m.Forward(epoch, batch):
                self._of_home(sender, epoch, message).arrivals.on_forward(self, sender, batch)
            case m.Acquire(epoch):
                self._of_home(sender, epoch, message).arrivals.on_acquire(self, sender, message)
            case m.Heard(epoch, frontier):
                if epoch != self.epoch + 1 or sender in self.heard:
                    raise ProtocolError(f"{self}: worker {sender} announced epoch {epoch}")
                self.heard[sender] = frontier
                self._try_collect()
            case m.Done(epoch):
                self._of_home(sender, epoch, message)
                self._on_done(sender)
            case m.Flush(epoch):
                self._current(epoch, message)
                self._on_flush(sender)
            case m.Flushed(epoch, origin):
                if origin not in self._of_home(sender, epoch, message).members:
                    raise ProtocolError(
                        f"{self}: {message} from worker {sender} names an origin that is no member"
                    )
                self._on_flushed(sender, origin)
            case m.Bar1(snapshot):
                self.barrier.arrive(sender, snapshot, last=False)
            case m.Bar2(snapshot):
                self.barrier.arrive(sender, snapshot, last=True)
            case m.Frontier(epoch, value):
                if epoch <= self.known_epoch:
                    self.frontiers.sender(sender, value)
                elif epoch == self.epoch + 1 and value >= self.early.get(sender, MIN):
                    self.early[sender] = value
                else:
                    raise ProtocolError(
                        f"{self}: {message} from worker {sender} does not fit the state of the rescale"
                    )
            case m.Relay(epoch, value):
                self._of_home(sender, epoch, message)
                self.frontiers.relay(sender, value)
            case m.Emission(epoch, value):
                if self.emissions is not None:
                    self.emissions.report(sender, epoch, value)
            case m.Fence():
                self._confirm(message)
            case m.Leave():
                self._on_leave(sender)

    # ------------------------------------------------------------ the sender

    def _route(self, batch: Batch) -> None:
        """Apply rule 1. A key has one home, so within a batch its records are all OLD or all NEW."""
        migration = self.migration
        if migration is None:
            self._dispatch(self.epoch, batch, self.placement)
        elif not migration.switched:
            self._dispatch(self.epoch, batch, migration.old)
        elif migration.all_switched:
            self._dispatch(migration.epoch, batch, migration.new)
        else:
            homes = migration.old.owners(batch.hashes)
            switched = np.zeros(len(batch), dtype=bool)
            for home in migration.switched:
                switched |= homes == home
            old, new = select(batch, ~switched), select(batch, switched)
            if old is not None:
                self._dispatch(self.epoch, old, migration.old)
            if new is not None:
                self._dispatch(migration.epoch, new, migration.new)

    def _dispatch(self, epoch: int, batch: Batch, placement: Placement) -> None:
        for to, part in split(batch, placement.owners(batch.hashes)):
            if to == self.worker:
                self._data(self.worker, epoch, part)
            else:
                self.send(to, m.Data(epoch, part))

    def _on_done(self, home: Worker) -> None:
        """Apply rule 6, or put it off while a snapshot is being aligned (rule 10)."""
        if home in self.migration_now().switched or home in self.deferred:
            raise ProtocolError(f"{self}: worker {home} said Done twice")
        if self.barrier.stopped:
            self.deferred.append(home)
        else:
            self._switch(home)

    def _switch(self, home: Worker) -> None:
        migration = self.migration_now()
        if home == self.worker:
            self._on_flush(self.worker)
        else:
            self.send(home, m.Flush(migration.epoch))
        migration.switched.add(home)

    # ------------------------------------------------------------ the home, and the new owner

    def _data(self, sender: Worker, epoch: int, batch: Batch) -> None:
        """Take records that `sender` routed itself: OLD or NEW; raise `ProtocolError` for any other epoch."""
        migration = self.migration
        if epoch == self.epoch:
            if migration is not None and sender in migration.flushes:
                raise ProtocolError(f"{self}: OLD records from worker {sender} after its Flush")
            self.phase.on_old(self, batch)
        elif migration is not None and epoch == migration.epoch:
            migration.arrivals.on_new(self, sender, batch)
        else:
            raise ProtocolError(f"{self}: records of epoch {epoch} from worker {sender}")

    def _rescale(self, epoch: int, placement: Placement) -> None:
        if self.migration is not None or epoch != self.epoch + 1 or self.left:
            raise ProtocolError(f"{self}: cannot begin a rescale to epoch {epoch} now")
        if self.barrier.snapshot is not None:
            raise ProtocolError(f"{self}: a rescale began while a snapshot was on its way")
        if not set(placement.workers) <= set(self.members):
            raise ProtocolError(f"{self}: {placement.workers} are not all members {self.members}")
        confirmations = self.downstream * len(self.members)
        arrivals = Arrivals(self.worker, self.placement, self.members, confirmations)
        self.migration = Migration(epoch, self.placement, placement, self.members, arrivals)
        self.relayed = MIN
        self.broadcast(arrivals.homes, m.Heard(epoch, self.frontiers.announced))
        self.emit(m.Started(epoch))
        if self.worker in placement.workers:
            self.frontiers.begin(self.migration.arrivals.homes)
        early, self.early = self.early, {}
        for sender, value in early.items():
            self.frontiers.sender(sender, value)
        if self.worker not in self.placement.workers:
            self.enter_phase("rescale, and I own none")
        else:
            self.enter_phase("rescale, and I own keys")
            self.emit(m.Interrogate())

    def _try_collect(self) -> None:
        """Go from interrogate to collect once the operators have answered and all peers have heard."""
        phase = self.phase
        if (
            isinstance(phase, Interrogate)
            and self.heard.keys() >= set(self.peers)
            and (order := phase.whitelist()) is not None
        ):
            reached = max([self.frontiers.announced, *self.heard.values()])
            self.enter_phase("operators answered, all have heard", order, reached)
            self.raise_fence(
                0, tuple(w for w in self.migration_now().new.workers if w != self.worker)
            )
            self._try_done()

    def _try_done(self) -> None:
        """Apply rule 5: with no key left, send `Done` to all."""
        if self._collecting().finished:
            self.broadcast(self.peers, m.Done(self.migration_now().epoch))
            self.enter_phase("no key left, Done is sent")
            self._on_done(self.worker)

    def _on_flush(self, sender: Worker) -> None:
        """Apply rule 7: announce to the new owners that `sender` is flushed."""
        migration = self.migration_now()
        if sender in migration.flushes or not isinstance(self.phase, Settle):
            raise ProtocolError(f"{self}: a Flush from worker {sender} at a wrong time")
        migration.flushes.add(sender)
        for owner in migration.new.workers:
            if owner != self.worker:
                self.send(owner, m.Flushed(migration.epoch, sender))

    def _on_flushed(self, home: Worker, origin: Worker) -> None:
        migration = self.migration_now()
        migration.arrivals.on_flushed(self, home, origin)
        if migration.arrivals.finished(home):
            self.frontiers.finish(home)

    # ------------------------------------------------------------ joining and leaving

    def _join(self, workers: tuple[Worker, ...]) -> None:
        new = [worker for worker in workers if worker not in self.members]
        if new and (self.migration is not None or self.barrier.snapshot is not None):
            raise ProtocolError(f"{self}: workers {new} join during a rescale or a snapshot")
        self._set_members({*self.members, *new})
        for worker in new:
            self.frontiers.join(worker)
            if self.local > MIN:
                self.send(worker, m.Frontier(self.known_epoch, self.local))
            if self.emissions is not None:
                self.send(worker, m.Emission(self.epoch, self.emissions.of(self.worker)))

    def _on_leave(self, worker: Worker) -> None:
        owners = (self.placement if self.migration is None else self.migration.new).workers
        if worker in owners:
            raise ProtocolError(f"{self}: worker {worker} left while keys may go to it")
        self._set_members(set(self.members) - {worker})
        self.frontiers.leave(worker)
        self.emit(m.Left(worker))

    # ------------------------------------------------------------ after each event

    def _make_progress(self) -> None:
        """Take every step that the last event made possible."""
        self._relay()
        self._try_complete()
        self._align()
        self._advance()
        self._try_leave()

    def _relay(self) -> None:
        """Apply rule 11 as a home: announce to the new owners the frontier of what may still be forwarded."""
        migration = self.migration
        if migration is None or not isinstance(self.phase, Collect | Settle):
            return
        if not self.may_forward or self.phase.holding:
            return
        value = self.frontiers.lowest_sender(w for w in self.members if w not in migration.flushes)
        if isinstance(self.phase, Collect):
            value = min(value, LAST)
        if value > self.relayed:
            self.relayed = value
            owners = [w for w in migration.new.workers if w != self.worker]
            self.broadcast(owners, m.Relay(migration.epoch, value))

    def _try_complete(self) -> None:
        """Apply rule 9: complete the rescale when all its conditions hold."""
        migration = self.migration
        if migration is None or not isinstance(self.phase, Settle):
            return
        owner = self.worker in migration.new.workers
        settled = migration.arrivals.complete or not owner
        if migration.all_switched and not self.may_forward and settled:
            self.epoch, self.placement = migration.epoch, migration.new
            self.migration = None
            self.heard = {}
            self.frontiers.begin(())
            if self.emissions is not None:
                self.emissions.begin(self.epoch)
            self.enter_phase("switched, flushed, all settled")
            self.emit(m.Completed(self.epoch))

    def _align(self) -> None:
        """Apply rule 10: send the barriers that are due; take the snapshot once all have arrived."""
        barrier = self.barrier
        if not barrier.stopped or barrier.snapshot is None:
            return
        if self.may_forward and not barrier.sent_first:
            barrier.sent_first = True
            self.broadcast(self.peers, m.Bar1(barrier.snapshot))
        if not barrier.sent_last and self._forwarded_all():
            barrier.sent_last = True
            self.broadcast(self.peers, m.Bar2(barrier.snapshot))
        if barrier.sent_last and barrier.all_last(self.peers) and self._nothing_waits():
            self._take_snapshot(barrier)

    def _forwarded_all(self) -> bool:
        """Return whether all records sent before the cut have arrived here and have been forwarded."""
        if not self.may_forward:
            return True
        return self.barrier.all_first(self.peers) and not self.phase.holding

    def _nothing_waits(self) -> bool:
        return self.migration is None or self.migration.arrivals.empty

    def _take_snapshot(self, barrier: Barrier[m.UpstreamEvent, m.Message]) -> None:
        assert barrier.snapshot is not None
        self.emit(m.Snapshot(barrier.snapshot))
        self.barrier = Barrier(barrier.snapshot)
        deferred, self.deferred = self.deferred, []
        for home in deferred:
            self._switch(home)
        for sender in sorted(barrier.behind):
            for message in barrier.behind[sender]:
                self._receive(sender, message)
        for event in barrier.backlog:
            self._upstream(event)
        self._make_progress()

    def _advance(self) -> None:
        """Apply rule 11: announce the frontier to the operators."""
        if self.left:
            return
        migration = self.migration
        lowest_held = MAX if migration is None else migration.arrivals.lowest
        value = self.frontiers.advance(lowest_held, self._may_end())
        if self.emissions is not None:
            value = None if migration is not None else self._advance_emissions(self.emissions)
        if value is not None:
            self.emit(m.Advance(value))

    def _may_end(self) -> bool:
        """Return whether exactly the keys that are to end here are here."""
        return not isinstance(self.phase, Interrogate | Collect)

    def _advance_emissions(self, emissions: Emissions) -> int | None:
        if self.bound == MIN:
            return None  # the driver is about to give the operators' new bound
        earliest = min(self.frontiers.announced, self.bound)
        if emissions.changes(self.worker, earliest):
            emissions.report(self.worker, self.epoch, earliest)
            self.broadcast(self.peers, m.Emission(self.epoch, earliest))
        return emissions.advance(self.members)

    def _try_leave(self) -> None:
        """Leave the stage if this worker departs, has no keys, and its upstream has ended."""
        idle = self.migration is None and not self.barrier.stopped and self.local == MAX
        without_keys = idle and self.worker not in self.placement.workers
        if self.departing and without_keys and not self.left:
            self.broadcast(self.peers, m.Leave())
            self.left = True
            self.barrier = Barrier()  # later messages from peers do not matter to this worker
            time = self.frontiers if self.emissions is None else self.emissions
            if time.announced < MAX:
                time.announced = MAX
                self.emit(m.Advance(MAX))
            self.emit(m.Left(self.worker))
