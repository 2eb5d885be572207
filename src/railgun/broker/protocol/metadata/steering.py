"""Steering: what the leader of Raft decides for the cluster, from what all agree on and from whom it hears.

It is asked every now and then, looks at how things are, and says what to propose next. It remembers nothing of what it
has decided: every proposal says for which state it is meant (an epoch, the set of members), so doing it twice does no
harm, and the next leader goes on in the middle. Rules:

1. *Signs of life.* A node lives if it was heard of within `patience` (never less than an election time). It is silent
   since the later of its last sign and the moment this leader began to lead: a new leader has patience with everybody.
   A node is well if it lives and reports no trouble.
2. *Leases.* Nobody takes the place of a master before all leases granted to it are over: those of this leader, and what
   its predecessor may have granted (an election time after this one began: who was handed the lead has not waited).
   Who is to be replaced while it lives gets no more (`refuses`), so that there is an end.
3. *A master.* A region gets one when it has none (first all its voting nodes are waited for, with patience, so that
   masters spread), when its master is silent for longer than patience, and when its master reports trouble, is to
   leave, is not named a master there any more, or has no room on its disk while another one has. It is a voting
   replica that is well and may be master, and of those one that has room, stays, with the least lag, with the fewest
   masterships, with the lowest id. Without one nothing happens.
4. *Anew.* A master that was started again must not write in its old epoch: what it wrote last may be on other disks
   and not on its own. It gets the next epoch at once, if it is well: nobody else held its lease.
5. *Active.* What the master reports of the present epoch becomes metadata. Until then the set does not change.
6. *More copies.* Who learns, is well and has caught up, as the master says, is promoted, one at a time.
7. *Fewer.* A voting replica that does not name the region any more, is wanted to be gone, or is to be pruned, is
   demoted, one at a time, after promotions.
8. *Quorum.* A node is taken from a set only if a majority of the set is well, and a majority of the rest, too. So dead
   nodes are pruned only while there is a quorum, and it stays; a set of two with one dead stays as it is.
9. *Pruning.* A node that is silent for longer than `prune_after` (None: never) is pruned, if rule 8 allows it in Raft
   and in every region where it votes; else nothing is done to it at all. If it comes back in the middle, it stays.
10. *Leaving.* Pruned or wanted to be gone: first it is nobody's master, then votes nowhere, then leaves Raft (if it is
    the leader, it hands over first), and last the metadata.
11. *Members of Raft.* Nodes of the metadata that live become learners, then voters when they are well and have caught
    up (Raft itself makes sure), up to 7. One change at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from railgun.broker.protocol.metadata.machine import Metadata
from railgun.broker.protocol.metadata.nodes import MASTER
from railgun.broker.protocol.metadata.regions import Region, holds
from railgun.broker.protocol.metadata.reports import Report, Told
from railgun.broker.protocol.raft.messages import Members

MOST_VOTERS: Final = 7
NEAR: Final = 1000
"""Entries: a learner that lacks more has not caught up."""


@dataclass(frozen=True, slots=True)
class Propose:
    """Add this command to the log."""

    command: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChangeMembers:
    """These are to be the members of Raft."""

    members: Members


@dataclass(frozen=True, slots=True)
class Transfer:
    """Let another node lead. Not again while it is under way: a leader that hands over takes nothing new."""

    to: str


Decision: TypeAlias = Propose | ChangeMembers | Transfer


@dataclass(frozen=True, slots=True)
class Heard:
    """The last sign of life of a node."""

    at: float
    report: Report


SILENT: Final = Report()


class Steering:
    """The memory of a leader: whom it heard of when, and until when it granted leases."""

    __slots__ = ("_began", "_granted", "_heard")

    def __init__(self) -> None:
        self._began = 0.0
        self._heard: dict[str, Heard] = {}
        self._granted: dict[str, float] = {}

    def began(self, now: float) -> None:
        """This node leads from now on; what it knew when it led before is void."""
        self._began = now
        self._heard.clear()
        self._granted.clear()

    def heard(self, node: str, report: Any, now: float) -> None:
        """A node asks for a lease, and tells how it is: see `reports`."""
        self._heard[node] = Heard(now, Report.of(report))

    def granted(self, node: str, until: float) -> None:
        """A lease was granted to it."""
        self._granted[node] = max(until, self._granted.get(node, until))

    def refuses(
        self, metadata: Metadata, members: Members, leader: str, node: str, now: float
    ) -> str:
        """Why this node is to get no lease now, though it asks; empty: it may have one."""
        look = _Look(self, metadata, members, leader, now)
        for region in metadata.regions.values():
            if region.master == node and (why := look.must_move(region)):
                to = look.successor(region, look.may_leave(region))
                if to is not None:
                    return f"{to} is to be the master of region {region.name!r}: {node} {why}"
        return ""

    def decide(
        self, metadata: Metadata, members: Members, leader: str, now: float
    ) -> list[Decision]:
        """What to do now: at most one thing for each region, and one for the members of Raft."""
        known = {*metadata.nodes, *members.all}
        self._heard = {node: one for node, one in self._heard.items() if node in known}
        self._granted = {node: one for node, one in self._granted.items() if node in known}
        if not metadata.cluster:
            return []
        return [*_Look(self, metadata, members, leader, now).decide()]

    def heir(
        self, metadata: Metadata, members: Members, leader: str, name: str, now: float
    ) -> str | None:
        """Who is to take a region over from a master that wants to go; the next best one that has caught up."""
        region = metadata.regions[name]
        look = _Look(self, metadata, members, leader, now)
        told = look.report(region.master or "").regions.get(name, Told())
        near = told.caught_up if told.epoch == region.epoch else frozenset()
        return look.successor(region, False, near)

    def is_well(
        self, metadata: Metadata, members: Members, leader: str, node: str, now: float
    ) -> bool:
        """Whether a node lives, and reports no trouble."""
        return _Look(self, metadata, members, leader, now).is_well(node)

    def next_leader(
        self, metadata: Metadata, members: Members, leader: str, now: float
    ) -> str | None:
        """Who can lead in place of this one."""
        return _Look(self, metadata, members, leader, now).next_leader()

    def unwritable(
        self, metadata: Metadata, members: Members, leader: str, now: float
    ) -> dict[str, dict[str, str]]:
        """Return the streams that nodes which live cannot write, and why, by node."""
        look = _Look(self, metadata, members, leader, now)
        found = {node: dict(look.report(node).unwritable) for node in metadata.nodes}
        return {node: streams for node, streams in found.items() if streams and look.lives(node)}

    def troubles(
        self, metadata: Metadata, members: Members, leader: str, now: float
    ) -> dict[str, str]:
        """Return why nodes that live can be nobody's master, by node."""
        look = _Look(self, metadata, members, leader, now)
        found = {node: look.report(node).trouble for node in metadata.nodes}
        return {node: why for node, why in found.items() if why and look.lives(node)}

    def silence(self, node: str, now: float) -> float:
        """For how long nothing was heard of a node, since this one leads."""
        heard = self._heard.get(node)
        return now - (self._began if heard is None else max(self._began, heard.at))

    def told(self, node: str) -> Report | None:
        """What a node has told last, if it has since this one leads."""
        heard = self._heard.get(node)
        return None if heard is None else heard.report

    def lease_is_over(self, node: str, now: float, longest: float) -> bool:
        """Whether no lease of this node can be good any more."""
        return now >= max(self._began + longest, self._granted.get(node, self._began))


