"""Notes: small records in one file, one after the other; the file is rewritten when it has grown.

This module does not know what the notes say: its users do (`group_log`, `cluster/wal`).

Rules:

1. A note has a kind, a name (which may be empty), a body, and a checksum over all of them. Each kind of file has its
   own notes, recognized by their first four bytes.
2. `append` writes all of its notes or none; they are durable after `sync`. After a crash all synced notes are there,
   and of the others the first few.
3. `recover` cuts off a torn end. Bytes that were synced and are bad now are damage: the file is not changed, and the
   caller is told. Marks, which count the notes before them, tell the two apart (`railgun.broker.log.tail`).
4. `replace` writes another file, syncs it, renames it over this one, and syncs the directory. A crash leaves the one
   or the other. If the new file cannot be written, the old one is unchanged and stays in use. A *sealed* file ends with
   a mark: it gets its name only after it is synced, so its whole content was durable, whatever happens to it later.
5. The last of the first four bytes is the version of the notes. Later versions keep checksum and size where they are,
   and begin the checksum with these four bytes. So a note of a later version can be told from a torn or damaged one:
   `LaterFormatError` is raised before anything is changed. The same error is raised for an end that looks torn and
   begins with a later version, whatever its checksum. Users of the notes raise it for a kind of note or a body of a
   later version.
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
from railgun.broker.log.tail import (
    MARK,
    MARK_SIZE,
    Tail,
    describe_bad_mark,
    has_mark,
    mark,
    read_mark,
)
from railgun.transport.records import is_later as is_later_magic

Take: TypeAlias = Callable[[int, str, bytes], object]
"""Called with the kind, the name and the body of each note."""

# Magic, CRC of all that follows, size of the whole note, kind, size of the name.
_NOTE: Final = struct.Struct("<4sIIHH")
_READ_BYTES: Final = 1 << 18


@dataclass(slots=True)
class ReadSummary:
    """The result of reading a file: how many notes and bytes were read, and why reading stopped ("": at the end)."""

    count: int = 0
    size: int = 0
    problem: str = ""
    damaged: bool = False
    """Whether the problem is damage, and not a torn end."""


class Notes:
    """A file of notes; `what` names it in errors. The file exists after `recover`, `create` or `replace`.

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
    ReadSummary(count=2, size=93, problem='', damaged=False)
    >>> notes.close()
    """

    def __init__(self, disk: Disk, directory: str, name: str, magic: bytes, what: str) -> None:
        self.directory, self.path, self.what = directory, f"{directory}/{name}", what
        self.count = 0
        """Number of notes in the file."""
        self.cut_bytes = 0
        """Bytes of a torn end that `recover` has cut off."""
        self._disk, self._name, self._magic = disk, name, magic
        self._tail: Tail | None = None

    @property
    def tail(self) -> Tail:
        """The end of the file, where notes are appended."""
        assert self._tail is not None, f"{self.what} was not made"
        return self._tail

    # ------------------------------------------------------------ opening

    def recover(self, take: Take, least: int = 0) -> ReadSummary | None:
        """Read the notes and cut off a torn end; return None if there is no file.

        A damaged file stays unchanged, and must not be written to. A file with fewer than the `least` notes that were
        ever in it counts as damaged.
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
            summary = self._read(file, file.size(), take)
            if summary.count < least or (
                summary.problem and has_mark(file, summary.size, self._magic)
            ):
                if is_later_magic(self._magic, file.read(summary.size, 4), certain=True):
                    raise self._later_tail(file, summary.size)
                summary.damaged = True
                summary.problem = summary.problem or "it has no beginning"
                file.close()
                return summary
            if summary.problem:
                if is_later_magic(self._magic, file.read(summary.size, 4)):
                    raise self._later_tail(file, summary.size)
                torn = file.size() - summary.size
                with unless_read_only():  # the tail then fails, because it cannot cut off either
                    file.truncate(summary.size)
                    self.cut_bytes = torn
            tail = Tail(file, self.what, summary.size)
            tail.try_write()
            file.sync()  # writes of a killed process may be in the page cache only
            disk.sync_directory(self.directory)
        except BaseException:
            file.close()
            raise
        self.count = summary.count
        self._tail = tail
        return summary

    def _later_tail(self, file: File, position: int) -> LaterFormatError:
        version = file.read(position, 4)
        return later_tail(self.what, self._disk.where(self.path), position, version)

    def create(self) -> None:
        """Make an empty file."""
        self._tail = Tail(self._disk.create(self.path), self.what, 0)
        self._disk.sync_directory(self.directory)

    # ------------------------------------------------------------ writing and reading

    def pack(self, kind: int, body: bytes, name: str = "") -> bytes:
        """Return a note, ready to be appended."""
        return pack(self._magic, kind, body, name)

    def append(self, notes: Sequence[bytes]) -> None:
        """Write these notes at the end, all or none."""
        if notes:
            self.tail.append(notes, self.count)
            self.count += len(notes)

    def sync(self) -> None:
        """Make all written notes durable."""
        self.tail.sync()

    def read(self, take: Take) -> ReadSummary:
        """Read all notes that were written."""
        return self._read(self.tail.file, self.tail.size, take)

    def replace(self, notes: Sequence[bytes], *, sealed: bool = False) -> None:
        """Write these notes to a new file, in place of this one. After an `OSError` the old file is unchanged."""
        size = sum(map(len, notes))
        pieces = [*notes, mark(len(notes), size)] if sealed else notes
        temporary = f"{self.path}.tmp"
        try:
            file = put(self._disk, temporary, pieces)
        except OSError:  # the old file is unchanged
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
        """Sync, write a mark, and close the file."""
        self.tail.close(self.count)

    def _read(self, file: File, size: int, take: Take) -> ReadSummary:
        data, at = b"", 0  # bytes that were read; those from `at` on were not parsed yet
        summary = ReadSummary()
        while summary.size < size:
            if data[at : at + 4] == MARK and len(data) - at >= MARK_SIZE:
                if read_mark(data, at, summary.size) != summary.count:
                    summary.problem = describe_bad_mark(data, at, summary.size)
                    break
                at += MARK_SIZE
                summary.size += MARK_SIZE
                continue
            note = unpack(self._magic, data, at)
            if note is None:
                version = data[at : at + 4]
                if is_later(self._magic, data, at):
                    raise later_format(self.what, f"a record {version!r} at byte {summary.size}")
                read_to = summary.size + len(data) - at
                more = (
                    file.read(read_to, min(_READ_BYTES, size - read_to)) if read_to < size else b""
                )
                if not more:
                    summary.problem = "there is no record, or a part of one"
                    break
                data, at = data[at:] + more, 0
                continue
            kind, name, body, end = note
            take(kind, name, body)
            summary.count += 1
            summary.size += end - at
            at = end
        return summary


