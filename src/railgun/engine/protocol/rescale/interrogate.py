"""Phase "interrogate": the home finds out which of its keys have to move.

The home asks the operators for every key with state. Until they answer, records keep coming and create state, so the
home records their keys itself (rule 2). It also waits until every worker has heard of the rescale (`Heard`, on the
link, after all earlier messages) and forwards nothing before that. So a worker never gets a record or state of a
rescale it does not know, and no frontier announced without knowing of the rescale can overtake a forwarded record
(docs/design/rescale.md, "Heard").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from railgun.engine.protocol.batch import Batch
from railgun.engine.protocol.rescale.order import Order
from railgun.engine.protocol.rescale.phase import Phase
from railgun.hashing import Hashes

if TYPE_CHECKING:
    from railgun.engine.protocol.rescale.machine import Machine


class Interrogate(Phase):
    """Rule 2, "Interrogate": add the key to the whitelist, and process."""

    __slots__ = ("named", "recorded")
    name = "interrogate"

    def __init__(self) -> None:
        self.recorded: list[Hashes] = []
        self.named: Order | None = None  # the operators' answer

    def on_old(self, worker: Machine, batch: Batch) -> None:
        """Record the keys that have to move, and process all records."""
        leaving = batch.hashes[worker.migration_now().leaving(worker.worker, batch.hashes)]
        if len(leaving):
            self.recorded.append(leaving)
        worker.process(batch)

    def answer(self, named: Order) -> None:
        """Store the operators' answer. Its keys leave first; it names most of the recorded keys as well."""
        self.named = named

    def whitelist(self) -> Order | None:
        """Return all keys to move in the order of leaving: named keys, then recorded ones; None before the answer."""
        return None if self.named is None else self.named.then(self.recorded)

    def validate(self, worker: Machine) -> None:
        """Check that only leaving keys are named."""
        if self.named is not None:
            self.named.validate()
            leaving = worker.migration_now().leaving(worker.worker, self.named.hashes)
            assert bool(leaving.all()), "only keys that leave are named"
