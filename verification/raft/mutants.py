"""Mutants of `broker.protocol.raft` and of its driver: one rule changed, which must be found.

The exploration (`model`) of a case finds the change, or the simulation (`world`): a seed that shows it, and
other seeds if the schedule of that seed has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from railgun.broker.protocol.raft.machine import Raft
from railgun.broker.protocol.raft.messages import (
    Append,
    Appended,
    AskVote,
    Entry,
    Id,
    Install,
    Members,
    Vote,
)
from railgun.broker.protocol.raft.progress import Mode
from railgun.broker.protocol.raft.state import Role
from verification.mutation import Verdict, hunt_seeds, registrar, verdict_of
from verification.raft.model import Case, explore
from verification.raft.world import Habits, simulate

Kind = TypeVar("Kind", bound=type[Raft])

MUTANTS: dict[str, tuple[type[Raft], Habits, int | Case]] = {}
"""The mutants: the changed rule, the machine, the driver, and a seed or a case that shows the violation."""


def mutant(shows: int | Case) -> Callable[[Kind], Kind]:
    """Register a mutant under the first line of its docstring; the seed or case `shows` the violation."""
    return registrar(MUTANTS, lambda kind: (kind, Habits(), shows))


def hunt(name: str, seeds: int = 1_000) -> Verdict:
    """Explore the case of the mutant called `name`, or simulate its seed and then up to `seeds` others."""
    kind, habits, shows = MUTANTS[name]
    if isinstance(shows, Case):
        return verdict_of(name, explore(shows, kind, habits))
    return hunt_seeds(name, (shows, *range(seeds)), lambda seed: simulate(seed, kind, habits))


# ---------------------------------------------------------------- the driver

MUTANTS["Messages are sent before what they are about is on disk"] = (
    Raft,
    Habits(waits_for_disk=False),
    160,
)
MUTANTS["The vote is not kept"] = Raft, Habits(keeps_vote=False), Case("110", crashes="001")


# ---------------------------------------------------------------- elections


@mutant(Case("110"))
class VotesTwice(Raft):
    """A node votes for every candidate of a term."""

    __slots__ = ()

    def handle_vote_request(self, sender: Id, request: AskVote, now: float) -> None:
        if not request.pre:
            self.vote = None
        super().handle_vote_request(sender, request, now)


@mutant(Case("110"))
class VotesForAnybody(Raft):
    """A node votes for candidates that lack entries it has."""

    __slots__ = ()

    def _is_up_to_date(self, request: AskVote) -> bool:
        return True


@mutant(54)
class ComparesLengths(Raft):
    """The longer log wins, whatever its last term."""

    __slots__ = ()

    def _is_up_to_date(self, request: AskVote) -> bool:
        return request.last_index >= self.log.last


@mutant(318)
class CountsItselfAtOnce(Raft):
    """A candidate's own vote counts before it is on disk."""

    __slots__ = ()

    def _start_election(self, now: float, *, transfer: bool = False) -> None:
        super()._start_election(now, transfer=transfer)
        self.count_own_vote(now)


@mutant(41)
class CountsLearners(Raft):
    """Votes of learners count."""

    __slots__ = ()

    def _count_votes(self, now: float) -> None:
        if self.role is Role.CANDIDATE and sum(self.votes.values()) >= self.log.members.majority:
            self.lead(now)
        else:
            super()._count_votes(now)


@mutant(13)
class TakesPreVotesForVotes(Raft):
    """A pre-vote counts as a vote."""

    __slots__ = ()

    def voted(self, sender: Id, vote: Vote, now: float) -> None:
        if vote.granted and self.role is Role.CANDIDATE:
            self.votes[sender] = True
            self._count_votes(now)
        else:
            super().voted(sender, vote, now)


@mutant(0)
class ForgetsItsTerm(Raft):
    """A node that hears of a later term keeps the vote of its own."""

    __slots__ = ()

    def follow(self, term: int, leader: Id | None, now: float) -> None:
        vote = self.vote
        super().follow(term, leader, now)
        self.vote = vote


# ---------------------------------------------------------------- replication


class CommitsEarlierTerms(Raft):
    """Entries of earlier terms are committed by counting. (Chance hardly shows this: a test does.)"""

    __slots__ = ()

    def advance(self, now: float) -> None:
        has = {node: progress.match for node, progress in self.progress.items()}
        has[self.id] = self.log.durable
        reached = self.majority_value(has)
        if reached > self.commit and self.log.term(reached) != self.term:
            self.commit = reached
        super().advance(now)


