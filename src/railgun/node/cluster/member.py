"""A node as a member of a cluster: what it agrees on with the others, its copies, and who asks it for what.

Rules:

1. What is agreed on (`core.cluster.metadata`) is applied in order, and then made so on this node: connections, files of
   streams, roles in regions. That is done by one task, which compares what is with what is to be; so it may be cut
   off at any point, and goes on from there after a restart.
2. Files of a stream are removed if the metadata says that this very stream was deleted, and for no other reason.
   A copy that was here and is not here any more is made anew, and knows that it has lost something.
3. Whatever is proposed is proposed to the leader, by way of any node that knows it, until it is applied or the time is
   up. It carries a name, so that it takes effect once.
4. Each node tells the leader how it is, every fifth part of an election, and is told for how long it may act as
   a master: counted from before it asked.
5. The leader steers (`core.cluster.steering`): looks at all of it ten times a second, and does what is decided.
6. If nobody leads for a while, the others may have moved: whoever discovery finds is asked who they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, ClassVar, Final, TypeVar

from railgun.core.cluster.catalogue import StreamInfo
from railgun.core.cluster.metadata import Metadata
from railgun.core.cluster.nodes import NodeInfo
from railgun.core.cluster.steering import ChangeMembers, Propose, Steering, Transfer
from railgun.core.errors import RailgunError
from railgun.core.raft.messages import ChangeError, Members, NotLeaderError, Settings
from railgun.node.cluster import identity
from railgun.node.cluster.config import ClusterConfig
from railgun.node.cluster.consensus import Consensus, LostProposalError, NoLeaderError
from railgun.node.cluster.discovery import Discovery, discovery_of
from railgun.node.cluster.events import Events
from railgun.node.cluster.joining import Joining
from railgun.node.cluster.links import Address, Identity, Lane, Links, PeerError
from railgun.node.cluster.regions import Regions
from railgun.node.disk import Disk
from railgun.node.errors import NoMasterError, NoStreamError
from railgun.node.grouplog import Fold, GroupLog
from railgun.node.node import Mode, Node
from railgun.node.persistent import Persistent
from railgun.node.routing import Here, Nobody, Place, There
from railgun.node.settings import StreamSettings
from railgun.wire.raft import decode_message, encode_message

PATIENCE: Final = 10.0  # seconds that a proposal may take
STEER: Final = 0.1
AGAIN: Final = 0.05
LOST_SIGHT: Final = 2.0  # seconds without a leader before others are looked for
POSITIONS: Final = 5.0  # seconds between two reports of how far groups are
VERSION: Final = "0.1"
_LOG: Final = logging.getLogger(__name__)
_MADE: Final = Fold[int](lambda _, change: int(change), lambda n: b"%d" % n, int)
T = TypeVar("T")


class ClusterError(RailgunError):
    """What the cluster says to a proposal; `code` is its word for it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class NotYetError(RailgunError):
    """This node is not a member yet: there is no cluster, or it has not heard of it."""

    code: ClassVar[str] = "NO_CLUSTER"


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
        )
        self._moved = moved
        self._masters: dict[str, str | None] = {}  # of regions, as sessions know them
        self.events = Events(node, self.links, self.me)
        self.consensus: Consensus | None = None
        self.steering = Steering()
        self.discovery: Discovery | None = None
        self.joining: Joining
        self._addresses: dict[str, Address] = {}  # where nodes were found, if not where they were
        self._made: GroupLog[int]
        self._made_ids: set[int] = set()
        self._leading = False
        self._hint = ""  # who is said to lead
        self._dirty = asyncio.Event()
        self._changed: asyncio.Future[None] = self.loop.create_future()
        self._tasks: list[asyncio.Task[Any]] = []
        self._told_positions: dict[str, dict[str, int]] = {}
        self._closing = False

    # ------------------------------------------------------------ begin and end

    async def start(self, client: Address, http: str | None) -> list[str]:
        """Listen for other nodes, and be a member, or become one; what there is to tell. `client`: for clients."""
        config = self.config
        told: list[str] = []
        self._made, made = GroupLog.open(self.disk, "cluster/made", _MADE)
        self._made_ids = {int(id) for id in made}
        await self.links.listen(config.host, config.port)
        address = config.advertise or (config.host, self.links.port)
        shown = config.advertise_client or client
        self.info = {
            "id": self.me,
            "name": config.name or f"{shown[0]}-{shown[1]}",
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
            told += self.begin()
        else:
            self._spawn(self.joining.find_cluster())
        if self.discovery is not None:
            self._spawn(self._announce(address))
        self._spawn(self._reconcile_for_ever())
        self._spawn(self._renew_for_ever())
        self._spawn(self._steer_for_ever())
        self._spawn(self._look_around())
        return told

    def begin(self) -> list[str]:
        """This node belongs to a cluster: take part."""
        who = self.who
        election = self.config.election()
        settings = Settings(election=election, heartbeat=election / 8, lease=election * 0.7)
        self.consensus = Consensus(
            *(self.me, self.disk, "cluster/raft", _Applied(self), self._send_raft),
            settings=settings,
            seed=secrets.randbits(32),
            changed=self._led,
            failed=self._fail,
        )
        told = self.consensus.open(Members(tuple(who.voters)) if who.voters else None)
        if who.state == identity.MEMBER and not self.consensus.known:
            raise identity.LostIdentityError(
                f"{self.disk.where('cluster/raft')} is gone: this node may have voted, and does not know any more. "
                "Let it join as a new one, with an empty directory, and remove the old one (railgun cluster remove)"
            )
        if who.state != identity.MEMBER:
            who.state = identity.MEMBER
            identity.save(self.disk, who)
        self.links.identity.cluster = who.cluster
        self.consensus.start()
        self.dirty()
        return told

    async def stop(self) -> None:
        """Take no more part."""
        self._closing = True
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
        self._made.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self.loop.create_task(work))

    async def _announce(self, address: Address) -> None:
        assert self.discovery is not None
        while True:
            try:
                await self.discovery.announce(address, self.me)
                return
            except RailgunError as error:
                _LOG.warning("this node cannot be announced: %s", error)
            await asyncio.sleep(1.0)

    def _fail(self, error: RailgunError) -> None:
        self.failed = error
        _LOG.critical("this node takes no part in its cluster any more: %s", error)
        for region in self.regions:
            region.lease = 0.0
        self.notify()

    # ------------------------------------------------------------ what is agreed on

    def dirty(self) -> None:
        """There is something to be made so."""
        self._dirty.set()

    def notify(self) -> None:
        """Something has changed that others may wait for."""
        if not self._changed.done():
            self._changed.set_result(None)
        self._changed = self.loop.create_future()

    async def propose(self, command: dict[str, Any], timeout: float = PATIENCE) -> dict[str, Any]:
        """Have a command applied: what comes of it; `ClusterError` if it is refused."""
        given = {"request": secrets.token_hex(12), **command}
        deadline = self.loop.time() + timeout
        while True:
            try:
                told = await self._propose(given, deadline)
                if told["result"].get("error", {}).get("code") != "NOT_FORMED":
                    break
                given["request"] = secrets.token_hex(12)  # its first entry is under way
                error: RailgunError = NoLeaderError("the cluster is being formed")
            except (NotLeaderError, LostProposalError, NoLeaderError, PeerError) as wrong:
                error = wrong
                if isinstance(wrong, NotLeaderError) and wrong.leader:
                    self._hint = wrong.leader
            if self.loop.time() + AGAIN >= deadline:
                raise NoLeaderError(
                    f"the cluster has no leader that can be reached: {error}. It may be done or not"
                ) from error
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
        leader = consensus.leader or self._hint
        if leader and leader != self.me:
            with contextlib.suppress(KeyError):
                return dict(await self.links.call(leader, "propose", {"command": given}, left))
        await self._ask_around(min(left, 1.0))
        raise NoLeaderError("nobody leads, as far as this node knows")

    async def _ask_around(self, timeout: float) -> None:
        """One of the others may know who leads."""
        for other in self.links.known:
            if self.links.is_up(other):
                told = await self.links.call(other, "leader", {}, timeout)
                if told and told != self.me:
                    self._hint = str(told)
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

    # ------------------------------------------------------------ making it so

    async def _reconcile_for_ever(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._reconcile()
            except RailgunError as error:
                _LOG.error("what was agreed on cannot be done now: %s", error)
                self.loop.call_later(1.0, self.dirty)
            except Exception:
                _LOG.exception("what was agreed on cannot be done, in a way nobody has thought of")
                self.loop.call_later(1.0, self.dirty)
            self.notify()

    async def _reconcile(self) -> None:
        metadata = self.metadata
        self._connect()
        if not metadata.cluster:
            return
        for name, stream in list(self.node.streams.items()):
            info = metadata.streams.get(name)
            if (info is None or info.id != stream.id) and stream.id in metadata.deleted:
                for region in self.regions:
                    region.remove(stream.id)
                await self.node.drop(name)
        for info in list(metadata.streams.values()):
            await self._have(info)
        await self.regions.look(metadata)
        self._tell_moved()
        nodes = [node.dump() for node in metadata.nodes.values()]
        if nodes != self.who.nodes:  # where to look for them after a restart
            self.who.nodes = nodes
            await self.loop.run_in_executor(None, identity.save, self.disk, self.who)

    def _tell_moved(self) -> None:
        """Sessions that hang on a former master come again."""
        masters = {one.name: one.master for one in self.metadata.regions.values()}
        gone = {name for name, master in self._masters.items() if masters.get(name) != master}
        self._masters = masters
        if gone:
            streams = {one.name for one in self.metadata.streams.values() if one.region in gone}
            self._moved(streams.__contains__)

    def _connect(self) -> None:
        """Know those who are members, and those with whom this one begins."""
        nodes = list(self.metadata.nodes.values())
        if not self.metadata.cluster:
            nodes = [NodeInfo.of(one, 0) for one in self.who.nodes]
        known = {one.id: (one.cluster_host, one.cluster_port) for one in nodes}
        known |= {id: where for id, where in self._addresses.items() if id in known}
        known.pop(self.me, None)
        self.links.know(known)

    async def _have(self, info: StreamInfo) -> None:
        """Have a stream as it is to be, if it is to be here."""
        stream = self.node.streams.get(info.name)
        settings = StreamSettings.of(dict(info.settings))
        if stream is not None and stream.id != info.id:
            _LOG.error("stream %r here is another one than that of the cluster", info.name)
            return
        if stream is None:
            if settings.kind == "persistent" and not self._replicates(info.region):
                return
            lost = info.id in self._made_ids
            stream = await self.node.make(info.name, settings, info.id)
            if lost and isinstance(stream, Persistent):
                _LOG.error("stream %r was here, and is not any more: it is fetched", info.name)
                stream.groups_damaged = True
            elif not lost:
                await self.loop.run_in_executor(None, self._remember, info.id)
        elif stream.settings != settings:
            await self.node.change(info.name, settings)
        if isinstance(stream, Persistent):
            region = self.regions.get(info.region)
            if info.id not in region.streams:
                there = self.metadata.regions.get(info.region)
                await region.add(stream, there.epoch_index if there is not None else 0)

    def _remember(self, id: int) -> None:
        self._made.append([(str(id), b"%d" % id)])
        self._made.sync()
        self._made_ids.add(id)

    def _replicates(self, region: str) -> bool:
        there = self.metadata.regions.get(region)
        if there is None:
            return False
        return self.me in {*there.voting, *there.learning, *there.active}

    # ------------------------------------------------------------ leases, and the leader

    def _led(self) -> None:
        """Raft has another leader, term or members."""
        consensus = self.consensus
        leads = consensus is not None and consensus.leads
        if leads and not self._leading:
            self.steering.began(time.monotonic())
        self._leading = leads
        self.notify()

    async def _renew_for_ever(self) -> None:
        while True:
            pause = self.config.election() / 5
            consensus = self.consensus
            if consensus is not None and self.failed is None:
                try:
                    await self._renew(consensus, 2 * pause)
                except RailgunError:
                    pause = AGAIN
            await asyncio.sleep(pause)

    async def _renew(self, consensus: Consensus, timeout: float) -> None:
        asked = time.monotonic()
        report = self._report(consensus)
        leader = consensus.leader or self._hint
        if consensus.leads:
            told = self._grant(self.me, report)
        elif leader:
            told = await self.links.call(leader, "renew", {"report": report}, timeout)
        else:
            await self._ask_around(timeout)
            return
        if "leader" in told:
            self._hint = told["leader"]
        for name, epoch in told.get("epochs", {}).items():
            self.regions.get(name).granted(epoch, asked + told["lease"])

    def _report(self, consensus: Consensus) -> dict[str, Any]:
        regions: dict[str, Any] = {}
        trouble = ""
        for region in self.regions:
            told = region.report(self.metadata)
            if told is not None:
                regions[region.name] = told
            trouble = trouble or region.trouble
        return {"regions": regions, "trouble": trouble, "applied": consensus.applied}

    def _grant(self, node: str, report: dict[str, Any]) -> dict[str, Any]:
        """A node tells how it is, and wants to act for a while longer."""
        consensus = self.consensus
        if consensus is None or not consensus.leads:
            leader = (consensus.leader if consensus is not None else "") or ""
            return {"leader": "" if leader == self.me else leader}
        now = time.monotonic()
        self.steering.heard(node, report, now)
        metadata = self.metadata
        if self.steering.refuses(metadata, consensus.members, self.me, node, now):
            return {"lease": 0.0, "epochs": {}}
        left = consensus.lease_left()
        epochs = {one.name: one.epoch for one in metadata.regions.values() if one.master == node}
        if left > 0 and epochs:
            self.steering.granted(node, now + left)
        return {"lease": left, "epochs": epochs}

    async def _steer_for_ever(self) -> None:
        while True:
            await asyncio.sleep(STEER)
            try:
                await self._steer()
            except (RailgunError, TimeoutError) as error:
                _LOG.info("steering: %s", error)
            except Exception:
                _LOG.exception("steering has failed in a way nobody has thought of")

    async def _steer(self) -> None:
        consensus = self.consensus
        if consensus is None or not consensus.leads:
            return
        if not self.metadata.cluster:
            await consensus.barrier()
            if not self.metadata.cluster:
                await self.propose(
                    {
                        "do": "form",
                        "cluster": self.who.cluster,
                        "nodes": self.who.nodes,
                        "settings": self.config.settings,
                    }
                )
            return
        if self.metadata.cluster and consensus.commit < consensus.last_index:
            return  # decisions look at what is applied
        now = time.monotonic()
        for decision in self.steering.decide(self.metadata, consensus.members, self.me, now):
            match decision:
                case Propose(command):
                    _LOG.info("steering: %s", command)
                    with contextlib.suppress(ClusterError):
                        await self.propose(command, timeout=2.0)
                case ChangeMembers(members):
                    _LOG.info("steering: members %s", members)
                    with contextlib.suppress(ChangeError):
                        await consensus.change(members)
                case Transfer(to):
                    consensus.transfer(to)

    async def _look_around(self) -> None:
        """If nobody leads for a while, the others may have moved. And tell how far groups are, now and then."""
        alone = 0.0
        beat = 0.0
        while True:
            await asyncio.sleep(0.5)
            consensus = self.consensus
            if consensus is None:
                continue
            try:
                alone = 0.0 if consensus.leader else alone + 0.5
                if alone >= LOST_SIGHT and self.discovery is not None:
                    self._addresses = await self.joining.whereabouts()
                    self.dirty()
                if consensus.leader or alone >= LOST_SIGHT:
                    await self._tell_news()
                beat += 0.5
                if beat >= POSITIONS:
                    beat = 0.0
                    await self._note_positions()
            except (RailgunError, TimeoutError) as error:
                _LOG.info("looking around: %s", error)

    async def _tell_news(self) -> None:
        """Let the others know where this node is, and what it is, if they believe something else."""
        mine = self.metadata.nodes.get(self.me)
        if mine is None and self.metadata.cluster:
            return  # it was removed
        if mine is None or not mine.is_as(NodeInfo.of(self.info, mine.index)):
            await self.propose({"do": "node", "node": self.info}, timeout=2.0)

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

    def received(self, sender: str, lane: Lane, command: Any, blob: bytearray) -> None:
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
                return self._grant(sender, arguments.get("report") or {})
            case "propose":
                consensus = self.consensus
                if consensus is None:
                    raise NotYetError("this node is not a member of a cluster yet")
                return await consensus.propose(json.dumps(arguments["command"]).encode())
            case "leader":
                return self.consensus.leader if self.consensus is not None else None
            case "state":
                return self._state()
            case "streams":
                return [self.node.describe(name) for name in self._led_streams()]
            case "whoami" | "form" | "join":
                return await self.joining.called(name, arguments)
        raise ClusterError("NO_CALL", f"there is no call {name[:80]!r}")

    def _state(self) -> dict[str, Any]:
        """Who leads, and how the regions are on this node."""
        consensus = self.consensus
        return {
            "node": self.me,
            "leader": consensus.leader if consensus is not None else None,
            "term": consensus.term if consensus is not None else 0,
            "regions": {
                region.name: {
                    "epoch": region.led,
                    "serves": region.active and region.may_act(),
                    "caught_up": region.caught_up(),
                }
                for region in self.regions
            },
        }

    def _led_streams(self) -> list[str]:
        return [copy.stream.name for r in self.regions for copy in r.streams.values() if copy.leads]

    # ------------------------------------------------------------ what the node asks for

    async def ensure(self, name: str, asked: dict[str, Any], mode: Mode) -> dict[str, Any]:
        """Make a stream what it is asked to be, on all nodes."""
        asked = dict(asked)
        region = asked.pop("region", None)
        wanted = StreamSettings.of(asked)
        command: dict[str, Any] = {
            "do": "ensure",
            "name": name,
            "asked": asked,
            "defaults": asdict(wanted),
            "mode": mode,
            **({"region": region} if region else {}),
        }
        while True:
            stream = self.metadata.streams.get(name)
            if stream is not None:
                merged = dict(stream.settings) | asked
                if mode == "overwrite":
                    StreamSettings.of(merged)
                command["seen"] = dict(stream.settings)
            try:
                return await self._ensured(name, await self.propose(command))
            except ClusterError as error:
                if error.code != "CHANGED":
                    raise

    async def _ensured(self, name: str, told: dict[str, Any]) -> dict[str, Any]:
        """Wait a moment, so that who has made it finds it here."""
        deadline = self.loop.time() + 1.0
        while told["result"] == "CREATED" and self.loop.time() < deadline:
            try:
                if not isinstance(self.serves(name, write=True), Nobody):
                    break
            except NoStreamError:
                pass
            await self.wait_for_change(0.05)
        return {"result": told["result"], "differs": told.get("differs", {})}

    async def delete(self, name: str, dead_letters: bool) -> dict[str, Any]:
        """Take a stream away, on all nodes."""
        told = await self.propose({"do": "delete", "name": name, "dead_letters": dead_letters})
        deadline = self.loop.time() + 1.0
        while self.loop.time() < deadline and any(n in self.node.streams for n in told["deleted"]):
            await self.wait_for_change(0.05)
        return {"deleted": told["deleted"]}

    async def make_graves(self, stream: str, name: str, settings: StreamSettings) -> None:
        """Make the dead letters of a stream, in its region; returns when they are there."""
        info = self.metadata.streams.get(stream)
        if info is None:
            raise NoStreamError(f"there is no stream {stream!r}")
        asked = {"id_box": settings.id_box, "region": info.region}
        await self.ensure(name, asked, "warn")
        deadline = self.loop.time() + PATIENCE
        while name not in self.node.streams and self.loop.time() < deadline:
            await self.wait_for_change(0.1)
        if name not in self.node.streams:
            raise NoMasterError(f"the dead letters of {stream!r} are not there yet")

    # ------------------------------------------------------------ where streams are served

    @property
    def master_wait(self) -> float:
        """Seconds that a write waits for a master."""
        return self.metadata.seconds("master_wait") or 0.0

    def serves(self, stream: str, write: bool) -> Place:
        """Who serves a stream."""
        info = self.metadata.streams.get(stream)
        if info is None:
            if not self.metadata.cluster:
                return Nobody(NotYetError("this node is not a member of a cluster yet"))
            raise NoStreamError(
                f"there is no stream {stream[:200]!r}: make it (railgun stream ensure)"
            )
        here = self.node.streams.get(stream)
        if info.settings.get("kind") == "ephemeral":
            return Here() if here is not None else Nobody(NoMasterError("it is being made here"))
        there = self.metadata.regions[info.region]
        copy = self.regions.get(info.region).streams.get(info.id)
        if not write and copy is not None:
            return Here()
        if there.master == self.me:
            if copy is not None and copy.acting:
                return Here()
            return Nobody(NoMasterError(f"{stream!r}: its master has begun, and is not ready yet"))
        for other in [there.master] if write else [there.master, *there.voting]:
            node = self.metadata.nodes.get(other or "")
            if node is not None and node.id != self.me and self.links.is_up(node.id):
                return There(node.id, node.host, node.port)
        return Nobody(NoMasterError(f"the master of region {info.region!r} cannot be reached"))

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

    def apply(self, index: int, data: bytes) -> Any:
        """An entry."""
        try:
            command = json.loads(data)
        except ValueError:
            command = None
        result = self._member.metadata.apply(index, command)
        self._member.dirty()
        self._member.notify()  # who waits for the entry need not wait until it is made so
        return {"index": index, "result": result}

    def snapshot(self) -> bytes:
        """All that was applied."""
        return json.dumps(self._member.metadata.dump()).encode()

    def restore(self, index: int, data: bytes) -> None:
        """Be what a snapshot says."""
        self._member.metadata = Metadata.load(json.loads(data)) if data else Metadata()
        self._member.dirty()
