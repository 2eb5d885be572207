"""Segments: the files of a stream, and how one is read from a byte of it.

Rules:

1. A segment is a file of record batches, one after the other, with marks between some (see `railgun.broker.log.tail`).
   Its name is the offset of its first message, in 20 digits, and `.log`.
2. A `Walk` gives only batches that are whole, whose checksums fit, and whose offsets follow one another. It stops where
   that is not so, and says what it found there.
3. An index has an entry for about every 64 KiB: offset, byte, time. It is in memory while the segment is in use, and
   beside it in an `.idx` file once the segment is not written any more. It says nothing that a scan of the
   segment does not say; one that is absent, broken, or of another size of the segment is made anew.
4. A segment knows its runs: which epochs its batches have, and where each of them ends. They are in the index file,
   too.
5. A batch of a later version is no problem of the file: `Walk` and `scan` raise `LaterBatchError`, and nobody cuts it
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
from railgun.broker.log.tail import MARK, MARK_SIZE, read_mark, what_mark
from railgun.transport.records import CONTINUES, HEADER, BatchError, Head, LaterBatchError, head

CHUNK: Final = 1 << 20
LONG_AGO: Final = -(1 << 63)
"""The time of the last batch where there is none."""
_NAME: Final = re.compile(r"([0-9]{20})\.log")
_FLOOR: Final = re.compile(r"([0-9]{20})\.first")
_INDEX_NAME: Final = re.compile(r"([0-9]{20})\.idx")
_INDEX: Final = struct.Struct("<4sIQQQqqQQ")
_MAGIC: Final = b"RGI2"

Run: TypeAlias = tuple[int, int]
"""An epoch, and the offset after the last batch of it."""


def log_name(base: int) -> str:
    """The name of the segment that begins with this offset.

    >>> log_name(12)
    '00000000000000000012.log'
    """
    return f"{base:020}.log"


def index_name(base: int) -> str:
    """The name of its index."""
    return f"{base:020}.idx"


def index_of(name: str) -> int | None:
    """The offset in the name of an index; None for other files."""
    found = _INDEX_NAME.fullmatch(name)
    return int(found[1]) if found else None


def base_of(name: str) -> int | None:
    """The offset in the name of a segment; None for other files."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def floor_name(first: int) -> str:
    """The name of the empty file that says: what lies before this offset is not there any more."""
    return f"{first:020}.first"


def floor_of(name: str) -> int | None:
    """The offset in such a name; None for other files.

    >>> floor_of(floor_name(12)), floor_of(log_name(12))
    (12, None)
    """
    found = _FLOOR.fullmatch(name)
    return int(found[1]) if found else None


class Walk:
    """Batch after batch in some bytes of a segment.

    When it has ended, `position` and `offset` are where the next batch would begin. Either `problem` says why there is
    none, or `need` says how many bytes from there on it takes to see it.
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
                    self.problem = what_mark(data, at, start + at)
                    return
                at += MARK_SIZE
                self.position = start + at
                continue
            if left < HEADER:
                self.need = HEADER
                return
            try:
                found = head(data, at)
            except LaterBatchError as error:  # neither torn nor damaged: rule 5
                told = str(error).replace(f" at byte {at} ", f" at byte {start + at} ")
                raise LaterBatchError(told) from error
            except BatchError as error:
                self.problem = str(error).replace(f" at byte {at}", "")
                return
            if found.base != self.offset:
                self.problem = f"a batch from {found.base}"
                return
            if left < found.size:
                self.need = found.size
                return
            batch = view[at : at + found.size]
            if crc32(batch[HEADER:]) != found.body_crc:
                self.problem = "a batch whose checksum differs"
                return
            begin = start + at
            at += found.size
            self.position = start + at
            self.offset += found.count
            yield begin, found, batch


@dataclass(slots=True)
class Index:
    """Where batches of a segment begin."""

    every: int
    offsets: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)

    def add(self, offset: int, position: int, time: int) -> None:
        """A batch begins there; one in so many is remembered.

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
        """The last offset that is known and not above this one, and its byte."""
        at = max(0, bisect_right(self.offsets, offset) - 1)
        return self.offsets[at], self.positions[at]

    def before(self, time: int) -> int:
        """An offset that is known, and before all that were stored at that time or later."""
        return self.offsets[max(0, bisect_left(self.times, time) - 1)]


