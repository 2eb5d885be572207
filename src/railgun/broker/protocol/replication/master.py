"""State machine of the copy that writes: it finds everything that was ever acknowledged, then replicates its log.

Rules:

1. *Gather.* It opens a session with every replica, which promises to take nothing older, and sends its standing. When a
   majority has answered, of its own set and of the last one that was active, the best of these copies (`Standing`) has
   everything that was ever safe. A copy that is `LOST` does not count.
2. *Fetch.* If the best copy is another node's, it cuts off its own messages that the best copy does not have, and
   fetches those it lacks. The same holds for the states of groups, by their epoch and number. If the node it fetches
   from is gone, or sends a new standing (it has lost something), it gathers again. It trims what one of these copies no
   longer keeps.
3. *Label.* Then its log is the log of the epoch. Where the log ends, the epoch starts. Its own copy is labelled on disk
   before it takes new messages.
4. *Lead.* Each replica is fed from where it agrees. A replica's copy counts when it is labelled. A message is safe when
   a majority of the set has it in copies that count, and not before the start of the epoch is safe: messages written in
   older epochs are not counted by themselves, because a later master may not judge that copy the best.
5. A master that goes on in the next epoch, because the set has changed, need not gather: no other node has written. The
   same holds for a master of a stream that was created in its own epoch. It labels its copy, and takes what is
   published meanwhile.
6. A replica whose session is over is fed again in the next session. What it reported as its own stays counted, because
   it is on disk; unless the replica comes back and has lost it. A replica that sends a new standing within a session is
   fed from there, but that standing may not be on disk yet: it counts for no more than the replica had reported.
7. A replica that is too slow for what the master keeps begins anew at the first message that is left.
8. *Units.* The safe messages never end within a unit: as long as a majority has only a part of one, all of it waits. So
   a master whose log ends within a unit when it has gathered cuts that part off: it was never safe, and no node is left
   that could finish it. A unit is whole on the master's own disk before it is pushed.
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
    """The phases of a master, in order."""

    GATHER = "gather"
    FETCH = "fetch"
    LABEL = "label"
    LEAD = "lead"


class Peer:
    """A master's view of a replica."""

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
        self.session: int | None = None  # None: no session
        self.last = 0  # number of the last session
        self.turn = 0  # how many new standings the replica has sent in this session
        self.readable = True  # whether its copy can be fetched
        self.standing: Standing | None = None  # as last sent in this session
        self.next = 0  # the offset to push next
        self.anew = False  # whether the replica has to begin anew at `next`
        self.end = 0  # end of the messages on its disk
        self.first = 0
        self.labelled = False
        self.groups: tuple[int, int] = (0, 0)  # epoch and number on its disk
        self.sent: int | None = None  # last change of groups sent; None: send all states


