"""What `Collect` sinks brought to the program; when the flow goes back, what came after the snapshot is taken away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from railgun.core.placement import Worker

FOR_GOOD: Final = -1


@dataclass(slots=True)
class Collected:
    """Items of each step, in pieces: each with the last snapshot that its worker had cut when it brought them.

    >>> collected = Collected()
    >>> collected.add(0, "out", ["a"]); collected.mark(0, "out", 7); collected.add(0, "out", ["b"])
    >>> collected.items("out")
    ['a', 'b']
    >>> collected.go_back(7); collected.items("out")
    ['a']
    """

    _pieces: dict[str, list[tuple[int, list[Any]]]] = field(default_factory=dict)
    _marks: dict[tuple[Worker, str], int] = field(default_factory=dict)

    def add(self, worker: Worker, step: str, items: Sequence[Any]) -> None:
        """A worker brings items."""
        pieces = self._pieces.setdefault(step, [])
        mark = self._marks.get((worker, step), FOR_GOOD)
        if pieces and pieces[-1][0] == mark:
            pieces[-1][1].extend(items)
        else:
            pieces.append((mark, list(items)))

    def mark(self, worker: Worker, step: str, snapshot: int) -> None:
        """What this worker brings from now on is not part of this snapshot."""
        self._marks[worker, step] = snapshot

    def go_back(self, snapshot: int | None) -> None:
        """Keep only what is part of a snapshot; None: nothing."""
        self._marks.clear()
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
