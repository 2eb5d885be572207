"""Append short entries to a file, the journal, in which a crash can tear only the last entries.

An entry is a line: eight hexadecimal digits, the CRC-32 of the rest; how many bytes before the line were safe when it
was written; and JSON. People can read it. The first line says how many of the next lines were written together with it.

Rules:

1. `add` with `sync` returns when the entries are safe on disk.
2. An incomplete line and everything after it are cut off when the journal is opened, if the line was never promised: a
   power cut may lose any part of the data that was not synced. If a later line, or the first one, says that the
   incomplete line was safe, something else has changed the file. Then the file stays as it is, and `open` raises an
   error: the entries that follow were promised.
3. After an entry could not be written or synced, the content of the disk is unknown: the journal takes no more entries
   before `rewrite`. `open` rewrites the journal, too: after a failed sync the system may show data that is not on disk.
4. `rewrite` replaces all entries, completely or not at all. If it fails, it is unknown which: rule 3.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from zlib_ng.zlib_ng import crc32

from railgun.ingest.errors import SinkError
from railgun.sinks.staging import sync_directory

_FIRST: Final = "together"  # key of the first line: the number of entries that were written with it
_BEGIN: Final = re.compile(rb"[0-9a-f]{8} [0-9]+ ")


class Journal:
    """The entries of one journal file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "journal"
    >>> journal, entries = Journal.open(path)
    >>> journal.add({"n": 1}); journal.add({"n": 2}); journal.close()
    >>> with path.open("ab") as file: _ = file.write(b"torn")
    >>> journal, entries = Journal.open(path); entries
    [{'n': 1}, {'n': 2}]
    >>> journal.close()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        self.cut = 0
        """Bytes that were cut off when the journal was opened."""
        self._file = -1
        self._size = self._safe = 0  # bytes of the file, and of these, synced

    @staticmethod
    def open(path: Path) -> tuple[Journal, list[Any]]:
        """Open the journal in this file, or make an empty one; return it with its entries.

        Raise `SinkError` if the file is damaged in a way that no crash explains (rule 2).
        """
        journal = Journal(path)
        try:
            entries, whole, size = _opened(path)
        except FileNotFoundError:
            entries, whole, size = [], 0, 0
        journal.cut = size - whole
        journal.rewrite(entries)
        return journal, entries

    @property
    def broken(self) -> bool:
        """Whether an entry could not be written, so that the journal takes no more before `rewrite`."""
        return self._file < 0

    def add(self, *entries: Any, sync: bool = True) -> None:
        """Write entries at the end; raise `OSError` if they, or others before, could not be written."""
        if self._file < 0:
            raise OSError(f"{self.path} could not be written before: open it again")
        file, self._file = self._file, -1
        data = b"".join(line(entry, self._safe) for entry in entries)
        try:
            _write(file, data)
            if sync:
                os.fsync(file)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self._size += len(data)
        if sync:
            self._safe = self._size
        self.lines += len(entries)

    def rewrite(self, entries: Iterable[Any]) -> None:
        """Replace all entries by these."""
        lines = list(map(line, entries))
        data = b"".join((line({_FIRST: len(lines)}), *lines))
        self.close()
        new = self.path.with_name(f"{self.path.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        file = os.open(new, flags, 0o666)
        try:
            _write(file, data)
            os.fsync(file)
            os.rename(new, self.path)
            sync_directory(self.path.parent)
        except BaseException:
            os.close(file)
            raise
        self._file, self.lines = file, len(lines)
        self._size = self._safe = len(data)

    def close(self) -> None:
        """Close the file; `rewrite` opens it again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def line(entry: Any, safe: int = 0) -> bytes:
    """Return the line of an entry that is written when `safe` bytes before it are synced."""
    content = b"%d %s" % (safe, json.dumps(entry, separators=(",", ":")).encode())
    return b"%08x %s\n" % (crc32(content), content)


def read(data: bytes) -> tuple[list[Any], int]:
    """Return the entries up to the first incomplete one, and how many bytes they have."""
    entries: list[Any] = []
    at = 0
    while (end := data.find(b"\n", at)) >= 0:
        entry = _entry(data[at:end])
        if entry is None:
            break
        entries.append(entry[1])
        at = end + 1
    return entries, at


def _entry(text: bytes) -> tuple[int, Any] | None:
    """Return how many bytes before this line were safe, and its entry; None if the line is incomplete."""
    code, content = text[:8], text[9:]
    if text[8:9] != b" " or code != b"%08x" % crc32(content):
        return None
    safe, _, entry = content.partition(b" ")
    return int(safe), json.loads(entry)


def _promised(data: bytes, whole: int) -> bool:
    """Return whether an entry after the first incomplete line says that this line was safe."""
    # Entries are looked for at any byte, not at line starts only: the damaged byte may be an end of line.
    for begin in _BEGIN.finditer(data, whole + 1):
        end = data.find(b"\n", begin.end())
        entry = None if end < 0 else _entry(data[begin.start() : end])
        if entry is not None and entry[0] > whole:
            return True
    return False


def _opened(path: Path) -> tuple[list[Any], int, int]:
    """Return the entries of a journal, how many bytes they have, and how many bytes the file has."""
    data = path.read_bytes()
    entries, whole = read(data)
    together = entries[0][_FIRST] if entries and _FIRST in entries[0] else None
    if together is None or len(entries) - 1 < together or _promised(data, whole):
        raise SinkError(
            "BAD_JOURNAL",
            f"{path} is damaged at byte {whole:,}, and the entries after it were promised. Nothing was changed. Restore"
            " the file from a copy; or remove it, if the transactions in it may be lost",
        )
    return entries[1:], whole, len(data)


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
