"""The log of one persistent stream: batches in one order, for good.

Rules:

1. One total order. A batch is taken only if it begins with the next offset, is not stored before the last one, and is
   of no older epoch; so offsets are contiguous and never used twice, and stored time never steps back.
2. What `sync` has returned for is there after a power cut. Readers see nothing else: `read` ends at `durable_end`.
3. Several batches go to disk in one write, and one segment. A segment that would grow too large is synced, and only
   then the next one is made; its name is for good before anything is written to it. So only the last segment can be
   torn.
4. `open` scans the last segment. What is torn at its end is cut off; what was there for good and is not good any more
   is damage: nothing is changed, what lies before it can be read, and nothing is appended. Which of both it is, marks
   tell (`railgun.broker.log.tail`). The other segments are believed by their index, until they are read. Damage is also
   that messages are missing which must have been there: the index of a segment is made when it has a successor, and
   what was purged was there (rule 9). What others know of is told by them (`miss`).
5. Every batch is checked when it is read. Damage that is found then has the same consequences. A batch of a later
   version of Railgun is neither torn nor damaged: the log is not opened, or not read from there on
   (`LaterFormatError`), and nothing is changed. The same for an end that looks torn and begins with a later version.
6. A failed sync ends the log; a full disk does not. See `railgun.broker.log.tail`.
7. Retention takes whole segments away, oldest first, each for good before the next, and never the last one: a hole
   cannot come about by a crash, and an offset that was used is never forgotten.
8. One writer at a time (`append`, `sync`, `roll`, `trim`, `retain`, `purge`, `cut`, `reset`, `repair`, `close`; the
   committer sees to it). Readers come from any thread. No read copies a message: what is given are views of what the
   system has read. What was read while the log was cut, is read again: nobody gets batches of two pasts.
9. `purge` takes away all before an offset. The name of an empty file says so for good, before anything is removed;
   then the segments go that lie wholly before it. The rest of such messages stays on disk, and is not read.
10. `runs` and `epoch_at` tell which epoch has written what: by the segments, which know it by their index. What is
   trimmed is forgotten, but for the epoch of the last batch before the first one, until the log is opened again.
11. `cut`, `reset` and `repair` take something away from the end: see `railgun.broker.log.surgery`.
12. A unit of batches (`transport.records`) lies in one segment, as large as that may become. `whole_end` is the durable
    end without a unit that is not whole: what the master of a stream has not finished, or a replica has not got yet. A
    unit that is not whole when the log is opened is cut off like torn bytes: it was never acknowledged.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from railgun.broker.errors import (
    BeyondEndError,
    ClosedError,
    DamagedLogError,
    OrderError,
    StorageError,
    TrimmedError,
    damaged,
    later_format,
    refusal,
    storage_error,
)
from railgun.broker.log import surgery
from railgun.broker.log.disk import Disk, File
from railgun.broker.log.recovery import Recovery, recover
from railgun.broker.log.segment import (
    LONG_AGO,
    Index,
    Run,
    Segment,
    Walk,
    extend,
    floor_name,
    floor_of,
    fresh,
    index_name,
    load_index,
    log_name,
    save_index,
    scan,
)
from railgun.broker.log.tail import Tail
from railgun.transport.records import CONTINUES, Bytes, LaterBatchError, head, patch

_OPEN_FILES: Final = 16
_HINTS: Final = 256
MIN_SEGMENT_BYTES: Final = 4096
_PIECES: Final = 8  # of the bytes that are kept at most, each in a segment of its own
_SHARE: Final = 4  # a segment spans at most this part of the time that messages are kept


@dataclass(frozen=True, slots=True)
class LogConfig:
    """How a log lies on disk."""

    segment_bytes: int = 64 << 20
    index_bytes: int = 64 << 10


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a read begins."""

    segment: Segment
    file: File
    known: int
    position: int
    want: int
    limit: int
    changes: int


