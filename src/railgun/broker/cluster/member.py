"""A node as a member of a cluster: what it agrees on with the others, its copies, and who asks it for what.

Rules:

1. What is agreed on (`broker.protocol.metadata.machine`) is applied in order, and then made so on this node
   (`reconciling`).
2. Whatever is proposed is proposed to the leader, by way of any node that knows it, until it is applied or the time is
   up. It carries a name, so that it takes effect once. While no leader was found to send it to, nothing is in doubt: it
   is refused when a publish would be (`NO_MASTER`), at once without a quorum.
3. A node acts as a master while it has a lease; the leader grants them, and steers (`leasing`).
4. If nobody leads for a while, the others may have moved: whoever discovery finds is asked who they are.
5. What this node serves itself, and what is passed on, is said by `serves`; by `sidelined`, while it takes no part.
   A stream it has not heard of is not refused before the leader was asked how far it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, Final, TypeVar

from railgun.broker.cluster import identity
from railgun.broker.cluster.config import ClusterConfig
from railgun.broker.cluster.consensus import Consensus, LostProposalError, NoLeaderError
from railgun.broker.cluster.errors import ClusterError, NotYetError, RemovedError
from railgun.broker.cluster.events import Events
from railgun.broker.cluster.governing import CALLS, LEAVING, Governing
from railgun.broker.cluster.joining import Joining
from railgun.broker.cluster.leasing import Leasing
from railgun.broker.cluster.links import Identity, Lane, Links, PeerError
from railgun.broker.cluster.overview import Overview
from railgun.broker.cluster.raft_messages import decode_message, encode_message
from railgun.broker.cluster.reconciling import Reconciling
from railgun.broker.cluster.regions import Regions
from railgun.broker.cluster.sidelined import Sidelined
from railgun.broker.discovery import Discovery, discovery_of
from railgun.broker.discovery.plugin import Address
from railgun.broker.errors import NoMasterError, NoStreamError, StorageError, is_refusal
from railgun.broker.log.disk import Disk
from railgun.broker.protocol.metadata.machine import Metadata
from railgun.broker.protocol.metadata.nodes import NodeInfo
from railgun.broker.protocol.raft.messages import Members, NotLeaderError, Settings
from railgun.broker.settings import StreamSettings
from railgun.broker.streams.node import MIN_FREE_BYTES, Mode, Node
from railgun.broker.streams.persistent import Persistent
from railgun.broker.streams.routing import MASTER_WAIT, Here, Nobody, Place, There
from railgun.errors import RailgunError, said
from railgun.transport.commands import Blob

PATIENCE: Final = 10.0  # seconds that a proposal may take
STEER: Final = 0.1
AGAIN: Final = 0.05
LOST_SIGHT: Final = 2.0  # seconds without a leader before others are looked for
POSITIONS: Final = 5.0  # seconds between two reports of how far groups are
END_S: Final = 1.0  # seconds for a master to tell where a stream ends
SURE: Final = 0.05  # seconds for which it is known that there is no stream of a name
VERSION: Final = "0.1"
_LOG: Final = logging.getLogger(__name__)
T = TypeVar("T")


class Member:
    """One node of a cluster: see the rules of the module."""

    def __init__(
        self,
        node: Node,
        disk: Disk,
        config: ClusterConfig,
        moved: Callable[[Callable[[str], bool]], None],
        *,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
    ) -> None:
        self.node, self.disk, self.config = node, disk, config
        self.metadata = Metadata()
        self.loop = asyncio.get_running_loop()
        self.who = identity.load(disk)
        self.me = self.who.id
        self.info: dict[str, Any] = {}
        """What others are told of this node."""
        self.failed: RailgunError | None = None
        self.links = Links(
            Identity(self.me, self.who.cluster),
            config.secret,
            self,
            server_tls=server_tls,
            client_tls=client_tls,
        )
        self.regions = Regions(
            *(self.me, self.links, disk, node.committer, node.spawn, self.notify),
            lambda names: moved(names.__contains__),
            self.called_by,
            self._hand_over,
        )
        self.events = Events(node, self.links, self.me)
        self.consensus: Consensus | None = None
        self.leasing = Leasing(self)
        self.reconciling = Reconciling(self)
        self.overview = Overview(self)
        self.governing = Governing(self)
        self.sidelined = Sidelined(self)
        self.discovery: Discovery | None = None
        self.joining: Joining
        self.hint = ""
        """Who is said to lead."""
        self.clock_skew_s = 0.0
        """By how much this node's clock is certainly ahead of the leader's; below 0: behind."""
        self.troubles: dict[str, str] = {}
        """Why nodes can be nobody's master, by node, as the leader told last."""
        self.full = False
        """Whether there is hardly any room on its disk."""
        self._changed: asyncio.Future[None] = self.loop.create_future()
        self._tasks: list[asyncio.Task[Any]] = []
        self._told_positions: dict[str, dict[str, int]] = {}
        self._asking: set[str] = set()  # streams that nobody here has heard of: are there such?
        self._absent: dict[str, float] = {}  # there are not, for so long

    # ------------------------------------------------------------ begin and end

    async def start(self, client: Address, http: str | None) -> list[str]:
        """Listen for other nodes, and be a member, or become one; what there is to tell. `client`: for clients."""
        config = self.config
        told: list[str] = []
        await self.links.listen(config.host, config.port)
        address = config.advertise or (config.host, self.links.port)
        shown = config.advertise_client or client
        self.info = {
            "id": self.me,
            "name": config.name or f"{shown[0]}-{shown[1]}".replace(":", "_"),
            "host": shown[0],
            "port": shown[1],
            "cluster_host": address[0],
            "cluster_port": address[1],
            "regions": config.regions,
            "version": VERSION,
            **({"http": http} if http else {}),
        }
        self.discovery = discovery_of(config.discovery) if config.discovery else None
        self.joining = Joining(self)
        if self.who.state != identity.ALONE:
            try:
                told += self.begin()
            except StorageError as error:
                if not is_refusal(error):
                    raise
                self.fail(error)
        else:
            self._spawn(self.joining.find_cluster())
        if self.discovery is not None:
            self._spawn(self._announce(address))
        self._spawn(self.reconciling.for_ever())
        self._spawn(self.leasing.renew_for_ever())
        self._spawn(self.leasing.steer_for_ever())
        self._spawn(self._look_around())
        return told

    def begin(self) -> list[str]:
        """This node belongs to a cluster: take part. What it knew before stays known until it is told more."""
        who = self.who
        election = self.election
        settings = Settings(election=election, heartbeat=election / 8, lease=election * 0.7)
        consensus = Consensus(
            *(self.me, self.disk, "cluster/raft", _Applied(self), self._send_raft),
            settings=settings,
            seed=secrets.randbits(32),
            changed=self.leasing.led,
            failed=self.fail,
        )
        told = consensus.open(Members(tuple(who.voters)) if who.voters else None)
        if who.state == identity.MEMBER and not consensus.known:
            raise identity.LostIdentityError(
                f"{self.disk.where('cluster/raft')} is gone: this node may have voted, and does not know any more. "
                "Let it join as a new one, with an empty directory, and remove the old one (railgun cluster remove)"
            )
        if who.state != identity.MEMBER:
            who.state = identity.MEMBER
            identity.save(self.disk, who)
        self.links.identity.cluster = who.cluster
        self.consensus = consensus
        consensus.start()
        self.dirty()
        return told

    @property
    def leader(self) -> str | None:
        """Return who leads, if that is known; while this node takes no part, as the others say."""
        if self.failed is not None:
            return self.sidelined.leader
        return None if self.consensus is None else self.consensus.leader

    @property
    def election(self) -> float:
        """How long nodes wait for a leader."""
        return self.who.election or self.config.election()

    async def stop(self) -> None:
        """Take no more part."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self.regions.close()
        self.events.close()
        if self.consensus is not None:
            await self.consensus.close()
        if self.discovery is not None:
            with contextlib.suppress(RailgunError, OSError):
                await self.discovery.close()
        await self.links.close()
        self.reconciling.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self.loop.create_task(work))

    async def _announce(self, address: Address) -> None:
        assert self.discovery is not None
        while True:
            try:
                await self.discovery.announce(address, self.me)
                return
            except (RailgunError, OSError) as error:
                _LOG.warning("this node cannot be announced: %s", error)
            await asyncio.sleep(1.0)

    def fail(self, error: RailgunError) -> None:
        """Take no part any more, because of `error`: others serve in its place (`sidelined`)."""
        self.failed = error
        _LOG.critical("this node takes no part in its cluster any more: %s", error)
        for region in self.regions:
            region.lease = 0.0
        self.notify()
        self._spawn(self.sidelined.until_it_can_write())

    def was_removed(self) -> None:
        """The leader does not know this node any more."""
        if self.failed is None:
            self.fail(
                RemovedError(
                    "it was removed. Stop it; to have it back, start it as a new one, with an empty directory"
                )
            )

    # ------------------------------------------------------------ what is agreed on

    def dirty(self) -> None:
        """There is something to be made so."""
        self.reconciling.dirty()

    def learn(self, metadata: Metadata) -> None:
        """Know what was agreed on, unless more is known already: a log that is read again tells the past."""
        if metadata.index >= self.metadata.index:
            self.metadata = metadata
        self.dirty()
        self.notify()  # who waits for an entry need not wait until it is made so

    def notify(self) -> None:
        """Something has changed that others may wait for."""
        if not self._changed.done():
            self._changed.set_result(None)
        self._changed = self.loop.create_future()

    async def propose(self, command: dict[str, Any], timeout: float = PATIENCE) -> dict[str, Any]:
        """Have a command applied, and return what comes of it.

        Raises `ClusterError` if it is refused, `NoMasterError` if nobody was there to send it to (nothing was changed),
        and `NoLeaderError` if it was sent, and nobody knows what became of it.
        """
        given = {"request": secrets.token_hex(12), **command}
        began = self.loop.time()
        deadline, sent = began + timeout, False
        while True:
            try:
                told = await self._propose(given, deadline)
                if told["result"].get("error", {}).get("code") != "NOT_FORMED":
                    break
                given["request"] = secrets.token_hex(12)  # its first entry is under way
                error: RailgunError = NoLeaderError("the cluster is being formed")
            except (NotLeaderError, LostProposalError, NoLeaderError) as wrong:
                error = wrong
                sent = sent or isinstance(wrong, LostProposalError)
                if isinstance(wrong, NotLeaderError) and wrong.leader:
                    self.hint = wrong.leader
            patient_until = deadline if sent else min(deadline, began + self._master_wait)
            hopeless = not sent and self.has_no_quorum
            if hopeless or self.loop.time() + AGAIN >= patient_until:
                why = f"the cluster has no leader that can be reached: {said(error)}"
                if not sent:
                    raise NoMasterError(f"{why}. So nothing was changed", hopeless) from error
                raise NoLeaderError(f"{why}. It may be done or not") from error
            await asyncio.sleep(AGAIN)
        result: dict[str, Any] = told["result"]
        await self._seen(told["index"], deadline)
        if "error" in result:
            raise ClusterError(result["error"]["code"], result["error"]["text"])
        return result

    async def _propose(self, given: dict[str, Any], deadline: float) -> dict[str, Any]:
        consensus = self.consensus
        if consensus is None:
            raise NoLeaderError("this node is not a member of a cluster yet")
        if consensus.leads:
            async with asyncio.timeout_at(deadline):
                applied: dict[str, Any] = await consensus.propose(json.dumps(given).encode())
                return applied
        left = max(0.1, deadline - self.loop.time())
        leader = self.leader or self.hint
        if leader and leader != self.me and self.links.is_up(leader):
            try:
                return dict(await self.links.call(leader, "propose", {"command": given}, left))
            except PeerError as error:
                if error.code == NotLeaderError.code:
                    raise NotLeaderError(str(error), None) from error
                raise LostProposalError(str(error)) from error
        with contextlib.suppress(PeerError):
            await self.ask_around(min(left, 1.0))
        raise NoLeaderError("nobody leads, as far as this node knows")

    async def ask_around(self, timeout: float) -> None:
        """One of the others may know who leads."""
        for other in self.links.known:
            if self.links.is_up(other):
                told = await self.links.call(other, "leader", {}, timeout)
                if told and told != self.me:
                    self.hint = str(told)
                    return

    async def _seen(self, index: int, deadline: float) -> None:
        """Wait until this node has applied as much, and has done what follows; not for ever."""
        while self.loop.time() < deadline and self.metadata.index < index:
            await self.wait_for_change(0.1)

    async def wait_for_change(self, timeout: float) -> None:
        """Until something has changed, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._changed)

    # ------------------------------------------------------------ news

    @property
    def trouble(self) -> str:
        """Why this node cannot be anybody's master, if so."""
        found = self.node.displaced or next(
            (one.trouble for one in self.regions if one.trouble), ""
        )
        return found or self.reconciling.undone or (LEAVING if self.governing.leaving else "")

    def _look_for_room(self) -> None:
        """See whether another node should rather be master, because its disk has room."""
        with contextlib.suppress(OSError):
            self.full = self.disk.free() < (2 * MIN_FREE_BYTES if self.full else MIN_FREE_BYTES)

    async def _look_around(self) -> None:
        """If nobody leads for a while, the others may have moved. And tell how far groups are, now and then."""
        alone = 0.0
        beat = 0.0
        while True:
            await asyncio.sleep(0.5)
            self.overview.look()
            self._look_for_room()
            consensus = self.consensus
            if consensus is None:
                continue
            try:
                consensus.check_files()
                alone = 0.0 if self.leader else alone + 0.5
                if self.failed is None and self.leader is not None:
                    self.sidelined.forget()
                elif self.failed is None and alone >= LOST_SIGHT:
                    await self.sidelined.hear_news()
                if alone >= LOST_SIGHT and self.discovery is not None:
                    self.reconciling.addresses = await self.joining.whereabouts()
                    self.dirty()
                if self.leader or alone >= LOST_SIGHT:
                    await self._tell_news()
                beat += 0.5
                if beat >= POSITIONS:
                    beat = 0.0
                    await self._note_positions()
            except (RailgunError, OSError) as error:  # a TimeoutError is one
                _LOG.info("looking around: %s", error)
            except Exception:
                _LOG.exception("looking around has failed in a way nobody has thought of")

    async def _tell_news(self) -> None:
        """Let the others know where this node is, and what it is, if they believe something else."""
        mine = self.metadata.nodes.get(self.me)
        if self.failed is not None or (mine is None and self.metadata.cluster):
            return  # it takes no part, or was removed
        if mine is None or not mine.same_as(NodeInfo.of(self.info, mine.index)):
            try:
                await self.propose({"do": "node", "node": self.info}, timeout=2.0)
            except ClusterError as error:
                if error.code != "REMOVED":
                    raise
                self.was_removed()

    async def _note_positions(self) -> None:
        """Existence and coarse positions of groups, for everybody to know."""
        for region in self.regions:
            if not region.led:
                continue
            positions: dict[str, dict[str, int]] = {}
            for id, copy in region.streams.items():
                if copy.leads:
                    drivers = [one for one in copy.stream.groups.values() if one.tracked]
                    positions[str(id)] = {one.name: one.group.floor for one in drivers}
            before = self._told_positions
            gone = [
                [id, group]
                for id, groups in self.metadata.catalogue.groups.items()
                for group in groups
                if str(id) in positions and group not in positions[str(id)]
            ]
            news = {id: one for id, one in positions.items() if one and one != before.get(id)}
            if news or gone:
                command = {"do": "groups", "region": region.name, "epoch": region.led}
                await self.propose({**command, "positions": news, "gone": gone}, timeout=2.0)
                self._told_positions = before | news

    # ------------------------------------------------------------ what other nodes say

    def _send_raft(self, to: str, message: Any) -> None:
        self.links.send(to, "raft", encode_message(message))

    def received(self, sender: str, lane: Lane, command: Any, blob: Blob) -> None:
        """A message of another node."""
        if lane == "raft" and self.consensus is not None:
            self.consensus.step(sender, decode_message(command))
        elif lane == "data":
            self.regions.received(sender, command, blob)
        elif lane == "events":
            self.events.received(sender, command, blob)

    def up(self, peer: str, lane: Lane) -> None:
        """There is a new connection."""
        if lane == "data":
            self.regions.up(peer)
        elif lane == "events":
            self.events.up(peer)
        self.notify()

    def down(self, peer: str, lane: Lane) -> None:
        """A connection is lost."""
        if lane == "data":
            self.regions.down(peer)
        elif lane == "events":
            self.events.down(peer)
        self.notify()

    async def called(self, sender: str, name: str, arguments: dict[str, Any]) -> Any:
        """Another node asks for something."""
        match name:
            case "renew":
                return self.leasing.grant(sender, arguments.get("report") or {})
            case "propose":
                consensus = self.consensus
                if consensus is None:
                    raise NotYetError("this node is not a member of a cluster yet")
                return await consensus.propose(json.dumps(arguments["command"]).encode())
            case "leader":
                return self.leader
            case "news":
                failed = str(arguments.get("failed", ""))
                return self.sidelined.news(sender, int(arguments["index"]), failed)
            case "streams":
                return [self.node.describe(name) for name in self.led_streams()]
            case "whoami" | "form" | "join":
                return await self.joining.called(name, arguments)
            case _ if name in CALLS:
                return await self.governing.called(sender, name, arguments)
        raise ClusterError("NO_CALL", f"there is no call {name[:80]!r}")

    def called_by(self, id: str) -> str:
        """Return the name of a node by its id; the id, if no such node is known."""
        node = self.metadata.nodes.get(id)
        return id if node is None else node.name

    async def _hand_over(self, region: str) -> bool:
        """Let another node be master of a region; return whether one is, or is about to be."""
        self.leasing.hurry()  # the leader has to know of the trouble, if it asks again
        return await self.governing.give_way(region)

    def led_streams(self) -> list[str]:
        """The streams that this node is the master of, and serves."""
        return [copy.stream.name for r in self.regions for copy in r.streams.values() if copy.leads]

    # ------------------------------------------------------------ what the node asks for

    async def ensure(self, name: str, asked: dict[str, Any], mode: Mode) -> dict[str, Any]:
        """Make a stream what it is asked to be, on all nodes."""
        asked = dict(asked)
        region = asked.pop("region", None)
        command: dict[str, Any] = {
            "do": "ensure",
            "name": name,
            "asked": asked,
            "mode": mode,
            **({"region": region} if region else {}),
        }
        while True:
            stream = self.metadata.streams.get(name)
            existing = None if stream is None else dict(stream.settings)
            # What it will be if it is made, also if the stream that is there now is gone by then: valid in any case.
            command["defaults"] = asdict(StreamSettings.merged(existing, asked))
            if existing is not None:
                command["seen"] = existing
            try:
                told = await self.propose(command)  # who uses it waits until it is there
                return {"result": told["result"], "differs": told.get("differs", {})}
            except ClusterError as error:
                if error.code != "CHANGED":
                    raise

    def region_of(self, name: str) -> str | None:
        """Where a stream is kept."""
        info = self.metadata.streams.get(name)
        return None if info is None else info.region

    async def delete(self, name: str, dead_letters: bool) -> dict[str, Any]:
        """Take a stream away, on all nodes."""
        told = await self.propose({"do": "delete", "name": name, "dead_letters": dead_letters})
        deadline = self.loop.time() + 1.0
        while self.loop.time() < deadline and any(n in self.node.streams for n in told["deleted"]):
            await self.wait_for_change(0.05)
        return {"deleted": told["deleted"]}

    async def make_beside(self, stream: str, name: str, settings: StreamSettings) -> None:
        """Make a stream that keeps something for another one, in its region; returns when it is there."""
        info = self.metadata.streams.get(stream)
        if info is None:
            raise NoStreamError(f"there is no stream {stream!r}")
        asked = {"id_box": settings.id_box, "region": info.region}
        await self.ensure(name, asked, "warn")
        deadline = self.loop.time() + PATIENCE
        while name not in self.node.streams and self.loop.time() < deadline:
            await self.wait_for_change(0.1)
        if name not in self.node.streams:
            raise NoMasterError(f"{name!r} is not there yet")

    async def describe_all(self) -> list[dict[str, Any]]:
        """All streams of the cluster, as their masters describe them."""
        return await self.overview.streams()

    async def administer(self, call: str, arguments: dict[str, Any]) -> Any:
        """Do one of the calls that are about the cluster itself."""
        return await self.governing.administer(call, arguments)

    async def elsewhere(self, call: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
        """Let the master of a stream do a call, if that is another node."""
        return await self.governing.elsewhere(call, arguments)

    def status(self) -> dict[str, Any]:
        """How the cluster is, as far as this node knows."""
        return self.overview.status()

    def reasons(self) -> dict[str, str]:
        """Why this node is of no use, by code."""
        return self.overview.reasons()

    # ------------------------------------------------------------ where streams are served

    @property
    def master_wait(self) -> float:
        """Seconds that a write waits for a master."""
        return self.seconds("master_wait")

    @property
    def _master_wait(self) -> float:
        """The same, also before anything was agreed on."""
        return self.master_wait or MASTER_WAIT

    def seconds(self, setting: str) -> float:
        """Return a setting of the cluster that is a number of seconds."""
        return self.metadata.seconds(setting) or 0.0

    @property
    def cluster_id(self) -> str:
        """What tells this cluster from others; empty: it is not formed yet."""
        return self.who.cluster or self.metadata.cluster or ""

    def serves(self, stream: str, write: bool) -> Place:
        """Who serves a stream."""
        if self.failed is not None and not self._is_ephemeral(stream):
            place = self.sidelined.place(stream, write)
        else:
            place = self._place(stream, write)
        in_vain = isinstance(place, Nobody) or (write and isinstance(place, There))
        if in_vain and self.has_no_quorum:  # no master has a lease either
            told = "there is no quorum: nobody leads, as far as this node knows"
            return Nobody(NoMasterError(told), hopeless=True)
        return place

    def _is_ephemeral(self, stream: str) -> bool:
        info = self.metadata.streams.get(stream)
        return info is not None and info.settings.get("kind") == "ephemeral"

    @property
    def has_no_quorum(self) -> bool:
        """Return whether no node within reach has known a leader for longer than anybody waits for a master."""
        is_member = self.who.state != identity.ALONE and not isinstance(self.failed, RemovedError)
        if self.leader is not None or self.sidelined.leader is not None:
            return False
        return is_member and self.overview.leaderless_for > self._master_wait

    def _place(self, stream: str, write: bool) -> Place:
        info = self.metadata.streams.get(stream)
        if info is None:
            kept = self.node.streams.get(stream)
            lost_sight = not self.metadata.cluster or self.has_no_quorum
            if not write and lost_sight and isinstance(kept, Persistent):
                return (
                    Here()
                )  # after a restart without a leader, nobody tells which streams there are
            if not self.metadata.cluster:
                return Nobody(NotYetError("this node is not a member of a cluster yet"))
            return self._unknown(stream)
        here = self.node.streams.get(stream)
        if self._is_ephemeral(stream):
            return Here() if here is not None else Nobody(NoMasterError("it is being made here"))
        there = self.metadata.regions[info.region]
        copy = self.regions.get(info.region).streams.get(info.id)
        if not write and copy is not None and (copy.acting or not copy.trouble):
            return Here()
        if there.master == self.me:
            if copy is not None and (copy.acting or not write):
                return Here()
            region = self.regions.get(info.region)
            if write and copy is not None and region.has_no_heir and copy.trouble:
                raise copy.trouble_error
            return Nobody(NoMasterError(f"{stream!r}: its master has begun, and is not ready yet"))
        for other in [there.master] if write else [there.master, *there.voting]:
            node = self.metadata.nodes.get(other or "")
            if node is not None and node.id != self.me and self.links.is_up(node.id):
                return There(node.id, node.host, node.port)
        if not write and copy is not None:
            return Here()  # it cannot be written, and lacks what is new: nobody else can be asked
        return Nobody(NoMasterError(f"the master of region {info.region!r} cannot be reached"))

    def _unknown(self, stream: str) -> Place:
        """There is no such stream, or this node has not heard of it yet: it is refused when that is sure."""
        if self._absent.get(stream, 0.0) > self.loop.time():
            raise NoStreamError(
                f"there is no stream {stream[:200]!r}: make it (railgun stream ensure)"
            )
        if stream not in self._asking and self.consensus is not None:
            self._asking.add(stream)
            self.node.spawn(self._make_sure(stream, self.consensus))
        told = f"nobody leads who could tell whether there is a stream {stream[:200]!r}"
        return Nobody(NoMasterError(told))

    async def _make_sure(self, stream: str, consensus: Consensus) -> None:
        """Hear of all that was agreed on up to now."""
        try:
            await consensus.barrier()
            now = self.loop.time()
            self._absent = {name: until for name, until in self._absent.items() if until > now}
            self._absent[stream] = now + SURE
        except RailgunError:
            await asyncio.sleep(AGAIN)
        finally:
            self._asking.discard(stream)
            self.notify()

    async def end(self, stream: str) -> int | None:
        """Ask the master where a stream ends; None: it does not answer, is none any more, or has another stream."""
        here = self.node.streams.get(stream)
        try:
            place = self.serves(stream, write=True)
            if here is None or not isinstance(place, There):
                return None
            asked = {"call": "describe", "arguments": {"name": stream}}
            told = await self.links.call(place.node, "admin", asked, END_S)
        except RailgunError:
            return None
        is_same = told.get("identity") == self.node.identity_of(here)
        return int(told["end"]) if is_same and "from_copy" not in told else None

    async def wait(self, stream: str, write: bool) -> None:
        """Until the answer may be another one."""
        await self.wait_for_change(1.0)

    def nodes(self) -> list[tuple[str, int]]:
        """Where clients reach the nodes there are."""
        return [(one.host, one.port) for one in self.metadata.nodes.values()]


class _Applied:
    """Entries of Raft, as the metadata has them."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._metadata = Metadata()  # which may be older than what the member knows

    def apply(self, index: int, data: bytes) -> Any:
        """An entry."""
        try:
            command = json.loads(data)
        except ValueError:
            command = None
        result = self._metadata.apply(index, command)
        self._member.learn(self._metadata)
        return {"index": index, "result": result}

    def snapshot(self) -> bytes:
        """All that was applied."""
        return json.dumps(self._metadata.dump()).encode()

    def restore(self, index: int, data: bytes) -> None:
        """Be what a snapshot says."""
        self._metadata = Metadata.load(json.loads(data)) if data else Metadata()
        self._member.learn(self._metadata)
