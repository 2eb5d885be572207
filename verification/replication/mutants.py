"""Mutants of `broker.protocol.replication` and of its driver: one rule changed, which must be found.

The exploration (`model`) of a case finds the change, or the simulation (`world`): a seed that
shows it, and other seeds if the schedule of that seed has changed. The changes in `EQUAL` break no property;
docs/design/replication.md says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

from railgun.broker.protocol.replication import master as rules
from railgun.broker.protocol.replication.master import Master, Peer, Phase
from railgun.broker.protocol.replication.messages import (
    Command,
    CutHalf,
    Has,
    Id,
    Label,
    Push,
    PushGroups,
)
from railgun.broker.protocol.replication.replica import Replica
from railgun.broker.protocol.replication.standing import LOST, Standing, agree
from verification.mutation import Verdict, hunt_seeds, registrar, verdict_of
from verification.replication.model import Case, explore
from verification.replication.node import Habits
from verification.replication.world import simulate

Kind = TypeVar("Kind", bound=type[Master] | type[Replica])

MUTANTS: dict[str, tuple[Habits, int | Case]] = {}
"""The mutants: the changed rule, the behaviour of the nodes, and a seed or a case that shows the violation."""
EQUAL: dict[str, Habits] = {}
"""Changed rules that violate nothing."""
LOSS: Final = Case("abc", "c", warm=2, damages="010")
UNITS: Final = Case("ab", "ab", units="11", crashes="10")


def mutant(shows: int | Case | None) -> Callable[[Kind], Kind]:
    """Register a mutant under the first line of its docstring.

    The seed or case `shows` the violation; None: nothing shows one, and the mutant goes to `EQUAL`.
    """

    def habits(kind: Kind) -> Habits:
        return Habits(master=kind) if issubclass(kind, Master) else Habits(replica=kind)

    if shows is None:
        return registrar(EQUAL, habits)
    return registrar(MUTANTS, lambda kind: (habits(kind), shows))


def hunt(name: str, seeds: int = 1_000) -> Verdict:
    """Explore the case of the mutant called `name`, or simulate its seed and then up to `seeds` others."""
    habits, shows = MUTANTS[name]
    if isinstance(shows, Case):
        return verdict_of(name, explore(shows, habits))
    return hunt_seeds(name, (shows, *range(seeds)), lambda seed: simulate(seed, habits))


@contextmanager
def swapped(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace the attribute `name` of `owner` by `replacement` within the block."""
    before = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)


# ---------------------------------------------------------------- the driver

DRIVERS: Final[dict[str, tuple[Habits, int | Case]]] = {
    "A promise is forgotten in a crash": (Habits(keeps_promise=False), 158),
    "A standing is sent before the pending writes are on disk": (Habits(drains=False), 0),
    "A damaged copy keeps its label": (Habits(marks_loss=False), 35),
    "A master continues though it has missed an epoch": (Habits(goes_on_late=True), 15),
    "A master that has promised a later epoch continues": (Habits(stops=False), 0),
    "A promise for an older epoch counts for the next": (Habits(knows_sessions=False), 388),
    "A label is written before the messages before it": (Habits(in_order=False), 14),
    "The voters change again before the epoch is active": (Habits(waits_for_active=False), 25),
}
MUTANTS.update(DRIVERS)
EQUAL["A master that recovers does not ask the set that was active"] = Habits(asks_both=False)


# ---------------------------------------------------------------- what is best


@mutant(22)
class ChoosesTheLongest(Master):
    """The longest copy is chosen, whatever its label."""

    __slots__ = ()

    def _choose(self) -> list[Command]:
        with swapped(Standing, "rank", property(lambda s: (s.end, s.label))):
            return super()._choose()


@mutant(36)
class ChoosesByLabel(Master):
    """Any copy of the highest label is chosen, whatever its length."""

    __slots__ = ()

    def _choose(self) -> list[Command]:
        with swapped(Standing, "rank", property(lambda s: (s.label, -s.end))):
            return super()._choose()


