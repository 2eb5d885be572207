"""Interrogate: the home finds out which of its keys have to move.

It asks the operators for every key with state. Until they answer, records keep coming and make new state, so
the home records the keys of those itself (rule 2). It also waits until every worker has heard of the rescale
(`Heard`, on the link, behind all that was sent before): nothing is forwarded before that, so a worker
never gets a record or state of a rescale it does not know, and no frontier that was told in ignorance of the
rescale can overtake a forwarded record (docs/design/rescale.md, "Heard").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from railgun.core.batch import Batch
from railgun.core.hashing import Hashes
from railgun.core.rescale.order import Order
from railgun.core.rescale.phase import Phase

if TYPE_CHECKING:
    from railgun.core.rescale.machine import Machine


class Interrogate(Phase):
    """Rule 2, "Interrogate": record the key in the whitelist, process."""

    __slots__ = ("answered", "recorded")
    name = "interrogate"

    def __init__(self) -> None:
        self.recorded: list[Hashes] = []
        self.answered = False

    def on_old(self, worker: Machine, batch: Batch) -> None:
        """Record the keys that have to move, and process."""
        moving = self.moving(worker, batch.hashes)
        if len(moving):
            self.recorded.append(moving)
        worker.process(batch)

    def answer(self, worker: Machine, hashes: Hashes) -> None:
        """Take the operators' answer: it comes before what was recorded, most of which it names as well."""
        self.answered = True
        self.recorded.insert(0, self.moving(worker, hashes))

    def moving(self, worker: Machine, hashes: Hashes) -> Hashes:
        """Rule 3: only keys that live here now and will not."""
        here = worker.migration_now().old.owners(hashes) == worker.worker
        leaving = worker.migration_now().new.owners(hashes) != worker.worker
        moving: Hashes = hashes[here & leaving]
        return moving

    def whitelist(self) -> Order:
        """All keys to move, in the order in which they leave: as the operators named them, then the others."""
        return Order.of(self.recorded)
