"""Base class of the phases of a home: how a phase treats OLD records, and which phase follows which."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from railgun.engine.protocol.batch import Batch

if TYPE_CHECKING:
    from railgun.engine.protocol.rescale.machine import Machine

TRANSITIONS: Final[dict[tuple[str, str], str]] = {
    ("normal", "rescale, and I own keys"): "interrogate",
    ("normal", "rescale, and I own none"): "settle",
    ("interrogate", "operators answered, all have heard"): "collect",
    ("collect", "no key left, Done is sent"): "settle",
    ("settle", "switched, flushed, all settled"): "normal",
}
"""(phase, event) → next phase. Any other pair is a ProtocolError; the docs draw this table."""


class Phase:
    """A phase of a worker as the home of its keys: it decides what happens to OLD records."""

    __slots__ = ()
    name: ClassVar[str]

    def on_old(self, worker: Machine, batch: Batch) -> None:
        """Handle records that reached this worker as the home of their keys."""
        raise NotImplementedError

    @property
    def holding(self) -> bool:
        """Return whether any keys are between two owners right now."""
        return False

    def validate(self, worker: Machine) -> None:
        """Check the invariants of this phase."""
