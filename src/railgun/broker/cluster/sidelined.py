"""Keep a node useful that cannot write its Raft log and so takes no part: follow the cluster, let others serve.

Rules:

1. What is not written is not sent: the node votes for no other node, and asks for no lease. It keeps what it knew of
   the cluster, and asks the other nodes every `ASK_INTERVAL_S` seconds for newer metadata and for the leader. It tells
   them why it takes no part; they believe that for `BELIEVED_S`, unless it takes part again: so every node, even
   without asking the others, gives the same account of the cluster.
2. Its copies may lack new messages, unnoticed. So streams are served by other nodes: writes by the master, readers
   without a group by any node with a copy. A copy of this node serves readers only, and only if no other node can be
   reached.
3. If the disk has refused a write (a full disk, a limit, read-only), nothing was written: every `ASK_INTERVAL_S`
   seconds the node tries whether it can write now, and then takes part from what is on disk. Other failures need a
   restart.
4. A node that takes part and knows no leader asks the others, too: a broken link may hide the leader. There is no
   quorum if no node that takes part knows a leader. What a node was told by others it does not pass on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from railgun.broker.cluster.errors import RemovedError
from railgun.broker.cluster.links import PeerError
from railgun.broker.errors import NoMasterError, is_refusal
from railgun.broker.protocol.metadata.machine import Metadata
from railgun.broker.protocol.metadata.nodes import NodeInfo
from railgun.broker.streams.persistent import Persistent
from railgun.broker.streams.routing import Here, Nobody, Place, There
from railgun.errors import RailgunError

if TYPE_CHECKING:
    from railgun.broker.cluster.member import Member

ASK_INTERVAL_S: Final = 1.0
BELIEVED_S: Final = 5.0
_LOG: Final = logging.getLogger(__name__)


class Sidelined:
    """The duties of a node while it takes no part: see the rules of the module."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._leader: str | None = None
        self._unfit: set[str] = set()  # nodes that take no part either
        # Why other nodes take no part, and until when that is believed.
        self._failed: dict[str, tuple[str, float]] = {}

    @property
    def leader(self) -> str | None:
        """The ID of the leader, as another node last told it."""
        return self._leader

    def why_failed(self, id: str) -> str:
        """Return why a node takes no part, as it says itself; empty: it takes part, or has not been heard from."""
        member = self._member
        if id == member.me:
            return str(member.failed or "")
        why, until = self._failed.get(id, ("", 0.0))
        return why if member.loop.time() < until else ""

    def takes_part(self, id: str) -> None:
        """Note that a node takes part, whatever it said before."""
        self._failed.pop(id, None)

    async def run_until_writable(self) -> None:
        """Follow the metadata of the other nodes, and take part again when the log can be written."""
        member = self._member
        self.forget()
        while member.failed is not None and not isinstance(member.failed, RemovedError):
            try:
                await self.ask_news()
                if is_refusal(member.failed):
                    await self._try_again()
            except RailgunError as error:
                _LOG.info("a node that takes no part: %s", error)
            except Exception:
                _LOG.exception("following the cluster without taking part failed unexpectedly")
            if member.failed is not None:
                await asyncio.sleep(ASK_INTERVAL_S)

    async def _try_again(self) -> None:
        """Take part if the log can be written now."""
        member = self._member
        try:
            if member.consensus is not None:
                await member.consensus.probe()
                await member.consensus.close()
            member.begin()
        except RailgunError as error:
            if str(error) != str(member.failed):
                _LOG.critical("this node takes no part in its cluster: %s", error)
            member.failed = error
            return
        member.failed = None
        _LOG.warning("the log of Raft can be written again: this node takes part")
        member.notify()
        await self.ask_news()  # this also tells the other nodes

    # ------------------------------------------------------------ news

    def news(self, sender: str, index: int, failed: str) -> dict[str, Any]:
        """Return the leader, and the metadata if it is newer than entry `index`, for another node.

        `failed`: why `sender`, which asks, takes no part; empty: it takes part. What this node was only told by
        others is not passed on: otherwise two nodes could go on telling each other of a leader that has long been
        replaced.
        """
        member, metadata = self._member, self._member.metadata
        if failed:
            self._failed[sender] = failed, member.loop.time() + BELIEVED_S
        else:
            self.takes_part(sender)
        takes_part = member.failed is None and member.consensus is not None
        return {
            "leader": member.leader if takes_part else None,
            "takes_part": takes_part,
            "metadata": metadata.dump() if metadata.index > index else None,
        }

    async def ask_news(self) -> None:
        """Ask all other nodes for the leader and for newer metadata."""
        member = self._member
        others = [id for id in member.links.known if member.links.is_up(id)]
        request = {"index": member.metadata.index, "failed": str(member.failed or "")}
        calls = [member.links.call(id, "news", request, ASK_INTERVAL_S) for id in others]
        leader: str | None = None
        unfit = set()
        for id, answer in zip(
            others, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(answer, PeerError):
                _LOG.info("node %s does not tell its news: %s", id, answer)
                continue
            if isinstance(answer, BaseException):
                raise answer
            if not answer["takes_part"]:
                unfit.add(id)
            if answer["leader"] not in (None, member.me):
                leader = answer["leader"]
            if member.failed is not None and answer["metadata"] is not None:
                member.adopt(Metadata.load(answer["metadata"]))
        if (leader, unfit) != (self._leader, self._unfit):
            self._leader, self._unfit = leader, unfit
            member.notify()

    def forget(self) -> None:
        """Forget what other nodes have told: this node takes part, and knows the leader."""
        self._leader, self._unfit = None, set()

    # ------------------------------------------------------------ serving in its place

    def place(self, stream: str, write: bool) -> Place:
        """Return the place that serves a stream, or a node that can tell whether there is such a stream."""
        member = self._member
        nodes = {node.id: node for node in self._known_nodes()}
        fit = [id for id in nodes if id != member.me and id not in self._unfit]
        up = [id for id in fit if member.links.is_up(id)]
        for id in self._serving_nodes(stream, write) or [self._leader or "", *up]:
            if id in up:
                return There(id, nodes[id].host, nodes[id].port)
        if not write and isinstance(member.node.streams.get(stream), Persistent):
            return Here()
        why = f"this node takes no part in its cluster: {member.failed}"
        return Nobody(NoMasterError(why), hopeless=not up)

    def _known_nodes(self) -> Iterable[NodeInfo]:
        member = self._member
        nodes = list(member.metadata.nodes.values())
        return nodes or [NodeInfo.of(info, 0) for info in member.who.nodes]

    def _serving_nodes(self, stream: str, write: bool) -> list[str]:
        """Return the nodes that serve a stream, as far as is known; an empty list if the stream is unknown here."""
        metadata = self._member.metadata
        info = metadata.streams.get(stream)
        if info is None:
            return []
        region = metadata.regions[info.region]
        return [region.master or "", *([] if write else region.voting)]
