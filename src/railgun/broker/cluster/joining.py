"""Make a node a member of a cluster: it finds a cluster and joins it, or forms one with other nodes that have none.

Rules:

1. A node without a cluster asks all nodes that discovery finds for their identities, again and again. If one of them is
   a member, it asks that node to be let in. A node that was let in knows the ID of the cluster, and gets everything
   else by Raft.
2. If none is a member, and there are `bootstrap_expect` nodes (all with the same number), those with the lowest IDs
   form a cluster. The lowest of them chooses the cluster's ID, and saves the initial members before it tells the
   others; each node takes part in one formation only, and saves it before it agrees. So nodes that start at the same
   moment form one cluster. The number has to be that of all initial nodes: a smaller number could be reached twice. The
   time to wait for a leader (`election`) is set by the lowest node and sent along; nodes that join later are told.
3. A node that refuses belongs to another cluster. The refusal is logged, and the formation tried again.
4. Nodes that know the secret may talk to each other; an invalid request is refused, and ends nothing.
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

RETRY_PAUSE_S: Final = 0.3
_LOG: Final = logging.getLogger(__name__)


class JoinError(RailgunError):
    """A node cannot become a member this way."""

    code: ClassVar[str] = "CANNOT_JOIN"


class Joining:
    """The process by which a node becomes a member of a cluster."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.seeds: set[Address] = set()
        """Addresses of a cluster given by people, besides discovery."""
        self.status = ""
        """Why this node is not a member yet, as last logged."""
        self._refused: list[str] = []  # errors of nodes that did not tell their identity
        self._forming = asyncio.Lock()

    # ------------------------------------------------------------ looking for others

    async def find_cluster(self) -> None:
        """Try to join or form a cluster until this node is a member."""
        member = self._member
        while member.who.state == identity.ALONE:
            try:
                await self._try_once()
            except (RailgunError, OSError) as error:
                self._set_status(f"no cluster yet: {said(error)}")
            except Exception:
                _LOG.exception("looking for a cluster failed unexpectedly")
            if member.who.state == identity.ALONE:
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _try_once(self) -> None:
        member = self._member
        nodes = await self._ask_identities()
        members = [node for node in nodes if node["state"] == identity.MEMBER and node["cluster"]]
        clusters = {node["cluster"] for node in members}
        if len(clusters) > 1:
            raise JoinError(
                f"discovery finds nodes of several clusters: {', '.join(sorted(clusters))}. Correct it"
            )
        for node in members:
            if await self._join(node):
                return
        expect = member.config.bootstrap_expect
        alone = [node for node in nodes if node["state"] == identity.ALONE]
        if not expect or members:
            self._set_status("no cluster has let this node in yet" + self._why())
            return
        others = {node["expect"] for node in alone} - {expect}
        if others:
            raise JoinError(
                f"bootstrap_expect is {expect} here, and {', '.join(map(str, sorted(others)))} on other nodes: set "
                "it to the same number on all nodes that form a cluster"
            )
        if len(alone) + 1 < expect:
            progress = f"{len(alone) + 1} of {expect} nodes have been found to form a cluster"
            self._set_status(progress + self._why())
            return
        infos = sorted(
            [node["info"] for node in alone] + [member.info], key=lambda node: node["id"]
        )
        if infos[0]["id"] == member.me:
            await self._form(infos[:expect])

    async def _ask_identities(self) -> list[dict[str, Any]]:
        """Return the identities of the other nodes that answer, with their addresses."""
        member = self._member
        addresses = set(self.seeds)
        if member.discovery is not None:
            addresses |= set(await member.discovery.find())
        addresses.discard((member.info["cluster_host"], member.info["cluster_port"]))
        calls = [
            member.links.ask(address, "whoami", {"info": member.info}, 2.0) for address in addresses
        ]
        nodes: dict[str, dict[str, Any]] = {}
        refused: list[str] = []
        silent: list[str] = []
        for address, answer in zip(
            addresses, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(answer, PeerError):
                (silent if answer.code == "UNREACHABLE" else refused).append(str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            elif answer["id"] != member.me:
                nodes[answer["id"]] = answer | {"where": address}
        self._refused = sorted(refused) or sorted(silent)
        return list(nodes.values())

    def _why(self) -> str:
        """Return the errors of nodes that did not answer, in parentheses, or an empty text."""
        rest_text = f", and {len(self._refused) - 3} more" if len(self._refused) > 3 else ""
        return f" ({'; '.join(self._refused[:3])}{rest_text})" if self._refused else ""

    async def find_members(self) -> dict[str, Address]:
        """Return where members of this node's cluster were found, by ID."""
        cluster, nodes = self._member.who.cluster, await self._ask_identities()
        self._set_status("this node knows no leader" + self._why())
        return {node["id"]: node["where"] for node in nodes if node["cluster"] == cluster}

    def _set_status(self, text: str) -> None:
        if text != self.status:
            self.status = text
            _LOG.warning("%s", text)

    # ------------------------------------------------------------ joining, forming

    async def _join(self, node: dict[str, Any]) -> bool:
        member = self._member
        try:
            answer = await member.links.ask(node["where"], "join", {"info": member.info}, 10.0)
        except PeerError as error:
            if error.code in ("UNREACHABLE", "NO_LEADER", "NO_MASTER"):
                self._set_status(f"{node['name']} cannot let this node in now: {said(error)}")
                return False
            raise
        await self._begin(answer["cluster"], [], answer["nodes"], _election(answer))
        return True

    async def _form(self, infos: list[dict[str, Any]]) -> None:
        """Form a cluster of these nodes, and tell the others until all have agreed."""
        member = self._member
        cluster, ids = secrets.token_hex(8), [node["id"] for node in infos]
        _LOG.info("forming the cluster %s of %s", cluster, ", ".join(ids))
        election = member.config.election()
        await self._begin(cluster, ids, infos, election)
        request = {"cluster": cluster, "voters": ids, "nodes": infos, "election": election}
        waiting = [node for node in infos if node["id"] != member.me]
        while waiting:
            unreached = []
            for node in waiting:
                try:
                    address = (str(node["cluster_host"]), int(node["cluster_port"]))
                    await member.links.ask(address, "form", request, 2.0)
                except PeerError as error:
                    self._set_status(f"{node['name']} does not take part yet: {said(error)}")
                    unreached.append(node)
            waiting = unreached
            if waiting:
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _begin(
        self, cluster: str, voters: list[str], nodes: list[dict[str, Any]], election: float
    ) -> None:
        """Save this node's cluster, and take part in it. Raise `JoinError` if the node belongs to another cluster."""
        member = self._member
        async with self._forming:
            if member.who.state != identity.ALONE:
                if member.who.cluster != cluster:
                    raise JoinError(
                        f"this node belongs to the cluster {member.who.cluster}, not to {cluster}"
                    )
                return
            new_identity = identity.NodeIdentity(
                member.me, cluster, identity.BEGINS, list(voters), list(nodes), election
            )
            await member.loop.run_in_executor(None, identity.save, member.disk, new_identity)
            member.who = new_identity
            try:
                warnings = member.begin()
            except StorageError as error:
                if is_refusal(error):
                    member.fail(error)
                raise
            for line in warnings:
                _LOG.warning("%s", line)
            _LOG.warning("this node is a member of the cluster %s now", cluster)

    # ------------------------------------------------------------ calls of other nodes

    async def called(self, name: str, arguments: dict[str, Any]) -> Any:
        """Answer another node that asks for this node's identity, wants it to form a cluster, or wants to join."""
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
                raise JoinError("this node is not among the initial members")
            election = _election(arguments)
            await self._begin(str(arguments["cluster"]), voters, list(nodes or []), election)
            return {"cluster": member.who.cluster}
        info = arguments.get("info")
        if not isinstance(info, dict):
            raise JoinError("a request to join needs info about the node")
        await member.propose({"do": "node", "node": info}, timeout=8.0)
        return {
            "cluster": member.who.cluster,
            "nodes": [node.dump() for node in member.metadata.nodes.values()],
            "election": member.metadata.seconds("election"),
        }


def _election(settings: dict[str, Any]) -> float:
    """Return the seconds that nodes wait for a leader, as another node has sent them."""
    seconds = check_options({"election": settings.get("election")})["election"]
    assert isinstance(seconds, int | float)
    return float(seconds)
