"""Drive one stream's copy on this node by the rules of `broker.protocol.replication`.

Rules:

1. What is published is appended and synced here, then pushed to the replicas: everything of one turn of the event loop
   in one frame. It is answered when it is as safe as its publisher wants.
2. Replicas are fed by `feeding`. Data that other nodes have already is not kept in a lagging replica's page cache: it
   is much, and old.
3. All changes of files are queued at their one writer (`Committer`), in the order in which they were decided.
4. A damaged copy sets aside what is bad, and forgets its label; as a replica it gets what it lacks. So does a copy that
   is shorter than what it knew to be safe: a log that was cut off looks as if the power had failed. A log that accepts
   nothing more (a failed sync) cannot be a master's, and is reported (`trouble`).
5. The groups are served when the epoch is active, from the states on disk. Changes of groups are numbered; a replica
   gets all states first, and then each change.
6. When this node is no longer master, waiting callers are told that the outcome is unknown (`DEPOSED`).
7. A replica that cannot write reports that to the leader, which tells the master (`hear_unwritable`). If there is no
   quorum without such replicas, and nothing has become safe for `STUCK_S`, waiting publishers get an error with the
   reason (`NotEnoughReplicasAfterAppendError`), and publishes are refused (`NotEnoughReplicasError`) until there is a
   quorum again. The IDs of what the master has stored stay taken: it may become safe yet.
8. A master whose disk refuses a publish gives way (`CopyHost.give_way`), and answers when the outcome is known. If
   another node becomes master, nothing was stored (`NO_MASTER`), and the client sends it again, to that node; if no
   other node can be master, the publisher gets the disk's error. Publishes behind a held publish are held, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from railgun.broker.cluster import replica_messages as wire
from railgun.broker.cluster.feeding import (
    PUSH_BYTES,
    RETRY_S,
    CopyHost,
    Feeder,
    StoredBatches,
    batches_from,
    pack_states,
)
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
from railgun.broker.log.segment import extend_runs
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
"""Seconds without progress after which waiting publishers are told that too few replicas can write."""
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """A publish that waits until it is known whether its master stays."""

    batches: Sequence[bytearray]
    acks: Acks
    done: Done
    safe: Done | None
    error: RailgunError | None = None
    """The error of the disk; None: the disk was not asked."""

    @property
    def in_doubt(self) -> bool:
        """Whether the publish may be on disk although the disk has returned an error."""
        return isinstance(self.error, LogFailedError | DamagedLogError)

    @property
    def may_be_taken_elsewhere(self) -> bool:
        """Whether another node may be able to store the publish: this node's disk refuses it."""
        return self.in_doubt or is_refusal(self.error)

    def tell(self, error: RailgunError) -> None:
        """Tell the publisher that the publish was not stored as requested."""
        for callback in (self.safe, self.done):
            if callback is not None:
                _call_back(callback, error)


