"""One stream of a cluster at work: its copy on this node, driven by the rules of `core.replication`.

Rules:

1. What is published is appended and synced here, then pushed to the replicas, all that came in a turn of the event loop
   in one frame. It is answered when it is as safe as its publisher wants.
2. A replica that is up with the master gets what is pushed from memory. One that lags behind gets it from the log,
   read by another thread in pieces, at most `WINDOW` bytes ahead of what it has confirmed, until it is up with it.
3. All that changes files stands in the lines of their one writer (`Committer`), in the order in which it was decided.
4. A copy that is damaged sets aside what is bad, and forgets its label; as a replica it gets what it lacks.
   Whoever has a log that takes nothing more (a failed sync) cannot be a master, and says so (`trouble`).
5. The groups are served when the epoch is active, from the states on disk. Changes of groups are numbered; a replica
   gets all states first, and then each change.
6. When this node is no master any more, who waits is told that nobody knows what becomes of it (`DEPOSED`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from railgun.core.delivery import Saved
from railgun.core.errors import ProtocolError, RailgunError
from railgun.core.replication import messages as m
from railgun.core.replication.master import Master, Phase
from railgun.core.replication.replica import Replica
from railgun.core.replication.standing import LOST, Copy, Runs, Standing
from railgun.node.cluster import words
from railgun.node.commit import Committer, Stamp
from railgun.node.copies import Acks, Done
from railgun.node.errors import (
    DamagedLogError,
    DeposedError,
    LogFailedError,
    NoMasterError,
    TrimmedError,
)
from railgun.node.grouplog import pack_change, pack_state, unpack_records
from railgun.node.groups import CopyNote, fold
from railgun.node.persistent import Persistent
from railgun.wire.commands import Blob
from railgun.wire.proto import cluster_pb2 as n
from railgun.wire.records import BatchError, Bytes, check, head, split

WINDOW: Final = 16 << 20  # bytes that a replica has not confirmed
FRAME: Final = 4 << 20  # bytes of one push
PIECE: Final = 4 << 20  # bytes read at once
NEWS: Final = 0.002  # seconds until replicas hear what is safe, if there is nothing else to tell
RETRY: Final = 0.5
_LOG: Final = logging.getLogger(__name__)


class Around(Protocol):
    """What a copy asks of its node."""

    me: str

    def send(self, to: str, command: Message, blobs: Sequence[Blob] = ()) -> bool:
        """Send a message on the lane `data`."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> object:
        """Do this beside all else."""

    def may_act(self) -> bool:
        """Whether this node has a lease for the region."""

    def changed(self) -> None:
        """A stream has begun or ceased to be served, or its epoch is active."""


@dataclass(slots=True)
class _Line:
    """What is on its way to a replica."""

    flight: deque[tuple[int, int]] = field(default_factory=deque)  # end, bytes
    size: int = 0
    reading: bool = False
    room: asyncio.Event = field(default_factory=asyncio.Event)
    told: tuple[int, int] = (-1, -1)  # what is safe, and the first offset, as it has heard
    loading: bool = False  # whether the states of groups are being read for it

    def sent(self, end: int, size: int) -> None:
        """More is on its way."""
        self.flight.append((end, size))
        self.size += size

    def confirmed(self, end: int) -> None:
        """It has all up to there."""
        while self.flight and self.flight[0][0] <= end:
            self.size -= self.flight.popleft()[1]
        self.room.set()


