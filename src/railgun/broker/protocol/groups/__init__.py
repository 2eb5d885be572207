"""Delivery of one persistent stream to one consumer group, as a pure state machine.

`Group` is the machine and states the rules. `messages` holds its commands, errors and settings, and the duties of a
driver. `Saved` and the changes in `persisted` are the state that survives a restart.

Terms:

- A message is *settled* when the group has finished with it: it was acked, buried or missed. The *floor* is the lowest
  offset that is not settled.
- A *letter* is a dead letter: a message that the group gives up. To *bury* it is to append it to the dead letters.
- A message is *missed* if the stream dropped it before the group had finished with it.
- A *flight* is the delivery state of messages that a member has, a *standing* that of unfinished messages that no
  member has.
"""

from railgun.broker.protocol.groups.explain import Explanation
from railgun.broker.protocol.groups.group import Group
from railgun.broker.protocol.groups.messages import (
    DAY,
    LONGEST_DELAY,
    BadCreditError,
    BadDelayError,
    BadGroupConfigError,
    BadRangeError,
    Bury,
    Command,
    Deliver,
    DeliveryError,
    GroupBusyError,
    GroupConfig,
    GroupKindError,
    HandedOver,
    Joined,
    Member,
    MemberExistsError,
    Missed,
    NotMemberError,
    OffsetRangeError,
    Recalled,
    Receipt,
    RedriveOutcome,
    Stale,
    Standing,
)
from railgun.broker.protocol.groups.persisted import (
    Change,
    Cut,
    Kind,
    Paused,
    Redriven,
    Saved,
    Settled,
    Sought,
    Stands,
    Unreported,
    Unsettled,
)

__all__ = [
    "DAY",
    "LONGEST_DELAY",
    "BadCreditError",
    "BadDelayError",
    "BadGroupConfigError",
    "BadRangeError",
    "Bury",
    "Change",
    "Command",
    "Cut",
    "Deliver",
    "DeliveryError",
    "Explanation",
    "Group",
    "GroupBusyError",
    "GroupConfig",
    "GroupKindError",
    "HandedOver",
    "Joined",
    "Kind",
    "Member",
    "MemberExistsError",
    "Missed",
    "NotMemberError",
    "OffsetRangeError",
    "Paused",
    "Recalled",
    "Receipt",
    "RedriveOutcome",
    "Redriven",
    "Saved",
    "Settled",
    "Sought",
    "Stale",
    "Standing",
    "Stands",
    "Unreported",
    "Unsettled",
]
