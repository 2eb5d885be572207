"""A journal: short entries in a file that grows, of which the last one may be torn.

An entry is a line: eight hexadecimal digits, the CRC-32 of what follows, a space, and JSON. People can read it.

Rules:

1. `add` with `sync` returns when the entries are there for good.
2. What follows the first line that is not whole was never promised to anybody, and is cut off when it is opened.
3. If an entry cannot be written, or not be synced, nobody knows what is on the disk: the journal takes no more
   before `rewrite`, which is also how it is opened: after a failed sync the system may show what is not on the disk.
4. `rewrite` puts other entries in place of all, wholly or not at all.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from railgun.connectors.staging import sync_directory


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

    @staticmethod
    def open(path: Path) -> tuple[Journal, list[Any]]:
        """The journal in this file, which is made if there is none; and its entries."""
        journal = Journal(path)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        entries, whole = read(data)
        journal.cut = len(data) - whole
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
        try:
            _write(file, b"".join(map(line, entries)))
            if sync:
                os.fsync(file)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self.lines += len(entries)

    def rewrite(self, entries: Iterable[Any]) -> None:
        """Put these in place of all."""
        lines = list(map(line, entries))
        new = self.path.with_name(f"{self.path.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        file = os.open(new, flags, 0o666)
        try:
            _write(file, b"".join(lines))
            os.fsync(file)
            os.rename(new, self.path)
            sync_directory(self.path.parent)
        except BaseException:
            os.close(file)
            raise
        self.close()
        self._file, self.lines = file, len(lines)

    def close(self) -> None:
        """Leave it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def line(entry: Any) -> bytes:
    """An entry as it is written."""
    told = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(told), told)


def read(data: bytes) -> tuple[list[Any], int]:
    """The entries up to the first that is not whole, and how many bytes they have."""
    entries: list[Any] = []
    at = 0
    while (end := data.find(b"\n", at)) >= 0:
        code, told = data[at : at + 8], data[at + 9 : end]
        if data[at + 8 : at + 9] != b" " or code != b"%08x" % zlib.crc32(told):
            break
        entries.append(json.loads(told))
        at = end + 1
    return entries, at


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
