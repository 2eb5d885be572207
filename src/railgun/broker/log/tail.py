"""The growing end of a file, and the marks that tell which bytes were synced.

After a power cut the end of a file may be missing, be zeros, or have holes, and the bytes behind a hole may be whole. A
failing disk looks the same. A torn end is no loss, because nothing of it was acknowledged: it is cut off. Damage is a
loss, and cutting would make it larger. Marks tell them apart:

1. The first write after a sync begins with a mark. The mark says: *all bytes before me were synced when I was written*.
2. So bad bytes with a mark anywhere behind them were synced, and are damaged. Bad bytes without a mark behind them were
   written after the last sync on which anything was built, and may be cut off.
3. A mark records its own byte position in the file, so that bytes of a message are not mistaken for a mark. A mark that
   lies before its recorded position shows that synced bytes in between are missing: somebody has cut the file off
   while it was written to. That is damage, too. Such a mark counts where a record has to begin, and further behind only
   if it is followed by the beginning of a record.
4. Closing a file writes a mark, too. The one thing left in doubt is the last group before a crash: if it is damaged
   before it is read again, it looks torn.

Errors:

5. After an error that leaves the disk usable (no room, a limit on the size of files, a quota, a disk that has become
   read-only) the partly written bytes are cut off, and the cut is synced. Then `NoSpaceError` or `StorageError` is
   raised, and the file stays in use. `refused` is that error until as much as was refused has been written, or could be
   (`probe`).
6. After any other failed write or sync, or a failed cut, `LogFailedError` is raised, now and for ever. The same goes
   for a file that somebody else has moved, replaced, removed, or made shorter or longer: every sync checks that before
   it returns, and so does `check_file`.
"""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Sequence
from typing import Final

from zlib_ng.zlib_ng import crc32

from railgun.broker.errors import (
    FULL,
    REFUSED,
    LogFailedError,
    NoSpaceError,
    StorageError,
    cause_of,
    refusal,
)
from railgun.broker.log.disk import GONE, File
from railgun.transport.records import Bytes

MARK: Final = b"RGSM"
MARK_SIZE: Final = 24

_MARK: Final = struct.Struct("<4sIQQ")
_READ_BYTES: Final = 1 << 20
_PAGE_BYTES: Final = 64 << 10  # the largest page size of any system
_MAX_PROBE_BYTES: Final = 1 << 20
_TRIAL_BYTES: Final = 4096


def mark(number: int, position: int) -> bytes:
    """Return a mark for this byte position of a file; `number` is how many records (or offsets) lie before it.

    >>> read_mark(mark(7, 1000), 0, 1000)
    7
    >>> read_mark(mark(7, 1000), 0, 1001) is None
    True
    """
    rest = struct.pack("<QQ", number, position)
    return MARK + struct.pack("<I", crc32(rest)) + rest


def read_mark(data: Bytes, at: int, position: int) -> int | None:
    """Return the number of the mark at `at`; None if there is no mark that belongs at byte `position` of the file."""
    fields = unpack_mark(data, at)
    return fields[0] if fields is not None and fields[1] == position else None


def unpack_mark(data: Bytes, at: int) -> tuple[int, int] | None:
    """Return the number of the mark at `at`, and the byte position it records; None if there is no mark."""
    if len(data) - at < MARK_SIZE:
        return None
    magic, crc, number, recorded = _MARK.unpack_from(data, at)
    if magic != MARK or crc32(data[at + 8 : at + MARK_SIZE]) != crc:
        return None
    return int(number), int(recorded)


def describe_bad_mark(data: Bytes, at: int, position: int) -> str:
    """Say what is wrong with the mark at `at`, which lies at byte `position` of the file.

    >>> describe_bad_mark(mark(7, 1000), 0, 200)
    'a mark of byte 1000 of the file: what lay before it is missing'
    """
    fields = unpack_mark(data, at)
    if fields is not None and fields[1] > position:
        return f"a mark of byte {fields[1]} of the file: what lay before it is missing"
    return "a mark that does not belong here"


def has_mark(file: File, position: int, follows: bytes) -> bool:
    """Return whether a mark at or behind a byte of a file proves that bytes there were synced (rules 2 and 3).

    A record or mark has to begin at `position`; `follows` is the beginning of any record.
    """
    begin, min_bytes = position, MARK_SIZE + len(follows)
    while data := file.read(position, _READ_BYTES):
        last = len(data) < _READ_BYTES
        at = data.find(MARK)
        while at >= 0:
            fields, place = unpack_mark(data, at), position + at
            if fields is not None and (fields[1] == place or place == begin):
                return True
            if fields is not None and fields[1] > place and (last or len(data) - at >= min_bytes):
                behind = bytes(data[at + MARK_SIZE : at + min_bytes])
                if behind in (b"", follows) or behind.startswith(MARK[: len(follows)]):
                    return True
            at = data.find(MARK, at + 1)
        if last:
            break
        position += len(data) - min_bytes + 1
    return False


