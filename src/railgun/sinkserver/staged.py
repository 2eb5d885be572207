"""The log of one transaction: the batches that a flow has sent for it, on disk.

The file, little endian::

    a line of a journal: the fields of the transaction
    then for each batch   u32 CRC of the rest of the batch, u32 length, u64 position of its first byte; the bytes

A batch is a sequence of records, each with its length (u32) before it. Positions count only the bytes of batches, not
the headers before them, so the flow and the sink mean the same byte.

Rules:

1. A batch is in the log as a whole or not at all: `end` is always the end of a batch. A torn batch is cut off when the
   log is opened; a batch that could not be written is overwritten by the next one.
2. Nothing is safe before `sync`. Its caller then also syncs the directory, so that the file itself is safe.
3. A file without a complete first line was never acknowledged, and is no log.
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
MAX_BATCH_BYTES: Final = 8 << 20
"""Size of a batch: one frame has no more."""


class Log:
    """The log of one transaction."""

    def __init__(self, path: Path, header: dict[str, Any], begin: int, end: int, size: int) -> None:
        self.path = path
        self.header = header
        self.end = end
        self._begin = begin  # where the batches begin in the file
        self._size = size  # where the batches end in the file

    @staticmethod
    def create(path: Path, header: dict[str, Any]) -> Log:
        """Create an empty log with this first line."""
        first = line(header)
        path.write_bytes(first)
        return Log(path, header, len(first), 0, len(first))

    @staticmethod
    def open(path: Path) -> Log | None:
        """Open a log, and cut off a torn batch at its end; return None if the file is no log."""
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
        """Write a batch after the others, without a sync."""
        rest = _HEAD.pack(0, len(data), self.end)[_CRC.size :]
        code = crc32(data, crc32(rest))
        left = memoryview(b"".join((_CRC.pack(code), rest, data)))
        file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            at = self._size  # overwrites what a failed write has left there
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
        """Sync the batches to disk, after cutting off what a failed write has left."""
        self._cut()
        file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def records(self) -> Staged:
        """Return the records that are in the log now."""
        return Staged(self.path, self._begin, self.end)

    def remove(self) -> None:
        """Delete the file of the log."""
        self.path.unlink(missing_ok=True)


class Staged:
    """The records of a log, read from disk each time."""

    def __init__(self, path: Path, begin: int, end: int) -> None:
        self.path = path
        self._begin = begin
        self._end = end

    def __iter__(self) -> Iterator[bytes]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[bytes]]:
        """Yield the batches as they were sent; raise `LostError` if some are missing or damaged."""
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
                f"{self.path} has only {at:,} readable bytes of {self._end:,} that were promised",
            )


class Absent:
    """Records that cannot be read: reading them raises the reason, and sets `wanted`.

    >>> absent = Absent(LostError("DAMAGED", "they are gone"))
    >>> list(absent)
    Traceback (most recent call last):
    railgun.ingest.errors.LostError: they are gone
    >>> absent.wanted
    True
    """

    def __init__(self, reason: LostError) -> None:
        self._reason = reason
        self.wanted = False

    def __iter__(self) -> Iterator[bytes]:
        return self.batches()

    def batches(self) -> Iterator[Any]:
        """Raise the reason why the records cannot be read."""
        self.wanted = True
        raise self._reason


class InMemoryRecords:
    """Records in memory, for tests of targets.

    >>> list(InMemoryRecords([b"a", b"b"]))
    [b'a', b'b']
    """

    def __init__(self, records: Iterable[bytes], size: int = 1000) -> None:
        self._records = list(records)
        self._size = size

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._records)

    def batches(self) -> Iterator[list[bytes]]:
        """Yield the records in batches of the size given at the start."""
        for at in range(0, len(self._records), self._size):
            yield self._records[at : at + self._size]


def _batches(file: BinaryIO) -> Iterator[bytes]:
    """Yield the batches from the current position on, up to the first incomplete one."""
    at = 0
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        code, length, start = _HEAD.unpack(head)
        if start != at or not 0 < length <= MAX_BATCH_BYTES:
            return
        data = file.read(length)
        if len(data) < length or crc32(data, crc32(head[_CRC.size :])) != code:
            return
        yield data
        at += length