class Replicated:
    """The copy of a stream on this node. Made within an event loop, when nothing is under way."""

    def __init__(self, stream: Persistent, committer: Committer, around: Around) -> None:
        self.stream, self.around = stream, around
        self.id = stream.id
        self.trouble = ""
        """Why it cannot be a master, if so."""
        self._committer = committer
        self._loop = stream.loop
        note = stream.note
        self._label, self._groups = note.label, note.groups  # as of the end of the line
        self.copy = Copy()
        self.replica: Replica | None = None
        self.master: Master | None = None
        self._known_safe = note.safe
        self._ready = False
        self._readying = False
        self._lines: dict[str, _Line] = {}
        self._fresh: list[tuple[int, int, int, Sequence[Bytes]]] = []  # base, end, epoch, batches
        self._flushing = False
        self._news: asyncio.TimerHandle | None = None
        self._waiting: deque[tuple[int, Done]] = deque()  # for a majority
        self._patient: list[tuple[int, Done]] = []  # for all
        self._number = 0  # of the last change of groups that was given to the disk
        self._awaited: deque[tuple[int, Done]] = deque()
        self._failing = False
        self.closed = False
        stream.copies = self

    async def open(self) -> None:
        """See what there is; mend what is damaged."""
        if self.stream.groups_damaged:
            self._label = LOST
        if self.stream.log.damage is not None:
            await self._repair()
        elif self._label == LOST:
            await self._write_note()
        self._look_at_log()

    def _look_at_log(self) -> None:
        """When nothing is under way, the copy is what the log is."""
        log = self.stream.log
        safe = max(self._known_safe, self.copy.safe)
        self.trouble = str(log.failed or "")
        self.copy = Copy.of(self._standing(), safe)

    def _standing(self) -> Standing:
        log = self.stream.log
        return Standing(self._label, log.first, log.end, tuple(log.runs), self._groups)

    async def settle(self) -> None:
        """Wait until all that was given to the disk is there."""
        for log in (self.stream.log, self.stream.group_log):
            await self.stream.perform(log, lambda: None)

    # ------------------------------------------------------------ what it is

    @property
    def safe(self) -> int:
        """Messages below this offset may be seen."""
        return self.copy.safe

    @property
    def leads(self) -> bool:
        """Whether it is the master's, and serves."""
        return self._ready and self.master is not None

    @property
    def acting(self) -> bool:
        """Whether it serves now."""
        return self.leads and self.around.may_act()

    @property
    def active(self) -> bool:
        """Whether a majority has the label of the epoch."""
        return self.master is not None and self.master.active

    async def fenced(self, master: str, epoch: int, session: int) -> Standing:
        """Follow this master; how the copy stands."""
        if self.master is not None:
            self.step_down()
        await self.settle()
        if self.stream.log.damage is not None:
            await self._repair()
        self._look_at_log()
        self._failing = False
        self.replica = Replica(self.copy)
        return self.replica.fenced(master, epoch, session)

    async def begin(self, epoch: int, sets: Sequence[Sequence[str]], fresh: bool) -> None:
        """Be the master of an epoch."""
        await self.settle()
        if self.stream.log.damage is not None:
            await self._repair()
        self._look_at_log()
        self._lead(epoch, sets, go_on=fresh)

    def go_on(self, epoch: int, sets: Sequence[Sequence[str]]) -> None:
        """Be the master of the next epoch, too."""
        going = self.master is not None and self.master.phase in (Phase.LEAD, Phase.LABEL)
        self._flush()  # what is on disk is of before
        self._lead(epoch, sets, go_on=going)

    def _lead(self, epoch: int, sets: Sequence[Sequence[str]], go_on: bool) -> None:
        self.replica = None
        self._lines.clear()
        self._number = 0
        self._awaited = deque((0, done) for _, done in self._awaited)
        self.master = Master(self.around.me, self.copy, epoch, sets)
        self._do(self.master.go_on() if go_on else self.master.begin())

    def step_down(self) -> None:
        """It is no master any more."""
        if self.master is None:
            return
        error = DeposedError(
            f"this node is no master of {self.stream.name!r} any more: what was being written may be stored or not"
        )
        self.master, self._ready, self._readying = None, False, False
        self._fresh = []
        self._lines.clear()
        waiting = [done for _, done in (*self._waiting, *self._patient, *self._awaited)]
        self._waiting.clear()
        self._patient = []
        self._awaited.clear()
        for done in waiting:
            done(error)
        self.stream.follow(error)
        self.around.changed()

    def close(self) -> None:
        """The stream is deleted, or the node about to end."""
        self.closed = True
        self.step_down()
        self.replica = None
        if self._news is not None:
            self._news.cancel()

    # ------------------------------------------------------------ what the stream wants

    def publish(
        self, batches: Sequence[bytearray], acks: Acks, done: Done, safe: Done | None = None
    ) -> None:
        """Store these; `done` is called when they are as safe as was asked for."""
        if not self.acting or self.master is None:
            raise NoMasterError(
                f"this node is not the master of {self.stream.name!r} now: try again"
            )
        stamp = Stamp(self.master.epoch, self.stream.now())
        told = partial(self._published, batches, acks, done, safe)
        self._committer.submit(self.stream.log, batches, told, stamp)

    def _published(
        self,
        batches: Sequence[bytearray],
        acks: Acks,
        done: Done,
        safe: Done | None,
        error: RailgunError | None,
    ) -> None:
        if error is not None:
            self._look_for_trouble(error)
        elif self.master is None:
            error = DeposedError("this node is no master any more: it may be stored or not")
        if error is not None:
            for told in (safe, done):
                if told is not None:
                    told(error)
            return
        first, last = head(batches[0]), head(batches[-1])
        self._fresh.append((first.base, last.end, first.epoch, batches))
        if safe is not None:
            self._waiting.append((last.end, safe))
        if acks in (Acks.MASTER, Acks.NONE):
            done(None)
        elif acks is Acks.ALL:
            self._patient.append((last.end, done))
        else:
            self._waiting.append((last.end, done))
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def when_safe(self, end: int, done: Done) -> None:
        """Call this when all before that offset is safe."""
        if end <= self.copy.safe:
            done(None)
        elif self.master is None:
            done(NoMasterError(f"this node is not the master of {self.stream.name!r}: try again"))
        else:  # it is on disk, so those who wait for more come later
            at = next((n for n, (e, _) in enumerate(self._waiting) if e >= end), None)
            self._waiting.insert(len(self._waiting) if at is None else at, (end, done))

    def keep(self, changes: Sequence[tuple[str, bytes | None]], done: Done) -> None:
        """Store changes of groups; `done` is called when they are safe."""
        master = self.master
        if not self._ready or master is None:
            raise NoMasterError(f"this node is not the master of {self.stream.name!r}: try again")
        if not changes:
            self._await_groups(self._number, done)
            return
        self._number += 1
        self._groups = (master.epoch, self._number)
        told = partial(self._kept, master.epoch, self._number, changes, done)
        self._submit_groups(changes, told)

    def _submit_groups(self, changes: Sequence[tuple[str, bytes | None]], done: Done) -> None:
        note = CopyNote(self._label, self._groups, self.copy.safe)
        self._committer.submit(self.stream.group_log, [*changes, ("", note.pack())], done)

    def _kept(
        self,
        epoch: int,
        number: int,
        changes: Sequence[tuple[str, bytes | None]],
        done: Done,
        error: RailgunError | None,
    ) -> None:
        master = self.master
        if error is not None:
            self._look_for_trouble(error)
            for peer in master.peers.values() if master is not None else ():
                peer.sent = None  # there is a gap: they need all of it
            done(error)
            return
        if master is None:
            done(DeposedError("this node is no master any more: it may be stored or not"))
            return
        if master.epoch != epoch:  # it went on, and what it pushes now has this in it
            self._await_groups(0, done)
            return
        self._await_groups(number, done)
        self._do(master.wrote_groups(epoch, number))
        blob = b"".join(pack_change(name, change) for name, change in changes)
        for node in list(master.peers):
            push = master.push_groups(node, whole=False, number=number)
            if push is not None:
                self.around.send(node, words.push_groups(self.id, push), [blob])
            else:
                self._feed_groups(node)

    def _await_groups(self, number: int, done: Done) -> None:
        if self.master is not None and self.master.safe_groups >= number:
            done(None)
        else:
            self._awaited.append((number, done))

    def trimmed(self, first: int) -> None:
        """What lies before is not kept any more."""
        if self.master is not None and first > self.copy.first:
            self.master.trimmed(first)
            self._tell_soon()
        elif self.master is None:
            self.copy.trim(first)

    # ------------------------------------------------------------ feeding

    def _flush(self) -> None:
        """What was stored in this turn: to all replicas."""
        self._flushing = False
        master, fresh = self.master, self._fresh
        self._fresh = []
        if master is None or not fresh:
            return
        commands: list[m.Command] = []
        for base, end, epoch in _joined(fresh):
            commands += master.appended(base, epoch, end)
        for node in list(master.peers):
            self._feed(node, fresh)
        self._do(commands)

    def _feed(self, node: str, fresh: Sequence[tuple[int, int, int, Sequence[Bytes]]] = ()) -> None:
        """Send a replica what it lacks, as far as there is room."""
        master = self.master
        peer = master.peers.get(node) if master is not None else None
        if master is None or peer is None or peer.session is None or master.phase is not Phase.LEAD:
            return
        line = self._lines.setdefault(node, _Line())
        if line.reading:
            return
        batches: list[Bytes] = []
        size = last = 0
        for base, end, _, some in fresh:
            if line.size >= WINDOW or base != (last if batches else peer.next):
                continue
            batches += some
            size, last = size + sum(map(len, some)), end
            if size >= FRAME:
                self._push(node, line, last, batches, size)
                batches, size = [], 0
        if batches:
            self._push(node, line, last, batches, size)
        if peer.next < master.copy.durable:
            line.reading = True
            self.around.spawn(self._catch_up(master, node, line))

    def _push(
        self, node: str, line: _Line, end: int, batches: Sequence[Bytes] = (), size: int = 0
    ) -> None:
        assert self.master is not None
        push = self.master.push(node, end)
        if push is None:
            return
        line.told = (push.safe, push.first)
        if size:
            line.sent(push.end, size)
        self.around.send(node, words.push(self.id, push), batches)

    async def _catch_up(self, master: Master, node: str, line: _Line) -> None:
        """Read what a replica lacks from the log, piece by piece."""
        peer, log = master.peers[node], self.stream.log
        session = peer.session
        try:
            while self.master is master and peer.session == session:
                if peer.next >= master.copy.durable:
                    break
                if line.size >= WINDOW:
                    line.room.clear()
                    await line.room.wait()
                    continue
                begin = max(peer.next, master.copy.first)
                try:
                    batches = await self._loop.run_in_executor(None, log.read, begin, PIECE)
                except TrimmedError as error:  # meanwhile
                    master.trimmed(error.first)
                    continue
                if self.master is not master or peer.session != session or not batches:
                    break
                if head(batches[0]).base == begin:
                    self._push(node, line, head(batches[-1]).end, batches, sum(map(len, batches)))
        except RailgunError as error:
            self._look_for_trouble(error)
            self._loop.call_later(RETRY, self._feed, node)
        finally:
            line.reading = False
        if self.master is master and peer.session == session:
            self._feed(node)

    def _tell_soon(self) -> None:
        """Let replicas hear what is safe, and what is not kept any more."""
        if self._news is None:
            self._news = self._loop.call_later(NEWS, self._tell)

    def _tell(self) -> None:
        self._news = None
        master = self.master
        if master is None or master.phase is not Phase.LEAD:
            return
        news = (master.copy.safe, master.copy.first)
        for node, peer in master.peers.items():
            line = self._lines.setdefault(node, _Line())
            if peer.session is not None and line.told != news and not line.reading:
                self._push(node, line, peer.next)

    def _feed_groups(self, node: str) -> None:
        """Send a replica the states of all groups."""
        master = self.master
        peer = master.peers.get(node) if master is not None else None
        if master is None or peer is None or peer.session is None or peer.sent is not None:
            return
        line = self._lines.setdefault(node, _Line())
        if master.phase is Phase.LEAD and not line.loading:
            line.loading = True
            self.around.spawn(self._send_groups(master, node, line))

    async def _send_groups(self, master: Master, node: str, line: _Line) -> None:
        try:
            states = await self.stream.perform(self.stream.group_log, self.stream.group_log.load)
        except RailgunError as error:
            self._look_for_trouble(error)
            return
        finally:
            line.loading = False
        note = states.pop("", None)
        if self.master is not master or not isinstance(note, CopyNote):
            return
        push = master.push_groups(node, whole=True, number=note.groups[1])
        if push is not None:
            self.around.send(node, words.push_groups(self.id, push), [_packed(states)])

    # ------------------------------------------------------------ sessions, as a master

    def session(self, node: str, session: int, standing: Standing) -> None:
        """A replica has made its promise, or tells anew how it stands."""
        if self.master is None:
            return
        self._lines[node] = _Line()
        self._do(self.master.stands(node, session, standing))
        self._feed(node)
        self._feed_groups(node)
        self._push_news(node)

    def _push_news(self, node: str) -> None:
        """A replica that lacks nothing has to hear where the epoch began, all the same."""
        master = self.master
        if master is None or master.phase is not Phase.LEAD or node not in master.peers:
            return
        line, peer = self._lines.setdefault(node, _Line()), master.peers[node]
        if peer.session is not None and not line.reading and line.told == (-1, -1):
            self._push(node, line, peer.next)

    def session_over(self, node: str) -> None:
        """The connection to a replica is lost."""
        line = self._lines.pop(node, None)
        if line is not None:
            line.room.set()
        if self.master is not None:
            self._do(self.master.gone(node))

    # ------------------------------------------------------------ what others say

    def received(self, sender: str, command: Any, blob: bytearray) -> None:
        """A message of another copy."""
        if self.closed:
            return
        try:
            self._hear(sender, command, blob)
        except (ProtocolError, BatchError) as error:
            _LOG.error(
                "stream %r: node %s says what cannot be: %s", self.stream.name, sender, error
            )

    def _hear(self, sender: str, command: Any, blob: bytearray) -> None:
        master, replica = self.master, self.replica
        match command:
            case n.Push() if replica is not None and not self._failing:
                batches = split(blob)
                runs = _runs(batches)
                self._do(replica.pushed(words.push_heard(command, runs)), batches=batches)
            case n.PushGroups() if replica is not None and not self._failing:
                push = words.push_groups_heard(command)
                self._do(replica.pushed_groups(push), records=unpack_records(bytes(blob)))
            case n.Has() if master is not None:
                self._do(master.has(sender, words.has_heard(command)))
                if sender in self._lines:
                    self._lines[sender].confirmed(command.end)
                self._feed(sender)
                self._answer_patient()
            case n.HasGroups() if master is not None:
                self._do(master.has_groups(sender, words.has_groups_heard(command)))
            case n.Fetch() if replica is not None and command.session == replica.session:
                self.around.spawn(self._give(sender, command))
            case n.FetchGroups() if replica is not None and command.session == replica.session:
                self.around.spawn(self._give_groups(sender, command))
            case n.Fetched() if master is not None:
                batches = split(blob)
                told = m.Fetched(command.session, command.base, _runs(batches))
                self._do(master.fetched(sender, told), batches=batches)
            case n.FetchedGroups() if master is not None:
                told_groups = m.FetchedGroups(
                    command.session, LOST if command.trouble else command.epoch, command.number
                )
                records = unpack_records(bytes(blob))
                self._do(master.fetched_groups(sender, told_groups), records=records)

    async def _give(self, to: str, asked: n.Fetch) -> None:
        """A new master asks for what it lacks."""
        told = n.Fetched(stream=self.id, session=asked.session, base=asked.begin)
        batches: list[memoryview] = []
        try:
            read = self.stream.log.read
            batches = await self._loop.run_in_executor(None, read, asked.begin, FRAME)
            told.end = head(batches[-1]).end if batches else asked.begin
        except RailgunError as error:
            self._look_for_trouble(error)
            told.trouble = str(error)
        self.around.send(to, told, batches)

    async def _give_groups(self, to: str, asked: n.FetchGroups) -> None:
        told = n.FetchedGroups(stream=self.id, session=asked.session)
        packed = b""
        try:
            states = await self.stream.perform(self.stream.group_log, self.stream.group_log.load)
            note = states.pop("", CopyNote())
            assert isinstance(note, CopyNote)
            told.epoch, told.number = note.groups
            packed = _packed(states)
        except RailgunError as error:
            told.trouble = str(error)
        self.around.send(to, told, [packed])

    # ------------------------------------------------------------ what is to be done

    def _do(
        self,
        commands: Iterable[m.Command],
        batches: Sequence[Bytes] = (),
        records: Sequence[tuple[str, bytes | None]] = (),
    ) -> None:
        log = self.stream.log
        for command in commands:
            match command:
                case m.Say(to, message):
                    self.around.send(to, words.said(self.id, message))
                case m.Write(_, runs):
                    wrote = partial(self._wrote, runs[-1][1])
                    self._committer.submit(log, batches, wrote)
                case m.Cut(offset):
                    _LOG.warning("stream %r: cut off at %d", self.stream.name, offset)
                    self._change(partial(log.cut, offset))
                case m.Anew(base):
                    self._change(partial(log.reset, base))
                case m.Trim(first):
                    self._change(partial(_purge, log, first))
                case m.Label(epoch, groups):
                    self._label = epoch
                    if groups:
                        self._groups = (epoch, 0)
                    self._submit_groups([], partial(self._labelled, epoch))
                case m.WriteGroups(epoch, number, whole):
                    self._write_groups(epoch, number, whole, records)
                case m.Serve():
                    self._serve()
                case m.Safe():
                    self._is_safe()
                case m.SafeGroups(number):
                    while self._awaited and self._awaited[0][0] <= number:
                        self._awaited.popleft()[1](None)
        self._look_if_active()

    def _change(self, work: Callable[[], object]) -> None:
        self._committer.perform(self.stream.log, work, self._changed)

    def _changed(self, error: RailgunError | None) -> None:
        if error is not None:
            _LOG.error("stream %r: %s", self.stream.name, error)
            self._fail(error)
        else:
            self.stream.gone_before()

    def _wrote(self, end: int, error: RailgunError | None) -> None:
        if error is not None:
            self._fail(error)
        elif self.master is not None:
            self._do(self.master.wrote(end))
        elif self.replica is not None and not self._failing:
            self._do(self.replica.wrote(end))

    def _write_groups(
        self, epoch: int, number: int, whole: bool, records: Sequence[tuple[str, bytes | None]]
    ) -> None:
        self._groups = (epoch, number)
        done = partial(self._wrote_groups, epoch, number)
        if not whole:
            self._submit_groups(records, done)
            return
        states: dict[str, Saved | CopyNote] = {name: fold.load(s) for name, s in records if s}
        states[""] = CopyNote(self._label, self._groups, self.copy.safe)
        group_log = self.stream.group_log
        self._committer.perform(group_log, partial(group_log.replace, states), done)

    def _wrote_groups(self, epoch: int, number: int, error: RailgunError | None) -> None:
        if error is not None:
            self._fail(error)
        elif self.master is not None:
            self._do(self.master.wrote_groups(epoch, number))
        elif self.replica is not None and not self._failing:
            self._do(self.replica.wrote_groups(epoch, number))

    def _labelled(self, epoch: int, error: RailgunError | None) -> None:
        if error is not None:
            self._fail(error)
        elif self.master is not None:
            self._do(self.master.labelled(epoch))
        elif self.replica is not None and not self._failing:
            self._do(self.replica.labelled(epoch))

    def _serve(self) -> None:
        assert self.master is not None
        for node in list(self.master.peers):
            self._feed(node)
            self._feed_groups(node)
            self._push_news(node)

    def _is_safe(self) -> None:
        safe = self.copy.safe
        while self._waiting and self._waiting[0][0] <= safe:
            self._waiting.popleft()[1](None)
        self.stream.more()
        if self.master is not None:
            self._tell_soon()

    def _answer_patient(self) -> None:
        """Those who wait for all replicas."""
        if self.master is None or not self._patient:
            return
        still = []
        for end, done in self._patient:
            if end <= self.copy.safe and self.master.all_have(end):
                done(None)
            else:
                still.append((end, done))
        self._patient = still

    def _look_if_active(self) -> None:
        """The first time that the epoch is active, the groups are served."""
        if self.master is None or self._ready or self._readying or not self.master.active:
            return
        self._readying = True
        self.around.spawn(self._get_ready(self.master))

    async def _get_ready(self, master: Master) -> None:
        try:
            await self.stream.lead()
        except RailgunError as error:
            self._look_for_trouble(error)
            return
        finally:
            self._readying = False
        if self.master is None or self.closed:
            self.stream.follow(DeposedError("this node is no master any more"))
            return
        self._ready = True
        self.stream.more()
        self.stream.look()
        self.around.changed()

    # ------------------------------------------------------------ what goes wrong

    def _look_for_trouble(self, error: RailgunError) -> None:
        if isinstance(error, LogFailedError | DamagedLogError):
            self.trouble = str(error)
            self.around.changed()

    def _fail(self, error: RailgunError) -> None:
        """Something could not be written."""
        self._look_for_trouble(error)
        if self.master is not None and not self.trouble:
            self.trouble = str(error)  # another one can, perhaps
            self.around.changed()
        if self._failing or self.replica is None:
            return
        self._failing = True
        self.around.spawn(self._recover(self.replica))

    async def _recover(self, replica: Replica) -> None:
        """When all that was under way has come to its end, tell how the copy stands; the master begins there."""
        await asyncio.sleep(RETRY)
        try:
            await self.settle()
            if self.stream.log.damage is not None:
                await self._repair()
            states = await self.stream.perform(self.stream.group_log, self.stream.group_log.load)
        except RailgunError as error:
            self._look_for_trouble(error)
            return
        if self.replica is not replica or self.closed:
            return
        note = states.get("", CopyNote())
        if isinstance(note, CopyNote):
            self._label = LOST if self._label == LOST else note.label
            self._groups = note.groups
        self._look_at_log()
        replica.copy = self.copy
        self._failing = False
        self._do(replica.lost() if self._label == LOST else replica.failed())

    async def _repair(self) -> None:
        """Set aside what is damaged. The copy has lost what it had, and says so from now on."""
        log = self.stream.log
        _LOG.error("stream %r: %s", self.stream.name, log.damage)
        self._label = LOST
        await self._write_note()
        await self.stream.perform(log, log.repair)
        if log.failed is None:
            self.trouble = ""

    async def _write_note(self) -> None:
        done: asyncio.Future[None] = self._loop.create_future()

        def told(error: RailgunError | None) -> None:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self._submit_groups([], told)
        await done


def _packed(states: dict[str, Any]) -> bytes:
    return b"".join(pack_state(name, fold.dump(state)) for name, state in states.items())


def _purge(log: Any, first: int) -> None:
    log.purge(min(first, log.durable_end))


def _runs(batches: Sequence[Bytes]) -> Runs:
    """Of which epochs batches are; they are looked at closely."""
    runs: list[tuple[int, int]] = []
    for batch in batches:
        found = check(batch)
        if runs and runs[-1][0] == found.epoch:
            runs.pop()
        runs.append((found.epoch, found.end))
    return tuple(runs)


def _joined(
    fresh: Iterable[tuple[int, int, int, Sequence[Bytes]]],
) -> Iterable[tuple[int, int, int]]:
    """Base, end and epoch of what was stored, as few as may be."""
    begun: tuple[int, int, int] | None = None
    for base, end, epoch, _ in fresh:
        if begun is not None and begun[1] == base and begun[2] == epoch:
            begun = (begun[0], end, epoch)
            continue
        if begun is not None:
            yield begun
        begun = (base, end, epoch)
    if begun is not None:
        yield begun