@mutant(90)
class TrustsTheLost(Master):
    """A lost copy counts when a master gathers."""

    __slots__ = ()

    def _standings(self) -> dict[Id, Standing]:
        standings = {n: p.standing for n, p in self.peers.items() if p.standing and p.readable}
        standings[self.id] = self.copy.standing()
        return {n: replace(s, label=max(0, s.label)) for n, s in standings.items()}


@mutant(4)
class AsksAFew(Master):
    """A minority is enough to recover."""

    __slots__ = ()

    def _choose(self) -> list[Command]:
        sets = self.sets
        self.sets = [(self.id,) for _ in sets]
        try:
            return super()._choose()
        finally:
            self.sets = sets


@mutant(4)
class AsksNobody(Master):
    """A master takes its own copy for the best without asking others."""

    __slots__ = ()

    def begin(self) -> list[Command]:
        return self.go_on()


@mutant(LOSS)
class BelievesWhatIsLeft(Master):
    """A copy that loses messages while it is fetched from is fetched only to its new end."""

    __slots__ = ()

    def stands(self, node: Id, session: int, standing: Standing) -> list[Command]:
        if self.phase is Phase.FETCH and node == self._source:
            self._fetch_end = standing.end
            self.peers[node].standing = standing
            self.peers[node].turn += 1
            self._fetch_more()
            return self._label_if_whole()
        return super().stands(node, session, standing)


@mutant(4)
class TakesOldGroups(Master):
    """A master keeps its own groups."""

    __slots__ = ()

    def _standings(self) -> dict[Id, Standing]:
        return {
            n: s if n == self.id else replace(s, groups=(0, 0))
            for n, s in super()._standings().items()
        }


# ---------------------------------------------------------------- where copies agree


def _by_length(mine: Standing, other: Standing) -> int:
    return min(mine.end, other.end)


def _with_first(mine: Standing, other: Standing) -> int:
    return max(agree(mine, other), min(mine.first, other.end))


def _one_more(mine: Standing, other: Standing) -> int:
    return min(mine.end, other.end, agree(mine, other) + 1)


def _without_first(mine: Standing, other: Standing) -> int:
    theirs = dict(other.runs)
    return max((min(end, theirs[e]) for e, end in mine.runs if e in theirs), default=0)


class _Agrees(Master):
    """Mutants that compute another offset up to which copies agree."""

    __slots__ = ()
    how: Callable[[Standing, Standing], int] = staticmethod(agree)

    def _choose(self) -> list[Command]:
        with swapped(rules, "agree", self.how):
            return super()._choose()

    def _feed(self, peer: Peer, again: bool) -> None:
        with swapped(rules, "agree", self.how):
            super()._feed(peer, again)


@mutant(3)
class AgreesByLength(_Agrees):
    """Copies are taken for equal up to the shorter length."""

    __slots__ = ()
    how = staticmethod(_by_length)


@mutant(60)
class AgreesBeforeTheFirst(_Agrees):
    """Messages before the first one of the master are taken for equal."""

    __slots__ = ()
    how = staticmethod(_with_first)


@mutant(3)
class AgreesInOneMore(_Agrees):
    """Copies are taken for equal one message too far."""

    __slots__ = ()
    how = staticmethod(_one_more)


@mutant(53)
class ForgetsTheFirst(_Agrees):
    """Messages that a copy has trimmed are not taken for equal."""

    __slots__ = ()
    how = staticmethod(_without_first)


# ---------------------------------------------------------------- what is safe


@mutant(1555)
class CountsUnlabelled(Master):
    """Copies without the label count."""

    __slots__ = ()

    def has(self, node: Id, has: Has) -> list[Command]:
        return super().has(node, replace(has, labelled=True))


@mutant(None)
class SafeBeforeTheStart(Master):
    """Messages are safe before the start of the epoch is."""

    __slots__ = ()

    def _declare_safe(self) -> list[Command]:
        start, self.start = self.start, 0
        try:
            return super()._declare_safe()
        finally:
            self.start = start


