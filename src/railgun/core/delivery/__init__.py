"""Delivery: one group of one persistent stream, as a pure machine.

`Group` is the machine and has the rules; `messages` is its vocabulary and has the duties of a driver; `Saved` and the
changes beside it are what survives a restart.
"""

from railgun.core.delivery.explain import Explanation
from railgun.core.delivery.group import Group
from railgun.core.delivery.messages import (
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
    HandedOver,
    Joined,
    Member,
    MemberExistsError,
    Missed,
    NotMemberError,
    OffsetRangeError,
    Recalled,
    Receipt,
    Stale,
    Standing,
)
from railgun.core.delivery.saved import (
    Change,
    Cut,
    Saved,
    Settled,
    Sought,
    Stands,
    Unsettled,
    Untold,
)

__all__ = [
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
    "HandedOver",
    "Joined",
    "Member",
    "MemberExistsError",
    "Missed",
    "NotMemberError",
    "OffsetRangeError",
    "Recalled",
    "Receipt",
    "Saved",
    "Settled",
    "Sought",
    "Stale",
    "Standing",
    "Stands",
    "Unsettled",
    "Untold",
]
