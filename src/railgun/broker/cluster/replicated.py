"""One stream of a cluster at work: its copy on this node, driven by the rules of `broker.protocol.replication`.

Rules:

1. What is published is appended and synced here, then pushed to the replicas, all that came in a turn of the event loop
   in one frame. It is answered when it is as safe as its publisher wants.
2. Replicas are fed by `feeding`. What a replica gets that others have already, its system need not keep in memory: it
   is much, and old.
3. All that changes files stands in the lines of their one writer (`Committer`), in the order in which it was decided.
4. A copy that is damaged sets aside what is bad, and forgets its label; as a replica it gets what it lacks. So does one
   that is shorter than what it knew to be safe: a log that was cut off looks as if the power had failed.
   Whoever has a log that takes nothing more (a failed sync) cannot be a master, and says so (`trouble`).
5. The groups are served when the epoch is active, from the states on disk. Changes of groups are numbered; a replica
   gets all states first, and then each change.
6. When this node is no master any more, who waits is told that nobody knows what becomes of it (`DEPOSED`).
7. A replica that cannot write says so to the leader, which tells the master (`hear_unwritable`). If there is no quorum
   without such replicas, and nothing has become safe for `STUCK_S`, those who wait are told so with the reason
   (`NotEnoughReplicasAfterAppendError`), and what is published is refused (`NotEnoughReplicasError`) until there is a
   quorum again. The IDs of what the master has stored stay taken: it may be safe yet.
8. A master whose disk refuses a publish gives way (`Around.give_way`), and answers when it is known what came of it. If
   another node is master, nothing was stored (`NO_MASTER`), and the client sends it again, there; if no other one can
   be, the publisher is told what the disk says. What comes behind a publish that is held is held, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from railgun.broker.cluster import replica_messages as words
from railgun.broker.cluster.feeding import FRAME, RETRY, Around, Feeder, Fresh, begun_at, packed
from railgun.broker.errors import (
    DamagedLogError,
    DeposedError,
    LogFailedError,
    NoMasterError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    StorageError,
    is_refusal,
    refusal,
    trouble_in,
)
from railgun.broker.log.committer import Committer, Stamp
from railgun.broker.log.group_log import pack_change, unpack_records
from railgun.broker.log.segment import extend
from railgun.broker.protocol.replication import messages as m
from railgun.broker.protocol.replication.master import Master, Phase
from railgun.broker.protocol.replication.replica import Replica
from railgun.broker.protocol.replication.standing import LOST, Copy, Runs, Standing
from railgun.broker.streams.copies import Acks, Done
from railgun.broker.streams.groups import CopyNote, Kept, fold, resolve
from railgun.broker.streams.persistent import Persistent
from railgun.errors import ProtocolError, RailgunError, said
from railgun.transport.commands import Blob
from railgun.transport.proto import cluster_pb2 as n
from railgun.transport.records import CONTINUES, BatchError, Bytes, head, intact

STUCK_S: Final = 1.0
"""Seconds for which nothing becomes safe before those who wait are told that too few replicas can write."""
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """A publish that waits for what becomes of its master."""

    batches: Sequence[bytearray]
    acks: Acks
    done: Done
    safe: Done | None
    error: RailgunError | None = None
    """What the disk said; None: it was not asked."""

    @property
    def in_doubt(self) -> bool:
        """Whether it may be on disk, though the disk has said no."""
        return isinstance(self.error, LogFailedError | DamagedLogError)

    @property
    def may_be_taken_elsewhere(self) -> bool:
        """Whether another node may have more luck with it: it is the disk that refuses."""
        return self.in_doubt or is_refusal(self.error)

    def tell(self, error: RailgunError) -> None:
        """Tell the publisher that it was not stored as it should be."""
        for told in (self.safe, self.done):
            if told is not None:
                _tell(told, error)


class Replicated:
    """The copy of a stream on this node. Made within an event loop, when nothing is under way."""

    def __init__(self, stream: Persistent, committer: Committer, around: Around) -> None:
        self.stream, self.around = stream, around
        self.id = stream.id
        self._trouble = ""  # why it cannot be a master, beside what its files say
        self._ends: dict[str, int] = {}  # how far replicas were when they were heard of last
        self._committer = committer
        self._loop = stream.loop
        note = stream.note
        self._label, self._groups = note.label, note.groups  # as of the end of the line
        self._had = note.groups  # on disk, without a gap
        self._doubtful = False  # whether the line has failed, so that nobody knows what is on disk
        self.copy = Copy()
        self.replica: Replica | None = None
        self.master: Master | None = None
        self._known_safe = note.safe  # and is on disk, as far as the log goes
        self._noted_safe = note.safe  # in the group log
        self.broken = False
        """Whether it could not write what a master has to, and needs another epoch to begin anew."""
        self._ready = False
        self._readying = False
        self._feeder: Feeder | None = None  # of a master
        self._fresh: list[Fresh] = []
        self._flushing = False
        self._waiting: deque[tuple[int, Done]] = deque()  # publishers, for a majority
        self._accepting: deque[tuple[int, Done]] = deque()  # their IDs, for a majority
        self._stuck_since: float | None = None  # when something became safe last, while more is not
        self._too_few = ""  # why too few replicas can write, if publishes are refused for it
        self._unwritten = ""  # what a replica could not write last
        self._held: list[
            _Held
        ] = []  # publishes that were refused by the disk, and those behind them
        self._patient: list[tuple[int, Done]] = []  # for all
        self._patient_since = 0.0
        self._trimming: list[tuple[int, Done]] = []  # until others have let go, too
        self._number = 0  # of the last change of groups that was given to the disk
        self._awaited: deque[tuple[int, Done]] = deque()
        self._failing = False
        self._changes = 0  # of the log, that are given to the disk and are not done
        self._unchanged = False  # whether one of them has failed
        self.closed = False
        stream.copies = self

    @property
    def trouble(self) -> str:
        """Why it cannot be a master: something could not be written, or could not be read; empty: it can."""
        return self._trouble or str(self.stream.trouble or "") or self._unwritten

    @trouble.setter
    def trouble(self, why: str) -> None:
        self._trouble = why

    @property
    def trouble_error(self) -> RailgunError:
        """The trouble, as an error: nothing was stored."""
        trouble = self.stream.trouble or StorageError(self.trouble)
        if isinstance(trouble, StorageError) and is_refusal(trouble):
            return refusal(trouble)
        return trouble

    async def open(self) -> None:
        """See what there is; mend what is damaged."""
        end, knew = self.stream.log.end, self._known_safe
        if self.stream.groups_damaged or end < knew:
            _LOG.error("stream %r: %d of %d that were safe are here", self.stream.name, end, knew)
            self._label = LOST
        if self.stream.log.damage is not None:
            await self._repair()
        elif self._label == LOST:
            await self._write_note()
        self._look_at_log()

    def _look_at_log(self) -> None:
        """When nothing is under way, the copy is what the log is."""
        self._trouble = str(self.stream.log.failed or "")
        self._unchanged = False
        self.copy = Copy.of(self._standing(), self._known_safe, self.stream.log.whole_end)

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

    @property
    def unsettled(self) -> int:
        """How many publishers wait for an answer, and messages of this master are not safe yet; 0: all is settled."""
        unsafe = max(self.copy.durable - self.copy.safe, 0) if self.master is not None else 0
        return unsafe + len(self._waiting) + len(self._patient) + len(self._awaited)

    @property
    def lost(self) -> bool:
        """Whether it has lost something that it had, and has not got it back."""
        return bool(self._label == LOST)

    def lag(self, node: str) -> int:
        """Return how many of the master's messages a replica lacks, safe or not.

        Of a replica that is silent the last that was heard counts; of one that was never heard of: it may lack all.
        """
        peer = self.master.peers.get(node) if self.master is not None else None
        if peer is not None:
            self._ends[node] = peer.end
        return max(0, self.copy.durable - max(self._ends.get(node, 0), self.copy.first))

    async def fenced(self, master: str, epoch: int, session: int) -> Standing:
        """Follow this master; how the copy stands."""
        if self.master is not None:
            self.step_down()
        self.replica = None  # whom it followed is not heard any more: that would not be told
        await self._look_anew()
        self._failing = False
        self.replica = Replica(self.copy)
        return self.replica.fenced(master, epoch, session)

    async def begin(self, epoch: int, sets: Sequence[Sequence[str]], fresh: bool) -> None:
        """Be the master of an epoch."""
        self.replica = None
        await self._look_anew()
        self._lead(epoch, sets, go_on=fresh)

    async def _look_anew(self) -> None:
        """When nothing is under way any more, see what there is."""
        await self._come_to_rest()
        if self._doubtful:
            await self._look_at_note(None)
        self._look_at_log()

    async def _come_to_rest(self) -> None:
        """Wait until nothing is under way, and mend what is damaged."""
        await self.settle()
        if self.stream.log.damage is not None:
            await self._repair()

    @property
    def can_go_on(self) -> bool:
        """Whether it is the log, so that nobody has to be asked for the next epoch."""
        master = self.master
        return master is not None and master.phase in (Phase.LEAD, Phase.LABEL) and not self.broken

    def go_on(self, epoch: int, sets: Sequence[Sequence[str]]) -> None:
        """Be the master of the next epoch, too."""
        self._flush()  # what is on disk is of before
        self._lead(epoch, sets, go_on=True)

    def _lead(self, epoch: int, sets: Sequence[Sequence[str]], go_on: bool) -> None:
        self.replica, self.broken = None, False
        self._number = 0
        self._awaited = deque((0, done) for _, done in self._awaited)
        if self._feeder is not None:
            self._feeder.close()
        self.master = Master(self.around.me, self.copy, epoch, sets)
        self._feeder = Feeder(self.master, self.stream, self.around, self._look_for_trouble)
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
        if self._feeder is not None:
            self._feeder.close()
            self._feeder = None
        lists = [self._accepting, self._waiting, self._patient, self._trimming, self._awaited]
        waiting = [done for one in lists for _, done in one]
        held, self._held = self._held, []
        for one in held:
            one.tell(error if one.in_doubt else self._no_master())
        self._waiting.clear()
        self._accepting.clear()
        self._stuck_since, self._too_few = None, ""
        self._patient, self._trimming = [], []
        self._awaited.clear()
        for done in waiting:
            _tell(done, error)
        self.stream.follow(error)
        self.around.changed()

    def close(self) -> None:
        """The stream is deleted, or the node about to end."""
        self.closed = True
        self.step_down()
        self.replica = None

    # ------------------------------------------------------------ what the stream wants

    def publish(
        self, batches: Sequence[bytearray], acks: Acks, done: Done, safe: Done | None = None
    ) -> None:
        """Store these; `done` is called when they are as safe as was asked for."""
        if not self.acting or self.master is None:
            raise self._no_master()
        if self._held:
            self._held.append(_Held(batches, acks, done, safe))
            return
        if self._too_few and acks is not Acks.MASTER and acks is not Acks.NONE:
            raise NotEnoughReplicasError(f"{self._too_few}. Nothing was stored: try again")
        stamp = Stamp(self.master.epoch, self.stream.stored_now())
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
            self.around.changed()
        elif self.master is None:
            error = DeposedError("this node is no master any more: it may be stored or not")
        if error is not None:
            held = _Held(batches, acks, done, safe, error)
            if held.may_be_taken_elsewhere and self.master is not None and self.around.give_way():
                self._held.append(held)
            else:
                held.tell(error)
            return
        first, last = head(batches[0]), head(batches[-1])
        is_unit = bool(first.flags & CONTINUES)
        self._stored_more(Fresh(first.base, last.end, first.epoch, batches, is_unit))
        if safe is not None:
            self._accepting.append((last.end, safe))
        if acks in (Acks.MASTER, Acks.NONE):
            done(None)
        elif acks is Acks.ALL:
            if not self._patient:
                self._patient_since = self._loop.time()
            self._patient.append((last.end, done))
        else:
            self._waiting.append((last.end, done))

    async def write_unit(self, write: Callable[[Stamp], tuple[int, int]]) -> tuple[int, int]:
        """Let a function append a unit to the log, in the turn of its one writer, and push it to the replicas."""
        master = self.master
        if not self.acting or master is None or self._held:
            raise self._no_master()
        stamp = Stamp(master.epoch, self.stream.stored_now())

        def stored(where: tuple[int, int]) -> None:
            if self.master is not None:
                self._stored_more(Fresh(*where, stamp.epoch, (), is_unit=True))

        try:
            base, end = await self.stream.perform(self.stream.log, lambda: write(stamp), stored)
        except RailgunError as error:
            self._look_for_trouble(error)
            self.around.changed()
            if is_refusal(error) and self.master is not None:
                self.around.give_way()
            raise
        if self.master is None:
            raise DeposedError("this node is no master any more: it may be stored or not")
        return base, end

    def _stored_more(self, fresh: Fresh) -> None:
        """Note what is on disk here, and push it to the replicas with all else of this turn."""
        self._fresh.append(fresh)
        if self._stuck_since is None:
            self._stuck_since = self._loop.time()
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def stay(self) -> None:
        """No other node can be master, or this one can write again: answer what was refused, and try the rest."""
        held, self._held = self._held, []
        for one in held:
            if one.error is not None:
                one.tell(one.error)
                continue
            try:
                self.publish(one.batches, one.acks, one.done, one.safe)
            except RailgunError as error:
                one.tell(error)

    def _no_master(self) -> NoMasterError:
        return NoMasterError(f"this node is not the master of {self.stream.name!r} now: try again")

    def when_safe(self, end: int, done: Done) -> None:
        """Call this when all before that offset is safe."""
        if end <= self.copy.safe:
            done(None)
        elif self.master is None:
            done(NoMasterError(f"this node is not the master of {self.stream.name!r}: try again"))
        else:  # it is on disk, so those who wait for more come later
            at = next((n for n, (e, _) in enumerate(self._waiting) if e >= end), None)
            self._waiting.insert(len(self._waiting) if at is None else at, (end, done))

    def hear_unwritable(self, why: dict[str, str], there: set[str]) -> None:
        """Tell those who wait for copies that cannot be written, if there is no quorum without these.

        `why`: by the replicas that cannot write, what their disks say; `there`: who has a session, and this node.
        """
        if self.master is None:
            return
        voting = self.master.sets[0]
        unable = [node for node in voting if node in why]
        able = sum(node in there and node not in why for node in voting)
        reasons = "; ".join(f"{self.around.called(node)}: {said(why[node])}" for node in unable)
        told = f"{able} of {len(voting)} replicas of {self.stream.name!r} can write. {reasons}"
        has_quorum = not unable or 2 * able > len(voting)
        now, since = self._loop.time(), self._stuck_since
        stuck = since is not None and now - since > STUCK_S
        if has_quorum:
            self._too_few = ""
        elif stuck:
            self._too_few = told
            self._tell_stuck(self._waiting, told)
            self.stream.refuse_waiting(NotEnoughReplicasError(f"{told}. Nothing was stored"))
        if (
            unable and now - self._patient_since > STUCK_S
        ):  # who waits for all, also if there is a quorum
            self._tell_stuck(self._patient, told)

    def _tell_stuck(
        self, waiting: deque[tuple[int, Done]] | list[tuple[int, Done]], why: str
    ) -> None:
        """Tell publishers that wait for copies: what they have published is here, and not safe."""
        told, error = (
            list(waiting),
            NotEnoughReplicasAfterAppendError(
                f"{why}. What was published is in the master's log, and on fewer disks than was asked for: it may stay "
                "or be lost. Publish it again with its ID"
            ),
        )
        waiting.clear()
        for _, done in told:
            _tell(done, error)

    def when_gone(self, first: int, done: Done) -> None:
        """Call this when a majority keeps nothing before that offset any more."""
        if self.master is None:
            done(DeposedError("this node is no master any more: it may come back, or not"))
            return
        self._trimming.append((first, done))
        self._answer_patient()

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
        note = CopyNote(self._label, self._groups, self._known_safe)
        self._noted_safe = self._known_safe
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
        if error is None:
            self._had = (epoch, number)
        else:
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
        if self._feeder is not None:
            blob = b"".join(pack_change(name, change) for name, change in changes)
            self._feeder.change_groups(number, blob)

    def _await_groups(self, number: int, done: Done) -> None:
        if self.master is not None and self.master.safe_groups >= number:
            done(None)
        else:
            self._awaited.append((number, done))

    def news(self) -> bytes | None:
        """Return the note for the group log, if more is safe than the last note says."""
        safe = min(self._known_safe, self.stream.log.durable_end)
        if self._doubtful or safe <= self._noted_safe:
            return None
        self._noted_safe = safe
        return CopyNote(self._label, self._groups, safe).pack()

    def trimmed(self, first: int) -> None:
        """What lies before is not kept any more."""
        if self.master is not None and first > self.copy.first:
            self.master.trimmed(first)
            self._tell_soon()
        elif self.master is None:
            self.copy.trim(first)

    def _tell_soon(self) -> None:
        if self._feeder is not None:
            self._feeder.tell_soon()

    def _flush(self) -> None:
        """What was stored in this turn: to all replicas."""
        self._flushing = False
        master, fresh = self.master, self._fresh
        self._fresh = []
        if master is None or not fresh:
            return
        commands: list[m.Command] = []
        units = [(one.base, one.end) for one in fresh if one.is_unit]
        for base, end, epoch in _joined(fresh):
            within = [unit for unit in units if base <= unit[0] < end]
            commands += master.appended(base, epoch, end, within)
        if self._feeder is not None:
            self._feeder.feed_all(fresh)
        self._do(commands)

    # ------------------------------------------------------------ sessions, as a master

    def session(self, node: str, session: int, standing: Standing) -> None:
        """A replica has made its promise, or tells anew how it stands."""
        if self.master is not None and self._feeder is not None:
            self._feeder.end(node)
            self._do(self.master.stands(node, session, standing))
            self._feeder.begin(node)

    def session_over(self, node: str) -> None:
        """The connection to a replica is lost."""
        if self.master is not None and self._feeder is not None:
            self._feeder.end(node)
            self._do(self.master.gone(node))

    # ------------------------------------------------------------ what others say

    def received(self, sender: str, command: Any, blob: Blob) -> None:
        """A message of another copy."""
        if self.closed:
            return
        try:
            self._hear(sender, command, blob)
        except (ProtocolError, BatchError) as error:
            _LOG.error(
                "stream %r: node %s says what cannot be: %s", self.stream.name, sender, error
            )

    def _hear(self, sender: str, command: Any, blob: Blob) -> None:
        master, replica = self.master, self.replica
        match command:
            case n.Push() if replica is not None and not self._failing:
                batches, runs, whole = _came(blob)
                # What others have already, it gets because it lags behind.
                cold = bool(runs) and runs[-1][1] <= command.safe
                told = replica.pushed(words.push_heard(command, runs))
                self._do(told, batches, cold=cold, whole=whole)
            case n.PushGroups() if replica is not None and not self._failing:
                push = words.push_groups_heard(command)
                self._do(replica.pushed_groups(push), records=unpack_records(bytes(blob)))
            case n.Has() if master is not None:
                self._do(master.has(sender, words.has_heard(command)))
                if self._feeder is not None:
                    self._feeder.confirmed(sender, command.end)
            case n.HasGroups() if master is not None:
                self._do(master.has_groups(sender, words.has_groups_heard(command)))
            case n.Fetch() if replica is not None and command.session == replica.session:
                self.around.spawn(self._give(sender, replica, command))
            case n.FetchGroups() if replica is not None and command.session == replica.session:
                self.around.spawn(self._give_groups(sender, replica, command))
            case n.Fetched() if master is not None:
                batches, runs, whole = _came(blob)
                fetched = m.Fetched(command.session, command.base, runs)
                self._do(master.fetched(sender, fetched), batches=batches, whole=whole)
            case n.FetchedGroups() if master is not None:
                told_groups = m.FetchedGroups(
                    command.session, LOST if command.trouble else command.epoch, command.number
                )
                records = unpack_records(bytes(blob))
                self._do(master.fetched_groups(sender, told_groups), records=records)

    async def _give(self, to: str, replica: Replica, asked: n.Fetch) -> None:
        """A new master asks for what it lacks."""
        told = n.Fetched(stream=self.id, session=asked.session, base=asked.begin)
        batches: Sequence[Bytes] = []
        read = self.stream.log.read
        try:
            found = await self._loop.run_in_executor(None, read, asked.begin, FRAME)
            batches = begun_at(asked.begin, found)
            told.end = head(batches[-1]).end if batches else asked.begin
        except RailgunError as error:
            self._look_for_trouble(error)
            told.trouble = str(error)
        if self.replica is replica:  # else it may be what another master has written
            self.around.send(to, told, batches)

    async def _give_groups(self, to: str, replica: Replica, asked: n.FetchGroups) -> None:
        told = n.FetchedGroups(stream=self.id, session=asked.session)
        blob = b""
        try:
            states = await self.stream.perform(self.stream.group_log, self.stream.group_log.load)
            note = states.pop("", CopyNote())
            assert isinstance(note, CopyNote)
            told.epoch, told.number = note.groups
            blob = packed(states)
        except RailgunError as error:
            told.trouble = str(error)
        if self.replica is replica:
            self.around.send(to, told, [blob])

    # ------------------------------------------------------------ what is to be done

    def _do(
        self,
        commands: Iterable[m.Command],
        batches: Sequence[Bytes] = (),
        records: Sequence[tuple[str, bytes | None]] = (),
        cold: bool = False,
        whole: int = 0,
    ) -> None:
        """Do what a machine says, with what came for it: batches (the last unit in them ends at `whole`), records."""
        log = self.stream.log
        for command in commands:
            match command:
                case m.Say(to, message):
                    self.around.send(to, words.said(self.id, message))
                case m.Write(_, runs):
                    wrote = partial(self._wrote, runs[-1][1], whole)
                    self._committer.submit(log, batches, wrote, cold=cold)
                case m.Cut(offset):
                    _LOG.warning("stream %r: cut off at %d", self.stream.name, offset)
                    self._change(partial(log.cut, offset), then=self._has_cut)
                case m.CutHalf():
                    self._change(lambda: log.cut(log.whole_end), then=self._has_cut_half)
                case m.Anew(base):
                    self._change(partial(log.reset, base), base)
                case m.Trim(first):
                    self._change(partial(_purge, log, first))
                case m.Label(epoch, groups):
                    self._give_label(epoch, groups)
                case m.WriteGroups(epoch, number, whole):
                    self._write_groups(epoch, number, whole, records)
                case m.Serve():
                    self._serve()
                case m.Safe():
                    self._is_safe()
                case m.SafeGroups(number):
                    while self._awaited and self._awaited[0][0] <= number:
                        _tell(self._awaited.popleft()[1])
        self._look_if_active()

    def _give_label(self, epoch: int, groups: bool) -> None:
        """Write the label, behind what is being changed in the log: that has a line of its own."""
        machine = self.master or self.replica

        def give(_: RailgunError | None = None) -> None:
            if machine is None or machine not in (self.master, self.replica) or self._unchanged:
                return
            self._label = epoch
            if groups:
                self._groups = (epoch, 0)
            self._submit_groups([], partial(self._labelled, epoch, groups))

        if self._changes:
            self._committer.perform(self.stream.log, lambda: None, give)
        else:
            give()

    def _change(
        self,
        work: Callable[[], object],
        safe: int = 0,
        then: Callable[[Master | Replica, int, int], list[m.Command]] | None = None,
    ) -> None:
        """Change the log; then all before `safe` was safe. `then`: is told where the log, and its whole units, end."""
        machine, ends = self.master or self.replica, [0, 0]

        def change() -> None:
            work()
            ends[:] = self.stream.log.end, self.stream.log.whole_end

        def changed(error: RailgunError | None) -> None:
            self._changed(safe, error)
            still = machine is not None and machine in (self.master, self.replica)
            if error is None and then is not None and still and not self._failing:
                assert machine is not None
                self._do(then(machine, *ends))

        self._changes += 1
        self._committer.perform(self.stream.log, change, changed)

    def _changed(self, safe: int, error: RailgunError | None) -> None:
        self._changes -= 1
        if error is not None:
            self._unchanged = True
            _LOG.error("stream %r: %s", self.stream.name, error)
            self._fail(error)
        else:
            self._unwritten = ""
            self._known_safe = max(self._known_safe, safe)
            self.stream.gone_before()

    @staticmethod
    def _has_cut(machine: Master | Replica, end: int, whole: int) -> list[m.Command]:
        return machine.has_cut(whole)

    @staticmethod
    def _has_cut_half(machine: Master | Replica, end: int, whole: int) -> list[m.Command]:
        return machine.cut_half(end) if isinstance(machine, Master) else []

    def _wrote(self, end: int, whole: int, error: RailgunError | None) -> None:
        self._on_disk(error, lambda machine: machine.wrote(end, whole))

    def _on_disk(
        self, error: RailgunError | None, told: Callable[[Master | Replica], list[m.Command]]
    ) -> None:
        """What a machine has asked for is on disk, and it is told so; or it is not."""
        if error is not None:
            self._fail(error)
            return
        self._unwritten = ""
        if self.master is not None:
            self._do(told(self.master))
        elif self.replica is not None and not self._failing:
            self._do(told(self.replica))

    def _write_groups(
        self, epoch: int, number: int, whole: bool, records: Sequence[tuple[str, bytes | None]]
    ) -> None:
        self._groups = (epoch, number)
        done = partial(self._wrote_groups, epoch, number)
        if not whole:
            self._submit_groups(records, done)
            return
        states: dict[str, Kept] = {name: fold.load(s) for name, s in records if s}
        states[""] = CopyNote(self._label, self._groups, self._known_safe)
        group_log = self.stream.group_log
        self._committer.perform(group_log, partial(group_log.replace, states), done)

    def _wrote_groups(self, epoch: int, number: int, error: RailgunError | None) -> None:
        self._noted((epoch, number), error)
        self._on_disk(error, lambda machine: machine.wrote_groups(epoch, number))

    def _noted(self, groups: tuple[int, int], error: RailgunError | None) -> None:
        """The note is on disk, with groups up to there; or it is not."""
        self._doubtful = self._doubtful or error is not None
        if not self._doubtful:
            self._had = groups

    def _labelled(self, epoch: int, groups: bool, error: RailgunError | None) -> None:
        if groups and error is None:  # a master's: all that it has is of this number
            self._doubtful = False
        self._noted((epoch, 0) if groups else self._had, error)
        self._on_disk(error, lambda machine: machine.labelled(epoch))

    def _serve(self) -> None:
        assert self.master is not None
        for node in list(self.master.peers):
            if self._feeder is not None:
                self._feeder.serve(node)

    def _is_safe(self) -> None:
        safe = self._known_safe = self.copy.safe
        self._too_few = ""
        self._stuck_since = self._loop.time() if safe < self.copy.durable else None
        while self._accepting and self._accepting[0][0] <= safe:
            _tell(self._accepting.popleft()[1])
        while self._waiting and self._waiting[0][0] <= safe:
            _tell(self._waiting.popleft()[1])
        self.stream.more()
        if self.master is not None:
            self._tell_soon()

    def _answer_patient(self) -> None:
        """Those who wait for all replicas, or for a majority to let go of something."""
        if self.master is None or not (self._patient or self._trimming):
            return
        kept = self.master.kept_from()
        gone = [done for first, done in self._trimming if kept is not None and kept >= first]
        self._trimming = [one for one in self._trimming if one[1] not in gone]
        for done in gone:
            _tell(done)
        still = []
        for end, done in self._patient:
            if end <= self.copy.safe and self.master.all_have(end):
                _tell(done)
            else:
                still.append((end, done))
        self._patient = still

    def _look_if_active(self) -> None:
        """The first time that the epoch is active, the groups are served."""
        self._answer_patient()  # it may be that nobody is left who would have to tell
        if self.master is None or self._ready or self._readying or not self.master.active:
            return
        self._readying = True
        self.around.spawn(self._get_ready())

    async def _get_ready(self) -> None:
        try:
            await self.stream.lead()
        except RailgunError as error:
            self._look_for_trouble(error)
            self._loop.call_later(RETRY, self._look_if_active)
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
            self._trouble = str(error)
            self.around.changed()

    def _fail(self, error: RailgunError) -> None:
        """Something could not be written."""
        self._look_for_trouble(error)
        if self.master is not None and not self._trouble:
            self._trouble = trouble_in(error)  # another one can, perhaps
            self.around.changed()
            self.around.spawn(self._mend(self.master))
        if self.master is not None:
            self.around.give_way()
        if self.replica is not None:
            self._unwritten = trouble_in(error)
        if self._failing or self.replica is None:
            return
        self._failing = True
        self.around.spawn(self._recover(self.replica))

    async def _mend(self, master: Master) -> None:
        """When it can be written again, and nobody else is master by then, it asks for another epoch."""
        while self.master is master and not self.closed:
            await asyncio.sleep(RETRY)
            try:
                await self._write_note()
            except RailgunError:
                continue
            if self.master is master:
                self._trouble, self.broken = str(self.stream.log.failed or ""), True
            return

    async def get_well(self) -> None:
        """It could not begin as a master. When it can, it asks for another epoch, unless another node is master."""
        while self.master is None and self.replica is None and not self.closed:
            await asyncio.sleep(RETRY)
            try:
                await self._look_anew()
            except RailgunError as error:
                self._trouble = str(error)
                continue
            self.broken = True
            self.around.changed()
            return

    async def _recover(self, replica: Replica) -> None:
        """When all that was under way has come to its end, tell how the copy stands; the master begins there."""
        while self.replica is replica and not self.closed:
            await asyncio.sleep(RETRY)
            try:
                await self._come_to_rest()
                await self._look_at_note(replica)
            except RailgunError as error:
                self._look_for_trouble(error)
                continue
            if self.replica is replica and not self.closed:
                self._look_at_log()
                replica.copy = self.copy
                self._failing = False
                self._do(replica.lost() if self._label == LOST else replica.failed())
                return

    async def _look_at_note(self, replica: Replica | None) -> None:
        """What is on disk of label and groups, if it is this replica still.

        A change may be there though one before it is not: it counts for nothing.
        """
        states = await self.stream.perform(self.stream.group_log, self.stream.group_log.load)
        note = states.get("", CopyNote())
        assert isinstance(note, CopyNote)
        if self.replica is not replica:
            return
        self._label = LOST if self._label == LOST else note.label
        self._groups = min(note.groups, self._had)
        if note != CopyNote(self._label, self._groups, note.safe):
            await self._write_note()
        self._doubtful = False

    async def _repair(self) -> None:
        """Set aside what is damaged. The copy has lost what it had, and says so from now on."""
        log = self.stream.log
        _LOG.error("stream %r: %s", self.stream.name, log.damage)
        self._label = LOST
        await self._write_note()
        await self.stream.perform(log, log.repair)
        if log.failed is None:
            self._trouble = ""

    async def _write_note(self) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._submit_groups([], partial(resolve, done))
        await done


def _tell(done: Done, error: RailgunError | None = None) -> None:
    """Somebody has waited; what they make of it is not the others' business."""
    try:
        done(error)
    except Exception:
        _LOG.exception("what was to be done when something was safe has failed")


def _purge(log: Any, first: int) -> None:
    log.purge(min(first, log.durable_end))


def _came(blob: Blob) -> tuple[list[memoryview], Runs, int]:
    """Return the batches that another node has sent, their epochs, and where the last unit in them ends (0: none).

    It has checked them: they have to be what they were.
    """
    batches: list[memoryview] = []
    runs: list[tuple[int, int]] = []
    whole = 0
    for found, batch in intact(blob):
        extend(runs, found.epoch, found.end)
        batches.append(batch)
        if not found.flags & CONTINUES:
            whole = found.end
    return batches, tuple(runs), whole


def _joined(
    fresh: Iterable[Fresh],
) -> Iterable[tuple[int, int, int]]:
    """Base, end and epoch of what was stored, as few as may be."""
    begun: tuple[int, int, int] | None = None
    for base, end, epoch, *_ in fresh:
        if begun is not None and begun[1] == base and begun[2] == epoch:
            begun = (begun[0], end, epoch)
            continue
        if begun is not None:
            yield begun
        begun = (base, end, epoch)
    if begun is not None:
        yield begun
