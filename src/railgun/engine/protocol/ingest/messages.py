"""Define the messages that the table and the registry send: to a connector, to the controller, to a worker.

A stream has a name. Its messages have ids: whole, rising numbers from 0 on; `NONE` stands before all of them. The
*point of reference* (por) is the id of the last message that is in a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from railgun.engine.protocol.frontier import MIN
from railgun.engine.protocol.placement import Worker
from railgun.errors import RailgunError

NONE: Final = -1
LAST_ID: Final = (1 << 63) - 1

Owner: TypeAlias = tuple[Worker, int]
"""A worker's process: the worker and its incarnation."""


class Reason(Enum):
    """Whether a stream is granted, and if not, why."""

    OK = 0
    BUSY_RETRY = 1
    REDIRECT = 2
    ROLLING_BACK = 3


class SessionError(RailgunError):
    """A connector's mistake that ends its session; `code` is one word for programs."""

    def __init__(self, code: str, text: str, stream: str = "", id: int = NONE) -> None:
        super().__init__(text)
        self.code, self.stream, self.id = code, stream, id


# ---------------------------------------------------------------- a worker, to connectors


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a notify: send after `por`, or the reason why not."""

    session: int
    stream: str
    reason: Reason
    por: int = NONE

    @property
    def granted(self) -> bool:
        """Return whether the stream may be sent."""
        return self.reason is Reason.OK


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """These messages, and all earlier ones of their streams, are in a committed snapshot."""

    session: int
    points: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Restart:
    """Connect to another worker: this one is to leave."""

    session: int


# ---------------------------------------------------------------- a worker, to the controller


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask for a stream that a connector wants to send here."""

    stream: str
    session: int


@dataclass(frozen=True, slots=True)
class Relinquish:
    """This worker gives the stream back; its next owner goes on after `por`.

    The driver that keeps the times adds how far time has advanced in the stream (`reached`).
    """

    stream: str
    por: int
    reached: int = MIN


@dataclass(frozen=True, slots=True)
class Hasten:
    """Take the next snapshot soon: it frees a stream that is wanted elsewhere."""


# ---------------------------------------------------------------- the controller, to a worker


@dataclass(frozen=True, slots=True)
class Grant:
    """Give a worker the stream, for this session; the stream goes on after `por`."""

    to: Owner
    stream: str
    session: int
    por: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse a worker the stream: another worker has it."""

    to: Owner
    stream: str
    session: int


@dataclass(frozen=True, slots=True)
class Want:
    """Tell the owner of a stream that another worker wants it."""

    to: Owner
    stream: str


FromTable: TypeAlias = Answer | Acknowledge | Restart | Ask | Relinquish | Hasten
FromRegistry: TypeAlias = Grant | Reject | Want | Hasten
