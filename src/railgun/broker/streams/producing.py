"""Drives the producers of a persistent stream (`broker.protocol.producers`): their records, staging log, and units.

Rules:

1. What is staged lies in a stream of its own beside the stream, in the same region, so that both have one master. It is
   made when it is needed, goes with the stream, and nobody else can read it, write to it or see it.
2. Notes are kept with the states of groups, and are as safe as these. All is read anew, when it is needed, after a
   restart, after a failover, and when a note could not be written. A unit that is looked for may be in the log and
   not safe yet: so all that is in the log is waited for first.
3. A commit copies what is staged from one log to the other, one sequence after the other, in the turn of the stream's
   one writer: nothing comes between its batches. If that fails, what was written is cut off; if that fails too, the log
   has failed, and what is not whole is cut off when it is opened.
4. A commit that is in the log, and not safe, is waited for as long as this node is the master: it may be safe yet.
5. What is staged is let go of when it is committed or dropped, some megabytes at a time. The staging log can be purged
   up to what is still needed. If that holds back much more than it is itself, it is copied to the end of the log, and
   when the copy is safe, the log is purged up to that. Whoever reads the log finds both, or only one of them: a copy is
   a unit, and says that it takes the place of all that was staged before for its sequence (`ANEW`).
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
"""How much is read and copied at once."""
LET_GO_BYTES: Final = 16 << 20
"""How much of what is not needed any more gathers before it is purged."""
MOVED_BYTES: Final = 8 << 20
"""How much of several sequences is moved at once."""
AGAIN_S: Final = 0.2
SETTLES: Final = 250
_LOG: Final = logging.getLogger(__name__)


class StagingFullError(RailgunError):
    """As much is staged for a stream as may be."""

    code: ClassVar[str] = "STAGING_FULL"


class NotesDamagedError(RailgunError):
    """The notes of producers were damaged: nobody knows any more what they have committed."""

    code: ClassVar[str] = "NOTES_DAMAGED"


class _Turn:
    """What one at a time may have, and how many have it or wait for it."""

    def __init__(self) -> None:
        self.lock, self.users = asyncio.Lock(), 0


@contextlib.asynccontextmanager
async def _turn(turns: dict[str, _Turn], name: str) -> AsyncIterator[None]:
    """Take the turn of a name; it is gone with the last one that wanted it."""
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
    """The producers of one stream. All but what is copied happens in the event loop."""

    def __init__(
        self, stream: Persistent, find_staging: Callable[[Persistent], Awaitable[Persistent]]
    ) -> None:
        self._stream = stream
        self._find_staging = find_staging
        self._producers: Producers | None = None
        self._staging: Persistent | None = None
        self._loading: asyncio.Task[None] | None = None
        self._early: list[Callable[[RailgunError | None], None]] = []  # pieces that came meanwhile
        self._life = 0  # changes with whatever makes what is known void
        self._since: int | None = None  # where units may begin that notes on disk do not know of
        self._left = 0  # bytes that are not needed, and could not be purged
        self._letting_go: asyncio.Task[None] | None = None
        self._held: dict[object, int] = {}  # where what notes drop that are not safe yet begins
        self._noting: list[Intent] = []  # commits that are done, and not noted as such
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, _Turn] = {}  # one commit of a producer after the other
        self._opens: dict[str, _Turn] = {}  # those that wait for a note of what they open

    # ------------------------------------------------------------ beginning and ending

    def take_notes(self, kept: dict[str, Any]) -> None:
        """Take the notes of producers out of what was kept: they are no groups."""
        names = [name for name in kept if name.startswith(PRODUCER)]
        notes = [kept.pop(name).told for name in names]
        intents = [note["intent"] for note in notes if note.get("intent")]
        self.stop(NoMasterError(f"the master of {self._stream.name!r} has changed: try again"))
        self._since = min((since for *_, since in intents), default=None)

    def stop(self, error: RailgunError) -> None:
        """Forget what is known; whoever waits is told."""
        self._life += 1
        self._producers = self._staging = self._loading = None
        early, self._early = self._early, []
        self._noting.clear()
        for piece in early:
            piece(error)

    def keeps_from(self, end: int) -> int:
        """Return the offset from which on nothing may be trimmed: a commit there is not noted as done."""
        found = [end, *(intent.since for intent in self._noting)]
        found += [] if self._since is None else [self._since]
        for producer in self._producers.by_name.values() if self._producers is not None else ():
            if producer.intent is not None:
                found.append(producer.intent.since)
        return min(found)

    async def _ready(self) -> Producers:
        """Return the producers, after they were read if need be."""
        while self._producers is None:
            if self._loading is None:
                self._loading = self._stream.loop.create_task(self._load(self._life))
            await asyncio.shield(self._loading)
        return self._producers

    def _load_soon(self) -> None:
        """Read all, though nobody waits for it."""
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
                f"the groups of {stream.name!r} were damaged, and with them what producers have committed: it cannot "
                "be written exactly once any more. Make another stream"
            )
        staging = await self._find_staging(stream)
        staging.check_master()
        await staging.perform(staging.log, lambda: None)  # behind pieces that are on their way
        await _until_safe(staging, staging.log.end)  # they will be answered: they have to be found
        kept = await stream.perform(stream.group_log, stream.group_log.load)
        notes = {n[1:]: s.told for n, s in kept.items() if isinstance(s, ProducerNote)}
        stream_note = notes.pop("", {})
        producers = Producers.load(notes, stream_note)
        for batch in await stream.loop.run_in_executor(None, _staged_batches, staging):
            producers.found(*batch[:5], stream.now(), anew=batch.anew)
        changed = []
        if any(producer.intent is not None for producer in producers.by_name.values()):
            await stream.perform(stream.log, lambda: None)  # behind units that are being written
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
        if (
            life == self._life
        ):  # else what was known is void once more, and so is what was found here
            self._since = None
            self._let_go_soon()

    async def _keep(self, *names: str) -> None:
        """Write the notes of producers; if that fails, all is read anew: nobody knows what is on disk."""
        if not names or self._producers is None:
            return
        life, found = self._life, self._producers
        changes: list[tuple[str, bytes | None]] = [
            (PRODUCER, ProducerNote(found.stream_note()).pack())  # first: it must not be behind
        ]
        covered: list[tuple[int, int]] = []
        for name in names:
            producer = found.by_name.get(name)
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
        for one in covered:
            found.noted(*one)

    # ------------------------------------------------------------ what producers ask for

    async def begin(
        self,
        name: str,
        epoch: int | None,
        keep: Sequence[int] | None = None,
        lifetime: int = 0,
        session: str | None = None,
    ) -> dict[str, Any]:
        """Begin an epoch of a producer, by its number or for a session: what is known of it, and what is staged."""
        async with _turn(self._turns, name):
            producers = await self._ready()
            before = producers.by_name.get(name)
            known = {} if before is None else before.note() | {"used": 0}
            with self._holding(producers):
                if session is not None:
                    producer = producers.begin_session(name, session, self._stream.now(), lifetime)
                else:
                    assert epoch is not None
                    producer = producers.begin(name, epoch, self._stream.now(), keep, lifetime)
                if known != producer.note() | {"used": 0}:
                    await self._keep(name)
            self._let_go_soon()
        staged = {str(sequence): one.count for sequence, one in producer.staged.items()}
        return {
            "number": producer.number,
            "epoch": producer.epoch,
            "staged": staged,
            "labels": [[first, end - 1] for first, end in producer.labels],
        }

    async def open(self, name: str, epoch: int, label: int | None = None) -> int:
        """Return a new sequence of a producer; `label`: what it will be committed under."""
        producers, life = await self._ready(), self._life
        sequence, has_to_note = producers.open(name, epoch, self._stream.now(), label)
        if has_to_note:
            async with _turn(self._opens, name):  # one note is enough for all that wait
                self._check_life(life)
                producer = producers.by_name.get(name)
                if producer is not None and sequence >= producer.covered:
                    await self._keep(name)
        return sequence

    def stage(self, told: p.Staging, batches: list[bytearray], size: int, answer: Answer) -> None:
        """Stage batches that have been looked at; `answer` is called when they are safe."""
        if self._producers is None or self._early:  # those that came before are first
            self._early.append(
                lambda e: answer(e) if e else self._stage(told, batches, size, answer)
            )
            self._load_soon()
        else:
            self._stage(told, batches, size, answer)

    def _stage(self, told: p.Staging, batches: list[bytearray], size: int, answer: Answer) -> None:
        from railgun.broker.streams.persistent import Stored

        producers, staging = self._producers, self._staging
        if producers is None or staging is None:
            answer(NoMasterError(f"the master of {self._stream.name!r} has changed: try again"))
            return
        count = sum(head(batch).count for batch in batches)
        stored = Stored(told.at, count)
        try:
            self._check_room(producers, size)
            where = (told.producer, told.epoch, told.sequence, told.at)
            fresh = producers.staged(*where, count, size, staging.log.end, self._stream.now())
        except RailgunError as error:
            answer(error)
            return
        if not fresh:
            staging.when_all_safe(lambda error: answer(error or stored))
            return
        for batch in batches:
            mark(batch, STAGED, told.producer, told.sequence)
        life = self._life

        def done(outcome: Stored | RailgunError) -> None:
            if isinstance(outcome, Stored):
                answer(stored)
                return
            if life == self._life:
                producers.not_staged(told.producer, told.sequence, told.at, size)
            answer(outcome)

        staging.publish(batches, done)

    def _check_room(self, producers: Producers, size: int) -> None:
        most, used = self._stream.settings.max_staged, producers.staged_size
        if used + size > most:
            some = [one for one in producers.by_name.values() if one.staged]
            largest = max(some, key=_staged_bytes, default=None)
            named = (
                "nobody"
                if largest is None
                else f"{len(some)} producers, most of it by {largest.name!r} ({_staged_bytes(largest):,})"
            )
            raise StagingFullError(
                f"{used:,} bytes are staged for {self._stream.name!r} by {named}, and {size:,} more would exceed its "
                f"max_staged, {most:,}. Commit more often (snapshots, micro-batches), allow more (railgun stream "
                "ensure --mode overwrite --max-staged N), or forget producers that are gone for good (the calls "
                "producers and forget_producer)"
            )

    async def commit(
        self, name: str, epoch: int, counts: Mapping[int, int], labels: range | None = None
    ) -> tuple[int, int | None]:
        """Commit sequences, each of so many messages; how many became part of the stream now, and from where on.

        Of what was committed before, that is known of the last commit only. `labels`: that are committed with them.
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
            self._let_go_soon()
            return 0, producers.base_of(name, counts)
        producer = producers.by_name[name]
        first = min(producer.staged[one].first for one in intent.sequences)
        find = partial(_find_ranges, staging, producer.number, intent.sequences, first)
        try:
            ranges = await stream.loop.run_in_executor(None, find)
            _check_whole(producer, intent, ranges)
        except RailgunError:
            if life == self._life:
                producers.abandoned(name, intent.number)
            raise
        await self._keep(name)
        self._check_life(life)  # whoever reads the notes anew has to find the unit
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
        """Drop what a producer has staged for some sequences, for good, behind a commit of it."""
        async with _turn(self._turns, name):
            producers = await self._ready()
            with self._holding(producers):
                producers.drop(name, epoch, sequences, self._stream.now())
                await self._keep(name)
        self._let_go_soon()

    def _check_life(self, life: int) -> None:
        if life != self._life:
            raise NoMasterError(f"the master of {self._stream.name!r} has changed: try again")

    async def _note_done(self, name: str, intent: Intent, life: int) -> None:
        """Write that a commit is done, and let go of what is not needed any more."""
        with contextlib.suppress(RailgunError):  # it is found out when all is read anew
            await self._keep(name)
            if life != self._life or self._producers is None or self._staging is None:
                return
            self._noting.remove(intent)
            self._let_go_soon()

    def _let_go_soon(self) -> None:
        """Purge what is not needed any more, if it is much or all there is."""
        if self._letting_go is None and self._wants_purge():
            self._letting_go = self._stream.loop.create_task(self._let_go(self._life))
            self._letting_go.add_done_callback(self._has_let_go)

    def _has_let_go(self, task: asyncio.Task[None]) -> None:
        self._letting_go = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("the staging log of %r cannot be purged", self._stream.name, exc_info=error)

    def _wants_purge(self) -> bool:
        producers, staging = self._producers, self._staging
        if producers is None or staging is None:
            return False
        if not producers.staged_size:
            return staging.log.first < self._needed_from()
        return self._unneeded_bytes() > LET_GO_BYTES + self._left

    def _unneeded_bytes(self) -> int:
        """Return how much of the staging log is not needed any more."""
        producers, staging = self._producers, self._staging
        assert producers is not None
        assert staging is not None
        return max(0, staging.log.size - producers.staged_size)

    def _needed_from(self) -> int:
        """Return from where on something in the staging log is needed, or was before a note that is not safe yet."""
        producers, staging = self._producers, self._staging
        assert producers is not None
        assert staging is not None
        return min([producers.staged_from(staging.end), staging.end, *self._held.values()])

    async def _let_go(self, life: int) -> None:
        """Purge what is not needed any more; move what holds back much of it to the end of the staging log."""
        staging = self._staging
        if staging is None:
            return
        with contextlib.suppress(RailgunError):  # it is tried again with what is let go of next
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
        """Return whether what is not needed, and cannot be purged, is much, also beside what is needed."""
        producers = self._producers
        if producers is None:
            return False
        return self._unneeded_bytes() > max(LET_GO_BYTES, producers.staged_size)

    async def _move(self, life: int, end: int) -> bool:
        """Copy what is staged first to the end of the staging log; return False if nothing is staged before `end`.

        Copied is some of what the same producer has staged before `end`, each sequence as a unit. If that fails, or is
        not safe when the node ends, all stays as it is.
        """
        producers = self._producers
        first = None if producers is None else producers.first_staged()
        if producers is None or first is None or first.offset >= end:
            return False
        async with _turn(self._turns, first.name):  # no commit of it is under way then
            self._check_life(life)
            producer, staging = producers.by_name.get(first.name), self._staging
            assert staging is not None
            if producer is None:  # it was forgotten meanwhile
                return True
            old = sorted(
                (staged.first, sequence, staged.count, staged.size)
                for sequence, staged in producer.staged.items()
                if staged.first < end
            )
            if not old:  # it was dropped meanwhile
                return True
            sizes = itertools.accumulate(size for *_, size in old)
            some = [one for one, size in zip(old, sizes, strict=True) if size <= MOVED_BYTES]
            some = some or old[:1]
            found: dict[int, _Ranges] = {sequence: [] for _, sequence, *_ in some}
            # What was accepted, and is not on disk yet, lies behind that, and is looked for when it is copied.
            known = staging.log.durable_end
            begin = max(some[0][0], staging.log.first)
            where = partial(_add_ranges, staging, producer.number, found, begin, known)
            messages = sum(count for _, _, count, _ in some)
            await self._stream.loop.run_in_executor(None, where, messages)
            bases: dict[int, int] = {}
            copy = partial(_copy_forward, staging, producer.number, found, known, bases)
            _, copied_end = await staging.write_unit(copy)
            await _until_safe(staging, copied_end)
            self._check_life(life)
            for sequence, base in bases.items():
                producers.moved(producer.number, sequence, base)
        return bool(bases)

    @contextlib.contextmanager
    def _holding(self, producers: Producers) -> Iterator[None]:
        """Keep all that is staged now until a note is safe by which some of it is dropped."""
        staging, ticket = self._staging, object()
        if staging is not None:
            self._held[ticket] = producers.staged_from(staging.end)
        try:
            yield
        finally:
            self._held.pop(ticket, None)

    async def settle(self) -> None:
        """Wait for a while until commits that are done are noted as such: what they hold cannot be trimmed before."""
        for _ in range(SETTLES):
            if not self._noting:
                return
            await asyncio.sleep(AGAIN_S / 10)

    async def forget(self, name: str) -> bool:
        """Forget a producer, with what it has staged, behind a commit of it; whether there was one."""
        async with _turn(self._turns, name):
            return await self._forget(name, await self._ready())

    async def _forget(self, name: str, producers: Producers) -> bool:
        with self._holding(producers):
            gone = producers.forget(name)
            await self._keep(name)
        self._let_go_soon()
        return gone is not None

    async def expire(self) -> None:
        """Forget producers that were not used for longer than they live; and settle commits of before a restart."""
        producers = self._producers
        if producers is None:
            if self._since is not None:  # nothing is trimmed before
                self._load_soon()
            return
        producers.drop_stale(self._stream.now())
        for name in producers.expired(self._stream.now()):
            if name in self._turns:  # somebody uses it
                continue
            async with _turn(self._turns, name):
                producers = await self._ready()
                if name in producers.expired(self._stream.now()):  # it was not used meanwhile
                    await self._forget(name, producers)
        self._let_go_soon()

    async def describe(self) -> list[dict[str, Any]]:
        """Return what there is to know of all producers."""
        producers = await self._ready()
        return [
            {
                "name": one.name,
                "number": one.number,
                "epoch": one.epoch,
                "session": one.session,
                "committed": sum(end - first for first, end in one.committed),
                "labels": [[first, end - 1] for first, end in one.labels],
                "staged": {str(sequence): found.count for sequence, found in one.staged.items()},
                "staged_bytes": _staged_bytes(one),
            }
            for one in producers.by_name.values()
        ]


