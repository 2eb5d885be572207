"""State machine of one Raft node. Each rule is documented where it is implemented:

- `elections`: which node leads;
- `replication`: how the log of the leader is copied to all nodes, and when an entry is committed;
- `reads`: what may be read without an entry, and how a leader knows that it still leads;
- this module: changes of members, and leadership transfer.

Members. Voters are added or removed one at a time: then any majority before and any majority after have a node in
common. A change counts from the moment it is in the log. It is refused while another change is not committed, and
before the leader has committed an entry of its own term (without that rule two changes of different leaders can split
the cluster). A new voter must have been a learner, and have caught up.

Transfer. The leader accepts no more entries, waits until the other node has the whole log, and tells it to campaign. If
it is not elected in time, the leader goes on; in a new term if it has told the other node to campaign, because the old
term has no leases any more.
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
    """One Raft node. `messages` lists the duties of its driver.

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

    # ------------------------------------------------------------ events

    def step(self, sender: Id, message: Message, now: float) -> None:
        """Handle a message from another node."""
        if message.term > self.term:
            if not self._handle_later_term(sender, message, now):
                return
        elif message.term < self.term:
            self._handle_earlier_term(sender, message)
            return
        match message:
            case Append():
                self.append(sender, message, now)
            case Appended():
                self.handle_appended(sender, message, now)
                self._hand_over_if_possible()
            case AskVote():
                self.handle_vote_request(sender, message, now)
            case Vote():
                self.voted(sender, message, now)
            case Install():
                self.install(sender, message, now)
            case Installing():
                self.handle_installing(sender, message, now)
            case Campaign():
                self.campaign(now, transfer=True)
            case AskRead():
                self.handle_read_request(sender, message, now)
            case ReadAt():
                self.handle_read_at(message)

    def _handle_later_term(self, sender: Id, message: Message, now: float) -> bool:
        """Handle the later term of a message. Return whether to handle the message itself."""
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

    def _handle_earlier_term(self, sender: Id, message: Message) -> None:
        match message:
            case Append() | Install():
                self.send_late(sender, Appended(self.term, False, 0, 0))
            case AskVote():
                self.send_late(sender, Vote(self.term, False, pre=message.pre))
            case AskRead():
                self.send_late(sender, ReadAt(self.term, message.number, None))

    @property
    def due(self) -> float:
        """Return when `tick` must be called, in seconds."""
        return self.beat if self.role is Role.LEADER else self.election

    def tick(self, now: float) -> None:
        """Handle timeouts: of elections, heartbeats, the majority and a transfer."""
        if self.role is Role.LEADER:
            self.stop_without_majority(now)
        if self.role is not Role.LEADER:
            if now >= self.election:
                self.campaign(now)
            return
        if self.moving is not None and now >= self.moving[1]:
            self.moving = None
            if not self.leases and self.settings.lease is not None:
                self.lead_in_new_term(now)
                return
        if now >= self.beat:
            self.begin_round(now)

    # ------------------------------------------------------------ requests

    def propose(self, data: Sequence[bytes], now: float) -> tuple[int, int]:
        """Add entries to the log; return their term and the last index. `Ready.committed` has them once committed.

        Raises `NotLeaderError`.
        """
        self.check_leads("add an entry")
        after = self.log.last + 1
        self.add([Entry(index, self.term, item) for index, item in enumerate(data, after)])
        return self.term, self.log.last

    def change(self, members: Members, now: float) -> tuple[int, int]:
        """Change the members; return the term and index of the entry for the change.

        Raises `NotLeaderError`, and `ChangeError` if the change is not possible, or not now.
        """
        self.check_leads("change the members")
        before = self.log.members
        if self.commit < self.began:
            raise ChangeError("NOT_READY", f"{self.id} has only just become leader: try again")
        if self.log.changed_at > self.commit:
            raise ChangeError("BUSY", "another change of members is under way: try again")
        if not members.voters:
            raise ChangeError("NO_VOTERS", "there must be at least one voter")
        if set(members.voters) & set(members.learners):
            raise ChangeError("TWICE", "a node cannot be a voter and a learner")
        different = set(before.voters) ^ set(members.voters)
        if len(different) > 1:
            raise ChangeError("TOO_MANY", "add or remove one voter at a time")
        for new in different - set(before.voters):
            progress = self.progress.get(new)
            if progress is None or progress.match < self.commit:
                raise ChangeError("BEHIND", f"{new} has to catch up first, as a learner")
        self.add([Entry(self.log.last + 1, self.term, members=members)])
        return self.term, self.log.last

    def transfer(self, to: Id, now: float) -> None:
        """Let another node lead. `leader` shows the outcome. Raises `NotLeaderError` and `ChangeError`."""
        self.check_leads("hand over")
        if to == self.id:
            return
        if to not in self.log.members.voters:
            raise ChangeError("NO_VOTER", f"{to} is not a voter, so it cannot lead")
        self.moving = to, now + self.settings.election
        self._hand_over_if_possible()

    def _hand_over_if_possible(self) -> None:
        if self.role is not Role.LEADER or self.moving is None:
            return
        to = self.moving[0]
        if to in self.progress and self.progress[to].match == self.log.last:
            self.send_campaign(to)

    # ------------------------------------------------------------ output

    @property
    def has_ready(self) -> bool:
        """Return whether the driver has something to do."""
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
        """Return what the driver has to do now.

        Raises `ProtocolError` if `persisted` was not called for the last result.
        """
        if self.writing:
            raise ProtocolError(f"{self.id}: call persisted for the last result of ready first")
        hard, log = Hard(self.term, self.vote), self.log
        applicable = min(self.commit, log.durable)
        ready = Ready(
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
        return ready

    def persisted(self, ready: Ready, now: float) -> None:
        """Record that the content of `ready` is on disk."""
        self.writing = False
        if ready.entries:
            self.log.written(ready.entries[-1].index, ready.entries[-1].term)
        if self.role is Role.CANDIDATE and ready.hard == Hard(self.term, self.id):
            self.count_own_vote(now)
        if self.role is Role.LEADER:
            self.advance(now)

    # ------------------------------------------------------------ snapshots

    def snapshot(self, index: int, data: bytes) -> Snapshot:
        """Return a snapshot of everything applied up to an index. The driver writes it, and then calls `compact`."""
        term = self.log.term(index)
        if term is None or index > self.applied:
            raise ProtocolError(f"{self.id} has applied {self.applied}, not {index}")
        return Snapshot(index, term, self.log.members_at(index), data)

    def compact(self, snapshot: Snapshot) -> None:
        """Drop the entries of a snapshot that is on disk."""
        if self.log.base < snapshot.index <= self.applied:
            self.log.compact(snapshot)
