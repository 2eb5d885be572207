"""A journal: short entries in a file that grows, of which the last one may be torn.

An entry is a line: eight hexadecimal digits, the CRC-32 of what follows; how many bytes before it were safe when it was
written; and JSON. People can read it. The first line says how many of the next ones were written together with it.

Rules:

1. `add` with `sync` returns when the entries are there for good.
2. A line that is not whole, and all that follows it, is cut off when the journal is opened, if it was never promised: a
   power cut may lose any part of what was not synced. If a line after it says that it was safe, or the first one
   does, something else has changed the file. Then it stays as it is, and is not opened: what follows was promised.
3. If an entry cannot be written, or not be synced, nobody knows what is on the disk: the journal takes no more
   before `rewrite`, which is also how it is opened: after a failed sync the system may show what is not on the disk.
4. `rewrite` puts other entries in place of all, wholly or not at all. If it fails, nobody knows which: rule 3.
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

_FIRST: Final = "together"  # in the first line: so many entries follow that were written with it
_BEGIN: Final = re.compile(rb"[0-9a-f]{8} [0-9]+ ")


class Journal:
    """Entries on disk.

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
        """Bytes that were cut off when it was opened."""
        self._file = -1
        self._size = self._safe = 0  # bytes of the file, and of these, synced

    @staticmethod
    def open(path: Path) -> tuple[Journal, list[Any]]:
        """The journal in this file, which is made if there is none; and its entries."""
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
        """Whether something could not be written, so that it takes no more before `rewrite`."""
        return self._file < 0

    def add(self, *entries: Any, sync: bool = True) -> None:
        """Write these after those that are there."""
        if self._file < 0:
            raise OSError(f"{self.path} could not be written before: open it anew")
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
        """Put these in place of all."""
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
        """Leave it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def line(entry: Any, safe: int = 0) -> bytes:
    """An entry as it is written, after so many bytes that are safe."""
    told = b"%d %s" % (safe, json.dumps(entry, separators=(",", ":")).encode())
    return b"%08x %s\n" % (crc32(told), told)


def read(data: bytes) -> tuple[list[Any], int]:
    """The entries up to the first that is not whole, and how many bytes they have."""
    entries: list[Any] = []
    at = 0
    while (end := data.find(b"\n", at)) >= 0:
        found = _entry(data[at:end])
        if found is None:
            break
        entries.append(found[1])
        at = end + 1
    return entries, at


def _entry(text: bytes) -> tuple[int, Any] | None:
    """How much was safe before this line, and what it says; None if it is not whole."""
    code, told = text[:8], text[9:]
    if text[8:9] != b" " or code != b"%08x" % crc32(told):
        return None
    safe, _, entry = told.partition(b" ")
    return int(safe), json.loads(entry)


def _promised(data: bytes, whole: int) -> bool:
    """Whether something after the first line that is not whole says that this one was safe."""
    for begin in _BEGIN.finditer(
        data, whole + 1
    ):  # wherever it begins: an end of line may be what is damaged
        end = data.find(b"\n", begin.end())
        found = None if end < 0 else _entry(data[begin.start() : end])
        if found is not None and found[0] > whole:
            return True
    return False


def _opened(path: Path) -> tuple[list[Any], int, int]:
    """The entries of a journal, how many bytes they have, and how many the file has."""
    data = path.read_bytes()
    entries, whole = read(data)
    together = entries[0][_FIRST] if entries and _FIRST in entries[0] else None
    if together is None or len(entries) - 1 < together or _promised(data, whole):
        raise SinkError(
            "BAD_JOURNAL",
            f"{path} is damaged at byte {whole:,}, and what follows was promised to somebody. Nothing was changed. Put "
            "a copy of the file in its place; or take the file away, if what it promises may be lost",
        )
    return entries[1:], whole, len(data)


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