@mutant(9)
class CutsWhatFits(Raft):
    """A follower cuts its log behind every message, also behind an old one."""

    __slots__ = ()

    def _take(self, entries: tuple[Entry, ...]) -> None:
        super()._take(entries)
        if entries and entries[-1].index < self.log.last and entries[-1].index >= self.commit:
            self.log.cut(entries[-1].index + 1)


@mutant(12)
class NeverCuts(Raft):
    """A follower keeps entries that differ from the leader's log."""

    __slots__ = ()

    def _take(self, entries: tuple[Entry, ...]) -> None:
        super()._take(tuple(entry for entry in entries if entry.index > self.log.last))


@mutant(1)
class TakesAnything(Raft):
    """A follower takes entries though it lacks the one before them."""

    __slots__ = ()

    def append(self, sender: Id, message: Append, now: float) -> None:
        term = self.log.term(message.prev_index)
        if term is not None and message.prev_index >= self.commit:
            message = Append(
                message.term,
                message.prev_index,
                term,
                message.entries,
                message.commit,
                message.round,
            )
        super().append(sender, message, now)


@mutant(2)
class ThinksItHasMore(Raft):
    """A leader takes sent entries for entries that a follower has."""

    __slots__ = ()

    def handle_appended(self, sender: Id, answer: Appended, now: float) -> None:
        progress = self.progress.get(sender)
        if progress is not None and answer.ok and progress.mode is Mode.STREAM:
            answer = Appended(answer.term, True, progress.next - 1, answer.round)
        super().handle_appended(sender, answer, now)


@mutant(8)
class CountsLearnersLogs(Raft):
    """Entries of learners count like entries of voters."""

    __slots__ = ()

    def majority_value(self, values: dict[Id, int]) -> int:
        reached = sorted(values.values(), reverse=True)
        majority = self.log.members.majority
        return reached[majority - 1] if len(reached) >= majority else 0


@mutant(30)
class NoticesNoLoss(Raft):
    """Heartbeats name the follower's known entries, so a lost entry is never noticed."""

    __slots__ = ()

    def feed(self, to: Id, *, beat: bool = False, empty: bool = False) -> None:
        progress = self.progress[to]
        if beat and progress.mode is Mode.STREAM and self.log.term(progress.match) is not None:
            term = self.log.term(progress.match)
            assert term is not None
            message = Append(self.term, progress.match, term, (), self.commit, self.round)
            self.early.append((to, message))
        else:
            super().feed(to, beat=beat, empty=empty)


@mutant(8)
class MixesPieces(Raft):
    """Pieces of the snapshots of two leaders are combined."""

    __slots__ = ()

    def install(self, sender: Id, message: Install, now: float) -> None:
        if self.incoming is not None and self.incoming[0][2] == message.snapshot:
            self.incoming = (sender, message.term, message.snapshot, message.size), self.incoming[1]
        super().install(sender, message, now)


# ---------------------------------------------------------------- reads


@mutant(33)
class ReadsAtOnce(Raft):
    """A leader answers reads without asking whether it still leads."""

    __slots__ = ()

    def has_lease(self, now: float) -> bool:
        return True


@mutant(2)
class ReadsBeforeItKnows(Raft):
    """A leader answers reads before it has committed an entry of its own term."""

    __slots__ = ()

    def lead(self, now: float) -> None:
        super().lead(now)
        self.began = 0


@mutant(430)
class KeepsItsLease(Raft):
    """A leader that transfers its leadership keeps its lease."""

    __slots__ = ()

    def send_campaign(self, to: Id) -> None:
        super().send_campaign(to)
        self.leases = True


@mutant(492)
class VotesUnderALeader(Raft):
    """A node that hears of a leader votes for others all the same, while leases are used."""

    __slots__ = ()

    def hears_leader(self, now: float) -> bool:
        return False


# ---------------------------------------------------------------- members


@mutant(8)
class ChangesTwice(Raft):
    """A change of members begins before the one before is committed."""

    __slots__ = ()

    def change(self, members: Members, now: float) -> tuple[int, int]:
        self.check_leads("change the members")
        if not members.voters or len(set(self.log.members.voters) ^ set(members.voters)) > 1:
            return super().change(members, now)
        self.add([Entry(self.log.last + 1, self.term, members=members)])
        return self.term, self.log.last


@mutant(28)
class ChangesManyAtOnce(Raft):
    """Several voters change at once."""

    __slots__ = ()

    def change(self, members: Members, now: float) -> tuple[int, int]:
        self.check_leads("change the members")
        if self.commit < self.began or self.log.changed_at > self.commit:
            return super().change(members, now)
        same_members = Members(tuple(sorted(members.all)))
        self.add([Entry(self.log.last + 1, self.term, members=same_members)])
        return self.term, self.log.last
