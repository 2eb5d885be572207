"""Explore every interleaving of a few Raft nodes, with the production machine of `broker.protocol.raft`.

The possible events of a case are counted for each node: how often it may time out and campaign, propose, send
heartbeats, crash, or lose all messages for a while. Writes take time: a crash before the sync loses data that was
handed out to be written. Links keep their order. There is no clock: a node that may campaign may do so at any moment,
so what is found to be safe is safe whatever clocks do. What depends on clocks (leases, check-quorum), members that
change, snapshots, and links that lose and reorder, are the simulation's part (`world`).

Proven of every reachable state, for each two nodes:

1. a term never has more than one leader;
2. entries of one index and term are the same, and so are all entries before them;
3. an elected node has all entries that were committed in earlier terms;
4. the entries that both have committed are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from railgun.broker.protocol.raft.machine import Raft
from railgun.broker.protocol.raft.messages import Entry, Hard, Members, Ready, Settings, Snapshot
from railgun.broker.protocol.raft.state import Role
from railgun.errors import ProtocolError
from verification.explorer import Exploration, Explorer, Plain, State, Step
from verification.raft.world import Habits
from verification.rescale.model import Violation

Sent = list[tuple[int, Any]]
NAMES: Final = "abcde"
NOW: Final = 0.0


@dataclass(frozen=True)
class Case:
    """The possible events: a digit for each node, so `timeouts="201"`: a twice, b never, c once."""

    timeouts: str = "11"
    proposals: str = "00"
    beats: str = "00"
    crashes: str = "00"
    deaf: str = "00"
    pre_vote: bool = False

    def __str__(self) -> str:
        parts = [f"{len(self.timeouts)} nodes", f"timeouts {self.timeouts}"]
        for name in ("proposals", "beats", "crashes", "deaf"):
            if int(getattr(self, name)):
                parts.append(f"{name} {getattr(self, name)}")
        return ", ".join([*parts, *(["pre-vote"] if self.pre_vote else [])])


class RaftNode(Plain):
    """One node, its disk, and its history for the proof."""

    __slots__ = (
        "beats", "case", "committed", "crashes", "deaf", "elected", "entries", "habits", "hard",
        "hears", "index", "kind", "proposals", "raft", "timeouts", "writing",
    )  # fmt: skip
    constant = ("case", "habits", "kind")

    def __init__(self, index: int, case: Case, kind: type[Raft], habits: Habits) -> None:
        self.index, self.case, self.kind, self.habits = index, case, kind, habits
        self.timeouts, self.proposals, self.beats, self.crashes, self.deaf = (
            int(digits[index]) if index < len(digits) else 0
            for digits in (case.timeouts, case.proposals, case.beats, case.crashes, case.deaf)
        )
        self.hears = True
        self.hard, self.entries = Hard(), list[Entry]()
        self.elected: list[
            tuple[int, tuple[int, ...]]
        ] = []  # the terms that the node led, and its log then
        self.committed: list[
            tuple[Entry, int]
        ] = []  # entries, each with a term in which its commit was known
        self._start()

    def _start(self) -> None:
        nodes = len(self.case.timeouts)
        settings = Settings(
            lease=None, check_quorum=False, pre_vote=self.case.pre_vote, append_bytes=1
        )
        hard = self.hard if self.habits.keeps_vote else Hard(self.hard.term)
        self.raft: Raft = self.kind(
            NAMES[self.index],
            settings,
            NOW,
            snapshot=Snapshot(0, 0, Members(tuple(NAMES[:nodes]))),
            hard=hard,
            entries=self.entries,
        )
        self.writing: Ready | None = None

    def events(self) -> Sequence[str]:
        events = []
        leads = self.raft.role is Role.LEADER
        if self.timeouts and not leads:
            events.append("campaign")
        if self.proposals and leads:
            events.append("propose")
        if self.beats and leads:
            events.append("send heartbeats")
        if self.writing is not None:
            events.append("sync")
        if self.crashes:
            events.append("crash")
        if self.deaf:
            events.append("hear nothing" if self.hears else "hear again")
        return events

    def step(self, event: str) -> Sent:
        raft = self.raft
        match event:
            case "campaign":
                self.timeouts -= 1
                raft.campaign(NOW)
            case "propose":
                self.proposals -= 1
                raft.propose([b"%d" % raft.term], NOW)
            case "send heartbeats":
                self.beats -= 1
                raft.begin_round(NOW)
            case "sync":
                assert self.writing is not None
                return self._written(self.writing)
            case "crash":
                self.crashes -= 1
                self._start()
            case "hear nothing":
                self.hears = False
            case "hear again":
                self.deaf -= 1
                self.hears = True
        return self._do()

    def deliver(self, sender: int, message: Any) -> Sent:
        if not self.hears:
            return []
        try:
            self.raft.step(NAMES[sender], message, NOW)
        except ProtocolError as error:
            raise Violation("the machine says", str(error)) from error
        return self._do()

    def _do(self) -> Sent:
        raft = self.raft
        if raft.role is Role.LEADER and all(term != raft.term for term, _ in self.elected):
            log = tuple(entry.term for entry in raft.log.entries[: raft.began - 1])
            self.elected.append((raft.term, log))
        if self.writing is not None or not raft.has_ready:
            return []
        ready = raft.ready()
        sent = self._sent(ready.early)
        if not self.habits.waits_for_disk:
            sent += self._sent(ready.late)
        if ready.must_sync:
            self.writing = ready
            return sent
        return sent + self._written(ready)

    def _written(self, ready: Ready) -> Sent:
        self.writing = None
        if ready.hard is not None:
            self.hard = ready.hard
        for entry in ready.entries:
            del self.entries[entry.index - 1 :]
            self.entries.append(entry)
        for entry in ready.committed[
            len(self.committed) - (self.raft.applied - len(ready.committed)) :
        ]:
            self.committed.append((entry, self.raft.term))
        self.raft.persisted(ready, NOW)
        late = self._sent(ready.late) if self.habits.waits_for_disk else []
        return late + self._do()

    @staticmethod
    def _sent(messages: Sequence[tuple[str, Any]]) -> Sent:
        return [(NAMES.index(to), message) for to, message in messages]

    def holdings(self) -> int:
        """Return the terms this node has led: no other node may have led one of them."""
        return sum(1 << term for term, _ in self.elected)


class RaftExplorer(Explorer):
    """Compares each two nodes in every state."""

    def __init__(self, nodes: Sequence[RaftNode]) -> None:
        super().__init__(nodes, lambda _: None)
        self.pairs: dict[tuple[int, int], Violation | None] = {}

    def _follow(
        self, state: State, index: int, node: int, event: str | int, sender: int
    ) -> State | Violation:
        following = super()._follow(state, index, node, event, sender)
        if isinstance(following, Violation) or following[index] == node:
            return following
        for other in range(self.count):
            if other != index:
                pair = following[index], following[other]
                if pair not in self.pairs:
                    self.pairs[pair] = _compare(*(self.nodes[number] for number in pair))  # type: ignore[arg-type]
                violation = self.pairs[pair]
                if violation is not None:
                    return violation
        return following


def _compare(first: RaftNode, second: RaftNode) -> Violation | None:
    """Return the contradiction between two nodes, or None."""
    for mine, theirs in ((first, second), (second, first)):
        for term, log in mine.elected:
            for entry, committed_in in theirs.committed:
                if committed_in < term and log[entry.index - 1 : entry.index] != (entry.term,):
                    who, them = NAMES[mine.index], NAMES[theirs.index]
                    return Violation(
                        "incomplete leader",
                        f"{who} leads term {term} without {entry}, which {them} has committed",
                    )
    for (entry, _), (other, _) in zip(first.committed, second.committed, strict=False):
        if entry != other:
            return Violation("two values", f"{entry} and {other} are both committed")
    same = True
    for entry, other in zip(first.raft.log.entries, second.raft.log.entries, strict=False):
        if entry.term == other.term and not (same and entry == other):
            return Violation("logs differ", f"{entry} and {other}, or what is before them")
        same = same and entry == other
    return None


def explore(
    case: Case,
    kind: type[Raft] = Raft,
    habits: Habits | None = None,
    limit: int | None = None,
) -> Exploration:
    """Visit every state of a case."""
    nodes = [RaftNode(n, case, kind, habits or Habits()) for n in range(len(case.timeouts))]
    return RaftExplorer(nodes).run(limit=limit)


def story_lines(story: Sequence[Step]) -> list[str]:
    """Describe the steps of a story."""
    lines = []
    for step in story:
        if step.sender is None:
            lines.append(f"  {NAMES[step.node]}: {step.event}")
        else:
            lines.append(f"  {NAMES[step.sender]} → {NAMES[step.node]}: {step.message}")
    return lines


CASES: Final = (
    Case("22", crashes="10"),
    Case("21", proposals="11", crashes="10"),
    Case("21", proposals="10", beats="10", deaf="01"),
    Case("110"),
    Case("110", crashes="001"),
    Case("110", pre_vote=True),
)
"""The cases of every run."""
LARGE: Final = (
    Case("22", proposals="11", crashes="11"),
    Case("21", proposals="11", beats="11", deaf="10"),
    Case("110", proposals="100"),
    Case("101", crashes="100"),
    Case("201"),
)
"""Further cases for longer runs."""
