"""Raft: one node. The rules are where they are kept:

- `elections`: who leads;
- `replication`: how the log of the leader becomes everybody's, and when an entry is committed;
- `reads`: what may be read without an entry, and how a leader knows that it still is one;
- and here: members, and handing over the lead.

Members. One voter more or less at a time: then any majority of before and any of after have a node in common. A
change counts from the moment it is in the log. It is refused while another one is not committed, and before the leader
has committed something of its own term (without that rule two changes of different leaders can part the cluster). A new
voter has been a learner, and has caught up.

Handing over. The leader takes no more, waits until the other has all it has, and tells it to campaign. If that does not
happen in time, it goes on; in a new term if it has told the other, for there are no leases in the old one any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from railgun.broker.protocol.raft.elections import Elections
from railgun.broker.protocol.raft.messages import (
    Append,
    Appended,
    AskRead,
    AskVote,
    Campaign,
    ChangeError,
    Entry,
    Hard,
    Id,
    Install,
    Installing,
    Members,
    Message,
    ReadAt,
    Ready,
    Snapshot,
    Vote,
)
from railgun.broker.protocol.raft.reads import Reads
from railgun.broker.protocol.raft.state import Role
from railgun.errors import ProtocolError


class Raft(Reads, Elections):
    """One node: see `messages` for what its driver has to do.

    >>> from railgun.broker.protocol.raft.messages import Members, Settings, Snapshot
    >>> alone = Raft("a", Settings(), now=0.0, snapshot=Snapshot(0, 0, Members(("a",))))
    >>> alone.campaign(now=0.0)
    >>> while alone.has_ready:
    ...     alone.persisted(alone.ready(), now=0.0)
    >>> alone.propose([b"x"], now=0.0)
    (1, 2)
    >>> alone.persisted(alone.ready(), now=0.0)
    >>> alone.ready().committed
    (Entry(index=2, term=1, data=b'x', members=None),)
    """

    __slots__ = ()

    # ------------------------------------------------------------ what happens

    def step(self, sender: Id, message: Message, now: float) -> None:
        """A message has come."""
        if message.term > self.term:
            if not self._hear_of_term(sender, message, now):
                return
        elif message.term < self.term:
            self._hear_of_the_past(sender, message)
            return
        match message:
            case Append():
                self.append(sender, message, now)
            case Appended():
                self.heard_from(sender, message, now)
                self._hand_over_if_possible()
            case AskVote():
                self.asked_for_vote(sender, message, now)
            case Vote():
                self.voted(sender, message, now)
            case Install():
                self.install(sender, message, now)
            case Installing():
                self.has_piece(sender, message, now)
            case Campaign():
                self.campaign(now, transfer=True)
            case AskRead():
                self.asked_to_read(sender, message, now)
            case ReadAt():
                self.read_at(message)

    def _hear_of_term(self, sender: Id, message: Message, now: float) -> bool:
        """Somebody speaks of a later term; whether that is for us to hear."""
        match message:
            case AskVote(transfer=False) if self.hears_leader(now):
                return False
            case AskVote(pre=True) | Vote(pre=True, granted=True):
                pass
            case Append() | Install():
                self.follow(message.term, sender, now)
            case _:
                self.follow(message.term, None, now)
        return True

    def _hear_of_the_past(self, sender: Id, message: Message) -> None:
        match message:
            case Append() | Install():
                self.say(sender, Appended(self.term, False, 0, 0))
            case AskVote():
                self.say(sender, Vote(self.term, False, pre=message.pre))
            case AskRead():
                self.say(sender, ReadAt(self.term, message.number, None))

    @property
    def due(self) -> float:
        """When `tick` is to be called."""
        return self.beat if self.role is Role.LEADER else self.election

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.role is Role.LEADER:
            self.look_for_majority(now)
        if self.role is not Role.LEADER:
            if now >= self.election:
                self.campaign(now)
            return
        if self.moving is not None and now >= self.moving[1]:
            self.moving = None
            if not self.leases and self.settings.lease is not None:
                self.lead_anew(now)
                return
        if now >= self.beat:
            self.begin_round(now)

    # ------------------------------------------------------------ what people want

    def propose(self, data: Sequence[bytes], now: float) -> tuple[int, int]:
        """Add entries to the log: their term, and the index of the last. They are committed when `Ready` says so."""
        self.check_leads("add an entry")
        after = self.log.last + 1
        self.add([Entry(index, self.term, one) for index, one in enumerate(data, after)])
        return self.term, self.log.last

    def change(self, members: Members, now: float) -> tuple[int, int]:
        """Change who takes part: the term and index of the entry that says so."""
        self.check_leads("change the members")
        before = self.log.members
        if self.commit < self.began:
            raise ChangeError("NOT_READY", f"{self.id} leads since a moment: try again")
        if self.log.changed_at > self.commit:
            raise ChangeError("BUSY", "another change of members is under way: try again")
        if not members.voters:
            raise ChangeError("NO_VOTERS", "there must be a voter")
        if set(members.voters) & set(members.learners):
            raise ChangeError("TWICE", "nobody is a voter and a learner")
        different = set(before.voters) ^ set(members.voters)
        if len(different) > 1:
            raise ChangeError("TOO_MANY", "one voter more or less at a time")
        for new in different - set(before.voters):
            progress = self.progress.get(new)
            if progress is None or progress.match < self.commit:
                raise ChangeError("BEHIND", f"{new} has to catch up first, as a learner")
        self.add([Entry(self.log.last + 1, self.term, members=members)])
        return self.term, self.log.last

    def transfer(self, to: Id, now: float) -> None:
        """Let another node lead. What comes of it is seen in `leader`."""
        self.check_leads("hand over")
        if to == self.id:
            return
        if to not in self.log.members.voters:
            raise ChangeError("NO_VOTER", f"{to} is no voter, so it cannot lead")
        self.moving = to, now + self.settings.election
        self._hand_over_if_possible()

    def _hand_over_if_possible(self) -> None:
        if self.role is not Role.LEADER or self.moving is None:
            return
        to = self.moving[0]
        if to in self.progress and self.progress[to].match == self.log.last:
            self.choose(to)

    # ------------------------------------------------------------ what is to be done

    @property
    def has_ready(self) -> bool:
        """Whether there is something to do."""
        return bool(
            self.early
            or self.late
            or self.reads
            or self.restoring is not None
            or self.log.durable < self.log.last
            or min(self.commit, self.log.durable) > self.applied
            or Hard(self.term, self.vote) != self.saved
        )

    def ready(self) -> Ready:
        """What is to be done now."""
        if self.writing:
            raise ProtocolError(f"{self.id}: one thing after the other: persisted comes first")
        hard, log = Hard(self.term, self.vote), self.log
        applicable = min(self.commit, log.durable)
        made = Ready(
            early=tuple(self.early),
            hard=hard if hard != self.saved else None,
            snapshot=self.restoring,
            entries=log.after(log.durable),
            late=tuple(self.late),
            committed=log.between(self.applied, applicable),
            reads=tuple(self.reads),
        )
        self.saved, self.applied = hard, max(self.applied, applicable)
        self.early, self.late, self.reads, self.restoring = [], [], [], None
        self.writing = True
        return made

    def persisted(self, ready: Ready, now: float) -> None:
        """It is on disk."""
        self.writing = False
        if ready.entries:
            self.log.written(ready.entries[-1].index, ready.entries[-1].term)
        if self.role is Role.CANDIDATE and ready.hard == Hard(self.term, self.id):
            self.own_vote_is_safe(now)
        if self.role is Role.LEADER:
            self.advance(now)

    # ------------------------------------------------------------ snapshots

    def snapshot(self, index: int, data: bytes) -> Snapshot:
        """All that was applied up to an index, as a snapshot. The driver writes it, and then calls `compact`."""
        term = self.log.term(index)
        if term is None or index > self.applied:
            raise ProtocolError(f"{self.id} has applied {self.applied}, not {index}")
        return Snapshot(index, term, self.log.members_at(index), data)

    def compact(self, snapshot: Snapshot) -> None:
        """A snapshot is on disk: the log goes on after it."""
        if self.log.base < snapshot.index <= self.applied:
            self.log.compact(snapshot)
