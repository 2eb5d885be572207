"""Steering: decisions of Raft's leader for the cluster, from the metadata and the reports of nodes.

`Steering.decide` is called periodically; it examines the present state and returns what to propose next. It remembers
none of its decisions: every proposal names the state for which it is meant (an epoch, the set of members), so proposing
twice does no harm, and the next leader can continue in the middle. Rules:

1. *Signs of life.* A node lives if it was heard of within `patience` (never less than an election time). It is silent
   since its last sign, or since this leader began to lead if that is later: a new leader has patience with every node.
   A node is well if it lives and reports no trouble.
2. *Leases.* No node replaces a master before all leases granted to it are over: those of this leader, and any its
   predecessor may have granted (an election time after this one began: a leader that got the lead by transfer has not
   waited). A living master that is to be replaced gets no more leases (`refuses`), so that its leases end.
3. *A master.* A region gets one when it has none (first all its voting nodes are waited for, with patience, so that
   masters are spread), when its master is silent for longer than patience, and when its master reports trouble, is to
   leave, no longer has the role master there, or has no room on its disk while another node has. The new master is a
   voting replica that is well and has the role master. Of those, it is one that has room, stays, has the least lag, has
   the fewest masterships, has the lowest id. If there is none, the region stays as it is.
4. *Anew.* A restarted master must not write in its old epoch: what it wrote last may be on other disks and not on its
   own. It gets the next epoch at once, if it is well: no other node held its lease.
5. *Active.* When the master reports the present epoch active, that becomes metadata. Until then the set does not
   change.
6. *Promotion.* A learner that is well and has caught up, by the master's report, is promoted, one at a time.
7. *Demotion.* A voting replica that no longer names the region, is marked to leave, or is to be pruned, is demoted, one
   at a time, after promotions.
8. *Quorum.* A node is taken from a set only if a majority of the set is well, and a majority of the rest, too. So dead
   nodes are pruned only while there is a quorum, and the quorum stays; a set of two with one dead stays as it is.
9. *Pruning.* A node that is silent for longer than `prune_after` (None: never) is pruned, if rule 8 allows it in Raft
   and in every region where it votes; otherwise nothing is done to it at all. If it comes back in the middle, it stays.
10. *Leaving.* A node that is pruned or marked to leave first loses its masterships, then its votes, then its place in
    Raft (if it is the leader, it transfers the lead first), and last its place in the metadata.
11. *Members of Raft.* Living nodes of the metadata become learners, then voters when they are well and have caught up
    (Raft itself checks), up to 7. One change at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from railgun.broker.protocol.metadata.machine import Metadata
from railgun.broker.protocol.metadata.nodes import MASTER
from railgun.broker.protocol.metadata.regions import Region, holds
from railgun.broker.protocol.metadata.reports import RegionReport, Report
from railgun.broker.protocol.raft.messages import Members

MAX_VOTERS: Final = 7
MAX_LEARNER_LAG_ENTRIES: Final = 1000
"""A learner that lacks more entries has not caught up."""


@dataclass(frozen=True, slots=True)
class Propose:
    """Add a command to the log."""

    command: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChangeMembers:
    """Change the members of Raft to these."""

    members: Members


@dataclass(frozen=True, slots=True)
class Transfer:
    """Let another node lead. Do not repeat it while it is in progress: a leader that hands over takes nothing new."""

    to: str


Decision: TypeAlias = Propose | ChangeMembers | Transfer


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """The last sign of life of a node, and when it came."""

    at: float
    report: Report


EMPTY_REPORT: Final = Report()


class Steering:
    """The memory of a leader: the last report of each node, and the end of the leases it granted."""

    __slots__ = ("_began", "_granted", "_heard")

    def __init__(self) -> None:
        self._began = 0.0
        self._heard: dict[str, SignOfLife] = {}
        self._granted: dict[str, float] = {}

    def began(self, now: float) -> None:
        """Begin to lead: forget what was known from leading before."""
        self._began = now
        self._heard.clear()
        self._granted.clear()

    def heard(self, node: str, report: Any, now: float) -> None:
        """Record the report of a node that asks for a lease: see `reports`."""
        self._heard[node] = SignOfLife(now, Report.of(report))

    def granted(self, node: str, until: float) -> None:
        """Record a lease that was granted to a node."""
        self._granted[node] = max(until, self._granted.get(node, until))

    def refuses(
        self, metadata: Metadata, members: Members, leader: str, node: str, now: float
    ) -> str:
        """Return why a node that asks for a lease must not get one now; empty if it may."""
        view = _View(self, metadata, members, leader, now)
        for region in metadata.regions.values():
            if region.master == node and (reason := view.must_move(region)):
                to = view.successor(region, view.may_leave(region))
                if to is not None:
                    return f"{to} will be the master of region {region.name!r}: {node} {reason}"
        return ""

    def decide(
        self, metadata: Metadata, members: Members, leader: str, now: float
    ) -> list[Decision]:
        """Return what to do now: at most one command for each region, and one change of Raft's members."""
        nodes = {*metadata.nodes, *members.all}
        self._heard = {node: sign for node, sign in self._heard.items() if node in nodes}
        self._granted = {node: until for node, until in self._granted.items() if node in nodes}
        if not metadata.cluster:
            return []
        return [*_View(self, metadata, members, leader, now).decide()]

    def next_master(
        self, metadata: Metadata, members: Members, leader: str, name: str, now: float
    ) -> str | None:
        """Return the node to take a region over from its master, preferably one that has caught up, or None."""
        region = metadata.regions[name]
        view = _View(self, metadata, members, leader, now)
        report = view.report(region.master or "").regions.get(name, RegionReport())
        near = report.caught_up if report.epoch == region.epoch else frozenset()
        return view.successor(region, False, near)

    def is_well(
        self, metadata: Metadata, members: Members, leader: str, node: str, now: float
    ) -> bool:
        """Return whether a node lives and reports no trouble."""
        return _View(self, metadata, members, leader, now).is_well(node)

    def next_leader(
        self, metadata: Metadata, members: Members, leader: str, now: float
    ) -> str | None:
        """Return a node that can lead instead of this one, or None."""
        return _View(self, metadata, members, leader, now).next_leader()

    def unwritable(
        self, metadata: Metadata, members: Members, leader: str, now: float
    ) -> dict[str, dict[str, str]]:
        """Return the streams that living nodes cannot write, and why, by node."""
        view = _View(self, metadata, members, leader, now)
        streams_of = {node: dict(view.report(node).unwritable) for node in metadata.nodes}
        return {
            node: streams for node, streams in streams_of.items() if streams and view.lives(node)
        }

    def troubles(
        self, metadata: Metadata, members: Members, leader: str, now: float
    ) -> dict[str, str]:
        """Return why living nodes cannot be masters, by node."""
        view = _View(self, metadata, members, leader, now)
        troubles = {node: view.report(node).trouble for node in metadata.nodes}
        return {node: trouble for node, trouble in troubles.items() if trouble and view.lives(node)}

    def silence(self, node: str, now: float) -> float:
        """Return for how many seconds a node has been silent, at most since this leader began."""
        heard = self._heard.get(node)
        return now - (self._began if heard is None else max(self._began, heard.at))

    def last_report(self, node: str) -> Report | None:
        """Return the last report of a node since this leader began, or None."""
        heard = self._heard.get(node)
        return None if heard is None else heard.report

    def lease_is_over(self, node: str, now: float, longest: float) -> bool:
        """Return whether no lease of a node can still be valid; `longest`: how long a predecessor's lease may last."""
        return now >= max(self._began + longest, self._granted.get(node, self._began))