class Tail:
    """Appends to the end of a file. One thread at a time; `what` names the file in errors."""

    def __init__(self, file: File, what: str, size: int) -> None:
        self.file = file
        self.what = what
        self.size = size
        """Bytes written."""
        self.durable = size
        """Bytes synced."""
        self.failed: LogFailedError | None = None
        self.refused: StorageError | None = None
        """Why the last write was refused, until such a write is known to work again."""
        self._refused_bytes = 0
        self._marked = -1
        self._cold = False  # whether nobody will read the unsynced bytes soon

    def check(self) -> None:
        """Raise `LogFailedError` if a write or sync has failed before."""
        if self.failed is not None:
            raise LogFailedError(str(self.failed)) from self.failed

    def append(self, pieces: Sequence[Bytes], number: int, cold: bool = False) -> int:
        """Write these pieces, after a mark if one is due; return where the first piece begins.

        `number` goes into the mark. `cold`: nobody will read the pieces soon.
        """
        self.check()
        self._cold = cold and (self._cold or self.size == self.durable)
        if self.size and self.size == self.durable != self._marked:
            pieces = [mark(number, self.size), *pieces]
            lead = MARK_SIZE
        else:
            lead = 0
        length = sum(map(len, pieces))
        try:
            self.file.write(pieces)
        except OSError as error:
            self._undo(error, length)
        if lead:
            self._marked = self.size + lead
        begin = self.size + lead
        self.size += length
        if self.refused is not None and length >= self._refused_bytes:
            self.refused = None
        return begin

    def probe(self, least: int = 0) -> None:
        """Find out whether as much as was refused, and `least` bytes, could be written now; if not, raise as `append`
        would.

        The bytes written for that are cut off again. A crash in between leaves a torn end, which the next open cuts
        off.
        """
        self.check()
        if self.refused is None and not least:
            return
        length = max(least, self._refused_bytes)
        try:
            self.file.write([bytes(min(length, _MAX_PROBE_BYTES))])
        except OSError as error:
            self._undo(error, length)
        self._cut_back()
        self.refused = None

    def try_write(self) -> None:
        """Find out whether a few bytes can be written, before the first append; `refused` or `failed` is set if not.

        The caller has just opened the file and will sync it: the bytes are cut off again, and the cut is not synced
        here.
        """
        with contextlib.suppress(StorageError):
            try:
                self.file.write([bytes(_TRIAL_BYTES)])
            except OSError as error:
                self._undo(error, _TRIAL_BYTES)
            try:
                self.file.truncate(self.size)
            except OSError as error:
                self.fail("cut off after a trial write", error)

    def _undo(self, error: OSError, length: int) -> None:
        if error.errno not in REFUSED:
            self.fail("written", error)
        self._cut_back()
        cause, remedy = cause_of(error)
        kind = NoSpaceError if error.errno in FULL else StorageError
        self.refused = kind(
            f"{self.what} cannot be written: {cause}. All that was stored can be read. {remedy}; then it takes writes "
            "again by itself."
        )
        self._refused_bytes = length
        raise refusal(self.refused) from self.refused

    def _cut_back(self) -> None:
        """Cut off the bytes of a refused write or a probe."""
        try:
            if self.file.size() > self.size:
                self.file.truncate(self.size)
            self.file.sync()
            size = self.file.size()
        except OSError as error:
            self.fail("cut off after a write that was refused", error)
        self._check_size(size)
        self.durable = self.size

    def sync(self) -> None:
        """Make all written bytes durable."""
        self.check()
        size = self.size
        if size == self.durable:
            return
        try:
            self.file.sync()
            actual = self.file.size()
        except OSError as error:
            self.fail("synced", error)
        self._check_size(actual)
        if self._cold:
            begin = self.durable // _PAGE_BYTES * _PAGE_BYTES
            self.file.forget(begin, size - begin)
        self.durable = size

    def is_there(self) -> bool:
        """Return whether the file is at its place and not cut off. May be called by any thread.

        While the file is being replaced by another one, the result may be False: only the writer knows (`check_file`).
        """
        try:
            if self.failed is not None:
                return True
            durable = self.durable
            return self.file.has_name() and self.file.size() >= durable
        except OSError:
            return True  # the file is closed, or another one has replaced it

    def check_file(self) -> None:
        """Raise `LogFailedError`, now and later, if somebody has moved, replaced, removed or cut off the file."""
        self.check()
        try:
            named, size = self.file.has_name(), self.file.size()
        except OSError:
            return  # it is closed
        if not named:
            self.fail("kept", OSError(errno.ENOENT, GONE))
        self._check_size(size)

    def _check_size(self, actual: int) -> None:
        """Raise `LogFailedError`, now and later, if somebody else has changed the size of the file."""
        if actual == self.size:
            return
        how = "shorter" if actual < self.size else "longer"
        self.failed = LogFailedError(
            f"somebody else has made {self.what} {how}: it has {actual} bytes, and {self.size} were written. It takes "
            "no more, and what is missing cannot be read. Keep programs that cut off files (logrotate with "
            "copytruncate) away from the data directory. Stop the node, restore the file if you have a copy, and "
            "start it again."
        )
        raise self.failed

    def fail(self, verb: str, error: OSError) -> None:
        """Raise `LogFailedError`, now and at every later call; `verb` says what could not be done."""
        cause, remedy = cause_of(error)
        self.failed = LogFailedError(
            f"{self.what} could not be {verb}: {cause}. Nobody knows what of the last writes is on disk, so it takes "
            f"no more. What was acknowledged can be read. {remedy}, then restart the node."
        )
        raise self.failed from error

    def give_up(self, verb: str, error: StorageError) -> None:
        """Take no more writes, because the file has bytes that must not be followed; do not raise."""
        self.failed = LogFailedError(
            f"{self.what} could not be {verb}: {error} It takes no more until the node is restarted."
        )

    def close(self, number: int) -> None:
        """Sync, write a mark, and close the file; raise no error for the mark, which is optional."""
        try:
            if self.failed is None:
                self.sync()
                with contextlib.suppress(StorageError):
                    self.append([], number)
                    self.sync()
        finally:
            self.file.close()
