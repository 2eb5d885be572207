"""Collect: the home gives its keys away, chunk by chunk.

Keys leave in the order in which the operators named them (`order.py`). So one array with two marks is the whole
bookkeeping, and asking for a batch of a thousand records where their keys are is one binary search for their turns:

    order:  | given away     | hold          | whitelist            |
            0              low            high               len(order)

Whitelist: the state is here, process. Hold: the state is being collected, buffer. Anything else that has to
move (given away, or never had state): forward to the new owner.

Before its state is taken a key is brought to its own time at home: what any sender may still send here. A worker
that joined may not have told a frontier yet, while a new owner had come far before; so it is at least what any
worker had reached when it heard of the rescale (`reached`). That a record for the key may be older is
impossible: every sender's records from before were ahead of its Heard. If a new owner had ended by then,
the keys end here; otherwise they end at their new owners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from railgun.engine.protocol.batch import Batch, select, split
from railgun.engine.protocol.frontier import LAST
from railgun.engine.protocol.rescale.messages import Acquire, Drop, Forward
from railgun.engine.protocol.rescale.messages import Collect as CollectState
from railgun.engine.protocol.rescale.order import Order
from railgun.engine.protocol.rescale.phase import Phase
from railgun.errors import ProtocolError
from railgun.hashing import Hashes

if TYPE_CHECKING:
    from railgun.engine.protocol.rescale.machine import Machine


class Collect(Phase):
    """Rule 2, "Collect", and rule 4, moving keys."""

    __slots__ = ("buffer", "chunk", "high", "low", "order", "parts", "reached")
    name = "collect"

    def __init__(self, order: Order, reached: int) -> None:
        self.order = order
        self.reached = reached
        self.low = 0
        self.high = 0
        self.chunk = 0
        self.parts: tuple[tuple[int, Hashes], ...] = ()
        self.buffer: list[Batch] = []

    @property
    def holding(self) -> bool:
        """Whether a chunk is being collected."""
        return self.high > self.low

    @property
    def finished(self) -> bool:
        """Whether all keys have been given away."""
        return self.low == len(self.order)

    def on_old(self, worker: Machine, batch: Batch) -> None:
        """Process, buffer or forward, key by key."""
        moving = worker.migration_now().new.owners(batch.hashes) != worker.worker
        if not moving.any():
            worker.process(batch)
            return
        known, held = np.zeros_like(moving), np.zeros_like(moving)
        known[moving], held[moving] = self.whereabouts(batch.hashes[moving])
        mine = select(batch, known | ~moving)
        if mine is not None:
            worker.process(mine)
        waiting = select(batch, held)
        if waiting is not None:
            self.buffer.append(waiting)
        gone = select(batch, moving & ~known & ~held)
        if gone is not None:
            forward(worker, gone)

    def whereabouts(self, hashes: Hashes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which of these keys are in the whitelist, and which in hold."""
        turns = self.order.find(hashes)
        return turns >= self.high, (turns >= self.low) & (turns < self.high)

    def move(self, worker: Machine, keys: int) -> None:
        """Rule 4, first half: put a chunk on hold and ask the operators for its state."""
        self.high = min(self.low + keys, len(self.order))
        self.chunk += 1
        chunk = self.order.hashes[self.low : self.high]
        owners = worker.migration_now().new.owners(chunk)
        rows = [(to, np.flatnonzero(owners == to)) for to in sorted(set(owners.tolist()))]
        self.parts = tuple((to, chunk[some]) for to, some in rows)
        now = min(LAST, worker.frontiers.lowest_sender(worker.members))
        frontier = max(now, self.reached)
        turns = tuple(self.low + some for _, some in rows)
        worker.emit(CollectState(self.parts, frontier, turns))

    def collected(self, worker: Machine, states: tuple[Any, ...]) -> None:
        """Rule 4, second half: Acquire, then what was buffered as FWD, then Drop."""
        if not self.holding or len(states) != len(self.parts):
            raise ProtocolError(
                f"{worker}: state of {len(states)} parts was collected, {len(self.parts)} were asked for"
            )
        epoch = worker.migration_now().epoch
        for (to, hashes), state in zip(self.parts, states, strict=True):
            worker.send(to, Acquire(epoch, self.chunk, hashes, state))
        buffered, self.buffer = self.buffer, []
        owners = tuple(to for to, _ in self.parts)
        dropped = self.order.hashes[self.low : self.high]
        self.low, self.parts = self.high, ()
        for batch in buffered:
            forward(worker, batch)
        worker.emit(Drop(dropped))
        worker.raise_fence(self.chunk, owners)

    def validate(self, worker: Machine) -> None:
        """Marks in order, each key once and all of them moving; only keys on hold are buffered."""
        assert 0 <= self.low <= self.high <= len(self.order)
        self.order.validate()
        migration = worker.migration_now()
        assert bool((migration.old.owners(self.order.hashes) == worker.worker).all())
        assert bool((migration.new.owners(self.order.hashes) != worker.worker).all())
        for batch in self.buffer:
            assert bool(self.whereabouts(batch.hashes)[1].all()), "only keys on hold are buffered"
        assert self.holding == bool(self.parts)


def forward(worker: Machine, batch: Batch) -> None:
    """Send records on to the new owners of their keys, as FWD."""
    migration = worker.migration_now()
    for to, part in split(batch, migration.new.owners(batch.hashes)):
        worker.send(to, Forward(migration.epoch, part))
