"""Drive the producers of a persistent stream (`broker.protocol.producers`): their notes, staging log, and units.

Rules:

1. Staged messages lie in a stream of their own, the *staging log*, in the same region as the stream, so that both have
   one master. The staging log is created when it is needed and deleted with the stream; clients cannot read it, write
   to it or see it.
2. Notes are stored with the states of consumer groups, and are as safe as these. All state is read anew, when it is
   needed, after a restart, after a failover, and when a note could not be written. The unit of an intent may be in the
   log and not safe yet: so the reader waits first until all that is in the log is safe.
3. A commit copies staged batches from one log to the other, one sequence after the other, in the turn of the stream's
   one writer: nothing comes between its batches. If the copy fails, the part that was written is cut off. If that fails
   too, the log has failed, and the incomplete unit is cut off when the log is opened.
4. If a commit is in the log, and not safe, the node waits for as long as it is the master: the commit may become safe.
5. Messages that were committed or dropped are purged from the staging log, some megabytes at a time. The log can be
   purged only up to the first message that is still needed. If a needed message holds back much more than its own size,
   it is copied to the end of the log, and when the copy is safe, the log is purged up to the next needed message. A
   reader of the log finds both the original and the copy, or only one of them: a copy is a unit, and its first batch
   says that it replaces all that was staged before for its sequence (`ANEW`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

from railgun.broker.errors import NoMasterError, NotEnoughReplicasAfterAppendError
from railgun.broker.log.committer import Stamp
from railgun.broker.protocol.producers.producer import Intent, LostOutputError, Producer
from railgun.broker.protocol.producers.registry import Producers
from railgun.broker.settings import PRODUCER
from railgun.broker.streams.groups import ProducerNote, resolve
from railgun.errors import RailgunError
from railgun.transport.records import ANEW, COMMITS, CONTINUES, STAGED, head, mark

if TYPE_CHECKING:
    from railgun.broker.streams.persistent import Answer, Persistent
    from railgun.transport.proto import streams_pb2 as p

PIECE_BYTES: Final = 4 << 20
"""The most bytes to read and copy at once."""
PURGE_BYTES: Final = 16 << 20
"""Bytes that are no longer needed gather up to this size before the staging log is purged."""
MOVED_BYTES: Final = 8 << 20
"""The most bytes of several sequences to move at once."""
RETRY_PAUSE_S: Final = 0.2
SETTLE_PAUSE_S: Final = 0.02
SETTLE_CHECKS: Final = 250
"""How often `settle` looks whether all commits are noted."""
_LOG: Final = logging.getLogger(__name__)


class StagingFullError(RailgunError):
    """The messages would exceed the stream's limit for staged bytes, `max_staged`."""

    code: ClassVar[str] = "STAGING_FULL"


class NotesDamagedError(RailgunError):
    """The notes of producers were damaged: the node no longer knows what was committed."""

    code: ClassVar[str] = "NOTES_DAMAGED"


class _Turn:
    """A lock for one name, and how many tasks hold it or wait for it."""

    def __init__(self) -> None:
        self.lock, self.users = asyncio.Lock(), 0


@contextlib.asynccontextmanager
async def _turn(turns: dict[str, _Turn], name: str) -> AsyncIterator[None]:
    """Hold the lock of a name; it is deleted when no task needs it any more."""
    turn = turns.setdefault(name, _Turn())
    turn.users += 1
    try:
        async with turn.lock:
            yield
    finally:
        turn.users -= 1
        if not turn.users:
            del turns[name]


