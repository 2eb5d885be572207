"""Notes: small records in one file, one after the other, which is written anew when it has grown.

It knows nothing of what they say: that is for those who use it (`grouplog`, `cluster/wal`).

Rules:

1. A note has a kind, a name (which may be empty) and a body, and a checksum over all of them. Each kind of file has
   notes of its own, told by their first four bytes.
2. `append` writes all of its notes or none; they are for good after `sync`. After a crash all that were synced are
   there, and of the others the first so many.
3. What is torn at the end is cut off by `recover`; what was there for good and is bad is damage: nothing is changed,
   and who asked is told. Marks, which count the notes before them, tell which it is (`railgun.broker.log.tail`).
4. `replace` writes another file, syncs it, renames it over this one, and syncs the directory. A crash leaves the one
   or the other. If the new one cannot be written, this one is as it was, and goes on. A *sealed* one ends with a mark:
   it gets its name when it is synced, so all of it was there for good, whatever happens to it later.
5. The last of the first four bytes is the version of the notes. Later versions keep checksum and size where they are,
   and begin the checksum with these four bytes. So a note of a later version is told from one that is torn or damaged:
   `LaterFormatError` is raised before anything is changed. So it is for an end that looks torn and begins with a later
   version, whatever its checksum. Whoever uses the notes raises the same for a kind of note
   or a body of a later version.
6. One writer at a time.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from zlib_ng.zlib_ng import crc32

from railgun.broker.errors import LaterFormatError, later_format, later_tail
from railgun.broker.log.disk import Disk, File, put, unless_read_only
from railgun.broker.log.tail import MARK, MARK_SIZE, Tail, has_mark, mark, read_mark, what_mark
from railgun.transport.records import is_later as is_later_magic

Take: TypeAlias = Callable[[int, str, bytes], object]
"""Gets the kind, the name and the body of a note."""

_NOTE: Final = struct.Struct(
    "<4sIIHH"
)  # magic, crc of the rest, size of all, kind, size of the name
_CHUNK: Final = 1 << 18  # bytes read at once


@dataclass(slots=True)
class Found:
    """What was read: so many notes in so many bytes, and why that was not all; "" if it was."""

    count: int = 0
    size: int = 0
    problem: str = ""
    damaged: bool = False
    """The problem is no torn end."""


class Notes:
    """A file of notes; `what` names it in errors. It is there after `recover`, `create` or `replace`.

    >>> import tempfile
    >>> from railgun.broker.log.disk import NodeDisk
    >>> notes = Notes(NodeDisk(tempfile.mkdtemp()), "a", "notes", b"NOTE", "an example")
    >>> notes.recover(print) is None
    True
    >>> notes.replace([notes.pack(1, b"body", "name")])
    >>> notes.append([notes.pack(2, b"other")])
    >>> notes.close()
    >>> notes.recover(print)
    1 name b'body'
    2  b'other'
    Found(count=2, size=93, problem='', damaged=False)
    >>> notes.close()
    """

    def __init__(self, disk: Disk, directory: str, name: str, magic: bytes, what: str) -> None:
        self.directory, self.path, self.what = directory, f"{directory}/{name}", what
        self.count = 0
        """How many notes there are."""
        self.cut_bytes = 0
        """So much was torn at the end when it was recovered, and is cut off."""
        self._disk, self._name, self._magic = disk, name, magic
        self._tail: Tail | None = None

    @property
    def tail(self) -> Tail:
        """The end of the file."""
        assert self._tail is not None, f"{self.what} was not made"
        return self._tail

    # ------------------------------------------------------------ the first thing

    def recover(self, take: Take, least: int = 0) -> Found | None:
        """Read what is there, and cut off what is torn; None if there is no file.

        If it is damaged it stays as it is, and must not be written to. So is one with less than the `least` notes
        that were ever in it.
        """
        disk = self._disk
        disk.make_directory(self.directory)
        names = disk.list(self.directory)
        if f"{self._name}.tmp" in names:
            with unless_read_only():
                disk.remove(f"{self.path}.tmp")
        if self._name not in names:
            return None
        file = disk.open(self.path)
        try:
            found = self._read(file, file.size(), take)
            if found.count < least or (found.problem and has_mark(file, found.size, self._magic)):
                if is_later_magic(self._magic, file.read(found.size, 4), certain=True):
                    raise self._later_tail(file, found.size)
                found.damaged = True
                found.problem = found.problem or "it has no beginning"
                file.close()
                return found
            if found.problem:
                if is_later_magic(self._magic, file.read(found.size, 4)):
                    raise self._later_tail(file, found.size)
                torn = file.size() - found.size
                with unless_read_only():  # then the tail fails, for it cannot be cut off either
                    file.truncate(found.size)
                    self.cut_bytes = torn
            tail = Tail(file, self.what, found.size)
            tail.try_write()
            file.sync()  # what a killed process has left may be in memory only
            disk.sync_directory(self.directory)
        except BaseException:
            file.close()
            raise
        self.count = found.count
        self._tail = tail
        return found

    def _later_tail(self, file: File, position: int) -> LaterFormatError:
        version = file.read(position, 4)
        return later_tail(self.what, self._disk.where(self.path), position, version)

    def create(self) -> None:
        """An empty file."""
        self._tail = Tail(self._disk.create(self.path), self.what, 0)
        self._disk.sync_directory(self.directory)

    # ------------------------------------------------------------ later

    def pack(self, kind: int, body: bytes, name: str = "") -> bytes:
        """A note, to be written."""
        return pack(self._magic, kind, body, name)

    def append(self, notes: Sequence[bytes]) -> None:
        """Write these at the end: all of them or none."""
        if notes:
            self.tail.append(notes, self.count)
            self.count += len(notes)

    def sync(self) -> None:
        """All that was written is there for good."""
        self.tail.sync()

    def read(self, take: Take) -> Found:
        """Read all that was written."""
        return self._read(self.tail.file, self.tail.size, take)

    def replace(self, notes: Sequence[bytes], *, sealed: bool = False) -> None:
        """These in a new file, in place of this one. `OSError`: nothing has changed."""
        size = sum(map(len, notes))
        pieces = [*notes, mark(len(notes), size)] if sealed else notes
        temporary = f"{self.path}.tmp"
        try:
            file = put(self._disk, temporary, pieces)
        except OSError:  # this one is as it was
            with contextlib.suppress(OSError):
                self._disk.remove(temporary)
            raise
        old = self._tail
        try:
            self._disk.rename(temporary, self.path)
        except OSError as error:
            file.close()
            if old is not None:
                old.fail("written anew", error)
            raise
        self._tail = Tail(file, self.what, sum(map(len, pieces)))
        if old is not None:
            old.file.close()
        self.count = len(notes)
        try:
            self._disk.sync_directory(self.directory)
        except OSError as error:
            self._tail.fail("written anew", error)

    def close(self) -> None:
        """Sync, mark, and leave the file."""
        self.tail.close(self.count)

    # ------------------------------------------------------------ inside

    def _read(self, file: File, size: int, take: Take) -> Found:
        data, at = b"", 0  # what was read and not looked at begins there
        found = Found()
        while found.size < size:
            if data[at : at + 4] == MARK and len(data) - at >= MARK_SIZE:
                if read_mark(data, at, found.size) != found.count:
                    found.problem = what_mark(data, at, found.size)
                    break
                at += MARK_SIZE
                found.size += MARK_SIZE
                continue
            note = unpack(self._magic, data, at)
            if note is None:
                version = data[at : at + 4]
                if is_later(self._magic, data, at):
                    raise later_format(self.what, f"a record {version!r} at byte {found.size}")
                known = found.size + len(data) - at  # so far the file was read
                more = file.read(known, min(_CHUNK, size - known)) if known < size else b""
                if not more:
                    found.problem = "there is no record, or a part of one"
                    break
                data, at = data[at:] + more, 0
                continue
            kind, name, body, end = note
            take(kind, name, body)
            found.count += 1
            found.size += end - at
            at = end
        return found


def pack(magic: bytes, kind: int, body: bytes, name: str = "") -> bytes:
    """A note as it stands in a file.

    >>> unpack(b"NOTE", pack(b"NOTE", 1, b"body", "name"), 0)
    (1, 'name', b'body', 24)
    """
    called = name.encode()
    size = _NOTE.size + len(called) + len(body)
    rest = _NOTE.pack(magic, 0, size, kind, len(called))[8:] + called + body
    return magic + struct.pack("<I", crc32(rest)) + rest


def unpack(magic: bytes, data: bytes, at: int) -> tuple[int, str, bytes, int] | None:
    """Kind, name, body and end of the note that begins there, if it is whole."""
    if len(data) - at < _NOTE.size:
        return None
    found, crc, size, kind, length = _NOTE.unpack_from(data, at)
    end = at + size
    if found != magic or end > len(data) or size < _NOTE.size + length:
        return None
    if crc32(memoryview(data)[at + 8 : end]) != crc:
        return None
    body = at + _NOTE.size + length
    return kind, data[at + _NOTE.size : body].decode(), data[body:end], end


def is_later(magic: bytes, data: bytes, at: int) -> bool:
    """Return whether a whole note of another version begins there: see rule 5.

    >>> rest = struct.pack("<IHH", 16, 1, 0)
    >>> note = b"NOT2" + struct.pack("<I", crc32(rest, crc32(b"NOT2"))) + rest
    >>> is_later(b"NOT1", note, 0), is_later(b"NOT2", note, 0)
    (True, False)
    """
    if len(data) - at < _NOTE.size:
        return False
    found, crc, size, _, _ = _NOTE.unpack_from(data, at)
    if found == magic or found[:3] != magic[:3] or not _NOTE.size <= size <= len(data) - at:
        return False
    return bool(crc32(memoryview(data)[at + 8 : at + size], crc32(found)) == crc)
