"""Segments: the files of a log, and how they are read, scanned and indexed.

Rules:

1. A segment is a file of record batches, one after the other, with marks between some of them (see
   `railgun.broker.log.tail`). Its name is the offset of its first message, in 20 digits, and `.log`.
2. A `Walk` yields only batches that are whole, whose checksums fit, and whose offsets follow one another. It stops at
   the first bytes for which that is not so, and says what is there.
3. An index has an entry for about every 64 KiB: offset, byte, time. It is in memory while the segment is in use, and
   in an `.idx` file beside the segment once that is finished. It says nothing that a scan of the segment would not
   say; an index that is missing, broken, or made for another size of the segment is rebuilt.
4. A segment knows its runs: the epochs of its batches, and where each of them ends. The index file has them, too.
5. A batch of a later version is no fault of the file: `Walk` and `scan` raise `LaterBatchError`, and no caller cuts it
   off, sets it aside or writes behind it.
"""

from __future__ import annotations

import contextlib
import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from zlib_ng.zlib_ng import crc32

from railgun.broker.log.disk import Disk, File
from railgun.broker.log.tail import MARK, MARK_SIZE, describe_bad_mark, read_mark
from railgun.transport.records import CONTINUES, HEADER, BatchError, Head, LaterBatchError, head

_READ_BYTES: Final = 1 << 20
LONG_AGO: Final = -(1 << 63)
"""The time of the last batch of a log that has none."""
_NAME: Final = re.compile(r"([0-9]{20})\.log")
_FLOOR: Final = re.compile(r"([0-9]{20})\.first")
_INDEX_NAME: Final = re.compile(r"([0-9]{20})\.idx")
_INDEX: Final = struct.Struct("<4sIQQQqqQQ")
_MAGIC: Final = b"RGI2"

Run: TypeAlias = tuple[int, int]
"""An epoch, and the offset after its last batch."""


def log_name(base: int) -> str:
    """Return the file name of the segment that begins with this offset.

    >>> log_name(12)
    '00000000000000000012.log'
    """
    return f"{base:020}.log"


def index_name(base: int) -> str:
    """Return the name of the index file of the segment that begins with this offset."""
    return f"{base:020}.idx"


def index_of(name: str) -> int | None:
    """Return the offset in the name of an index file; None for other files."""
    match = _INDEX_NAME.fullmatch(name)
    return int(match[1]) if match else None


