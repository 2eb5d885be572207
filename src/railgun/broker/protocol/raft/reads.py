"""Linearizable reads without an entry in the log: they see everything committed before they began.

1. A leader answers with the index it knows to be committed, once it has committed an entry of its own term: before that
   it may not know of everything its predecessors committed.
2. It must still lead when a read begins. Heartbeats are sent in *rounds*; a round that began after the read and was
   answered by a majority proves it. Reads that come meanwhile wait for the next round, together.
3. A *lease* saves the round: nodes that answered elect no other leader for the time `election` after they heard from
   this one. For a shorter time after the round began, the leader need not ask. It has no lease once it has told another
   node to campaign.
4. The same rounds show a leader that it has lost its majority: then it stops leading.
5. Followers ask the leader, and wait until they have applied as much.
"""

from __future__ import annotations

from railgun.broker.protocol.raft.messages import AskRead, Id, ReadAt
from railgun.broker.protocol.raft.replication import Replication
from railgun.broker.protocol.raft.state import Role


class Reads(Replication):
    """The part of the machine that answers reads, and knows whether it still leads."""

    __slots__ = ()

    def read(self, number: int, now: float) -> None:
        """Begin a read; `Ready.reads` will have its result under `number`."""
        if self.role is Role.LEADER:
            self._wait(number, None, now)
        elif self.leader is not None:
            self.send_late(self.leader, AskRead(self.term, number))
        else:
            self.reads.append((number, None))

    def handle_read_request(self, sender: Id, request: AskRead, now: float) -> None:
        """Answer another node's request to read."""
        if self.role is Role.LEADER:
            self._wait(request.number, sender, now)
        else:
            self.send_late(sender, ReadAt(self.term, request.number, None))

    def handle_read_at(self, answer: ReadAt) -> None:
        """Handle the leader's answer to a read of this node."""
        self.reads.append((answer.number, answer.index))

    def _wait(self, number: int, requester: Id | None, now: float) -> None:
        self.waiting.append((number, requester))
        self.serve_reads(now)

    def serve_reads(self, now: float) -> None:
        """Answer the waiting reads if there is a lease; otherwise begin a round for them, unless one is in progress."""
        if not self.waiting or self.commit < self.began:
            return
        if self.has_lease(now):
            waiting, self.waiting = self.waiting, []
            for number, requester in waiting:
                self.answer_read(number, requester, self.commit)
        elif not self.pending:
            self.begin_round(now)

    def has_lease(self, now: float) -> bool:
        """Return whether no other node can be elected yet."""
        settings = self.settings
        if settings.lease is None or not settings.check_quorum or not self.leases:
            return False
        return now < self.confirmed + settings.lease

    def begin_round(self, now: float) -> None:
        """Send a heartbeat to all nodes, to confirm that this node still leads."""
        self.round += 1
        self.rounds.append((self.round, now))
        self.beat = now + self.settings.heartbeat
        if self.commit >= self.began:
            self.pending += [(self.round, self.commit, *waiting) for waiting in self.waiting]
            self.waiting = []
        for node in self.progress:
            self.feed(node, beat=True)
        self._confirm(now)

    def handle_round_answer(self, sender: Id, round: int, now: float) -> None:
        """Record that a node has answered a round."""
        progress = self.progress.get(sender)
        if progress is not None and round > progress.round:
            progress.round = round
            self._confirm(now)

    def _confirm(self, now: float) -> None:
        answers = {node: progress.round for node, progress in self.progress.items()}
        answers[self.id] = self.round
        reached = self.majority_value(answers)
        while self.rounds and self.rounds[0][0] <= reached:
            _, self.confirmed = self.rounds.pop(0)
            self.heard = max(self.heard, self.confirmed)
        while self.pending and self.pending[0][0] <= reached:
            _, index, number, requester = self.pending.pop(0)
            self.answer_read(number, requester, index)
        if self.waiting and not self.pending:
            self.serve_reads(now)

    def stop_without_majority(self, now: float) -> None:
        """Stop leading if no majority has answered within the election timeout."""
        if self.settings.check_quorum and now >= self.heard + self.settings.election:
            self.follow(self.term, None, now)
