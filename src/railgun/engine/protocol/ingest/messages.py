"""What the machines of connectors say: to a connector, to the controller, to a worker.

A stream has a name. Its messages have ids, whole numbers from 0 on that go up; `NONE` stands before all of them. The
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
"""A worker's process: the worker, and its incarnation."""


class Reason(Enum):
    """Why a stream is not granted."""

    OK = 0
    BUSY_RETRY = 1
    REDIRECT = 2
    ROLLING_BACK = 3


class SessionError(RailgunError):
    """What a connector did that ends its session; `code` is one word for programs."""

    def __init__(self, code: str, text: str, stream: str = "", id: int = NONE) -> None:
        super().__init__(text)
        self.code, self.stream, self.id = code, stream, id


# ---------------------------------------------------------------- a worker, to connectors


@dataclass(frozen=True, slots=True)
class Answer:
    """To a notify: go on after `por`; or not, and why."""

    session: int
    stream: str
    reason: Reason
    por: int = NONE

    @property
    def granted(self) -> bool:
        """Whether the stream may be sent."""
        return self.reason is Reason.OK


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """These messages, and all before them, are in a committed snapshot."""

    session: int
    points: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Restart:
    """Connect to another worker: this one is to leave."""

    session: int


# ---------------------------------------------------------------- a worker, to the controller


@dataclass(frozen=True, slots=True)
class Ask:
    """A connector wants to send a stream here."""

    stream: str
    session: int


@dataclass(frozen=True, slots=True)
class Relinquish:
    """This worker has the stream no more; whoever has it next goes on after `por`.

    How far time has come in it (`reached`) is added by who keeps the times.
    """

    stream: str
    por: int
    reached: int = MIN


@dataclass(frozen=True, slots=True)
class Hasten:
    """A stream that is wanted elsewhere is free after the next snapshot: let it be soon."""


# ---------------------------------------------------------------- the controller, to a worker


@dataclass(frozen=True, slots=True)
class Grant:
    """The stream is yours, for this session; go on after `por`."""

    to: Owner
    stream: str
    session: int
    por: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Another worker has it."""

    to: Owner
    stream: str
    session: int


@dataclass(frozen=True, slots=True)
class Want:
    """A stream that is yours is wanted elsewhere."""

    to: Owner
    stream: str


FromTable: TypeAlias = Answer | Acknowledge | Restart | Ask | Relinquish | Hasten
FromRegistry: TypeAlias = Grant | Reject | Want | Hasten