class Replicated:
    """The copy of a stream on this node. Create it within an event loop, when nothing is under way."""

    def __init__(self, stream: Persistent, committer: Committer, host: CopyHost) -> None:
        self.stream, self.host = stream, host
        self.id = stream.id
        self._trouble = ""  # why it cannot be a master, besides trouble with its files
        self._ends: dict[str, int] = {}  # the last known end of each replica
        self._committer = committer
        self._loop = stream.loop
        note = stream.note
        self._label, self._groups = note.label, note.groups  # as of the end of the writer's queue
        self._durable_groups = note.groups  # on disk, without a gap
        self._doubtful = False  # whether a write has failed, so that the state on disk is unknown
        self.copy = Copy()
        self.replica: Replica | None = None
        self.master: Master | None = None
        self._known_safe = note.safe  # on disk, as far as the log goes
        self._noted_safe = note.safe  # in the group log
        self.broken = False
        """Whether a write of the master has failed, so that it needs another epoch to begin anew."""
        self._ready = False
        self._readying = False
        self._feeder: Feeder | None = None  # while it is master
        self._fresh: list[StoredBatches] = []
        self._flushing = False
        # Publishers that wait for a quorum, by end offset.
        self._waiting: deque[tuple[int, Done]] = deque()
        self._accepting: deque[tuple[int, Done]] = deque()  # their IDs, until a quorum has them
        # Since when nothing has become safe although more is stored.
        self._stuck_since: float | None = None
        self._too_few = ""  # why too few replicas can write, while publishes are refused for it
        self._unwritten = ""  # the last error of a replica's write
        self._held: list[_Held] = []  # publishes that the disk has refused, and those behind them
        self._waiting_for_all: list[tuple[int, Done]] = []  # publishers that wait for all replicas
        self._waiting_for_all_since = 0.0
        self._trimming: list[tuple[int, Done]] = []  # until other replicas have trimmed, too
        self._number = 0  # of the last change of groups submitted to the writer
        self._awaited: deque[tuple[int, Done]] = deque()
        self._failing = False
        self._changes = 0  # changes of the log that are submitted and not done
        self._change_failed = False  # whether one of them has failed
        self.closed = False
        stream.copies = self

    @property
    def trouble(self) -> str:
        """Why it cannot be a master: something could not be written or read; empty: it can."""
        return self._trouble or str(self.stream.trouble or "") or self._unwritten

    @trouble.setter
    def trouble(self, why: str) -> None:
        self._trouble = why

    @property
    def trouble_error(self) -> RailgunError:
        """The trouble as an error that says that nothing was stored."""
        trouble = self.stream.trouble or StorageError(self.trouble)
        if isinstance(trouble, StorageError) and is_refusal(trouble):
            return refusal(trouble)
        return trouble

    async def open(self) -> None:
        """Compare the files with the note, and repair what is damaged."""
        end, known_safe = self.stream.log.end, self._known_safe
        if self.stream.groups_damaged or end < known_safe:
            _LOG.error(
                "stream %r: it ends at offset %d, though it was safe up to %d",
                self.stream.name,
                end,
                known_safe,
            )
            self._label = LOST
        if self.stream.log.damage is not None:
            await self._repair()
        elif self._label == LOST:
            await self._write_note()
        self._reset_from_log()

    def _reset_from_log(self) -> None:
        """Make the copy's state that of the log. Nothing may be under way."""
        self._trouble = str(self.stream.log.failed or "")
        self._change_failed = False
        self.copy = Copy.of(self._standing(), self._known_safe, self.stream.log.whole_end)

    def _standing(self) -> Standing:
        log = self.stream.log
        return Standing(self._label, log.first, log.end, tuple(log.runs), self._groups)

    async def settle(self) -> None:
        """Wait until everything submitted to the writer is done."""
        for log in (self.stream.log, self.stream.group_log):
            await self.stream.perform(log, lambda: None)

    # ------------------------------------------------------------ state

    @property
    def safe(self) -> int:
        """Messages below this offset may be delivered."""
        return self.copy.safe

    @property
    def leads(self) -> bool:
        """Whether it is a master's copy that serves the stream."""
        return self._ready and self.master is not None

    @property
    def acting(self) -> bool:
        """Whether it serves the stream now: it leads and has a lease."""
        return self.leads and self.host.may_act()

    @property
    def active(self) -> bool:
        """Whether a majority has the label of the epoch."""
        return self.master is not None and self.master.active

    @property
    def unsettled(self) -> int:
        """The number of callers without an answer, plus this master's messages that are not safe; 0: settled."""
        unsafe = max(self.copy.durable - self.copy.safe, 0) if self.master is not None else 0
        return unsafe + len(self._waiting) + len(self._waiting_for_all) + len(self._awaited)

    @property
    def lost(self) -> bool:
        """Whether it has lost data that it had, and has not got it back."""
        return bool(self._label == LOST)

    def lag(self, node: str) -> int:
        """Return how many of the master's messages a replica lacks, safe or not.

        For a silent replica the last report counts; a replica without any report may lack everything.
        """
        peer = self.master.peers.get(node) if self.master is not None else None
        if peer is not None:
            self._ends[node] = peer.end
        return max(0, self.copy.durable - max(self._ends.get(node, 0), self.copy.first))

    async def fenced(self, master: str, epoch: int, session: int) -> Standing:
        """Follow a master in an epoch. Return the standing of this copy."""
        if self.master is not None:
            self.step_down()
        self.replica = None  # messages of the master it followed are ignored from now on
        await self._settle_and_reset()
        self._failing = False
        self.replica = Replica(self.copy)
        return self.replica.fenced(master, epoch, session)

    async def begin(self, epoch: int, sets: Sequence[Sequence[str]], fresh: bool) -> None:
        """Be the master of an epoch."""
        self.replica = None
        await self._settle_and_reset()
        self._lead(epoch, sets, go_on=fresh)

    async def _settle_and_reset(self) -> None:
        """Wait until nothing is under way, and make the copy's state that of the files."""
        await self._settle_and_repair()
        if self._doubtful:
            await self._read_note(None)
        self._reset_from_log()

    async def _settle_and_repair(self) -> None:
        """Wait until nothing is under way, and repair what is damaged."""
        await self.settle()
        if self.stream.log.damage is not None:
            await self._repair()

    @property
    def can_go_on(self) -> bool:
        """Whether its log is authoritative, so that no replica has to be asked for the next epoch."""
        master = self.master
        return master is not None and master.phase in (Phase.LEAD, Phase.LABEL) and not self.broken

    def go_on(self, epoch: int, sets: Sequence[Sequence[str]]) -> None:
        """Be the master of the next epoch, too."""
        self._flush()  # what is on disk belongs to the old epoch
        self._lead(epoch, sets, go_on=True)

    def _lead(self, epoch: int, sets: Sequence[Sequence[str]], go_on: bool) -> None:
        self.replica, self.broken = None, False
        self._number = 0
        self._awaited = deque((0, done) for _, done in self._awaited)
        if self._feeder is not None:
            self._feeder.close()
        self.master = Master(self.host.me, self.copy, epoch, sets)
        self._feeder = Feeder(self.master, self.stream, self.host, self._note_trouble)
        self._do(self.master.go_on() if go_on else self.master.begin())

    def step_down(self) -> None:
        """Stop being the master, and fail everything that waits."""
        if self.master is None:
            return
        error = DeposedError(
            f"this node is no longer the master of {self.stream.name!r}: what was being written may be stored or not"
        )
        self.master, self._ready, self._readying = None, False, False
        self._fresh = []
        if self._feeder is not None:
            self._feeder.close()
            self._feeder = None
        queues = [
            self._accepting,
            self._waiting,
            self._waiting_for_all,
            self._trimming,
            self._awaited,
        ]
        waiting = [done for queue in queues for _, done in queue]
        held, self._held = self._held, []
        for held_publish in held:
            held_publish.tell(error if held_publish.in_doubt else self._no_master())
        self._waiting.clear()
        self._accepting.clear()
        self._stuck_since, self._too_few = None, ""
        self._waiting_for_all, self._trimming = [], []
        self._awaited.clear()
        for done in waiting:
            _call_back(done, error)
        self.stream.follow(error)
        self.host.changed()

    def close(self) -> None:
        """Close the copy: the stream is deleted, or the node is about to end."""
        self.closed = True
        self.step_down()
        self.replica = None

    # ------------------------------------------------------------ called by the stream

    def publish(
        self, batches: Sequence[bytearray], acks: Acks, done: Done, safe: Done | None = None
    ) -> None:
        """Store batches; `done` is called when they are as safe as `acks` asks for, `safe` when a quorum has them."""
        if not self.acting or self.master is None:
            raise self._no_master()
        if self._held:
            self._held.append(_Held(batches, acks, done, safe))
            return
        if self._too_few and acks is not Acks.MASTER and acks is not Acks.NONE:
            raise NotEnoughReplicasError(f"{self._too_few}. Nothing was stored: try again")
        stamp = Stamp(self.master.epoch, self.stream.stored_now())
        on_appended = partial(self._append_done, batches, acks, done, safe)
        self._committer.submit(self.stream.log, batches, on_appended, stamp)

    def _append_done(
        self,
        batches: Sequence[bytearray],
        acks: Acks,
        done: Done,
        safe: Done | None,
        error: RailgunError | None,
    ) -> None:
        if error is not None:
            self._note_trouble(error)
            self.host.changed()
        elif self.master is None:
            error = DeposedError(
                "this node is no longer the master: the publish may be stored or not"
            )
        if error is not None:
            held = _Held(batches, acks, done, safe, error)
            if held.may_be_taken_elsewhere and self.master is not None and self.host.give_way():
                self._held.append(held)
            else:
                held.tell(error)
            return
        first, last = head(batches[0]), head(batches[-1])
        is_unit = bool(first.flags & CONTINUES)
        self._stored_more(StoredBatches(first.base, last.end, first.epoch, batches, is_unit))
        if safe is not None:
            self._accepting.append((last.end, safe))
        if acks in (Acks.MASTER, Acks.NONE):
            done(None)
        elif acks is Acks.ALL:
            if not self._waiting_for_all:
                self._waiting_for_all_since = self._loop.time()
            self._waiting_for_all.append((last.end, done))
        else:
            self._waiting.append((last.end, done))

    async def write_unit(self, write: Callable[[Stamp], tuple[int, int]]) -> tuple[int, int]:
        """Let a function append a unit to the log, in its turn at the log's one writer, and push the unit to the
        replicas."""
        master = self.master
        if not self.acting or master is None or self._held:
            raise self._no_master()
        stamp = Stamp(master.epoch, self.stream.stored_now())

        def stored(where: tuple[int, int]) -> None:
            if self.master is not None:
                self._stored_more(StoredBatches(*where, stamp.epoch, (), is_unit=True))

        try:
            base, end = await self.stream.perform(self.stream.log, lambda: write(stamp), stored)
        except RailgunError as error:
            self._note_trouble(error)
            self.host.changed()
            if is_refusal(error) and self.master is not None:
                self.host.give_way()
            raise
        if self.master is None:
            raise DeposedError("this node is no longer the master: the unit may be stored or not")
        return base, end

    def _stored_more(self, fresh: StoredBatches) -> None:
        """Note what is on disk here, and push it to the replicas with everything else of this turn."""
        self._fresh.append(fresh)
        if self._stuck_since is None:
            self._stuck_since = self._loop.time()
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def stay(self) -> None:
        """Go on as the master, as no other node can be, or this node can write again: fail refused publishes, retry
        the rest."""
        held, self._held = self._held, []
        for held_publish in held:
            if held_publish.error is not None:
                held_publish.tell(held_publish.error)
                continue
            try:
                self.publish(
                    held_publish.batches, held_publish.acks, held_publish.done, held_publish.safe
                )
            except RailgunError as error:
                held_publish.tell(error)

    def _no_master(self) -> NoMasterError:
        return NoMasterError(f"this node is not the master of {self.stream.name!r} now: try again")

    def when_safe(self, end: int, done: Done) -> None:
        """Call `done` when everything before offset `end` is safe."""
        if end <= self.copy.safe:
            done(None)
        elif self.master is None:
            done(NoMasterError(f"this node is not the master of {self.stream.name!r}: try again"))
        else:  # it is on disk, so later publishes wait for higher offsets
            at = next((n for n, (e, _) in enumerate(self._waiting) if e >= end), None)
            self._waiting.insert(len(self._waiting) if at is None else at, (end, done))

    def hear_unwritable(self, reasons_by_node: dict[str, str], connected: set[str]) -> None:
        """Fail publishers that wait for copies that cannot be written, if there is no quorum without these copies.

        `reasons_by_node`: the errors of the disks; `connected`: this node, and the replicas that have a session.
        """
        if self.master is None:
            return
        voting = self.master.sets[0]
        unable = [node for node in voting if node in reasons_by_node]
        able = sum(node in connected and node not in reasons_by_node for node in voting)
        reasons = "; ".join(
            f"{self.host.name_of(node)}: {said(reasons_by_node[node])}" for node in unable
        )
        error_text = (
            f"{able} of {len(voting)} replicas of {self.stream.name!r} can write. {reasons}"
        )
        has_quorum = not unable or 2 * able > len(voting)
        now, stuck_since = self._loop.time(), self._stuck_since
        stuck = stuck_since is not None and now - stuck_since > STUCK_S
        if has_quorum:
            self._too_few = ""
        elif stuck:
            self._too_few = error_text
            self._fail_stuck(self._waiting, error_text)
            self.stream.refuse_waiting(NotEnoughReplicasError(f"{error_text}. Nothing was stored"))
        if unable and now - self._waiting_for_all_since > STUCK_S:  # also with a quorum
            self._fail_stuck(self._waiting_for_all, error_text)

    def _fail_stuck(
        self, waiting: deque[tuple[int, Done]] | list[tuple[int, Done]], why: str
    ) -> None:
        """Fail publishers that wait for copies: what they have published is stored here, but not safe."""
        callbacks, error = (
            list(waiting),
            NotEnoughReplicasAfterAppendError(
                f"{why}. What was published is in the master's log, and on fewer disks than was asked for: it may stay "
                "or be lost. Publish it again with its ID"
            ),
        )
        waiting.clear()
        for _, done in callbacks:
            _call_back(done, error)

    def when_gone(self, first: int, done: Done) -> None:
        """Call `done` when a majority no longer keeps anything before offset `first`."""
        if self.master is None:
            done(
                DeposedError(
                    "this node is no longer the master: what was deleted may come back or not"
                )
            )
            return
        self._trimming.append((first, done))
        self._answer_waiting()

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
        on_written = partial(self._groups_written, master.epoch, self._number, changes, done)
        self._submit_groups(changes, on_written)

    def _submit_groups(self, changes: Sequence[tuple[str, bytes | None]], done: Done) -> None:
        note = CopyNote(self._label, self._groups, self._known_safe)
        self._noted_safe = self._known_safe
        self._committer.submit(self.stream.group_log, [*changes, ("", note.pack())], done)

    def _groups_written(
        self,
        epoch: int,
        number: int,
        changes: Sequence[tuple[str, bytes | None]],
        done: Done,
        error: RailgunError | None,
    ) -> None:
        master = self.master
        if error is None:
            self._durable_groups = (epoch, number)
        else:
            self._note_trouble(error)
            for peer in master.peers.values() if master is not None else ():
                peer.sent = None  # changes are missing before the next: replicas need all states
            done(error)
            return
        if master is None:
            done(DeposedError("this node is no longer the master: the change may be stored or not"))
            return
        if master.epoch != epoch:  # the new epoch pushes all states, with this change
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
        """Return a new note for the group log, if more is safe than the last note says."""
        safe = min(self._known_safe, self.stream.log.durable_end)
        if self._doubtful or safe <= self._noted_safe:
            return None
        self._noted_safe = safe
        return CopyNote(self._label, self._groups, safe).pack()

    def trimmed(self, first: int) -> None:
        """Note that messages before `first` are no longer kept."""
        if self.master is not None and first > self.copy.first:
            self.master.trimmed(first)
            self._report_soon()
        elif self.master is None:
            self.copy.trim(first)

    def _report_soon(self) -> None:
        if self._feeder is not None:
            self._feeder.report_soon()

    def _flush(self) -> None:
        """Push everything stored in this turn to all replicas."""
        self._flushing = False
        master, fresh = self.master, self._fresh
        self._fresh = []
        if master is None or not fresh:
            return
        commands: list[m.Command] = []
        units = [(stored.base, stored.end) for stored in fresh if stored.is_unit]
        for base, end, epoch in _merge_runs(fresh):
            units_within = [unit for unit in units if base <= unit[0] < end]
            commands += master.appended(base, epoch, end, units_within)
        if self._feeder is not None:
            self._feeder.feed_all(fresh)
        self._do(commands)

    # ------------------------------------------------------------ sessions of a master

    def session(self, node: str, session: int, standing: Standing) -> None:
        """Begin a session with a replica that has made its promise, or has reported its standing anew."""
        if self.master is not None and self._feeder is not None:
            self._feeder.end(node)
            self._do(self.master.stands(node, session, standing))
            self._feeder.begin(node)

    def session_over(self, node: str) -> None:
        """End the session with a replica whose connection is lost."""
        if self.master is not None and self._feeder is not None:
            self._feeder.end(node)
            self._do(self.master.gone(node))

    # ------------------------------------------------------------ messages of other nodes

    def received(self, sender: str, command: Any, blob: Blob) -> None:
        """Handle a message of another copy. Invalid messages are logged and skipped."""
        if self.closed:
            return
        try:
            self._handle(sender, command, blob)
        except (ProtocolError, BatchError) as error:
            _LOG.error("stream %r: invalid message of node %s: %s", self.stream.name, sender, error)

    def _handle(self, sender: str, command: Any, blob: Blob) -> None:
        master, replica = self.master, self.replica
        match command:
            case n.Push() if replica is not None and not self._failing:
                batches, runs, whole = _decode_batches(blob)
                # Data that other nodes have already is sent because this replica lags.
                cold = bool(runs) and runs[-1][1] <= command.safe
                commands = replica.pushed(wire.decode_push(command, runs))
                self._do(commands, batches, cold=cold, whole=whole)
            case n.PushGroups() if replica is not None and not self._failing:
                push = wire.decode_push_groups(command)
                self._do(replica.pushed_groups(push), records=unpack_records(bytes(blob)))
            case n.Has() if master is not None:
                self._do(master.has(sender, wire.decode_has(command)))
                if self._feeder is not None:
                    self._feeder.confirmed(sender, command.end)
            case n.HasGroups() if master is not None:
                self._do(master.has_groups(sender, wire.decode_has_groups(command)))
            case n.Fetch() if replica is not None and command.session == replica.session:
                self.host.spawn(self._send_fetched(sender, replica, command))
            case n.FetchGroups() if replica is not None and command.session == replica.session:
                self.host.spawn(self._send_fetched_groups(sender, replica, command))
            case n.Fetched() if master is not None:
                batches, runs, whole = _decode_batches(blob)
                fetched = m.Fetched(command.session, command.base, runs)
                self._do(master.fetched(sender, fetched), batches=batches, whole=whole)
            case n.FetchedGroups() if master is not None:
                fetched_groups = m.FetchedGroups(
                    command.session, LOST if command.trouble else command.epoch, command.number
                )
                records = unpack_records(bytes(blob))
                self._do(master.fetched_groups(sender, fetched_groups), records=records)

    async def _send_fetched(self, to: str, replica: Replica, request: n.Fetch) -> None:
        """Send a new master the messages that it lacks."""
        reply = n.Fetched(stream=self.id, session=request.session, base=request.begin)
        batches: Sequence[Bytes] = []
        read = self.stream.log.read
        try:
            batches_read = await self._loop.run_in_executor(None, read, request.begin, PUSH_BYTES)
            batches = batches_from(request.begin, batches_read)
            reply.end = head(batches[-1]).end if batches else request.begin
        except RailgunError as error:
            self._note_trouble(error)
            reply.trouble = str(error)
        if self.replica is replica:  # otherwise another master may have written it
            self.host.send(to, reply, batches)

    async def _send_fetched_groups(self, to: str, replica: Replica, request: n.FetchGroups) -> None:
        reply = n.FetchedGroups(stream=self.id, session=request.session)
        blob = b""
        try:
            states = await self.stream.perform(self.stream.group_log, self.stream.group_log.load)
            note = states.pop("", CopyNote())
            assert isinstance(note, CopyNote)
            reply.epoch, reply.number = note.groups
            blob = pack_states(states)
        except RailgunError as error:
            reply.trouble = str(error)
        if self.replica is replica:
            self.host.send(to, reply, [blob])

    # ------------------------------------------------------------ commands of the machines

    def _do(
        self,
        commands: Iterable[m.Command],
        batches: Sequence[Bytes] = (),
        records: Sequence[tuple[str, bytes | None]] = (),
        cold: bool = False,
        whole: int = 0,
    ) -> None:
        """Carry out a machine's commands with the data that came for them: `batches`, whose last unit ends at
        `whole`, or `records`."""
        log = self.stream.log
        for command in commands:
            match command:
                case m.Say(to, message):
                    self.host.send(to, wire.encode(self.id, message))
                case m.Write(_, runs):
                    wrote = partial(self._write_done, runs[-1][1], whole)
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
                    self._write_label(epoch, groups)
                case m.WriteGroups(epoch, number, whole):
                    self._write_groups(epoch, number, whole, records)
                case m.Serve():
                    self._serve()
                case m.Safe():
                    self._safe_advanced()
                case m.SafeGroups(number):
                    while self._awaited and self._awaited[0][0] <= number:
                        _call_back(self._awaited.popleft()[1])
        self._check_active()

    def _write_label(self, epoch: int, groups: bool) -> None:
        """Write the label after all pending changes of the log, which has a queue of its own."""
        machine = self.master or self.replica

        def give(_: RailgunError | None = None) -> None:
            if machine is None or machine not in (self.master, self.replica) or self._change_failed:
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
        """Change the log, after which everything before `safe` was safe. `then` gets the ends of the log and of its
        units."""
        machine, ends = self.master or self.replica, [0, 0]

        def change() -> None:
            work()
            ends[:] = self.stream.log.end, self.stream.log.whole_end

        def changed(error: RailgunError | None) -> None:
            self._change_done(safe, error)
            is_current = machine is not None and machine in (self.master, self.replica)
            if error is None and then is not None and is_current and not self._failing:
                assert machine is not None
                self._do(then(machine, *ends))

        self._changes += 1
        self._committer.perform(self.stream.log, change, changed)

    def _change_done(self, safe: int, error: RailgunError | None) -> None:
        self._changes -= 1
        if error is not None:
            self._change_failed = True
            _LOG.error("stream %r: %s", self.stream.name, error)
            self._fail(error)
        else:
            self._unwritten = ""
            self._known_safe = max(self._known_safe, safe)
            self.stream.report_trimmed()

    @staticmethod
    def _has_cut(machine: Master | Replica, end: int, whole: int) -> list[m.Command]:
        return machine.has_cut(whole)

    @staticmethod
    def _has_cut_half(machine: Master | Replica, end: int, whole: int) -> list[m.Command]:
        return machine.cut_half(end) if isinstance(machine, Master) else []

    def _write_done(self, end: int, whole: int, error: RailgunError | None) -> None:
        self._report_to_machine(error, lambda machine: machine.wrote(end, whole))

    def _report_to_machine(
        self, error: RailgunError | None, report: Callable[[Master | Replica], list[m.Command]]
    ) -> None:
        """Report to the machine that its write is on disk, or handle the failed write."""
        if error is not None:
            self._fail(error)
            return
        self._unwritten = ""
        if self.master is not None:
            self._do(report(self.master))
        elif self.replica is not None and not self._failing:
            self._do(report(self.replica))

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
        self._note_written((epoch, number), error)
        self._report_to_machine(error, lambda machine: machine.wrote_groups(epoch, number))

    def _note_written(self, groups: tuple[int, int], error: RailgunError | None) -> None:
        """Note the groups of a note that was written, or that the state on disk is in doubt."""
        self._doubtful = self._doubtful or error is not None
        if not self._doubtful:
            self._durable_groups = groups

    def _labelled(self, epoch: int, groups: bool, error: RailgunError | None) -> None:
        if groups and error is None:  # as a master: all its groups have this number
            self._doubtful = False
        self._note_written((epoch, 0) if groups else self._durable_groups, error)
        self._report_to_machine(error, lambda machine: machine.labelled(epoch))

    def _serve(self) -> None:
        assert self.master is not None
        for node in list(self.master.peers):
            if self._feeder is not None:
                self._feeder.serve(node)

    def _safe_advanced(self) -> None:
        safe = self._known_safe = self.copy.safe
        self._too_few = ""
        self._stuck_since = self._loop.time() if safe < self.copy.durable else None
        while self._accepting and self._accepting[0][0] <= safe:
            _call_back(self._accepting.popleft()[1])
        while self._waiting and self._waiting[0][0] <= safe:
            _call_back(self._waiting.popleft()[1])
        self.stream.notify_groups()
        if self.master is not None:
            self._report_soon()

    def _answer_waiting(self) -> None:
        """Answer callers that wait for all replicas, or for a majority to trim."""
        if self.master is None or not (self._waiting_for_all or self._trimming):
            return
        kept = self.master.kept_from()
        answered = [done for first, done in self._trimming if kept is not None and kept >= first]
        self._trimming = [waiting for waiting in self._trimming if waiting[1] not in answered]
        for done in answered:
            _call_back(done)
        remaining = []
        for end, done in self._waiting_for_all:
            if end <= self.copy.safe and self.master.all_have(end):
                _call_back(done)
            else:
                remaining.append((end, done))
        self._waiting_for_all = remaining

    def _check_active(self) -> None:
        """Start serving the groups when the epoch becomes active."""
        self._answer_waiting()  # perhaps no replica is left to wait for
        if self.master is None or self._ready or self._readying or not self.master.active:
            return
        self._readying = True
        self.host.spawn(self._start_serving())

    async def _start_serving(self) -> None:
        try:
            await self.stream.lead()
        except RailgunError as error:
            self._note_trouble(error)
            self._loop.call_later(RETRY_S, self._check_active)
            return
        finally:
            self._readying = False
        if self.master is None or self.closed:
            self.stream.follow(DeposedError("this node is no longer the master"))
            return
        self._ready = True
        self.stream.notify_groups()
        self.stream.check_groups()
        self.host.changed()

    # ------------------------------------------------------------ errors

    def _note_trouble(self, error: RailgunError) -> None:
        if isinstance(error, LogFailedError | DamagedLogError):
            self._trouble = str(error)
            self.host.changed()

    def _fail(self, error: RailgunError) -> None:
        """Handle a failed write: give way as a master, recover as a replica."""
        self._note_trouble(error)
        if self.master is not None and not self._trouble:
            self._trouble = trouble_in(error)  # another node can be master, perhaps
            self.host.changed()
            self.host.spawn(self._retry_as_master(self.master))
        if self.master is not None:
            self.host.give_way()
        if self.replica is not None:
            self._unwritten = trouble_in(error)
        if self._failing or self.replica is None:
            return
        self._failing = True
        self.host.spawn(self._recover(self.replica))

    async def _retry_as_master(self, master: Master) -> None:
        """Ask for another epoch once this copy can be written again, if it is still the master's."""
        while self.master is master and not self.closed:
            await asyncio.sleep(RETRY_S)
            try:
                await self._write_note()
            except RailgunError:
                continue
            if self.master is master:
                self._trouble, self.broken = str(self.stream.log.failed or ""), True
            return

    async def retry_begin(self) -> None:
        """Ask for another epoch once a copy that could not begin as a master works, unless another node is master by
        then."""
        while self.master is None and self.replica is None and not self.closed:
            await asyncio.sleep(RETRY_S)
            try:
                await self._settle_and_reset()
            except RailgunError as error:
                self._trouble = str(error)
                continue
            self.broken = True
            self.host.changed()
            return

    async def _recover(self, replica: Replica) -> None:
        """Wait until nothing is under way, then report the standing of the copy; the master goes on from there."""
        while self.replica is replica and not self.closed:
            await asyncio.sleep(RETRY_S)
            try:
                await self._settle_and_repair()
                await self._read_note(replica)
            except RailgunError as error:
                self._note_trouble(error)
                continue
            if self.replica is replica and not self.closed:
                self._reset_from_log()
                replica.copy = self.copy
                self._failing = False
                self._do(replica.lost() if self._label == LOST else replica.failed())
                return

    async def _read_note(self, replica: Replica | None) -> None:
        """Read label and groups from disk, if this node still has the role `replica`.

        A change may be on disk although an earlier one is not: then it does not count.
        """
        states = await self.stream.perform(self.stream.group_log, self.stream.group_log.load)
        note = states.get("", CopyNote())
        assert isinstance(note, CopyNote)
        if self.replica is not replica:
            return
        self._label = LOST if self._label == LOST else note.label
        self._groups = min(note.groups, self._durable_groups)
        if note != CopyNote(self._label, self._groups, note.safe):
            await self._write_note()
        self._doubtful = False

    async def _repair(self) -> None:
        """Set aside what is damaged. The copy has lost data from now on, and reports that."""
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


