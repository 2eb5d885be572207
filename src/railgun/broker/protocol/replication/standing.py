"""How a copy of a stream stands, and up to where two copies are the same.

Rules:

1. A batch is written once, by the master of its epoch: two copies that have the same epoch at an offset are the same up
   to there. So the *runs* of a log (an epoch, and the offset where its batches end) tell all there is to compare.
2. What is not kept any more (before `first`) was safe, so who has all that is safe has had the same there. Another copy
   may have something else there, which nobody has seen: it is not enough that it is as long.
3. Of two copies the one with the higher label is the better one, and of equals the longer. `LOST` is no label: such a
   copy has had more than it has, so nobody may conclude anything from it.
4. A *unit* is a row of batches that are seen together or not at all. A copy may end within one. What is safe never ends
   within a unit, so a part of one at the end of a log may be cut off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from railgun.errors import ProtocolError

LOST: Final = -1
Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Epoch, and the offset after its last message; in order."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What there is of a copy, all of it on disk."""

    label: int
    first: int
    end: int
    runs: Runs = ()
    groups: tuple[int, int] = (0, 0)
    """Epoch and number of the last change."""

    @property
    def rank(self) -> tuple[int, int]:
        """The higher the better."""
        return self.label, self.end


@dataclass(slots=True)
class Copy:
    """What a node knows of its copy. `end` is what was given to the disk, `durable` what is there."""

    label: int = 0
    first: int = 0
    end: int = 0
    durable: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    groups: tuple[int, int] = (0, 0)
    safe: int = 0
    """The high watermark, as far as this copy goes."""
    whole: int = 0
    """Up to there the units on disk are whole; perhaps further, after a cut."""

    @staticmethod
    def of(standing: Standing, safe: int = 0, whole: int | None = None) -> Copy:
        """Return a copy as it was found on disk, with units that are whole up to `whole` (None: to the end)."""
        copy = Copy(standing.label, standing.first, standing.end, standing.end)
        copy.runs, copy.groups = list(standing.runs), standing.groups
        copy.whole = standing.end if whole is None else whole
        copy.safe = max(standing.first, min(safe, copy.whole))
        return copy

    def standing(self) -> Standing:
        """How it stands, when all that was given to the disk is there."""
        return Standing(self.label, self.first, self.end, tuple(self.runs), self.groups)

    def epoch_before(self, offset: int) -> int:
        """The epoch of the message before an offset; 0 if there is none, or it is not kept any more."""
        return 0 if offset <= self.first else epoch_at(self.runs, offset - 1)

    def append(self, base: int, runs: Runs) -> None:
        """More was given to the disk."""
        if base != self.end:
            raise ProtocolError(f"batches from {base} do not follow {self.end}")
        for epoch, end in runs:
            if self.runs and self.runs[-1][0] > epoch:
                raise ProtocolError(f"epoch {epoch} comes after {self.runs[-1][0]}")
            if self.runs and self.runs[-1][0] == epoch:
                self.runs.pop()
            self.runs.append((epoch, end))
            self.end = end

    def wrote(self, end: int, whole: int | None) -> None:
        """Note that batches up to `end` are on disk; the last whole unit in them ends at `whole` (None: there)."""
        self.durable = max(self.durable, min(end, self.end))
        self.whole = max(self.whole, min(self.durable, end if whole is None else whole))

    def cut(self, offset: int) -> None:
        """Forget what lies from there on."""
        if offset < self.safe:
            raise ProtocolError(f"a copy is to be cut at {offset}, and {self.safe} is safe")
        self.runs = list(clipped(self.runs, offset, self.first))
        self.end = offset
        self.durable = min(self.durable, offset)
        if offset < self.whole:  # it may be within a unit: the driver tells when it is done
            self.whole = self.safe

    def anew(self, base: int) -> None:
        """Nothing is left; the next one is `base`."""
        if base < self.safe:
            raise ProtocolError(f"a copy is to begin anew at {base}, and {self.safe} is safe")
        self.runs, self.first, self.end, self.durable = [], base, base, base
        self.safe = self.whole = base

    def trim(self, first: int) -> None:
        """What lies before is gone."""
        self.first = max(self.first, min(first, self.end))
        self.safe = max(self.safe, self.first)
        self.whole = max(self.whole, self.first)
        self.runs = [(epoch, end) for epoch, end in self.runs if end > self.first]


def epoch_at(runs: Iterable[tuple[int, int]], offset: int) -> int:
    """The epoch of a message; 0 if there is none.

    >>> epoch_at(((1, 5), (3, 9)), 4), epoch_at(((1, 5), (3, 9)), 5), epoch_at(((1, 5),), 5)
    (1, 3, 0)
    """
    return next((epoch for epoch, end in runs if offset < end), 0)


def clipped(runs: Iterable[tuple[int, int]], to: int, begin: int = 0) -> Runs:
    """The runs of what lies from `begin` on and before `to`.

    >>> clipped(((1, 5), (3, 9)), 7), clipped(((1, 5), (3, 9)), 5), clipped(((1, 5), (3, 9)), 9, 5)
    (((1, 5), (3, 7)), ((1, 5),), ((3, 9),))
    """
    found, start = [], begin
    for epoch, end in runs:
        if end > start and start < to:
            found.append((epoch, min(end, to)))
            start = end
    return tuple(found)


def agree(one: Standing, other: Standing) -> int:
    """Up to where a copy is the same as `one`, which has all that was ever safe; for certain.

    If that is before the first message of `one`, nobody can tell any more: the other begins anew there.

    >>> a = Standing(3, 0, 9, ((1, 5), (3, 9)))
    >>> agree(a, Standing(2, 0, 8, ((1, 5), (2, 8)))), agree(a, Standing(1, 0, 3, ((1, 3),)))
    (5, 3)
    >>> agree(a, Standing(0, 4, 4)), agree(a, Standing(0, 20, 20))
    (4, 9)
    >>> agree(Standing(3, 4, 9, ((3, 9),)), Standing(1, 0, 6, ((1, 6),)))  # its first 4 may be anything
    0
    """
    theirs = dict(other.runs)
    common = max((min(end, theirs[e]) for e, end in one.runs if e in theirs), default=0)
    # What the other does not keep any more was safe, so `one` has it, or had it.
    return max(common, min(other.first, one.end))
