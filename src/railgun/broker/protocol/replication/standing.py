"""The state of a copy of a stream, and up to which offset two copies are equal.

Rules:

1. A batch is written once, by the master of its epoch: two copies that have the same epoch at an offset are equal up to
   there. So the *runs* of a log (an epoch, and the offset where its batches end) are all that has to be compared.
2. Messages that are no longer kept (before `first`) were safe, so a copy that has all safe messages has had the same
   ones there. Another copy may have different messages there, which no reader has seen: it is not enough that it is as
   long.
3. Of two copies the one with the higher label is better, and of equal labels the longer one. `LOST` is no label: such a
   copy has had more than it has now, so nothing may be concluded from it.
4. A *unit* is a sequence of batches that are seen together or not at all. A copy may end within a unit. The safe
   messages never end within a unit, so a part of one at the end of a log may be cut off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from railgun.errors import ProtocolError

LOST: Final = -1
Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of an epoch and the offset after its last message, in order."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a copy, all of it on disk."""

    label: int
    first: int
    end: int
    runs: Runs = ()
    groups: tuple[int, int] = (0, 0)
    """Epoch and number of the last change of groups."""

    @property
    def rank(self) -> tuple[int, int]:
        """Return the key by which copies are compared: the higher, the better."""
        return self.label, self.end


@dataclass(slots=True)
class Copy:
    """A node's view of its own copy. `end`: what was handed to the disk; `durable`: what is on disk."""

    label: int = 0
    first: int = 0
    end: int = 0
    durable: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    groups: tuple[int, int] = (0, 0)
    safe: int = 0
    """The high watermark, as far as this copy goes."""
    whole: int = 0
    """The units on disk are whole up to this offset; after a cut, perhaps further."""

    @staticmethod
    def of(standing: Standing, safe: int = 0, whole: int | None = None) -> Copy:
        """Return a copy as found on disk. `whole`: where its last whole unit ends; None: at the end of the log."""
        copy = Copy(standing.label, standing.first, standing.end, standing.end)
        copy.runs, copy.groups = list(standing.runs), standing.groups
        copy.whole = standing.end if whole is None else whole
        copy.safe = max(standing.first, min(safe, copy.whole))
        return copy

    def standing(self) -> Standing:
        """Return the state of the copy once everything handed to the disk is on disk."""
        return Standing(self.label, self.first, self.end, tuple(self.runs), self.groups)

    def epoch_before(self, offset: int) -> int:
        """Return the epoch of the message before `offset`; 0 if there is none, or if it is no longer kept."""
        return 0 if offset <= self.first else epoch_at(self.runs, offset - 1)

    def append(self, base: int, runs: Runs) -> None:
        """Add batches that were handed to the disk. Raises `ProtocolError` if they do not follow the end."""
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
        """Record that batches up to `end` are on disk; the last whole unit in them ends at `whole` (None: at `end`)."""
        self.durable = max(self.durable, min(end, self.end))
        self.whole = max(self.whole, min(self.durable, end if whole is None else whole))

    def cut(self, offset: int) -> None:
        """Remove everything from `offset` on. Raises `ProtocolError` if a safe message is among it."""
        if offset < self.safe:
            raise ProtocolError(
                f"a copy cannot be cut at {offset}: messages up to {self.safe} are safe"
            )
        self.runs = list(clipped(self.runs, offset, self.first))
        self.end = offset
        self.durable = min(self.durable, offset)
        if offset < self.whole:  # the cut may be within a unit; `has_cut` will tell where units end
            self.whole = self.safe

    def anew(self, base: int) -> None:
        """Remove all messages; the next one is `base`. Raises `ProtocolError` if a safe message is lost."""
        if base < self.safe:
            raise ProtocolError(
                f"a copy cannot begin anew at {base}: messages up to {self.safe} are safe"
            )
        self.runs, self.first, self.end, self.durable = [], base, base, base
        self.safe = self.whole = base

    def trim(self, first: int) -> None:
        """Remove messages before `first`, which are no longer kept."""
        self.first = max(self.first, min(first, self.end))
        self.safe = max(self.safe, self.first)
        self.whole = max(self.whole, self.first)
        self.runs = [(epoch, end) for epoch, end in self.runs if end > self.first]


def epoch_at(runs: Iterable[tuple[int, int]], offset: int) -> int:
    """Return the epoch of the message at `offset`; 0 if there is none.

    >>> epoch_at(((1, 5), (3, 9)), 4), epoch_at(((1, 5), (3, 9)), 5), epoch_at(((1, 5),), 5)
    (1, 3, 0)
    """
    return next((epoch for epoch, end in runs if offset < end), 0)


def clipped(runs: Iterable[tuple[int, int]], to: int, begin: int = 0) -> Runs:
    """Return the runs of the messages from `begin` on and before `to`.

    >>> clipped(((1, 5), (3, 9)), 7), clipped(((1, 5), (3, 9)), 5), clipped(((1, 5), (3, 9)), 9, 5)
    (((1, 5), (3, 7)), ((1, 5),), ((3, 9),))
    """
    result, start = [], begin
    for epoch, end in runs:
        if end > start and start < to:
            result.append((epoch, min(end, to)))
            start = end
    return tuple(result)


def agree(best: Standing, other: Standing) -> int:
    """Return the offset up to which copy `other` certainly equals copy `best`, which has everything ever safe.

    If that is before the first message of `best`, it cannot be known any more whether they are equal: `other` begins
    anew at that first message.

    >>> a = Standing(3, 0, 9, ((1, 5), (3, 9)))
    >>> agree(a, Standing(2, 0, 8, ((1, 5), (2, 8)))), agree(a, Standing(1, 0, 3, ((1, 3),)))
    (5, 3)
    >>> agree(a, Standing(0, 4, 4)), agree(a, Standing(0, 20, 20))
    (4, 9)
    >>> agree(Standing(3, 4, 9, ((3, 9),)), Standing(1, 0, 6, ((1, 6),)))  # its first 4 may differ
    0
    """
    theirs = dict(other.runs)
    common = max((min(end, theirs[e]) for e, end in best.runs if e in theirs), default=0)
    # The messages that `other` no longer keeps were safe, so `best` has them, or had them.
    return max(common, min(other.first, best.end))
