"""The state of a group that survives a restart: the position of the group, but not its members.

1. `Saved` is the result of `Group.save`, and equally of applying all `Change`s since the beginning, in order, to an
   empty `Saved`. A log of a group that has grown is rewritten as `Saved.changes()`.
2. Every message that is neither done nor open is new: never delivered.
3. A message in flight is saved as delivered: when the node is gone, so are its members, and the delivery counts. It is
   not saved as a failure, because it will have ended with the node (`Standing.spared`).
4. Changes are ranges, and each states the new state, not the event: applying one twice does no harm, and a message that
   was delivered and acked since the last call is reported once, as done.
5. A change that is lost with the tail of a log makes the group deliver again; it never makes it skip.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from railgun.broker.protocol.groups.messages import FRESH, Standing
from railgun.broker.protocol.groups.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Sought:
    """The group starts anew at this offset: every message below is done, no message above has been delivered."""

    offset: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Stands:
    """The epoch of the group, and the highest offset acked since the group began (-1: none)."""

    epoch: int
    highest: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The group has finished with these messages: acked, buried or missed."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The group has not finished with these messages; `standing` is their delivery state."""

    first: int
    end: int
    standing: Standing


@dataclass(frozen=True, slots=True)
class Unreported:
    """All ranges that were missed while the group had no member to report to; replaces any earlier list."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The stream ends here, before the group's position: the state of messages beyond is void."""

    end: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Whether the group is exclusive or shared; decided by its first consumer."""

    exclusive: bool


@dataclass(frozen=True, slots=True)
class Paused:
    """Nothing is delivered before `until`, because a nack blocks the group for `delay` µs. (0, 0): no block."""

    until: int
    delay: int


@dataclass(frozen=True, slots=True)
class Redriven:
    """These messages were redriven `number` times, the last time when `highest` was the highest acked offset.

    `again`: redriven just now, so they are to be delivered again, as new. `number` 0: they were never redriven, or the
    stream no longer has them.
    """

    first: int
    end: int
    number: int
    highest: int
    again: bool = False


Change: TypeAlias = (
    Sought | Stands | Settled | Unsettled | Unreported | Cut | Kind | Paused | Redriven
)


class Mark(NamedTuple):
    """How often messages were redriven, and when. Kept whatever became of the messages since."""

    number: int  # how often the messages were redriven
    highest: int  # the highest acked offset at the last redrive: the distance counts from it


@dataclass(slots=True)
class Saved:
    """The position of a group, and the state of its unfinished messages.

    >>> saved = Saved()
    >>> for change in (Sought(10, 1), Settled(12, 20), Unsettled(10, 12, Standing(2)), Settled(10, 11)):
    ...     saved.apply(change)
    >>> saved.floor, list(saved.done), [piece[:2] for piece in saved.open]
    (11, [(12, 20, None)], [(11, 12)])
    """

    floor: int = 0  # every message below is done
    done: Ranges[None] = field(default_factory=Ranges)  # above the floor
    open: Ranges[Standing] = field(default_factory=Ranges)  # counted, delayed or both
    epoch: int = 0
    highest: int = -1  # the highest offset acked since the group began
    unreported: Ranges[None] = field(default_factory=Ranges)
    exclusive: bool | None = None  # None: unknown, in a log written before this was recorded
    pause: tuple[int, int] = (0, 0)  # the end of a block and its length: see `Paused`
    redriven: Ranges[Mark] = field(default_factory=Ranges)

    def apply(self, change: Change) -> None:
        """Apply the next change of a log."""
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
            case Unreported(ranges):
                self.unreported = Ranges((first, end, None) for first, end in ranges)
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
        """Return the changes that make an empty `Saved` equal to this one."""
        changes: list[Change] = [Sought(self.floor, self.epoch), Stands(self.epoch, self.highest)]
        if self.exclusive is not None:
            changes.append(Kind(self.exclusive))
        if self.pause != (0, 0):
            changes.append(Paused(*self.pause))
        changes += marks(self.redriven)
        changes += [Settled(first, end) for first, end, _ in self.done]
        changes += [Unsettled(first, end, standing) for first, end, standing in self.open]
        if self.unreported:
            changes.append(Unreported(tuple((first, end) for first, end, _ in self.unreported)))
        return changes

    def copy(self) -> Saved:
        """Return an independent copy."""
        return Saved(
            self.floor,
            self.done.copy(),
            self.open.copy(),
            self.epoch,
            self.highest,
            self.unreported.copy(),
            self.exclusive,
            self.pause,
            self.redriven.copy(),
        )

    @property
    def end(self) -> int:
        """Return one past the highest offset with any saved state."""
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
    """Add [first, end) to the finished messages above `floor`; return the new floor.

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
    """Remove [first, end) from the finished messages, below `floor` and above it; return the new floor.

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
    """Return the changes that restore `redriven` in a log that holds none."""
    return [Redriven(first, end, *mark) for first, end, mark in redriven]


def sought_marks(redriven: Ranges[Mark]) -> Ranges[Mark]:
    """Return `redriven` as it is after a seek: no message counts as acked."""
    return Ranges((first, end, Mark(mark.number, -1)) for first, end, mark in redriven)
