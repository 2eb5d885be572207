"""What of a group survives a restart: where it stands, not who its members were.

1. `Saved` is what `Group.save` tells, and equally what comes of applying all `Change`s since the beginning, in order,
   to an empty one. A log of a group that has grown is written anew as `Saved.changes()`.
2. Everything that is neither done nor open is as new: never delivered.
3. What was in flight is saved as delivered: when the node is gone, so are its members, and the delivery counts.
4. Changes are ranges, and each says how things stand now, not what happened: applied twice they do no harm, and what
   was delivered and acked since the last time is told once, as done.
5. A change that is lost with the tail of a log makes the group deliver again; never does it skip.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from railgun.core.delivery.messages import FRESH, Standing
from railgun.core.delivery.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Sought:
    """The group begins here, anew: everything below is done, nothing above has been delivered."""

    offset: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Stands:
    """The epoch of the group, and the highest offset acked since it began (-1: none)."""

    epoch: int
    highest: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The group has finished with these: acked, buried or missed."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The group has not finished with these, and so they stand."""

    first: int
    end: int
    standing: Standing


@dataclass(frozen=True, slots=True)
class Untold:
    """These were missed while nobody was there to be told; all of them, whatever was told before."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The stream ends here, although the group was further: what it knew of those beyond is void."""

    end: int


Change: TypeAlias = Sought | Stands | Settled | Unsettled | Untold | Cut


@dataclass(slots=True)
class Saved:
    """Where a group stands.

    >>> saved = Saved()
    >>> for change in (Sought(10, 1), Settled(12, 20), Unsettled(10, 12, Standing(2)), Settled(10, 11)):
    ...     saved.apply(change)
    >>> saved.floor, list(saved.done), [piece[:2] for piece in saved.open]
    (11, [(12, 20, None)], [(11, 12)])
    """

    floor: int = 0  # everything below is done
    done: Ranges[None] = field(default_factory=Ranges)  # above the floor
    open: Ranges[Standing] = field(default_factory=Ranges)  # counted, delayed or both
    epoch: int = 0
    highest: int = -1  # acked, since the group began
    untold: Ranges[None] = field(default_factory=Ranges)

    def apply(self, change: Change) -> None:
        """What a log tells, one after the other."""
        match change:
            case Sought(offset, epoch):
                self.floor, self.epoch, self.highest = offset, epoch, -1
                self.done.clear()
                self.open.clear()
            case Stands(epoch, highest):
                self.epoch, self.highest = epoch, highest
            case Settled(first, end):
                self._settle(first, end)
            case Unsettled(first, end, standing):
                if first < self.floor:
                    first = self.floor
                if first < end:
                    self.done.remove(first, end)
                    self.open.remove(first, end)
                    if standing != FRESH:
                        self.open.set(first, end, standing)
            case Untold(ranges):
                self.untold = Ranges((first, end, None) for first, end in ranges)
            case Cut(end):
                self._cut(end)

    def changes(self) -> list[Change]:
        """What makes an empty one equal to this."""
        told: list[Change] = [Sought(self.floor, self.epoch), Stands(self.epoch, self.highest)]
        told += [Settled(first, end) for first, end, _ in self.done]
        told += [Unsettled(first, end, standing) for first, end, standing in self.open]
        if self.untold:
            told.append(Untold(tuple((first, end) for first, end, _ in self.untold)))
        return told

    def copy(self) -> Saved:
        """Another one that is equal."""
        return Saved(
            self.floor,
            self.done.copy(),
            self.open.copy(),
            self.epoch,
            self.highest,
            self.untold.copy(),
        )

    @property
    def end(self) -> int:
        """One past the highest offset anything is known of."""
        return max(self.floor, self.done.end or 0, self.open.end or 0)

    def _settle(self, first: int, end: int) -> None:
        if end <= self.floor:
            return
        self.open.remove(first, end)
        self.floor = settle(self.done, self.floor, first, end)

    def _cut(self, end: int) -> None:
        top = max(self.end, end + 1)
        self.floor = min(self.floor, end)
        self.done.remove(end, top)
        self.open.remove(end, top)
        self.highest = min(self.highest, end - 1)


def settle(done: Ranges[None], floor: int, first: int, end: int) -> int:
    """Add [first, end) to what is done above `floor`; the floor after it.

    >>> done = Ranges([(5, 8, None)])
    >>> settle(done, 0, 9, 10), settle(done, 0, 0, 5), list(done)
    (0, 8, [(9, 10, None)])
    """
    if first > floor:
        done.set(first, end, None)
        return floor
    if end <= floor:
        return floor
    done.remove(floor, end)
    floor = end
    if done.first == floor:
        lowest = done.pop(1 << 62, 1 << 62)
        assert lowest is not None
        floor = lowest[1]
    return floor