def pack(magic: bytes, kind: int, body: bytes, name: str = "") -> bytes:
    """Return a note as it stands in a file.

    >>> unpack(b"NOTE", pack(b"NOTE", 1, b"body", "name"), 0)
    (1, 'name', b'body', 24)
    """
    name_bytes = name.encode()
    size = _NOTE.size + len(name_bytes) + len(body)
    rest = _NOTE.pack(magic, 0, size, kind, len(name_bytes))[8:] + name_bytes + body
    return magic + struct.pack("<I", crc32(rest)) + rest


def unpack(magic: bytes, data: bytes, at: int) -> tuple[int, str, bytes, int] | None:
    """Return kind, name, body and end of the note that begins at byte `at`; None if there is no whole note."""
    if len(data) - at < _NOTE.size:
        return None
    note_magic, crc, size, kind, length = _NOTE.unpack_from(data, at)
    end = at + size
    if note_magic != magic or end > len(data) or size < _NOTE.size + length:
        return None
    if crc32(memoryview(data)[at + 8 : end]) != crc:
        return None
    body = at + _NOTE.size + length
    return kind, data[at + _NOTE.size : body].decode(), data[body:end], end


def is_later(magic: bytes, data: bytes, at: int) -> bool:
    """Return whether a whole note of another version begins at byte `at`: see rule 5.

    >>> rest = struct.pack("<IHH", 16, 1, 0)
    >>> note = b"NOT2" + struct.pack("<I", crc32(rest, crc32(b"NOT2"))) + rest
    >>> is_later(b"NOT1", note, 0), is_later(b"NOT2", note, 0)
    (True, False)
    """
    if len(data) - at < _NOTE.size:
        return False
    note_magic, crc, size, _, _ = _NOTE.unpack_from(data, at)
    if (
        note_magic == magic
        or note_magic[:3] != magic[:3]
        or not _NOTE.size <= size <= len(data) - at
    ):
        return False
    return bool(crc32(memoryview(data)[at + 8 : at + size], crc32(note_magic)) == crc)
