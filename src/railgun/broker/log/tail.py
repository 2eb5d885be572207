"""The growing end of a file, and the marks that tell what was there for good.

After a power cut the end of a file may be missing, zeros, or have holes, and what lies behind a hole may be whole. A
disk that rots looks the same. The first is no loss, for nothing of it was acknowledged, and is cut off; the second is
a loss, and cutting would make it a larger one. Marks tell them apart:

1. Whatever is written first after a sync begins with a mark. It says: *all before me was synced when I was written*.
2. So bad bytes with a mark anywhere behind them were there for good, and are damaged. Bad bytes without one were
   written after the last sync that anybody built on, and may be cut off.
3. A mark knows at which byte of its file it lies, so that bytes of a message are not taken for one. If one lies before
   that byte, what lay between was there for good and is missing: somebody has cut the file off while it was written
   to. That is damage, too. It is believed of a mark where something has to begin, and further behind of one that what
   may be written next follows.
4. Also the close of a file writes a mark. The one thing left in doubt is the last group before a crash: if it rots
   before it is read again, it looks torn.

Errors:

5. No room, a limit of the size of files, a quota, a disk that has become read-only: what was partly written is cut off,
   and that is synced; then `NoSpaceError` or `StorageError`, and the file goes on. `refused` is that error, until as
   much as was refused has been written, or could be (`probe`).
6. A write or a sync that fails otherwise, or a cut that fails: `LogFailedError`, now and for ever. So it is with a file
   that somebody else has moved, replaced, removed, or made shorter or longer: that is looked for before a sync is told
   to be done, and by `check_file`.
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
_CHUNK: Final = 1 << 20
_PAGE: Final = 64 << 10  # bytes; the largest that systems have
_LARGEST_PROBE: Final = 1 << 20  # bytes
_TRIED_BYTES: Final = 4096


def mark(number: int, position: int) -> bytes:
    """A mark for that byte of a file; the number is what the file counts.

    >>> read_mark(mark(7, 1000), 0, 1000)
    7
    >>> read_mark(mark(7, 1000), 0, 1001) is None
    True
    """
    rest = struct.pack("<QQ", number, position)
    return MARK + struct.pack("<I", crc32(rest)) + rest


def read_mark(data: Bytes, at: int, position: int) -> int | None:
    """The number of the mark at `at`, if there is one that belongs at that byte of the file."""
    found = unpack_mark(data, at)
    return found[0] if found is not None and found[1] == position else None


def unpack_mark(data: Bytes, at: int) -> tuple[int, int] | None:
    """The number of the mark at `at`, and the byte of the file at which it was written; None if there is no mark."""
    if len(data) - at < MARK_SIZE:
        return None
    magic, crc, number, told = _MARK.unpack_from(data, at)
    if magic != MARK or crc32(data[at + 8 : at + MARK_SIZE]) != crc:
        return None
    return int(number), int(told)


def what_mark(data: Bytes, at: int, position: int) -> str:
    """Say what is wrong with the mark at `at`, that byte of the file.

    >>> what_mark(mark(7, 1000), 0, 200)
    'a mark of byte 1000 of the file: what lay before it is missing'
    """
    found = unpack_mark(data, at)
    if found is not None and found[1] > position:
        return f"a mark of byte {found[1]} of the file: what lay before it is missing"
    return "a mark that does not belong here"


def has_mark(file: File, position: int, follows: bytes) -> bool:
    """Whether a mark at that byte of a file or behind it says that bytes were there for good (rules 2 and 3).

    At `position` something has to begin; `follows` is how what is written behind a mark begins.
    """
    begin, least = position, MARK_SIZE + len(follows)
    while data := file.read(position, _CHUNK):
        last = len(data) < _CHUNK
        at = data.find(MARK)
        while at >= 0:
            found, place = unpack_mark(data, at), position + at
            if found is not None and (found[1] == place or place == begin):
                return True
            if found is not None and found[1] > place and (last or len(data) - at >= least):
                behind = bytes(data[at + MARK_SIZE : at + least])
                if behind in (b"", follows) or behind.startswith(MARK[: len(follows)]):
                    return True
            at = data.find(MARK, at + 1)
        if last:
            break
        position += len(data) - least + 1
    return False


class Tail:
    """Writes at the end of a file. One thread at a time; `what` names the file in errors."""

    def __init__(self, file: File, what: str, size: int) -> None:
        self.file = file
        self.what = what
        self.size = size
        """Bytes written."""
        self.durable = size
        """Bytes there for good."""
        self.failed: LogFailedError | None = None
        self.refused: StorageError | None = None
        """Why the last write was refused, while it is not known that such a write works again."""
        self._refused_bytes = 0
        self._marked = -1
        self._cold = False  # whether nobody will soon read what is not synced yet

    def check(self) -> None:
        """Raise what has made an end of it."""
        if self.failed is not None:
            raise LogFailedError(str(self.failed)) from self.failed

    def append(self, pieces: Sequence[Bytes], number: int, cold: bool = False) -> int:
        """Write these, after a mark if one is due; where the first one begins. `cold`: they are not read soon."""
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
        """Find out whether as much as was refused, and `least` bytes, could be written now; if not, raise as `append`.

        What is written for it is cut off again. A crash in between leaves a torn end: the next open cuts it off.
        """
        self.check()
        if self.refused is None and not least:
            return
        length = max(least, self._refused_bytes)
        try:
            self.file.write([bytes(min(length, _LARGEST_PROBE))])
        except OSError as error:
            self._undo(error, length)
        self._cut_back()
        self.refused = None

    def try_write(self) -> None:
        """Find out whether a little can be written, before anybody asks for it: `refused` or `failed` tells if not.

        For who opens a file, and syncs it before anything is appended: what is written for it is cut off again, and
        that is not synced here.
        """
        with contextlib.suppress(StorageError):
            try:
                self.file.write([bytes(_TRIED_BYTES)])
            except OSError as error:
                self._undo(error, _TRIED_BYTES)
            try:
                self.file.truncate(self.size)
            except OSError as error:
                self.fail("cut off after a write that was a try", error)

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
        """Cut off what a write has left that was refused, or was a probe."""
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
        """All that was written is there for good."""
        self.check()
        size = self.size
        if size == self.durable:
            return
        try:
            self.file.sync()
            there = self.file.size()
        except OSError as error:
            self.fail("synced", error)
        self._check_size(there)
        if self._cold:
            begin = self.durable // _PAGE * _PAGE
            self.file.forget(begin, size - begin)
        self.durable = size

    def is_there(self) -> bool:
        """Return whether the file is at its place, and nobody has cut it off. Any thread may ask.

        While the file is replaced by another one it may seem not to be: the writer knows (`check_file`).
        """
        try:
            if self.failed is not None:
                return True
            durable = self.durable
            return self.file.has_name() and self.file.size() >= durable
        except OSError:
            return True  # it is closed, or followed by another one

    def check_file(self) -> None:
        """Take nothing more if somebody has moved, replaced, removed or cut off the file: `LogFailedError`."""
        self.check()
        try:
            named, size = self.file.has_name(), self.file.size()
        except OSError:
            return  # it is closed
        if not named:
            self.fail("kept", OSError(errno.ENOENT, GONE))
        self._check_size(size)

    def _check_size(self, there: int) -> None:
        """Take nothing more if somebody else has changed the size of the file."""
        if there == self.size:
            return
        how = "shorter" if there < self.size else "longer"
        self.failed = LogFailedError(
            f"somebody else has made {self.what} {how}: it has {there} bytes, and {self.size} were written. It takes "
            "no more, and what is missing cannot be read. Keep programs that cut off files (logrotate with "
            "copytruncate) away from the data directory. Stop the node, restore the file if you have a copy, and "
            "start it again."
        )
        raise self.failed

    def fail(self, verb: str, error: OSError) -> None:
        """From now on there is only this error."""
        cause, remedy = cause_of(error)
        self.failed = LogFailedError(
            f"{self.what} could not be {verb}: {cause}. Nobody knows what of the last writes is on disk, so it takes "
            f"no more. What was acknowledged can be read. {remedy}, then restart the node."
        )
        raise self.failed from error

    def give_up(self, verb: str, error: StorageError) -> None:
        """Take nothing more, for something is on disk that must not be followed."""
        self.failed = LogFailedError(
            f"{self.what} could not be {verb}: {error} It takes no more until the node is restarted."
        )

    def close(self, number: int) -> None:
        """Sync, mark, and leave the file; no error for what can be done without."""
        try:
            if self.failed is None:
                self.sync()
                with contextlib.suppress(StorageError):  # the mark can be done without
                    self.append([], number)
                    self.sync()
        finally:
            self.file.close()
