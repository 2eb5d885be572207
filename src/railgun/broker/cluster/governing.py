"""Serve the administration of a cluster: let nodes leave or stay, move masters and the leader, change settings.

Rules:

1. Any node takes any of these calls. What only the leader can decide is passed on to it, until the timeout.
2. People name nodes: a node's name works wherever its ID does.
3. *Handing over.* The master yields first: it takes nothing more, answers what it has taken, and never acts in its
   epoch again (`Region.yield_up`). Then its successor is proposed, and fences at once, without waiting for a lease to
   end. A master that does not answer is left to steering. Only a voting replica that is alive, healthy and may be
   master gets a region.
4. *An orderly end* (`leave_for_now`): masterships go to replicas that have caught up, then the leadership of Raft goes
   to another voter, within a bounded time; the rest is left to steering. Meanwhile the node reports that it is about to
   end, so that nothing is handed to it.
5. A refusal has a code, and nothing has changed. A call that waits and runs out of time returns the current state.
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

CALL_TIMEOUT_S: Final = 10.0
RETRY_PAUSE_S: Final = 0.05
GIVE_WAY_S: Final = 2.0  # time for a master that cannot write to find a successor
YIELD_TIMEOUT_S: Final = (
    7.0  # time for a master to answer what it has taken: more than `regions.DRAIN_S`
)
LEAVING: Final = "it is about to end"
NODE_CALLS: Final = frozenset({"here", "yield", "hand_over", "transfer", "lead", "remove", "admin"})
"""Calls from other nodes."""
_LOG: Final = logging.getLogger(__name__)
Result = dict[str, Any]


class Governing:
    """The calls that concern the cluster itself."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.leaving = False
        """Whether this node is about to end."""

    # ------------------------------------------------------------ calls of clients

    async def administer(self, call: str, arguments: dict[str, Any]) -> Any:
        """Run a call of `broker.streams.admin`. Raise `ClusterError` if it is refused."""
        member = self._member
        match call:
            case "cluster":
                return await member.overview.ask_all()
            case "nodes":
                return member.overview.nodes()
            case "join":
                return await self._join(**arguments)
        self._check_member()
        match call:
            case "remove_node":
                return await self._remove(**arguments)
            case "keep_node":
                node = self._node(arguments["node"])
                return await member.propose({"do": "stay", "node": node})
            case "transfer":
                return await self._transfer(**arguments)
            case "cluster_settings":
                change = arguments.get("change") or {}
                if not change:
                    return {"result": "UNCHANGED", "settings": dict(member.metadata.settings)}
                return await member.propose({"do": "settings", "change": check_asked(change)})
        raise ClusterError("NO_CALL", f"there is no call {call[:80]!r}")

    def _check_member(self) -> Consensus:
        consensus = self._member.consensus
        if consensus is None:
            raise NotYetError(
                "this node is not a member of a cluster yet: start the other nodes, or name one "
                f"(railgun cluster join HOST:PORT). {self._member.joining.status}"
            )
        return consensus

    def _node(self, name: str) -> str:
        """Return the ID of a node, given its name or its ID. Raise `ClusterError` if there is none."""
        nodes = self._member.metadata.nodes
        if name in nodes:
            return name
        for node in nodes.values():
            if node.name == name:
                return node.id
        names = ", ".join(sorted(node.name for node in nodes.values()))
        raise ClusterError("UNKNOWN_NODE", f"there is no node {name[:80]!r}; there are {names}")

    async def _join(self, address: str, wait: float | None = None) -> Result:
        """Look for a cluster at this address, too, for up to `wait` seconds."""
        member = self._member
        seed = address_of(address)
        if seed is None:
            raise ClusterError(
                "BAD_REQUEST", f"{address[:80]!r} is not an address: write HOST:PORT"
            )
        if member.who.state != identity.ALONE:
            raise ClusterError(
                "IS_MEMBER", f"this node belongs to the cluster {member.who.cluster} already"
            )
        member.joining.seeds.add(seed)
        deadline = time.monotonic() + (wait or 0)
        while member.who.state == identity.ALONE and time.monotonic() < deadline:
            await asyncio.sleep(RETRY_PAUSE_S)
        if member.who.state == identity.ALONE:
            return {"result": "LOOKING", "cluster": "", "why": member.joining.status}
        return {"result": "JOINED", "cluster": member.who.cluster, "why": ""}

    async def _remove(self, node: str, wait: float | None = None) -> Result:
        """Let a node leave; with `wait`, wait that many seconds until it is gone."""
        member = self._member
        id = self._node(node)
        if id == member.me and (remaining := self._remaining_node()) is not None:
            # This node may never learn that it is gone: a node that stays does.
            arguments = {"node": id, "wait": wait or 0}
            return dict(
                await member.links.call(
                    remaining, "remove", arguments, (wait or 0) + CALL_TIMEOUT_S
                )
            )
        outcome = await member.propose({"do": "leave", "node": id})
        deadline = time.monotonic() + (wait or 0)
        while id in member.metadata.nodes and time.monotonic() < deadline:
            if id not in member.metadata.wanted_gone:
                return {"result": "STAYS", "why": "it was asked to stay"}
            await member.wait_for_change(0.2)
        if id not in member.metadata.nodes:
            return {"result": "REMOVED", "why": ""}
        return {"result": outcome["result"], "why": self._removal_blocker(id)}

    def _remaining_node(self) -> str | None:
        """Return a node that stays and can be reached, or None."""
        member = self._member
        remaining = [
            candidate
            for candidate in member.metadata.nodes
            if candidate not in member.metadata.wanted_gone
        ]
        return next(
            (
                candidate
                for candidate in remaining
                if candidate != member.me and member.links.is_up(candidate)
            ),
            None,
        )

    def _removal_blocker(self, id: str) -> str:
        """Return why a leaving node is still a member, or an empty text."""
        metadata, consensus = self._member.metadata, self._member.consensus
        mastered = [region.name for region in metadata.regions.values() if region.master == id]
        voting = [region.name for region in metadata.regions.values() if id in region.voting]
        if mastered:
            return f"it is the master of {', '.join(mastered)} until another node can be"
        if voting:
            return f"it votes in {', '.join(voting)}: the others have to be healthy, and caught up"
        if consensus is not None and id in consensus.members.all:
            return "it is a member of Raft until a majority of the others is healthy"
        return ""

    async def _transfer(self, node: str, region: str | None = None) -> Result:
        """Make a node the master of `region`; without a region, make it the leader."""
        id = self._node(node)
        if region is None:
            return dict(await self._call_leader("lead", {"to": id}))
        return dict(await self._call_leader("transfer", {"region": region, "to": id}))

    async def elsewhere(self, call: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
        """Let the master of a stream run a call. Return whether it is another node, and its result."""
        member = self._member
        name = str(arguments.get("name", ""))
        deadline = time.monotonic() + member.master_wait
        while isinstance(place := member.serves(name, write=True), Nobody):
            if place.hopeless or time.monotonic() >= deadline:
                if call in admin.OF_COPY and name in member.node.streams:
                    return False, None
                raise place.why
            await member.wait_for_change(min(1.0, member.master_wait))
        if not isinstance(place, There):
            return False, None
        request = {"call": call, "arguments": arguments}
        return True, await member.links.call(place.node, "admin", request, 600.0)

    # ------------------------------------------------------------ calls between nodes

    async def _call_leader(
        self, name: str, arguments: Result, timeout: float = CALL_TIMEOUT_S
    ) -> Any:
        """Run a call on the leader, which may be this node. Retry until `timeout` seconds have passed."""
        member = self._member
        deadline = time.monotonic() + timeout
        while True:
            consensus = self._check_member()
            try:
                if consensus.leads:
                    return await self.called(member.me, name, arguments)
                leader = member.leader
                if leader is None or leader == member.me:
                    raise NoLeaderError("the cluster has no leader now")
                left_s = max(0.1, deadline - time.monotonic())
                return await member.links.call(leader, name, arguments, left_s)
            except (NoLeaderError, NotLeaderError, PeerError) as error:
                if member.has_no_quorum:
                    error_text = f"there is no quorum: {said(error)}. Nothing was changed"
                    raise NoMasterError(error_text, no_quorum=True) from error
                code = getattr(error, "code", "")
                passing = code in ("NO_LEADER", "NOT_LEADER", "UNREACHABLE")
                if not passing or time.monotonic() + RETRY_PAUSE_S >= deadline:
                    raise
            await asyncio.sleep(RETRY_PAUSE_S)

    async def called(self, sender: str, name: str, arguments: Result) -> Any:
        """Run a call of another node, or of this one."""
        member = self._member
        match name:
            case "here":
                return member.overview.local_report()
            case "yield":
                await member.regions.get(str(arguments["region"])).yield_up(int(arguments["epoch"]))
                return {}
            case "admin" if arguments.get("call") in admin.OF_MASTER:
                return await admin.call(member.node, str(arguments["call"]), arguments["arguments"])
            case "hand_over":
                return await self._hand_over(str(arguments["node"]))
            case "transfer":
                return await self._move_region(str(arguments["region"]), str(arguments["to"]))
            case "lead":
                return self._transfer_lead(str(arguments["to"]))
            case "remove":
                return await self._remove(str(arguments["node"]), float(arguments["wait"]))
        raise ClusterError("NO_CALL", f"there is no call {name[:80]!r}")

    def _check_leads(self) -> Consensus:
        consensus = self._check_member()
        if not consensus.leads:
            raise NoLeaderError("this node does not lead the cluster")
        return consensus

    def _check_healthy(self, consensus: Consensus, node: str, what: str) -> None:
        member = self._member
        now = time.monotonic()
        if node != member.me and not member.leasing.steering.is_well(
            member.metadata, consensus.members, member.me, node, now
        ):
            raise ClusterError(
                "NOT_ELIGIBLE",
                f"{self._member.name_of(node)} cannot {what}: it does not answer, or is in trouble",
            )

    def _transfer_lead(self, to: str) -> Result:
        consensus = self._check_leads()
        if to == self._member.me:
            return {"result": "LEADS", "leader": to}
        self._check_healthy(consensus, to, "lead")
        if to not in consensus.members.voters:
            raise ClusterError(
                "NOT_ELIGIBLE", f"{self._member.name_of(to)} cannot lead: it does not vote"
            )
        consensus.transfer(to)
        return {"result": "MOVING", "leader": to}

    async def _move_region(self, name: str, to: str) -> Result:
        """Give a region to a node, as the leader. Raise `ClusterError` if the node is not eligible."""
        member = self._member
        consensus = self._check_leads()
        region = member.metadata.regions.get(name)
        if region is None:
            names = ", ".join(sorted(member.metadata.regions))
            raise ClusterError("NO_REGION", f"there is no region {name[:80]!r}; there are {names}")
        if region.master == to:
            return {"result": "UNCHANGED", "epoch": region.epoch}
        if to not in region.voting or member.metadata.role(to, name) != MASTER:
            raise ClusterError(
                "NOT_ELIGIBLE",
                f"{self._member.name_of(to)} cannot be the master of region {name!r}: it has to vote there, and "
                "its settings file has to allow it to be master there",
            )
        self._check_healthy(consensus, to, f"be the master of region {name!r}")
        for attempts_left in (2, 1, 0):
            region = member.metadata.regions[name]
            await self._yield_region(name, region.master, region.epoch)
            command = {"do": "master", "region": name, "master": to, "epoch": region.epoch + 1}
            try:
                return await member.propose(command, timeout=3.0)
            except ClusterError as error:
                # STALE: the region got a new epoch meanwhile, so try again.
                if error.code != "STALE" or not attempts_left:
                    raise
        raise AssertionError

    async def _yield_region(self, region: str, master: str | None, epoch: int) -> None:
        member = self._member
        if master is None:
            return
        arguments = {"region": region, "epoch": epoch}
        if master == member.me:
            await self.called(member.me, "yield", arguments)
            return
        try:
            await member.links.call(master, "yield", arguments, YIELD_TIMEOUT_S)
        except PeerError as error:
            if error.code == "UNREACHABLE":
                raise ClusterError(
                    "UNREACHABLE",
                    f"the master of region {region!r}, {self._member.name_of(master)}, does not answer: another "
                    "master follows when its lease is over",
                ) from error
            raise

    async def _hand_over(self, node: str) -> Result:
        """Give all regions of a node to others, as the leader. Return the regions that moved and those that did not."""
        member = self._member
        consensus = self._check_leads()
        moved, kept, failed = [], [], []
        for name, region in list(member.metadata.regions.items()):
            if region.master != node:
                continue
            now = time.monotonic()
            state = (member.metadata, consensus.members, member.me, name, now)
            to = member.leasing.steering.next_master(*state)
            if to is None:
                kept.append(name)
                continue
            try:
                await self._move_region(name, to)
                moved.append(name)
            except RailgunError as error:
                _LOG.warning("region %r is not handed over: %s", name, error)
                failed.append(name)
        return {"moved": moved, "kept": kept, "failed": failed}

    async def give_way(self, region: str) -> bool:
        """Hand a region, and all others of this node, over to other nodes.

        Return False if no other node can be the master of `region`. Raise `ClusterError` or another `RailgunError` if
        it could not be handed over now, though another node may be able to.
        """
        member = self._member
        outcome = await self._call_leader("hand_over", {"node": member.me}, GIVE_WAY_S)
        if region in outcome.get("failed", ()):
            raise ClusterError("NOT_MOVED", f"region {region!r} could not be moved now")
        return region not in outcome["kept"]

    # ------------------------------------------------------------ an orderly end

    async def leave_for_now(self, timeout: float) -> None:
        """Hand over masterships and leadership within `timeout` seconds."""
        consensus = self._member.consensus
        if consensus is None or self._member.failed is not None or consensus.leader is None:
            return
        self.leaving = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                try:
                    await self._hand_over_regions()
                    await self._hand_over_lead(consensus)
                except RailgunError as error:
                    _LOG.warning("some duties could not be handed over: %s", error)

    async def _hand_over_regions(self) -> None:
        member = self._member

        def mastered_here() -> list[str]:
            return [
                region.name
                for region in member.metadata.regions.values()
                if region.master == member.me
            ]

        before = mastered_here()
        if not before:
            return
        outcome = await self._call_leader("hand_over", {"node": member.me})
        while any(name in mastered_here() for name in outcome["moved"]):
            await member.wait_for_change(0.05)
        regions = member.metadata.regions
        while any(name in regions and not regions[name].is_active for name in outcome["moved"]):
            await member.wait_for_change(0.05)
            regions = member.metadata.regions

    async def _hand_over_lead(self, consensus: Consensus) -> None:
        member = self._member
        while consensus.leads:
            state = (member.metadata, consensus.members, member.me, time.monotonic())
            to = member.leasing.steering.next_leader(*state)
            if to is None:
                return
            with contextlib.suppress(ChangeError):
                consensus.transfer(to)
            deadline = time.monotonic() + 2 * consensus.settings.election
            while consensus.leads and time.monotonic() < deadline:
                await member.wait_for_change(0.05)
        while consensus.leader is None:
            await member.wait_for_change(0.05)
