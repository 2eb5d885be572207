"""One rescale under way, as one worker sees it."""

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
    """From placement `old` (F) to `new` (F′): what this worker has done and heard so far."""

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
        self.members = (
            members  # those who were part of the stage when it began; one may leave early
        )
        self.arrivals = arrivals
        self.switched: set[Worker] = set()  # as a sender: homes it no longer sends to
        self.flushes: set[Worker] = set()  # as a home: senders that no longer send to it

    def leaving(self, worker: Worker, hashes: Hashes) -> NDArray[np.bool_]:
        """Rule 3: which of these keys live at this worker now, and will not."""
        here = self.old.owners(hashes) == worker
        leaving: NDArray[np.bool_] = here & (self.new.owners(hashes) != worker)
        return leaving

    def any_leaves(self, worker: Worker) -> bool:
        """Whether any key at all can leave this worker."""
        slots = (self.old.table() == worker) & (self.new.table() != worker)
        pinned = np.array([key for key, _ in (*self.old.keys, *self.new.keys)], dtype=np.uint64)
        return bool(slots.any()) or bool(self.leaving(worker, pinned).any())

    @property
    def all_switched(self) -> bool:
        """Whether, as a sender, it sends to no home any more."""
        return len(self.switched) == len(self.old.workers)

    @property
    def all_flushed(self) -> bool:
        """Whether, as a home, it gets nothing from any sender any more."""
        return len(self.flushes) == len(self.members)

    def validate(self, worker: Machine) -> None:
        """Check what must always hold."""
        assert self.epoch == worker.epoch + 1
        assert self.switched <= set(self.old.workers)
        assert self.flushes <= set(self.members)
        self.arrivals.validate()
        for line in self.arrivals.lines.values():
            for entry in line.entries:
                hashes = entry.hashes if isinstance(entry, Acquire) else entry.batch.hashes
                assert bool((self.new.owners(hashes) == worker.worker).all())
