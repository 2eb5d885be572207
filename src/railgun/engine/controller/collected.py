"""Hold the items that `Collect` sinks send to the program. When the flow goes back to a snapshot, later items are
discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from railgun.engine.protocol.placement import Worker

COMMITTED: Final = -1  # in place of a snapshot's number: the items are part of every snapshot
Origin = tuple[Worker, int]  # worker and stage: a snapshot cuts each stage at its own time


@dataclass(slots=True)
class Collected:
    """The items of each step in chunks, each with the last snapshot that its worker had cut when it sent them.

    >>> collected = Collected()
    >>> origin = 3, 1  # worker, stage
    >>> collected.add(origin, "out", ["a"])
    >>> collected.mark(origin, "out", 7)
    >>> collected.add(origin, "out", ["b"])
    >>> collected.items("out")
    ['a', 'b']
    >>> collected.go_back(7); collected.items("out")
    ['a']
    """

    _chunks: dict[str, list[tuple[int, list[Any]]]] = field(default_factory=dict)
    _marks: dict[tuple[Origin, str], int] = field(default_factory=dict)
    _since: dict[Worker, int] = field(default_factory=dict)
    _base: int = COMMITTED

    def add(self, origin: Origin, step: str, items: Sequence[Any]) -> None:
        """Add items that a stage on a worker has sent."""
        chunks = self._chunks.setdefault(step, [])
        mark = self._marks.get((origin, step), self._since.get(origin[0], self._base))
        if chunks and chunks[-1][0] == mark:
            chunks[-1][1].extend(items)
        else:
            chunks.append((mark, list(items)))

    def mark(self, origin: Origin, step: str, snapshot: int) -> None:
        """Note that items which a stage sends from now on are not part of this snapshot."""
        self._marks[origin, step] = snapshot

    def join(self, worker: Worker, snapshot: int) -> None:
        """Note that a worker has joined after this snapshot, so none of its items are part of it."""
        self._since[worker] = max(snapshot, self._base)
        for key in [key for key in self._marks if key[0][0] == worker]:
            del self._marks[key]

    def go_back(self, snapshot: int | None) -> None:
        """Keep only the items that are part of `snapshot` (None: no items). Later items are not part of it."""
        self._marks.clear()
        self._since.clear()
        self._base = COMMITTED if snapshot is None else snapshot
        for step, chunks in self._chunks.items():
            kept = [
                item
                for mark, items in chunks
                if snapshot is not None and mark < snapshot
                for item in items
            ]
            self._chunks[step] = [(COMMITTED, kept)]

    def items(self, step: str) -> list[Any]:
        """Return the items of a step."""
        return [item for _, items in self._chunks.get(step, ()) for item in items]