class Producing:
    """The producers of one stream. All runs in the event loop, except reads and copies of logs."""

    def __init__(
        self, stream: Persistent, find_staging: Callable[[Persistent], Awaitable[Persistent]]
    ) -> None:
        self._stream = stream
        self._find_staging = find_staging
        self._producers: Producers | None = None
        self._staging: Persistent | None = None
        self._loading: asyncio.Task[None] | None = None
        self._early: list[
            Callable[[RailgunError | None], None]
        ] = []  # pieces that came during the load
        self._life = 0  # changes whenever the state that was read becomes void
        self._since: int | None = None  # from here on, notes on disk may lack commits
        self._left = 0  # bytes that are not needed, and could not be purged
        self._purging: asyncio.Task[None] | None = None
        self._held: dict[object, int] = {}  # offsets to keep until notes that drop them are safe
        self._noting: list[Intent] = []  # commits that are done, and not noted as such
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, _Turn] = {}  # by producer: one commit after the other
        self._opens: dict[str, _Turn] = {}  # by producer: calls of `open` that wait for a note

    # ------------------------------------------------------------ beginning and ending

    def take_notes(self, kept: dict[str, Any]) -> None:
        """Take the notes of producers out of the saved states of groups."""
        names = [name for name in kept if name.startswith(PRODUCER)]
        notes = [kept.pop(name).told for name in names]
        intents = [note["intent"] for note in notes if note.get("intent")]
        self.stop(NoMasterError(f"the master of {self._stream.name!r} has changed: try again"))
        self._since = min((since for *_, since in intents), default=None)

    def stop(self, error: RailgunError) -> None:
        """Forget all state that was read, and fail the pieces that wait for it with `error`."""
        self._life += 1
        self._producers = self._staging = self._loading = None
        early, self._early = self._early, []
        self._noting.clear()
        for piece in early:
            piece(error)

    def keeps_from(self, end: int) -> int:
        """Return the offset from which on nothing may be trimmed, as a commit there is not noted as done."""
        offsets = [end, *(intent.since for intent in self._noting)]
        offsets += [] if self._since is None else [self._since]
        for producer in self._producers.by_name.values() if self._producers is not None else ():
            if producer.intent is not None:
                offsets.append(producer.intent.since)
        return min(offsets)

    async def _ready(self) -> Producers:
        """Return the producers, after reading them if necessary."""
        while self._producers is None:
            if self._loading is None:
                self._loading = self._stream.loop.create_task(self._load(self._life))
            await asyncio.shield(self._loading)
        return self._producers

    def _load_soon(self) -> None:
        """Begin to read all state, although no caller waits for it."""
        if self._loading is None:
            self._loading = self._stream.loop.create_task(self._load(self._life))
            self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _load(self, life: int) -> None:
        error: RailgunError | None = None
        try:
            await self._read(life)
        except RailgunError as raised:
            error = raised
            raise
        finally:
            if life == self._life:
                self._loading = None
                early, self._early = self._early, []
                for piece in early:
                    piece(error)

    async def _read(self, life: int) -> None:
        stream = self._stream
        stream.check_master()
        if stream.groups_damaged and stream.copies is None:
            raise NotesDamagedError(
                f"the states of groups of {stream.name!r} were damaged, and with them the notes of what producers have "
                "committed: the stream cannot be written exactly once any more. Create another stream"
            )
        staging = await self._find_staging(stream)
        staging.check_master()
        await staging.perform(staging.log, lambda: None)  # after pieces that are on their way
        await _until_safe(staging, staging.log.end)  # those will be answered: they must be found
        kept = await stream.perform(stream.group_log, stream.group_log.load)
        notes = {n[1:]: s.told for n, s in kept.items() if isinstance(s, ProducerNote)}
        stream_note = notes.pop("", {})
        producers = Producers.load(notes, stream_note)
        for batch in await stream.loop.run_in_executor(None, _staged_batches, staging):
            producers.found(*batch[:5], stream.now(), anew=batch.anew)
        changed = []
        if any(producer.intent is not None for producer in producers.by_name.values()):
            await stream.perform(stream.log, lambda: None)  # after units that are being written
            await _until_safe(stream, stream.log.end)
        for producer in producers.by_name.values():
            if producer.intent is not None:
                find = partial(_find_unit, stream, producer.number, producer.intent)
                base = await stream.loop.run_in_executor(None, find)
                if base is not None:
                    producers.committed(producer.name, producer.intent.number, base)
                else:
                    producers.abandoned(producer.name, producer.intent.number)
                changed.append(producer.name)
        if life != self._life:
            raise NoMasterError(f"the master of {stream.name!r} has changed: try again")
        stream.check_master()
        self._producers, self._staging = producers, staging
        await self._keep(*changed)
        if life == self._life:  # otherwise the state just read is void again
            self._since = None
            self._purge_soon()

    async def _keep(self, *names: str) -> None:
        """Write the notes of producers. If that fails, read all state anew, as it is unknown what is on disk."""
        if not names or self._producers is None:
            return
        life, producers = self._life, self._producers
        changes: list[tuple[str, bytes | None]] = [
            (PRODUCER, ProducerNote(producers.stream_note()).pack())  # first: it must not be older
        ]
        covered: list[tuple[int, int]] = []
        for name in names:
            producer = producers.by_name.get(name)
            note = None if producer is None else ProducerNote(producer.note()).pack()
            changes.append((PRODUCER + name, note))
            if producer is not None:
                covered.append((producer.number, producer.reserved))
        done: asyncio.Future[None] = self._stream.loop.create_future()
        self._stream.keep(changes, partial(resolve, done))
        try:
            await done
        except RailgunError as error:
            if life == self._life:
                self._since = self.keeps_from(self._stream.log.end)
                self.stop(error)
            raise
        for number, reserved in covered:
            producers.noted(number, reserved)

    # ------------------------------------------------------------ what producers ask for

    async def begin(
        self,
        name: str,
        epoch: int | None,
        keep: Sequence[int] | None = None,
        lifetime: int = 0,
        session: str | None = None,
    ) -> dict[str, Any]:
        """Begin an epoch of a producer, by number or for a session; return its state and what it has staged."""
        async with _turn(self._turns, name):
            producers = await self._ready()
            before = producers.by_name.get(name)
            state_before = {} if before is None else before.note() | {"used": 0}
            with self._holding(producers):
                if session is not None:
                    producer = producers.begin_session(name, session, self._stream.now(), lifetime)
                else:
                    assert epoch is not None
                    producer = producers.begin(name, epoch, self._stream.now(), keep, lifetime)
                if state_before != producer.note() | {"used": 0}:
                    await self._keep(name)
            self._purge_soon()
        staged = {str(sequence): entry.count for sequence, entry in producer.staged.items()}
        return {
            "number": producer.number,
            "epoch": producer.epoch,
            "staged": staged,
            "labels": [[first, end - 1] for first, end in producer.labels],
        }

    async def open(self, name: str, epoch: int, label: int | None = None) -> int:
        """Return a new sequence of a producer; `label`: the label to commit the sequence under."""
        producers, life = await self._ready(), self._life
        sequence, has_to_note = producers.open(name, epoch, self._stream.now(), label)
        if has_to_note:
            async with _turn(self._opens, name):  # one note is enough for all waiting calls
                self._check_life(life)
                producer = producers.by_name.get(name)
                if producer is not None and sequence >= producer.covered:
                    await self._keep(name)
        return sequence

    def stage(
        self, staging: p.Staging, batches: list[bytearray], size: int, answer: Answer
    ) -> None:
        """Stage batches that were validated, and call `answer` when they are safe."""
        if self._producers is None or self._early:  # pieces that came before are first
            self._early.append(
                lambda e: answer(e) if e else self._stage(staging, batches, size, answer)
            )
            self._load_soon()
        else:
            self._stage(staging, batches, size, answer)

    def _stage(
        self, staging: p.Staging, batches: list[bytearray], size: int, answer: Answer
    ) -> None:
        from railgun.broker.streams.persistent import Stored

        producers, staging_log = self._producers, self._staging
        if producers is None or staging_log is None:
            answer(NoMasterError(f"the master of {self._stream.name!r} has changed: try again"))
            return
        count = sum(head(batch).count for batch in batches)
        stored = Stored(staging.at, count)
        try:
            self._check_max_staged(producers, size)
            where = (staging.producer, staging.epoch, staging.sequence, staging.at)
            fresh = producers.staged(*where, count, size, staging_log.log.end, self._stream.now())
        except RailgunError as error:
            answer(error)
            return
        if not fresh:
            staging_log.when_all_safe(lambda error: answer(error or stored))
            return
        for batch in batches:
            mark(batch, STAGED, staging.producer, staging.sequence)
        life = self._life

        def done(outcome: Stored | RailgunError) -> None:
            if isinstance(outcome, Stored):
                answer(stored)
                return
            if life == self._life:
                producers.not_staged(staging.producer, staging.sequence, staging.at, size)
            answer(outcome)

        staging_log.publish(batches, done)

    def _check_max_staged(self, producers: Producers, size: int) -> None:
        limit, used = self._stream.settings.max_staged, producers.staged_size
        if used + size > limit:
            staging = [producer for producer in producers.by_name.values() if producer.staged]
            largest = max(staging, key=_staged_bytes, default=None)
            by = (
                "no producer"
                if largest is None
                else f"{len(staging)} producers, most of it by {largest.name!r} ({_staged_bytes(largest):,})"
            )
            raise StagingFullError(
                f"{used:,} bytes are staged for {self._stream.name!r} by {by}, and {size:,} more would exceed its "
                f"max_staged, {limit:,}. Commit more often (snapshots, micro-batches), allow more (railgun stream "
                "ensure --mode overwrite --max-staged N), or forget producers that are gone for good (the calls "
                "producers and forget_producer)"
            )

    async def commit(
        self, name: str, epoch: int, counts: Mapping[int, int], labels: range | None = None
    ) -> tuple[int, int | None]:
        """Commit sequences, each with a count of messages; return how many joined the stream now, and the first offset.

        If the commit was done before, the offset is known only if it was the producer's last. `labels`: the labels to
        commit with the sequences.
        """
        async with _turn(self._turns, name):
            producers = await self._ready()
            counts = producers.without_empty(name, counts)
            if labels is not None and not counts:
                with self._holding(producers):
                    if producers.pass_over(name, epoch, labels, self._stream.now()):
                        await self._keep(name)
                return 0, None
            return await self._commit(name, epoch, counts, labels)

    async def _commit(
        self, name: str, epoch: int, counts: Mapping[int, int], labels: range | None
    ) -> tuple[int, int | None]:
        producers, stream, life = await self._ready(), self._stream, self._life
        staging = self._staging
        assert staging is not None
        await _all_safe(staging)
        self._check_life(life)
        intent = producers.commit(name, epoch, counts, stream.log.end, stream.now(), labels)
        if intent is None:
            self._purge_soon()
            return 0, producers.base_of(name, counts)
        producer = producers.by_name[name]
        first = min(producer.staged[sequence].first for sequence in intent.sequences)
        find = partial(_find_ranges, staging, producer.number, intent.sequences, first)
        try:
            ranges = await stream.loop.run_in_executor(None, find)
            _check_whole(producer, intent, ranges)
        except RailgunError:
            if life == self._life:
                producers.abandoned(name, intent.number)
            raise
        await self._keep(name)
        self._check_life(life)  # a later load of the notes has to find the unit
        try:
            copy = partial(_copy_unit, stream, staging, producer.number, intent.number, ranges)
            base, end = await stream.write_unit(copy)
        except RailgunError:
            if life == self._life and stream.log.failed is None:
                producers.abandoned(name, intent.number)
            raise
        await _until_safe(stream, end)
        self._check_life(life)
        producers.committed(name, intent.number, base)
        self._noting.append(intent)
        task = stream.loop.create_task(self._note_done(name, intent, life))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return end - base, base

    async def drop(self, name: str, epoch: int, sequences: Sequence[int]) -> None:
        """Drop what a producer has staged for sequences, for good, after any commit of it under way."""
        async with _turn(self._turns, name):
            producers = await self._ready()
            with self._holding(producers):
                producers.drop(name, epoch, sequences, self._stream.now())
                await self._keep(name)
        self._purge_soon()

    def _check_life(self, life: int) -> None:
        if life != self._life:
            raise NoMasterError(f"the master of {self._stream.name!r} has changed: try again")

    async def _note_done(self, name: str, intent: Intent, life: int) -> None:
        """Write that a commit is done, and purge what is not needed any more."""
        with contextlib.suppress(RailgunError):  # the next load finds the unit
            await self._keep(name)
            if life != self._life or self._producers is None or self._staging is None:
                return
            self._noting.remove(intent)
            self._purge_soon()

    def _purge_soon(self) -> None:
        """Purge the staging log in a task, if much of it or all of it is not needed any more."""
        if self._purging is None and self._wants_purge():
            self._purging = self._stream.loop.create_task(self._purge_or_move(self._life))
            self._purging.add_done_callback(self._purge_done)

    def _purge_done(self, task: asyncio.Task[None]) -> None:
        self._purging = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("the staging log of %r cannot be purged", self._stream.name, exc_info=error)

    def _wants_purge(self) -> bool:
        producers, staging = self._producers, self._staging
        if producers is None or staging is None:
            return False
        if not producers.staged_size:
            return staging.log.first < self._needed_from()
        return self._unneeded_bytes() > PURGE_BYTES + self._left

    def _unneeded_bytes(self) -> int:
        """Return how many bytes of the staging log are not needed any more."""
        producers, staging = self._producers, self._staging
        assert producers is not None
        assert staging is not None
        return max(0, staging.log.size - producers.staged_size)

    def _needed_from(self) -> int:
        """Return the first offset of the staging log that is needed, or was before a note that is not safe yet."""
        producers, staging = self._producers, self._staging
        assert producers is not None
        assert staging is not None
        return min([producers.staged_from(staging.end), staging.end, *self._held.values()])

    async def _purge_or_move(self, life: int) -> None:
        """Purge what is not needed any more; move messages that hold back much of it to the end of the staging log."""
        staging = self._staging
        if staging is None:
            return
        with contextlib.suppress(RailgunError):  # the next purge tries again
            await self._purge(life)
            end = staging.log.end
            while life == self._life and self._is_bloated() and await self._move(life, end):
                await self._purge(life)
        if life == self._life and self._producers is not None:
            self._left = self._unneeded_bytes()

    async def _purge(self, life: int) -> None:
        if life == self._life and self._staging is not None and self._producers is not None:
            needed_from = self._needed_from()
            if self._staging.log.first < needed_from:
                await self._staging.purge(needed_from)

    def _is_bloated(self) -> bool:
        """Return whether the unneeded bytes that cannot be purged exceed both `PURGE_BYTES` and the needed bytes."""
        producers = self._producers
        if producers is None:
            return False
        return self._unneeded_bytes() > max(PURGE_BYTES, producers.staged_size)

    async def _move(self, life: int, end: int) -> bool:
        """Copy the first staged messages to the end of the staging log; return False if none lie before `end`.

        Copies messages that one producer has staged before `end`, each sequence as a unit. If the copy fails, or is not
        safe when the node ends, all stays as it is.
        """
        producers = self._producers
        first = None if producers is None else producers.first_staged()
        if producers is None or first is None or first.offset >= end:
            return False
        async with _turn(self._turns, first.name):  # no commit of the producer is under way then
            self._check_life(life)
            producer, staging = producers.by_name.get(first.name), self._staging
            assert staging is not None
            if producer is None:  # the producer was forgotten meanwhile
                return True
            old = sorted(
                (staged.first, sequence, staged.count, staged.size)
                for sequence, staged in producer.staged.items()
                if staged.first < end
            )
            if not old:  # all was dropped meanwhile
                return True
            sizes = itertools.accumulate(size for *_, size in old)
            chosen = [entry for entry, size in zip(old, sizes, strict=True) if size <= MOVED_BYTES]
            chosen = chosen or old[:1]
            ranges: dict[int, _Ranges] = {sequence: [] for _, sequence, *_ in chosen}
            # Pieces that were accepted and are not on disk yet lie behind this offset: the copy looks for them.
            known_end = staging.log.durable_end
            begin = max(chosen[0][0], staging.log.first)
            find = partial(_add_ranges, staging, producer.number, ranges, begin, known_end)
            messages = sum(count for _, _, count, _ in chosen)
            await self._stream.loop.run_in_executor(None, find, messages)
            bases: dict[int, int] = {}
            copy = partial(_copy_forward, staging, producer.number, ranges, known_end, bases)
            _, copied_end = await staging.write_unit(copy)
            await _until_safe(staging, copied_end)
            self._check_life(life)
            for sequence, base in bases.items():
                producers.moved(producer.number, sequence, base)
        return bool(bases)

    @contextlib.contextmanager
    def _holding(self, producers: Producers) -> Iterator[None]:
        """Keep all that is staged now until a note that drops some of it is safe."""
        staging, ticket = self._staging, object()
        if staging is not None:
            self._held[ticket] = producers.staged_from(staging.end)
        try:
            yield
        finally:
            self._held.pop(ticket, None)

    async def settle(self) -> None:
        """Wait for a while until commits are noted as done: before that, their messages cannot be trimmed."""
        for _ in range(SETTLE_CHECKS):
            if not self._noting:
                return
            await asyncio.sleep(SETTLE_PAUSE_S)

    async def forget(self, name: str) -> bool:
        """Forget a producer and what it has staged, after any commit of it under way; return whether it existed."""
        async with _turn(self._turns, name):
            return await self._forget(name, await self._ready())

    async def _forget(self, name: str, producers: Producers) -> bool:
        with self._holding(producers):
            gone = producers.forget(name)
            await self._keep(name)
        self._purge_soon()
        return gone is not None

    async def expire(self) -> None:
        """Forget producers that were idle for longer than their lifetime; settle commits from before a restart."""
        producers = self._producers
        if producers is None:
            if self._since is not None:  # nothing is trimmed before the load
                self._load_soon()
            return
        producers.drop_stale(self._stream.now())
        for name in producers.expired(self._stream.now()):
            if name in self._turns:  # the producer is in use
                continue
            async with _turn(self._turns, name):
                producers = await self._ready()
                if name in producers.expired(self._stream.now()):  # still idle
                    await self._forget(name, producers)
        self._purge_soon()

    async def describe(self) -> list[dict[str, Any]]:
        """Return the state of all producers, as plain values."""
        producers = await self._ready()
        return [
            {
                "name": producer.name,
                "number": producer.number,
                "epoch": producer.epoch,
                "session": producer.session,
                "committed": sum(end - first for first, end in producer.committed),
                "labels": [[first, end - 1] for first, end in producer.labels],
                "staged": {
                    str(sequence): entry.count for sequence, entry in producer.staged.items()
                },
                "staged_bytes": _staged_bytes(producer),
            }
            for producer in producers.by_name.values()
        ]


