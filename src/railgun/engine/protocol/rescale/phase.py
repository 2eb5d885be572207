"""What the phases of a home have in common: how they treat OLD records, and which phase follows which."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from railgun.engine.protocol.batch import Batch

if TYPE_CHECKING:
    from railgun.engine.protocol.rescale.machine import Machine

TRANSITIONS: Final[dict[tuple[str, str], str]] = {
    ("normal", "rescale, and I own keys"): "interrogate",
    ("normal", "rescale, and I own none"): "settle",
    ("interrogate", "operators answered, all have heard"): "collect",
    ("collect", "no key left, Done is told"): "settle",
    ("settle", "switched, flushed, all settled"): "normal",
}
"""(phase, what happened) → next phase. Anything else is a ProtocolError; docs draw this table."""


class Phase:
    """A phase of a worker as the home of its keys: it decides what becomes of OLD records."""

    __slots__ = ()
    name: ClassVar[str]

    def on_old(self, worker: Machine, batch: Batch) -> None:
        """Treat records that came to this worker as the home of their keys."""
        raise NotImplementedError

    @property
    def holding(self) -> bool:
        """Whether some keys are between two owners just now."""
        return False

    def validate(self, worker: Machine) -> None:
        """Check what must always hold in this phase."""
