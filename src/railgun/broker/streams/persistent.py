"""A persistent stream on one node: its log, the IDs it remembers, and its groups.

Rules:

1. A publish is acknowledged when it is on disk. Publishes are stored in the order in which they came, except those that
   wait for a twin: a message with the same ID as one that is being written waits for the result of that write. Later
   messages of the same publisher wait behind it; those of others do not.
2. A message whose ID is in the deduplication window is not stored again; the publisher gets the offset of the stored
   one. The other messages of the publish are stored, unless it was published *together*: then one ID stands for all.
3. Groups see messages that are on disk, and no others.
4. In a cluster, "on disk" means on the disks of a majority (`copies`): messages that are not safe there are not
   visible, and the master serves the groups. Other copies serve readers without a group.
5. Work that removes messages or groups takes its turn with the one writer of the log. A stream that is being deleted
   answers the publishes under way, tells its consumers, and takes no more requests.
6. A stream outside of a cluster notes how many messages are on disk, regularly and when it is closed. If it has fewer
   when it is opened than the note says, or than its groups have positions for, that is damage: their offsets are not
   used again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

from railgun.broker.clock import steady_us
from railgun.broker.errors import (
    BeyondEndError,
    DamagedLogError,
    NoGroupError,
    NoMasterError,
    TrimmedError,
    trouble_in,
)
from railgun.broker.log.committer import Committer, Log, Stamp
from railgun.broker.log.disk import Disk
from railgun.broker.log.group_log import DamagedGroupLogError, GroupLog
from railgun.broker.log.log import LogConfig, StreamLog
from railgun.broker.protocol.dedup import Duplicate, Fresh, IdBox, Lookback, PoolFull, Repeat, Twin
from railgun.broker.protocol.groups import Bury, GroupBusyError, GroupKindError, Joined
from railgun.broker.protocol.stored_time import StreamTime
from railgun.broker.settings import SECOND, TRACKED, StreamSettings
from railgun.broker.streams.copies import Acks, Copies, Done
from railgun.broker.streams.counts import Counts
from railgun.broker.streams.groups import Consumer, CopyNote, GroupDriver, Kept, fold, resolve
from railgun.broker.streams.producing import Producing
from railgun.errors import RailgunError
from railgun.transport.records import HAS_IDS, Bytes, Records, build, cut, head

TIME_AHEAD: Final = 60 * SECOND
"""A stored time that is further ahead of the time of day than this (µs) is reported."""
MAX_EPOCHS_READ: Final = 64
"""IDs are looked for in at most this many epochs at the end of the log."""
T = TypeVar("T")


class ConsumerTakenError(RailgunError):
    """Another subscription has the ID of this tracked consumer: the last one wins."""

    code: ClassVar[str] = "CONSUMER_TAKEN"


class DeadLetterError(RailgunError):
    """A dead letter cannot be written now: its message stays with the group, and is tried again."""

    code: ClassVar[str] = "NO_GRAVE"


@dataclass(frozen=True, slots=True)
class Stored:
    """The result of a publish."""

    base: int
    count: int
    refused: tuple[tuple[int, str, int], ...] = ()
    """Messages that were not stored: index in the publish, code, and offset of the message that has the ID."""


Answer = Callable[[Stored | RailgunError], None]


@dataclass(slots=True)
class _Publish:
    batches: list[bytearray]
    ids: list[bytes | None]
    ticket: int
    answer: Answer
    together: bool
    sender: object
    acks: Acks


class Persistent:
    """A persistent stream on one node."""

    def __init__(
        self,
        name: str,
        settings: StreamSettings,
        disk: Disk,
        directory: str,
        committer: Committer,
        loop: asyncio.AbstractEventLoop,
        now: Callable[[], int],
        dead_letters_of: Callable[[Persistent], Awaitable[Persistent]],
        staging_of: Callable[[Persistent], Awaitable[Persistent]] | None = None,
        log_config: LogConfig | None = None,
        in_cluster: bool = False,
        paced: Callable[[], int] | None = None,
        existed: bool = False,
    ) -> None:
        """Open the files of a stream. `existed`: they existed before, and belong to no cluster (rule 6)."""
        self.name = name
        self.settings = settings
        self.loop = loop
        self.now = now
        """Return the time of day (µs)."""
        self._paced = paced or now  # the time of day, held to a steady clock
        self._time = StreamTime()
        self.id = 0
        """In a cluster, the number of the entry that made the stream; 0 outside of a cluster."""
        self.made = ""
        """The identity that tells the stream from others of its name, outside of a cluster.

        "" for an old stream without one.
        """
        self.copies: Copies | None = None
        self._in_cluster = in_cluster
        self._committer = committer
        self._dead_letters_of = dead_letters_of
        self.log, self.recovery = StreamLog.open(disk, f"{directory}/log", log_config, existed)
        self.log.limit_bytes(settings.max_bytes)
        self.findings: list[str] = []
        """Messages for the log about the files, as they were found."""
        self.groups_damaged = False
        self.refused_at_end: list[str] = []
        """Writes that the disk refused when the stream was closed, and why: none of them was acknowledged."""
        if self.recovery.cut_bytes or self.recovery.damage:
            self.findings.append(str(self.recovery))
        if (ahead := self.stored_ahead) > TIME_AHEAD:
            self.findings.append(
                f"its last message is stored {ahead / SECOND:,.0f} s ahead of this machine's clock: if the clock is "
                "right, stop the node, and mend the stored times (railgun stream retime)"
            )
        self._epoch = self.log.last_epoch + 1  # since this start; a cluster agrees on epochs
        self.group_log, self._saved = self._open_groups(disk, f"{directory}/groups")
        self.groups: dict[str, GroupDriver] = {}
        self.counts = Counts()
        self._gone: RailgunError | None = None  # why the stream takes no more requests
        self._dead_letter_tasks: set[asyncio.Task[None]] = set()
        self._box: IdBox | None = None
        self._early: list[_Publish] | None = None  # publishes that came while the IDs are read
        self._loading: asyncio.Task[None] | None = None
        self._tickets = itertools.count(1)
        self._waiting: dict[int, _Publish] = {}
        self._behind: dict[object, deque[_Publish]] = {}  # behind a waiting publish, by sender
        self._notify_due = False
        self._anonymous = itertools.count(1)
        self.producing = Producing(self, staging_of or dead_letters_of)
        self.producing.take_notes(self._saved)
        self.note = self._saved.pop("", CopyNote())
        """The record that a copy in a cluster must not forget; the group log has it, too."""
        if existed:
            self._check_for_missing(disk.where(f"{directory}/groups/groups"))
        for group in [] if in_cluster else list(self._saved):
            self._driver(group, False, 0, 0)

    def _check_for_missing(self, where: str) -> None:
        """Note damage if messages are missing that the group log (at `where`) knows of."""
        positions = (max(saved.floor, saved.highest + 1) for saved in self._saved.values())
        missing = self.log.note_missing(
            max([int(self.note.safe), *positions]),
            f"its group log ({where})",
            "To go on without what is missing, stop the node and remove the group log: its groups begin anew then, "
            "and other messages get these offsets.",
        )
        if missing is not None:
            self.findings.append(str(missing))

    def _open_groups(self, disk: Disk, directory: str) -> tuple[GroupLog[Kept], dict[str, Any]]:
        try:
            return GroupLog.open(disk, directory, fold)
        except DamagedGroupLogError as damage:
            self.findings.append(f"{damage} The groups go on from there, and get messages again.")
            self.groups_damaged = True
            return GroupLog.anew(disk, directory, fold, damage.states)

    @property
    def end(self) -> int:
        """Return the offset after the last message that readers may see."""
        if self.copies is not None:
            return self.copies.safe
        # Until the node knows which stream of the cluster this is, the note says what is safe.
        if self._in_cluster:
            return max(self.log.first, min(int(self.note.safe), self.log.whole_end))
        return self.log.whole_end

    @property
    def damage(self) -> DamagedLogError | None:
        """Return the damage that makes messages unreadable, or None.

        Always None in a cluster, where other copies repair it.
        """
        damage = self.log.damage
        if damage is None or self._in_cluster or self.copies is not None:
            return None
        text = f"stream {self.name!r} cannot be read from offset {damage.offset} on, and takes no messages"
        return DamagedLogError(f"{text}: {damage}", damage.offset)

    @property
    def stored_ahead(self) -> int:
        """Return how far the stored time of the last message is ahead of the time of day (µs); 0 if it is not."""
        if self.log.end == self.log.first:
            return 0
        return max(0, self.log.last_time - self.now())

    def stored_now(self) -> int:
        """Return the time (µs) to store with the next message."""
        return self._time.at(self._paced(), self.log.last_time, steady_us())

    @property
    def acting(self) -> bool:
        """Return whether this node may serve the groups now."""
        return not self._in_cluster if self.copies is None else self.copies.acting

    # ------------------------------------------------------------ publishing

    def publish(
        self,
        batches: list[bytearray],
        answer: Answer,
        *,
        together: bool = False,
        sender: object = None,
        acks: Acks = Acks.QUORUM,
    ) -> None:
        """Store batches that were checked before; `answer` is called when they are as safe as `acks` says.

        `sender`: publishes of one sender stay in order (rule 1). Outside of a cluster, a message is safe when it is on
        the disk of the node, whatever `acks` is.
        """
        if not self.acting:  # the IDs on this node may be out of date
            self.loop.call_soon(answer, self._no_master())
            return
        ids: list[bytes | None] = []
        if any(head(batch).flags & HAS_IDS for batch in batches):
            ids = [id for batch in batches for id in Records(batch).ids()]
        elif not self._behind and self._early is None:
            self._commit(batches, acks, partial(self._stored, batches, answer, ()))
            return
        ticket = next(self._tickets)
        sender = ticket if sender is None else sender
        publish = _Publish(batches, ids, ticket, answer, together, sender, acks)
        if self._box is None and self._early is None:
            self._early = []
            self._loading = self.loop.create_task(self._load_ids(self._early))
        if self._early is not None:
            self._early.append(publish)
        else:
            self._enqueue(publish)

    def _enqueue(self, publish: _Publish) -> None:
        if publish.sender in self._behind:
            self._behind[publish.sender].append(publish)
        else:
            self._try(publish)

    def _commit(
        self, batches: list[bytearray], acks: Acks, done: Done, safe: Done | None = None
    ) -> None:
        """Store batches. `done` is called when they are as safe as `acks` says, `safe` in the order of the log."""
        try:
            if self._gone is not None:
                raise self._gone
            timed = self.counts.timed(done)
            if self.copies is not None:
                self.copies.publish(batches, acks, timed, safe)
            else:
                both = timed if safe is None else partial(_both, safe, timed)
                self._committer.submit(
                    self.log, batches, both, Stamp(self._epoch, self.stored_now())
                )
        except RailgunError as error:
            self.loop.call_soon(done if safe is None else partial(_both, safe, done), error)

    def _stored(
        self,
        batches: Sequence[Bytes],
        answer: Answer,
        refused: tuple[tuple[int, str, int], ...],
        error: RailgunError | None,
    ) -> None:
        if error is not None:
            answer(error)
            return
        base, end = head(batches[0]).base, head(batches[-1]).end
        self.counts.messages += end - base
        self.counts.bytes += sum(map(len, batches))
        self._answer_when_safe(answer, Stored(base, end - base, refused))
        if self.copies is None:
            self.notify_groups()

    def when_all_safe(self, done: Done) -> None:
        """Call `done` when all messages published up to now are safe."""

        def on_disk(error: RailgunError | None) -> None:
            if error is not None or self.copies is None:
                done(error)
            else:
                self.copies.when_safe(self.log.end, done)

        self._committer.perform(self.log, lambda: None, on_disk)

    async def write_unit(self, write: Callable[[Stamp], tuple[int, int]]) -> tuple[int, int]:
        """Run a function that appends a unit to the log, in the turn of its writer; return its begin and its end.

        The unit is on disk then, but in a cluster not safe yet.
        """
        self.check_master()
        if self._gone is not None:
            raise self._gone
        if self.copies is not None:
            base, end = await self.copies.write_unit(write)
        else:
            stamp = Stamp(self._epoch, self.stored_now())
            base, end = await self.perform(self.log, lambda: write(stamp))
            self.notify_groups()
        self.counts.messages += end - base
        return base, end

    def _answer_when_safe(self, answer: Answer, stored: Stored) -> None:
        """Answer a publish; if it repeats a message that is not safe yet, wait until that is."""
        twins = [offset for _, code, offset in stored.refused if code != PoolFull.code]
        if self.copies is None or not twins or max(twins) < self.copies.safe:
            answer(stored)
            return
        self.copies.when_safe(max(twins) + 1, lambda error: answer(error or stored))

    def notify_groups(self) -> None:
        """Tell the groups, in this turn of the event loop, that there may be new messages."""
        if not self._notify_due:
            self._notify_due = True
            self.loop.call_soon(self._appended)

    def _appended(self) -> None:
        self._notify_due = False
        end = self.end
        for driver in list(self.groups.values()):
            if end >= driver.group.end:  # a copy that is being repaired may end earlier for a while
                driver.appended(end)

    # ------------------------------------------------------------ IDs

    async def _load_ids(self, early: list[_Publish]) -> None:
        """Read the IDs from the end of the log, when the first message with an ID comes.

        Other streams go on meanwhile.
        """
        failure: RailgunError | None = None
        box: IdBox | None = None
        try:
            try:
                box = await self.loop.run_in_executor(None, self._read_ids)
            except TrimmedError:  # retention ran meanwhile, and will not run again at once
                box = await self.loop.run_in_executor(None, self._read_ids)
        except RailgunError as error:
            failure = error
        if self._early is not early:  # another node is master now, and the publishers were told
            return
        self._box, self._early = box, None
        self.settings_changed()  # settings may have changed while the IDs were read
        for publish in early:
            if failure is not None:
                publish.answer(failure)
            else:
                self._enqueue(publish)

    def settings_changed(self) -> None:
        """Apply changed settings to the log and to the remembered IDs."""
        self.log.limit_bytes(self.settings.max_bytes)
        if self._box is not None:
            self._box.resize(int(self.settings.id_box * SECOND), self.settings.max_ids)

    @property
    def _ids(self) -> IdBox:
        assert self._box is not None
        return self._box

    def _read_ids(self) -> IdBox:
        """Read the IDs that may be in the deduplication window from the end of the log, epoch by epoch (`Lookback`).

        IDs that only an older epoch has must leave half of the pool free: otherwise a restart could fill the pool.
        """
        box, log = IdBox(int(self.settings.id_box * SECOND), self.settings.max_ids), self.log
        look, now = Lookback(box.box), steady_us()
        epochs: list[list[tuple[list[bytes | None], int, int]]] = []
        count, runs = 0, log.runs
        for at in range(len(runs) - 1, max(-1, len(runs) - 1 - MAX_EPOCHS_READ), -1):
            begin, end = runs[at - 1][1] if at else log.first, min(runs[at][1], log.durable_end)
            if begin >= end:
                continue  # not on disk yet
            first, last = (head(log.read(n, 1)[0]).time for n in (begin, end - 1))
            epoch_ids: list[tuple[list[bytes | None], int, int]] = []
            for batch in log.batches_since(look.oldest(last), begin, end):
                if head(batch).flags & HAS_IDS:
                    records = Records(batch)
                    ids = records.ids()
                    count += len(ids) - ids.count(None)
                    epoch_ids.append((ids, records.base, look.time_of(records.time, last, now)))
            if epochs and count > box.most // 2:
                break
            epochs.append(epoch_ids)
            if not look.passed(first, last):
                break
        for epoch_ids in reversed(epochs):
            for ids, base, time in epoch_ids:
                box.restore(ids, base, time)
        return box

    def _try(self, publish: _Publish) -> None:
        box, ids = self._ids, publish.ids
        verdicts = box.check(ids, steady_us())
        if any(isinstance(verdict, Twin) for verdict in verdicts):
            box.begin(ids, publish.ticket)
            self._waiting[publish.ticket] = publish
            self._behind.setdefault(publish.sender, deque())
            return
        fresh = [n for n, verdict in enumerate(verdicts) if isinstance(verdict, Fresh)]
        if len(fresh) == len(ids):
            batches = publish.batches
        elif fresh and not publish.together:
            batches = [_select(publish.batches, fresh)]
        else:
            self._answer_when_safe(publish.answer, Stored(0, 0, self._refused(verdicts, {})))
            return
        box.begin([ids[n] for n in fresh], publish.ticket)
        answered = partial(self._answered, publish, batches, fresh, verdicts)
        accepted = partial(self._accepted, publish, batches)
        self._commit(batches, publish.acks, answered, accepted)

    def _answered(
        self,
        publish: _Publish,
        batches: list[bytearray],
        fresh: list[int],
        verdicts: list[Any],
        error: RailgunError | None,
    ) -> None:
        refused: tuple[tuple[int, str, int], ...] = ()
        if error is None:
            base = head(batches[0]).base
            refused = self._refused(verdicts, {n: base + at for at, n in enumerate(fresh)})
        self._stored(batches, publish.answer, refused, error)

    def _accepted(
        self, publish: _Publish, batches: list[bytearray], error: RailgunError | None
    ) -> None:
        """Note the result of a publish for its IDs, in the order of the log, and try waiting twins again."""
        if self._box is None:  # another node is master now
            return
        if error is not None:
            again = self._box.failed(publish.ticket)
        else:
            first = head(batches[0])
            again = self._box.accepted(publish.ticket, first.base, steady_us())
        for ticket in again:
            if ticket in self._waiting:
                self._try_again(self._waiting.pop(ticket))

    def refuse_waiting(self, error: RailgunError) -> None:
        """Answer publishes that wait for a twin, and those behind them, with this error: none of them is stored."""
        for ticket in self._waiting:
            self._ids.withdraw(ticket)
        waiting = [*self._waiting.values(), *itertools.chain(*self._behind.values())]
        self._waiting, self._behind = {}, {}
        for publish in waiting:
            publish.answer(error)

    def _try_again(self, publish: _Publish) -> None:
        """Try a publish that has waited; unless it has to wait again, let those behind it have their turn."""
        line = self._behind.pop(publish.sender)
        line.appendleft(publish)
        while line and publish.ticket not in self._waiting:
            publish = line.popleft()
            self._try(publish)
        if line:
            self._behind[publish.sender] = line

    def _refused(
        self, verdicts: Sequence[Any], offsets: dict[int, int]
    ) -> tuple[tuple[int, str, int], ...]:
        duplicate = "OK" if self.settings.duplicates == "ok" else "DUPLICATE_ID"
        refused: list[tuple[int, str, int]] = []
        for index, verdict in enumerate(verdicts):
            match verdict:
                case Duplicate(offset):
                    refused.append((index, duplicate, offset))
                case Repeat(original):
                    first = offsets.get(original)
                    if first is None:  # the message it repeats was refused itself
                        first = next((o for n, _, o in refused if n == original), 0)
                    refused.append((index, duplicate, first))
                case PoolFull():
                    refused.append((index, verdict.code, 0))
        for _, code, _ in refused:
            self.counts.refused[code] += 1
        return tuple(refused)

    # ------------------------------------------------------------ consuming

    def subscribe(
        self,
        consumer: Consumer,
        group: str,
        *,
        exclusive: bool,
        ack_wait: int,
        credit: int,
        start: int | None,
        seek: int | None,
        token: str = "",
        again: bool = False,
    ) -> tuple[GroupDriver, Joined]:
        """Add a consumer, to a group or (`group` is "") to none. `start`: where a new group begins (None: at the end).

        A tracked consumer (the group `@ID`) takes over from the subscription that has its ID, which gets
        `ConsumerTakenError`. `again`: the consumer comes back after a reconnect, and takes over only from a
        subscription with its own `token`.
        """
        if group:
            self.check_master()
        damage = self.damage
        if damage is not None and seek is not None and seek > damage.offset:
            raise damage
        first, end = self.log.first, self.end
        begin = end if start is None else max(first, start)
        driver = self.groups.get(group) if group else None
        existed = driver is not None
        if driver is None:
            name = group or f"#{next(self._anonymous)}"
            driver = self._driver(name, exclusive, ack_wait, begin if seek is None else first)
        elif driver.group.kind not in (None, exclusive):
            kind, wanted = ("exclusive", "shared") if driver.group.kind else ("shared", "exclusive")
            raise GroupKindError(
                f"the group {group!r} of {self.name!r} is {kind}, and stays so while it exists: subscribe to it as "
                f"{kind}, choose another name, or delete the group and its position to have it {wanted}"
            )
        elif group.startswith(TRACKED) and (seek is None or first <= seek <= end):
            self._take_over(driver, token, again)
        if not driver.consumers:
            driver.group.configure(self.settings.group(exclusive, ack_wait), self.now())
        driver.token = token
        try:
            joined = driver.join(consumer, credit, seek)
        except RailgunError:
            if not existed:
                driver.tracked = False  # the log does not know the group
                self.forget(driver)
            raise
        if existed and seek is None:
            joined = replace(joined, why="tracked")
        return driver, joined

    def _take_over(self, driver: GroupDriver, token: str, again: bool) -> None:
        """End the subscription that has the ID of a tracked consumer, or refuse the new one."""
        what = f"the consumer {driver.name.removeprefix(TRACKED)!r} of {self.name!r}"
        if driver.consumers and again and token != driver.token:
            raise ConsumerTakenError(f"{what} was taken over by another subscription with this ID")
        for old in list(driver.consumers.values()):
            if again:  # the consumer lives, and only its connection was lost
                driver.send_away(old.name)
            else:
                driver.leave(old.name, graceful=False)
            old.lost(ConsumerTakenError(f"another subscription has taken over {what}"))

    def leave(self, driver: GroupDriver, member: str, graceful: bool) -> None:
        """Remove a consumer that leaves; a group that is not tracked goes with its last consumer."""
        driver.leave(member, graceful)
        self._forget_untracked(driver)

    def send_away(self, driver: GroupDriver, member: str) -> None:
        """Remove a consumer without fault of its own; a group that is not tracked goes with its last consumer."""
        driver.send_away(member)
        self._forget_untracked(driver)

    def _forget_untracked(self, driver: GroupDriver) -> None:
        if not driver.tracked and not driver.consumers:
            self.forget(driver)

    def _driver(self, name: str, exclusive: bool, ack_wait: int, start: int) -> GroupDriver:
        config = self.settings.group(exclusive, ack_wait)
        saved, tracked = self._saved.pop(name, None), not name.startswith("#")
        driver = self.groups[name] = GroupDriver(self, name, config, saved, start, tracked)
        return driver

    def forget(self, driver: GroupDriver) -> None:
        """Stop and remove a group; its positions stay in the log."""
        driver.end()
        self.groups.pop(driver.name, None)

    def keep(
        self,
        changes: Sequence[tuple[str, bytes | None]],
        done: Callable[[RailgunError | None], None],
    ) -> None:
        """Write changes of groups to their log; a change of None is the end of its group."""
        try:
            if self.copies is None:
                self._committer.submit(self.group_log, changes, done)
            else:
                self.copies.keep(changes, done)
        except RailgunError as error:
            done(error)

    def redriver(self, name: str) -> GroupDriver:
        """Return the driver of a group whose dead letters are to be delivered again.

        Raise `NoMasterError` if another node serves the groups, and `NoGroupError` if there is no such group.
        """
        self.check_master()
        driver = self.groups.get(name)
        if driver is None or not driver.tracked:
            raise NoGroupError(f"stream {self.name!r} has no group {name!r}")
        return driver

    async def reset(self, name: str, to: int | None) -> int:
        """Move a group without members to an offset (None: the end); return its position, which is on disk."""
        self.check_master()
        driver = self.groups[name]
        self._appended()
        driver.reset(self.end if to is None else to)
        await driver.saved()
        return driver.group.floor

    async def remove(self, name: str) -> None:
        """Delete a group without members, durably; raise `GroupBusyError` if a member is live."""
        self.check_master()
        driver = self.groups[name]
        if driver.consumers:
            raise GroupBusyError(f"{len(driver.consumers)} members of {name!r} are live")
        driver.abandon(NoGroupError(f"the group {name!r} is deleted"))
        saved = driver.group.save()
        del self.groups[name]
        try:
            done: asyncio.Future[None] = self.loop.create_future()
            self.keep([(name, None)], partial(resolve, done))
            await done
        except RailgunError:
            if name not in self.groups:  # the log still has the group: restore it
                self._saved[name] = saved
                self._driver(name, driver.group.config.exclusive, 0, 0)
            raise

    # ------------------------------------------------------------ reading

    def read(self, first: int, end: int, most_bytes: int) -> tuple[list[Bytes], int]:
        """Return batches with the messages from `first` on and before `end`, and the offset after them."""
        batches: list[Bytes] = []
        following = first
        for batch in self.log.read(first, most_bytes):
            header = head(batch)
            if header.base >= end:
                break
            following = min(header.end, end)
            batches.append(cut(batch, max(header.base, first), following))
            if following == end:
                break
        return batches, following

    def bury(self, driver: GroupDriver, bury: Bury) -> None:
        """Publish a message to the dead letters; its ID there makes sure that it is stored once.

        The ID includes the stored time: if the stream is deleted and made anew, its messages are others.
        """
        try:
            (batch,), _ = self.read(bury.offset, bury.offset + 1, 1)
        except (TrimmedError, ValueError):
            self.loop.call_soon(driver.buried, bury, None)  # the message is gone
            return
        except RailgunError as error:
            self.loop.call_soon(driver.buried, bury, error)
            return
        records = Records(batch)
        fields = {
            "stream": self.name,
            "offset": str(bury.offset),
            "id": (records.id(0) or b"").decode("utf-8", "replace"),
            "group": driver.name,
            "deliveries": str(bury.deliveries),
            "reason": bury.reason,
            "rule": bury.rule,
            "time": str(records.time),
        } | kept_headers(records.headers(0))
        key = f"{bury.offset}/{records.time}/{driver.name}"
        if bury.redrives:  # another letter than that of the delivery before
            fields["redrives"] = str(bury.redrives)
            key += f"/{bury.redrives}"
        letter = build([records.payload(0)], [key.encode()], [json.dumps(fields).encode()])

        def answer(stored: Stored | RailgunError) -> None:
            error = stored if isinstance(stored, RailgunError) else None
            if isinstance(stored, Stored) and any(c == PoolFull.code for _, c, _ in stored.refused):
                error = DeadLetterError(f"the dead letters of {self.name!r} remember no more IDs")
            if isinstance(stored, Stored):
                self.counts.dead += stored.count
            driver.buried(bury, error)

        async def publish() -> None:
            try:
                dead_letters = await self._dead_letters_of(self)
            except (RailgunError, OSError) as error:
                driver.buried(bury, DeadLetterError(str(error)))
            else:
                dead_letters.publish([letter], answer)

        task = self.loop.create_task(publish())
        self._dead_letter_tasks.add(task)
        task.add_done_callback(self._dead_letter_tasks.discard)

    # ------------------------------------------------------------ retention, closing

    async def perform(
        self, log: Log, work: Callable[[], T], then: Callable[[T], None] | None = None
    ) -> T:
        """Run work in the turn of the one writer of a log, and return the result.

        `then` gets the result before any callback of a later write to the log is called.
        """
        done: asyncio.Future[None] = self.loop.create_future()
        results: list[T] = []

        def performed(error: RailgunError | None) -> None:
            if error is None and then is not None:
                then(results[0])
            resolve(done, error)

        self._committer.perform(log, lambda: results.append(work()), performed)
        await done
        return results[0]

    async def retain(self) -> None:
        """Apply retention: remove messages that are too old or too much."""
        settings = self.settings
        age = None if settings.max_age is None else int(settings.max_age * SECOND)
        most, now = settings.max_bytes, min(self.now(), self._paced())
        ahead, limit = self.stored_now(), self.producing.keeps_from(self.end)
        await self.perform(self.log, lambda: self.log.retain(age, most, now, limit, ahead))
        if self.acting:
            await self.producing.expire()
        self.report_trimmed()

    async def purge(self, before: int | None) -> int:
        """Remove all messages before an offset (None: all); return the first offset that is left."""
        self.check_master()
        await self.producing.settle()
        limit = self.producing.keeps_from(self.end)
        first = await self.perform(self.log, partial(self._purge, before, limit))
        self.report_trimmed()
        if self.copies is not None:  # otherwise the messages could come back with another master
            gone: asyncio.Future[None] = self.loop.create_future()
            self.copies.when_gone(first, partial(resolve, gone))
            await gone
        return first

    def _purge(self, before: int | None, limit: int) -> int:
        """Purge the log, but only messages that are safe: other copies take all purged messages for safe."""
        end = self.end
        if before is not None and before > end:
            text = (
                f"stream {self.name!r} ends at {end}: there is nothing before {before} to take away"
            )
            raise BeyondEndError(text, end)
        return self.log.purge(min(end if before is None else before, limit))

    def check_master(self) -> None:
        """Raise `NoMasterError` if another node serves the groups and producers."""
        if not self.acting:
            raise self._no_master()

    def _no_master(self) -> NoMasterError:
        return NoMasterError(f"this node is not the master of {self.name!r} now: try again")

    def report_trimmed(self) -> None:
        """Tell the groups and the other copies which messages are gone."""
        self._appended()
        first = self.log.first
        if self.copies is not None:
            self.copies.trimmed(first)
        for driver in list(self.groups.values()):
            if first > driver.group.first:
                driver.trimmed(first)

    def check_groups(self) -> None:
        """Let the groups check their deadlines, because the time of day has jumped or the log has changed."""
        for driver in list(self.groups.values()):
            driver.schedule_check()

    async def flush_groups(self) -> None:
        """Let the groups save their changes and stop."""
        if self._loading is not None:
            await self._loading  # publishes that wait for the IDs are answered
        for driver in list(self.groups.values()):
            driver.end()

    # ------------------------------------------------------------ in a cluster

    async def lead(self) -> None:
        """Begin to serve the groups, with their states on disk."""
        states = await self.perform(self.group_log, self.group_log.load)
        states.pop("", None)
        self.producing.take_notes(states)
        self._saved = states
        for group in list(self._saved):
            if group not in self.groups:
                self._driver(group, False, 0, 0)

    def follow(self, error: RailgunError) -> None:
        """Stop serving groups and taking messages, and forget the IDs: another node is the master."""
        for driver in [driver for driver in self.groups.values() if driver.tracked]:
            del self.groups[driver.name]
            driver.abandon(error)
        self._saved, self._box = {}, None
        self.producing.stop(error)
        waiting = [*self._waiting.values(), *itertools.chain(*self._behind.values())]
        waiting += self._early or []
        self._waiting, self._behind, self._early = {}, {}, None
        for publish in waiting:
            publish.answer(NoMasterError(f"the master of {self.name!r} has changed: try again"))

    async def delete(self, error: RailgunError) -> None:
        """Take no more requests, tell all consumers, answer publishes under way, and close the files."""
        self._gone = error
        self.producing.stop(error)
        if self._loading is not None:
            await self._loading
        drivers, self.groups = list(self.groups.values()), {}
        for driver in drivers:
            driver.abandon(error)
        await self.perform(self.log, self.log.close)
        await self.perform(self.group_log, self.group_log.close)

    @property
    def trouble(self) -> RailgunError | None:
        """Return why messages or positions of groups cannot be written or read; None if they can."""
        logs = (self.log, self.group_log)
        if self.damage is not None:
            return self.damage
        return next((e for e in (*(o.failed for o in logs), *(o.refused for o in logs)) if e), None)

    async def check_files(self) -> None:
        """Check that the files are there, and whether refused writes would succeed now.

        So the node notices trouble, and the end of trouble, without publishes.
        """
        for log in (self.log, self.group_log):
            with contextlib.suppress(RailgunError):  # the log remembers it: see `trouble`
                if log.refused is not None:
                    await self.perform(log, log.probe)
                elif not log.has_file():
                    await self.perform(log, log.check_files)

    def keep_note(self) -> None:
        """Write a note of what is safe, if more is safe than the last note says: see `Copies.news`, and rule 6."""
        note = self._new_note()
        if note is not None:
            self._committer.submit(self.group_log, [("", note)], lambda error: None)

    def _new_note(self) -> bytes | None:
        """Return a note for the group log, if more is safe than the last note says."""
        if self.group_log.failed or self.group_log.refused:
            return None
        if self.copies is not None:
            return self.copies.news()
        end = self.log.whole_end
        if self._in_cluster or self.id or end <= self.note.safe:
            return None
        noted = self.note = CopyNote(safe=end)
        return noted.pack()

    def close(self) -> list[str]:
        """Close the files, after the committer has stopped; return what could not be brought to disk, and why.

        Refused writes are in `refused_at_end` instead: their senders were told.
        """
        note = self._new_note()
        if note is not None:
            with contextlib.suppress(RailgunError):
                self.group_log.append([("", note)])
        lost = []
        for log, what in ((self.log, "messages"), (self.group_log, "positions of groups")):
            with contextlib.suppress(RailgunError):  # then `failed` has the error
                if not log.has_file():
                    log.check_files()
            failure: Exception | None = log.failed
            refused = log.refused
            try:
                log.close()
            except (RailgunError, OSError) as error:
                failure = failure or error
            if failure is not None:
                lost.append(f"{what} of stream {self.name!r}: {failure}")
            elif refused is not None:
                text = f"{what} of stream {self.name!r} were refused, or would be: {refused}"
                self.refused_at_end.append(text)
        if self.group_log.failed is None:
            lost += self._unsaved_positions()
        return lost

    def _unsaved_positions(self) -> list[str]:
        """Report the groups whose positions on disk are behind those in memory."""
        late = {name: error for name, driver in self.groups.items() if (error := driver.unsaved)}
        if not late:
            return []
        names, why = ", ".join(map(repr, late)), trouble_in(next(iter(late.values())))
        return [
            f"positions of the groups {names} of stream {self.name!r}: what they have acknowledged last may be "
            f"delivered again. {why}"
        ]


def _both(first: Done, then: Done, error: RailgunError | None) -> None:
    first(error)
    then(error)


def kept_headers(headers: bytes) -> dict[str, str]:
    """Return the headers of a message as a header of its dead letter.

    >>> kept_headers(b'{"a": "b"}'), kept_headers(b""), kept_headers(bytes([255]))
    ({'headers': '{"a": "b"}'}, {}, {'headers_base64': '/w=='})
    """
    if not headers:
        return {}
    try:
        return {"headers": headers.decode()}
    except UnicodeDecodeError:
        return {"headers_base64": base64.b64encode(headers).decode()}


def _select(batches: Sequence[Bytes], rows: Sequence[int]) -> bytearray:
    """Return one batch with the messages at these rows, counted over all batches."""
    payloads, ids, headers = [], [], []
    for batch in batches:
        records = Records(batch)
        payloads += records.payloads()
        ids += records.ids()
        headers += records.all_headers()
    return build([payloads[n] for n in rows], [ids[n] for n in rows], [headers[n] for n in rows])