@dataclass(slots=True)
class Segment:
    """What is known of one file."""

    base: int
    size: int = 0
    end: int = 0
    first_time: int = 0
    last_time: int = 0
    runs: list[Run] = field(default_factory=list)
    index: Index | None = None

    @property
    def epoch(self) -> int:
        """The epoch of its last batch."""
        return self.runs[-1][0] if self.runs else 0

    @property
    def empty(self) -> bool:
        """Whether there is no message in it."""
        return self.end == self.base


def fresh(base: int, every: int) -> Segment:
    """A segment without a message yet."""
    return Segment(base, end=base, index=Index(every))


@dataclass(slots=True)
class Scan:
    """What a scan has found: the good part, how much there is, and what is wrong behind it."""

    segment: Segment
    index: Index
    size: int
    problem: str
    whole: int
    """The offset up to which units are whole (`transport.records`)."""


def scan(file: File, base: int, every: int, stop: int | None = None) -> Scan:
    """Read a whole segment, or its batches that end at `stop` or before."""
    segment, index = Segment(base, end=base), Index(every)
    segment.index = index
    size, want, problem, whole = file.size(), CHUNK, "", base
    while segment.size < size and not problem:
        walk = Walk(file.read(segment.size, want), segment.size, segment.end)
        try:
            for position, found, _ in walk:
                if stop is not None and found.end > stop:
                    segment.size = position
                    return Scan(segment, index, size, "", whole)
                index.add(found.base, position, found.time)
                if segment.empty:
                    segment.first_time = found.time
                segment.end, segment.last_time = found.end, found.time
                extend(segment.runs, found.epoch, found.end)
                if not found.flags & CONTINUES:
                    whole = found.end
        except LaterBatchError:
            if stop is None or walk.offset < stop:
                raise
        if (
            stop is not None and walk.offset >= stop
        ):  # what follows it is not asked for, be it good or bad
            segment.size = walk.position
            return Scan(segment, index, size, "", whole)
        segment.size, problem = walk.position, walk.problem
        want = max(CHUNK, walk.need)
        if not problem and segment.size + walk.need > size > segment.size:
            problem = "a batch that is cut short"
    return Scan(segment, index, size, problem, whole)


def extend(runs: list[Run], epoch: int, end: int) -> None:
    """Batches of an epoch up to this offset follow.

    >>> runs = [(1, 10)]
    >>> extend(runs, 1, 12)
    >>> extend(runs, 3, 15)
    >>> runs
    [(1, 12), (3, 15)]
    """
    if runs and runs[-1][0] == epoch:
        runs[-1] = (epoch, end)
    else:
        runs.append((epoch, end))


def pack_index(segment: Segment, index: Index) -> bytes:
    """An index as a file."""
    columns = (index.offsets, index.positions, index.times)
    body = b"".join(np.array(column, dtype="<i8").tobytes() for column in columns)
    body += np.array(segment.runs, dtype="<u8").tobytes()
    numbers = (segment.base, segment.end, segment.size, segment.first_time, segment.last_time)
    counts = (len(index.offsets), len(segment.runs))
    data = bytearray(_INDEX.pack(_MAGIC, 0, *numbers, *counts) + body)
    struct.pack_into("<I", data, 4, crc32(memoryview(data)[8:]))
    return bytes(data)


def unpack_index(data: bytes, base: int, size: int, every: int) -> Segment | None:
    """A segment of that size by its index; None if the index is not one of it."""
    if len(data) < _INDEX.size:
        return None
    magic, crc, told, end, length, first, last, count, turns = _INDEX.unpack_from(data)
    if (magic, told, length) != (_MAGIC, base, size) or crc32(memoryview(data)[8:]) != crc:
        return None
    if len(data) != _INDEX.size + 24 * count + 16 * turns or not count or not turns:
        return None
    columns = np.frombuffer(data, "<i8", 3 * count, _INDEX.size).reshape(3, count).tolist()
    told_runs = np.frombuffer(data, "<u8", 2 * turns, _INDEX.size + 24 * count).reshape(turns, 2)
    runs: list[Run] = [(epoch, until) for epoch, until in told_runs.tolist()]
    return Segment(base, size, end, first, last, runs, Index(every, *columns))


def load_index(disk: Disk, directory: str, base: int, size: int, every: int) -> Segment | None:
    """A segment of that size by the index beside it, if there is a good one."""
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
    """Put an index beside its segment, if there is room; nothing is lost without it."""
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
