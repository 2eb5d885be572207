"""Elections: who leads in a term.

1. A node that hears of no leader for a while first asks whether it would be elected (*pre-vote*). Only if a majority
   says so does it begin a new term. So a node that was cut off, or removed, disturbs nobody.
2. A node votes for one candidate in a term, which has all that is in its own log or more. Its vote is on disk before
   anybody hears of it; so is a candidate's vote for itself before it counts.
3. A node that hears of a leader votes for nobody else (*check-quorum*), and a leader that no majority answers stops.
   Leases stand on that. A node that has just started does not know whether it heard of one, so it waits too.
4. Candidates that the leader itself has chosen are exempt from that.
5. Whoever hears of a higher term is a follower in it; who says something of a lower one is told.
"""

from __future__ import annotations

from railgun.broker.protocol.raft.messages import AskVote, Campaign, Id, Vote
from railgun.broker.protocol.raft.state import Role, State


class Elections(State):
    """The part of the machine that elects."""

    __slots__ = ()

    def campaign(self, now: float, *, transfer: bool = False) -> None:
        """Try to lead: the time has come, or the leader wants it."""
        self.wait_for_election(now)
        if self.role is Role.LEADER or not self.may_campaign:
            return
        if self.settings.pre_vote and not transfer:
            self.role, self.leader = Role.PRECANDIDATE, None
            self.votes = {self.id: True}
            self._ask(AskVote(self.term + 1, self.log.last, self.log.last_term, pre=True))
            self._count(now)
        else:
            self._stand(now, transfer=transfer)

    def _stand(self, now: float, *, transfer: bool = False) -> None:
        self.role, self.leader = Role.CANDIDATE, None
        self.term, self.vote = self.term + 1, self.id
        self.votes = {}  # our own counts when it is on disk
        self.wait_for_election(now)
        self._ask(AskVote(self.term, self.log.last, self.log.last_term, transfer=transfer))

    def lead_anew(self, now: float) -> None:
        """Another was chosen, and nothing came of it. What it was told may still come: no leases in this term any more.

        Who leads may let followers elect whom it likes: itself, in the next.
        """
        self.follow(self.term, None, now)
        self._stand(now, transfer=True)

    def _ask(self, question: AskVote) -> None:
        for voter in self.log.members.voters:
            if voter != self.id:
                self.say(voter, question)

    def asked_for_vote(self, sender: Id, asked: AskVote, now: float) -> None:
        """Somebody wants to be elected."""
        if asked.pre:
            granted = asked.term > self.term and self._is_up_to_date(asked)
            term = asked.term if granted else self.term
            self.say(sender, Vote(term, granted, pre=True))
            return
        granted = self.vote in (None, sender) and self._is_up_to_date(asked)
        if granted:
            self.vote = sender
            self.wait_for_election(now)
        self.say(sender, Vote(self.term, granted))

    def _is_up_to_date(self, asked: AskVote) -> bool:
        mine = self.log.last_term, self.log.last
        return (asked.last_term, asked.last_index) >= mine

    def voted(self, sender: Id, vote: Vote, now: float) -> None:
        """A vote for us, or not."""
        if vote.pre:
            if self.role is not Role.PRECANDIDATE or (vote.granted and vote.term != self.term + 1):
                return
        elif self.role is not Role.CANDIDATE:
            return
        self.votes[sender] = vote.granted
        self._count(now)

    def own_vote_is_safe(self, now: float) -> None:
        """Our vote for ourselves is on disk."""
        self.votes[self.id] = True
        self._count(now)

    def _count(self, now: float) -> None:
        members = self.log.members
        votes = [self.votes[voter] for voter in members.voters if voter in self.votes]
        if sum(votes) >= members.majority:
            if self.role is Role.PRECANDIDATE:
                self._stand(now)
            else:
                self.lead(now)
        elif votes.count(False) >= members.majority:
            self.follow(self.term, None, now)

    def lead(self, now: float) -> None:
        """Be the leader."""
        raise NotImplementedError

    def choose(self, to: Id) -> None:
        """Tell a node to lead. From now on followers may elect it whatever they heard of us."""
        self.leases = False
        self.early.append((to, Campaign(self.term)))
