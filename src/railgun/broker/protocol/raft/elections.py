"""Elections: which node leads in a term.

1. A node that hears of no leader for a while first asks whether it would be elected (*pre-vote*). Only if a majority
   agrees does it begin a new term. So a node that was cut off, or removed, disturbs no other.
2. A node votes for one candidate in a term, whose log must have all that the voter's log has, or more. The vote is on
   disk before it is sent; a candidate's vote for itself is on disk before it counts.
3. A node that hears of a leader votes for no other node (*check-quorum*), and a leader that no majority answers stops.
   Leases depend on both. A node that has just started does not know whether it heard of a leader, so it waits, too.
4. Candidates that the leader itself has chosen are exempt from rule 3.
5. A node that hears of a higher term becomes a follower in it; a node that sends a message of a lower term is told the
   current term.
"""

from __future__ import annotations

from railgun.broker.protocol.raft.messages import AskVote, Campaign, Id, Vote
from railgun.broker.protocol.raft.state import Role, State


class Elections(State):
    """The part of the machine that holds elections."""

    __slots__ = ()

    def campaign(self, now: float, *, transfer: bool = False) -> None:
        """Try to become leader, because the election timeout is over or the leader asked for it (`transfer`)."""
        self.wait_for_election(now)
        if self.role is Role.LEADER or not self.may_campaign:
            return
        if self.settings.pre_vote and not transfer:
            self.role, self.leader = Role.PRECANDIDATE, None
            self.votes = {self.id: True}
            self._ask(AskVote(self.term + 1, self.log.last, self.log.last_term, pre=True))
            self._count_votes(now)
        else:
            self._start_election(now, transfer=transfer)

    def _start_election(self, now: float, *, transfer: bool = False) -> None:
        self.role, self.leader = Role.CANDIDATE, None
        self.term, self.vote = self.term + 1, self.id
        self.votes = {}  # this node's own vote counts when it is on disk
        self.wait_for_election(now)
        self._ask(AskVote(self.term, self.log.last, self.log.last_term, transfer=transfer))

    def lead_in_new_term(self, now: float) -> None:
        """Lead in a new term, because a transfer failed after the other node was told to campaign.

        It may still campaign, so this term has no leases any more. A leader may let followers elect any node it
        chooses: here itself, in the next term.
        """
        self.follow(self.term, None, now)
        self._start_election(now, transfer=True)

    def _ask(self, question: AskVote) -> None:
        for voter in self.log.members.voters:
            if voter != self.id:
                self.send_late(voter, question)

    def handle_vote_request(self, sender: Id, request: AskVote, now: float) -> None:
        """Answer a request for a vote or a pre-vote."""
        if request.pre:
            granted = request.term > self.term and self._is_up_to_date(request)
            term = request.term if granted else self.term
            self.send_late(sender, Vote(term, granted, pre=True))
            return
        granted = self.vote in (None, sender) and self._is_up_to_date(request)
        if granted:
            self.vote = sender
            self.wait_for_election(now)
        self.send_late(sender, Vote(self.term, granted))

    def _is_up_to_date(self, request: AskVote) -> bool:
        own = self.log.last_term, self.log.last
        return (request.last_term, request.last_index) >= own

    def voted(self, sender: Id, vote: Vote, now: float) -> None:
        """Count a vote that was granted or refused."""
        if vote.pre:
            if self.role is not Role.PRECANDIDATE or (vote.granted and vote.term != self.term + 1):
                return
        elif self.role is not Role.CANDIDATE:
            return
        self.votes[sender] = vote.granted
        self._count_votes(now)

    def count_own_vote(self, now: float) -> None:
        """Count this node's vote for itself, now that it is on disk."""
        self.votes[self.id] = True
        self._count_votes(now)

    def _count_votes(self, now: float) -> None:
        members = self.log.members
        votes = [self.votes[voter] for voter in members.voters if voter in self.votes]
        if sum(votes) >= members.majority:
            if self.role is Role.PRECANDIDATE:
                self._start_election(now)
            else:
                self.lead(now)
        elif votes.count(False) >= members.majority:
            self.follow(self.term, None, now)

    def lead(self, now: float) -> None:
        """Become the leader; `Replication` implements it."""
        raise NotImplementedError

    def send_campaign(self, to: Id) -> None:
        """Tell a node to campaign. From now on followers may elect it even if they still hear of this leader."""
        self.leases = False
        self.early.append((to, Campaign(self.term)))
