"""The regions a node has copies of: who is master, what was promised, and sessions between the two.

Rules:

1. A promise is the highest epoch of a region that this node has heard of from its master, or is master of. It is on
   disk before anything follows from it; nothing of an older epoch is taken after that.
2. What changes the role of this node in a region happens one after the other.
3. A master opens a session with every other replica when its connection begins, and whenever it becomes a master. Its
   number has the epoch in it, so nobody takes one for another. A session needs both directions: a replica whose own
   connection to the master is new asks for another session, for what it said may be lost.
4. A node that was master of an epoch when it went down is not master of it when it is back: it reports that it has to
   begin `anew`, and the leader of the cluster gives it the next one.
5. A master without a lease does nothing. See docs/design/cluster.md for what a lease is.
6. A master that is asked to hand over (`yield_up`) takes nothing more, answers what it has taken, and never acts in its
   epoch again. Members of groups have `LAST_ACKS` seconds to say what they have acked, and that is safe before. So
   another one may follow at once, with nobody waiting for a lease to end; if none does, this node has to begin `anew`.
7. A master that cannot write gives way at once (`give_way`): it asks the leader to hand over, and does so again every
   `RETRY` seconds while it is master and in trouble. Who could not be stored waits for the answer.
8. A stream that another node does not know yet is told of when it does (`Stands`); what is told of a stream that is
   not known here yet is kept until it is.
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

from railgun.broker.cluster import replica_messages as words
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
MOST_EARLY: Final = 10_000
DRAIN_S: Final = 5.0
"""How long a master that hands over waits at most until what it has taken is safe."""
DRAIN_WITHOUT_QUORUM_S: Final = 0.5
"""The same for a master that cannot write, or is cut off from a majority of the copies."""
STALLED_POLLS: Final = 1000
"""Looks without any progress after which a master that hands over waits no longer. Counted, not timed: on a busy
machine looks are rarer, and a slow answer is no sign of a fault there."""
LAST_ACKS: Final = 0.4  # seconds for consumers to say what they have acked, before that
PAUSE: Final = 0.002
RETRY: Final = 0.5
_LOG: Final = logging.getLogger(__name__)


class Sender(Protocol):
    """The connections of this node."""

    def send(self, to: str, lane: Lane, command: Message, blobs: Sequence[Blob] = ()) -> bool:
        """Send a message."""

    def is_up(self, id: str, lane: Lane = "control") -> bool:
        """Whether there is a connection."""


class Promises:
    """What this node has promised, by region; on disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._made: dict[str, int] = {}
        if "promises.json" in disk.list("cluster"):
            file = disk.open(PROMISES)
            try:
                self._made = {str(k): int(v) for k, v in json.loads(file.read(0, 1 << 24)).items()}
            except (ValueError, TypeError, AttributeError) as error:
                raise LostIdentityError(
                    f"{disk.where(PROMISES)} cannot be read: {error}. Restore it; or let this node join as a new one, "
                    "with an empty directory, and remove the old one (railgun cluster remove)"
                ) from error
            finally:
                file.close()

    def of(self, region: str) -> int:
        """The epoch below which nothing is taken."""
        return self._made.get(region, 0)

    def make(self, region: str, epoch: int) -> None:
        """Promise it for good. By one thread at a time."""
        made = self._made | {region: epoch}
        try:
            put(self._disk, f"{PROMISES}.new", [json.dumps(made).encode()]).close()
            self._disk.rename(f"{PROMISES}.new", PROMISES)
            self._disk.sync_directory("cluster")
        except OSError as error:
            raise storage_error(error, f"a promise for region {region!r} cannot be kept") from error
        self._made = made