# ---------------------------------------------------------------- the logs


async def _all_safe(stream: Persistent) -> None:
    """Wait until all batches given to a stream are safe."""
    done: asyncio.Future[None] = stream.loop.create_future()
    stream.when_all_safe(partial(resolve, done))
    await done


async def _until_safe(stream: Persistent, end: int) -> None:
    """Wait until the batches of a log before offset `end` are safe, as long as this node is the master."""
    while stream.copies is not None:
        done: asyncio.Future[None] = stream.loop.create_future()
        stream.copies.when_safe(end, partial(resolve, done))
        try:
            await done
            return
        except NotEnoughReplicasAfterAppendError:
            await asyncio.sleep(RETRY_PAUSE_S)


class _StagedBatch(NamedTuple):
    """A batch in the staging log."""

    producer: int
    sequence: int
    messages: int
    size: int
    base: int
    anew: bool
    """Whether the batch begins a copy of all that was staged before for its sequence."""


def _staged_batches(staging: Persistent) -> list[_StagedBatch]:
    """Return all staged batches in the staging log."""
    staged, at, end = [], staging.log.first, staging.end
    while batches := staging.log.read(at, PIECE_BYTES, end) if at < end else []:
        for batch in batches:
            header = head(batch)
            at = header.end
            if header.flags & STAGED:
                where = header.producer, header.number, header.count, header.size, header.base
                staged.append(_StagedBatch(*where, bool(header.flags & ANEW)))
    return staged