class _View:
    """The state of the cluster at one moment, and the decisions for it."""

    __slots__ = (
        "election",
        "gone",
        "leader",
        "masterships",
        "members",
        "metadata",
        "now",
        "patience",
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
        self.masterships = Counter(
            region.master for region in metadata.regions.values() if region.master
        )
        self.used = metadata.catalogue.used
        nodes = sorted({*metadata.nodes, *members.all})
        self.gone = [
            node for node in nodes if node in metadata.wanted_gone or self._is_pruned(node)
        ]

    def decide(self) -> Iterator[Decision]:
        for name in sorted(self.metadata.regions):
            command = self._for_region(self.metadata.regions[name])
            if command is not None:
                if command["do"] == "master":
                    self.masterships[command["master"]] += 1
                yield Propose(command)
        yield from self._for_members()

    # ------------------------------------------------------------ nodes

    def lives(self, node: str) -> bool:
        if node == self.leader:
            return True
        if self.steering.last_report(node) is None:
            return False
        return self.steering.silence(node, self.now) <= self.patience

    def is_dead(self, node: str) -> bool:
        return node != self.leader and self.steering.silence(node, self.now) > self.patience

    def report(self, node: str) -> Report:
        return self.steering.last_report(node) or EMPTY_REPORT

    def is_well(self, node: str) -> bool:
        return self.lives(node) and not self.report(node).trouble

    def can_spare(self, node: str, group: Collection[str]) -> bool:
        """Return whether a set has a quorum, and keeps it without this node: rule 8."""
        well = {member for member in group if self.is_well(member)}
        rest = [member for member in group if member != node]
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
            waits = any(not self.lives(node) and not self.is_dead(node) for node in region.voting)
            return None if waits else self._appoint(region, self.successor(region, True))
        if not self.lives(master):
            if self.is_dead(master) and self.lease_is_over(master):
                return self._appoint(region, self.successor(region, True))
            return None
        report = self.report(master).regions.get(region.name, RegionReport())
        if report.epoch != region.epoch:
            report = RegionReport()
        if self.must_move(region):
            to = self.successor(region, self.may_leave(region))
            if to is not None:
                return self._appoint(region, to) if self.lease_is_over(master) else None
        if report.anew:
            return self._appoint(region, master if self._may_be_master(master, region) else None)
        if not region.is_active:
            return self._command("active", region) if report.active else None
        return self._promotion(region, report) or self._demotion(region)

    def must_move(self, region: Region) -> str:
        """Return why a living master must be replaced; empty if it may go on."""
        master = region.master
        if master is None or not self.lives(master):
            return ""
        if self.report(master).trouble:
            return f"is in trouble: {self.report(master).trouble}"
        if master in self.metadata.wanted_gone:
            return "is to leave"
        if self.metadata.role(master, region.name) != MASTER:
            return "no longer has the role master there"
        if self.report(master).full:
            to = self.successor(region, False)
            if to is not None and not self.report(to).full:
                return "has hardly any room on its disk"
        return ""

    def may_leave(self, region: Region) -> bool:
        """Return whether the successor may be a node that is to leave: it is better only than a master in trouble."""
        return region.master is not None and bool(self.report(region.master).trouble)

    def successor(self, region: Region, may_leave: bool, near: Collection[str] = ()) -> str | None:
        """Return the next master of a region, or None; preferably one of `near`."""
        leaving = self.metadata.wanted_gone
        fit = [
            node
            for node in region.voting
            if node != region.master
            and self._may_be_master(node, region)
            and (may_leave or node not in leaving)
        ]

        def rank(node: str) -> tuple[bool, bool, bool, int, int, str]:
            return (
                self.report(node).full,
                node in leaving,
                node not in near,
                self.report(node).lag_in(region.name),
                self.masterships[node],
                node,
            )

        return min(fit, key=rank, default=None)

    def _may_be_master(self, node: str, region: Region) -> bool:
        return self.is_well(node) and self.metadata.role(node, region.name) == MASTER

    def _appoint(self, region: Region, node: str | None) -> dict[str, Any] | None:
        if node is None:
            return None
        return {"do": "master", "region": region.name, "master": node, "epoch": region.epoch + 1}

    def _promotion(self, region: Region, report: RegionReport) -> dict[str, Any] | None:
        for node in region.learning:
            stays = node not in self.gone
            if stays and node in report.caught_up and self.is_well(node):
                return self._command("promote", region) | {"node": node}
        return None

    def _demotion(self, region: Region) -> dict[str, Any] | None:
        for node in region.voting:
            is_named = self.metadata.role(node, region.name) is not None
            if node == region.master or (is_named and node not in self.gone):
                continue
            if self.can_spare(node, region.voting):
                return self._command("demote", region) | {"node": node}
        return None

    def _command(self, do: str, region: Region) -> dict[str, Any]:
        return {"do": do, "region": region.name, "epoch": region.epoch}

    # ------------------------------------------------------------ members of Raft

    def _for_members(self) -> Iterator[Decision]:
        yield from self._removals()
        change = self._next_change()
        if change is not None:
            yield change

    def _removable(self) -> list[str]:
        """Return the nodes that are to leave and that no region holds."""
        regions = self.metadata.regions.values()
        return [
            node
            for node in self.gone
            if not any(holds(region, node, self.used) for region in regions)
        ]

    def _removals(self) -> Iterator[Decision]:
        for node in self._removable():
            if node in self.metadata.nodes and node not in self.members.all:
                seen = self.metadata.nodes[node].index
                yield Propose({"do": "remove", "node": node, "index": seen})

    def _next_change(self) -> Decision | None:
        members = self.members
        for node in self._removable():
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
            if len(members.voters) < MAX_VOTERS and self._may_vote(node):
                return ChangeMembers(members.with_voter(node))
        return None

    def _may_vote(self, node: str) -> bool:
        if node not in self.metadata.nodes or node in self.gone or not self.is_well(node):
            return False
        applied = self.report(node).applied
        return applied is None or self.metadata.index - applied <= MAX_LEARNER_LAG_ENTRIES

    def next_leader(self) -> str | None:
        fit = [node for node in self.members.voters if node not in self.gone and self.is_well(node)]
        return min((node for node in fit if node != self.leader), default=None)
