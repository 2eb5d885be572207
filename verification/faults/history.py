"""What clients record: the one thing a checker believes.

Rules:

1. A record is one fact as a client saw it, with times of a clock that never jumps, all of one process. An operation
   has the time before it was asked for and the time when its outcome was known.
2. A publish is `ok`, `failed` (for sure: nothing was stored), or `unknown`. Who is not sure says `unknown`: a checker
   that is told less finds less, one that is told wrong finds what is not there.
3. A delivery is written down before anything is said of it to the node.
4. Histories lie on disk as JSON, a record a line, in the order in which they were known. A last line that is cut off
   is passed over: who wrote it was killed.

>>> line = to_line(Publish("p1", "orders", "v1", begin=1.0, end=1.5, outcome="ok", offset=7))
>>> of_line(line).offset
7
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, ClassVar, Final, Literal

from railgun.errors import RailgunError

Outcome = Literal["ok", "failed", "unknown"]
Acks = Literal["none", "master", "quorum", "all"]
SURE: Final = frozenset(
    {
        "NO_MASTER",
        "NO_SPACE",
        "NOT_ENOUGH_REPLICAS",
        "NO_STREAM",
        "ID_POOL_FULL",
        "TOO_LARGE",
        "BAD_REQUEST",
        "LOG_DAMAGED",
    }
)
"""Codes that say: nothing was stored. Not of messages with IDs, which the client sends again by itself."""


class HistoryError(RailgunError):
    """A file that is no history."""


@dataclass(frozen=True, slots=True)
class Meta:
    """What kind of run it was. `transit`: so long something that was handed out may have been under way."""

    kind: ClassVar[str] = "meta"
    seed: int
    nodes: int
    seconds: float
    transit: float = 0.0
    text: str = ""
    patience_s: float = 0.0
    """After how many seconds a client gives a call up; 0: nobody has said."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done to the cluster; for people."""

    kind: ClassVar[str] = "fault"
    at: float
    what: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Blown:
    """A fault from its begin to its end, written when it is over.

    `begin` is before anything was done and `struck` when all of it was done; `end` is before anything was undone,
    and `settled` when the nodes had caught up, or were given up. `clients` had a connection to one of `nodes` at
    `begin`.
    """

    kind: ClassVar[str] = "blown"
    fault: str
    nodes: list[str]
    begin: float
    struck: float
    end: float
    settled: float
    clients: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CutOff:
    """What a node said that had been cut off from all others for long: to a reader, and to a publisher.

    `end` is how many messages of the stream it said to have, `read` whether a reader got one of them. `code` is what a
    publish was told ("": it was stored), after `publish_s` seconds.
    """

    kind: ClassVar[str] = "cut_off"
    node: str
    stream: str
    at: float
    end: int
    read: bool
    code: str
    publish_s: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Publish:
    """One message, from one client. `tries`: how often it was asked for, without an ID that makes that harmless."""

    kind: ClassVar[str] = "publish"
    client: str
    stream: str
    value: str
    begin: float
    end: float
    outcome: Outcome
    offset: int = -1
    id: str | None = None
    acks: Acks = "quorum"
    code: str = ""
    tries: int = 1

    @property
    def safe(self) -> bool:
        """Whether it was promised that it is kept."""
        return self.outcome == "ok" and self.acks in ("quorum", "all")


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message, to one consumer. Without a group `number` and `epoch` mean nothing.

    `at` is when the program took it; `arrived` when it came to the client, where it may have waited. Histories of
    earlier versions do not tell the latter.
    """

    kind: ClassVar[str] = "delivery"
    at: float
    stream: str
    subscription: str
    consumer: str
    offset: int
    value: str
    group: str = ""
    exclusive: bool = False
    number: int = 1
    epoch: int = 0
    arrived: float | None = None

    @property
    def came(self) -> float:
        """When it came to the client; when it was taken, if that is all that is known."""
        return self.at if self.arrived is None else self.arrived


@dataclass(frozen=True, slots=True)
class Acked:
    """A consumer said that it is done; `confirmed`: a flush told that this is on disk."""

    kind: ClassVar[str] = "acked"
    begin: float
    end: float
    stream: str
    group: str
    consumer: str
    offset: int
    number: int
    epoch: int
    confirmed: bool
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class Position:
    """How far a group was said to be: `floor` is the lowest offset that is not settled."""

    kind: ClassVar[str] = "position"
    begin: float
    end: float
    stream: str
    group: str
    floor: int
    stream_end: int


@dataclass(frozen=True, slots=True)
class Request:
    """A question, and what came of it: `ok` with an answer, `failed` if the node said so (by code), or `unknown`."""

    kind: ClassVar[str] = "request"
    client: str
    stream: str
    value: str
    begin: float
    end: float
    outcome: Outcome
    answer: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """A question as somebody got it, and what the node said to their answer: `failed` is `RS_GONE`."""

    kind: ClassVar[str] = "response"
    consumer: str
    stream: str
    name: str
    value: str
    begin: float
    end: float
    outcome: Outcome
    answer: str = ""
    group: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class Drain:
    """The end of a group: how it stood when it had been given time, from `begin` to `end`, with nothing in its way."""

    kind: ClassVar[str] = "drain"
    stream: str
    group: str
    begin: float
    end: float
    floor: int
    stream_end: int
    start: int = 0
    """Where the group began."""

    @property
    def lag(self) -> int:
        """How many messages it did not get done."""
        return self.stream_end - self.floor


@dataclass(frozen=True, slots=True)
class LastRead:
    """All that one node has of a stream at the end."""

    kind: ClassVar[str] = "final"
    node: str
    stream: str
    offsets: list[int] = field(default_factory=list)
    values: list[str] = field(default_factory=list)

    @property
    def rows(self) -> Iterator[tuple[int, str]]:
        """Offset and value of each message."""
        return zip(self.offsets, self.values, strict=True)


@dataclass(frozen=True, slots=True)
class Begun:
    """A producer began an epoch. `keep`: the sequences that it took over; None: it dropped nothing."""

    kind: ClassVar[str] = "begun"
    client: str
    stream: str
    producer: str
    epoch: int
    begin: float
    end: float
    outcome: Outcome
    keep: list[int] | None = None
    code: str = ""


@dataclass(frozen=True, slots=True)
class Staged:
    """Messages that were staged under one sequence, in this order; `ok` if all of them are safe."""

    kind: ClassVar[str] = "staged"
    client: str
    stream: str
    producer: str
    epoch: int
    sequence: int
    values: list[str]
    begin: float
    end: float
    outcome: Outcome
    code: str = ""


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit of sequences, asked for once.

    `count` messages were added to the stream by it, from the offset `base` on; -1: that is not known.
    """

    kind: ClassVar[str] = "committed"
    client: str
    stream: str
    producer: str
    epoch: int
    sequences: list[int]
    begin: float
    end: float
    outcome: Outcome
    count: int = 0
    base: int = -1
    code: str = ""


