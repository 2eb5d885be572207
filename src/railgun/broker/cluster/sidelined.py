"""A node whose log of Raft cannot be written, so that it takes no part: what it knows, and who serves in its place.

Rules:

1. What is not written is not said: the node votes for nobody, and asks for no lease. It keeps what it knew of the
   cluster, and asks the others every `LOOK_S` seconds for what was agreed on since, and who leads. It tells them why
   it takes no part; they believe it for `BELIEVED_S`, unless it takes part again: so what any node says of the cluster
   without asking around is what all would say.
2. Its copies may lack anything that is new, and nobody tells them. So streams are served by other nodes: writes by the
   master, readers without a group by any node with a copy. A copy of this node is for readers if no other node can be
   reached, and for nobody else.
3. If the disk has refused a write (a full disk, a limit, read-only), nothing was written: the node tries every `LOOK_S`
   seconds whether it can write now, and then takes part from what is there. What has failed otherwise takes a restart.
4. A node that takes part and knows no leader asks the others, too: a broken link may hide one. There is no quorum
   if nobody who takes part knows a leader. What a node was told by others it does not pass on.
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

LOOK_S: Final = 1.0
BELIEVED_S: Final = 5.0
_LOG: Final = logging.getLogger(__name__)


class Sidelined:
    """What a node does while it takes no part: see the rules of the module."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._leader: str | None = None
        self._unfit: set[str] = set()  # nodes that take no part either
        self._failed: dict[str, tuple[str, float]] = {}  # why others take none, and until when

    @property
    def leader(self) -> str | None:
        """Return who leads, as another node told last."""
        return self._leader

    def why_failed(self, id: str) -> str:
        """Return why a node takes no part, as it says itself; empty: it does, or is not heard of."""
        member = self._member
        if id == member.me:
            return str(member.failed or "")
        why, until = self._failed.get(id, ("", 0.0))
        return why if member.loop.time() < until else ""

    def takes_part(self, id: str) -> None:
        """Believe no more that a node takes no part: it does."""
        self._failed.pop(id, None)

    async def until_it_can_write(self) -> None:
        """Follow what the others agree on, and take part again when the log can be written."""
        member = self._member
        self.forget()
        while member.failed is not None and not isinstance(member.failed, RemovedError):
            try:
                await self.hear_news()
                if is_refusal(member.failed):
                    await self._try_again()
            except RailgunError as error:
                _LOG.info("a node that takes no part: %s", error)
            except Exception:
                _LOG.exception("a node that takes no part fails in a way nobody has thought of")
            if member.failed is not None:
                await asyncio.sleep(LOOK_S)

    async def _try_again(self) -> None:
        """Take part, if the log can be written now."""
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
        await self.hear_news()  # which tells the others, too

    # ------------------------------------------------------------ what the others know

    def news(self, sender: str, index: int, failed: str) -> dict[str, Any]:
        """Tell another node who leads, and what was agreed on, if that is more than the entries up to `index`.

        `failed`: why `sender`, who asks, takes no part; empty: it does.
        What this node knows by hearsay only is not passed on: two nodes would tell each other for ever of a leader that
        is none any more.
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

    async def hear_news(self) -> None:
        """Ask all others who leads, and what was agreed on."""
        member = self._member
        others = [id for id in member.links.known if member.links.is_up(id)]
        asked = {"index": member.metadata.index, "failed": str(member.failed or "")}
        calls = [member.links.call(id, "news", asked, LOOK_S) for id in others]
        leader: str | None = None
        unfit = set()
        for id, answer in zip(
            others, await asyncio.gather(*calls, return_exceptions=True), strict=True
        ):
            if isinstance(answer, PeerError):
                _LOG.info("node %s tells no news: %s", id, answer)
                continue
            if isinstance(answer, BaseException):
                raise answer
            if not answer["takes_part"]:
                unfit.add(id)
            if answer["leader"] not in (None, member.me):
                leader = answer["leader"]
            if member.failed is not None and answer["metadata"] is not None:
                member.learn(Metadata.load(answer["metadata"]))
        if (leader, unfit) != (self._leader, self._unfit):
            self._leader, self._unfit = leader, unfit
            member.notify()

    def forget(self) -> None:
        """Forget what others have told: this node takes part, and knows who leads."""
        self._leader, self._unfit = None, set()

    # ------------------------------------------------------------ who serves in its place

    def place(self, stream: str, write: bool) -> Place:
        """Return who serves a stream, or who can tell whether there is one."""
        member = self._member
        nodes = {one.id: one for one in self._nodes()}
        able = [id for id in nodes if id != member.me and id not in self._unfit]
        up = [id for id in able if member.links.is_up(id)]
        for id in self._able(stream, write) or [self._leader or "", *up]:
            if id in up:
                return There(id, nodes[id].host, nodes[id].port)
        if not write and isinstance(member.node.streams.get(stream), Persistent):
            return Here()
        why = f"this node takes no part in its cluster: {member.failed}"
        return Nobody(NoMasterError(why), hopeless=not up)

    def _nodes(self) -> Iterable[NodeInfo]:
        member = self._member
        agreed = list(member.metadata.nodes.values())
        return agreed or [NodeInfo.of(one, 0) for one in member.who.nodes]

    def _able(self, stream: str, write: bool) -> list[str]:
        """Return the nodes that serve a stream, as far as is known; none: the stream is not known here."""
        metadata = self._member.metadata
        info = metadata.streams.get(stream)
        if info is None:
            return []
        region = metadata.regions[info.region]
        return [region.master or "", *([] if write else region.voting)]
