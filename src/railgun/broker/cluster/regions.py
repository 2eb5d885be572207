"""Manage the regions of which a node has copies: their masters, promises, and sessions between masters and replicas.

Rules:

1. A promise is the highest epoch of a region that this node has heard of from the region's master, or is master of. It
   is on disk before anything follows from it; nothing of an older epoch is accepted after that.
2. Changes of this node's role in a region happen one after the other.
3. A master opens a session with every other replica when its connection begins, and whenever it becomes master. The
   session number contains the epoch, so sessions are never confused. A session needs both directions: a replica whose
   own connection to the master is new asks for another session, because its messages may have been lost.
4. A node that was master of an epoch when it went down is not master of that epoch when it is back: it reports that it
   has to begin `anew`, and the leader of the cluster gives it the next epoch.
5. A master without a lease does nothing. See docs/design/cluster.md for what a lease is.
6. A master that is asked to hand over (`yield_up`) takes nothing more, answers what it has taken, and never acts in its
   epoch again. Members of groups have `LAST_ACKS_S` seconds to send their last acks, which are safe before the
   handover. So another node may follow at once, without waiting for a lease to end; if none does, this node has to
   begin `anew`.
7. A master that cannot write gives way at once (`give_way`): it asks the leader to hand over, and does so again every
   `RETRY_S` seconds while it is master and in trouble. Publishes that could not be stored wait for the answer. They
   are refused when no other node can follow; a leader that answers late, on a busy machine, is no reason to refuse.
8. The standing of a stream that a replica does not have yet is sent when it has it (`Stands`); a standing of a stream
   that is unknown to the master is kept until it is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from railgun.broker.cluster import replica_messages as wire
from railgun.broker.cluster.flight import Flight
from railgun.broker.cluster.identity import LostIdentityError
from railgun.broker.cluster.links import Lane
from railgun.broker.cluster.replicated import Replicated
from railgun.broker.errors import NoMasterError, storage_error
from railgun.broker.log.committer import Committer
from railgun.broker.log.disk import Disk, put
from railgun.broker.protocol.metadata.machine import Metadata
from railgun.broker.protocol.replication.standing import Standing
from railgun.broker.streams.groups import GroupDriver
from railgun.broker.streams.persistent import Persistent
from railgun.errors import RailgunError
from railgun.transport.commands import Blob, FrameError
from railgun.transport.proto import cluster_pb2 as n

PROMISES: Final = "cluster/promises.json"
MAX_EARLY_STANDINGS: Final = 10_000  # of streams that are not known here yet
DRAIN_S: Final = 5.0
"""Seconds that a master that hands over waits at most until everything it has taken is safe."""
DRAIN_WITHOUT_QUORUM_S: Final = 0.5
"""The same for a master that cannot write, or is cut off from a majority of the copies."""
STALLED_POLLS: Final = 1000
"""Polls without progress after which a master that hands over stops waiting. Counted, not timed: on a busy machine
polls are rarer, and a slow answer is no sign of a fault there."""
LAST_ACKS_S: Final = 0.4  # for consumers to send their last acks, before that
POLL_S: Final = 0.002
RETRY_S: Final = 0.5
UNDECIDED_S: Final = 8.0
"""Seconds that publishers wait at a master that cannot write while nobody says whether another node can follow."""
LEADERLESS: Final = ("NO_LEADER", "NO_MASTER")
"""Codes that say that no other node can be made master now."""
_LOG: Final = logging.getLogger(__name__)


class Sender(Protocol):
    """The connections of this node."""

    def send(self, to: str, lane: Lane, command: Message, blobs: Sequence[Blob] = ()) -> bool:
        """Send a message. Return False without a connection."""

    def is_up(self, id: str, lane: Lane = "control") -> bool:
        """Return whether there is a connection."""


class Promises:
    """This node's promises, by region, on disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._epochs: dict[str, int] = {}
        if "promises.json" in disk.list("cluster"):
            file = disk.open(PROMISES)
            try:
                self._epochs = {
                    str(k): int(v) for k, v in json.loads(file.read(0, 1 << 24)).items()
                }
            except (ValueError, TypeError, AttributeError) as error:
                raise LostIdentityError(
                    f"{disk.where(PROMISES)} cannot be read: {error}. Restore it; or let this node join as a new one, "
                    "with an empty directory, and remove the old one (railgun cluster remove)"
                ) from error
            finally:
                file.close()

    def of(self, region: str) -> int:
        """Return the epoch below which nothing of a region is accepted."""
        return self._epochs.get(region, 0)

    def make(self, region: str, epoch: int) -> None:
        """Make a promise durable. Call it in one thread at a time. Raise `StorageError` if it cannot be written."""
        epochs = self._epochs | {region: epoch}
        try:
            put(self._disk, f"{PROMISES}.new", [json.dumps(epochs).encode()]).close()
            self._disk.rename(f"{PROMISES}.new", PROMISES)
            self._disk.sync_directory("cluster")
        except OSError as error:
            raise storage_error(
                error, f"a promise for region {region!r} cannot be written"
            ) from error
        self._epochs = epochs


