"""Interface between a stream and the part of a cluster that keeps its copies on other nodes; levels of acknowledgement.

A node without a cluster has no other copies: messages on its disk are safe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from railgun.broker.log.committer import Stamp
from railgun.errors import RailgunError

Done = Callable[[RailgunError | None], None]


class Acks(Enum):
    """When a publish is acknowledged."""

    QUORUM = 0  # when a majority of the replicas has it on disk
    MASTER = 1  # when the master has it on disk: a failover may lose it
    ALL = 2  # when all replicas have it on disk
    NONE = 3  # at once


class Copies(Protocol):
    """All copies of one stream, seen from a node that has one of them."""

    @property
    def leads(self) -> bool:
        """Return whether this node is the master, and has all messages that were ever acknowledged."""
        ...

    @property
    def acting(self) -> bool:
        """Return whether this node is the master, and holds the lease for that now."""
        ...

    @property
    def safe(self) -> int:
        """Return the end of the safe messages: those below this offset may be seen by readers."""
        ...

    def publish(
        self, batches: Sequence[bytearray], acks: Acks, done: Done, safe: Done | None
    ) -> None:
        """Store batches; `done` is called when they are as safe as `acks` says. Raise an error if that cannot begin.

        `safe` is called when a majority has the batches, whatever `acks` is, in the order of the log.
        """
        ...

    async def write_unit(self, write: Callable[[Stamp], tuple[int, int]]) -> tuple[int, int]:
        """Run a function that appends a unit to the log, in the turn of its writer; return its begin and end.

        The unit is on disk then.
        """
        ...

    def when_safe(self, end: int, done: Done) -> None:
        """Call `done` when all messages before the offset `end` are safe."""
        ...

    def when_gone(self, first: int, done: Done) -> None:
        """Call `done` when a majority of the copies keeps no message before the offset `first`."""
        ...

    def keep(self, changes: Sequence[tuple[str, bytes | None]], done: Done) -> None:
        """Store changes of groups; `done` is called when they are safe."""
        ...

    def news(self) -> bytes | None:
        """Return a note for the group log if more is safe than the last note says; else None.

        With that note, a node that is started again without the others shows readers what was safe.
        """
        ...

    def trimmed(self, first: int) -> None:
        """Tell the other copies that no message before the offset `first` is kept any more."""
        ...