@mutant(3)
class AFewAreEnough(Master):
    """A minority of the set makes a message safe."""

    __slots__ = ()

    def _majority_value(self, reached: dict[Id, int]) -> int | None:
        there = sorted((reached[n] for n in self.sets[0] if n in reached), reverse=True)
        need = max(0, len(self.sets[0]) // 2 - 1)
        return there[need] if len(there) > need else None


@mutant(21)
class CountsLearners(Master):
    """Copies of learners count as well."""

    __slots__ = ()

    def _majority_value(self, reached: dict[Id, int]) -> int | None:
        there = sorted(reached.values(), reverse=True)
        need = len(self.sets[0]) // 2
        return there[need] if len(there) > need else None


@mutant(None)
class CountsTheLost(Master):
    """The messages of a replica still count after the replica comes back without them."""

    __slots__ = ()

    def _feed(self, peer: Peer, again: bool) -> None:
        before = peer.end, peer.labelled, peer.groups
        super()._feed(peer, again)
        if peer.standing is not None and peer.standing.label == LOST:
            peer.end, peer.labelled, peer.groups = before


@mutant(158)
class CountsWhatIsTold(Master):
    """The claims of a replica in the middle of a session count as if they were on disk."""

    __slots__ = ()

    def _feed(self, peer: Peer, again: bool) -> None:
        super()._feed(peer, again=False)


@mutant(3)
class CountsOldGroups(Master):
    """Group changes count whatever their epoch."""

    __slots__ = ()

    def _declare_safe(self) -> list[Command]:
        before = {node: peer.groups for node, peer in self.peers.items()}
        for peer in self.peers.values():
            peer.groups = self.epoch, peer.groups[1]
        try:
            return super()._declare_safe()
        finally:
            for node, groups in before.items():
                self.peers[node].groups = groups


@mutant(None)
class HearsOldSessions(Master):
    """A master accepts messages of an old session."""

    __slots__ = ()

    def has(self, node: Id, has: Has) -> list[Command]:
        peer = self.peers.get(node)
        session = peer.session if peer is not None and peer.session is not None else has.session
        return super().has(node, replace(has, session=session))


@mutant(290)
class ActiveAtOnce(Master):
    """An epoch is active as soon as its master leads."""

    __slots__ = ()

    @property
    def active(self) -> bool:
        return self.phase is Phase.LEAD


@mutant(None)
class ActiveWithoutGroups(Master):
    """An epoch is active though no majority has its groups."""

    __slots__ = ()

    @property
    def active(self) -> bool:
        safe, self.safe_groups = self.safe_groups, 0
        try:
            return Master.active.__get__(self)  # type: ignore[no-any-return]
        finally:
            self.safe_groups = safe


# ---------------------------------------------------------------- feeding


@mutant(180)
class FeedsWhatIsGone(Master):
    """A replica that is behind the trimmed log is fed on."""

    __slots__ = ()

    def push(self, node: Id, end: int) -> Push | None:
        first, self.copy.first = self.copy.first, 0
        try:
            return super().push(node, end)
        finally:
            self.copy.first = first


@mutant(0)
class NeverSendsAll(Master):
    """States of groups are never sent completely."""

    __slots__ = ()

    def _feed(self, peer: Peer, again: bool) -> None:
        super()._feed(peer, again)
        peer.sent = self.copy.groups[1]


# ---------------------------------------------------------------- replicas


@mutant(18)
class LabelsAtOnce(Replica):
    """A replica is labelled before it has the messages before the start."""

    __slots__ = ()

    def _advance(self) -> list[Command]:
        commands = super()._advance()
        if self.start is not None and self.copy.label != self.epoch and not self._label_pending:
            self._label_pending = True
            commands.append(Label(self.epoch))
        return commands


@mutant(LOSS)
class ForgetsItsLoss(Replica):
    """A lost copy is labelled at the start of the epoch, like any other."""

    __slots__ = ()

    def _advance(self) -> list[Command]:
        master_safe, has = self._master_safe, self._has_groups
        self._has_groups = True
        if self.copy.label == LOST:
            self._master_safe = min(master_safe, self.start or 0)
        try:
            return super()._advance()
        finally:
            self._master_safe, self._has_groups = master_safe, has


@mutant(LOSS)
class ForgetsLostGroups(Replica):
    """A lost copy is labelled before its groups have arrived."""

    __slots__ = ()

    def _advance(self) -> list[Command]:
        has, self._has_groups = self._has_groups, True
        try:
            return super()._advance()
        finally:
            self._has_groups = has


@mutant(4)
class HearsWhatIsVoid(Replica):
    """A replica accepts messages that were sent before it reported its standing."""

    __slots__ = ()

    def pushed(self, push: Push) -> list[Command]:
        return super().pushed(replace(push, turn=self._turn))


@mutant(874)
class HearsOldMasters(Replica):
    """A replica accepts messages of any session."""

    __slots__ = ()

    def pushed(self, push: Push) -> list[Command]:
        return super().pushed(replace(push, session=self.session))


@mutant(105)
class SaysWhatIsNotOnDisk(Replica):
    """A replica reports messages that are not on its disk yet."""

    __slots__ = ()

    def _send_report(self) -> list[Command]:
        durable, self.copy.durable = self.copy.durable, self.copy.end
        try:
            return super()._send_report()
        finally:
            self.copy.durable = durable


@mutant(118)
class KeepsWhatTheMasterHasNot(Replica):
    """A replica does not cut off messages that the master does not have."""

    __slots__ = ()

    def pushed(self, push: Push) -> list[Command]:
        if not push.runs and not push.anew and push.base < self.copy.end:
            self.start, self._master_safe, self._master_first = push.start, push.safe, push.first
            return self._advance() + self._send_report()
        return super().pushed(push)


@mutant(21)
class ShowsTooMuch(Replica):
    """A replica shows all its messages, not only safe ones."""

    __slots__ = ()

    def _advance(self) -> list[Command]:
        self._master_safe = max(self._master_safe, self.copy.durable)
        return super()._advance()


@mutant(None)
class TakesGaps(Replica):
    """A replica accepts changes of groups behind a gap."""

    __slots__ = ()

    def pushed_groups(self, push: PushGroups) -> list[Command]:
        if (push.session, push.turn) == (self.session, self._turn) and not push.whole:
            self.copy.groups = push.epoch, push.number - 1
        return super().pushed_groups(push)


@mutant(None)
class TakesAnything(Replica):
    """A replica does not check what comes before the messages it receives."""

    __slots__ = ()

    def _follows(self, push: Push) -> bool:
        return self.copy.first <= push.base <= self.copy.end


@mutant(245)
class TrimsAhead(Replica):
    """A replica trims messages that are not on its disk yet."""

    __slots__ = ()

    def _advance(self) -> list[Command]:
        durable = self.copy.durable
        self.copy.durable = max(durable, min(self._master_first, self.copy.end))
        try:
            return super()._advance()
        finally:
            self.copy.durable = durable


# ---------------------------------------------------------------- units


@mutant(UNITS)
class CountsHalves(Master):
    """The safe part of the log may end within a unit."""

    __slots__ = ()

    def _below_partial_unit(self, end: int | None) -> int | None:
        return end


@mutant(UNITS)
class ForgetsUnits(Master):
    """Units are forgotten when a replica reports."""

    __slots__ = ()

    def _declare_safe(self) -> list[Command]:
        commands = super()._declare_safe()
        self._units = []
        return commands


@mutant(UNITS)
class LeadsWithAHalf(Master):
    """A master does not cut off an incomplete unit before it leads."""

    __slots__ = ()

    def _label_if_whole(self) -> list[Command]:
        commands = super()._label_if_whole()
        return [Label(self.epoch, groups=True) if isinstance(c, CutHalf) else c for c in commands]


@mutant(UNITS)
class KnowsNoCut(Master):
    """A master does not know that its log is shorter after an incomplete unit was cut off."""

    __slots__ = ()

    def cut_half(self, end: int) -> list[Command]:
        return super().cut_half(self.copy.end)


@mutant(Case("abc", "b", units="1"))
class ShowsHalves(Replica):
    """Readers at a replica see an incomplete unit."""

    __slots__ = ()

    def wrote(self, end: int, whole: int | None = None) -> list[Command]:
        return super().wrote(end, end)