class Region:
    """One region on this node."""

    def __init__(self, name: str, regions: Regions) -> None:
        self.name = name
        self.regions = regions
        self.me = regions.me
        self.streams: dict[int, Replicated] = {}
        self.led = 0  # the epoch of which this node is master; 0: none
        self.lease = 0.0  # the end of the lease, by the monotonic clock
        self._sets: list[tuple[str, ...]] = []
        self._replicas: set[str] = set()  # other nodes with copies
        self._sessions: dict[str, int] = {}  # as a master
        # The master it follows: node, epoch, session.
        self._master: tuple[str, int, int] | None = None
        self._known_master: str | None = None  # the master, as the metadata last had it
        self._early: dict[int, dict[str, tuple[int, Standing]]] = {}
        self._is_yielding = False  # whether this node is about to hand over
        self._begun = False  # whether all copies know that this node is master
        self._giving_way: object | None = None  # the task that asks other nodes to be master
        self.has_no_heir = False
        """Whether this node is master and cannot write, and no other node can be master."""
        self.broken_promise = ""
        """Why the last promise could not be written, or an empty text."""
        self._numbers = itertools.count(1)
        self._role_lock = asyncio.Lock()

    # ------------------------------------------------------------ used by copies

    def send(self, to: str, command: Message, blobs: Sequence[Blob] = ()) -> bool:
        """Send a message on the lane `data`. Return False without a connection, or if the message is too large."""
        try:
            return self.regions.links.send(to, "data", command, blobs)
        except FrameError as error:  # too many states of groups
            _LOG.error("region %r: a message for node %s is too large: %s", self.name, to, error)
            return False

    def spawn(self, work: Coroutine[Any, Any, Any]) -> object:
        """Run `work` in the background."""
        return self.regions.spawn(work)

    def flight(self, node: str) -> Flight:
        """Return the bytes on their way to a node, of all streams."""
        return self.regions.flights.setdefault(node, Flight())

    def name_of(self, node: str) -> str:
        """Return the name of a node, for people."""
        return self.regions.name_of(node)

    def give_way(self) -> bool:
        """Start handing the region over, because this node cannot write. Return False if no node can take it."""
        if not self.led or self.has_no_heir:
            return False
        if self._giving_way is None:
            self._giving_way = self.spawn(self._give_way())
        return True

    async def _give_way(self) -> None:
        """Ask for another master until there is one, or this node can write again."""
        try:
            give_up_at = time.monotonic() + UNDECIDED_S
            while self.led and self.trouble and not self.regions.closed:
                try:
                    may_move = await self.regions.hand_over(self.name)
                except RailgunError as error:
                    _LOG.warning("region %r is not handed over: %s", self.name, error)
                    leaderless = getattr(error, "code", "") in LEADERLESS
                    may_move = not leaderless and time.monotonic() < give_up_at
                if not may_move:
                    self.has_no_heir = bool(self.led)
                    for copy in list(self.streams.values()):
                        copy.stay()
                    self.changed()
                await asyncio.sleep(RETRY_S)
        finally:
            self._giving_way, self.has_no_heir = None, False
            for copy in list(self.streams.values()):
                copy.stay()

    def may_act(self) -> bool:
        """Return whether this node is master and has a lease."""
        return self.led > 0 and time.monotonic() < self.lease

    def changed(self) -> None:
        """Wake up everything that waits for a change."""
        self.regions.changed()

    @property
    def active(self) -> bool:
        """Whether the epoch is active on all streams."""
        return self.led > 0 and all(copy.active for copy in self.streams.values())

    @property
    def trouble(self) -> str:
        """Why this node may not be master, or an empty text."""
        return next(iter(self.unwritable.values()), self.broken_promise)

    @property
    def unwritable(self) -> dict[str, str]:
        """The streams whose copies on this node cannot be written, and why."""
        copies = self.streams.values()
        reasons = {copy.stream.name: copy.trouble or self.broken_promise for copy in copies}
        return {name: why for name, why in reasons.items() if why}

    def hear_unwritable(self, elsewhere: dict[str, dict[str, str]]) -> None:
        """Tell the copies of which this node is master the replicas that cannot write. `elsewhere`: reasons by node
        and stream."""
        if not self.led:
            return
        for copy in list(self.streams.values()):
            name = copy.stream.name
            why = {node: reasons[name] for node, reasons in elsewhere.items() if name in reasons}
            copy.hear_unwritable(why, {self.me, *self._sessions})

    def caught_up(self) -> list[str]:
        """Return the other replicas that have everything that is safe."""
        if not self.led:
            return []
        copies = [copy.master for copy in self.streams.values()]
        return sorted(
            node
            for node in self._sessions
            if all(master is not None and master.caught_up(node) for master in copies)
        )

    def lags(self) -> dict[str, int]:
        """Return how many of the master's messages each other replica lacks, over all streams, if this node is
        master."""
        if not self.led:
            return {}
        copies = list(self.streams.values())
        return {node: sum(copy.lag(node) for copy in copies) for node in sorted(self._replicas)}

    # ------------------------------------------------------------ roles

    async def apply(self, metadata: Metadata) -> None:
        """Take the role in the region that the metadata gives to this node."""
        async with self._role_lock:
            info = metadata.regions.get(self.name)
            if info is None:
                return
            promised = self.regions.promises.of(self.name)
            voting, active = tuple(info.voting), tuple(info.active)
            if info.master != self._known_master:
                # Requests passed on to the old master would never be answered.
                if self._known_master is not None:
                    streams = metadata.streams.values()
                    self.regions.moved(
                        {stream.name for stream in streams if stream.region == self.name}
                    )
                self._known_master = info.master
            self._sets = [voting] if set(voting) == set(active) or not active else [voting, active]
            self._replicas = {*voting, *active, *info.learning} - {self.me}
            if info.master != self.me:
                if self.led and info.epoch > self.led:
                    self._step_down()
                return
            if info.epoch == self.led:
                self._open_sessions()
            elif info.epoch > max(self.led, promised):
                await self._lead(info.epoch, info.epoch_index)
            # Otherwise this process promised it before a restart: see `anew`.

    async def _lead(self, epoch: int, since: int) -> None:
        going_on = bool(self.led) and self.led == epoch - 1
        await self.regions.promise(self.name, epoch)
        _LOG.info("region %r: this node is its master in epoch %d", self.name, epoch)
        self._master = None
        self._sessions.clear()
        previous, self.led, self._is_yielding, self._begun = self.led, epoch, False, False
        for copy in self.streams.values():
            if going_on and copy.can_go_on:
                copy.go_on(epoch, self._sets)
            else:
                if previous:
                    copy.step_down()
                try:
                    await copy.begin(epoch, self._sets, fresh=copy.id > since)
                except RailgunError as error:  # another node can, perhaps; the other streams go on
                    copy.trouble = str(error)
                    self.spawn(copy.retry_begin())
        self._begun = True
        self._open_sessions()
        self.changed()

    def _step_down(self) -> None:
        _LOG.info("region %r: this node is no longer its master", self.name)
        self.led, self.lease = 0, 0.0
        self._sessions.clear()
        self._early.clear()
        for copy in self.streams.values():
            copy.step_down()
        self.regions.moved({copy.stream.name for copy in self.streams.values()})

    async def yield_up(self, epoch: int) -> None:
        """Stop being master, so that another node may be at once. This node never acts in `epoch` again."""
        if self.led != epoch:
            if not self.led and self.regions.promises.of(self.name) >= epoch:
                return  # it no longer acts
            raise NoMasterError(
                f"region {self.name!r}: this node is not its master in epoch {epoch} yet"
            )
        self._is_yielding, self.lease = True, 0.0
        self.changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_ACKS_S):
                for driver in self._groups():
                    name = driver.stream.name
                    driver.let_go(NoMasterError(f"{name!r} gets another master: subscribe again"))
                while any(driver.consumers for driver in self._groups()):
                    await asyncio.sleep(POLL_S)
        await self.write_groups()
        async with self._role_lock:
            if self.led == epoch:
                self._step_down()

    def _groups(self) -> list[GroupDriver]:
        """Return the groups that this node serves."""
        streams = [copy.stream for copy in self.streams.values() if copy.leads]
        return [driver for stream in streams for driver in stream.groups.values() if driver.tracked]

    async def write_groups(self) -> None:
        """Write the changes of all groups, and wait until they and all publishes taken are safe.

        A publisher without an answer cannot know whether its message is stored when another master follows. So this
        method waits as long as there is progress, for at most `DRAIN_S`.
        """
        limit_s = DRAIN_S if self._can_settle() else DRAIN_WITHOUT_QUORUM_S
        with contextlib.suppress(TimeoutError, RailgunError):
            async with asyncio.timeout(limit_s):
                for driver in self._groups():
                    driver.when_saved(lambda error: None)
                for copy in list(self.streams.values()):
                    await copy.settle()
                unsettled, polls = self._unsettled(), 0
                while any(unsettled) and polls < STALLED_POLLS:
                    await asyncio.sleep(POLL_S)
                    before, unsettled = unsettled, self._unsettled()
                    polls = polls + 1 if unsettled == before else 0

    def _can_settle(self) -> bool:
        """Return whether this node can write, and is connected to a majority of the copies."""
        connected = {self.me, *self._sessions}
        majority = all(2 * len(connected.intersection(nodes)) > len(nodes) for nodes in self._sets)
        return majority and not self.trouble

    def _unsettled(self) -> list[int]:
        """Return for each stream how much was taken and is not answered, or not safe, yet."""
        return [copy.unsettled for copy in self.streams.values()]

    def report(self, metadata: Metadata) -> dict[str, Any] | None:
        """Return the report for the leader of the cluster, or None if this node is not the region's master."""
        info = metadata.regions.get(self.name)
        if info is None or info.master != self.me:
            return None
        anew = self.led != info.epoch and self.regions.promises.of(self.name) >= info.epoch
        anew = anew or any(copy.broken for copy in self.streams.values())
        begun = self.led == info.epoch and not self._role_lock.locked()
        return {
            "epoch": info.epoch,
            "active": begun and self.active,
            "caught_up": self.caught_up() if begun else [],
            "anew": anew and not self._role_lock.locked(),
        }

    def granted(self, epoch: int, until: float) -> None:
        """Let this node act as master of `epoch` until `until`, as the leader allows."""
        if epoch != self.led or self._is_yielding:
            return
        idle = not self.may_act()
        self.lease = max(self.lease, until)
        if idle and self.may_act():
            for copy in self.streams.values():
                copy.stream.check_groups()
            self.changed()

    # ------------------------------------------------------------ sessions

    def _open_sessions(self) -> None:
        for node in self._replicas:
            if node not in self._sessions and self.regions.links.is_up(node, "data"):
                self._open_session(node)

    def _open_session(self, node: str) -> None:
        if not self._begun:  # some copies would not hear the replies yet: `_lead` opens it later
            return
        session = self.led << 32 | next(self._numbers)
        self._sessions[node] = session
        self.send(node, n.Fence(region=self.name, epoch=self.led, session=session))

    def up(self, node: str) -> None:
        """Open a session over a new connection to a node, or ask its master for one."""
        self.down(node)
        if self.led and node in self._replicas:
            self._open_session(node)
        elif self._master is not None and self._master[0] == node:
            self.send(node, n.Fenced(region=self.name, epoch=self._master[1]))

    def down(self, node: str) -> None:
        """End the session with a node whose connection is lost."""
        if self._sessions.pop(node, None) is not None:
            for copy in self.streams.values():
                copy.session_over(node)
        for early in self._early.values():
            early.pop(node, None)

    async def fence(self, sender: str, fence: n.Fence) -> None:
        """Promise an epoch to a master, and reply with the standings of all copies; or refuse an older epoch."""
        async with self._role_lock:
            promised = self.regions.promises.of(self.name)
            reply = n.Fenced(region=self.name, epoch=fence.epoch, session=fence.session)
            if fence.epoch < promised or (fence.epoch == promised and self.led == fence.epoch):
                reply.epoch, reply.refused = promised, True
                self.send(sender, reply)
                return
            node, epoch, session = self._master or ("", 0, 0)
            if (node, epoch) == (sender, fence.epoch) and fence.session < session:
                return  # it came late, over a connection that was lost: there is a newer session
            if self.led:
                self._step_down()
            if fence.epoch > promised:
                await self.regions.promise(self.name, fence.epoch)
            self._master = (sender, fence.epoch, fence.session)
            for id, copy in list(self.streams.items()):
                standing = await copy.fenced(sender, fence.epoch, fence.session)
                reply.standings.append(wire.encode_standing(id, standing))
            self.send(sender, reply)

    def fenced(self, sender: str, reply: n.Fenced) -> None:
        """Take a replica's reply: it has made its promise, or has made a higher one."""
        if reply.refused:
            _LOG.info("region %r: node %s knows of epoch %d", self.name, sender, reply.epoch)
            return
        # A reply without a session asks for a new one.
        if not reply.session and self.led and sender in self._replicas:
            self.up(sender)
        if self._sessions.get(sender) != reply.session:
            return
        standings = {entry.stream: wire.decode_standing(entry) for entry in reply.standings}
        for id, standing in standings.items():
            self._stands(sender, reply.session, id, standing)

    def stands(self, sender: str, reply: n.Stands) -> None:
        """Take the standing of one copy from a replica."""
        if self._sessions.get(sender) == reply.session:
            standing = wire.decode_standing(reply.standing)
            self._stands(sender, reply.session, reply.standing.stream, standing)

    def _stands(self, sender: str, session: int, id: int, standing: Standing) -> None:
        copy = self.streams.get(id)
        if copy is not None:
            copy.session(sender, session, standing)
        elif len(self._early) < MAX_EARLY_STANDINGS:
            self._early.setdefault(id, {})[sender] = (session, standing)

    # ------------------------------------------------------------ streams

    async def add(self, stream: Persistent, since: int) -> None:
        """Add a copy of a stream; `since`: the entry with which the epoch began."""
        async with self._role_lock:
            copy = Replicated(stream, self.regions.committer, self)
            await copy.open()
            if self.led:
                await copy.begin(self.led, self._sets, fresh=copy.id > since)
            followed = self._master if not self.led else None
            if followed is not None:
                standing = await copy.fenced(*followed)
                encoded = wire.encode_standing(copy.id, standing)
                self.send(followed[0], n.Stands(session=followed[2], standing=encoded))
            self.streams[copy.id] = copy  # from now on it gets messages of other nodes
            for node, (session, early_standing) in self._early.pop(copy.id, {}).items():
                if self._sessions.get(node) == session:
                    copy.session(node, session, early_standing)

    def remove(self, id: int) -> None:
        """Remove the copy of a deleted stream."""
        copy = self.streams.pop(id, None)
        if copy is not None:
            copy.close()


