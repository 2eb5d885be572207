"""Parts of a group's state: members, timers, proposed dead letters, and rounding of times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from railgun.broker.protocol.groups.messages import Flight, Member, Rule, Standing
from railgun.broker.protocol.groups.ranges import Ranges

UNBOUNDED: Final = 1 << 62  # greater than every offset and every time
MIN_TIMER_LIMIT: Final = 1024  # with at most so many timers, stale ones are not cleaned up
ROUNDING_PARTS: Final = 64
"""Times are rounded up to a multiple of this fraction of `ack_wait` or `max_age`, so that messages share them."""


@dataclass(slots=True)
class Party:
    """One member of a group: its credit, and the messages it has in flight."""

    name: Member
    credit: int = 0
    turn: int = 0  # the group's turn in which this member was served last
    flights: Ranges[Flight] = field(default_factory=Ranges)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By the time of each of its timers: the offsets that the timer covers."""

    @property
    def free(self) -> int:
        """Return how many more messages the member may have in flight."""
        return self.credit - self.flights.total


class Timer(NamedTuple):
    """A time at which to examine delayed messages, or those of a member (its `spans` tell which)."""

    at: int
    first: int
    end: int
    member: Member = ""  # "": the timer is for delayed messages


class Proposal(NamedTuple):
    """A proposed dead letter: the rule that gave the message up, and the message's standing before that."""

    standing: Standing
    rule: Rule


def rounded_up(at: int, span: int) -> int:
    """Return a time from `at` on, at most a `ROUNDING_PARTS`-th of `span` later."""
    grain = max(1, span // ROUNDING_PARTS)
    return -(-at // grain) * grain


def earlier(first: int | None, second: int | None) -> int | None:
    """Return the earlier of two times. None means "no time": `first`, if `second` is None; None, if `first` is None."""
    return first if first is None or second is None else min(first, second)
