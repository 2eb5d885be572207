"""Phase "settle": the home has given all keys away (Done) and waits until the last OLD record has passed through it.

A worker that owned no keys before the rescale begins in this phase.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from railgun.engine.protocol.batch import Batch, select
from railgun.engine.protocol.rescale.collect import forward
from railgun.engine.protocol.rescale.phase import Phase

if TYPE_CHECKING:
    from railgun.engine.protocol.rescale.machine import Machine


class Settle(Phase):
    """Rule 2, "Collect" with whitelist and hold empty: forward records of moving keys, process the rest."""

    __slots__ = ()
    name = "settle"

    def on_old(self, worker: Machine, batch: Batch) -> None:
        """Forward records of keys that move, process the others."""
        moving = worker.migration_now().new.owners(batch.hashes) != worker.worker
        staying = select(batch, ~moving)
        if staying is not None:
            worker.process(staying)
        forwarded = select(batch, moving)
        if forwarded is not None:
            forward(worker, forwarded)
