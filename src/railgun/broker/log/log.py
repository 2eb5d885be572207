"""The log of one persistent stream: its batches on disk, in one total order.

Rules:

1. One total order. A batch is accepted only if it begins with the next offset, is not stored before the last batch, and
   is of no older epoch. So offsets are contiguous and never used twice, and stored time never steps back.
2. Batches for which `sync` has returned survive a power cut. Readers see nothing else: `read` ends at `durable_end`.
3. Several batches go to disk in one write, and into one segment. A segment that would grow too large is synced before
   the next segment is made, and the name of the next one is durable before anything is written to it. So only the last
   segment can be torn.
4. `open` scans the last segment. A torn end is cut off. Bytes that were synced and are bad now are damage: no file is
   changed, messages before the damage can be read, and nothing is appended. Marks tell the two apart
   (`railgun.broker.log.tail`). The other segments are trusted by their index until they are read. Missing messages
   that must have been there are damage too: a segment gets an index file only when it has a successor, and purged
   messages were there (rule 9). `note_missing` reports messages that other parts of the node know of.
5. Every batch is checked when it is read. Damage that is found then has the same consequences. A batch of a later
   version of Railgun is neither torn nor damaged: the log is not opened, or not read from there on
   (`LaterFormatError`), and no file is changed. The same goes for an end that looks torn and begins with a later
   version.
6. A failed sync ends the log; a full disk does not. See `railgun.broker.log.tail`.
7. Retention removes whole segments, oldest first, never the last one; each removal is durable before the next begins.
   So a crash cannot leave a hole, and an offset that was used is never forgotten.
8. One writer at a time (`append`, `sync`, `roll`, `trim`, `retain`, `purge`, `cut`, `reset`, `repair`, `close`; the
   committer sees to it). Readers may be in any thread. No read copies a message: the results are views of the bytes
   that the system has read. A read that was overtaken by a cut is repeated: no reader gets batches of two histories.
9. `purge` removes all messages before an offset. The name of an empty file records the offset durably before anything
   is removed; then the segments go that lie wholly before it. The rest of the purged messages stays on disk, unread.
10. `runs` and `epoch_at` tell which epoch has written which offsets: segments know it from their indexes. Trimmed
   epochs are forgotten, except that of the last batch before the first segment, until the log is opened again.
11. `cut`, `reset` and `repair` take messages away from the end: see `railgun.broker.log.truncation`.
12. A unit of batches (`transport.records`) lies in one segment, however large that becomes. `whole_end` is the durable
    end without a unit that is not whole: one that the master of the stream has not finished, or that a replica has not
    received completely. When the log is opened, such a unit is cut off like torn bytes: it was never acknowledged.
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
from railgun.broker.log import truncation
from railgun.broker.log.disk import Disk, File
from railgun.broker.log.recovery import Recovery, recover
from railgun.broker.log.segment import (
    LONG_AGO,
    Index,
    Run,
    Segment,
    Walk,
    empty_segment,
    extend_runs,
    floor_name,
    floor_of,
    index_name,
    load_index,
    log_name,
    save_index,
    scan,
)
from railgun.broker.log.tail import Tail
from railgun.transport.records import CONTINUES, Bytes, LaterBatchError, head, patch

_MAX_OPEN_FILES: Final = 16
_MAX_HINTS: Final = 256
MIN_SEGMENT_BYTES: Final = 4096
_SEGMENTS_PER_MAX_BYTES: Final = 8  # so retention by size removes an eighth too much at most
_SEGMENTS_PER_MAX_AGE: Final = 4  # so retention by age keeps messages a quarter too long at most


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Sizes of the files of a log: of a segment, and how many bytes of it one entry of the index covers."""

    segment_bytes: int = 64 << 20
    index_bytes: int = 64 << 10


@dataclass(frozen=True, slots=True)
class _ReadStart:
    """The place in a segment where a read begins."""

    segment: Segment
    file: File
    offset: int  # of the batch at `position`
    position: int
    want: int  # bytes to read at first
    limit: int  # readers see no offset from here on
    changes: int  # the log's count of changes at that time


