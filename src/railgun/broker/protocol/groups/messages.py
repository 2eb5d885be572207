"""The vocabulary of delivery: what a group is told, what it answers, and how it refuses.

A group is told things by the methods of `Group`; they answer with the commands below, or raise one of the errors
below before anything has changed. Duties of a driver (the node):

1. The name of a member is one connection's: it is never used again for another one.
2. After every event: `tick` if the deadline has passed, then `take`, then `letters`. `take` and `letters` both
   apply the dead-letter rules before anything else, so a message that a rule gives up is never delivered again.
3. What `changes` tells goes to the log of the group in that order. An ack is confirmed to its sender, and a message
   of an exclusive group goes out, when the changes up to it are written.
4. A letter is appended to the dead letters first; then `buried`, or `kept` if that failed.
5. `Missed` is told to whoever consumes, and written where operators look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

from railgun.errors import RailgunError

Member: TypeAlias = str
Rule = Literal["dead_deliveries", "dead_distance", "dead_age"]
"""The dead-letter rules, as the settings of a stream call them: here `max_deliveries`, `distance` and `max_age`."""
Why = Literal["start", "tracked", "sought"]
Redrove = Literal["redriven", "already", "busy", "gone"]
DAY: Final = 24 * 60 * 60 * 1_000_000  # µs
LONGEST_DELAY: Final = 366 * DAY
"""The longest delay of a nack, and the longest `ack_wait` (µs): groups, nodes and clients go by it."""
LONGEST_REASON: Final = 256  # characters; what is beyond is cut


# --- How it refuses -------------------------------------------------------------------------------


class DeliveryError(RailgunError):
    """A request that a group refuses. `code` is what a client is told; nothing has changed."""

    code: ClassVar[str] = "BAD_REQUEST"


class NotMemberError(DeliveryError):
    """Who asks is not a member of the group, or no more: it has to join."""

    code = "NOT_MEMBER"


class MemberExistsError(DeliveryError):
    """A member of that name is there already."""

    code = "MEMBER_EXISTS"


class GroupBusyError(DeliveryError):
    """A seek while others are live would take their messages away from them: they have to leave first."""

    code = "GROUP_BUSY"


class GroupKindError(DeliveryError):
    """A group is exclusive or shared from its first consumer on, also while it is empty."""

    code = "GROUP_KIND"


class OffsetRangeError(DeliveryError):
    """An offset that the stream does not have."""

    code = "OFFSET_OUT_OF_RANGE"


class BadRangeError(DeliveryError):
    """A range without offsets, or a delivery that cannot have been."""

    code = "BAD_RANGE"


class BadDelayError(DeliveryError):
    """A delay that is negative or longer than `LONGEST_DELAY`, or a block without a delay."""

    code = "BAD_DELAY"


class BadCreditError(DeliveryError):
    """A negative credit."""

    code = "BAD_CREDIT"


class BadGroupConfigError(DeliveryError, ValueError):
    """A configuration of a group that cannot be."""

    code = "BAD_GROUP_CONFIG"


# --- What it is told ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """How one group is served. Times in µs; None: without that rule.

    `distance`, `max_deliveries` and `max_age` are the dead-letter rules (`letters.py`); `max_age` counts from the
    first delivery to the group that failed.

    >>> GroupConfig(max_deliveries=0)
    Traceback (most recent call last):
        ...
    railgun.broker.protocol.groups.messages.BadGroupConfigError: max_deliveries is 0, and must be at least 1
    """

    exclusive: bool = False
    ack_wait: int | None = None
    distance: int | None = None
    max_deliveries: int | None = None
    max_age: int | None = None

    def __post_init__(self) -> None:
        least = {"ack_wait": 1, "distance": 0, "max_deliveries": 1, "max_age": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise BadGroupConfigError(f"{name} is {value}, and must be at least {lowest}")


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a member speaks of when it acks or nacks: some of what one or more `Deliver` gave it."""

    first: int
    end: int
    delivery: int
    epoch: int

    def check(self) -> None:
        """Refuse what no `Deliver` can have said."""
        if not 0 <= self.first < self.end or self.delivery < 1 or self.epoch < 0:
            raise BadRangeError(f"{self} is not a part of anything that was delivered")


# --- What it answers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send these messages to a member. Each is delivered for the `delivery`-th time, as far as counted."""

    member: Member
    first: int
    end: int
    delivery: int
    epoch: int

    @property
    def receipt(self) -> Receipt:
        """What acks all of it."""
        return Receipt(self.first, self.end, self.delivery, self.epoch)


@dataclass(frozen=True, slots=True)
class Stale:
    """These are not in flight with the member by that delivery number and epoch: nothing was done with them."""

    first: int
    end: int
    delivery: int
    epoch: int
    code: ClassVar[str] = "ACK_STALE"


@dataclass(frozen=True, slots=True)
class Missed:
    """The stream does not have these any more, and the group had not finished with them."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """A member is to forget these: they will come again, in order, in a later epoch."""

    member: Member
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A member is in. `offset` is the lowest the group has not finished with, and `why` it is there."""

    member: Member
    offset: int
    why: Why
    receives: bool  # False: it stands by, in an exclusive group


@dataclass(frozen=True, slots=True)
class HandedOver:
    """This member is the one that receives from now on, in an exclusive group."""

    member: Member
    epoch: int


@dataclass(frozen=True, slots=True)
class Bury:
    """Append this message to the dead letters, and say `buried` or `kept`."""

    offset: int
    deliveries: int
    reason: str
    rule: Rule
    redrives: int = (
        0  # how often it was redriven before: with the offset, this tells its letters apart
    )


Command: TypeAlias = Stale | Missed | Recalled | Joined | HandedOver


# --- What is known of a message -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of messages that are not finished with, whoever has them."""

    count: int = 0  # counted deliveries
    reason: str = ""  # why the last one came to nothing
    until: int = 0  # not delivered before
    delay: int = 0  # as it was asked for
    since: int | None = (
        None  # when the first delivery that failed was made, noted if the group has `max_age`
    )
    spared: int = 0  # counted deliveries that ended because the node did: they are no failures

    @property
    def failures(self) -> int:
        """How many deliveries came to nothing, and not because the node ended."""
        return self.count - self.spared


@dataclass(frozen=True, slots=True)
class Flight:
    """What is known of messages that a member has."""

    delivery: int
    epoch: int
    expires: int | None  # when they are taken back, if ack_wait is on
    reason: str  # of the delivery before
    since: int | None = None  # when the first delivery was made that failed, or this one
    spared: int = 0  # of the deliveries before: as in `Standing`

    @property
    def failures(self) -> int:
        """How many deliveries before this one failed."""
        return self.delivery - 1 - self.spared


FRESH: Final = Standing()