def _staged_bytes(producer: Producer) -> int:
    return sum(staged.size for staged in producer.staged.values())


def _find_unit(stream: Persistent, producer: int, intent: Intent) -> int | None:
    """Return the offset where the unit of a commit begins in the log, or None if the log does not have it."""
    at, end = max(intent.since, stream.log.first), stream.end
    begin = at
    while batches := stream.log.read(at, PIECE_BYTES, end) if at < end else []:
        for batch in batches:
            header = head(batch)
            at = header.end
            if header.flags & COMMITS and (header.producer, header.number) == (
                producer,
                intent.number,
            ):
                return begin
            if not header.flags & CONTINUES:
                begin = at
    return None


_Ranges: TypeAlias = list[tuple[int, int]]


def _find_ranges(
    staging: Persistent, producer: int, sequences: Sequence[int], first: int
) -> _Ranges:
    """Return where the batches of sequences lie in the staging log, in the order of the sequences."""
    ranges: dict[int, _Ranges] = {sequence: [] for sequence in sequences}
    _add_ranges(staging, producer, ranges, max(first, staging.log.first), staging.end)
    return [span for sequence in sequences for span in ranges[sequence]]


def _add_ranges(
    staging: Persistent,
    producer: int,
    ranges: dict[int, _Ranges],
    at: int,
    end: int,
    max_messages: int | None = None,
) -> None:
    """Add to `ranges` where the batches of its sequences lie, from `at` to before `end`.

    `max_messages`: stop when this many messages were found.
    """
    messages = 0
    while at < end and (batches := staging.log.read(at, PIECE_BYTES, end)):
        for batch in batches:
            header = head(batch)
            at = header.end
            if header.producer != producer or header.number not in ranges:
                continue
            own, begin = ranges[header.number], header.base
            if header.flags & ANEW:
                messages -= sum(stop - start for start, stop in own)
                own.clear()
            messages += header.count
            if own and own[-1][1] == begin:
                begin = own.pop()[0]
            own.append((begin, header.end))
        if max_messages is not None and messages >= max_messages:
            return


