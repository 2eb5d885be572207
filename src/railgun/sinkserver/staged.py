"""What a flow has sent for one transaction, on disk: a log of batches.

The file, little endian::

    a line of a journal: whose transaction it is
    then for each batch   u32 crc of all that follows of it, u32 length, u64 first byte; the bytes

A batch is records, each with its length (u32) before it. Bytes are counted without what stands before batches, so the
flow and the sink mean the same byte.

Rules:

1. A batch is there as a whole, or not at all: `end` is always where one ends. A torn one is cut off when the log is
   opened; one that could not be written is written over.
2. Nothing is safe before `sync`. Its caller then also makes safe that the file is there (its directory).
3. A file without a whole first line was never answered for, and is no log.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from zlib_ng.zlib_ng import crc32

from railgun.ingest.errors import LostError
from railgun.sinkserver.journal import line, read
from railgun.transport.packed_records import unpack

_HEAD: Final = struct.Struct("<IIQ")
_CRC: Final = struct.Struct("<I")
LONGEST: Final = 8 << 20
"""Bytes of a batch: one frame has no more."""


class Log:
    """The log of one transaction."""

    def __init__(self, path: Path, told: dict[str, Any], begin: int, end: int, size: int) -> None:
        self.path = path
        self.told = told
        self.end = end
        self._begin = begin  # where batches begin in the file
        self._size = size  # where they end

    @staticmethod
    def create(path: Path, told: dict[str, Any]) -> Log:
        """A new one, which is empty."""
        first = line(told)
        path.write_bytes(first)
        return Log(path, told, len(first), 0, len(first))

    @staticmethod
    def open(path: Path) -> Log | None:
        """The one in this file, without what is torn; None if it is none."""
        with path.open("rb") as file:
            first = file.readline()
            entries, begin = read(first)
            if len(entries) != 1 or not isinstance(entries[0], dict):
                return None
            log = Log(path, entries[0], begin, 0, begin)
            for data in _batches(file):
                log.end += len(data)
                log._size += _HEAD.size + len(data)
        log._cut()
        return log

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Add a batch."""
        rest = _HEAD.pack(0, len(data), self.end)[_CRC.size :]
        code = crc32(data, crc32(rest))
        left = memoryview(b"".join((_CRC.pack(code), rest, data)))
        file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            at = self._size  # whatever a write that failed has left there
            while left:
                written = os.pwrite(file, left, at)
                at, left = at + written, left[written:]
        finally:
            os.close(file)
        self.end += len(data)
        self._size += _HEAD.size + len(data)

    def _cut(self) -> None:
        if self.path.stat().st_size > self._size:
            os.truncate(self.path, self._size)

    def sync(self) -> None:
        """What was added is safe."""
        self._cut()
        file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def records(self) -> Staged:
        """All that is in it now."""
        return Staged(self.path, self._begin, self.end)

    def remove(self) -> None:
        """Throw it away."""
        self.path.unlink(missing_ok=True)


class Staged:
    """The records of a log."""

    def __init__(self, path: Path, begin: int, end: int) -> None:
        self.path = path
        self._begin = begin
        self._end = end

    def __iter__(self) -> Iterator[bytes]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[bytes]]:
        """As they were sent."""
        at = 0
        try:
            with self.path.open("rb") as file:
                file.seek(self._begin)
                for data in _batches(file):
                    at += len(data)
                    yield unpack(data)
                    if at >= self._end:
                        break
        except FileNotFoundError:
            pass
        if at != self._end:
            raise LostError(
                "DAMAGED",
                f"{self.path} is whole for {at:,} bytes only, of {self._end:,} that were promised",
            )


class Absent:
    """Records that are not at hand: whoever wants to read them hears why.

    >>> absent = Absent(LostError("DAMAGED", "they are gone"))
    >>> list(absent)
    Traceback (most recent call last):
    railgun.ingest.errors.LostError: they are gone
    >>> absent.wanted
    True
    """

    def __init__(self, why: LostError) -> None:
        self._why = why
        self.wanted = False

    def __iter__(self) -> Iterator[bytes]:
        return self.batches()

    def batches(self) -> Iterator[Any]:
        """There are none."""
        self.wanted = True
        raise self._why


class Given:
    """Records that are at hand, for tests of targets.

    >>> list(Given([b"a", b"b"]))
    [b'a', b'b']
    """

    def __init__(self, records: Iterable[bytes], size: int = 1000) -> None:
        self._records = list(records)
        self._size = size

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._records)

    def batches(self) -> Iterator[list[bytes]]:
        """Some at a time."""
        for at in range(0, len(self._records), self._size):
            yield self._records[at : at + self._size]


def _batches(file: BinaryIO) -> Iterator[bytes]:
    """The batches from there on, up to the first that is not whole."""
    at = 0
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        code, length, start = _HEAD.unpack(head)
        if start != at or not 0 < length <= LONGEST:
            return
        data = file.read(length)
        if len(data) < length or crc32(data, crc32(head[_CRC.size :])) != code:
            return
        yield data
        at += length