class Region:
    """One region, on this node."""

    def __init__(self, name: str, regions: Regions) -> None:
        self.name = name
        self.regions = regions
        self.me = regions.me
        self.streams: dict[int, Replicated] = {}
        self.led = 0  # the epoch this node is master of; 0: of none
        self.lease = 0.0  # until when, by the steady clock
        self._sets: list[tuple[str, ...]] = []
        self._others: set[str] = set()  # who has copies
        self._sessions: dict[str, int] = {}  # as a master
        self._master: tuple[str, int, int] | None = None  # whom it follows: node, epoch, session
        self._ruler: str | None = None  # the master, as the metadata had it last
        self._early: dict[int, dict[str, tuple[int, Standing]]] = {}
        self._yields = False  # whether it is about to hand over
        self._begun = False  # whether all copies know that this node is master
        self._giving_way: object | None = None  # the task that asks others to be master
        self.has_no_heir = False
        """Whether this node is master and cannot write, and no other node can be."""
        self.broken_promise = ""
        """Why the last promise could not be written down, while it was not."""
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()

    # ------------------------------------------------------------ for copies

    def send(self, to: str, command: Message, blobs: Sequence[Blob] = ()) -> bool:
        """Send a message on the lane `data`."""
        try:
            return self.regions.links.send(to, "data", command, blobs)
        except FrameError as error:  # states of groups without end
            _LOG.error("region %r: what node %s has to know is too large: %s", self.name, to, error)
            return False

    def spawn(self, work: Coroutine[Any, Any, Any]) -> object:
        """Do this beside all else."""
        return self.regions.spawn(work)

    def flight(self, node: str) -> Flight:
        """What is on its way to a node, of all streams."""
        return self.regions.flights.setdefault(node, Flight())

    def called(self, node: str) -> str:
        """Return the name of a node, for people."""
        return self.regions.called(node)

    def give_way(self) -> bool:
        """Let another node be master, for this one cannot write; False: there is none that could."""
        if not self.led or self.has_no_heir:
            return False
        if self._giving_way is None:
            self._giving_way = self.spawn(self._give_way())
        return True

    async def _give_way(self) -> None:
        """Ask for another master until there is one, or this node can write again."""
        try:
            while self.led and self.trouble and not self.regions.closed:
                moved = False
                try:
                    moved = await self.regions.hand_over(self.name)
                except RailgunError as error:
                    _LOG.warning("region %r is not handed over: %s", self.name, error)
                if not moved:
                    self.has_no_heir = bool(self.led)
                    for copy in list(self.streams.values()):
                        copy.stay()
                    self.changed()
                await asyncio.sleep(RETRY)
        finally:
            self._giving_way, self.has_no_heir = None, False
            for copy in list(self.streams.values()):
                copy.stay()

    def may_act(self) -> bool:
        """Whether there is a lease."""
        return self.led > 0 and time.monotonic() < self.lease

    def changed(self) -> None:
        """Somebody may have waited for it."""
        self.regions.changed()

    @property
    def active(self) -> bool:
        """Whether the epoch is active on all streams."""
        return self.led > 0 and all(copy.active for copy in self.streams.values())

    @property
    def trouble(self) -> str:
        """Why this node cannot be master, if so."""
        return next(iter(self.unwritable.values()), self.broken_promise)

    @property
    def unwritable(self) -> dict[str, str]:
        """Return the streams whose copies here cannot be written, and why."""
        copies = self.streams.values()
        found = {copy.stream.name: copy.trouble or self.broken_promise for copy in copies}
        return {name: why for name, why in found.items() if why}

    def hear_unwritable(self, elsewhere: dict[str, dict[str, str]]) -> None:
        """Let copies that this node is the master of know which replicas cannot write, by node and stream."""
        if not self.led:
            return
        for copy in list(self.streams.values()):
            name = copy.stream.name
            why = {node: told[name] for node, told in elsewhere.items() if name in told}
            copy.hear_unwritable(why, {self.me, *self._sessions})

    def caught_up(self) -> list[str]:
        """The other replicas that have all that is safe."""
        if not self.led:
            return []
        copies = [copy.master for copy in self.streams.values()]
        return sorted(
            node
            for node in self._sessions
            if all(master is not None and master.caught_up(node) for master in copies)
        )

    def lags(self) -> dict[str, int]:
        """How many of the master's messages the other replicas lack, over all streams; as a master."""
        if not self.led:
            return {}
        copies = list(self.streams.values())
        return {node: sum(copy.lag(node) for copy in copies) for node in sorted(self._others)}

    # ------------------------------------------------------------ roles

    async def look(self, metadata: Metadata) -> None:
        """Be what the metadata says this node is."""
        async with self._turn:
            info = metadata.regions.get(self.name)
            if info is None:
                return
            promised = self.regions.promises.of(self.name)
            voting, active = tuple(info.voting), tuple(info.active)
            if info.master != self._ruler:
                if self._ruler is not None:  # what was passed on to it hangs there for nothing
                    streams = metadata.streams.values()
                    self.regions.moved({one.name for one in streams if one.region == self.name})
                self._ruler = info.master
            self._sets = [voting] if set(voting) == set(active) or not active else [voting, active]
            self._others = {*voting, *active, *info.learning} - {self.me}
            if info.master != self.me:
                if self.led and info.epoch > self.led:
                    self._step_down()
                return
            if info.epoch == self.led:
                self._open_sessions()
            elif info.epoch > max(self.led, promised):
                await self._lead(info.epoch, info.epoch_index)
            # Else it was promised by a former life of this process: see `anew`.

    async def _lead(self, epoch: int, since: int) -> None:
        going_on = bool(self.led) and self.led == epoch - 1
        await self.regions.promise(self.name, epoch)
        _LOG.info("region %r: this node is its master in epoch %d", self.name, epoch)
        self._master = None
        self._sessions.clear()
        was, self.led, self._yields, self._begun = self.led, epoch, False, False
        for copy in self.streams.values():
            if going_on and copy.can_go_on:
                copy.go_on(epoch, self._sets)
            else:
                if was:
                    copy.step_down()
                try:
                    await copy.begin(epoch, self._sets, fresh=copy.id > since)
                except RailgunError as error:  # another one can, perhaps; the other streams go on
                    copy.trouble = str(error)
                    self.spawn(copy.get_well())
        self._begun = True
        self._open_sessions()
        self.changed()

    def _step_down(self) -> None:
        _LOG.info("region %r: this node is no master of it any more", self.name)
        self.led, self.lease = 0, 0.0
        self._sessions.clear()
        self._early.clear()
        for copy in self.streams.values():
            copy.step_down()
        self.regions.moved({copy.stream.name for copy in self.streams.values()})

    async def yield_up(self, epoch: int) -> None:
        """Be the master no more, so that another one may be at once. It never acts in this epoch again."""
        if self.led != epoch:
            if not self.led and self.regions.promises.of(self.name) >= epoch:
                return  # it does not act any more
            raise NoMasterError(
                f"region {self.name!r}: this node is not its master in epoch {epoch} yet"
            )
        self._yields, self.lease = True, 0.0
        self.changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_ACKS):
                for driver in self._groups():
                    name = driver.stream.name
                    driver.let_go(NoMasterError(f"{name!r} gets another master: subscribe again"))
                while any(driver.consumers for driver in self._groups()):
                    await asyncio.sleep(PAUSE)
        await self.write_groups()
        async with self._turn:
            if self.led == epoch:
                self._step_down()

    def _groups(self) -> list[GroupDriver]:
        """The groups that this node serves."""
        streams = [copy.stream for copy in self.streams.values() if copy.leads]
        return [one for stream in streams for one in stream.groups.values() if one.tracked]

    async def write_groups(self) -> None:
        """Write the changes of all groups, and wait until they and all publishes that were taken are safe.

        A publisher that is not answered before another master follows cannot know whether its message is stored. So the
        wait is as long as there is progress, at most `DRAIN_S`.
        """
        limit_s = DRAIN_S if self._can_settle() else DRAIN_WITHOUT_QUORUM_S
        with contextlib.suppress(TimeoutError, RailgunError):
            async with asyncio.timeout(limit_s):
                for driver in self._groups():
                    driver.safe(lambda error: None)
                for copy in list(self.streams.values()):
                    await copy.settle()
                unsettled, polls = self._unsettled(), 0
                while any(unsettled) and polls < STALLED_POLLS:
                    await asyncio.sleep(PAUSE)
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
        """What the leader of the cluster has to know; None: nothing."""
        info = metadata.regions.get(self.name)
        if info is None or info.master != self.me:
            return None
        anew = self.led != info.epoch and self.regions.promises.of(self.name) >= info.epoch
        anew = anew or any(copy.broken for copy in self.streams.values())
        begun = self.led == info.epoch and not self._turn.locked()
        return {
            "epoch": info.epoch,
            "active": begun and self.active,
            "caught_up": self.caught_up() if begun else [],
            "anew": anew and not self._turn.locked(),
        }

    def granted(self, epoch: int, until: float) -> None:
        """The leader lets this node act, until then."""
        if epoch != self.led or self._yields:
            return
        idle = not self.may_act()
        self.lease = max(self.lease, until)
        if idle and self.may_act():
            for copy in self.streams.values():
                copy.stream.look()
            self.changed()

    # ------------------------------------------------------------ sessions

    def _open_sessions(self) -> None:
        for node in self._others:
            if node not in self._sessions and self.regions.links.is_up(node, "data"):
                self._open_session(node)

    def _open_session(self, node: str) -> None:
        if not self._begun:  # what is told now would not be heard by all copies: it is opened then
            return
        session = self.led << 32 | next(self._numbers)
        self._sessions[node] = session
        self.send(node, n.Fence(region=self.name, epoch=self.led, session=session))

    def up(self, node: str) -> None:
        """There is a new connection to a node."""
        self.down(node)
        if self.led and node in self._others:
            self._open_session(node)
        elif self._master is not None and self._master[0] == node:
            self.send(node, n.Fenced(region=self.name, epoch=self._master[1]))

    def down(self, node: str) -> None:
        """The connection to a node is lost."""
        if self._sessions.pop(node, None) is not None:
            for copy in self.streams.values():
                copy.session_over(node)
        for early in self._early.values():
            early.pop(node, None)

    async def fence(self, sender: str, asked: n.Fence) -> None:
        """A master wants the promise, and to know how the copies stand."""
        async with self._turn:
            promised = self.regions.promises.of(self.name)
            told = n.Fenced(region=self.name, epoch=asked.epoch, session=asked.session)
            if asked.epoch < promised or (asked.epoch == promised and self.led == asked.epoch):
                told.epoch, told.refused = promised, True
                self.send(sender, told)
                return
            node, epoch, session = self._master or ("", 0, 0)
            if (node, epoch) == (sender, asked.epoch) and asked.session < session:
                return  # it came late, by a connection that was lost: there is another one
            if self.led:
                self._step_down()
            if asked.epoch > promised:
                await self.regions.promise(self.name, asked.epoch)
            self._master = (sender, asked.epoch, asked.session)
            for id, copy in list(self.streams.items()):
                standing = await copy.fenced(sender, asked.epoch, asked.session)
                told.standings.append(words.standing(id, standing))
            self.send(sender, told)

    def fenced(self, sender: str, told: n.Fenced) -> None:
        """A replica has made its promise, or has made a greater one."""
        if told.refused:
            _LOG.info("region %r: node %s knows of epoch %d", self.name, sender, told.epoch)
            return
        if not told.session and self.led and sender in self._others:  # it begins anew
            self.up(sender)
        if self._sessions.get(sender) != told.session:
            return
        known = {one.stream: words.standing_heard(one) for one in told.standings}
        for id, standing in known.items():
            self._stands(sender, told.session, id, standing)

    def stands(self, sender: str, told: n.Stands) -> None:
        """A replica tells how one of its copies stands."""
        if self._sessions.get(sender) == told.session:
            heard = words.standing_heard(told.standing)
            self._stands(sender, told.session, told.standing.stream, heard)

    def _stands(self, sender: str, session: int, id: int, standing: Standing) -> None:
        copy = self.streams.get(id)
        if copy is not None:
            copy.session(sender, session, standing)
        elif len(self._early) < MOST_EARLY:
            self._early.setdefault(id, {})[sender] = (session, standing)

    # ------------------------------------------------------------ streams

    async def add(self, stream: Persistent, since: int) -> None:
        """A stream of the region is here; `since`: the entry with which the epoch began."""
        async with self._turn:
            copy = Replicated(stream, self.regions.committer, self)
            await copy.open()
            if self.led:
                await copy.begin(self.led, self._sets, fresh=copy.id > since)
            followed = self._master if not self.led else None
            if followed is not None:
                standing = await copy.fenced(*followed)
                told = words.standing(copy.id, standing)
                self.send(followed[0], n.Stands(session=followed[2], standing=told))
            self.streams[copy.id] = copy  # from now on it hears what is told of it
            for node, (session, told_early) in self._early.pop(copy.id, {}).items():
                if self._sessions.get(node) == session:
                    copy.session(node, session, told_early)

    def remove(self, id: int) -> None:
        """A stream is deleted."""
        copy = self.streams.pop(id, None)
        if copy is not None:
            copy.close()


