"""The log of one persistent stream: batches in one order, for good.

Rules:

1. One total order. A batch is taken only if it begins with the next offset, is not stored before the last one, and is
   of no older epoch; so offsets are contiguous and never used twice, and stored time never steps back.
2. What `sync` has returned for is there after a power cut. Readers see nothing else: `read` ends at `durable_end`.
3. Several batches go to disk in one write, and one segment. A segment that would grow too large is synced, and only
   then the next one is made; its name is for good before anything is written to it. So only the last segment can be
   torn.
4. `open` scans the last segment. What is torn at its end is cut off; what was there for good and is not good any
   more is damage: nothing is changed, what lies before it can be read, and nothing is appended. Which of both it is,
   marks tell (`railgun.node.tail`). The other segments are believed by their index, until they are read.
5. Every batch is checked when it is read. Damage that is found then has the same consequences.
6. A failed sync ends the log; a full disk does not. See `railgun.node.tail`.
7. Retention takes whole segments away, oldest first, each for good before the next, and never the last one: a hole
   cannot come about by a crash, and an offset that was used is never forgotten.
8. One writer at a time (`append`, `sync`, `roll`, `trim`, `retain`, `purge`, `close`; the committer sees to it).
   Readers come from any thread. No read copies a message: what is given are views of what the system has read.
9. `purge` takes away all before an offset. The name of an empty file says so for good, before anything is removed;
   then the segments go that lie wholly before it. The rest of such messages stays on disk, and is not read.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from railgun.node.disk import Disk, File
from railgun.node.errors import (
    BeyondEndError,
    ClosedError,
    DamagedLogError,
    OrderError,
    StorageError,
    TrimmedError,
    storage_error,
)
from railgun.node.segment import (
    Index,
    Segment,
    Walk,
    base_of,
    floor_name,
    floor_of,
    index_name,
    log_name,
    pack_index,
    scan,
    unpack_index,
)
from railgun.node.tail import Tail, has_mark
from railgun.wire.records import Bytes, head, patch

_OPEN_FILES: Final = 16
_HINTS: Final = 256
_LONG_AGO: Final = -(1 << 63)
_SHARE: Final = 4  # a segment spans at most this part of the time that messages are kept


@dataclass(frozen=True, slots=True)
class LogConfig:
    """How a log lies on disk."""

    segment_bytes: int = 64 << 20
    index_bytes: int = 64 << 10


@dataclass(frozen=True, slots=True)
class Recovery:
    """What `StreamLog.open` has found."""

    first: int
    end: int
    cut_bytes: int = 0
    """So much was torn at the end, and is cut off."""
    cut_reason: str = ""
    rebuilt: tuple[str, ...] = ()
    """Indexes that were made anew."""
    damage: DamagedLogError | None = None

    def __str__(self) -> str:
        told = [f"messages {self.first} to {self.end}"]
        if self.cut_bytes:
            told.append(f"{self.cut_bytes} bytes torn at the end are cut off ({self.cut_reason})")
        if self.rebuilt:
            told.append(f"{len(self.rebuilt)} indexes made anew")
        if self.damage is not None:
            told.append(str(self.damage))
        return "; ".join(told)


class StreamLog:
    """See the rules of the module. Made by `open`.

    >>> import tempfile
    >>> from railgun.node.disk import NodeDisk
    >>> from railgun.wire.records import Records, build
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
        self._disk = disk
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._bases: list[int] = []
        self._floor = 0  # what lies before was purged
        self._tail: Tail
        self._files: OrderedDict[int, File] = OrderedDict()  # of segments that are not written
        self._hints: OrderedDict[int, tuple[int, int]] = OrderedDict()  # offset: segment, byte
        self._end = 0
        self._durable_end = 0
        self._last_time = _LONG_AGO
        self._told_time = _LONG_AGO
        self._epoch = 0
        self._damage: DamagedLogError | None = None
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
    def last_time(self) -> int:
        """When the last batch was stored; far in the past if there is none."""
        return self._last_time

    @property
    def last_epoch(self) -> int:
        """The epoch of the last batch."""
        return self._epoch

    @property
    def damage(self) -> DamagedLogError | None:
        """What is damaged, if anything is."""
        return self._damage

    @property
    def failed(self) -> StorageError | None:
        """Why it takes no more, if so: damage, or a failed write or sync."""
        return self._damage or self._tail.failed

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

    def append(self, batches: Sequence[Bytes]) -> int:
        """Write batches that follow the last one: all of them or none. They are not for good before `sync`."""
        self._check()
        following, time, epoch = self._end, self._last_time, self._epoch
        total, placed = 0, []
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
            placed.append((following, total, found.time))
            following, time, epoch = found.end, found.time, found.epoch
            total += found.size
        if not placed:
            return self._end
        if self._tail.size and self._tail.size + total > self.config.segment_bytes:
            self.roll()
        begin = self._tail.append(batches, self._end)
        with self._lock:
            segment = self._segments[-1]
            assert segment.index is not None
            if segment.empty:
                segment.first_time = placed[0][2]
            for offset, at, stored in placed:
                segment.index.add(offset, begin + at, stored)
            segment.size, segment.end = self._tail.size, following
            segment.last_time, segment.epoch = time, epoch
            self._end, self._last_time, self._epoch = following, time, epoch
        return following

    def sync(self) -> int:
        """Let all that was appended be there for good; the durable end."""
        self._check()
        end = self._end
        self._tail.sync()
        self._durable_end = end
        return end

    def roll(self) -> None:
        """Go on in a new segment, so that retention can take the present one."""
        self._check()
        before = self._segments[-1]
        if before.empty or before.index is None:
            return
        index = before.index
        self.sync()
        path = self._path(log_name(self._end))
        try:
            file = self._disk.create(path)
        except OSError as error:
            what = f"{self._disk.where(path)} cannot be made, and nothing was stored"
            raise storage_error(error, what) from error
        try:
            self._disk.sync_directory(self.directory)
        except OSError as error:
            file.close()
            self._tail.fail("followed by another segment", error)
        with self._lock:
            self._files[before.base] = self._tail.file
            self._tail = Tail(file, self._what(path), 0)
            self._add(_fresh(self._end, self.config))
        self._save_index(before, index)
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
                return []
            segment = self._segments[bisect_right(self._bases, offset) - 1]
            file = self._file(segment)
            hint = self._hints.pop(offset, None)
            if hint is not None and hint[0] == segment.base:
                known, position, want = offset, hint[1], most_bytes
            else:
                known, position = self._index(segment, file).find(offset)
                want = most_bytes + self.config.index_bytes
        return self._read(segment, file, known, position, want, offset, most_bytes, limit)

    def _read(
        self,
        segment: Segment,
        file: File,
        known: int,
        position: int,
        want: int,
        offset: int,
        most_bytes: int,
        limit: int,
    ) -> list[memoryview]:
        batches: list[memoryview] = []
        room = most_bytes
        while True:
            try:
                data = file.read(position, want)
            except OSError as error:
                raise StorageError(
                    f"{self._what(self._path(log_name(segment.base)))} cannot be read: "
                    f"{error.strerror or error}"
                ) from error
            walk = Walk(data, position, known)
            following, byte, done = known, position, False
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
            if batches:
                with self._lock:
                    self._hints[following] = (segment.base, byte)
                    while len(self._hints) > _HINTS:
                        self._hints.popitem(last=False)
            if batches or done:
                return batches
            problem = walk.problem or ("the end of the file" if len(data) < want else "")
            if problem:
                raise self._damaged(segment.base, walk.offset, walk.position, problem)
            known, position = walk.offset, walk.position
            want = max(walk.need, most_bytes)

    def batches_since(self, time: int) -> Iterator[memoryview]:
        """All batches that were stored at that time or later, in order."""
        with self._lock:
            start = self._end
            for segment in self._segments:
                if not segment.empty and segment.last_time >= time:
                    start = max(self.first, self._index(segment, self._file(segment)).before(time))
                    break
        while batches := self.read(start, 4 << 20):
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
            told = _load_index(self._disk, self.directory, segment.base, segment.size, self.config)
            found = told or scan(file, segment.base, self.config.index_bytes).segment
            segment.index = found.index or Index(self.config.index_bytes)
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

    def _damaged(self, base: int, offset: int, position: int, problem: str) -> DamagedLogError:
        found = _damage(self._what(self._path(log_name(base))), offset, position, problem)
        with self._lock:
            if self._damage is None or offset < self._damage.offset:
                self._damage = found
        return found

    # ------------------------------------------------------------ retention

    def trim(self, max_age: int | None, max_bytes: int | None, now: int) -> int:
        """Take away whole segments that are older or more than that; the first offset that is kept then.

        A segment is as old as its last batch. What is left has at most `max_bytes`, unless the last one alone has more.
        Segments that were purged go, too.
        """
        if self._closed or self._damage is not None:
            self._check()
        while True:
            with self._lock:
                oldest = self._segments[0]
                too_old = max_age is not None and oldest.last_time < now - max_age
                total = sum(segment.size for segment in self._segments)
                too_much = max_bytes is not None and total > max_bytes
                purged = oldest.end <= self._floor
                if len(self._segments) == 1 or not (too_old or too_much or purged):
                    return self.first
                del self._segments[0], self._bases[0]
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
                raise StorageError(
                    f"{self._what(path)} cannot be removed: {error.strerror or error}. It stays the first one."
                ) from error
            finally:
                if file is not None:
                    file.close()

    def retain(self, max_age: int | None, max_bytes: int | None, now: int) -> int:
        """As `trim`, but a last segment that never fills keeps nothing alive: it is followed by another in time.

        What is older than `max_age` is gone when it is a quarter older than that.
        """
        last = self._segments[-1]
        if max_age is not None and not last.empty and last.first_time < now - max_age // _SHARE:
            self.roll()
        return self.trim(max_age, max_bytes, now)

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

    # ------------------------------------------------------------ opening

    @classmethod
    def open(
        cls, disk: Disk, directory: str, config: LogConfig | None = None
    ) -> tuple[StreamLog, Recovery]:
        """The log in a directory, which is made if there is none, and what recovery has found."""
        log = cls(disk, directory, config or LogConfig())
        try:
            return log, log._recover()
        except OSError as error:
            what = f"the log in {disk.where(directory)} cannot be opened"
            raise storage_error(error, what) from error

    def _recover(self) -> Recovery:
        disk, config = self._disk, self.config
        disk.make_directory(self.directory)
        names = disk.list(self.directory)
        bases = sorted(base for base in map(base_of, names) if base is not None)
        self._tidy(names, bases)
        if not bases:
            path = self._path(log_name(0))
            self._tail = Tail(disk.create(path), self._what(path), 0)
            disk.sync_directory(self.directory)
            self._add(_fresh(0, config))
            return Recovery(0, 0)
        rebuilt: list[str] = []
        damage: DamagedLogError | None = None
        for base, following in itertools.pairwise(bases):
            segment, problem = self._believe(base, rebuilt)
            self._add(segment)
            if not problem and segment.end != following:
                problem = f"the end, but the next segment begins with {following}"
            if problem:
                path = self._what(self._path(log_name(base)))
                damage = _damage(path, segment.end, segment.size, problem)
                break
        cut, reason = 0, ""
        if damage is None:
            cut, reason, damage = self._recover_last(bases[-1])
        else:
            last = self._path(log_name(self._bases[-1]))
            self._tail = Tail(disk.open(last), self._what(last), self._segments[-1].size)
        self._damage = damage
        stored = [segment for segment in self._segments if not segment.empty]
        self._end = self._durable_end = self._segments[-1].end
        if stored:
            self._last_time, self._epoch = stored[-1].last_time, stored[-1].epoch
        floors = [floor for floor in map(floor_of, names) if floor is not None]
        self._floor = min(max(floors, default=0), self._end)
        if floors and damage is None:  # a crash may have left what was purged
            self.trim(None, None, 0)
            self._tidy_floors()
        return Recovery(self.first, self.end, cut, reason, tuple(rebuilt), damage)

    def _tidy(self, names: list[str], bases: list[int]) -> None:
        """Indexes without a segment, or not whole, are left by a crash."""
        known = {index_name(base) for base in bases[:-1]}
        for name in names:
            if name.endswith((".idx", ".idx.tmp")) and name not in known:
                self._disk.remove(self._path(name))

    def _believe(self, base: int, rebuilt: list[str]) -> tuple[Segment, str]:
        """A segment that is not written any more: by its index, or by a scan."""
        file = self._disk.open(self._path(log_name(base)))
        try:
            size = file.size()
            told = _load_index(self._disk, self.directory, base, size, self.config)
            if told is not None:
                told.index = None  # again when it is read
                return told, ""
            found = scan(file, base, self.config.index_bytes)
        finally:
            file.close()
        if not found.problem:
            rebuilt.append(index_name(base))
            self._save_index(found.segment, found.index)
            found.segment.index = None
        return found.segment, found.problem

    def _recover_last(self, base: int) -> tuple[int, str, DamagedLogError | None]:
        path = self._path(log_name(base))
        file = self._disk.open(path)
        found = scan(file, base, self.config.index_bytes)
        segment, cut, damage = found.segment, 0, None
        if found.problem and has_mark(file, segment.size):
            damage = _damage(self._what(path), segment.end, segment.size, found.problem)
        elif found.problem:
            cut = found.size - segment.size
            file.truncate(segment.size)
        if damage is None:
            file.sync()  # what a killed process has left may be in memory only
            self._disk.sync_directory(self.directory)
        self._add(segment)
        self._tail = Tail(file, self._what(path), segment.size)
        return cut, found.problem if cut else "", damage

    def _save_index(self, segment: Segment, index: Index) -> None:
        """Beside the segment, if there is room; nothing is lost without it."""
        path = self._path(index_name(segment.base))
        try:
            file = self._disk.create(f"{path}.tmp")
            try:
                file.write([pack_index(segment, index)])
            finally:
                file.close()
            self._disk.rename(f"{path}.tmp", path)
        except OSError:
            with contextlib.suppress(OSError):
                self._disk.remove(f"{path}.tmp")

    def _add(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._bases.append(segment.base)

    def _path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def _what(self, path: str) -> str:
        return f"the log of stream {self.directory!r} ({self._disk.where(path)})"


def _fresh(base: int, config: LogConfig) -> Segment:
    return Segment(base, end=base, index=Index(config.index_bytes))


def _load_index(
    disk: Disk, directory: str, base: int, size: int, config: LogConfig
) -> Segment | None:
    try:
        file = disk.open(f"{directory}/{index_name(base)}")
    except OSError:
        return None
    try:
        return unpack_index(file.read(0, file.size()), base, size, config.index_bytes)
    except OSError:
        return None
    finally:
        file.close()


def _damage(what: str, offset: int, position: int, problem: str) -> DamagedLogError:
    return DamagedLogError(
        f"{what} is damaged at byte {position}: where offset {offset} should be, there is {problem}. Nothing was "
        f"changed. All before offset {offset} can be read; nothing is appended. Let the node fetch the stream from a "
        "replica, or restore the file.",
        offset,
    )
