"""A node of a cluster, driven by hand: what a test says to it, and what it says."""

from __future__ import annotations

from typing import Any

from railgun.broker.protocol.raft.machine import Raft
from railgun.broker.protocol.raft.messages import (
    Append,
    Appended,
    Entry,
    Hard,
    Id,
    Members,
    Message,
    Ready,
    Settings,
    Snapshot,
    Vote,
)
from railgun.broker.protocol.raft.state import Role

ABC = Members(("a", "b", "c"))


class Play:
    """One machine, with a disk that writes at once unless it is told not to."""

    def __init__(
        self,
        id: Id = "a",
        members: Members = ABC,
        *,
        log: str = "",
        term: int = 0,
        vote: Id | None = None,
        now: float = 0.0,
        snapshot: Snapshot | None = None,
        kind: type[Raft] = Raft,
        **settings: Any,
    ) -> None:
        self.now = now
        snapshot = snapshot or Snapshot(0, 0, members)
        entries = entries_of(log, snapshot.index + 1)
        self.raft = kind(
            id,
            Settings(**{"lease": None, "pre_vote": False, "check_quorum": False} | settings),
            now,
            snapshot=snapshot,
            hard=Hard(term, vote) if term else None,
            entries=entries,
        )
        self.committed: list[Entry] = []
        self.reads: list[tuple[int, int | None]] = []
        self.written: list[Ready] = []

    def hear(self, sender: Id, message: Message) -> list[tuple[Id, Message]]:
        """A message comes: what is said then."""
        self.raft.step(sender, message, self.now)
        return self.do()

    def do(self) -> list[tuple[Id, Message]]:
        """Do all there is to do; what is sent."""
        sent: list[tuple[Id, Message]] = []
        while self.raft.has_ready:
            sent += self.write(self.raft.ready())
        return sent

    def write(self, ready: Ready) -> list[tuple[Id, Message]]:
        """It is on disk."""
        self.written.append(ready)
        self.raft.persisted(ready, self.now)
        self.committed += ready.committed
        self.reads += ready.reads
        return [*ready.early, *ready.late]

    def elect(self, *votes: Id) -> list[tuple[Id, Message]]:
        """Campaign, and be elected by these."""
        self.raft.campaign(self.now)
        sent = self.do()
        for voter in votes or ("b",):
            sent += self.hear(voter, Vote(self.raft.term, True))
        return sent

    def pass_time(self, seconds: float) -> list[tuple[Id, Message]]:
        """Time passes, and the machine hears of it when it wants to."""
        end = self.now + seconds
        sent = []
        while self.raft.due <= end:
            self.now = max(self.now, self.raft.due)
            self.raft.tick(self.now)
            sent += self.do()
        self.now = end
        return sent

    def role(self) -> Role:
        """What it is now."""
        return self.raft.role

    @property
    def log(self) -> str:
        """The terms of its entries."""
        return "".join(str(entry.term) for entry in self.raft.log.entries)


def entries_of(log: str, first: int = 1) -> list[Entry]:
    """Entries by their terms: "112" is two of term 1 and one of term 2."""
    return [Entry(index, int(term), b"%d" % index) for index, term in enumerate(log, first)]


def append(
    term: int, prev: int, prev_term: int, log: str = "", commit: int = 0, round: int = 1
) -> Append:
    """What a leader sends: entries of these terms after `prev`."""
    return Append(term, prev, prev_term, tuple(entries_of(log, prev + 1)), commit, round)


def of(kind: type[Any], sent: list[tuple[Id, Message]], to: Id | None = None) -> list[Any]:
    """The messages of a kind, to all or to one."""
    return [m for who, m in sent if isinstance(m, kind) and to in (None, who)]


def leading(members: Members = ABC) -> Play:
    node = Play(members=members)
    others = [voter for voter in members.voters if voter != "a"]
    node.elect(*others)
    for other in (*others, *members.learners):
        node.hear(other, Appended(1, True, 1, 1))
    return node
