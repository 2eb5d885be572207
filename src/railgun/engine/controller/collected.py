"""What `Collect` sinks brought to the program; when the flow goes back, what came after the snapshot is taken away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from railgun.engine.protocol.placement import Worker

FOR_GOOD: Final = -1
Origin = tuple[
    Worker, int
]  # worker and stage: each stage has its own moment at which a snapshot cuts it


@dataclass(slots=True)
class Collected:
    """Items of each step, in pieces: each with the last snapshot that its worker had cut when it brought them.

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

    _pieces: dict[str, list[tuple[int, list[Any]]]] = field(default_factory=dict)
    _marks: dict[tuple[Origin, str], int] = field(default_factory=dict)
    _since: dict[Worker, int] = field(default_factory=dict)
    _base: int = FOR_GOOD

    def add(self, origin: Origin, step: str, items: Sequence[Any]) -> None:
        """Items come."""
        pieces = self._pieces.setdefault(step, [])
        mark = self._marks.get((origin, step), self._since.get(origin[0], self._base))
        if pieces and pieces[-1][0] == mark:
            pieces[-1][1].extend(items)
        else:
            pieces.append((mark, list(items)))

    def mark(self, origin: Origin, step: str, snapshot: int) -> None:
        """What comes from there from now on is not part of this snapshot."""
        self._marks[origin, step] = snapshot

    def join(self, worker: Worker, snapshot: int) -> None:
        """A worker joins after this snapshot: nothing it brings is part of it."""
        self._since[worker] = max(snapshot, self._base)
        for key in [key for key in self._marks if key[0][0] == worker]:
            del self._marks[key]

    def go_back(self, snapshot: int | None) -> None:
        """Keep only what is part of a snapshot; None: nothing. What comes from now on is not part of it."""
        self._marks.clear()
        self._since.clear()
        self._base = FOR_GOOD if snapshot is None else snapshot
        for step, pieces in self._pieces.items():
            kept = [
                item
                for mark, items in pieces
                if snapshot is not None and mark < snapshot
                for item in items
            ]
            self._pieces[step] = [(FOR_GOOD, kept)]

    def items(self, step: str) -> list[Any]:
        """What there is."""
        return [item for _, items in self._pieces.get(step, ()) for item in items]
