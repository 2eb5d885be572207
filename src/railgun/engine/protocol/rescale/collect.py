"""Phase "collect": the home gives its keys away, chunk by chunk.

Keys leave in the order in which the operators named them (`order.py`). So the phase needs only one array with two
marks, and one binary search for the turns of their keys tells where a thousand records belong:

    order:  | given away     | hold          | whitelist            |
            0              low            high               len(order)

Whitelist: the state is here, process. Hold: the state is being collected, buffer. Any other key that has to move
(given away, or never with state): forward to the new owner.

Before a key's state is taken, the key is advanced to its own time at home: the lowest frontier any sender may still
send at. A worker that joined may not have announced a frontier yet, while a new owner had advanced far before; so the
time is at least the highest frontier any worker had when it heard of the rescale (`reached`). No record for the key
can be older: every sender sent its earlier records before its Heard. If a new owner had ended by then, the keys end
here; otherwise they end at their new owners.
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
        """Return whether a chunk is being collected."""
        return self.high > self.low

    @property
    def finished(self) -> bool:
        """Return whether all keys have been given away."""
        return self.low == len(self.order)

    def on_old(self, worker: Machine, batch: Batch) -> None:
        """Process, buffer or forward each record, according to its key."""
        moving = worker.migration_now().new.owners(batch.hashes) != worker.worker
        if not moving.any():
            worker.process(batch)
            return
        listed, held = np.zeros_like(moving), np.zeros_like(moving)
        listed[moving], held[moving] = self.whitelisted_and_held(batch.hashes[moving])
        processed = select(batch, listed | ~moving)
        if processed is not None:
            worker.process(processed)
        waiting = select(batch, held)
        if waiting is not None:
            self.buffer.append(waiting)
        forwarded = select(batch, moving & ~listed & ~held)
        if forwarded is not None:
            forward(worker, forwarded)

    def whitelisted_and_held(self, hashes: Hashes) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return two masks: which of these keys are in the whitelist, and which are on hold."""
        turns = self.order.find(hashes)
        return turns >= self.high, (turns >= self.low) & (turns < self.high)

    def move(self, worker: Machine, keys: int) -> None:
        """Begin rule 4: put a chunk on hold and ask the operators for its state."""
        self.high = min(self.low + keys, len(self.order))
        self.chunk += 1
        chunk = self.order.hashes[self.low : self.high]
        owners = worker.migration_now().new.owners(chunk)
        rows = [(to, np.flatnonzero(owners == to)) for to in sorted(set(owners.tolist()))]
        self.parts = tuple((to, chunk[row_numbers]) for to, row_numbers in rows)
        now = min(LAST, worker.frontiers.lowest_sender(worker.members))
        frontier = max(now, self.reached)
        turns = tuple(self.low + row_numbers for _, row_numbers in rows)
        worker.emit(CollectState(self.parts, frontier, turns))

    def collected(self, worker: Machine, states: tuple[Any, ...]) -> None:
        """Finish rule 4: send Acquire, then the buffered records as FWD, then Drop.

        Raise `ProtocolError` if no chunk is on hold or the number of states is wrong.
        """
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
        """Check that marks are in order, each key is listed once and moves, and only keys on hold are buffered."""
        assert 0 <= self.low <= self.high <= len(self.order)
        self.order.validate()
        migration = worker.migration_now()
        assert bool((migration.old.owners(self.order.hashes) == worker.worker).all())
        assert bool((migration.new.owners(self.order.hashes) != worker.worker).all())
        for batch in self.buffer:
            assert bool(self.whitelisted_and_held(batch.hashes)[1].all()), (
                "only keys on hold are buffered"
            )
        assert self.holding == bool(self.parts)


def forward(worker: Machine, batch: Batch) -> None:
    """Send records to the new owners of their keys, as FWD."""
    migration = worker.migration_now()
    for to, part in split(batch, migration.new.owners(batch.hashes)):
        worker.send(to, Forward(migration.epoch, part))