class StreamLog:
    """The log of one stream: see the rules of the module. Made by `open`.

    >>> import tempfile
    >>> from railgun.broker.log.disk import NodeDisk
    >>> from railgun.transport.records import Records, build
    >>> log, recovery = StreamLog.open(NodeDisk(tempfile.mkdtemp()), "orders")
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
        """A segment that would become larger is followed by a new one."""
        self._disk = disk
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._bases: list[int] = []
        self._floor = 0  # offsets below this were purged
        self._before = 0  # epoch of the last batch before the first segment; 0: not known
        self._changes = 0  # how often messages were taken away that readers may have seen
        self._tail: Tail
        self._files: OrderedDict[int, File] = OrderedDict()  # of finished segments, by base
        self._hints: OrderedDict[int, tuple[int, int]] = OrderedDict()  # offset: segment, byte
        self._end = 0
        self._durable_end = 0
        self._whole = 0  # the end, without a unit that is not whole
        self._durable_whole = 0
        self._last_time = LONG_AGO
        self._given_time = LONG_AGO  # the last result of `next_time`
        self._epoch = 0
        self._damage: DamagedLogError | None = None
        self._roll_error: StorageError | None = None  # why the next segment could not be made
        self._closed = False

    # ------------------------------------------------------------ state

    @property
    def first(self) -> int:
        """Return the first offset that is kept."""
        return max(self._bases[0], self._floor)

    @property
    def end(self) -> int:
        """Return the offset of the next message."""
        return self._end if self._damage is None else min(self._end, self._damage.offset)

    @property
    def durable_end(self) -> int:
        """Return the end of the synced messages: all offsets below it survive a power cut."""
        if self._damage is None:
            return self._durable_end
        return min(self._durable_end, self._damage.offset)

    @property
    def whole_end(self) -> int:
        """Return the durable end, or where the last unit begins if that is not whole yet."""
        return min(self._durable_whole, self.durable_end)

    @property
    def last_time(self) -> int:
        """Return when the last batch was stored (µs); far in the past if there is none."""
        return self._last_time

    @property
    def last_epoch(self) -> int:
        """Return the epoch of the last batch."""
        return self._epoch

    @property
    def runs(self) -> tuple[Run, ...]:
        """Return the epochs of all kept batches, in order, each with the offset after its last batch."""
        with self._lock:
            first, end = self.first, self.end
            runs: list[Run] = []
            for segment in self._segments:
                for epoch, until in segment.runs:
                    if until > first and (not runs or runs[-1][1] < end):
                        extend_runs(runs, epoch, min(until, end))
            return tuple(runs)

    def epoch_at(self, offset: int) -> int:
        """Return the epoch of the batch that holds this offset; 0 if it is not known any more.

        Of the trimmed batches, only the epoch of the last one is known, until the log is opened again. Raise
        `BeyondEndError` for an offset that no batch holds yet.
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
        """Return the damage of the log, or None."""
        return self._damage

    @property
    def failed(self) -> StorageError | None:
        """Return why the log takes no more writes, or None: damage, or a failed write or sync."""
        return self._damage or self._tail.failed

    @property
    def refused(self) -> StorageError | None:
        """Return why the last write was refused, until writing is known to work again; or None."""
        return self._roll_error or self._tail.refused

    def probe(self) -> None:
        """Find out whether a refused write would succeed now; raise as `append` would, if not."""
        self._check()
        if self._roll_error is not None:
            self.roll()
        self._tail.probe()

    def has_file(self) -> bool:
        """Return whether the file of the last segment is still at its place and not cut off.

        May be called by any thread.
        """
        return self._closed or self._damage is not None or self._tail.is_there()

    def check_files(self) -> None:
        """Raise `LogFailedError`, now and later, if somebody has moved, replaced, removed or cut off the file."""
        self._check()
        self._tail.check_file()

    @property
    def size(self) -> int:
        """Return the size of all segments in bytes."""
        with self._lock:
            return sum(segment.size for segment in self._segments)

    def next_time(self, now: int) -> int:
        """Return the time (µs) to store with the next batch: never less than one returned or stored before."""
        with self._lock:
            self._given_time = max(now, self._last_time, self._given_time)
            return self._given_time

    # ------------------------------------------------------------ writing

    def stamp(
        self,
        batches: Sequence[bytearray | memoryview],
        epoch: int,
        now: int,
        base: int | None = None,
    ) -> int:
        """Write offsets from `base` on (default: the end of the log), epoch and time into batches.

        Return the offset after them.
        """
        following, time = self._end if base is None else base, self.next_time(now)
        for batch in batches:
            count = head(batch).count
            patch(batch, following, epoch, time)
            following += count
        return following

    def append(self, batches: Sequence[Bytes], cold: bool = False) -> int:
        """Write batches that follow the last one, all or none; return the new end. They are durable after `sync`.

        `cold`: nobody will read them soon. Raise `OrderError` if a batch does not follow.
        """
        self._check()
        following, time, epoch = self._end, self._last_time, self._epoch
        total, placed, whole = 0, [], self._whole
        for batch in batches:
            header = head(batch)
            if header.base != following or header.time < time or header.epoch < epoch:
                raise OrderError(
                    f"stream {self.directory!r}: a batch of offset {header.base}, time {header.time}, epoch "
                    f"{header.epoch} cannot follow: offset {following}, time {time}, epoch {epoch} or later is due"
                )
            if header.size != len(batch):
                raise OrderError(
                    f"stream {self.directory!r}: the batch of offset {header.base} has {header.size} bytes, "
                    f"{len(batch)} were passed: pass batches one by one"
                )
            placed.append((header, total))
            following, time, epoch = header.end, header.time, header.epoch
            total += header.size
            if not header.flags & CONTINUES:
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
            for header, at in placed:
                segment.index.add(header.base, begin + at, header.time)
                extend_runs(segment.runs, header.epoch, header.end)
            segment.size, segment.end, segment.last_time = self._tail.size, following, time
            self._end, self._last_time, self._epoch = following, time, epoch
            self._whole = whole
        return following

    def sync(self) -> int:
        """Make all appended batches durable; return the durable end."""
        self._check()
        end, whole = self._end, self._whole
        self._tail.sync()
        self._durable_end, self._durable_whole = end, whole
        return end

    def roll(self) -> None:
        """Go on in a new segment, so that retention can remove the present one; do nothing within a unit."""
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
            self._roll_error = storage_error(error, f"{self._disk.where(path)} cannot be made")
            raise refusal(self._roll_error) from self._roll_error
        self._roll_error = None
        try:
            self._disk.sync_directory(self.directory)
        except OSError as error:
            file.close()
            self._tail.fail("followed by another segment", error)
        with self._lock:
            self._files[before.base] = self._tail.file
            self._tail = Tail(file, self._what(path), 0)
            self._add(empty_segment(self._end, self.config.index_bytes))
        save_index(self._disk, self.directory, before, index)
        with self._lock:
            self._close_idle_files()

    def close(self) -> None:
        """Sync, and close the files."""
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
        self, offset: int, max_bytes: int = 1 << 20, end: int | None = None
    ) -> list[memoryview]:
        """Return whole batches from the one that holds `offset` on, all before `end` and the durable end.

        At most `max_bytes`, but at least one batch if there is one. All are of one segment, so there may be more behind
        them. Raise `TrimmedError` below `first`, `BeyondEndError` above the end, and `DamagedLogError` from a damage
        on.
        """
        while True:
            start = self._find_start(offset, max_bytes, end)
            if start is None:
                return []
            batches = self._read(start, offset, max_bytes)
            if batches is not None:
                return batches

    def _find_start(self, offset: int, max_bytes: int, end: int | None) -> _ReadStart | None:
        """Return where to read; None if there is nothing to read yet."""
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
                begin, position, want = offset, hint[1], max_bytes
            else:
                begin, position = self._index(segment, file).find(offset)
                want = max_bytes + self.config.index_bytes
            return _ReadStart(segment, file, begin, position, want, limit, self._changes)

    def _read(self, start: _ReadStart, offset: int, max_bytes: int) -> list[memoryview] | None:
        """Return whole batches from `offset` on.

        Return None if the log was cut meanwhile: the batches may be of no valid log.
        """
        begin_offset, position, want, limit = start.offset, start.position, start.want, start.limit
        batches: list[memoryview] = []
        room = max_bytes
        while True:
            try:
                data = start.file.read(position, want)
            except OSError as error:
                if self._was_closed(start):
                    return None
                raise StorageError(
                    f"{self._what(self._path(log_name(start.segment.base)))} cannot be read: "
                    f"{error.strerror or error}"
                ) from error
            walk = Walk(data, position, begin_offset)
            following, next_position, done = begin_offset, position, False
            later: LaterBatchError | None = None
            try:
                for begin, header, batch in walk:
                    if header.end > offset:
                        done = header.end > limit or (bool(batches) and header.size > room)
                        if done:
                            break
                        batches.append(batch)
                        room -= header.size
                    following, next_position = header.end, begin + header.size
                    done = following >= limit or room <= 0
                    if done:
                        break
            except LaterBatchError as error:
                later = error
            with self._lock:
                if self._changes != start.changes:
                    return None
                if batches:
                    self._hints[following] = (start.segment.base, next_position)
                    while len(self._hints) > _MAX_HINTS:
                        self._hints.popitem(last=False)
            if batches or done:
                return batches
            if later is not None:
                path = self._path(log_name(start.segment.base))
                raise later_format(self._what(path), later) from later
            problem = walk.problem or ("the end of the file" if len(data) < want else "")
            if problem:
                with self._lock:
                    if self._changes != start.changes:
                        return None
                    base = start.segment.base
                    raise self._note_damage(base, walk.offset, walk.position, problem)
            begin_offset, position = walk.offset, walk.position
            want = max(walk.need, max_bytes)

    def _was_closed(self, start: _ReadStart) -> bool:
        """Return whether another thread has closed the file on purpose.

        A new read opens it again, or raises the reason.
        """
        with self._lock:
            in_use = start.file in (self._tail.file, self._files.get(start.segment.base))
            return self._changes != start.changes or not in_use

    def batches_since(
        self, time: int, first: int = 0, end: int | None = None
    ) -> Iterator[memoryview]:
        """Yield all batches stored at `time` (µs) or later, in order, from the offset `first` on and before `end`."""
        with self._lock:
            start = self._end
            for segment in self._segments:
                if not segment.empty and segment.last_time >= time and segment.end > first:
                    start = max(self.first, self._index(segment, self._file(segment)).before(time))
                    break
            start = max(start, first)
        while batches := self.read(start, 4 << 20, end):
            for batch in batches:
                header = head(batch)
                start = header.end
                if header.time >= time:
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
            self._close_idle_files(keep=segment.base)
        self._files.move_to_end(segment.base)
        return file

    def _index(self, segment: Segment, file: File) -> Index:
        if segment.index is None:
            every = self.config.index_bytes
            loaded = load_index(self._disk, self.directory, segment.base, segment.size, every)
            try:
                indexed = loaded or scan(file, segment.base, every).segment
            except LaterBatchError as error:
                what = self._what(self._path(log_name(segment.base)))
                raise later_format(what, error) from error
            segment.index = indexed.index or Index(every)
            if not segment.index.offsets:  # damaged from its first byte on, as the reader will find
                segment.index.add(segment.base, 0, segment.first_time)
        return segment.index

    def _close_idle_files(self, keep: int = -1) -> None:
        """Close the files, and drop the indexes, of all but the segments that were read last; never those of `keep`."""
        while len(self._files) > _MAX_OPEN_FILES:
            base, file = self._files.popitem(last=False)
            assert base != keep
            file.close()
            at = bisect_right(self._bases, base) - 1
            if at >= 0 and self._bases[at] == base:
                self._segments[at].index = None

    def _note_damage(self, base: int, offset: int, position: int, problem: str) -> DamagedLogError:
        """Remember damage, and return it as an error; the caller holds the lock."""
        damage = damaged(self._what(self._path(log_name(base))), offset, position, problem)
        if self._damage is None or offset < self._damage.offset:
            self._damage = damage
        return damage

    # ------------------------------------------------------------ retention

    def trim(
        self,
        max_age: int | None,
        max_bytes: int | None,
        now: int,
        limit: int | None = None,
        ahead: int | None = None,
    ) -> int:
        """Remove whole segments that are too old (`max_age`, µs) or too much (`max_bytes`); return the first offset.

        A segment is as old as its last batch. If a wrong clock has stored it later than `now`, its age is counted from
        `ahead` (the present stored time) instead. The segments left have at most `max_bytes`, except if the last one
        alone has more, or if they hold offsets from `limit` on, which are kept. A segment larger than `max_bytes`
        (after the limit was lowered) stays until half that size lies behind it: messages are not removed before there
        are others to keep. Purged segments are removed, too.
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
                    too_much = rest >= max_bytes // 2  # otherwise hardly anything would be left
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
                with self._lock:  # keep it, because removing the next one would leave a hole
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
        """Trim, after rolling a last segment that never fills, so that it does not keep old messages alive.

        A message older than `max_age` is gone when it is a quarter older than that. Of more than `max_bytes`, at most
        an eighth of it is removed too much (`limit_bytes`).
        """
        last = self._segments[-1]
        self.limit_bytes(max_bytes)
        if max_bytes is not None and last.size >= self.roll_bytes:
            self.roll()
            last = self._segments[-1]
        at = now if ahead is None else max(now, ahead)
        if (
            max_age is not None
            and not last.empty
            and last.first_time < at - max_age // _SEGMENTS_PER_MAX_AGE
        ):
            self.roll()
        return self.trim(max_age, max_bytes, now, limit, ahead)

    def limit_bytes(self, max_bytes: int | None) -> None:
        """Make segments small enough for retention to keep about this many bytes (None: no limit)."""
        roll_bytes = self.config.segment_bytes
        if max_bytes is not None:
            roll_bytes = min(
                roll_bytes, max(MIN_SEGMENT_BYTES, max_bytes // _SEGMENTS_PER_MAX_BYTES)
            )
        self.roll_bytes = roll_bytes

    def purge(self, before: int) -> int:
        """Remove all messages before this offset, durably; return the first offset kept."""
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
        self._remove_old_floors()
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

    def _remove_old_floors(self) -> None:
        """Remove floor files except the highest, and that too once no segment lies before it."""
        for name in self._disk.list(self.directory):
            floor = floor_of(name)
            if floor is not None and (floor < self._floor or floor <= self._bases[0]):
                with contextlib.suppress(OSError):
                    self._disk.remove(self._path(name))

    def note_missing(self, end: int, witness: str, remedy: str) -> DamagedLogError | None:
        """Note damage if the log ends before `end`, up to which it once had messages, as `witness` says.

        `remedy`: what to do, beside restoring the files. Return the damage, or None if nothing is missing.
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

    # ------------------------------------------------------------ truncating

    def undo(self, offset: int) -> None:
        """Cut off messages from this offset on that were never acknowledged; if that fails, the log has failed."""
        if self._end <= offset:
            return
        try:
            self.cut(offset)
        except StorageError as error:
            self._tail.give_up(f"cut off at offset {offset}", error)

    def cut(self, offset: int) -> int:
        """Remove all messages from this offset on, durably; return how many they were.

        The offset has to be the first one of a batch, or the end. The removed batches are kept in a file beside the
        log, for people.
        """
        return truncation.cut(self, offset)

    def reset(self, base: int) -> None:
        """Drop all messages, damaged or not, and begin anew with the offset `base`, durably."""
        truncation.reset(self, base)

    def repair(self) -> int:
        """Set aside all bytes from the damage on, and go on before it; return how many bytes, 0 without damage."""
        return truncation.repair(self)

    # ------------------------------------------------------------ opening

    @classmethod
    def open(
        cls, disk: Disk, directory: str, config: LogConfig | None = None, existed: bool = False
    ) -> tuple[StreamLog, Recovery]:
        """Open the log in a directory; return it and what recovery has found.

        A log that does not exist is made; but if it `existed` before, raise `DamagedLogError`.
        """
        log = cls(disk, directory, config or LogConfig())
        try:
            return log, recover(log, existed)
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
