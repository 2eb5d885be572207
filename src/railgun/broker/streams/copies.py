"""What a stream asks of whoever keeps its copies on other nodes, and how much safety a publisher can ask for.

On a single node there are no others: what is on its disk is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from railgun.broker.log.committer import Stamp
from railgun.errors import RailgunError

Done = Callable[[RailgunError | None], None]


class Acks(Enum):
    """When a publish is answered."""

    QUORUM = 0  # when a majority of the replicas has it on disk
    MASTER = 1  # when the master has: a failover may lose it
    ALL = 2  # when all replicas have
    NONE = 3  # at once


class Copies(Protocol):
    """The copies of one stream, seen from the node that has one of them."""

    @property
    def leads(self) -> bool:
        """Whether this node is the master, and knows all that was ever acknowledged."""
        ...

    @property
    def acting(self) -> bool:
        """Whether it leads, and has the lease to do so now."""
        ...

    @property
    def safe(self) -> int:
        """Messages below this offset may be seen."""
        ...

    def publish(
        self, batches: Sequence[bytearray], acks: Acks, done: Done, safe: Done | None
    ) -> None:
        """Store these; `done` is called when they are as safe as was asked for. Raises what hinders it.

        `safe` is called when a majority has them, whatever was asked for: in the order of the log.
        """
        ...

    async def write_unit(self, write: Callable[[Stamp], tuple[int, int]]) -> tuple[int, int]:
        """Let a function append a unit to the log, in the turn of its writer; where it begins and ends, on disk."""
        ...

    def when_safe(self, end: int, done: Done) -> None:
        """Call this when all before that offset is safe."""
        ...

    def when_gone(self, first: int, done: Done) -> None:
        """Call this when a majority keeps nothing before that offset any more."""
        ...

    def keep(self, changes: Sequence[tuple[str, bytes | None]], done: Done) -> None:
        """Store changes of groups; `done` is called when they are safe."""
        ...

    def news(self) -> bytes | None:
        """Return the note for the group log, if more is safe than the last note says; None: nothing is to be written.

        So a node that is started again without the others shows readers what was safe.
        """
        ...

    def trimmed(self, first: int) -> None:
        """What lies before is not kept any more."""
        ...