def _copy_forward(
    staging: Persistent,
    producer: int,
    ranges: dict[int, _Ranges],
    known_end: int,
    bases: dict[int, int],
    stamp: Stamp,
) -> tuple[int, int]:
    """Copy what is staged for sequences to the end of the staging log; return where the copies begin and end.

    `ranges`: where the pieces of each sequence lie that are before the offset `known_end`. `bases`: filled with the
    offset where the copy of each begins. It has to be called in the turn of the log's one writer, and copies all pieces
    that lie before the copy, also those that are not safe yet.
    """
    log = staging.log
    log.sync()  # batches that are not on disk cannot be read
    log.roll()  # else the segment with the originals could not be deleted
    begin = log.end
    _add_ranges(staging, producer, ranges, known_end, begin)
    try:
        for sequence, spans in ranges.items():
            flags, last = STAGED | ANEW, None
            bases[sequence] = log.end
            for at, range_end in spans:
                while at < range_end and (batches := log.read(at, PIECE_BYTES, range_end)):
                    ready = []
                    for batch in batches:
                        at = head(batch).end
                        if last is not None:
                            mark(last, flags | CONTINUES, producer, sequence)
                            ready.append(last)
                            flags = STAGED
                        last = bytearray(batch)
                    if ready:
                        log.stamp(ready, stamp.epoch, stamp.now)
                        log.append(ready)
            if last is None:
                del bases[sequence]
                continue
            mark(last, flags, producer, sequence)
            log.stamp([last], stamp.epoch, stamp.now)
            log.append([last])
        log.sync()
    except BaseException:
        log.undo(begin)
        raise
    return begin, log.end