# ---------------------------------------------------------------- the logs


async def _all_safe(stream: Persistent) -> None:
    """Wait until all that was given to a stream is safe."""
    done: asyncio.Future[None] = stream.loop.create_future()
    stream.when_all_safe(partial(resolve, done))
    await done


async def _until_safe(stream: Persistent, end: int) -> None:
    """Wait until what is in a log before an offset is safe, as long as this node is the master."""
    while stream.copies is not None:
        done: asyncio.Future[None] = stream.loop.create_future()
        stream.copies.when_safe(end, partial(resolve, done))
        try:
            await done
            return
        except NotEnoughReplicasAfterAppendError:
            await asyncio.sleep(AGAIN_S)


class _StagedBatch(NamedTuple):
    """A batch in the staging log."""

    producer: int
    sequence: int
    messages: int
    size: int
    base: int
    anew: bool
    """Whether a copy of all that was staged before for its sequence begins with it."""


def _staged_batches(staging: Persistent) -> list[_StagedBatch]:
    """Return all batches that are staged."""
    found, at, end = [], staging.log.first, staging.end
    while batches := staging.log.read(at, PIECE_BYTES, end) if at < end else []:
        for batch in batches:
            header = head(batch)
            at = header.end
            if header.flags & STAGED:
                where = header.producer, header.number, header.count, header.size, header.base
                found.append(_StagedBatch(*where, bool(header.flags & ANEW)))
    return found


