"""Bring this node in line with the agreed metadata: connections, files of streams, roles in regions.

Rules:

1. One task compares the actual state with the agreed one. So it may be interrupted at any point, and goes on after a
   restart; what cannot be done now is tried again a second later. A stream that cannot be created delays no other
   stream, and no role; as long as there is such a stream, the node may not be master (`undone`).
2. Files of a stream are removed if the metadata says that this very stream was deleted, and for no other reason.
3. A copy that was on this node and is missing is made anew, and marked as having lost data. For that, the node records
   which copies it has ever made.
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

_MADE_FOLD: Final = Fold[int](lambda _, change: int(change), lambda n: b"%d" % n, int)
_LOG: Final = logging.getLogger(__name__)


class Reconciling:
    """The task that carries out the agreed metadata: see the rules of the module."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.addresses: dict[str, Address] = {}
        """Addresses of nodes that were found elsewhere than the metadata says."""
        self._made, made = GroupLog.open(member.disk, "cluster/made", _MADE_FOLD)
        self._made_ids = {int(id) for id in made}
        self.undone = ""
        """Why the agreed metadata could not be carried out here, or an empty text."""
        self._requested = asyncio.Event()

    def reconcile_soon(self) -> None:
        """Ask for another comparison with the metadata."""
        self._requested.set()

    def close(self) -> None:
        """Close the record of copies."""
        self._made.close()

    async def run(self) -> None:
        """Carry out the metadata whenever it has changed."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            before, undone = self.undone, ""
            try:
                await self._reconcile()
            except RailgunError as error:
                undone = str(error)
                if undone != before:
                    _LOG.error("the agreed metadata cannot be carried out now: %s", error)
                self._member.loop.call_later(1.0, self.reconcile_soon)
            except Exception:
                _LOG.exception("carrying out the agreed metadata failed unexpectedly")
                self._member.loop.call_later(1.0, self.reconcile_soon)
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
        failure: RailgunError | None = None
        for info in list(metadata.streams.values()):
            try:
                await self._ensure_stream(info)
            except RailgunError as error:
                failure = failure or error
        before = [region.led for region in regions]
        await regions.apply(metadata)
        if before != [region.led for region in regions]:
            member.leasing.renew_soon()  # the lease was granted for an earlier epoch
        nodes = [one.dump() for one in metadata.nodes.values()]
        if nodes != member.who.nodes:  # remembered for a start without a leader
            member.who.nodes = nodes
            await member.loop.run_in_executor(None, identity.save, member.disk, member.who)
        if failure is not None:
            raise failure

    def _connect(self) -> None:
        """Connect to all members, or to the initial members before the cluster is formed."""
        member = self._member
        nodes = list(member.metadata.nodes.values())
        if not member.metadata.cluster:
            nodes = [NodeInfo.of(info, 0) for info in member.who.nodes]
        addresses = {info.id: (info.cluster_host, info.cluster_port) for info in nodes}
        addresses |= {id: address for id, address in self.addresses.items() if id in addresses}
        addresses.pop(member.me, None)
        member.links.know(addresses)

    async def _ensure_stream(self, info: StreamInfo) -> None:
        """Create or change a stream as the metadata says, if this node has to have it."""
        member = self._member
        node, metadata = member.node, member.metadata
        stream = node.streams.get(info.name)
        settings = StreamSettings.of(dict(info.settings))
        if stream is not None and stream.id != info.id:
            _LOG.error("stream %r on this node is not the cluster's stream of that name", info.name)
            return
        if stream is None:
            if settings.kind == "persistent" and not self._replicates(info.region):
                return
            was_here = info.id in self._made_ids
            stream = await node.make(info.name, settings, info.id)
            if was_here and isinstance(stream, Persistent):
                _LOG.error("stream %r is missing on this node: it is fetched again", info.name)
                stream.groups_damaged = True
        elif stream.settings != settings:
            await node.change(info.name, settings)
        # A crash may have left a stream that is made and not recorded.
        if info.id not in self._made_ids:
            await member.loop.run_in_executor(None, self._remember, info.id)
        if isinstance(stream, Persistent):
            region = member.regions.get(info.region)
            if info.id not in region.streams:
                region_info = metadata.regions.get(info.region)
                await region.add(stream, region_info.epoch_index if region_info is not None else 0)

    def _remember(self, id: int) -> None:
        self._made.append([(str(id), b"%d" % id)])
        self._made.sync()
        self._made_ids.add(id)

    def _replicates(self, region: str) -> bool:
        info = self._member.metadata.regions.get(region)
        if info is None:
            return False
        return self._member.me in {*info.voting, *info.learning, *info.active}
