"""Run a node as a member of a cluster: what the nodes agree on, this node's copies, and the calls between nodes.

Rules:

1. What is agreed on (`broker.protocol.metadata.machine`) is applied in order, and then carried out on this node
   (`reconciling`).
2. Every proposal goes to the leader, through any node that knows it, until it is applied or its time is up. It carries
   a unique ID, so it takes effect once. As long as no leader was found to send it to, nothing is in doubt: it is
   refused when a publish would be (`NO_MASTER`), at once without a quorum.
3. A node acts as a master while it has a lease; the leader grants leases, and steers (`leasing`).
4. If there is no leader for a while, the other nodes may have moved: all nodes that discovery finds are asked for their
   identities.
5. `serves` tells what this node serves itself, and what is passed on; while the node takes no part, `sidelined` does. A
   stream that is unknown here is not refused before the leader has confirmed that this node knows all streams.
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
from railgun.broker.cluster.governing import LEAVING, NODE_CALLS, Governing
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

PROPOSAL_TIMEOUT_S: Final = 10.0  # until a proposal fails
RETRY_PAUSE_S: Final = 0.05
LEADERLESS_S: Final = 2.0  # time without a leader before the other nodes are looked for
POSITIONS_INTERVAL_S: Final = 5.0  # between two reports of the groups' positions
END_TIMEOUT_S: Final = 1.0  # for a master to tell where a stream ends
# Time for which it counts as certain that there is no stream of a name.
ABSENCE_VALID_S: Final = 0.05
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
        """What other nodes are told about this node."""
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
            self.name_of,
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
        """The ID of the leader according to other nodes, or an empty text."""
        self.clock_skew_s = 0.0
        """By how many seconds this node's clock is certainly ahead of the leader's; below 0: behind."""
        self.troubles: dict[str, str] = {}
        """Why nodes may not be master, by node, as last told by the leader."""
        self.full = False
        """Whether there is hardly any room on this node's disk."""
        self._changed: asyncio.Future[None] = self.loop.create_future()
        self._tasks: list[asyncio.Task[Any]] = []
        self._reported_positions: dict[str, dict[str, int]] = {}
        self._uncertain: set[str] = set()  # unknown streams about which the leader is being asked
        # Unknown streams that do not exist, and until when that is certain.
        self._absent: dict[str, float] = {}

    # ------------------------------------------------------------ begin and end

    async def start(self, client: Address, http: str | None) -> list[str]:
        """Listen for other nodes, and take part, or look for a cluster. `client`: the address for clients. Return
        notes for people."""
        config = self.config
        notes: list[str] = []
        await self.links.listen(config.host, config.port)
        address = config.advertise or (config.host, self.links.port)
        client_address = config.advertise_client or client
        self.info = {
            "id": self.me,
            "name": config.name or f"{client_address[0]}-{client_address[1]}".replace(":", "_"),
            "host": client_address[0],
            "port": client_address[1],
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
                notes += self.begin()
            except StorageError as error:
                if not is_refusal(error):
                    raise
                self.fail(error)
        else:
            self._spawn(self.joining.find_cluster())
        if self.discovery is not None:
            self._spawn(self._announce(address))
        self._spawn(self.reconciling.run())
        self._spawn(self.leasing.renew_for_ever())
        self._spawn(self.leasing.steer_for_ever())
        self._spawn(self._watch_cluster())
        return notes

    def begin(self) -> list[str]:
        """Take part in the cluster of this node's identity. What the node knew before stays known until Raft tells
        more. Return warnings."""
        who = self.who
        election = self.election
        settings = Settings(election=election, heartbeat=election / 8, lease=election * 0.7)
        consensus = Consensus(
            *(self.me, self.disk, "cluster/raft", _MetadataMachine(self), self._send_raft),
            settings=settings,
            seed=secrets.randbits(32),
            changed=self.leasing.raft_changed,
            failed=self.fail,
        )
        warnings = consensus.open(Members(tuple(who.voters)) if who.voters else None)
        if who.state == identity.MEMBER and not consensus.had_log:
            raise identity.LostIdentityError(
                f"{self.disk.where('cluster/raft')} is gone: this node may have voted, and would not know. "
                "Let it join as a new one, with an empty directory, and remove the old one (railgun cluster remove)"
            )
        if who.state != identity.MEMBER:
            who.state = identity.MEMBER
            identity.save(self.disk, who)
        self.links.identity.cluster = who.cluster
        self.consensus = consensus
        consensus.start()
        self.reconcile_soon()
        return warnings

    @property
    def leader(self) -> str | None:
        """The ID of the leader, if it is known; while this node takes no part, according to the other nodes."""
        if self.failed is not None:
            return self.sidelined.leader
        return None if self.consensus is None else self.consensus.leader

    @property
    def election(self) -> float:
        """Seconds for which nodes wait for a leader."""
        return self.who.election or self.config.election()

    async def stop(self) -> None:
        """Take no more part, and close everything."""
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
        """Take no part any more, because of `error`: other nodes serve in this node's place (`sidelined`)."""
        self.failed = error
        _LOG.critical("this node takes no part in its cluster any more: %s", error)
        for region in self.regions:
            region.lease = 0.0
        self.notify()
        self._spawn(self.sidelined.run_until_writable())

    def was_removed(self) -> None:
        """Take no part any more, because the leader says that this node was removed."""
        if self.failed is None:
            self.fail(
                RemovedError(
                    "this node was removed. Stop it; to have it back, start it as a new node, with an empty directory"
                )
            )

    # ------------------------------------------------------------ metadata

    def reconcile_soon(self) -> None:
        """Ask for the metadata to be carried out on this node."""
        self.reconciling.reconcile_soon()

    def adopt(self, metadata: Metadata) -> None:
        """Adopt metadata, unless this node knows newer metadata already: a log that is read again repeats the past."""
        if metadata.index >= self.metadata.index:
            self.metadata = metadata
        self.reconcile_soon()
        self.notify()  # callers that wait for an entry need not wait until it is carried out

    def notify(self) -> None:
        """Wake up everything that waits for a change."""
        if not self._changed.done():
            self._changed.set_result(None)
        self._changed = self.loop.create_future()

    async def propose(
        self, command: dict[str, Any], timeout: float = PROPOSAL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Have a command applied, and return its result.

        Raise `ClusterError` if it is refused, `NoMasterError` if no leader was found to send it to (nothing was
        changed), and `NoLeaderError` if it was sent and its outcome is unknown.
        """
        request = {"request": secrets.token_hex(12), **command}
        began = self.loop.time()
        deadline, is_sent = began + timeout, False
        while True:
            try:
                applied = await self._propose(request, deadline)
                if applied["result"].get("error", {}).get("code") != "NOT_FORMED":
                    break
                # The old ID would get the same result again.
                request["request"] = secrets.token_hex(12)
                error: RailgunError = NoLeaderError("the cluster is being formed")
            except (NotLeaderError, LostProposalError, NoLeaderError) as failure:
                error = failure
                is_sent = is_sent or isinstance(failure, LostProposalError)
                if isinstance(failure, NotLeaderError) and failure.leader:
                    self.hint = failure.leader
            give_up_at = deadline if is_sent else min(deadline, began + self._master_wait)
            hopeless = not is_sent and self.has_no_quorum
            if hopeless or self.loop.time() + RETRY_PAUSE_S >= give_up_at:
                why = f"the cluster has no leader that can be reached: {said(error)}"
                if not is_sent:
                    raise NoMasterError(f"{why}. Nothing was changed", hopeless) from error
                raise NoLeaderError(f"{why}. The change may have been made or not") from error
            await asyncio.sleep(RETRY_PAUSE_S)
        result: dict[str, Any] = applied["result"]
        await self._wait_applied(applied["index"], deadline)
        if "error" in result:
            raise ClusterError(result["error"]["code"], result["error"]["text"])
        return result

    async def _propose(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        consensus = self.consensus
        if consensus is None:
            raise NoLeaderError("this node is not a member of a cluster yet")
        if consensus.leads:
            async with asyncio.timeout_at(deadline):
                applied: dict[str, Any] = await consensus.propose(json.dumps(request).encode())
                return applied
        left_s = max(0.1, deadline - self.loop.time())
        leader = self.leader or self.hint
        if leader and leader != self.me and self.links.is_up(leader):
            try:
                return dict(await self.links.call(leader, "propose", {"command": request}, left_s))
            except PeerError as error:
                if error.code == NotLeaderError.code:
                    raise NotLeaderError(str(error), None) from error
                raise LostProposalError(str(error)) from error
        with contextlib.suppress(PeerError):
            await self.ask_around(min(left_s, 1.0))
        raise NoLeaderError("this node knows no leader")

    async def ask_around(self, timeout: float) -> None:
        """Ask the other nodes for the leader, until one knows it."""
        for peer in self.links.known:
            if self.links.is_up(peer):
                leader = await self.links.call(peer, "leader", {}, timeout)
                if leader and leader != self.me:
                    self.hint = str(leader)
                    return

    async def _wait_applied(self, index: int, deadline: float) -> None:
        """Wait until this node has applied entry `index`, at most until `deadline`."""
        while self.loop.time() < deadline and self.metadata.index < index:
            await self.wait_for_change(0.1)

    async def wait_for_change(self, timeout: float) -> None:
        """Wait until something has changed, for at most `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._changed)

    # ------------------------------------------------------------ watching

    @property
    def trouble(self) -> str:
        """Why this node may not be master of any region, or an empty text."""
        trouble = self.node.displaced or next(
            (region.trouble for region in self.regions if region.trouble), ""
        )
        return trouble or self.reconciling.undone or (LEAVING if self.governing.leaving else "")

    def _check_room(self) -> None:
        """Check whether another node should rather be master, because this node's disk is nearly full."""
        with contextlib.suppress(OSError):
            self.full = self.disk.free() < (2 * MIN_FREE_BYTES if self.full else MIN_FREE_BYTES)

    async def _watch_cluster(self) -> None:
        """Look for nodes that have moved while there is no leader, and report the positions of groups now and then."""
        leaderless_s = 0.0
        since_report_s = 0.0
        while True:
            await asyncio.sleep(0.5)
            self.overview.observe()
            self._check_room()
            consensus = self.consensus
            if consensus is None:
                continue
            try:
                consensus.check_files()
                leaderless_s = 0.0 if self.leader else leaderless_s + 0.5
                if self.failed is None and self.leader is not None:
                    self.sidelined.forget()
                elif self.failed is None and leaderless_s >= LEADERLESS_S:
                    await self.sidelined.ask_news()
                if leaderless_s >= LEADERLESS_S and self.discovery is not None:
                    self.reconciling.addresses = await self.joining.find_members()
                    self.reconcile_soon()
                if self.leader or leaderless_s >= LEADERLESS_S:
                    await self._announce_changes()
                since_report_s += 0.5
                if since_report_s >= POSITIONS_INTERVAL_S:
                    since_report_s = 0.0
                    await self._report_positions()
            except (RailgunError, OSError) as error:  # includes TimeoutError
                _LOG.info("watching the cluster: %s", error)
            except Exception:
                _LOG.exception("watching the cluster failed unexpectedly")

    async def _announce_changes(self) -> None:
        """Tell the cluster this node's addresses and properties, if the metadata says something else."""
        mine = self.metadata.nodes.get(self.me)
        if self.failed is not None or (mine is None and self.metadata.cluster):
            return  # this node takes no part, or was removed
        if mine is None or not mine.same_as(NodeInfo.of(self.info, mine.index)):
            try:
                await self.propose({"do": "node", "node": self.info}, timeout=2.0)
            except ClusterError as error:
                if error.code != "REMOVED":
                    raise
                self.was_removed()

    async def _report_positions(self) -> None:
        """Report which groups there are, and their approximate positions, to all nodes."""
        for region in self.regions:
            if not region.led:
                continue
            positions: dict[str, dict[str, int]] = {}
            for id, copy in region.streams.items():
                if copy.leads:
                    drivers = [driver for driver in copy.stream.groups.values() if driver.tracked]
                    positions[str(id)] = {driver.name: driver.group.floor for driver in drivers}
            reported = self._reported_positions
            gone = [
                [id, group]
                for id, groups in self.metadata.catalogue.groups.items()
                for group in groups
                if str(id) in positions and group not in positions[str(id)]
            ]
            changed = {
                id: offsets
                for id, offsets in positions.items()
                if offsets and offsets != reported.get(id)
            }
            if changed or gone:
                command = {"do": "groups", "region": region.name, "epoch": region.led}
                await self.propose({**command, "positions": changed, "gone": gone}, timeout=2.0)
                self._reported_positions = reported | changed

    # ------------------------------------------------------------ messages of other nodes

    def _send_raft(self, to: str, message: Any) -> None:
        self.links.send(to, "raft", encode_message(message))

    def received(self, sender: str, lane: Lane, command: Any, blob: Blob) -> None:
        """Handle a message of another node."""
        if lane == "raft" and self.consensus is not None:
            self.consensus.step(sender, decode_message(command))
        elif lane == "data":
            self.regions.received(sender, command, blob)
        elif lane == "events":
            self.events.received(sender, command, blob)

    def up(self, peer: str, lane: Lane) -> None:
        """Handle a new connection to a node."""
        if lane == "data":
            self.regions.up(peer)
        elif lane == "events":
            self.events.up(peer)
        self.notify()

    def down(self, peer: str, lane: Lane) -> None:
        """Handle a lost connection to a node."""
        if lane == "data":
            self.regions.down(peer)
        elif lane == "events":
            self.events.down(peer)
        self.notify()

    async def called(self, sender: str, name: str, arguments: dict[str, Any]) -> Any:
        """Run a call of another node, and return its result."""
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
            case _ if name in NODE_CALLS:
                return await self.governing.called(sender, name, arguments)
        raise ClusterError("NO_CALL", f"there is no call {name[:80]!r}")

    def name_of(self, id: str) -> str:
        """Return the name of a node by its ID; the ID itself if no such node is known."""
        node = self.metadata.nodes.get(id)
        return id if node is None else node.name

    async def _hand_over(self, region: str) -> bool:
        """Let another node be master of a region. Return whether another node is, or is about to be."""
        self.leasing.renew_soon()  # the leader has to know of this node's trouble before it chooses
        return await self.governing.give_way(region)

    def led_streams(self) -> list[str]:
        """Return the names of the streams that this node serves as their master."""
        return [copy.stream.name for r in self.regions for copy in r.streams.values() if copy.leads]

    # ------------------------------------------------------------ calls of this node's clients

    async def ensure(self, name: str, requested: dict[str, Any], mode: Mode) -> dict[str, Any]:
        """Create or change a stream on all nodes, so that it has the requested settings."""
        requested = dict(requested)
        region = requested.pop("region", None)
        command: dict[str, Any] = {
            "do": "ensure",
            "name": name,
            "asked": requested,
            "mode": mode,
            **({"region": region} if region else {}),
        }
        while True:
            stream = self.metadata.streams.get(name)
            existing = None if stream is None else dict(stream.settings)
            # The settings of a new stream, valid even if the existing stream is deleted meanwhile.
            command["defaults"] = asdict(StreamSettings.merged(existing, requested))
            if existing is not None:
                command["seen"] = existing
            try:
                applied = await self.propose(command)  # waits until this node has applied it
                return {"result": applied["result"], "differs": applied.get("differs", {})}
            except ClusterError as error:
                if error.code != "CHANGED":
                    raise

    def region_of(self, name: str) -> str | None:
        """Return the region of a stream, or None if it is unknown."""
        info = self.metadata.streams.get(name)
        return None if info is None else info.region

    async def delete(self, name: str, dead_letters: bool) -> dict[str, Any]:
        """Delete a stream on all nodes, with its stream of dead letters if `dead_letters`."""
        result = await self.propose({"do": "delete", "name": name, "dead_letters": dead_letters})
        deadline = self.loop.time() + 1.0
        while self.loop.time() < deadline and any(
            deleted_name in self.node.streams for deleted_name in result["deleted"]
        ):
            await self.wait_for_change(0.05)
        return {"deleted": result["deleted"]}

    async def make_beside(self, stream: str, name: str, settings: StreamSettings) -> None:
        """Create a stream that stores something for the stream `stream`, in its region. Return when it exists here."""
        info = self.metadata.streams.get(stream)
        if info is None:
            raise NoStreamError(f"there is no stream {stream!r}")
        requested = {"id_box": settings.id_box, "region": info.region}
        await self.ensure(name, requested, "warn")
        deadline = self.loop.time() + PROPOSAL_TIMEOUT_S
        while name not in self.node.streams and self.loop.time() < deadline:
            await self.wait_for_change(0.1)
        if name not in self.node.streams:
            raise NoMasterError(f"{name!r} was not created on this node in time: try again")

    async def describe_all(self) -> list[dict[str, Any]]:
        """Return all streams of the cluster, as their masters describe them."""
        return await self.overview.streams()

    async def administer(self, call: str, arguments: dict[str, Any]) -> Any:
        """Run one of the calls that concern the cluster itself."""
        return await self.governing.administer(call, arguments)

    async def elsewhere(self, call: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
        """Let the master of a stream run a call. Return whether it is another node, and its result."""
        return await self.governing.elsewhere(call, arguments)

    def status(self) -> dict[str, Any]:
        """Return the state of the cluster, as far as this node knows."""
        return self.overview.status()

    def reasons(self) -> dict[str, str]:
        """Return why this node cannot serve clients, by code."""
        return self.overview.reasons()

    # ------------------------------------------------------------ the place of a stream

    @property
    def master_wait(self) -> float:
        """Seconds that a write waits for a master."""
        return self.seconds("master_wait")

    @property
    def _master_wait(self) -> float:
        """`master_wait`, with a default before the settings are agreed on."""
        return self.master_wait or MASTER_WAIT

    def seconds(self, setting: str) -> float:
        """Return the cluster's setting `setting`, a number of seconds."""
        return self.metadata.seconds(setting) or 0.0

    @property
    def cluster_id(self) -> str:
        """The ID of the cluster; empty before it is formed."""
        return self.who.cluster or self.metadata.cluster or ""

    def serves(self, stream: str, write: bool) -> Place:
        """Return the place that serves a stream. Raise `NoStreamError` if there is certainly no such stream."""
        if self.failed is not None and not self._is_ephemeral(stream):
            place = self.sidelined.place(stream, write)
        else:
            place = self._place(stream, write)
        unserved = isinstance(place, Nobody) or (write and isinstance(place, There))
        if unserved and self.has_no_quorum:  # without a quorum, no master has a lease either
            error_text = "there is no quorum: this node knows no leader"
            return Nobody(NoMasterError(error_text), hopeless=True)
        return place

    def _is_ephemeral(self, stream: str) -> bool:
        info = self.metadata.streams.get(stream)
        return info is not None and info.settings.get("kind") == "ephemeral"

    @property
    def has_no_quorum(self) -> bool:
        """Whether no node within reach has known a leader for longer than a write waits for a master."""
        is_member = self.who.state != identity.ALONE and not isinstance(self.failed, RemovedError)
        if self.leader is not None or self.sidelined.leader is not None:
            return False
        return is_member and self.overview.leaderless_for > self._master_wait

    def _place(self, stream: str, write: bool) -> Place:
        info = self.metadata.streams.get(stream)
        if info is None:
            local_copy = self.node.streams.get(stream)
            is_uncertain = not self.metadata.cluster or self.has_no_quorum
            if not write and is_uncertain and isinstance(local_copy, Persistent):
                # After a restart without a leader, the list of streams is unknown.
                return Here()
            if not self.metadata.cluster:
                return Nobody(NotYetError("this node is not a member of a cluster yet"))
            return self._unknown_place(stream)
        local_stream = self.node.streams.get(stream)
        if self._is_ephemeral(stream):
            return (
                Here()
                if local_stream is not None
                else Nobody(NoMasterError("it is being created on this node"))
            )
        region_info = self.metadata.regions[info.region]
        copy = self.regions.get(info.region).streams.get(info.id)
        if not write and copy is not None and (copy.acting or not copy.trouble):
            return Here()
        if region_info.master == self.me:
            if copy is not None and (copy.acting or not write):
                return Here()
            region = self.regions.get(info.region)
            if write and copy is not None and region.has_no_heir and copy.trouble:
                raise copy.trouble_error
            return Nobody(NoMasterError(f"{stream!r}: its master is not ready yet"))
        for candidate in (
            [region_info.master] if write else [region_info.master, *region_info.voting]
        ):
            node = self.metadata.nodes.get(candidate or "")
            if node is not None and node.id != self.me and self.links.is_up(node.id):
                return There(node.id, node.host, node.port)
        if not write and copy is not None:
            return Here()  # the copy lacks new messages, but no other node can be asked
        return Nobody(NoMasterError(f"the master of region {info.region!r} cannot be reached"))

    def _unknown_place(self, stream: str) -> Place:
        """Return the place of a stream that this node does not know. Raise `NoStreamError` if it certainly does not
        exist."""
        if self._absent.get(stream, 0.0) > self.loop.time():
            raise NoStreamError(
                f"there is no stream {stream[:200]!r}: make it (railgun stream ensure)"
            )
        if stream not in self._uncertain and self.consensus is not None:
            self._uncertain.add(stream)
            self.node.spawn(self._confirm_absence(stream, self.consensus))
        error_text = f"there is no leader to confirm whether there is a stream {stream[:200]!r}"
        return Nobody(NoMasterError(error_text))

    async def _confirm_absence(self, stream: str, consensus: Consensus) -> None:
        """Apply everything committed up to now, after which an unknown stream certainly does not exist."""
        try:
            await consensus.barrier()
            now = self.loop.time()
            self._absent = {name: until for name, until in self._absent.items() if until > now}
            self._absent[stream] = now + ABSENCE_VALID_S
        except RailgunError:
            await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            self._uncertain.discard(stream)
            self.notify()

    async def end(self, stream: str) -> int | None:
        """Ask the master where a stream ends. Return None if it does not answer, or has another stream of that name."""
        local_stream = self.node.streams.get(stream)
        try:
            place = self.serves(stream, write=True)
            if local_stream is None or not isinstance(place, There):
                return None
            request = {"call": "describe", "arguments": {"name": stream}}
            description = await self.links.call(place.node, "admin", request, END_TIMEOUT_S)
        except RailgunError:
            return None
        is_same = description.get("identity") == self.node.identity_of(local_stream)
        return int(description["end"]) if is_same and "from_copy" not in description else None

    async def wait(self, stream: str, write: bool) -> None:
        """Wait until the result of `serves` may be different."""
        await self.wait_for_change(1.0)

    def nodes(self) -> list[tuple[str, int]]:
        """Return the addresses of all nodes for clients."""
        return [(node.host, node.port) for node in self.metadata.nodes.values()]


class _MetadataMachine:
    """Applies entries of Raft to the metadata."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._metadata = Metadata()  # may be older than the member's metadata

    def apply(self, index: int, data: bytes) -> Any:
        """Apply an entry. Return its index and the result."""
        try:
            command = json.loads(data)
        except ValueError:
            command = None
        result = self._metadata.apply(index, command)
        self._member.adopt(self._metadata)
        return {"index": index, "result": result}

    def snapshot(self) -> bytes:
        """Return the metadata after all applied entries."""
        return json.dumps(self._metadata.dump()).encode()

    def restore(self, index: int, data: bytes) -> None:
        """Replace the metadata by a snapshot's."""
        self._metadata = Metadata.load(json.loads(data)) if data else Metadata()
        self._member.adopt(self._metadata)
