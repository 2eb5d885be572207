"""The state of a Raft node, and the operations that all parts of the machine share."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from railgun.broker.protocol.raft.log import Log
from railgun.broker.protocol.raft.messages import (
    Entry,
    Hard,
    Id,
    Message,
    ReadAt,
    Settings,
    Snapshot,
)
from railgun.broker.protocol.raft.progress import Progress

NEVER: Final = float("-inf")


class Role(Enum):
    """The role of a node."""

    FOLLOWER = "follower"
    PRECANDIDATE = "pre-candidate"  # asks the others whether they would elect it
    CANDIDATE = "candidate"
    LEADER = "leader"


class State:
    """The state of one node."""

    __slots__ = (
        "applied", "attempts", "beat", "began", "commit", "confirmed", "early", "election",
        "heard", "id", "incoming", "late", "leader", "leases", "log", "moving", "pending", "progress", "reads",
        "restoring", "role", "round", "rounds", "saved", "seed", "settings", "term", "vote",
        "votes", "waiting", "writing",
    )  # fmt: skip

    def __init__(
        self,
        id: Id,
        settings: Settings,
        now: float,
        *,
        snapshot: Snapshot,
        hard: Hard | None = None,
        entries: Sequence[Entry] = (),
        seed: int = 0,
    ) -> None:
        self.id, self.settings, self.seed = id, settings, seed
        self.saved = hard or Hard()
        self.term, self.vote = self.saved.term, self.saved.vote
        self.log = Log(snapshot, entries)
        self.commit = self.applied = snapshot.index
        self.role = Role.FOLLOWER
        self.leader: Id | None = None
        self.heard = now if self.term else NEVER  # when a leader was last heard of
        self.attempts = 0
        self.election = 0.0  # when to campaign
        self.votes: dict[Id, bool] = {}
        self.incoming: tuple[tuple[Id, int, Snapshot, int], list[bytes]] | None = None
        """The snapshot being received: its sender, term, header and size; and the pieces so far."""
        # State of a leader.
        self.progress: dict[Id, Progress] = {}
        self.beat = 0.0  # when to send heartbeats
        self.began = 0  # the index of the first entry of its term
        self.round = 0
        self.rounds: list[tuple[int, float]] = []  # unconfirmed rounds, and when they began
        self.confirmed = NEVER  # when the last round began that a majority has answered
        self.leases = False  # whether it can rely on followers not to elect another for a while
        self.waiting: list[tuple[int, Id | None]] = []  # reads: number, requester (None: this node)
        self.pending: list[tuple[int, int, int, Id | None]] = []  # round, index, number, requester
        self.moving: tuple[Id, float] | None = None  # transfer: the next leader, and the deadline
        # Output for `ready`.
        self.early: list[tuple[Id, Message]] = []
        self.late: list[tuple[Id, Message]] = []
        self.reads: list[tuple[int, int | None]] = []
        self.restoring: Snapshot | None = None
        self.writing = False
        self.wait_for_election(now)

    def __repr__(self) -> str:
        log = self.log
        return f"{self.id}: {self.role.value} of term {self.term}, log {log.base}..{log.last}, commit {self.commit}"

    # ------------------------------------------------------------ votes and majorities

    @property
    def may_campaign(self) -> bool:
        """Return whether this node is a voter, or was one before a change that may not be committed.

        A leader that removes itself, and fails before any other node knows, has the longest log: if it did not
        campaign, no node could be elected.
        """
        log, at = self.log, self.log.changed_at
        if self.id in log.members.voters:
            return True
        return at > self.commit and self.id in log.members_at(at - 1).voters

    def majority_value(self, values: dict[Id, int]) -> int:
        """Return the highest value that a majority of voters has reached."""
        members = self.log.members
        reached = sorted((values.get(voter, 0) for voter in members.voters), reverse=True)
        return reached[members.majority - 1] if reached else 0

    # ------------------------------------------------------------ time

    def wait_for_election(self, now: float) -> None:
        """Set the election timeout anew, to a time that differs by node and by attempt."""
        self.attempts += 1
        self.election = now + self.settings.election * (1 + fraction(self.seed, self.attempts))

    def hears_leader(self, now: float) -> bool:
        """Return whether there is a leader, as far as this node knows."""
        if not self.settings.check_quorum:
            return False
        return self.role is Role.LEADER or now < self.heard + self.settings.election

    # ------------------------------------------------------------ transitions

    def follow(self, term: int, leader: Id | None, now: float) -> None:
        """Become a follower; `leader` is None if unknown."""
        if term > self.term:
            self.term, self.vote = term, None
        self.fail_pending_reads()
        self.role, self.leader = Role.FOLLOWER, leader
        self.progress, self.rounds, self.votes, self.moving = {}, [], {}, None
        self.wait_for_election(now)

    def fail_pending_reads(self) -> None:
        """Fail all pending reads; their requesters have to ask again."""
        lost = self.waiting + [(number, requester) for _, _, number, requester in self.pending]
        self.waiting, self.pending = [], []
        for number, requester in lost:
            self.answer_read(number, requester, None)

    def answer_read(self, number: int, requester: Id | None, index: int | None) -> None:
        """Return a read's result to its requester: this node (None) or another. `index` None: the read failed."""
        if requester is None:
            self.reads.append((number, index))
        else:
            self.send_late(requester, ReadAt(self.term, number, index))

    def send_late(self, to: Id, message: Message) -> None:
        """Send a message once everything it depends on is on disk."""
        self.late.append((to, message))


def fraction(seed: int, number: int) -> float:
    """Return a number from 0 to 1 that looks random but is determined by the arguments."""
    mixed = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 1) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ mixed >> 31) / 2.0**64
