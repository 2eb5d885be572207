"""The copy that writes: it finds out what was ever acknowledged, and then makes its log everybody's.

Rules:

1. *Gather.* It opens a session with every replica, which promises to take nothing older, and tells how it stands. When
   a majority has answered, of its own set and of the last one that was active, the best of these copies (`Standing`)
   has all that was ever safe. A copy that is `LOST` counts for nobody.
2. *Fetch.* If the best copy is another node's, it cuts off what that has not, and takes over what it lacks. The same
   for the states of groups, by their epoch and number. If whom it fetches from is gone, or tells anew how it stands
   (it has lost something), it gathers again. What one of them does not keep any more, it does not keep either.
3. *Label.* Then its log is the log. Where it ends, the epoch starts. Its own copy is labelled on disk, before it
   takes anything new.
4. *Lead.* Each replica is fed from where it agrees. Its copy counts when it is labelled. A message is safe when a
   majority of the set has it in copies that count, and not before the start of the epoch is safe: what was written in
   older epochs is not counted by itself, for a later master may not find it the best.
5. A master that goes on in the next epoch, because the set has changed, need not gather: nobody else has written. Nor
   need that of a stream which was made in its own epoch. It labels its copy, and takes what is published meanwhile.
6. A replica whose session is over is fed again in the next one. What it has said to have stays counted: it is on disk;
   unless it comes back and has lost it. One that tells anew how it stands in the middle of a session is fed from
   there, but what it tells may not be on disk yet: it counts for no more than it had said to have.
7. A replica that is too slow for what the master keeps begins anew at the first message that is left.
8. *Units.* What is safe never ends within a unit: as long as a majority has only a part of one, all of it waits. So a
   master whose log ends within a unit when it has gathered cuts that off: it was never safe, and nobody is left who
   could finish it. A unit is whole on the master's own disk before it is pushed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from railgun.broker.protocol.replication.messages import (
    Anew,
    Command,
    Cut,
    CutHalf,
    Fetch,
    Fetched,
    FetchedGroups,
    FetchGroups,
    Has,
    HasGroups,
    Id,
    Label,
    Push,
    PushGroups,
    Safe,
    SafeGroups,
    Say,
    Serve,
    Trim,
    Write,
    WriteGroups,
)
from railgun.broker.protocol.replication.standing import LOST, Copy, Standing, agree, clipped
from railgun.errors import ProtocolError


class Phase(Enum):
    """What a master is doing."""

    GATHER = "gather"
    FETCH = "fetch"
    LABEL = "label"
    LEAD = "lead"


class Peer:
    """What a master knows of a replica."""

    __slots__ = (
        "anew",
        "end",
        "first",
        "groups",
        "labelled",
        "last",
        "next",
        "readable",
        "sent",
        "session",
        "standing",
        "turn",
    )

    def __init__(self) -> None:
        self.session: int | None = None  # None: there is none
        self.last = 0  # session there was
        self.turn = 0  # how often it has told anew in this session
        self.readable = True  # whether it can be fetched from
        self.standing: Standing | None = None  # as it was told when the session began
        self.next = 0  # the offset to be sent next
        self.anew = False  # whether it has to begin anew there
        self.end = 0  # on its disk
        self.first = 0
        self.labelled = False
        self.groups: tuple[int, int] = (0, 0)  # on its disk
        self.sent: int | None = (
            None  # the number of the last change of groups; None: all of them are due
        )


class Master:
    """The rules of the copy that writes. See `messages` for what its driver has to do."""

    __slots__ = (
        "_asked", "_asked_groups", "_units", "_until", "copy", "epoch", "id", "needs_groups", "needs_log", "number",
        "peers", "phase", "safe_groups", "sets", "start",
    )  # fmt: skip

    def __init__(self, id: Id, copy: Copy, epoch: int, sets: Iterable[Sequence[Id]]) -> None:
        self.id, self.copy, self.epoch = id, copy, epoch
        self.sets = [tuple(one) for one in sets]  # its own, and the last one that was active
        self.phase = Phase.GATHER
        self.start = 0
        self.peers: dict[Id, Peer] = {}
        self.number = 0  # of the last change of groups, in this epoch
        self.safe_groups = -1
        self.needs_log = self.needs_groups = True  # while it fetches
        self._asked: Id | None = None  # whom it fetches from; None: all has come
        self._asked_groups: Id | None = None
        self._until = 0  # where the log ends that it fetches
        self._units: list[tuple[int, int]] = []  # of several batches, that are not safe yet

    def begin(self) -> list[Command]:
        """Find out what was acknowledged."""
        return self._choose()

    def go_on(self) -> list[Command]:
        """Nobody else can have written: there is nothing to find out."""
        self.phase = Phase.LABEL
        return [Label(self.epoch, groups=True)]

    # ------------------------------------------------------------ sessions

    def stands(self, node: Id, session: int, standing: Standing) -> list[Command]:
        """A replica has made its promise, and tells how it stands; or tells it anew."""
        peer = self.peers.setdefault(node, Peer())
        if session < peer.last or (session == peer.last and peer.session is None):
            return []
        again = session == peer.session
        peer.turn = peer.turn + 1 if again else 0
        peer.session, peer.last, peer.standing, peer.readable = session, session, standing, True
        if self.phase is Phase.LEAD:
            self._feed(peer, again)
            return self._count()
        if self.phase is Phase.FETCH and node in (self._asked, self._asked_groups):
            self.phase = Phase.GATHER
        return self._choose() if self.phase is Phase.GATHER else []

    def gone(self, node: Id) -> list[Command]:
        """The session with a replica is over."""
        peer = self.peers.get(node)
        if peer is None:
            return []
        peer.session = peer.standing = None
        if self.phase is Phase.FETCH and node in (self._asked, self._asked_groups):
            self.phase = Phase.GATHER
            return self._choose()
        return []

    # ------------------------------------------------------------ before it leads

    def _told(self) -> dict[Id, Standing]:
        """How copies stand from which something can be concluded."""
        told = {n: p.standing for n, p in self.peers.items() if p.standing and p.readable}
        told[self.id] = self.copy.standing()
        return {node: standing for node, standing in told.items() if standing.label != LOST}

    def _choose(self) -> list[Command]:
        """See who has the best copy, if enough have told."""
        told = self._told()
        for one in self.sets:
            if sum(node in told for node in one) * 2 <= len(one):
                return []
        best = max(told, key=lambda node: (told[node].rank, node == self.id))
        groups = max(told, key=lambda node: (told[node].groups, node == self.id))
        self.phase = Phase.FETCH
        self.needs_log, self.needs_groups = best != self.id, groups != self.id
        self._asked, self._asked_groups, self._until = best, groups, told[best].end
        commands = list[Command]()
        if self.needs_log:
            common = agree(told[best], self.copy.standing())
            if common < told[best].first:
                self.copy.anew(told[best].first)
                commands.append(Anew(told[best].first))
            elif common < self.copy.end:
                self.copy.cut(common)
                commands.append(Cut(common))
            if told[best].first > self.copy.first:
                self.copy.trim(told[best].first)
                commands.append(Trim(self.copy.first))
            commands += self._fetch_more()
        if self.needs_groups:
            session = self.peers[groups].session
            assert session is not None
            commands.append(Say(groups, FetchGroups(session)))
        return commands + self._label_if_whole()

    def _fetch_more(self) -> list[Command]:
        assert self._asked is not None
        session = self.peers[self._asked].session
        assert session is not None
        if self.copy.end >= self._until:
            self._asked, self.needs_log = None, self.copy.durable < self.copy.end
            return []
        return [Say(self._asked, Fetch(session, self.copy.end))]

    def fetched(self, node: Id, fetched: Fetched) -> list[Command]:
        """What it asked for."""
        if not self._awaits(node, self._asked, fetched.session) or not self.needs_log:
            return []
        if not fetched.runs:
            return self._unreadable(node)
        if fetched.base != self.copy.end:
            return []
        self.copy.append(fetched.base, fetched.runs)
        return [Write(fetched.base, fetched.runs), *self._fetch_more()]

    def fetched_groups(self, node: Id, fetched: FetchedGroups) -> list[Command]:
        """The states of groups that it asked for."""
        if not self._awaits(node, self._asked_groups, fetched.session) or not self.needs_groups:
            return []
        if fetched.epoch == LOST:
            return self._unreadable(node)
        self.copy.groups = (fetched.epoch, fetched.number)
        self._asked_groups = None
        return [WriteGroups(fetched.epoch, fetched.number, whole=True)]

    def _awaits(self, node: Id, asked: Id | None, session: int) -> bool:
        return self.phase is Phase.FETCH and node == asked and self.peers[node].session == session

    def _unreadable(self, node: Id) -> list[Command]:
        """What a replica said to have cannot be read there: look for another one."""
        self.peers[node].readable = False
        self.phase = Phase.GATHER
        return self._choose()

    def _label_if_whole(self) -> list[Command]:
        if self.phase is not Phase.FETCH or self.needs_log or self.needs_groups:
            return []
        self.phase = Phase.LABEL
        return [*self._trim_as_others(), CutHalf()]

    def cut_half(self, end: int) -> list[Command]:
        """Its log ends there, and not within a unit."""
        if self.phase is not Phase.LABEL or self.copy.label == self.epoch:
            return []
        self.copy.cut(end)
        return [Label(self.epoch, groups=True)]

    def _trim_as_others(self) -> list[Command]:
        """What was taken away for good is away on a majority: it must not come back with a copy that has it still."""
        standings = [p.standing for p in self.peers.values() if p.standing is not None]
        first = max((one.first for one in standings if one.label != LOST), default=0)
        if first <= self.copy.first:
            return []
        self.copy.trim(first)
        return [Trim(self.copy.first)]

    def labelled(self, epoch: int) -> list[Command]:
        """Its own label is on disk."""
        if epoch != self.epoch or self.phase is not Phase.LABEL:
            return []
        self.copy.label, self.copy.groups = epoch, (epoch, 0)
        return self._take_the_lead()

    def _take_the_lead(self) -> list[Command]:
        self.phase = Phase.LEAD
        self.start = self.copy.durable
        commands: list[Command] = [Serve(self.start)]
        for peer in self.peers.values():
            if peer.standing is not None:
                self._feed(peer, again=False)
        return commands + self._count()

    # ------------------------------------------------------------ what is on its own disk

    def appended(
        self, base: int, epoch: int, end: int, units: Iterable[tuple[int, int]] = ()
    ) -> list[Command]:
        """What was published is on disk; batches of this epoch, or of the one before if the master went on.

        `units`: the base and the end of each unit in it that has several batches.
        """
        self.copy.append(base, ((epoch, end),))
        self._units += units
        return self.wrote(end)

    def wrote(self, end: int, whole: int | None = None) -> list[Command]:
        """What was fetched or published is on disk; `whole`: as of a replica."""
        self.copy.wrote(end, whole)
        if self.phase is Phase.FETCH:
            if self.needs_log and self._asked is None:
                self.needs_log = self.copy.durable < self.copy.end
            return self._label_if_whole()
        return self._count() if self.phase is Phase.LEAD else []

    def has_cut(self, whole: int) -> list[Command]:
        """What was to be cut off is gone; the units that are left are whole up to there."""
        self.copy.whole = whole
        return []

    def wrote_groups(self, epoch: int, number: int) -> list[Command]:
        """States or changes of groups are on disk."""
        if self.phase is Phase.FETCH:
            if self._asked_groups is None:
                self.needs_groups = False
            return self._label_if_whole()
        if self.phase is Phase.LEAD and epoch == self.epoch:
            self.copy.groups = max(self.copy.groups, (epoch, number))
            return self._count()
        return []

    def trimmed(self, first: int) -> None:
        """What lies before is not kept any more."""
        self.copy.trim(first)

    # ------------------------------------------------------------ replicas

    def _feed(self, peer: Peer, again: bool) -> None:
        """A session begins, or a replica tells anew how it stands: from where both agree."""
        standing = peer.standing
        assert standing is not None
        common = agree(self.copy.standing(), standing)
        peer.anew = common < self.copy.first
        peer.next = max(common, self.copy.first)
        labelled, end = standing.label == self.epoch, 0 if peer.anew else common
        groups = (0, 0) if standing.label == LOST else standing.groups
        if again:
            labelled, end = labelled and peer.labelled, min(end, peer.end)
            groups = min(groups, peer.groups)
        peer.labelled, peer.end, peer.groups = labelled, end, groups
        peer.first, peer.sent = standing.first, None

    def push(self, node: Id, end: int) -> Push | None:
        """What to send to a replica next, with batches up to `end`; its own disk has them. None: nothing, not now."""
        peer = self.peers.get(node)
        if self.phase is not Phase.LEAD or peer is None or peer.session is None:
            return None
        copy = self.copy
        if peer.next < copy.first:  # it was too slow for what is kept
            peer.next, peer.anew = copy.first, True
        base = peer.next
        end = min(end, copy.durable)
        runs = clipped(copy.runs, end, base) if end > base else ()
        before = copy.epoch_before(base)
        anew, peer.anew = peer.anew, False
        peer.next = max(base, end)
        return Push(
            peer.session,
            self.epoch,
            base,
            before,
            self.start,
            copy.safe,
            copy.first,
            anew,
            runs,
            peer.turn,
        )

    def push_groups(self, node: Id, *, whole: bool, number: int) -> PushGroups | None:
        """What to send of groups: all states as of `number`, or the change of this number."""
        peer = self.peers.get(node)
        if self.phase is not Phase.LEAD or peer is None or peer.session is None:
            return None
        if not whole and peer.sent != number - 1:
            return None
        peer.sent = number
        return PushGroups(peer.session, self.epoch, number, whole, peer.turn)

    def has(self, node: Id, has: Has) -> list[Command]:
        """A replica tells how far its copy is."""
        peer = self.peers.get(node)
        if peer is None or peer.session != has.session or self.phase is not Phase.LEAD:
            return []
        peer.end, peer.labelled, peer.first = has.end, has.labelled, has.first
        return self._count()

    def has_groups(self, node: Id, has: HasGroups) -> list[Command]:
        """A replica tells how far its groups are."""
        peer = self.peers.get(node)
        if peer is None or peer.session != has.session or self.phase is not Phase.LEAD:
            return []
        peer.groups = (has.epoch, has.number)
        return self._count()

    # ------------------------------------------------------------ what is safe

    def _count(self) -> list[Command]:
        """See what is safe by now."""
        if self.phase is not Phase.LEAD:
            raise ProtocolError("only a master that leads counts")
        ends = {n: p.end for n, p in self.peers.items() if p.labelled}
        ends[self.id] = self.copy.durable
        commands = list[Command]()
        safe = self._without_half(self._agreed(ends))
        if safe is not None and safe >= self.start and safe > self.copy.safe:
            self.copy.safe = safe
            self._units = [unit for unit in self._units if unit[1] > safe]
            commands.append(Safe(safe))
        epoch = self.epoch
        numbers = {n: p.groups[1] for n, p in self.peers.items() if p.groups[0] == epoch}
        if self.copy.groups[0] == epoch:
            numbers[self.id] = self.copy.groups[1]
        groups = self._agreed(numbers)
        if groups is not None and groups > self.safe_groups:
            self.safe_groups = groups
            commands.append(SafeGroups(groups))
        return commands

    def _without_half(self, end: int | None) -> int | None:
        """Return where the unit begins that this offset lies within, or the offset itself."""
        return next((unit[0] for unit in self._units if unit[0] < (end or 0) < unit[1]), end)

    def _agreed(self, reached: dict[Id, int]) -> int | None:
        """The highest number that a majority of the set has reached; None: there is none."""
        there = sorted((reached[node] for node in self.sets[0] if node in reached), reverse=True)
        need = len(self.sets[0]) // 2
        return there[need] if len(there) > need else None

    @property
    def active(self) -> bool:
        """Whether a majority has the label: then the sets of before do not matter any more."""
        labelled = {n: 0 for n, p in self.peers.items() if p.labelled and p.end >= self.start}
        labelled[self.id] = 0
        leads = self.phase is Phase.LEAD
        return leads and self.safe_groups >= 0 and self._agreed(labelled) is not None

    def kept_from(self) -> int | None:
        """A majority keeps nothing before this offset; None: there is no majority that tells."""
        firsts = {n: p.first for n, p in self.peers.items() if p.labelled}
        return self._agreed(firsts | {self.id: self.copy.first})

    def all_have(self, end: int) -> bool:
        """Whether every replica that votes has all before this offset."""
        has = (self.peers.get(node) for node in self.sets[0] if node != self.id)
        return self.copy.durable >= end and all(
            p is not None and p.labelled and p.end >= end for p in has
        )

    def caught_up(self, node: Id) -> bool:
        """Whether a replica is there, and has all that is safe."""
        peer = self.peers.get(node)
        if self.phase is not Phase.LEAD or peer is None or not peer.labelled:
            return False
        if peer.session is None:  # what it had counts; whether it still has it is not known
            return False
        return peer.end >= self.copy.safe and peer.groups[0] == self.epoch