async def _no_successor(region: str) -> bool:
    """Hand a region over to no node: there are no other nodes."""
    return False


class Regions:
    """All regions on this node."""

    def __init__(
        self,
        me: str,
        links: Sender,
        disk: Disk,
        committer: Committer,
        spawn: Callable[[Coroutine[Any, Any, Any]], object],
        changed: Callable[[], None],
        moved: Callable[[set[str]], None],
        name_of: Callable[[str], str] = str,
        hand_over: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        self.me, self.links, self.committer, self.name_of = me, links, committer, name_of
        self.hand_over = hand_over or _no_successor
        """Lets another node be master of a region. Returns whether another node is."""
        self.closed = False
        self.spawn, self.changed, self.moved = spawn, changed, moved
        self.promises = Promises(disk)
        self._promising = asyncio.Lock()
        self._fences: dict[tuple[str, str], int] = {}  # the last session of each master and region
        self._regions: dict[str, Region] = {}
        self.elsewhere: dict[str, dict[str, str]] = {}
        """The streams that nodes cannot write, and why, as last told by the leader."""
        self.flights: dict[str, Flight] = {}
        """The bytes on their way to each node."""

    def __iter__(self) -> Any:
        return iter(list(self._regions.values()))

    @property
    def unwritable(self) -> dict[str, str]:
        """The streams whose copies on this node cannot be written, and why."""
        return {name: why for region in self for name, why in region.unwritable.items()}

    def hear_unwritable(self, elsewhere: dict[str, dict[str, str]]) -> None:
        """Note what other nodes cannot write, by node and stream, as told by the leader."""
        self.elsewhere = elsewhere
        for region in self:
            region.hear_unwritable(elsewhere)

    def get(self, name: str) -> Region:
        """Return a region by its name, adding it if it is new."""
        if name not in self._regions:
            self._regions[name] = Region(name, self)
        return self._regions[name]

    async def promise(self, region: str, epoch: int) -> None:
        """Promise to accept nothing of `region` older than `epoch`; durable when this returns."""
        async with self._promising:
            if epoch > self.promises.of(region):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(None, self.promises.make, region, epoch)

    async def apply(self, metadata: Metadata) -> None:
        """Take the roles that the metadata gives to this node, in all regions."""
        for name in metadata.regions:
            await self.get(name).apply(metadata)

    def up(self, node: str) -> None:
        """Handle a new connection to a node."""
        for region in self:
            region.up(node)

    def down(self, node: str) -> None:
        """Handle a lost connection to a node."""
        for region in self:
            region.down(node)

    def received(self, sender: str, command: Any, blob: Blob) -> None:
        """Handle a message on the lane `data`."""
        match command:
            case n.Fence():
                self.spawn(self._fence(sender, command))
            case n.Fenced():
                self.get(command.region).fenced(sender, command)
            case n.Stands():
                for region in self:
                    region.stands(sender, command)
            case _:
                id = getattr(command, "stream", 0)
                for region in self:
                    copy = region.streams.get(id)
                    if copy is not None:
                        copy.received(sender, command, blob)

    async def _fence(self, sender: str, fence: n.Fence) -> None:
        last = self._fences.get((sender, fence.region), 0)
        self._fences[sender, fence.region] = max(last, fence.session)
        while self._fences.get((sender, fence.region)) == fence.session:
            region = self.get(fence.region)
            try:
                await region.fence(sender, fence)
                region.broken_promise = ""
                return
            except RailgunError as error:  # perhaps a full disk
                _LOG.error("region %r: %s", fence.region, error)
                region.broken_promise = str(error)
            await asyncio.sleep(RETRY_S)

    async def write_groups(self) -> None:
        """Write all changes of groups, because the node is about to end and may still be master."""
        await asyncio.gather(*(region.write_groups() for region in self if region.led))

    def close(self) -> None:
        """Close all copies, because the node is about to end."""
        self.closed = True
        self._fences.clear()
        for region in self:
            for copy in region.streams.values():
                copy.close()
