"""One rescale under way, as one worker sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from railgun.core.placement import Placement, Worker
from railgun.core.rescale.arrivals import Arrivals
from railgun.core.rescale.messages import Acquire

if TYPE_CHECKING:
    from railgun.core.rescale.machine import Machine


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