def _staged_bytes(producer: Producer) -> int:
    return sum(staged.size for staged in producer.staged.values())


def _find_unit(stream: Persistent, producer: int, intent: Intent) -> int | None:
    """Return where the unit of a commit begins in the log; None: it is not there."""
    at, end = max(intent.since, stream.log.first), stream.end
    begin = at
    while batches := stream.log.read(at, PIECE_BYTES, end) if at < end else []:
        for batch in batches:
            told = head(batch)
            at = told.end
            if told.flags & COMMITS and (told.producer, told.number) == (producer, intent.number):
                return begin
            if not told.flags & CONTINUES:
                begin = at
    return None


_Ranges: TypeAlias = list[tuple[int, int]]


def _find_ranges(
    staging: Persistent, producer: int, sequences: Sequence[int], first: int
) -> _Ranges:
    """Return where the batches of some sequences lie in the staging log, in the order of the sequences."""
    found: dict[int, _Ranges] = {sequence: [] for sequence in sequences}
    _add_ranges(staging, producer, found, max(first, staging.log.first), staging.end)
    return [one for sequence in sequences for one in found[sequence]]


def _add_ranges(
    staging: Persistent,
    producer: int,
    found: dict[int, _Ranges],
    at: int,
    end: int,
    most: int | None = None,
) -> None:
    """Add to `found` where the batches of its sequences lie from `at` to before `end`.

    `most`: how many messages there are at most; it does not look further when it has them.
    """
    messages = 0
    while at < end and (batches := staging.log.read(at, PIECE_BYTES, end)):
        for batch in batches:
            header = head(batch)
            at = header.end
            if header.producer != producer or header.number not in found:
                continue
            own, begin = found[header.number], header.base
            if header.flags & ANEW:
                messages -= sum(stop - start for start, stop in own)
                own.clear()
            messages += header.count
            if own and own[-1][1] == begin:
                begin = own.pop()[0]
            own.append((begin, header.end))
        if most is not None and messages >= most:
            return


