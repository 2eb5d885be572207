"""Log replication: the log of the leader is copied to all nodes.

1. A leader changes its log only by adding entries at the end. It begins its term with an entry of that term.
2. A node takes entries if it has the entry before them. Otherwise it answers where its log may agree, and the leader
   goes back to that place. Entries of a follower that differ from the leader's are cut.
3. An entry is *committed* when a majority of voters has it on disk, and it is of the leader's own term; all entries
   before it are committed with it. Entries of earlier terms may be on a majority and be lost all the same.
4. A follower counts entries as committed only up to where its log is known to equal the leader's.
5. Entries are sent ahead of answers, within a window. A heartbeat names the last entry sent, so the loss of a message
   is noticed.
6. A node that needs entries no longer in the log gets a snapshot, in pieces; each piece is sent when the one before has
   arrived.
7. A leader that a change of members removed leads until the change is committed.
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
    """The part of the machine that replicates the log."""

    __slots__ = ()

    # ------------------------------------------------------------ a leader

    def lead(self, now: float) -> None:
        """Become the leader, and begin the term with an entry of its own."""
        self.role, self.leader = Role.LEADER, self.id
        self.votes = {}
        self.confirmed, self.leases = NEVER, True
        self.heard = now  # a majority has just voted for this node
        self.progress = {}
        self.began = self.log.last + 1
        self._extend([Entry(self.began, self.term)])
        self.begin_round(now)

    def check_leads(self, request: str) -> None:
        """Raise `NotLeaderError` unless this node leads and is not handing over. `request` is for the error text."""
        if self.role is not Role.LEADER:
            raise NotLeaderError(
                f"{self.id} cannot {request}: it is a {self.role.value}", self.leader
            )
        if self.moving is not None:
            raise NotLeaderError(
                f"{self.id} cannot {request}: it hands over to {self.moving[0]}", self.moving[0]
            )

    def add(self, entries: Iterable[Entry]) -> None:
        """Add entries to the log and send them to all nodes."""
        self._extend(entries)
        for node in self.progress:
            self.feed(node)

    def _extend(self, entries: Iterable[Entry]) -> None:
        self.log.append(list(entries))
        for node in self.log.members.all:
            if node != self.id and node not in self.progress:
                self.progress[node] = Progress(next=self.log.last)

    def feed(self, to: Id, *, beat: bool = False, empty: bool = False) -> None:
        """Send a node the entries or the snapshot it needs, as far as its window allows.

        `beat`: send even while an answer is awaited. `empty`: send even if there are no entries.
        """
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
            message = Append(self.term, previous, term, entries, self.commit, self.round)
            self.early.append((to, message))
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
        header = replace(snapshot, data=b"")
        size = len(snapshot.data)
        self.early.append((to, Install(self.term, header, progress.offset, data, size, self.round)))

    def handle_appended(self, sender: Id, answer: Appended, now: float) -> None:
        """Handle the answer of a follower to entries."""
        progress = self.progress.get(sender)
        if self.role is not Role.LEADER or progress is None:
            return
        if answer.ok:
            if progress.has(min(answer.index, self.log.last)):
                self.advance(now)
        elif progress.mode is not Mode.SNAPSHOT and self._is_new_refusal(progress, answer):
            progress.probe(self.log.last_possible_match(answer.hint, answer.hint_term) + 1)
        self.handle_round_answer(sender, answer.round, now)
        if sender in self.progress:
            self.feed(sender)

    @staticmethod
    def _is_new_refusal(progress: Progress, answer: Appended) -> bool:
        """Return whether a follower's refusal says something new about its log, and is not outdated."""
        if progress.mode is Mode.STREAM:
            return answer.index > progress.match
        return answer.index == progress.next - 1

    def handle_installing(self, sender: Id, answer: Installing, now: float) -> None:
        """Handle the answer of a follower to a piece of a snapshot."""
        progress = self.progress.get(sender)
        if self.role is not Role.LEADER or progress is None:
            return
        snapshot = progress.snapshot
        if snapshot is not None and snapshot.index == answer.index:
            # A repeated answer sends no further piece: otherwise each heartbeat, which sends a piece again, would
            # start a second sequence of pieces. If the follower lost pieces, the next heartbeat goes on from there.
            progress.paused = progress.paused and answer.offset <= progress.offset
            progress.offset = min(answer.offset, len(snapshot.data))
        self.handle_round_answer(sender, answer.round, now)
        if sender in self.progress:
            self.feed(sender)

    def advance(self, now: float) -> None:
        """Commit entries that a majority has on disk, and tell the followers."""
        matches = {node: progress.match for node, progress in self.progress.items()}
        matches[self.id] = self.log.durable
        reached = self.majority_value(matches)
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
        """Answer reads that waited for a commit; `Reads` implements it."""
        raise NotImplementedError

    def begin_round(self, now: float) -> None:
        """Send a heartbeat to all nodes, to confirm that this node still leads; `Reads` implements it."""
        raise NotImplementedError

    def handle_round_answer(self, sender: Id, round: int, now: float) -> None:
        """Record that a node has answered a round; `Reads` implements it."""
        raise NotImplementedError

    # ------------------------------------------------------------ a follower

    def hear_leader(self, leader: Id, now: float) -> None:
        """Record that the leader of this term is alive, and follow it."""
        if self.role is Role.LEADER:
            raise ProtocolError(f"{leader} and {self.id} both lead in term {self.term}")
        if self.role is not Role.FOLLOWER or self.leader != leader:
            self.follow(self.term, leader, now)
        self.heard = now
        self.wait_for_election(now)

    def append(self, sender: Id, message: Append, now: float) -> None:
        """Take entries from the leader, or answer where the logs may agree."""
        self.hear_leader(sender, now)
        log, previous = self.log, message.prev_index
        if previous < self.commit:
            # The leader has every committed entry, so those it sends up to there are the ones in this log.
            entries = tuple(e for e in message.entries if e.index > self.commit)
            if not entries:
                self._confirm_append(sender, message, self.commit)
                return
            previous = self.commit
        elif log.has(previous, message.prev_term):
            entries = message.entries
        else:
            hint = log.last_possible_match(previous, message.prev_term)
            term = log.term(hint) or 0
            self.send_late(sender, Appended(self.term, False, previous, message.round, hint, term))
            return
        self._take(entries)
        last = previous + len(entries)
        self.commit = max(self.commit, min(message.commit, last))
        self._confirm_append(sender, message, last)

    def _take(self, entries: tuple[Entry, ...]) -> None:
        log = self.log
        for at, entry in enumerate(entries):
            if log.has(entry.index, entry.term):
                continue
            if entry.index <= self.commit:
                raise ProtocolError(f"{self.id} would cut entry {entry.index}, which is committed")
            if entry.index <= log.last:
                log.cut(entry.index)
            log.append(entries[at:])
            return

    def _confirm_append(self, sender: Id, message: Append, last: int) -> None:
        self.send_late(sender, Appended(self.term, True, last, message.round))

    def install(self, sender: Id, message: Install, now: float) -> None:
        """Take a piece of a snapshot; restore the snapshot when it is complete."""
        self.hear_leader(sender, now)
        snapshot = message.snapshot
        if snapshot.index <= self.commit:
            self.incoming = None
            self.send_late(sender, Appended(self.term, True, self.commit, message.round))
            return
        # Two leaders may encode the same snapshot differently, so all pieces must come from one leader.
        source = sender, message.term, snapshot, message.size
        if self.incoming is None or self.incoming[0] != source:
            self.incoming = source, []
        pieces = self.incoming[1]
        have = sum(map(len, pieces))
        if message.offset == have and (message.data or not message.size):
            pieces.append(message.data)
            have += len(message.data)
        if have < message.size:
            self.send_late(sender, Installing(self.term, snapshot.index, have, message.round))
            return
        self.incoming = None
        if self.log.has(snapshot.index, snapshot.term):
            self.commit = snapshot.index  # the log already has these entries
        else:
            whole = replace(snapshot, data=b"".join(pieces))
            self.log.restore(whole)
            self.commit = self.applied = snapshot.index
            self.restoring = whole
        self.send_late(sender, Appended(self.term, True, snapshot.index, message.round))
