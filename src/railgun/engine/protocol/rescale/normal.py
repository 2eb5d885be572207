"""Phase "normal": no rescale is known; a home processes every record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from railgun.engine.protocol.batch import Batch
from railgun.engine.protocol.rescale.phase import Phase

if TYPE_CHECKING:
    from railgun.engine.protocol.rescale.machine import Machine


class Normal(Phase):
    """Rule 2, "not migrating": process."""

    __slots__ = ()
    name = "normal"

    def on_old(self, worker: Machine, batch: Batch) -> None:
        """Process all records."""
        worker.process(batch)
