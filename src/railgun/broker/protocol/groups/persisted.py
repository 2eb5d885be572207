"""What of a group survives a restart: where it stands, not who its members were.

1. `Saved` is what `Group.save` tells, and equally what comes of applying all `Change`s since the beginning, in order,
   to an empty one. A log of a group that has grown is written anew as `Saved.changes()`.
2. Everything that is neither done nor open is as new: never delivered.
3. What was in flight is saved as delivered: when the node is gone, so are its members, and the delivery counts. It is
   saved as no failure, because it will have ended with the node (`Standing.spared`).
4. Changes are ranges, and each says how things stand now, not what happened: applied twice they do no harm, and what
   was delivered and acked since the last time is told once, as done.
5. A change that is lost with the tail of a log makes the group deliver again; never does it skip.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from railgun.broker.protocol.groups.messages import FRESH, Standing
from railgun.broker.protocol.groups.ranges import Ranges


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


@dataclass(frozen=True, slots=True)
class Kind:
    """Whether the group is exclusive or shared, since its first consumer came."""

    exclusive: bool


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing is delivered before `until`: a nack asked to block the group for `delay` µs. (0, 0): it is over."""

    until: int
    delay: int


@dataclass(frozen=True, slots=True)
class Redriven:
    """These were redriven `number` times, the last time when `highest` was the highest acked offset.

    `again`: just now, so they are to be delivered again, as new. A `number` of 0: they were never redriven, or the
    stream does not have them any more.
    """

    first: int
    end: int
    number: int
    highest: int
    again: bool = False


Change: TypeAlias = Sought | Stands | Settled | Unsettled | Untold | Cut | Kind | Paused | Redriven


class Mark(NamedTuple):
    """What is known of messages that were redriven, whatever became of them since."""

    number: int  # how often they were redriven
    highest: int  # the highest acked offset at that time: the distance counts from there


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
    exclusive: bool | None = None  # None: not known, in a log that was written before it was kept
    pause: tuple[int, int] = (0, 0)  # until when nothing is delivered, and for how long
    redriven: Ranges[Mark] = field(default_factory=Ranges)

    def apply(self, change: Change) -> None:
        """What a log tells, one after the other."""
        match change:
            case Sought(offset, epoch):
                self.floor, self.epoch, self.highest = offset, epoch, -1
                self.pause = (0, 0)
                self.done.clear()
                self.open.clear()
                self.redriven = sought_marks(self.redriven)
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
            case Kind(exclusive):
                self.exclusive = exclusive
            case Paused(until, delay):
                self.pause = (until, delay)
            case Redriven(first, end, number, highest, again):
                self.redriven.remove(first, end)
                if number:
                    self.redriven.set(first, end, Mark(number, highest))
                if again:
                    self.open.remove(first, end)
                    self.floor = unsettle(self.done, self.floor, first, end)

    def changes(self) -> list[Change]:
        """What makes an empty one equal to this."""
        told: list[Change] = [Sought(self.floor, self.epoch), Stands(self.epoch, self.highest)]
        if self.exclusive is not None:
            told.append(Kind(self.exclusive))
        if self.pause != (0, 0):
            told.append(Paused(*self.pause))
        told += marks(self.redriven)
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
            self.exclusive,
            self.pause,
            self.redriven.copy(),
        )

    @property
    def end(self) -> int:
        """One past the highest offset anything is known of."""
        return max(self.floor, self.done.end or 0, self.open.end or 0, self.highest + 1)

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
        self.redriven.remove(end, max(top, self.redriven.end or 0))
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


def unsettle(done: Ranges[None], floor: int, first: int, end: int) -> int:
    """Take [first, end) out of what is done, below `floor` and above it; return the floor after it.

    >>> done = Ranges([(8, 9, None)])
    >>> unsettle(done, 6, 2, 4), list(done)
    (2, [(4, 6, None), (8, 9, None)])
    """
    done.remove(first, end)
    if first >= floor:
        return floor
    if end < floor:
        done.set(end, floor, None)
    return first


def marks(redriven: Ranges[Mark]) -> list[Change]:
    """Return the changes that tell which messages were redriven, to a log that knows of none."""
    return [Redriven(first, end, *mark) for first, end, mark in redriven]


def sought_marks(redriven: Ranges[Mark]) -> Ranges[Mark]:
    """Return what is known of redriven messages after a seek: nothing counts as acked."""
    return Ranges((first, end, Mark(mark.number, -1)) for first, end, mark in redriven)