def base_of(name: str) -> int | None:
    """Return the offset in the name of a segment; None for other files."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def floor_name(first: int) -> str:
    """Return the name of the empty file which records that all messages before this offset were purged."""
    return f"{first:020}.first"


def floor_of(name: str) -> int | None:
    """Return the offset in the name of a floor file; None for other files.

    >>> floor_of(floor_name(12)), floor_of(log_name(12))
    (12, None)
    """
    match = _FLOOR.fullmatch(name)
    return int(match[1]) if match else None


class Walk:
    """An iterator over the batches in some bytes of a segment; yields byte, header and batch.

    When it has ended, `position` and `offset` are where the next batch would begin. Either `problem` says why there is
    none, or `need` says how many bytes from there on are needed to see it.
    """

    __slots__ = ("_data", "need", "offset", "position", "problem")

    def __init__(self, data: bytes, position: int, offset: int) -> None:
        self._data = data
        self.position = position
        self.offset = offset
        self.need = 0
        self.problem = ""

    def __iter__(self) -> Iterator[tuple[int, Head, memoryview]]:
        data, view, start, size = self._data, memoryview(self._data), self.position, len(self._data)
        at = 0
        while True:
            left = size - at
            if data[at : at + 4] == MARK:
                if left < MARK_SIZE:
                    self.need = MARK_SIZE
                    return
                if read_mark(data, at, start + at) != self.offset:
                    self.problem = describe_bad_mark(data, at, start + at)
                    return
                at += MARK_SIZE
                self.position = start + at
                continue
            if left < HEADER:
                self.need = HEADER
                return
            try:
                header = head(data, at)
            except LaterBatchError as error:  # neither torn nor damaged: rule 5
                text = str(error).replace(f" at byte {at} ", f" at byte {start + at} ")
                raise LaterBatchError(text) from error
            except BatchError as error:
                self.problem = str(error).replace(f" at byte {at}", "")
                return
            if header.base != self.offset:
                self.problem = f"a batch from {header.base}"
                return
            if left < header.size:
                self.need = header.size
                return
            batch = view[at : at + header.size]
            if crc32(batch[HEADER:]) != header.body_crc:
                self.problem = "a batch whose checksum differs"
                return
            begin = start + at
            at += header.size
            self.position = start + at
            self.offset += header.count
            yield begin, header, batch


@dataclass(slots=True)
class Index:
    """Byte positions and times of some batches of a segment, one about every `every` bytes."""

    every: int
    offsets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)

    def add(self, offset: int, position: int, time: int) -> None:
        """Note that a batch begins at this byte; only one batch in every `every` bytes is remembered.

        >>> index = Index(every=100)
        >>> for n in range(10):
        ...     index.add(offset=n, position=60 * n, time=1000 + n)
        >>> index.offsets, index.find(5), index.before(1006)
        ([0, 2, 4, 6, 8], (4, 240), 4)
        """
        if not self.positions or position - self.positions[-1] >= self.every:
            self.offsets.append(offset)
            self.positions.append(position)
            self.times.append(time)

    def find(self, offset: int) -> tuple[int, int]:
        """Return the last remembered offset that is not above this one, and its byte."""
        at = max(0, bisect_right(self.offsets, offset) - 1)
        return self.offsets[at], self.positions[at]

    def before(self, time: int) -> int:
        """Return a remembered offset that is before all batches stored at that time or later."""
        return self.offsets[max(0, bisect_left(self.times, time) - 1)]


@dataclass(slots=True)
class Segment:
    """One file of a log: its size, its offsets, and the times and epochs of its batches."""

    base: int
    size: int = 0
    end: int = 0
    first_time: int = 0
    last_time: int = 0
    runs: list[Run] = field(default_factory=list)
    index: Index | None = None

    @property
    def epoch(self) -> int:
        """Return the epoch of the last batch."""
        return self.runs[-1][0] if self.runs else 0

    @property
    def empty(self) -> bool:
        """Return whether the segment has no message."""
        return self.end == self.base


def empty_segment(base: int, every: int) -> Segment:
    """Return a segment without messages."""
    return Segment(base, end=base, index=Index(every))


@dataclass(slots=True)
class Scan:
    """The result of a scan: the good part, the size of the file, and what is wrong behind the good part."""

    segment: Segment
    index: Index
    size: int
    problem: str
    whole: int
    """The offset up to which units are whole (`transport.records`)."""


def scan(file: File, base: int, every: int, stop: int | None = None) -> Scan:
    """Read a segment: all of it, or only the batches that end at the offset `stop` or before."""
    segment, index = Segment(base, end=base), Index(every)
    segment.index = index
    size, want, problem, whole = file.size(), _READ_BYTES, "", base
    while segment.size < size and not problem:
        walk = Walk(file.read(segment.size, want), segment.size, segment.end)
        try:
            for position, header, _ in walk:
                if stop is not None and header.end > stop:
                    segment.size = position
                    return Scan(segment, index, size, "", whole)
                index.add(header.base, position, header.time)
                if segment.empty:
                    segment.first_time = header.time
                segment.end, segment.last_time = header.end, header.time
                extend_runs(segment.runs, header.epoch, header.end)
                if not header.flags & CONTINUES:
                    whole = header.end
        except LaterBatchError:
            if stop is None or walk.offset < stop:
                raise
        if stop is not None and walk.offset >= stop:  # bytes behind `stop` may be good or bad
            segment.size = walk.position
            return Scan(segment, index, size, "", whole)
        segment.size, problem = walk.position, walk.problem
        want = max(_READ_BYTES, walk.need)
        if not problem and segment.size + walk.need > size > segment.size:
            problem = "a batch that is cut short"
    return Scan(segment, index, size, problem, whole)


def extend_runs(runs: list[Run], epoch: int, end: int) -> None:
    """Add batches of an epoch, up to the offset `end`, to the runs.

    >>> runs = [(1, 10)]
    >>> extend_runs(runs, 1, 12)
    >>> extend_runs(runs, 3, 15)
    >>> runs
    [(1, 12), (3, 15)]
    """
    if runs and runs[-1][0] == epoch:
        runs[-1] = (epoch, end)
    else:
        runs.append((epoch, end))


def pack_index(segment: Segment, index: Index) -> bytes:
    """Return the content of an index file."""
    columns = (index.offsets, index.positions, index.times)
    body = b"".join(np.array(column, dtype="<i8").tobytes() for column in columns)
    body += np.array(segment.runs, dtype="<u8").tobytes()
    numbers = (segment.base, segment.end, segment.size, segment.first_time, segment.last_time)
    counts = (len(index.offsets), len(segment.runs))
    data = bytearray(_INDEX.pack(_MAGIC, 0, *numbers, *counts) + body)
    struct.pack_into("<I", data, 4, crc32(memoryview(data)[8:]))
    return bytes(data)


def unpack_index(data: bytes, base: int, size: int, every: int) -> Segment | None:
    """Return the segment that an index file describes; None if the file is broken, or of another segment or size."""
    if len(data) < _INDEX.size:
        return None
    magic, crc, stored_base, end, length, first, last, count, run_count = _INDEX.unpack_from(data)
    if (magic, stored_base, length) != (_MAGIC, base, size) or crc32(memoryview(data)[8:]) != crc:
        return None
    if len(data) != _INDEX.size + 24 * count + 16 * run_count or not count or not run_count:
        return None
    columns = np.frombuffer(data, "<i8", 3 * count, _INDEX.size).reshape(3, count).tolist()
    stored_runs = np.frombuffer(data, "<u8", 2 * run_count, _INDEX.size + 24 * count).reshape(
        run_count, 2
    )
    runs: list[Run] = [(epoch, until) for epoch, until in stored_runs.tolist()]
    return Segment(base, size, end, first, last, runs, Index(every, *columns))


def load_index(disk: Disk, directory: str, base: int, size: int, every: int) -> Segment | None:
    """Return the segment that the index file beside it describes; None if there is no good one."""
    try:
        file = disk.open(f"{directory}/{index_name(base)}")
    except OSError:
        return None
    try:
        return unpack_index(file.read(0, file.size()), base, size, every)
    except OSError:
        return None
    finally:
        file.close()


def save_index(disk: Disk, directory: str, segment: Segment, index: Index) -> None:
    """Write the index file of a segment; ignore errors of the disk, because the index can be rebuilt."""
    path = f"{directory}/{index_name(segment.base)}"
    try:
        file = disk.create(f"{path}.tmp")
        try:
            file.write([pack_index(segment, index)])
        finally:
            file.close()
        disk.rename(f"{path}.tmp", path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.remove(f"{path}.tmp")