def _check_whole(producer: Producer, intent: Intent, ranges: Sequence[tuple[int, int]]) -> None:
    """Raise `LostOutputError` if the staging log does not have all messages of a commit."""
    wanted = sum(producer.staged[sequence].count for sequence in intent.sequences)
    present = sum(end - begin for begin, end in ranges)
    if present != wanted:
        raise LostOutputError(
            f"producer {producer.name!r}: {present:,} of the {wanted:,} messages staged for a commit are in the "
            "staging log: the others are lost"
        )


def _copy_unit(
    stream: Persistent,
    staging: Persistent,
    producer: int,
    commit: int,
    ranges: Sequence[tuple[int, int]],
    stamp: Stamp,
) -> tuple[int, int]:
    """Append ranges of the staging log to the log of a stream, as one unit; return where the unit begins and ends.

    It has to be called in the turn of the log's one writer.
    """
    log, last = stream.log, None
    begin = log.end
    try:
        for start, end in ranges:
            at = start
            while at < end and (batches := staging.log.read(at, PIECE_BYTES, end)):
                ready = []
                for batch in batches:
                    at = head(batch).end
                    if last is not None:
                        mark(last, CONTINUES)
                        ready.append(last)
                    last = bytearray(batch)
                if ready:
                    log.stamp(ready, stamp.epoch, stamp.now)
                    log.append(ready)
        assert last is not None, "a commit of nothing"
        mark(last, COMMITS, producer, commit)
        log.stamp([last], stamp.epoch, stamp.now)
        log.append([last])
        log.sync()
    except BaseException:
        log.undo(begin)
        raise
    return begin, log.end
