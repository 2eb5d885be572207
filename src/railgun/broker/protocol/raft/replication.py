"""Replication: the log of the leader becomes everybody's.

1. A leader never changes its log but at the end. It begins its term with an entry of that term.
2. Entries are taken by who has the one before them. Who has not says where its log may agree, and the leader goes
   back to there. What differs in a follower's log is cut.
3. An entry is *committed* when a majority of voters has it on disk, and it is of the leader's own term; with it, all
   before it. Entries of earlier terms may be on a majority and be lost all the same.
4. A follower knows of what is committed only up to where its log is known to be the leader's.
5. Entries are sent ahead of answers, within a window. A heartbeat names the last one that was sent, so what was lost on
   the way is noticed.
6. Who needs what is no longer in the log gets a snapshot, in pieces, each one when the one before has come.
7. A leader that is no member any more leads until that is committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from railgun.broker.protocol.raft.messages import (
    Append,
    Appended,
    Entry,
    Id,
    Install,
    Installing,
    NotLeaderError,
)
from railgun.broker.protocol.raft.progress import Mode, Progress
from railgun.broker.protocol.raft.state import NEVER, Role, State
from railgun.errors import ProtocolError


class Replication(State):
    """The part of the machine that replicates."""

    __slots__ = ()

    # ------------------------------------------------------------ a leader

    def lead(self, now: float) -> None:
        """Be the leader."""
        self.role, self.leader = Role.LEADER, self.id
        self.votes = {}
        self.confirmed, self.leases = NEVER, True
        self.heard = now  # so long a majority was with us
        self.progress = {}
        self.began = self.log.last + 1
        self._extend([Entry(self.began, self.term)])
        self.begin_round(now)

    def check_leads(self, what: str) -> None:
        """Raise unless this node leads."""
        if self.role is not Role.LEADER:
            raise NotLeaderError(f"{self.id} cannot {what}: it is a {self.role.value}", self.leader)
        if self.moving is not None:
            raise NotLeaderError(
                f"{self.id} cannot {what}: {self.moving[0]} is to lead", self.moving[0]
            )

    def add(self, entries: Iterable[Entry]) -> None:
        """Entries come into the log, and go to the others."""
        self._extend(entries)
        for node in self.progress:
            self.feed(node)

    def _extend(self, entries: Iterable[Entry]) -> None:
        self.log.append(list(entries))
        for node in self.log.members.all:
            if node != self.id and node not in self.progress:
                self.progress[node] = Progress(next=self.log.last)

    def feed(self, to: Id, *, beat: bool = False, empty: bool = False) -> None:
        """Send a node what it needs; `beat`: also if an answer is awaited; `empty`: also if that is nothing."""
        progress = self.progress[to]
        while True:
            previous = progress.next - 1
            term = self.log.term(previous)
            if progress.mode is not Mode.SNAPSHOT and term is None:
                progress.send_snapshot(self.log.snapshot)
            if progress.mode is Mode.SNAPSHOT:
                self._feed_snapshot(to, progress, beat=beat)
                return
            assert term is not None
            if progress.mode is Mode.PROBE:
                if progress.paused and not beat:
                    return
                entries = self.log.after(previous, self.settings.append_bytes)
                progress.paused = True
            elif len(progress.flight) < self.settings.window:
                entries = self.log.after(previous, self.settings.append_bytes)
                if entries:
                    progress.next = entries[-1].index + 1
                    progress.flight.append(entries[-1].index)
            else:
                entries = ()
            if not entries and not empty and not beat:
                return
            told = Append(self.term, previous, term, entries, self.commit, self.round)
            self.early.append((to, told))
            if progress.mode is Mode.PROBE or not entries:
                return
            beat = empty = False

    def _feed_snapshot(self, to: Id, progress: Progress, *, beat: bool) -> None:
        snapshot = progress.snapshot
        assert snapshot is not None
        if progress.paused and not beat:
            return
        progress.paused = True
        data = snapshot.data[progress.offset : progress.offset + self.settings.chunk]
        about = replace(snapshot, data=b"")
        size = len(snapshot.data)
        self.early.append((to, Install(self.term, about, progress.offset, data, size, self.round)))

    def heard_from(self, sender: Id, answer: Appended, now: float) -> None:
        """A follower has taken entries; or not."""
        progress = self.progress.get(sender)
        if self.role is not Role.LEADER or progress is None:
            return
        if answer.ok:
            if progress.has(min(answer.index, self.log.last)):
                self.advance(now)
        elif progress.mode is not Mode.SNAPSHOT and self._is_news(progress, answer):
            progress.probe(self.log.fits(answer.hint, answer.hint_term) + 1)
        self.answered(sender, answer.round, now)
        if sender in self.progress:
            self.feed(sender)

    @staticmethod
    def _is_news(progress: Progress, answer: Appended) -> bool:
        """Whether what a follower has not taken says something new of its log."""
        if progress.mode is Mode.STREAM:
            return answer.index > progress.match
        return answer.index == progress.next - 1

    def has_piece(self, sender: Id, answer: Installing, now: float) -> None:
        """A follower has a piece of a snapshot."""
        progress = self.progress.get(sender)
        if self.role is not Role.LEADER or progress is None:
            return
        snapshot = progress.snapshot
        if snapshot is not None and snapshot.index == answer.index:
            # What it has already said starts nothing: else each heartbeat, which sends a piece again, would start a
            # further row of pieces beside the first. If it has lost some, the next heartbeat goes on from there.
            progress.paused = progress.paused and answer.offset <= progress.offset
            progress.offset = min(answer.offset, len(snapshot.data))
        self.answered(sender, answer.round, now)
        if sender in self.progress:
            self.feed(sender)

    def advance(self, now: float) -> None:
        """See what is committed by now."""
        has = {node: progress.match for node, progress in self.progress.items()}
        has[self.id] = self.log.durable
        reached = self.agreed(has)
        if reached <= self.commit or self.log.term(reached) != self.term:
            return
        self.commit = reached
        for node in self.progress:
            self.feed(node, empty=True)
        if self.log.changed_at <= reached:
            members = self.log.members
            self.progress = {n: p for n, p in self.progress.items() if n in members.all}
            if self.id not in members.voters:
                self.follow(self.term, None, now)
                return
        self.serve_reads(now)

    def serve_reads(self, now: float) -> None:
        """Reads may have waited for it."""
        raise NotImplementedError

    def begin_round(self, now: float) -> None:
        """Ask all others whether we still lead."""
        raise NotImplementedError

    def answered(self, sender: Id, round: int, now: float) -> None:
        """A node has answered a round."""
        raise NotImplementedError

    # ------------------------------------------------------------ a follower

    def hear(self, leader: Id, now: float) -> None:
        """A leader of our term is there."""
        if self.role is Role.LEADER:
            raise ProtocolError(f"{leader} and {self.id} both lead in term {self.term}")
        if self.role is not Role.FOLLOWER or self.leader != leader:
            self.follow(self.term, leader, now)
        self.heard = now
        self.wait_for_election(now)

    def append(self, sender: Id, told: Append, now: float) -> None:
        """Take entries of the leader."""
        self.hear(sender, now)
        log, previous = self.log, told.prev_index
        if previous < self.commit:
            # All that is committed is the leader's as well; what it sends before that we have.
            entries = tuple(e for e in told.entries if e.index > self.commit)
            if not entries:
                self._took(sender, told, self.commit)
                return
            previous = self.commit
        elif log.has(previous, told.prev_term):
            entries = told.entries
        else:
            hint = log.fits(previous, told.prev_term)
            term = log.term(hint) or 0
            self.say(sender, Appended(self.term, False, previous, told.round, hint, term))
            return
        self._take(entries)
        last = previous + len(entries)
        self.commit = max(self.commit, min(told.commit, last))
        self._took(sender, told, last)

    def _take(self, entries: tuple[Entry, ...]) -> None:
        log = self.log
        for at, entry in enumerate(entries):
            if log.has(entry.index, entry.term):
                continue
            if entry.index <= self.commit:
                raise ProtocolError(f"{self.id} is to forget entry {entry.index}, committed")
            if entry.index <= log.last:
                log.cut(entry.index)
            log.append(entries[at:])
            return

    def _took(self, sender: Id, told: Append, last: int) -> None:
        self.say(sender, Appended(self.term, True, last, told.round))

    def install(self, sender: Id, told: Install, now: float) -> None:
        """Take a piece of a snapshot."""
        self.hear(sender, now)
        snapshot = told.snapshot
        if snapshot.index <= self.commit:
            self.incoming = None
            self.say(sender, Appended(self.term, True, self.commit, told.round))
            return
        # Two leaders may write the same snapshot in different words, so pieces are of one leader.
        source = sender, told.term, snapshot, told.size
        if self.incoming is None or self.incoming[0] != source:
            self.incoming = source, []
        pieces = self.incoming[1]
        have = sum(map(len, pieces))
        if told.offset == have and (told.data or not told.size):
            pieces.append(told.data)
            have += len(told.data)
        if have < told.size:
            self.say(sender, Installing(self.term, snapshot.index, have, told.round))
            return
        self.incoming = None
        if self.log.has(snapshot.index, snapshot.term):
            self.commit = snapshot.index  # the entries are here; they need not be replaced
        else:
            whole = replace(snapshot, data=b"".join(pieces))
            self.log.restore(whole)
            self.commit = self.applied = snapshot.index
            self.restoring = whole
        self.say(sender, Appended(self.term, True, snapshot.index, told.round))
