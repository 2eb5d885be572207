"""What every part of the machine shares: its state, and the few verbs the rules are written in."""

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
    """What a node is."""

    FOLLOWER = "follower"
    PRECANDIDATE = "pre-candidate"  # asks whether it would be elected
    CANDIDATE = "candidate"
    LEADER = "leader"


class State:
    """One node."""

    __slots__ = (
        "applied", "asked", "attempts", "beat", "began", "commit", "confirmed", "early", "election",
        "heard", "id", "incoming", "late", "leader", "leases", "log", "moving", "progress", "reads",
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
        self.heard = now if self.term else NEVER  # when a leader was heard of
        self.attempts = 0
        self.election = 0.0  # when to campaign
        self.votes: dict[Id, bool] = {}
        self.incoming: tuple[tuple[Id, int, Snapshot, int], list[bytes]] | None = None
        """A snapshot, piece by piece: from whom, in which term, which one, its size."""
        # of a leader
        self.progress: dict[Id, Progress] = {}
        self.beat = 0.0  # when to send heartbeats
        self.began = 0  # the index of the first entry of its term
        self.round = 0
        self.rounds: list[tuple[int, float]] = []  # that are not confirmed, and when they began
        self.confirmed = NEVER  # when the last round began that a majority has answered
        self.leases = False  # whether it may trust in followers not to elect another for a while
        self.waiting: list[tuple[int, Id | None]] = []  # reads, and whose they are (None: our own)
        self.asked: list[tuple[int, int, int, Id | None]] = []  # round, index, number, whose
        self.moving: tuple[Id, float] | None = None  # who is to lead, and until when we wait
        # to be done
        self.early: list[tuple[Id, Message]] = []
        self.late: list[tuple[Id, Message]] = []
        self.reads: list[tuple[int, int | None]] = []
        self.restoring: Snapshot | None = None
        self.writing = False
        self.wait_for_election(now)

    def __repr__(self) -> str:
        log = self.log
        return f"{self.id}: {self.role.value} of term {self.term}, log {log.base}..{log.last}, commit {self.commit}"

    # ------------------------------------------------------------ who decides

    @property
    def may_campaign(self) -> bool:
        """Whether this node is a voter, or was one before a change that may not be committed.

        A leader that removes itself, and is gone before anybody knows, has the longest log: if it did not campaign,
        nobody could be elected.
        """
        log, at = self.log, self.log.changed_at
        if self.id in log.members.voters:
            return True
        return at > self.commit and self.id in log.members_at(at - 1).voters

    def agreed(self, values: dict[Id, int]) -> int:
        """The highest number that a majority of voters has reached."""
        members = self.log.members
        reached = sorted((values.get(voter, 0) for voter in members.voters), reverse=True)
        return reached[members.majority - 1] if reached else 0

    # ------------------------------------------------------------ time

    def wait_for_election(self, now: float) -> None:
        """Wait for a leader, for a time that differs from node to node and from case to case."""
        self.attempts += 1
        self.election = now + self.settings.election * (1 + fraction(self.seed, self.attempts))

    def hears_leader(self, now: float) -> bool:
        """Whether there is a leader, as far as can be known here."""
        if not self.settings.check_quorum:
            return False
        return self.role is Role.LEADER or now < self.heard + self.settings.election

    # ------------------------------------------------------------ changes

    def follow(self, term: int, leader: Id | None, now: float) -> None:
        """Be a follower, of a leader if one is known."""
        if term > self.term:
            self.term, self.vote = term, None
        self.give_up_reads()
        self.role, self.leader = Role.FOLLOWER, leader
        self.progress, self.rounds, self.votes, self.moving = {}, [], {}, None
        self.wait_for_election(now)

    def give_up_reads(self) -> None:
        """Who waits for a read has to ask again."""
        lost = self.waiting + [(number, whose) for _, _, number, whose in self.asked]
        self.waiting, self.asked = [], []
        for number, whose in lost:
            self.answer_read(number, whose, None)

    def answer_read(self, number: int, whose: Id | None, index: int | None) -> None:
        """Tell who asked."""
        if whose is None:
            self.reads.append((number, index))
        else:
            self.say(whose, ReadAt(self.term, number, index))

    def say(self, to: Id, message: Message) -> None:
        """Send a message, once all that it is about is on disk."""
        self.late.append((to, message))


def fraction(seed: int, number: int) -> float:
    """A number from 0 to 1, that looks like chance and is not."""
    mixed = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 1) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ mixed >> 31) / 2.0**64
