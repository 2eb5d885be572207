"""How a node becomes a member: it finds a cluster and joins it, or forms one with others that have none.

Rules:

1. A node that belongs to no cluster asks all whom discovery finds who they are, again and again. If one of them is a
   member, it asks that one to be let in. A node that was let in knows the id of the cluster, and is told all else by
   Raft.
2. If nobody is, and as many as `bootstrap_expect` are there (all with the same number), those with the lowest ids form
   a cluster. The lowest of them chooses its id, and writes down with whom it begins before it tells the others; each
   takes part in one beginning, and writes that down before it says yes. So nodes that start at the same moment form
   one. The number has to be that of all who are to begin: a smaller one could be reached twice. How long nodes wait
   for a leader (`election`) is the lowest one's to say, and goes with it; who joins later is told.
3. Who says no belongs to another cluster. That is told, and tried again.
4. Nodes that know each other's secret talk; what is asked for wrongly is refused, and ends nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any, ClassVar, Final

from railgun.broker.cluster import identity
from railgun.broker.cluster.links import PeerError
from railgun.broker.discovery.plugin import Address
from railgun.broker.errors import StorageError, is_refusal
from railgun.broker.protocol.metadata.options import check_options
from railgun.errors import RailgunError, said

if TYPE_CHECKING:
    from railgun.broker.cluster.member import Member

AGAIN: Final = 0.3
_LOG: Final = logging.getLogger(__name__)


class JoinError(RailgunError):
    """A node cannot become a member so."""

    code: ClassVar[str] = "CANNOT_JOIN"


class Joining:
    """The way of a node into a cluster."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.seeds: set[Address] = set()
        """Where people say that there is a cluster, besides discovery."""
        self.told = ""
        """Why it is not a member yet, as it was told last."""
        self._refused: list[str] = []  # what those said who did not tell who they are
        self._forming = asyncio.Lock()

    # ------------------------------------------------------------ looking for others

    async def find_cluster(self) -> None:
        """Until this node is a member."""
        member = self._member
        while member.who.state == identity.ALONE:
            try:
                await self._look()
            except (RailgunError, OSError) as error:
                self._tell(f"no cluster yet: {said(error)}")
            except Exception:
                _LOG.exception("looking for a cluster has failed in a way nobody has thought of")
            if member.who.state == identity.ALONE:
                await asyncio.sleep(AGAIN)

    async def _look(self) -> None:
        member = self._member
        found = await self._whoami()
        members = [one for one in found if one["state"] == identity.MEMBER and one["cluster"]]
        clusters = {one["cluster"] for one in members}
        if len(clusters) > 1:
            raise JoinError(
                f"there are nodes of several clusters: {', '.join(sorted(clusters))}. Mend discovery"
            )
        for one in members:
            if await self._join(one):
                return
        expect = member.config.bootstrap_expect
        alone = [one for one in found if one["state"] == identity.ALONE]
        if not expect or members:
            self._tell("no cluster has let this node in yet" + self._why())
            return
        others = {one["expect"] for one in alone} - {expect}
        if others:
            raise JoinError(
                f"bootstrap_expect is {expect} here, and elsewhere {', '.join(map(str, sorted(others)))}: let it be "
                "the same on all nodes that form a cluster"
            )
        if len(alone) + 1 < expect:
            there = f"{len(alone) + 1} of {expect} nodes are there to form a cluster"
            self._tell(there + self._why())
            return
        infos = sorted([one["info"] for one in alone] + [member.info], key=lambda one: one["id"])
        if infos[0]["id"] == member.me:
            await self._form(infos[:expect])

    async def _whoami(self) -> list[dict[str, Any]]:
        """Who the others are; those that answer."""
        member = self._member
        where = set(self.seeds)
        if member.discovery is not None:
            where |= set(await member.discovery.find())
        where.discard((member.info["cluster_host"], member.info["cluster_port"]))
        asked = [member.links.ask(one, "whoami", {"info": member.info}, 2.0) for one in where]
        found: dict[str, dict[str, Any]] = {}
        refused: list[str] = []
        silent: list[str] = []
        for one, told in zip(
            where, await asyncio.gather(*asked, return_exceptions=True), strict=True
        ):
            if isinstance(told, PeerError):
                (silent if told.code == "UNREACHABLE" else refused).append(str(told))
            elif isinstance(told, BaseException):
                raise told
            elif told["id"] != member.me:
                found[told["id"]] = told | {"where": one}
        self._refused = sorted(refused) or sorted(silent)
        return list(found.values())

    def _why(self) -> str:
        """What some of the others say, or why they cannot be reached."""
        more = f", and {len(self._refused) - 3} more" if len(self._refused) > 3 else ""
        return f" ({'; '.join(self._refused[:3])}{more})" if self._refused else ""

    async def whereabouts(self) -> dict[str, Address]:
        """Where members of the own cluster were found, by their ids."""
        mine, found = self._member.who.cluster, await self._whoami()
        self._tell("nobody leads, as far as this node knows" + self._why())
        return {one["id"]: one["where"] for one in found if one["cluster"] == mine}

    def _tell(self, text: str) -> None:
        if text != self.told:
            self.told = text
            _LOG.warning("%s", text)

    # ------------------------------------------------------------ joining, forming

    async def _join(self, other: dict[str, Any]) -> bool:
        member = self._member
        try:
            told = await member.links.ask(other["where"], "join", {"info": member.info}, 10.0)
        except PeerError as error:
            if error.code in ("UNREACHABLE", "NO_LEADER", "NO_MASTER"):
                self._tell(f"{other['name']} cannot let this node in now: {said(error)}")
                return False
            raise
        await self._begin(told["cluster"], [], told["nodes"], _election(told))
        return True

    async def _form(self, infos: list[dict[str, Any]]) -> None:
        """Begin a cluster with these, and tell them until all know."""
        member = self._member
        cluster, ids = secrets.token_hex(8), [one["id"] for one in infos]
        _LOG.info("forming the cluster %s of %s", cluster, ", ".join(ids))
        election = member.config.election()
        await self._begin(cluster, ids, infos, election)
        given = {"cluster": cluster, "voters": ids, "nodes": infos, "election": election}
        waiting = [one for one in infos if one["id"] != member.me]
        while waiting:
            still = []
            for one in waiting:
                try:
                    where = (str(one["cluster_host"]), int(one["cluster_port"]))
                    await member.links.ask(where, "form", given, 2.0)
                except PeerError as error:
                    self._tell(f"{one['name']} does not take part yet: {said(error)}")
                    still.append(one)
            waiting = still
            if waiting:
                await asyncio.sleep(AGAIN)

    async def _begin(
        self, cluster: str, voters: list[str], nodes: list[dict[str, Any]], election: float
    ) -> None:
        """Write down what this node belongs to, and take part."""
        member = self._member
        async with self._forming:
            if member.who.state != identity.ALONE:
                if member.who.cluster != cluster:
                    raise JoinError(
                        f"this node belongs to the cluster {member.who.cluster}, not to {cluster}"
                    )
                return
            who = identity.Who(
                member.me, cluster, identity.BEGINS, list(voters), list(nodes), election
            )
            await member.loop.run_in_executor(None, identity.save, member.disk, who)
            member.who = who
            try:
                told = member.begin()
            except StorageError as error:
                if is_refusal(error):
                    member.fail(error)
                raise
            for line in told:
                _LOG.warning("%s", line)
            _LOG.warning("a member of the cluster %s now", cluster)

    # ------------------------------------------------------------ what others ask

    async def called(self, name: str, arguments: dict[str, Any]) -> Any:
        """Another node asks who this one is, to take part in a beginning, or to be let in."""
        member = self._member
        if name == "whoami":
            return {
                "id": member.me,
                "name": member.info["name"],
                "cluster": member.who.cluster,
                "state": member.who.state,
                "expect": member.config.bootstrap_expect,
                "info": member.info,
            }
        if name == "form":
            voters, nodes = arguments.get("voters"), arguments.get("nodes")
            if not isinstance(voters, list) or member.me not in voters:
                raise JoinError("this node is not among those who begin")
            election = _election(arguments)
            await self._begin(str(arguments["cluster"]), voters, list(nodes or []), election)
            return {"cluster": member.who.cluster}
        info = arguments.get("info")
        if not isinstance(info, dict):
            raise JoinError("whoever wants to join says who it is")
        await member.propose({"do": "node", "node": info}, timeout=8.0)
        return {
            "cluster": member.who.cluster,
            "nodes": [one.dump() for one in member.metadata.nodes.values()],
            "election": member.metadata.seconds("election"),
        }


def _election(told: dict[str, Any]) -> float:
    """How long nodes wait for a leader, as another node says."""
    seconds = check_options({"election": told.get("election")})["election"]
    assert isinstance(seconds, int | float)
    return float(seconds)