def _copy_forward(
    staging: Persistent,
    producer: int,
    found: dict[int, _Ranges],
    known: int,
    bases: dict[int, int],
    stamp: Stamp,
) -> tuple[int, int]:
    """Copy what is staged for sequences to the end of the staging log; return where the copies begin and end.

    `found`: where the pieces of each lie that are before the offset `known`. `bases`: where the copy of each begins; it
    is filled in. It is called in the turn of the log's one writer: all pieces are copied that lie before the copy, also
    those that are not safe yet.
    """
    log = staging.log
    log.sync()  # what is not on disk cannot be read
    log.roll()  # else the segment that is left cannot be taken away
    begin = log.end
    _add_ranges(staging, producer, found, known, begin)
    try:
        for sequence, ranges in found.items():
            flags, last = STAGED | ANEW, None
            bases[sequence] = log.end
            for at, range_end in ranges:
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
    there = sum(end - begin for begin, end in ranges)
    if there != wanted:
        raise LostOutputError(
            f"producer {producer.name!r}: of {wanted:,} messages that were staged for a commit {there:,} are left in "
            "the staging log: the rest is lost"
        )


def _copy_unit(
    stream: Persistent,
    staging: Persistent,
    producer: int,
    commit: int,
    ranges: Sequence[tuple[int, int]],
    stamp: Stamp,
) -> tuple[int, int]:
    """Append ranges of the staging log to the log of a stream, as one unit; return where it begins and ends.

    It is called in the turn of the log's one writer.
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
