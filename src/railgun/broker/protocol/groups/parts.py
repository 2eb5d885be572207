"""The parts that the state of a group is made of: members, timers, proposals, and times that are shared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from railgun.broker.protocol.groups.messages import Flight, Member, Rule, Standing
from railgun.broker.protocol.groups.ranges import Ranges

FAR: Final = 1 << 62  # beyond every offset
FEW: Final = 1024  # timers that are not worth a look
GRAINS: Final = 64  # in one ack_wait, or one max_age


@dataclass(slots=True)
class Party:
    """One member: what it may have, and what it has."""

    name: Member
    credit: int = 0
    turn: int = 0  # when it was served last, in turns
    flights: Ranges[Flight] = field(default_factory=Ranges)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)  # what its timers are for

    @property
    def free(self) -> int:
        """How many more messages it may have."""
        return self.credit - self.flights.total


class Timer(NamedTuple):
    """When to look at some messages: delayed ones, or those of a member (which ones, its `spans` tell)."""

    at: int
    first: int
    end: int
    member: Member = ""  # "": delayed ones


class Proposal(NamedTuple):
    """The dead-letter rule that gave up a message, and how the message stood before."""

    standing: Standing
    rule: Rule


def rounded_up(at: int, span: int) -> int:
    """Return a time not before `at`, and at most a `GRAINS`-th of `span` later."""
    grain = max(1, span // GRAINS)
    return -(-at // grain) * grain


def earlier(one: int | None, other: int | None) -> int | None:
    """Return the earlier of two times; the first one if the other is None, and None if the first one is."""
    return one if one is None or other is None else min(one, other)
