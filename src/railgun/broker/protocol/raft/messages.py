"""Messages between nodes, the state kept on disk, and the duties of a driver.

A driver owns the clock, the disk and the connections. Its duties:

1. It calls `step` with each message that comes (any may be lost, doubled, late or out of order), `tick` when the time
   `due` has come, and `propose`, `read`, `change`, `transfer` on request. All of them take `now`, seconds of a clock
   that never goes back.
2. Then, while `has_ready`, it takes `ready()`, one at a time:
   a. it sends the messages in `early`;
   b. it writes `hard`, `snapshot` and `entries`, in this order, and syncs. Entries replace all entries written before
   with their index or a higher one; a snapshot replaces all entries;
   c. it calls `persisted` with it;
   d. it sends the messages in `late`, restores the snapshot if there is one, applies `committed` in order, and answers
   the `reads`, each one when its index is applied.
3. It never calls `persisted` for what it could not write: it ends, and starts again from its disk.
4. After a start it creates a machine from its disk: hard state, the last snapshot, and entries after that. A node whose
   disk has lost something that was synced must not come back under its name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from railgun.errors import ProtocolError, RailgunError

Id: TypeAlias = str
"""The permanent name of a node; not an address."""


class NotLeaderError(RailgunError):
    """Only the leader can do this; `leader` is its name, or None if unknown."""

    code: ClassVar[str] = "NOT_LEADER"

    def __init__(self, text: str, leader: Id | None) -> None:
        super().__init__(text)
        self.leader = leader


class ChangeError(RailgunError):
    """A change of members that is not possible now; `code` is one word for programs."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


# ---------------------------------------------------------------- state on disk


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a cluster: voters decide, learners only receive."""

    voters: tuple[Id, ...]
    learners: tuple[Id, ...] = ()

    @property
    def all(self) -> tuple[Id, ...]:
        """Return all members in a fixed order."""
        return tuple(sorted({*self.voters, *self.learners}))

    @property
    def majority(self) -> int:
        """Return how many voters are a majority."""
        return len(self.voters) // 2 + 1

    def with_voter(self, id: Id) -> Members:
        """Return the members with one voter more, which may have been a learner."""
        return Members(
            tuple(sorted({*self.voters, id})), tuple(i for i in self.learners if i != id)
        )

    def with_learner(self, id: Id) -> Members:
        """Return the members with one learner more, which may have been a voter."""
        return Members(
            tuple(i for i in self.voters if i != id), tuple(sorted({*self.learners, id}))
        )

    def without(self, id: Id) -> Members:
        """Return the members without a node."""
        return Members(
            tuple(i for i in self.voters if i != id), tuple(i for i in self.learners if i != id)
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the log: the driver's data, or the members from here on; or neither, to begin a term."""

    index: int
    term: int
    data: bytes = b""
    members: Members | None = None


@dataclass(frozen=True, slots=True)
class Hard:
    """The hard state, which must survive a restart: the term, and this node's vote in it."""

    term: int = 0
    vote: Id | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that was applied up to an index, in the driver's encoding."""

    index: int
    term: int
    members: Members
    data: bytes = field(default=b"", repr=False)


# ---------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class AskVote:
    """Request for a vote.

    `pre`: asks whether a vote would be granted, and changes nothing. `transfer`: the leader asked the sender to
    campaign.
    """

    term: int
    last_index: int
    last_term: int
    pre: bool = False
    transfer: bool = False


@dataclass(frozen=True, slots=True)
class Vote:
    """Answer to `AskVote`. A granted pre-vote has the term that was asked for, every other answer the voter's term."""

    term: int
    granted: bool
    pre: bool = False


@dataclass(frozen=True, slots=True)
class Append:
    """Entries after `prev_index`, from the leader; without entries, a heartbeat. The answer repeats `round`."""

    term: int
    prev_index: int
    prev_term: int
    entries: tuple[Entry, ...]
    commit: int
    round: int


@dataclass(frozen=True, slots=True)
class Appended:
    """Answer to `Append`.

    `ok`: the log equals the leader's up to `index`. Otherwise `index` is the `prev_index` that did not match, `hint`
    the last index where the logs may agree, and `hint_term` its term.
    """

    term: int
    ok: bool
    index: int
    round: int
    hint: int = 0
    hint_term: int = 0


@dataclass(frozen=True, slots=True)
class Install:
    """A piece of a snapshot, from byte `offset` on; `snapshot` identifies it and has no data."""

    term: int
    snapshot: Snapshot
    offset: int
    data: bytes = field(repr=False)
    size: int
    round: int


@dataclass(frozen=True, slots=True)
class Installing:
    """Answer to `Install`: the node has `offset` bytes of the snapshot at this index."""

    term: int
    index: int
    offset: int
    round: int


@dataclass(frozen=True, slots=True)
class Campaign:
    """From the leader to a node that has its whole log: become leader at once."""

    term: int


@dataclass(frozen=True, slots=True)
class AskRead:
    """Request to the leader: which index must be applied for a read that begins now?"""

    term: int
    number: int


@dataclass(frozen=True, slots=True)
class ReadAt:
    """Answer to `AskRead`; `index` None: the node cannot tell, ask again."""

    term: int
    number: int
    index: int | None


Message: TypeAlias = (
    AskVote | Vote | Append | Appended | Install | Installing | Campaign | AskRead | ReadAt
)


# ---------------------------------------------------------------- output and settings


@dataclass(frozen=True, slots=True)
class Ready:
    """What a driver has to do now: see the duties at the top of this file."""

    early: tuple[tuple[Id, Message], ...] = ()
    hard: Hard | None = None
    snapshot: Snapshot | None = None
    entries: tuple[Entry, ...] = ()
    late: tuple[tuple[Id, Message], ...] = ()
    committed: tuple[Entry, ...] = ()
    reads: tuple[tuple[int, int | None], ...] = ()
    """The number of each read, and the index that must be applied for it; None: it has failed."""

    @property
    def must_sync(self) -> bool:
        """Return whether there is something to write."""
        return bool(self.entries) or self.hard is not None or self.snapshot is not None


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a node; times in seconds.

    A node waits for a leader for `election` to twice that time. A lease is shorter, because clocks differ.
    """

    election: float = 1.0
    heartbeat: float = 0.1
    lease: float | None = 0.7
    """None: every read asks a majority."""
    pre_vote: bool = True
    check_quorum: bool = True
    """A leader that no majority answers stops; a node that hears of a leader votes for no other node."""
    append_bytes: int = 1 << 20
    """Maximum size of the entries in one message, in bytes; a single larger entry is sent alone."""
    window: int = 64
    """Maximum number of messages in flight to a node."""
    chunk: int = 256 << 10
    """Bytes of a snapshot in one message."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat < self.election:
            raise ProtocolError("the heartbeat interval must be shorter than the election timeout")
        if self.lease is not None and not 0 < self.lease < self.election:
            raise ProtocolError("a lease must be shorter than the election timeout")
