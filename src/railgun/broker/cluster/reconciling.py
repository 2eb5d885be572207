"""Makes so on this node what all have agreed on: connections, files of streams, roles in regions.

Rules:

1. One task compares what is with what is to be. So it may be cut off at any point, and goes on from there after a
   restart; what cannot be done now is tried again a second later. A stream that cannot be had holds up no other, and
   no role; as long as there is one, the node is nobody's master (`undone`).
2. Files of a stream are removed if the metadata says that this very stream was deleted, and for no other reason.
3. A copy that was here and is not here any more is made anew, and knows that it has lost something. So it is written
   down which copies were ever made here.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from railgun.broker.cluster import identity
from railgun.broker.discovery.plugin import Address
from railgun.broker.log.group_log import Fold, GroupLog
from railgun.broker.protocol.metadata.nodes import NodeInfo
from railgun.broker.protocol.metadata.streams import StreamInfo
from railgun.broker.settings import StreamSettings
from railgun.broker.streams.persistent import Persistent
from railgun.errors import RailgunError

if TYPE_CHECKING:
    from railgun.broker.cluster.member import Member

_MADE: Final = Fold[int](lambda _, change: int(change), lambda n: b"%d" % n, int)
_LOG: Final = logging.getLogger(__name__)


class Reconciling:
    """See the rules of the module."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.addresses: dict[str, Address] = {}
        """Where nodes were found, if not where they were."""
        self._made, made = GroupLog.open(member.disk, "cluster/made", _MADE)
        self._made_ids = {int(id) for id in made}
        self.undone = ""
        """Why something that was agreed on is not so here, if so."""
        self._dirty = asyncio.Event()

    def dirty(self) -> None:
        """There is something to be made so."""
        self._dirty.set()

    def close(self) -> None:
        """Leave its file."""
        self._made.close()

    async def for_ever(self) -> None:
        """Whenever there is something to be made so."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            before, undone = self.undone, ""
            try:
                await self._reconcile()
            except RailgunError as error:
                undone = str(error)
                if undone != before:
                    _LOG.error("what was agreed on cannot be done now: %s", error)
                self._member.loop.call_later(1.0, self.dirty)
            except Exception:
                _LOG.exception("what was agreed on cannot be done, in a way nobody has thought of")
                self._member.loop.call_later(1.0, self.dirty)
            self.undone = undone
            self._member.notify()

    async def _reconcile(self) -> None:
        member = self._member
        metadata, node, regions = member.metadata, member.node, member.regions
        self._connect()
        if not metadata.cluster:
            return
        for name, stream in list(node.streams.items()):
            info = metadata.streams.get(name)
            if (info is None or info.id != stream.id) and stream.id in metadata.deleted:
                for region in regions:
                    region.remove(stream.id)
                await node.drop(name)
        wrong: RailgunError | None = None
        for info in list(metadata.streams.values()):
            try:
                await self._have(info)
            except RailgunError as error:
                wrong = wrong or error
        before = [region.led for region in regions]
        await regions.look(metadata)
        if before != [region.led for region in regions]:
            member.leasing.hurry()  # what was granted was for an epoch before
        nodes = [one.dump() for one in metadata.nodes.values()]
        if nodes != member.who.nodes:  # where to look for them after a restart
            member.who.nodes = nodes
            await member.loop.run_in_executor(None, identity.save, member.disk, member.who)
        if wrong is not None:
            raise wrong

    def _connect(self) -> None:
        """Know those who are members, and those with whom this one begins."""
        member = self._member
        nodes = list(member.metadata.nodes.values())
        if not member.metadata.cluster:
            nodes = [NodeInfo.of(one, 0) for one in member.who.nodes]
        known = {one.id: (one.cluster_host, one.cluster_port) for one in nodes}
        known |= {id: where for id, where in self.addresses.items() if id in known}
        known.pop(member.me, None)
        member.links.know(known)

    async def _have(self, info: StreamInfo) -> None:
        """Have a stream as it is to be, if it is to be here."""
        member = self._member
        node, metadata = member.node, member.metadata
        stream = node.streams.get(info.name)
        settings = StreamSettings.of(dict(info.settings))
        if stream is not None and stream.id != info.id:
            _LOG.error("stream %r here is another one than that of the cluster", info.name)
            return
        if stream is None:
            if settings.kind == "persistent" and not self._replicates(info.region):
                return
            lost = info.id in self._made_ids
            stream = await node.make(info.name, settings, info.id)
            if lost and isinstance(stream, Persistent):
                _LOG.error("stream %r was here, and is not any more: it is fetched", info.name)
                stream.groups_damaged = True
        elif stream.settings != settings:
            await node.change(info.name, settings)
        if info.id not in self._made_ids:  # also after a crash between the two
            await member.loop.run_in_executor(None, self._remember, info.id)
        if isinstance(stream, Persistent):
            region = member.regions.get(info.region)
            if info.id not in region.streams:
                there = metadata.regions.get(info.region)
                await region.add(stream, there.epoch_index if there is not None else 0)

    def _remember(self, id: int) -> None:
        self._made.append([(str(id), b"%d" % id)])
        self._made.sync()
        self._made_ids.add(id)

    def _replicates(self, region: str) -> bool:
        there = self._member.metadata.regions.get(region)
        if there is None:
            return False
        return self._member.me in {*there.voting, *there.learning, *there.active}
