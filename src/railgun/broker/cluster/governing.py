"""What people and programs do to a cluster: nodes leave or stay, masters and leaders move, settings change.

Rules:

1. Any node takes any of these calls. What only the leader can decide is asked of it, as long as there is time.
2. Nodes and masters are named by people: a name of a node will do where its id does.
3. *Handing over.* The master yields first: it takes nothing more, answers what it has taken, and never acts in its
   epoch again (`Region.yield_up`). Then its successor is proposed, and fences at once: no lease is waited for. A
   master that does not answer is left to steering. Only a voting replica that lives, is well and may be master gets a
   region.
4. *An orderly end* (`leave_for_now`): masterships go to replicas that have caught up, then the lead of Raft to
   another voter, within a bounded time; what is not done then is left to steering. Meanwhile the node reports that it
   is about to end, so that nobody hands it anything.
5. What is refused has a code, and nothing has changed. A call that waits and runs out of time says how things are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from railgun.broker.cluster import identity
from railgun.broker.cluster.config import address_of
from railgun.broker.cluster.consensus import Consensus, NoLeaderError
from railgun.broker.cluster.errors import ClusterError, NotYetError
from railgun.broker.cluster.links import PeerError
from railgun.broker.errors import NoMasterError
from railgun.broker.protocol.metadata.nodes import MASTER
from railgun.broker.protocol.metadata.options import check_asked
from railgun.broker.protocol.raft.messages import ChangeError, NotLeaderError
from railgun.broker.streams import admin
from railgun.broker.streams.routing import Nobody, There
from railgun.errors import RailgunError, said

if TYPE_CHECKING:
    from railgun.broker.cluster.member import Member

PATIENCE: Final = 10.0
AGAIN: Final = 0.05
GIVE_WAY_S: Final = 2.0  # in which a master that cannot write finds out who can
YIELD: Final = 7.0  # seconds for a master to answer what it has taken: more than `regions.DRAIN_S`
LEAVING: Final = "it is about to end"
CALLS: Final = frozenset({"here", "yield", "hand_over", "transfer", "lead", "remove", "admin"})
"""What other nodes ask for."""
_LOG: Final = logging.getLogger(__name__)
Told = dict[str, Any]


class Governing:
    """The calls that are about the cluster itself."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.leaving = False
        """Whether this node is about to end."""

    # ------------------------------------------------------------ what clients ask

    async def administer(self, call: str, given: dict[str, Any]) -> Any:
        """Do a call of `broker.streams.admin`."""
        member = self._member
        match call:
            case "cluster":
                return await member.overview.ask_all()
            case "nodes":
                return member.overview.nodes()
            case "join":
                return await self._join(**given)
        self._check_member()
        match call:
            case "remove_node":
                return await self._remove(**given)
            case "keep_node":
                node = self._node(given["node"])
                return await member.propose({"do": "stay", "node": node})
            case "transfer":
                return await self._transfer(**given)
            case "cluster_settings":
                change = given.get("change") or {}
                if not change:
                    return {"result": "UNCHANGED", "settings": dict(member.metadata.settings)}
                return await member.propose({"do": "settings", "change": check_asked(change)})
        raise ClusterError("NO_CALL", f"there is no call {call[:80]!r}")

    def _check_member(self) -> Consensus:
        consensus = self._member.consensus
        if consensus is None:
            raise NotYetError(
                "this node is not a member of a cluster yet: start the others, or say where one is "
                f"(railgun cluster join HOST:PORT). {self._member.joining.told}"
            )
        return consensus

    def _node(self, called: str) -> str:
        """The id of a node by its name, or by its id."""
        nodes = self._member.metadata.nodes
        if called in nodes:
            return called
        for node in nodes.values():
            if node.name == called:
                return node.id
        there = ", ".join(sorted(one.name for one in nodes.values()))
        raise ClusterError("UNKNOWN_NODE", f"there is no node {called[:80]!r}; there are {there}")

    async def _join(self, address: str, wait: float | None = None) -> Told:
        """Look for a cluster at this address, too."""
        member = self._member
        where = address_of(address)
        if where is None:
            raise ClusterError("BAD_REQUEST", f"{address[:80]!r} is no address: HOST:PORT")
        if member.who.state != identity.ALONE:
            raise ClusterError(
                "IS_MEMBER", f"this node belongs to the cluster {member.who.cluster} already"
            )
        member.joining.seeds.add(where)
        deadline = time.monotonic() + (wait or 0)
        while member.who.state == identity.ALONE and time.monotonic() < deadline:
            await asyncio.sleep(AGAIN)
        if member.who.state == identity.ALONE:
            return {"result": "LOOKING", "cluster": "", "why": member.joining.told}
        return {"result": "JOINED", "cluster": member.who.cluster, "why": ""}

    async def _remove(self, node: str, wait: float | None = None) -> Told:
        """Let a node leave; with `wait`, until it is gone."""
        member = self._member
        id = self._node(node)
        if id == member.me and (other := self._another()) is not None:
            # It may never hear that it is gone: whoever stays knows.
            given = {"node": id, "wait": wait or 0}
            return dict(await member.links.call(other, "remove", given, (wait or 0) + PATIENCE))
        told = await member.propose({"do": "leave", "node": id})
        deadline = time.monotonic() + (wait or 0)
        while id in member.metadata.nodes and time.monotonic() < deadline:
            if id not in member.metadata.wanted_gone:
                return {"result": "STAYS", "why": "somebody wants it to stay"}
            await member.wait_for_change(0.2)
        if id not in member.metadata.nodes:
            return {"result": "REMOVED", "why": ""}
        return {"result": told["result"], "why": self._why_not_gone(id)}

    def _another(self) -> str | None:
        """A node that stays, and is there."""
        member = self._member
        stay = [one for one in member.metadata.nodes if one not in member.metadata.wanted_gone]
        return next((one for one in stay if one != member.me and member.links.is_up(one)), None)

    def _why_not_gone(self, id: str) -> str:
        """What a node that is to leave still is."""
        metadata, consensus = self._member.metadata, self._member.consensus
        rules = [one.name for one in metadata.regions.values() if one.master == id]
        votes = [one.name for one in metadata.regions.values() if id in one.voting]
        if rules:
            return f"it is the master of {', '.join(rules)} until another one can be"
        if votes:
            return f"it votes in {', '.join(votes)}: the others have to be well, and caught up"
        if consensus is not None and id in consensus.members.all:
            return "it is a member of Raft until a majority of the others is well"
        return ""

    async def _transfer(self, node: str, region: str | None = None) -> Told:
        """Let a node be the master of a region; without one, let it lead."""
        id = self._node(node)
        if region is None:
            return dict(await self._ask_leader("lead", {"to": id}))
        return dict(await self._ask_leader("transfer", {"region": region, "to": id}))

    async def elsewhere(self, call: str, given: dict[str, Any]) -> tuple[bool, Any]:
        """Let the master of a stream do a call, if that is another node."""
        member = self._member
        name = str(given.get("name", ""))
        deadline = time.monotonic() + member.master_wait
        while isinstance(place := member.serves(name, write=True), Nobody):
            if place.hopeless or time.monotonic() >= deadline:
                if call in admin.OF_COPY and name in member.node.streams:
                    return False, None
                raise place.why
            await member.wait_for_change(min(1.0, member.master_wait))
        if not isinstance(place, There):
            return False, None
        asked = {"call": call, "arguments": given}
        return True, await member.links.call(place.node, "admin", asked, 600.0)

    # ------------------------------------------------------------ what nodes ask each other

    async def _ask_leader(self, name: str, given: Told, timeout: float = PATIENCE) -> Any:
        """Have the leader do it, whoever that is."""
        member = self._member
        deadline = time.monotonic() + timeout
        while True:
            consensus = self._check_member()
            try:
                if consensus.leads:
                    return await self.called(member.me, name, given)
                leader = member.leader
                if leader is None or leader == member.me:
                    raise NoLeaderError("nobody leads the cluster now")
                left = max(0.1, deadline - time.monotonic())
                return await member.links.call(leader, name, given, left)
            except (NoLeaderError, NotLeaderError, PeerError) as error:
                if member.has_no_quorum:
                    told = f"there is no quorum: {said(error)}. So nothing was changed"
                    raise NoMasterError(told, no_quorum=True) from error
                code = getattr(error, "code", "")
                passing = code in ("NO_LEADER", "NOT_LEADER", "UNREACHABLE")
                if not passing or time.monotonic() + AGAIN >= deadline:
                    raise
            await asyncio.sleep(AGAIN)

    async def called(self, sender: str, name: str, given: Told) -> Any:
        """Another node asks, or this one asks itself."""
        member = self._member
        match name:
            case "here":
                return member.overview.here()
            case "yield":
                await member.regions.get(str(given["region"])).yield_up(int(given["epoch"]))
                return {}
            case "admin" if given.get("call") in admin.OF_MASTER:
                return await admin.call(member.node, str(given["call"]), given["arguments"])
            case "hand_over":
                return await self._hand_over(str(given["node"]))
            case "transfer":
                return await self._move(str(given["region"]), str(given["to"]))
            case "lead":
                return self._let_lead(str(given["to"]))
            case "remove":
                return await self._remove(str(given["node"]), float(given["wait"]))
        raise ClusterError("NO_CALL", f"there is no call {name[:80]!r}")

    def _check_leads(self) -> Consensus:
        consensus = self._check_member()
        if not consensus.leads:
            raise NoLeaderError("this node does not lead the cluster")
        return consensus

    def _check_well(self, consensus: Consensus, node: str, what: str) -> None:
        member = self._member
        now = time.monotonic()
        if node != member.me and not member.leasing.steering.is_well(
            member.metadata, consensus.members, member.me, node, now
        ):
            raise ClusterError(
                "NOT_ELIGIBLE",
                f"{self._member.called_by(node)} cannot {what}: it is silent, or in trouble",
            )

    def _let_lead(self, to: str) -> Told:
        consensus = self._check_leads()
        if to == self._member.me:
            return {"result": "LEADS", "leader": to}
        self._check_well(consensus, to, "lead")
        if to not in consensus.members.voters:
            raise ClusterError(
                "NOT_ELIGIBLE", f"{self._member.called_by(to)} cannot lead: it does not vote"
            )
        consensus.transfer(to)
        return {"result": "MOVING", "leader": to}

    async def _move(self, name: str, to: str) -> Told:
        """As the leader: give a region to a node, if that can be."""
        member = self._member
        consensus = self._check_leads()
        region = member.metadata.regions.get(name)
        if region is None:
            there = ", ".join(sorted(member.metadata.regions))
            raise ClusterError("NO_REGION", f"there is no region {name[:80]!r}; there are {there}")
        if region.master == to:
            return {"result": "UNCHANGED", "epoch": region.epoch}
        if to not in region.voting or member.metadata.role(to, name) != MASTER:
            raise ClusterError(
                "NOT_ELIGIBLE",
                f"{self._member.called_by(to)} cannot be the master of region {name!r}: it has to vote there, and "
                "its file has to name it a master there",
            )
        self._check_well(consensus, to, f"be the master of region {name!r}")
        for left in (2, 1, 0):
            region = member.metadata.regions[name]
            await self._let_yield(name, region.master, region.epoch)
            command = {"do": "master", "region": name, "master": to, "epoch": region.epoch + 1}
            try:
                return await member.propose(command, timeout=3.0)
            except ClusterError as error:
                if error.code != "STALE" or not left:  # else it was given an epoch meanwhile
                    raise
        raise AssertionError

    async def _let_yield(self, region: str, master: str | None, epoch: int) -> None:
        member = self._member
        if master is None:
            return
        given = {"region": region, "epoch": epoch}
        if master == member.me:
            await self.called(member.me, "yield", given)
            return
        try:
            await member.links.call(master, "yield", given, YIELD)
        except PeerError as error:
            if error.code == "UNREACHABLE":
                raise ClusterError(
                    "UNREACHABLE",
                    f"the master of region {region!r}, {self._member.called_by(master)}, does not answer: another "
                    "one follows by itself when its lease is over",
                ) from error
            raise

    async def _hand_over(self, node: str) -> Told:
        """As the leader: give all regions of a node to others."""
        member = self._member
        consensus = self._check_leads()
        moved, kept = [], []
        for name, region in list(member.metadata.regions.items()):
            if region.master != node:
                continue
            now = time.monotonic()
            given = (member.metadata, consensus.members, member.me, name, now)
            to = member.leasing.steering.heir(*given)
            if to is None:
                kept.append(name)
                continue
            try:
                await self._move(name, to)
                moved.append(name)
            except RailgunError as error:
                _LOG.warning("region %r is not handed over: %s", name, error)
                kept.append(name)
        return {"moved": moved, "kept": kept}

    async def give_way(self, region: str) -> bool:
        """Let another node be master of a region, and of all others that this one has; return whether one is."""
        member = self._member
        told = await self._ask_leader("hand_over", {"node": member.me}, GIVE_WAY_S)
        return region not in told["kept"]

    # ------------------------------------------------------------ an orderly end

    async def leave_for_now(self, timeout: float) -> None:
        """Hand over what this node is, within this time."""
        consensus = self._member.consensus
        if consensus is None or self._member.failed is not None or consensus.leader is None:
            return
        self.leaving = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                try:
                    await self._give_regions()
                    await self._give_lead(consensus)
                except RailgunError as error:
                    _LOG.warning("not all is handed over: %s", error)

    async def _give_regions(self) -> None:
        member = self._member

        def mine() -> list[str]:
            return [one.name for one in member.metadata.regions.values() if one.master == member.me]

        before = mine()
        if not before:
            return
        told = await self._ask_leader("hand_over", {"node": member.me})
        while any(name in mine() for name in told["moved"]):
            await member.wait_for_change(0.05)
        regions = member.metadata.regions
        while any(name in regions and not regions[name].is_active for name in told["moved"]):
            await member.wait_for_change(0.05)
            regions = member.metadata.regions

    async def _give_lead(self, consensus: Consensus) -> None:
        member = self._member
        while consensus.leads:
            given = (member.metadata, consensus.members, member.me, time.monotonic())
            to = member.leasing.steering.next_leader(*given)
            if to is None:
                return
            with contextlib.suppress(ChangeError):
                consensus.transfer(to)
            deadline = time.monotonic() + 2 * consensus.settings.election
            while consensus.leads and time.monotonic() < deadline:
                await member.wait_for_change(0.05)
        while consensus.leader is None:
            await member.wait_for_change(0.05)
