"""Records of what clients saw: the only input of the checker.

Rules:

1. A record is one fact as a client saw it, with times of a clock that never jumps, all of one process. An operation
   has the time before its request and the time when its outcome was known.
2. A publish is `ok`, `failed` (for sure: nothing was stored), or `unknown`. A client that is not sure writes `unknown`:
   a checker that knows less finds less, a checker with a false record reports false anomalies.
3. A delivery is recorded before the client answers the node.
4. Histories are stored as JSON, one record a line, in the order in which they were known. A last line that is cut off
   is ignored: its writer was killed.

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
NOT_STORED_CODES: Final = frozenset(
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
"""Codes that prove that nothing was stored; not for messages with IDs, which the client sends again by itself."""


class HistoryError(RailgunError):
    """Raised for a file that is not a history."""


@dataclass(frozen=True, slots=True)
class Meta:
    """The kind of run. `transit`: the longest time in seconds that a delivery may have been under way."""

    kind: ClassVar[str] = "meta"
    seed: int
    nodes: int
    seconds: float
    transit: float = 0.0
    text: str = ""
    patience_s: float = 0.0
    """Seconds after which a client gives up a call; 0: not recorded."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A note about a change to the cluster, for people."""

    kind: ClassVar[str] = "fault"
    at: float
    what: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Blown:
    """A fault from its begin to its end, written when it is over.

    `begin` is before the first change and `struck` after the last; `end` is before anything was undone, and `settled`
    when the nodes had caught up, or were given up. `clients` had a connection to one of `nodes` at `begin`.
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
    """The answers of a node that had been cut off from all others for long: to a reader, and to a publisher.

    `end` is the number of messages of the stream that the node claimed to have, `read` whether a reader got one of
    them. `code` is the answer to a publish ("": stored), after `publish_s` seconds.
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
    """One message of one client. `tries`: how often it was sent, without an ID that makes repeats harmless."""

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
        """Return whether the answer promises that the message is kept."""
        return self.outcome == "ok" and self.acks in ("quorum", "all")


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message, to one consumer. Without a group `number` and `epoch` mean nothing.

    `at` is when the program took the message; `arrived` when the message came to the client, where it may have waited.
    Histories of earlier versions lack `arrived`.
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
        """Return when the message came to the client, or, in old histories, when the program took it."""
        return self.at if self.arrived is None else self.arrived


@dataclass(frozen=True, slots=True)
class Acked:
    """An ack of a consumer; `confirmed`: a flush confirmed that the ack is on disk."""

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
    """The reported position of a group: `floor` is the lowest offset that is not settled."""

    kind: ClassVar[str] = "position"
    begin: float
    end: float
    stream: str
    group: str
    floor: int
    stream_end: int


@dataclass(frozen=True, slots=True)
class Request:
    """A request and its outcome: `ok` with an answer, `failed` if the node refused it (by code), or `unknown`."""

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
    """A request as a responder got it, and the outcome of its answer: `failed` is `RS_GONE`."""

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
    """The final state of a group, after it had from `begin` to `end` to finish with nothing in its way."""

    kind: ClassVar[str] = "drain"
    stream: str
    group: str
    begin: float
    end: float
    floor: int
    stream_end: int
    start: int = 0
    """The offset where the group began."""

    @property
    def lag(self) -> int:
        """Return how many messages the group did not finish."""
        return self.stream_end - self.floor


@dataclass(frozen=True, slots=True)
class LastRead:
    """All messages of a stream that one node has at the end."""

    kind: ClassVar[str] = "final"
    node: str
    stream: str
    offsets: list[int] = field(default_factory=list)
    values: list[str] = field(default_factory=list)

    @property
    def rows(self) -> Iterator[tuple[int, str]]:
        """Yield the offset and value of each message."""
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
    """One request to commit sequences.

    The commit added `count` messages to the stream, from the offset `base` on; -1: not known.
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
    """A request to purge all before an offset; None: the stream always keeps only its newest messages."""

    kind: ClassVar[str] = "purged"
    stream: str
    begin: float
    end: float
    before: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The end of a stream, as a node reported it."""

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
    """Return a record as a line of JSON."""
    return json.dumps({"kind": record.kind} | asdict(record))


def of_line(line: str) -> Record:
    """Return the record of a line. Raises `HistoryError`."""
    try:
        fields = json.loads(line)
        kind = fields.pop("kind")
        if not fields.keys() <= _FIELDS[kind]:
            raise HistoryError(f"{kind} has no {', '.join(fields.keys() - _FIELDS[kind])}")
        record: Record = KINDS[kind](**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HistoryError(f"not a record of a history: {line[:200]!r}: {error}") from error
    return record


def read(file: Path) -> list[Record]:
    """Read a history from a file (rule 4). Raises `HistoryError`."""
    records: list[Record] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                break
            try:
                records.append(of_line(line))
            except HistoryError as error:
                raise HistoryError(f"{file}, line {number}: {error}") from error
    return records


class History:
    """Keep records, and append them to a file as they come."""

    def __init__(self, file: Path | None = None) -> None:
        self.records: list[Record] = []
        self._file: IO[str] | None = None if file is None else file.open("w", encoding="utf-8")

    def add(self, *records: Record) -> None:
        """Append records to the history and its file."""
        self.add_all(records)

    def add_all(self, records: Iterable[Record]) -> None:
        """Add all of `records`."""
        new_records = list(records)
        self.records += new_records
        if self._file is not None:
            self._file.writelines(to_line(record) + "\n" for record in new_records)

    def close(self) -> None:
        """Close the file; no records may follow."""
        if self._file is not None:
            self._file.close()
            self._file = None