async def _nobody(region: str) -> bool:
    """Hand a region over to nobody: there are no other nodes."""
    return False


class Regions:
    """All regions, on this node."""

    def __init__(
        self,
        me: str,
        links: Sender,
        disk: Disk,
        committer: Committer,
        spawn: Callable[[Coroutine[Any, Any, Any]], object],
        changed: Callable[[], None],
        moved: Callable[[set[str]], None],
        called: Callable[[str], str] = str,
        hand_over: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        self.me, self.links, self.committer, self.called = me, links, committer, called
        self.hand_over = hand_over or _nobody
        """Let another node be master of a region; returns whether one is."""
        self.closed = False
        self.spawn, self.changed, self.moved = spawn, changed, moved
        self.promises = Promises(disk)
        self._promising = asyncio.Lock()
        self._fences: dict[tuple[str, str], int] = {}  # the last session of each master and region
        self._regions: dict[str, Region] = {}
        self.elsewhere: dict[str, dict[str, str]] = {}
        """The streams that nodes cannot write, and why, as the leader told last."""
        self.flights: dict[str, Flight] = {}
        """What is on its way to each node."""

    def __iter__(self) -> Any:
        return iter(list(self._regions.values()))

    @property
    def unwritable(self) -> dict[str, str]:
        """Return the streams whose copies here cannot be written, and why."""
        return {name: why for region in self for name, why in region.unwritable.items()}

    def hear_unwritable(self, elsewhere: dict[str, dict[str, str]]) -> None:
        """Take note of what other nodes cannot write, by node and stream, as the leader tells it."""
        self.elsewhere = elsewhere
        for region in self:
            region.hear_unwritable(elsewhere)

    def get(self, name: str) -> Region:
        """A region by its name."""
        if name not in self._regions:
            self._regions[name] = Region(name, self)
        return self._regions[name]

    async def promise(self, region: str, epoch: int) -> None:
        """Promise to take nothing older; on disk when it returns."""
        async with self._promising:
            if epoch > self.promises.of(region):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(None, self.promises.make, region, epoch)

    async def look(self, metadata: Metadata) -> None:
        """Be what the metadata says this node is, in all regions."""
        for name in metadata.regions:
            await self.get(name).look(metadata)

    def up(self, node: str) -> None:
        """There is a new connection."""
        for region in self:
            region.up(node)

    def down(self, node: str) -> None:
        """A connection is lost."""
        for region in self:
            region.down(node)

    def received(self, sender: str, command: Any, blob: Blob) -> None:
        """A message on the lane `data`."""
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

    async def _fence(self, sender: str, asked: n.Fence) -> None:
        last = self._fences.get((sender, asked.region), 0)
        self._fences[sender, asked.region] = max(last, asked.session)
        while self._fences.get((sender, asked.region)) == asked.session:
            region = self.get(asked.region)
            try:
                await region.fence(sender, asked)
                region.broken_promise = ""
                return
            except RailgunError as error:  # a full disk, perhaps
                _LOG.error("region %r: %s", asked.region, error)
                region.broken_promise = str(error)
            await asyncio.sleep(RETRY)

    async def write_groups(self) -> None:
        """Write all that groups have to say: the node is about to end, and may be master still."""
        await asyncio.gather(*(region.write_groups() for region in self if region.led))

    def close(self) -> None:
        """The node is about to end."""
        self.closed = True
        self._fences.clear()
        for region in self:
            for copy in region.streams.values():
                copy.close()
