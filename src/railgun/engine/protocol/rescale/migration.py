"""One rescale under way, from the view of one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from railgun.engine.protocol.placement import Placement, Worker
from railgun.engine.protocol.rescale.arrivals import Arrivals
from railgun.engine.protocol.rescale.messages import Acquire
from railgun.hashing import Hashes

if TYPE_CHECKING:
    from railgun.engine.protocol.rescale.machine import Machine


class Migration:
    """A migration from placement `old` (F) to `new` (F′): what this worker has done and heard so far."""

    __slots__ = ("arrivals", "epoch", "flushes", "members", "new", "old", "switched")

    def __init__(
        self,
        epoch: int,
        old: Placement,
        new: Placement,
        members: tuple[Worker, ...],
        arrivals: Arrivals,
    ) -> None:
        self.epoch = epoch
        self.old = old
        self.new = new
        # Those that were part of the stage when it began; a member may leave early.
        self.members = members
        self.arrivals = arrivals
        self.switched: set[Worker] = set()  # as a sender: homes this worker no longer sends to
        self.flushes: set[Worker] = set()  # as a home: senders that no longer send to this worker

    def leaving(self, worker: Worker, hashes: Hashes) -> NDArray[np.bool_]:
        """Return which of these keys leave `worker`: they live there now and will not (rule 3)."""
        owned = self.old.owners(hashes) == worker
        leaving: NDArray[np.bool_] = owned & (self.new.owners(hashes) != worker)
        return leaving

    def any_leaves(self, worker: Worker) -> bool:
        """Return whether any key at all can leave `worker`."""
        slots = (self.old.table() == worker) & (self.new.table() != worker)
        pinned = np.array([key for key, _ in (*self.old.keys, *self.new.keys)], dtype=np.uint64)
        return bool(slots.any()) or bool(self.leaving(worker, pinned).any())

    @property
    def all_switched(self) -> bool:
        """Return whether this worker, as a sender, has switched for every home."""
        return len(self.switched) == len(self.old.workers)

    @property
    def all_flushed(self) -> bool:
        """Return whether every sender has flushed this worker as a home."""
        return len(self.flushes) == len(self.members)

    def validate(self, worker: Machine) -> None:
        """Check the invariants."""
        assert self.epoch == worker.epoch + 1
        assert self.switched <= set(self.old.workers)
        assert self.flushes <= set(self.members)
        self.arrivals.validate()
        for line in self.arrivals.lines.values():
            for entry in line.entries:
                hashes = entry.hashes if isinstance(entry, Acquire) else entry.batch.hashes
                assert bool((self.new.owners(hashes) == worker.worker).all())