def _call_back(done: Done, error: RailgunError | None = None) -> None:
    """Call `done`. An exception of the caller must not harm the others that wait."""
    try:
        done(error)
    except Exception:
        _LOG.exception("a callback of a waiting caller has failed")


def _purge(log: Any, first: int) -> None:
    log.purge(min(first, log.durable_end))


def _decode_batches(blob: Blob) -> tuple[list[memoryview], Runs, int]:
    """Return the batches of another node, their epochs, and where their last unit ends (0: none).

    The batches must be intact: the sender has checked them.
    """
    batches: list[memoryview] = []
    runs: list[tuple[int, int]] = []
    whole = 0
    for header, batch in intact(blob):
        extend_runs(runs, header.epoch, header.end)
        batches.append(batch)
        if not header.flags & CONTINUES:
            whole = header.end
    return batches, tuple(runs), whole


def _merge_runs(
    fresh: Iterable[StoredBatches],
) -> Iterable[tuple[int, int, int]]:
    """Merge adjacent stored ranges of one epoch. Yield base, end and epoch of each."""
    current: tuple[int, int, int] | None = None
    for base, end, epoch, *_ in fresh:
        if current is not None and current[1] == base and current[2] == epoch:
            current = (current[0], end, epoch)
            continue
        if current is not None:
            yield current
        current = (base, end, epoch)
    if current is not None:
        yield current
