"""Commands, errors and settings of a consumer group.

A driver calls the methods of `Group`. They return the commands below, or raise one of the errors below before anything
has changed. Duties of a driver (the node):

1. The name of a member belongs to one connection: it is never used again for another connection.
2. After every event: call `tick` if the deadline has passed, then `take`, then `letters`. `take` and `letters` both
   apply the dead-letter rules before anything else, so a message that a rule gives up is never delivered again.
3. Append what `changes` returns to the log of the group, in that order. Confirm an ack to its sender, and send a
   message of an exclusive group, only when the changes up to it are written.
4. Append a letter to the dead letters first; then call `buried`, or `kept` if that failed.
5. Report `Missed` to the consumers, and write it where operators look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias

from railgun.errors import RailgunError

Member: TypeAlias = str
Rule = Literal["dead_deliveries", "dead_distance", "dead_age"]
"""The dead-letter rules, by a stream's settings; in `GroupConfig`: `max_deliveries`, `distance` and `max_age`."""
Why = Literal["start", "tracked", "sought"]
RedriveOutcome = Literal["redriven", "already", "busy", "gone"]
DAY: Final = 24 * 60 * 60 * 1_000_000  # µs
LONGEST_DELAY: Final = 366 * DAY
"""The longest delay of a nack, and the longest `ack_wait`, in µs. Groups, nodes and clients enforce it."""
MAX_REASON_CHARS: Final = 256  # longer reasons are cut


# --- Errors ---------------------------------------------------------------------------------------


class DeliveryError(RailgunError):
    """A request that a group refuses. Nothing has changed; `code` is sent to the client."""

    code: ClassVar[str] = "BAD_REQUEST"


class NotMemberError(DeliveryError):
    """The caller is not, or no longer, a member of the group, and has to join first."""

    code = "NOT_MEMBER"


class MemberExistsError(DeliveryError):
    """The group already has a member of that name."""

    code = "MEMBER_EXISTS"


class GroupBusyError(DeliveryError):
    """Other members are live, and the request would take their messages from them: they have to leave first."""

    code = "GROUP_BUSY"


class GroupKindError(DeliveryError):
    """The group is exclusive and a shared one was asked for, or the reverse.

    The first consumer decides the kind, also for when the group is empty.
    """

    code = "GROUP_KIND"


class OffsetRangeError(DeliveryError):
    """An offset that the stream does not have."""

    code = "OFFSET_OUT_OF_RANGE"


class BadRangeError(DeliveryError):
    """A range without offsets, or a receipt for a delivery that cannot have been made."""

    code = "BAD_RANGE"


class BadDelayError(DeliveryError):
    """A delay that is negative or longer than `LONGEST_DELAY`, or a block without a delay."""

    code = "BAD_DELAY"


class BadCreditError(DeliveryError):
    """A negative credit."""

    code = "BAD_CREDIT"


class BadGroupConfigError(DeliveryError, ValueError):
    """An invalid configuration of a group."""

    code = "BAD_GROUP_CONFIG"


# --- Settings and receipts ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The settings of one group. Times in µs; None turns a rule off.

    `distance`, `max_deliveries` and `max_age` are the dead-letter rules (`dead_letters.py`); `max_age` counts from the
    first failed delivery to the group.

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
    """The messages that a member acks or nacks: part of one or more `Deliver` commands."""

    first: int
    end: int
    delivery: int
    epoch: int

    def check(self) -> None:
        """Raise `BadRangeError` if no `Deliver` can have contained this."""
        if not 0 <= self.first < self.end or self.delivery < 1 or self.epoch < 0:
            raise BadRangeError(f"{self} is not a part of anything that was delivered")


# --- Commands -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send these messages to a member. `delivery`: which counted delivery of each message this is, from 1."""

    member: Member
    first: int
    end: int
    delivery: int
    epoch: int

    @property
    def receipt(self) -> Receipt:
        """Return the receipt for all messages of this delivery."""
        return Receipt(self.first, self.end, self.delivery, self.epoch)


@dataclass(frozen=True, slots=True)
class Stale:
    """The member has no such messages in flight with that delivery number and epoch: nothing was done to them."""

    first: int
    end: int
    delivery: int
    epoch: int
    code: ClassVar[str] = "ACK_STALE"


@dataclass(frozen=True, slots=True)
class Missed:
    """The stream no longer has these messages, and the group had not finished with them."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """The member must forget these messages: they will be delivered again, in order, in a later epoch."""

    member: Member
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The member has joined. `offset`: the lowest offset that is not finished; `why`: how the group got there."""

    member: Member
    offset: int
    why: Why
    receives: bool  # False: the member stands by, in an exclusive group


@dataclass(frozen=True, slots=True)
class HandedOver:
    """This member of an exclusive group is the active one from now on."""

    member: Member
    epoch: int


@dataclass(frozen=True, slots=True)
class Bury:
    """Append this message to the dead letters, then call `buried`, or `kept` if that failed."""

    offset: int
    deliveries: int
    reason: str
    rule: Rule
    redrives: int = 0
    """How often the message was redriven before: with the offset, this identifies the letter."""


Command: TypeAlias = Stale | Missed | Recalled | Joined | HandedOver


# --- State of a message ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Standing:
    """The delivery state of unfinished messages that no member has."""

    count: int = 0  # counted deliveries
    reason: str = ""  # why the last delivery failed
    until: int = 0  # not delivered before this time
    delay: int = 0  # the delay that the nack requested
    since: int | None = None  # when the first failed delivery was made, if there is a `max_age`
    spared: int = 0  # counted deliveries that ended because the node did: they are not failures

    @property
    def failures(self) -> int:
        """Return how many counted deliveries failed: those that did not end because the node did."""
        return self.count - self.spared


@dataclass(frozen=True, slots=True)
class Flight:
    """The delivery state of messages in flight with a member."""

    delivery: int
    epoch: int
    expires: int | None  # when they are taken back; None without `ack_wait`
    reason: str  # why the delivery before failed
    since: int | None = None  # when the first failed delivery was made, or else this delivery
    spared: int = 0  # of the deliveries before this one: as in `Standing`

    @property
    def failures(self) -> int:
        """Return how many deliveries before this one failed."""
        return self.delivery - 1 - self.spared


FRESH: Final = Standing()