class _Look:
    """How things are at one moment."""

    __slots__ = (
        "election",
        "gone",
        "leader",
        "members",
        "metadata",
        "now",
        "patience",
        "ruled",
        "steering",
        "used",
    )

    def __init__(
        self, steering: Steering, metadata: Metadata, members: Members, leader: str, now: float
    ) -> None:
        self.steering, self.metadata, self.members = steering, metadata, members
        self.leader, self.now = leader, now
        self.election = metadata.seconds("election") or 0.0
        self.patience = max(metadata.seconds("patience") or 0.0, self.election)
        self.ruled = Counter(one.master for one in metadata.regions.values() if one.master)
        self.used = metadata.catalogue.used
        everybody = sorted({*metadata.nodes, *members.all})
        self.gone = [
            one for one in everybody if one in metadata.wanted_gone or self._is_pruned(one)
        ]

    def decide(self) -> Iterator[Decision]:
        for name in sorted(self.metadata.regions):
            command = self._for_region(self.metadata.regions[name])
            if command is not None:
                if command["do"] == "master":
                    self.ruled[command["master"]] += 1
                yield Propose(command)
        yield from self._for_members()

    # ------------------------------------------------------------ nodes

    def lives(self, node: str) -> bool:
        if node == self.leader:
            return True
        if self.steering.told(node) is None:
            return False
        return self.steering.silence(node, self.now) <= self.patience

    def is_dead(self, node: str) -> bool:
        return node != self.leader and self.steering.silence(node, self.now) > self.patience

    def report(self, node: str) -> Report:
        return self.steering.told(node) or SILENT

    def is_well(self, node: str) -> bool:
        return self.lives(node) and not self.report(node).trouble

    def can_spare(self, node: str, group: Collection[str]) -> bool:
        """Rule 8: whether a set has a quorum, and keeps it without this node."""
        well = {one for one in group if self.is_well(one)}
        rest = [one for one in group if one != node]
        has_quorum = len(well) > len(group) // 2
        return has_quorum and len(well - {node}) > len(rest) // 2

    def lease_is_over(self, node: str) -> bool:
        return self.steering.lease_is_over(node, self.now, self.election)

    def _is_pruned(self, node: str) -> bool:
        after = self.metadata.seconds("prune_after")
        if after is None or node == self.leader:
            return False
        if self.steering.silence(node, self.now) <= max(after, self.patience):
            return False
        if node in self.members.voters and not self.can_spare(node, self.members.voters):
            return False
        return all(
            region.master != node and self.can_spare(node, region.voting)
            for region in self.metadata.regions.values()
            if holds(region, node, self.used)
        )

    # ------------------------------------------------------------ a region

    def _for_region(self, region: Region) -> dict[str, Any] | None:
        master = region.master
        if master is None:
            waits = any(not self.lives(one) and not self.is_dead(one) for one in region.voting)
            return None if waits else self._crown(region, self.successor(region, True))
        if not self.lives(master):
            if self.is_dead(master) and self.lease_is_over(master):
                return self._crown(region, self.successor(region, True))
            return None
        told = self.report(master).regions.get(region.name, Told())
        if told.epoch != region.epoch:
            told = Told()
        if self.must_move(region):
            to = self.successor(region, self.may_leave(region))
            if to is not None:
                return self._crown(region, to) if self.lease_is_over(master) else None
        if told.anew:
            return self._crown(region, master if self._may_rule(master, region) else None)
        if not region.is_active:
            return self._order("active", region) if told.active else None
        return self._more(region, told) or self._fewer(region)

    def must_move(self, region: Region) -> str:
        """Why a master that lives is to be one no more; empty: it may go on."""
        master = region.master
        if master is None or not self.lives(master):
            return ""
        if self.report(master).trouble:
            return f"is in trouble: {self.report(master).trouble}"
        if master in self.metadata.wanted_gone:
            return "is to leave"
        if self.metadata.role(master, region.name) != MASTER:
            return "is not named a master there any more"
        if self.report(master).full:
            to = self.successor(region, False)
            if to is not None and not self.report(to).full:
                return "has hardly any room on its disk"
        return ""

    def may_leave(self, region: Region) -> bool:
        """Whether the successor may be one that is to leave itself: it is better than a master in trouble only."""
        return region.master is not None and bool(self.report(region.master).trouble)

    def successor(self, region: Region, may_leave: bool, near: Collection[str] = ()) -> str | None:
        """Who is to be the master after the present one; rather one of those that are `near`."""
        leaving = self.metadata.wanted_gone
        fit = [
            node
            for node in region.voting
            if node != region.master
            and self._may_rule(node, region)
            and (may_leave or node not in leaving)
        ]

        def rank(node: str) -> tuple[bool, bool, bool, int, int, str]:
            return (
                self.report(node).full,
                node in leaving,
                node not in near,
                self.report(node).lag_in(region.name),
                self.ruled[node],
                node,
            )

        return min(fit, key=rank, default=None)

    def _may_rule(self, node: str, region: Region) -> bool:
        return self.is_well(node) and self.metadata.role(node, region.name) == MASTER

    def _crown(self, region: Region, node: str | None) -> dict[str, Any] | None:
        if node is None:
            return None
        return {"do": "master", "region": region.name, "master": node, "epoch": region.epoch + 1}

    def _more(self, region: Region, told: Told) -> dict[str, Any] | None:
        for node in region.learning:
            stays = node not in self.gone
            if stays and node in told.caught_up and self.is_well(node):
                return self._order("promote", region) | {"node": node}
        return None

    def _fewer(self, region: Region) -> dict[str, Any] | None:
        for node in region.voting:
            is_named = self.metadata.role(node, region.name) is not None
            if node == region.master or (is_named and node not in self.gone):
                continue
            if self.can_spare(node, region.voting):
                return self._order("demote", region) | {"node": node}
        return None

    def _order(self, what: str, region: Region) -> dict[str, Any]:
        return {"do": what, "region": region.name, "epoch": region.epoch}

    # ------------------------------------------------------------ members of Raft

    def _for_members(self) -> Iterator[Decision]:
        yield from self._removals()
        change = self._next_change()
        if change is not None:
            yield change

    def _free(self) -> list[str]:
        """Those who are to leave and can: no region holds them."""
        regions = self.metadata.regions.values()
        return [
            node
            for node in self.gone
            if not any(holds(region, node, self.used) for region in regions)
        ]

    def _removals(self) -> Iterator[Decision]:
        for node in self._free():
            if node in self.metadata.nodes and node not in self.members.all:
                seen = self.metadata.nodes[node].index
                yield Propose({"do": "remove", "node": node, "index": seen})

    def _next_change(self) -> Decision | None:
        members = self.members
        for node in self._free():
            if node in members.learners:
                return ChangeMembers(members.without(node))
            if node in members.voters and self.can_spare(node, members.voters):
                if node != self.leader:
                    return ChangeMembers(members.without(node))
                to = self.next_leader()
                if to is not None:
                    return Transfer(to)
        for node in sorted(self.metadata.nodes):
            if node not in members.all and node not in self.gone and self.lives(node):
                return ChangeMembers(members.with_learner(node))
        for node in members.learners:
            if len(members.voters) < MOST_VOTERS and self._may_vote(node):
                return ChangeMembers(members.with_voter(node))
        return None

    def _may_vote(self, node: str) -> bool:
        if node not in self.metadata.nodes or node in self.gone or not self.is_well(node):
            return False
        applied = self.report(node).applied
        return applied is None or self.metadata.index - applied <= NEAR

    def next_leader(self) -> str | None:
        fit = [one for one in self.members.voters if one not in self.gone and self.is_well(one)]
        return min((one for one in fit if one != self.leader), default=None)