@dataclass(frozen=True, slots=True)
class Purged:
    """All before an offset was asked to be purged; None: the stream keeps only the newest messages, at any time."""

    kind: ClassVar[str] = "purged"
    stream: str
    begin: float
    end: float
    before: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """Where a node said that a stream ends."""

    kind: ClassVar[str] = "end"
    at: float
    stream: str
    node: str
    end: int


Record = (
    Meta | Fault | Blown | CutOff | Publish | Delivery | Acked | Position | Request | Response | Drain | LastRead
    | Begun | Staged | Committed | Purged | End
)  # fmt: skip
KINDS: Final[dict[str, Any]] = {
    kind.kind: kind
    for kind in (
        *(
            Meta,
            Fault,
            Blown,
            CutOff,
            Publish,
            Delivery,
            Acked,
            Position,
            Request,
            Response,
            Drain,
            LastRead,
            Begun,
            Staged,
            Committed,
            Purged,
            End,
        ),
    )
}
_FIELDS: Final = {name: frozenset(f.name for f in fields(kind)) for name, kind in KINDS.items()}


def to_line(record: Record) -> str:
    """A record as it lies on disk."""
    return json.dumps({"kind": record.kind} | asdict(record))


def of_line(line: str) -> Record:
    """A record that lay on disk."""
    try:
        told = json.loads(line)
        kind = told.pop("kind")
        if not told.keys() <= _FIELDS[kind]:
            raise HistoryError(f"{kind} has no {', '.join(told.keys() - _FIELDS[kind])}")
        made: Record = KINDS[kind](**told)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HistoryError(f"no record of a history: {line[:200]!r}: {error}") from error
    return made


def read(file: Path) -> list[Record]:
    """A history that lies on disk (rule 4)."""
    found: list[Record] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                break
            try:
                found.append(of_line(line))
            except HistoryError as error:
                raise HistoryError(f"{file}, line {number}: {error}") from error
    return found


class History:
    """Takes records, keeps them, and writes them down as they come."""

    def __init__(self, file: Path | None = None) -> None:
        self.records: list[Record] = []
        self._file: IO[str] | None = None if file is None else file.open("w", encoding="utf-8")

    def add(self, *records: Record) -> None:
        """These were seen."""
        self.add_all(records)

    def add_all(self, records: Iterable[Record]) -> None:
        """These were seen."""
        some = list(records)
        self.records += some
        if self._file is not None:
            self._file.writelines(to_line(record) + "\n" for record in some)

    def close(self) -> None:
        """No more."""
        if self._file is not None:
            self._file.close()
            self._file = None