class Master:
    """The rules of the copy that writes. `messages` lists the duties of its driver."""

    __slots__ = (
        "_fetch_end", "_groups_source", "_source", "_units", "copy", "epoch", "id", "needs_groups", "needs_log",
        "number", "peers", "phase", "safe_groups", "sets", "start",
    )  # fmt: skip

    def __init__(self, id: Id, copy: Copy, epoch: int, sets: Iterable[Sequence[Id]]) -> None:
        self.id, self.copy, self.epoch = id, copy, epoch
        self.sets = [tuple(voters) for voters in sets]  # its own set, and the last active one
        self.phase = Phase.GATHER
        self.start = 0
        self.peers: dict[Id, Peer] = {}
        self.number = 0  # number of the last change of groups in this epoch
        self.safe_groups = -1
        self.needs_log = self.needs_groups = True  # while it fetches
        self._source: Id | None = None  # the node it fetches from; None: fetched completely
        self._groups_source: Id | None = None
        self._fetch_end = 0  # where the log that it fetches ends
        self._units: list[tuple[int, int]] = []  # units of several batches that are not safe yet

    def begin(self) -> list[Command]:
        """Start to gather: find out what was acknowledged."""
        return self._choose()

    def go_on(self) -> list[Command]:
        """Skip gathering: no other node can have written."""
        self.phase = Phase.LABEL
        return [Label(self.epoch, groups=True)]

    # ------------------------------------------------------------ sessions

    def stands(self, node: Id, session: int, standing: Standing) -> list[Command]:
        """Handle the standing of a replica, sent with its promise or, later in the session, anew."""
        peer = self.peers.setdefault(node, Peer())
        if session < peer.last or (session == peer.last and peer.session is None):
            return []
        again = session == peer.session
        peer.turn = peer.turn + 1 if again else 0
        peer.session, peer.last, peer.standing, peer.readable = session, session, standing, True
        if self.phase is Phase.LEAD:
            self._feed(peer, again)
            return self._declare_safe()
        if self.phase is Phase.FETCH and node in (self._source, self._groups_source):
            self.phase = Phase.GATHER
        return self._choose() if self.phase is Phase.GATHER else []

    def gone(self, node: Id) -> list[Command]:
        """Record that the session with a replica is over."""
        peer = self.peers.get(node)
        if peer is None:
            return []
        peer.session = peer.standing = None
        if self.phase is Phase.FETCH and node in (self._source, self._groups_source):
            self.phase = Phase.GATHER
            return self._choose()
        return []

    # ------------------------------------------------------------ gathering and fetching

    def _standings(self) -> dict[Id, Standing]:
        """Return the standings of the copies that count for the choice."""
        standings = {n: p.standing for n, p in self.peers.items() if p.standing and p.readable}
        standings[self.id] = self.copy.standing()
        return {node: standing for node, standing in standings.items() if standing.label != LOST}

    def _choose(self) -> list[Command]:
        """Choose the best copy and fetch it, if a majority of each set has answered."""
        standings = self._standings()
        for voters in self.sets:
            if sum(node in standings for node in voters) * 2 <= len(voters):
                return []
        best = max(standings, key=lambda node: (standings[node].rank, node == self.id))
        groups = max(standings, key=lambda node: (standings[node].groups, node == self.id))
        self.phase = Phase.FETCH
        self.needs_log, self.needs_groups = best != self.id, groups != self.id
        self._source, self._groups_source, self._fetch_end = best, groups, standings[best].end
        commands = list[Command]()
        if self.needs_log:
            common = agree(standings[best], self.copy.standing())
            if common < standings[best].first:
                self.copy.anew(standings[best].first)
                commands.append(Anew(standings[best].first))
            elif common < self.copy.end:
                self.copy.cut(common)
                commands.append(Cut(common))
            if standings[best].first > self.copy.first:
                self.copy.trim(standings[best].first)
                commands.append(Trim(self.copy.first))
            commands += self._fetch_more()
        if self.needs_groups:
            session = self.peers[groups].session
            assert session is not None
            commands.append(Say(groups, FetchGroups(session)))
        return commands + self._label_if_whole()

    def _fetch_more(self) -> list[Command]:
        assert self._source is not None
        session = self.peers[self._source].session
        assert session is not None
        if self.copy.end >= self._fetch_end:
            self._source, self.needs_log = None, self.copy.durable < self.copy.end
            return []
        return [Say(self._source, Fetch(session, self.copy.end))]

    def fetched(self, node: Id, fetched: Fetched) -> list[Command]:
        """Take fetched batches, and fetch the next ones."""
        if not self._awaits(node, self._source, fetched.session) or not self.needs_log:
            return []
        if not fetched.runs:
            return self._unreadable(node)
        if fetched.base != self.copy.end:
            return []
        self.copy.append(fetched.base, fetched.runs)
        return [Write(fetched.base, fetched.runs), *self._fetch_more()]

    def fetched_groups(self, node: Id, fetched: FetchedGroups) -> list[Command]:
        """Take the fetched states of groups."""
        if not self._awaits(node, self._groups_source, fetched.session) or not self.needs_groups:
            return []
        if fetched.epoch == LOST:
            return self._unreadable(node)
        self.copy.groups = (fetched.epoch, fetched.number)
        self._groups_source = None
        return [WriteGroups(fetched.epoch, fetched.number, whole=True)]

    def _awaits(self, node: Id, source: Id | None, session: int) -> bool:
        return self.phase is Phase.FETCH and node == source and self.peers[node].session == session

    def _unreadable(self, node: Id) -> list[Command]:
        """Gather again without a replica whose copy cannot be read."""
        self.peers[node].readable = False
        self.phase = Phase.GATHER
        return self._choose()

    def _label_if_whole(self) -> list[Command]:
        if self.phase is not Phase.FETCH or self.needs_log or self.needs_groups:
            return []
        self.phase = Phase.LABEL
        return [*self._trim_like_peers(), CutHalf()]

    def cut_half(self, end: int) -> list[Command]:
        """Record that the log now ends at `end`, not within a unit; then label it."""
        if self.phase is not Phase.LABEL or self.copy.label == self.epoch:
            return []
        self.copy.cut(end)
        return [Label(self.epoch, groups=True)]

    def _trim_like_peers(self) -> list[Command]:
        """Trim to the highest first offset of all copies that answered.

        What a copy has removed for good is removed on a majority: it must not come back with a copy that still has it.
        """
        standings = [p.standing for p in self.peers.values() if p.standing is not None]
        first = max((s.first for s in standings if s.label != LOST), default=0)
        if first <= self.copy.first:
            return []
        self.copy.trim(first)
        return [Trim(self.copy.first)]

    def labelled(self, epoch: int) -> list[Command]:
        """Record that its own label is on disk, and lead."""
        if epoch != self.epoch or self.phase is not Phase.LABEL:
            return []
        self.copy.label, self.copy.groups = epoch, (epoch, 0)
        return self._lead()

    def _lead(self) -> list[Command]:
        self.phase = Phase.LEAD
        self.start = self.copy.durable
        commands: list[Command] = [Serve(self.start)]
        for peer in self.peers.values():
            if peer.standing is not None:
                self._feed(peer, again=False)
        return commands + self._declare_safe()

    # ------------------------------------------------------------ its own disk

    def appended(
        self, base: int, epoch: int, end: int, units: Iterable[tuple[int, int]] = ()
    ) -> list[Command]:
        """Record that published batches are on disk, of this epoch, or of the one before if the master went on.

        `units`: the base and the end of each unit in them that has several batches.
        """
        self.copy.append(base, ((epoch, end),))
        self._units += units
        return self.wrote(end)

    def wrote(self, end: int, whole: int | None = None) -> list[Command]:
        """Record that fetched or published batches are on disk; `whole` as in `Copy.wrote`."""
        self.copy.wrote(end, whole)
        if self.phase is Phase.FETCH:
            if self.needs_log and self._source is None:
                self.needs_log = self.copy.durable < self.copy.end
            return self._label_if_whole()
        return self._declare_safe() if self.phase is Phase.LEAD else []

    def has_cut(self, whole: int) -> list[Command]:
        """Record that a cut is done; the units left are whole up to `whole`."""
        self.copy.whole = whole
        return []

    def wrote_groups(self, epoch: int, number: int) -> list[Command]:
        """Record that states or changes of groups are on disk."""
        if self.phase is Phase.FETCH:
            if self._groups_source is None:
                self.needs_groups = False
            return self._label_if_whole()
        if self.phase is Phase.LEAD and epoch == self.epoch:
            self.copy.groups = max(self.copy.groups, (epoch, number))
            return self._declare_safe()
        return []

    def trimmed(self, first: int) -> None:
        """Record that messages before `first` are no longer kept."""
        self.copy.trim(first)

    # ------------------------------------------------------------ replicas

    def _feed(self, peer: Peer, again: bool) -> None:
        """Set the state of a replica after its standing: where both copies agree, and what counts."""
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
        """Return what to push to a replica next, with batches up to `end`, or None if nothing now.

        The batches are on the master's own disk.
        """
        peer = self.peers.get(node)
        if self.phase is not Phase.LEAD or peer is None or peer.session is None:
            return None
        copy = self.copy
        if peer.next < copy.first:  # the replica was too slow for what is kept
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
        """Return what to push of groups: all states as of `number`, or the change of this number; None: nothing now."""
        peer = self.peers.get(node)
        if self.phase is not Phase.LEAD or peer is None or peer.session is None:
            return None
        if not whole and peer.sent != number - 1:
            return None
        peer.sent = number
        return PushGroups(peer.session, self.epoch, number, whole, peer.turn)

    def has(self, node: Id, has: Has) -> list[Command]:
        """Handle a replica's report of what its disk has."""
        peer = self.peers.get(node)
        if peer is None or peer.session != has.session or self.phase is not Phase.LEAD:
            return []
        peer.end, peer.labelled, peer.first = has.end, has.labelled, has.first
        return self._declare_safe()

    def has_groups(self, node: Id, has: HasGroups) -> list[Command]:
        """Handle a replica's report of the groups on its disk."""
        peer = self.peers.get(node)
        if peer is None or peer.session != has.session or self.phase is not Phase.LEAD:
            return []
        peer.groups = (has.epoch, has.number)
        return self._declare_safe()

    # ------------------------------------------------------------ safety

    def _declare_safe(self) -> list[Command]:
        """Declare safe what a majority has by now."""
        if self.phase is not Phase.LEAD:
            raise ProtocolError("only a master that leads counts")
        ends = {n: p.end for n, p in self.peers.items() if p.labelled}
        ends[self.id] = self.copy.durable
        commands = list[Command]()
        safe = self._below_partial_unit(self._majority_value(ends))
        if safe is not None and safe >= self.start and safe > self.copy.safe:
            self.copy.safe = safe
            self._units = [unit for unit in self._units if unit[1] > safe]
            commands.append(Safe(safe))
        epoch = self.epoch
        numbers = {n: p.groups[1] for n, p in self.peers.items() if p.groups[0] == epoch}
        if self.copy.groups[0] == epoch:
            numbers[self.id] = self.copy.groups[1]
        groups = self._majority_value(numbers)
        if groups is not None and groups > self.safe_groups:
            self.safe_groups = groups
            commands.append(SafeGroups(groups))
        return commands

    def _below_partial_unit(self, end: int | None) -> int | None:
        """Return the start of the unit that `end` lies within, or `end` itself."""
        return next((unit[0] for unit in self._units if unit[0] < (end or 0) < unit[1]), end)

    def _majority_value(self, reached: dict[Id, int]) -> int | None:
        """Return the highest number that a majority of the set has reached, or None."""
        values = sorted((reached[node] for node in self.sets[0] if node in reached), reverse=True)
        need = len(self.sets[0]) // 2
        return values[need] if len(values) > need else None

    @property
    def active(self) -> bool:
        """Return whether a majority has the label: then earlier sets do not matter any more."""
        labelled = {n: 0 for n, p in self.peers.items() if p.labelled and p.end >= self.start}
        labelled[self.id] = 0
        leads = self.phase is Phase.LEAD
        return leads and self.safe_groups >= 0 and self._majority_value(labelled) is not None

    def kept_from(self) -> int | None:
        """Return the first offset that a majority keeps, or None if no majority is known."""
        firsts = {n: p.first for n, p in self.peers.items() if p.labelled}
        return self._majority_value(firsts | {self.id: self.copy.first})

    def all_have(self, end: int) -> bool:
        """Return whether every voting replica has all messages before `end`."""
        has = (self.peers.get(node) for node in self.sets[0] if node != self.id)
        return self.copy.durable >= end and all(
            p is not None and p.labelled and p.end >= end for p in has
        )

    def caught_up(self, node: Id) -> bool:
        """Return whether a replica is connected and has all safe messages and this epoch's groups."""
        peer = self.peers.get(node)
        if self.phase is not Phase.LEAD or peer is None or not peer.labelled:
            return False
        if peer.session is None:  # what it had counts, but whether it still has it is unknown
            return False
        return peer.end >= self.copy.safe and peer.groups[0] == self.epoch
