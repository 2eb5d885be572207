"""Interrogate: the home finds out which of its keys have to move.

It asks the operators for every key with state. Until they answer, records keep coming and make new state, so
the home records the keys of those itself (rule 2). It also waits until every worker has heard of the rescale
(`Heard`, on the link, behind all that was sent before): nothing is forwarded before that, so a worker
never gets a record or state of a rescale it does not know, and no frontier that was told in ignorance of the
rescale can overtake a forwarded record (docs/design/rescale.md, "Heard").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from railgun.core.batch import Batch
from railgun.core.hashing import Hashes
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
        self.record(worker, batch.hashes)
        worker.process(batch)

    def answer(self, worker: Machine, hashes: Hashes) -> None:
        """Take the operators' answer."""
        self.answered = True
        self.record(worker, hashes)

    def record(self, worker: Machine, hashes: Hashes) -> None:
        """Rule 3: only keys that live here now and will not."""
        here = worker.migration_now().old.owners(hashes) == worker.worker
        leaving = worker.migration_now().new.owners(hashes) != worker.worker
        moving = hashes[here & leaving]
        if len(moving):
            self.recorded.append(moving)

    def whitelist(self) -> Hashes:
        """All keys to move, each once, in order of their hashes."""
        if not self.recorded:
            return np.empty(0, dtype=np.uint64)
        keys = np.sort(np.concatenate(self.recorded))  # np.unique would take forty times as long
        once: Hashes = keys[np.concatenate(([True], keys[1:] != keys[:-1]))]
        return once