class StreamLog:
    """See the rules of the module. Made by `open`.

    >>> import tempfile
    >>> from railgun.broker.log.disk import NodeDisk
    >>> from railgun.transport.records import Records, build
    >>> log, found = StreamLog.open(NodeDisk(tempfile.mkdtemp()), "orders")
    >>> batch = build([b"hello", b"world"])
    >>> log.stamp([batch], epoch=1, now=1_000)
    2
    >>> log.append([batch])
    2
    >>> log.sync()
    2
    >>> [Records(read).payloads() for read in log.read(0)]
    [[b'hello', b'world']]
    >>> log.close()
    """

    def __init__(self, disk: Disk, directory: str, config: LogConfig) -> None:
        self.directory = directory
        self.config = config
        self.roll_bytes = config.segment_bytes
        """A segment that would become larger is followed by another one."""
        self._disk = disk
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._bases: list[int] = []
        self._floor = 0  # what lies before was purged
        self._before = 0  # the epoch of the last batch before the first segment, if it is known
        self._changes = 0  # how often something was taken away that readers may have seen
        self._tail: Tail
        self._files: OrderedDict[int, File] = OrderedDict()  # of segments that are not written
        self._hints: OrderedDict[int, tuple[int, int]] = OrderedDict()  # offset: segment, byte
        self._end = 0
        self._durable_end = 0
        self._whole = 0  # the end, without a unit that is not whole
        self._durable_whole = 0
        self._last_time = LONG_AGO
        self._told_time = LONG_AGO
        self._epoch = 0
        self._damage: DamagedLogError | None = None
        self._not_rolled: StorageError | None = None  # why the next segment could not be made
        self._closed = False

    # ------------------------------------------------------------ what there is

    @property
    def first(self) -> int:
        """The first offset that is kept."""
        return max(self._bases[0], self._floor)

    @property
    def end(self) -> int:
        """The offset of the next message."""
        return self._end if self._damage is None else min(self._end, self._damage.offset)

    @property
    def durable_end(self) -> int:
        """All offsets below are there for good."""
        if self._damage is None:
            return self._durable_end
        return min(self._durable_end, self._damage.offset)

    @property
    def whole_end(self) -> int:
        """Return the durable end, or where the last unit begins if that is not whole yet."""
        return min(self._durable_whole, self.durable_end)

    @property
    def last_time(self) -> int:
        """When the last batch was stored; far in the past if there is none."""
        return self._last_time

    @property
    def last_epoch(self) -> int:
        """The epoch of the last batch."""
        return self._epoch

    @property
    def runs(self) -> tuple[Run, ...]:
        """The epochs of all batches that are kept, in order, each with the offset after the last batch of it."""
        with self._lock:
            first, end = self.first, self.end
            runs: list[Run] = []
            for segment in self._segments:
                for epoch, until in segment.runs:
                    if until > first and (not runs or runs[-1][1] < end):
                        extend(runs, epoch, min(until, end))
            return tuple(runs)

    def epoch_at(self, offset: int) -> int:
        """The epoch of the batch that holds this offset; 0 if that is not known any more.

        Of what was trimmed, that is known of the last batch before those that are there, until the log is opened anew.
        """
        with self._lock:
            if offset >= self.end:
                raise BeyondEndError(
                    f"stream {self.directory!r} ends at {self.end}; no batch holds offset {offset} yet",
                    self.end,
                )
            if offset < self._bases[0]:
                return self._before if offset == self._bases[0] - 1 else 0
            runs = self._segments[bisect_right(self._bases, offset) - 1].runs
            return runs[bisect_right(runs, offset, key=lambda run: run[1])][0]

    @property
    def damage(self) -> DamagedLogError | None:
        """What is damaged, if anything is."""
        return self._damage

    @property
    def failed(self) -> StorageError | None:
        """Why it takes no more, if so: damage, or a failed write or sync."""
        return self._damage or self._tail.failed

    @property
    def refused(self) -> StorageError | None:
        """Why the last write was refused, while it is not known that writing works again."""
        return self._not_rolled or self._tail.refused

    def probe(self) -> None:
        """Find out whether what was refused can be written now; raise as `append` would, if not."""
        self._check()
        if self._not_rolled is not None:
            self.roll()
        self._tail.probe()

    def has_file(self) -> bool:
        """Return whether the file that is written to is still there, and not cut off. Any thread may ask."""
        return self._closed or self._damage is not None or self._tail.is_there()

    def check_files(self) -> None:
        """Take nothing more if somebody has moved, replaced, removed or cut off the file: `LogFailedError`."""
        self._check()
        self._tail.check_file()

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        with self._lock:
            return sum(segment.size for segment in self._segments)

    def next_time(self, now: int) -> int:
        """The time to store with the next batch: now, but not before any that was told or stored."""
        with self._lock:
            self._told_time = max(now, self._last_time, self._told_time)
            return self._told_time

    # ------------------------------------------------------------ writing

    def stamp(
        self,
        batches: Sequence[bytearray | memoryview],
        epoch: int,
        now: int,
        base: int | None = None,
    ) -> int:
        """Write offsets from `base` on (the end of the log), epoch and time into batches; the offset after them."""
        following, time = self._end if base is None else base, self.next_time(now)
        for batch in batches:
            count = head(batch).count
            patch(batch, following, epoch, time)
            following += count
        return following

    def append(self, batches: Sequence[Bytes], cold: bool = False) -> int:
        """Write batches that follow the last one: all of them or none. They are not for good before `sync`.

        `cold`: nobody will soon read them.
        """
        self._check()
        following, time, epoch = self._end, self._last_time, self._epoch
        total, placed, whole = 0, [], self._whole
        for batch in batches:
            found = head(batch)
            if found.base != following or found.time < time or found.epoch < epoch:
                raise OrderError(
                    f"stream {self.directory!r}: a batch of offset {found.base}, time {found.time}, epoch "
                    f"{found.epoch} cannot follow: offset {following}, time {time}, epoch {epoch} or later is due"
                )
            if found.size != len(batch):
                raise OrderError(
                    f"stream {self.directory!r}: the batch of offset {found.base} has {found.size} bytes, "
                    f"{len(batch)} were given: give batches one by one"
                )
            placed.append((found, total))
            following, time, epoch = found.end, found.time, found.epoch
            total += found.size
            if not found.flags & CONTINUES:
                whole = following
        if not placed:
            return self._end
        if self._tail.size and self._tail.size + total > self.roll_bytes:
            self.roll()
        begin = self._tail.append(batches, self._end, cold)
        with self._lock:
            segment = self._segments[-1]
            assert segment.index is not None
            if segment.empty:
                segment.first_time = placed[0][0].time
            for found, at in placed:
                segment.index.add(found.base, begin + at, found.time)
                extend(segment.runs, found.epoch, found.end)
            segment.size, segment.end, segment.last_time = self._tail.size, following, time
            self._end, self._last_time, self._epoch = following, time, epoch
            self._whole = whole
        return following

    def sync(self) -> int:
        """Let all that was appended be there for good; the durable end."""
        self._check()
        end, whole = self._end, self._whole
        self._tail.sync()
        self._durable_end, self._durable_whole = end, whole
        return end

    def roll(self) -> None:
        """Go on in a new segment, so that retention can take the present one; not within a unit."""
        self._check()
        before = self._segments[-1]
        if before.empty or before.index is None or self._whole < self._end:
            return
        index = before.index
        self.sync()
        path = self._path(log_name(self._end))
        try:
            file = self._disk.create(path)
        except OSError as error:
            self._not_rolled = storage_error(error, f"{self._disk.where(path)} cannot be made")
            raise refusal(self._not_rolled) from self._not_rolled
        self._not_rolled = None
        try:
            self._disk.sync_directory(self.directory)
        except OSError as error:
            file.close()
            self._tail.fail("followed by another segment", error)
        with self._lock:
            self._files[before.base] = self._tail.file
            self._tail = Tail(file, self._what(path), 0)
            self._add(fresh(self._end, self.config.index_bytes))
        save_index(self._disk, self.directory, before, index)
        with self._lock:
            self._shrink()

    def close(self) -> None:
        """Sync, and leave the files."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._damage is not None:
                self._tail.file.close()
            else:
                self._tail.close(self._end)
        finally:
            with self._lock:
                for file in self._files.values():
                    file.close()
                self._files.clear()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the log of stream {self.directory!r} is closed")
        if self._damage is not None:
            raise DamagedLogError(str(self._damage), self._damage.offset)
        self._tail.check()

    # ------------------------------------------------------------ reading

    def read(
        self, offset: int, most_bytes: int = 1 << 20, end: int | None = None
    ) -> list[memoryview]:
        """Whole batches from the one that holds the offset on, all before `end` and the durable end.

        At least one if there is one, else at most so many bytes; all of one segment, so there may be more.
        """
        while True:
            spot = self._spot(offset, most_bytes, end)
            if spot is None:
                return []
            batches = self._read(spot, offset, most_bytes)
            if batches is not None:
                return batches

    def _spot(self, offset: int, most_bytes: int, end: int | None) -> _Spot | None:
        """Where to read; None if there is nothing yet."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"the log of stream {self.directory!r} is closed")
            if offset < self.first:
                raise TrimmedError(
                    f"stream {self.directory!r} keeps offset {self.first} and later; {offset} is gone. "
                    f"Go on from {self.first}.",
                    self.first,
                )
            if self._damage is not None and offset >= self._damage.offset:
                raise DamagedLogError(str(self._damage), self._damage.offset)
            if offset > self._end:
                raise BeyondEndError(
                    f"stream {self.directory!r} ends at {self._end}; there is no offset {offset} yet",
                    self._end,
                )
            limit = self.durable_end if end is None else min(self.durable_end, end)
            if offset >= limit:
                return None
            segment = self._segments[bisect_right(self._bases, offset) - 1]
            file = self._file(segment)
            hint = self._hints.pop(offset, None)
            if hint is not None and hint[0] == segment.base:
                known, position, want = offset, hint[1], most_bytes
            else:
                known, position = self._index(segment, file).find(offset)
                want = most_bytes + self.config.index_bytes
            return _Spot(segment, file, known, position, want, limit, self._changes)

    def _read(self, spot: _Spot, offset: int, most_bytes: int) -> list[memoryview] | None:
        """Whole batches from there on; None if the log has changed meanwhile, and they may be of no log."""
        known, position, want, limit = spot.known, spot.position, spot.want, spot.limit
        batches: list[memoryview] = []
        room = most_bytes
        while True:
            try:
                data = spot.file.read(position, want)
            except OSError as error:
                if self._left(spot):
                    return None
                raise StorageError(
                    f"{self._what(self._path(log_name(spot.segment.base)))} cannot be read: "
                    f"{error.strerror or error}"
                ) from error
            walk = Walk(data, position, known)
            following, byte, done = known, position, False
            later: LaterBatchError | None = None
            try:
                for begin, found, batch in walk:
                    if found.end > offset:
                        done = found.end > limit or (bool(batches) and found.size > room)
                        if done:
                            break
                        batches.append(batch)
                        room -= found.size
                    following, byte = found.end, begin + found.size
                    done = following >= limit or room <= 0
                    if done:
                        break
            except LaterBatchError as error:
                later = error
            with self._lock:
                if self._changes != spot.changes:
                    return None
                if batches:
                    self._hints[following] = (spot.segment.base, byte)
                    while len(self._hints) > _HINTS:
                        self._hints.popitem(last=False)
            if batches or done:
                return batches
            if later is not None:
                path = self._path(log_name(spot.segment.base))
                raise later_format(self._what(path), later) from later
            problem = walk.problem or ("the end of the file" if len(data) < want else "")
            if problem:
                with self._lock:
                    if self._changes != spot.changes:
                        return None
                    base = spot.segment.base
                    raise self._note_damage(base, walk.offset, walk.position, problem)
            known, position = walk.offset, walk.position
            want = max(walk.need, most_bytes)

    def _left(self, spot: _Spot) -> bool:
        """Whether that file was closed by who had a reason to; then it is found again, or an error says the reason."""
        with self._lock:
            there = spot.file in (self._tail.file, self._files.get(spot.segment.base))
            return self._changes != spot.changes or not there

    def batches_since(
        self, time: int, first: int = 0, end: int | None = None
    ) -> Iterator[memoryview]:
        """All batches that were stored at that time or later, in order; from `first` on, and before `end`."""
        with self._lock:
            start = self._end
            for segment in self._segments:
                if not segment.empty and segment.last_time >= time and segment.end > first:
                    start = max(self.first, self._index(segment, self._file(segment)).before(time))
                    break
            start = max(start, first)
        while batches := self.read(start, 4 << 20, end):
            for batch in batches:
                found = head(batch)
                start = found.end
                if found.time >= time:
                    yield batch

    def _file(self, segment: Segment) -> File:
        if segment is self._segments[-1]:
            return self._tail.file
        file = self._files.get(segment.base)
        if file is None:
            path = self._path(log_name(segment.base))
            try:
                file = self._disk.open(path)
            except OSError as error:
                raise StorageError(
                    f"{self._what(path)} cannot be opened: {error.strerror or error}"
                ) from error
            self._files[segment.base] = file
            self._shrink(keep=segment.base)
        self._files.move_to_end(segment.base)
        return file

    def _index(self, segment: Segment, file: File) -> Index:
        if segment.index is None:
            every = self.config.index_bytes
            told = load_index(self._disk, self.directory, segment.base, segment.size, every)
            try:
                found = told or scan(file, segment.base, every).segment
            except LaterBatchError as error:
                what = self._what(self._path(log_name(segment.base)))
                raise later_format(what, error) from error
            segment.index = found.index or Index(every)
            if not segment.index.offsets:  # damaged from its first byte on: the reader will see
                segment.index.add(segment.base, 0, segment.first_time)
        return segment.index

    def _shrink(self, keep: int = -1) -> None:
        """Only some segments have an open file and an index in memory."""
        while len(self._files) > _OPEN_FILES:
            base, file = self._files.popitem(last=False)
            assert base != keep
            file.close()
            at = bisect_right(self._bases, base) - 1
            if at >= 0 and self._bases[at] == base:
                self._segments[at].index = None

    def _note_damage(self, base: int, offset: int, position: int, problem: str) -> DamagedLogError:
        """Remember damage, which is given back; the lock is held."""
        found = damaged(self._what(self._path(log_name(base))), offset, position, problem)
        if self._damage is None or offset < self._damage.offset:
            self._damage = found
        return found

    # ------------------------------------------------------------ retention

    def trim(
        self,
        max_age: int | None,
        max_bytes: int | None,
        now: int,
        limit: int | None = None,
        ahead: int | None = None,
    ) -> int:
        """Take away whole segments that are older or more than that; the first offset that is kept then.

        A segment is as old as its last batch; one that was stored later than `now`, by a clock that was wrong, is as
        old as `ahead` (the present stored time) says. What is left has at most `max_bytes`, unless the last one alone
        has more, or what lies from `limit` on. A segment that is larger than `max_bytes` (which was lowered) stays
        until half of that lies behind it: messages are not taken away before there are others to keep.
        Segments that were purged go, too.
        """
        if self._closed or self._damage is not None:
            self._check()
        while True:
            with self._lock:
                oldest = self._segments[0]
                at = now if ahead is None or oldest.last_time <= now else ahead
                too_old = max_age is not None and oldest.last_time < at - max_age
                rest = sum(segment.size for segment in self._segments[1:])
                too_much = max_bytes is not None and rest + oldest.size > max_bytes
                if too_much and max_bytes is not None and oldest.size > max_bytes:
                    too_much = rest >= max_bytes // 2  # else hardly anything would be left
                purged = oldest.end <= self._floor
                kept = limit is not None and oldest.end > limit
                if len(self._segments) == 1 or kept or not (too_old or too_much or purged):
                    return self.first
                del self._segments[0], self._bases[0]
                before, self._before = self._before, oldest.epoch
                file = self._files.pop(oldest.base, None)
            path = self._path(log_name(oldest.base))
            try:
                self._disk.remove(path)
                self._disk.sync_directory(self.directory)
                self._disk.remove(self._path(index_name(oldest.base)))
            except OSError as error:
                with self._lock:  # or the next one would leave a hole
                    self._segments.insert(0, oldest)
                    self._bases.insert(0, oldest.base)
                    self._before = before
                raise StorageError(
                    f"{self._what(path)} cannot be removed: {error.strerror or error}. It stays the first one."
                ) from error
            finally:
                if file is not None:
                    file.close()

    def retain(
        self,
        max_age: int | None,
        max_bytes: int | None,
        now: int,
        limit: int | None = None,
        ahead: int | None = None,
    ) -> int:
        """As `trim`, but a last segment that never fills keeps nothing alive: it is followed by another in time.

        What is older than `max_age` is gone when it is a quarter older than that. Of more than `max_bytes`, at most an
        eighth of it goes too many (`limit_bytes`).
        """
        last = self._segments[-1]
        self.limit_bytes(max_bytes)
        if max_bytes is not None and last.size >= self.roll_bytes:
            self.roll()
            last = self._segments[-1]
        at = now if ahead is None else max(now, ahead)
        if max_age is not None and not last.empty and last.first_time < at - max_age // _SHARE:
            self.roll()
        return self.trim(max_age, max_bytes, now, limit, ahead)

    def limit_bytes(self, max_bytes: int | None) -> None:
        """Let segments be small enough for retention to keep about this many bytes (None: any number)."""
        most = self.config.segment_bytes
        if max_bytes is not None:
            most = min(most, max(MIN_SEGMENT_BYTES, max_bytes // _PIECES))
        self.roll_bytes = most

    def purge(self, before: int) -> int:
        """Take away all before this offset, for good when it returns; the first offset that is kept then."""
        self._check()
        if before > self._durable_end:
            raise BeyondEndError(
                f"stream {self.directory!r} ends at {self._durable_end}: there is nothing before {before} to take away",
                self._durable_end,
            )
        if before > self.first:
            if before == self._end:
                self.roll()
            self._set_floor(before)
        self.trim(None, None, 0)
        self._tidy_floors()
        return self.first

    def _set_floor(self, first: int) -> None:
        path = self._path(floor_name(first))
        try:
            self._disk.create(path).close()
            self._disk.sync_directory(self.directory)
        except OSError as error:
            raise storage_error(error, f"{self._what(path)} cannot be made") from error
        with self._lock:
            self._floor = first

    def _tidy_floors(self) -> None:
        """Only the highest one says something, and only while a segment lies before it."""
        for name in self._disk.list(self.directory):
            told = floor_of(name)
            if told is not None and (told < self._floor or told <= self._bases[0]):
                with contextlib.suppress(OSError):
                    self._disk.remove(self._path(name))

    def miss(self, end: int, witness: str, remedy: str) -> DamagedLogError | None:
        """Note that messages before the offset `end` were here, as the `witness` says: if they are not, that is damage.

        `remedy`: what to do, beside restoring the files. Return the damage, None if nothing is missing.
        """
        with self._lock:
            if self._damage is not None or self._end >= end:
                return None
            self._damage = DamagedLogError(
                f"{self._what(self._path(log_name(self._bases[-1])))} ends at offset {self._end}, and {witness} "
                f"says that there were messages up to {end}: those from {self._end} on are missing, as if somebody "
                f"had cut off, replaced or removed files of it. Nothing was changed. All before offset {self._end} "
                f"can be read; nothing is appended. Restore the files. {remedy}",
                self._end,
            )
            return self._damage

    # ------------------------------------------------------------ surgery

    def undo(self, offset: int) -> None:
        """Cut off what was appended from this offset on, and never acknowledged; if that fails, the log has failed."""
        if self._end <= offset:
            return
        try:
            self.cut(offset)
        except StorageError as error:
            self._tail.give_up(f"cut off at offset {offset}", error)

    def cut(self, offset: int) -> int:
        """Forget all from this offset on, for good when it returns; how many messages that were.

        It has to be where a batch begins, or the end. What is cut off is kept in a file beside the log, for people.
        """
        return surgery.cut(self, offset)

    def reset(self, base: int) -> None:
        """Drop all, damaged or not, and begin anew with this offset, for good when it returns."""
        surgery.reset(self, base)

    def repair(self) -> int:
        """Set all from the damage on aside, and go on before it; how many bytes are set aside, 0 without damage."""
        return surgery.repair(self)

    # ------------------------------------------------------------ opening

    @classmethod
    def open(
        cls, disk: Disk, directory: str, config: LogConfig | None = None, known: bool = False
    ) -> tuple[StreamLog, Recovery]:
        """The log in a directory, and what recovery has found.

        If there is none, it is made; unless it is `known` to have been there: then that is a `DamagedLogError`.
        """
        log = cls(disk, directory, config or LogConfig())
        try:
            return log, recover(log, known)
        except LaterBatchError as error:
            raise later_format(f"the log in {disk.where(directory)}", error) from error
        except OSError as error:
            what = f"the log in {disk.where(directory)} cannot be opened"
            raise storage_error(error, what) from error

    def _add(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._bases.append(segment.base)

    def _path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def _what(self, path: str) -> str:
        return f"the log of stream {self.directory!r} ({self._disk.where(path)})"
