"""What nodes say to each other, what is kept on disk, and what a driver has to do.

A driver owns the clock, the disk and the links. Its duties:

1. It calls `step` with each message that comes (any may be lost, doubled, late or out of order), `tick` when the time
   `due` has come, and `propose`, `read`, `change`, `transfer` when people want something. All of them take `now`,
   seconds of a clock that never goes back.
2. Then, while `has_ready`, it takes `ready()`, one at a time:
   a. it sends the messages in `early`;
   b. it writes `hard`, `snapshot` and `entries`, in this order, and syncs. Entries take the place of all that were
      written before with their index or a higher one, a snapshot that of all entries;
   c. it calls `persisted` with it;
   d. it sends the messages in `late`, restores the snapshot if there is one, applies `committed` in order, and
      answers the `reads`, each one when its index is applied.
3. What it could not write it does not call persisted: it ends, and starts again from its disk.
4. After a start it makes a machine from what is on disk: hard state, the last snapshot, and entries after that. A node
   whose disk has lost something that was synced must not come back under its name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from railgun.errors import ProtocolError, RailgunError

Id: TypeAlias = str
"""The name of a node, for ever: not an address."""


class NotLeaderError(RailgunError):
    """Only a leader can do this; `leader` is who that is, if it is known."""

    code: ClassVar[str] = "NOT_LEADER"

    def __init__(self, text: str, leader: Id | None) -> None:
        super().__init__(text)
        self.leader = leader


class ChangeError(RailgunError):
    """A change of members that cannot be made now; `code` is one word for programs."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


# ---------------------------------------------------------------- what is kept


@dataclass(frozen=True, slots=True)
class Members:
    """Who takes part: voters decide, learners only receive."""

    voters: tuple[Id, ...]
    learners: tuple[Id, ...] = ()

    @property
    def all(self) -> tuple[Id, ...]:
        """Everybody, in a fixed order."""
        return tuple(sorted({*self.voters, *self.learners}))

    @property
    def majority(self) -> int:
        """How many voters decide."""
        return len(self.voters) // 2 + 1

    def with_voter(self, id: Id) -> Members:
        """One voter more, who may have been a learner."""
        return Members(
            tuple(sorted({*self.voters, id})), tuple(i for i in self.learners if i != id)
        )

    def with_learner(self, id: Id) -> Members:
        """One learner more, who may have been a voter."""
        return Members(
            tuple(i for i in self.voters if i != id), tuple(sorted({*self.learners, id}))
        )

    def without(self, id: Id) -> Members:
        """One less."""
        return Members(
            tuple(i for i in self.voters if i != id), tuple(i for i in self.learners if i != id)
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log: data of the driver's, or who the members are from here on; or neither, to begin a term."""

    index: int
    term: int
    data: bytes = b""
    members: Members | None = None


@dataclass(frozen=True, slots=True)
class Hard:
    """What must survive: the term, and whom this node voted for in it."""

    term: int = 0
    vote: Id | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that was applied up to an index, in the driver's words."""

    index: int
    term: int
    members: Members
    data: bytes = field(default=b"", repr=False)


# ---------------------------------------------------------------- what nodes say


@dataclass(frozen=True, slots=True)
class AskVote:
    """Vote for me. `pre`: would you? Nothing changes by that. `transfer`: the leader wants me to lead."""

    term: int
    last_index: int
    last_term: int
    pre: bool = False
    transfer: bool = False


@dataclass(frozen=True, slots=True)
class Vote:
    """The answer. A pre-vote that is granted has the term that was asked for, everything else the voter's."""

    term: int
    granted: bool
    pre: bool = False


@dataclass(frozen=True, slots=True)
class Append:
    """From the leader: the entries after `prev_index`; none of them: I am there. `round` comes back with the answer."""

    term: int
    prev_index: int
    prev_term: int
    entries: tuple[Entry, ...]
    commit: int
    round: int


@dataclass(frozen=True, slots=True)
class Appended:
    """The log is that of the leader up to `index`; or not, and `index` is the `prev_index` that does not fit.

    Then `hint` is the last place where it may fit, and `hint_term` the term there.
    """

    term: int
    ok: bool
    index: int
    round: int
    hint: int = 0
    hint_term: int = 0


@dataclass(frozen=True, slots=True)
class Install:
    """A piece of a snapshot, from byte `offset` on; `snapshot` without its data says of which."""

    term: int
    snapshot: Snapshot
    offset: int
    data: bytes = field(repr=False)
    size: int
    round: int


@dataclass(frozen=True, slots=True)
class Installing:
    """Of the snapshot of this index there are so many bytes."""

    term: int
    index: int
    offset: int
    round: int


@dataclass(frozen=True, slots=True)
class Campaign:
    """From the leader: lead, at once. You have all that I have."""

    term: int


@dataclass(frozen=True, slots=True)
class AskRead:
    """To the leader: up to where must I have applied for a read that begins now?"""

    term: int
    number: int


@dataclass(frozen=True, slots=True)
class ReadAt:
    """The answer; None: I cannot tell, ask again."""

    term: int
    number: int
    index: int | None


Message: TypeAlias = (
    AskVote | Vote | Append | Appended | Install | Installing | Campaign | AskRead | ReadAt
)


# ---------------------------------------------------------------- what is to be done


@dataclass(frozen=True, slots=True)
class Ready:
    """What a driver has to do now, see the top of this file."""

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
        """Whether there is something to write."""
        return bool(self.entries) or self.hard is not None or self.snapshot is not None


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds. A node waits `election` to twice that for a leader; a lease is shorter, for clocks differ."""

    election: float = 1.0
    heartbeat: float = 0.1
    lease: float | None = 0.7
    """None: every read asks a majority."""
    pre_vote: bool = True
    check_quorum: bool = True
    """A leader that hears of no majority stops; a node that hears of a leader votes for nobody else."""
    append_bytes: int = 1 << 20
    """Entries of one message, at most: one entry, or these bytes."""
    window: int = 64
    """Messages under way to a node."""
    chunk: int = 256 << 10
    """Bytes of a snapshot in a message."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat < self.election:
            raise ProtocolError("a heartbeat is to come before an election")
        if self.lease is not None and not 0 < self.lease < self.election:
            raise ProtocolError("a lease is to end before an election")
