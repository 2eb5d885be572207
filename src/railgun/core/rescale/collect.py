"""Collect: the home gives its keys away, chunk by chunk.

Keys leave in the order of their hashes. So one sorted array with two marks is the whole bookkeeping, and asking
for a batch of a thousand records where their keys are is one binary search:

    keys:   | given away     | hold          | whitelist            |
            0              low            high                len(keys)

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

from railgun.core.batch import Batch, select, split
from railgun.core.errors import ProtocolError
from railgun.core.frontier import LAST
from railgun.core.hashing import Hashes
from railgun.core.rescale.messages import Acquire, Drop, Forward
from railgun.core.rescale.messages import Collect as CollectState
from railgun.core.rescale.phase import Phase

if TYPE_CHECKING:
    from railgun.core.rescale.machine import Machine


class Collect(Phase):
    """Rule 2, "Collect", and rule 4, moving keys."""

    __slots__ = ("buffer", "chunk", "high", "keys", "low", "parts", "reached")
    name = "collect"

    def __init__(self, keys: Hashes, reached: int) -> None:
        self.keys = keys
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
        return self.low == len(self.keys)

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
        if len(self.keys) == 0:
            nowhere = np.zeros(len(hashes), dtype=bool)
            return nowhere, nowhere
        at = np.searchsorted(self.keys, hashes)
        found = self.keys[np.minimum(at, len(self.keys) - 1)] == hashes
        return found & (at >= self.high), found & (at >= self.low) & (at < self.high)

    def move(self, worker: Machine, keys: int) -> None:
        """Rule 4, first half: put a chunk on hold and ask the operators for its state."""
        self.high = min(self.low + keys, len(self.keys))
        self.chunk += 1
        chunk = self.keys[self.low : self.high]
        owners = worker.migration_now().new.owners(chunk)
        self.parts = tuple((to, chunk[owners == to]) for to in sorted(set(owners.tolist())))
        now = min(LAST, worker.frontiers.lowest_sender(worker.members))
        frontier = max(now, self.reached)
        worker.emit(CollectState(self.parts, frontier))

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
        dropped = self.keys[self.low : self.high]
        self.low, self.parts = self.high, ()
        for batch in buffered:
            forward(worker, batch)
        worker.emit(Drop(dropped))
        worker.raise_fence(self.chunk, owners)

    def validate(self, worker: Machine) -> None:
        """Marks in order, keys sorted and all of them moving; only keys on hold are buffered."""
        assert 0 <= self.low <= self.high <= len(self.keys)
        assert bool((self.keys[1:] > self.keys[:-1]).all()), "whitelist sorted, each key once"
        migration = worker.migration_now()
        assert bool((migration.old.owners(self.keys) == worker.worker).all())
        assert bool((migration.new.owners(self.keys) != worker.worker).all())
        for batch in self.buffer:
            assert bool(self.whereabouts(batch.hashes)[1].all()), "only keys on hold are buffered"
        assert self.holding == bool(self.parts)


def forward(worker: Machine, batch: Batch) -> None:
    """Send records on to the new owners of their keys, as FWD."""
    migration = worker.migration_now()
    for to, part in split(batch, migration.new.owners(batch.hashes)):
        worker.send(to, Forward(migration.epoch, part))
