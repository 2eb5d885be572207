"""Append records to one file as lines, each once.

Rules:

1. The file belongs to the target. Content from before the first start stays at its beginning.
2. A journal beside the file, `.<name>.journal`, says at which byte each transaction ends. An entry in it is the commit.
   The entry is written when the bytes are safe in the file.
3. The names of the file, of the journal, and of directories made for them are synced, too.
4. Bytes after the last entry are left over from a crash. They are cut off before anything is written.
5. A file that is shorter than its journal says was changed by another program. Then nothing is written, and the error
   says what to do. A journal with complete entries after an incomplete one was changed too: a crash tears only the end.
   Then the target does not open, and the file stays as it is.
6. One program at a time writes the file.
7. A reader may see lines, or a part of a line, before they are committed. The server has decided on them by then, and
   writes the same lines again after a crash: a line that was seen once stays at the same place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from railgun.sinks.staging import sync_directory
from railgun.sinkserver.journal import Journal
from railgun.sinkserver.targets import (
    REMEMBERED_TRANSACTIONS,
    BadRecordError,
    Records,
    Target,
    TargetError,
)
from railgun.storage.errors import LockedError
from railgun.storage.lock import FileLock

_REWRITE_LINES: Final = 10 * REMEMBERED_TRANSACTIONS
"""Lines of the journal after which it is rewritten."""


class FileTarget(Target):
    """A target that appends records to one file; with `raw` they are written without an end of line after each.

    >>> import tempfile
    >>> from railgun.sinkserver.staged import InMemoryRecords
    >>> target = FileTarget(Path(tempfile.mkdtemp()) / "out.jsonl")
    >>> target.open()
    >>> records = InMemoryRecords([b'{"a":1}', b'{"a":2}'])
    >>> target.apply("t1", records); target.apply("t1", records)
    >>> target.path.read_text()
    '{"a":1}\\n{"a":2}\\n'
    >>> target.close()
    """

    def __init__(self, path: str | os.PathLike[str], *, raw: bool = False) -> None:
        self.path = Path(path).absolute()
        self.raw = raw
        self.length = 0
        """The number of bytes of the file that are committed."""
        self._journal: Journal | None = None
        self._applied: dict[str, int] = {}  # the byte at which each of the last transactions ends
        self._lock: FileLock | None = None

    def __str__(self) -> str:
        return str(self.path)

    def open(self) -> None:
        """Lock the file, and cut off what a crash has left behind; raise `TargetError` if another sink writes it."""
        try:
            _make_directory(self.path.parent)
            if self._lock is None:
                self._lock = FileLock(self._beside("lock"))
            self._recover()
        except LockedError as error:
            raise TargetError(
                f"{self.path} is written by another sink: stop it, or write another file"
            ) from error
        except BaseException as error:
            self.close_journal()
            if isinstance(error, OSError):
                raise self._error(error) from error
            raise

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{ending}")

    def _recover(self) -> None:
        self.close_journal()
        journal, entries = Journal.open(self._beside("journal"))
        self._journal = journal
        size = self.path.stat().st_size if self.path.exists() else 0
        if not entries:
            journal.add({"begin": size})
            entries = [{"begin": size}]
        self._applied = {entry["txn"]: entry["end"] for entry in entries if "txn" in entry}
        self.length = max(entry.get("end", entry.get("begin")) for entry in entries)
        os.close(self._opened())
        sync_directory(self.path.parent)

    def _opened(self) -> int:
        """Open the file, and cut it to its committed length; raise `TargetError` if it is shorter."""
        new = not self.path.exists()
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if new:
                sync_directory(self.path.parent)
            size = os.fstat(file).st_size
            if size < self.length:
                raise TargetError(
                    f"{self.path} has {size:,} bytes, and {self.length:,} were written: another program has cut or "
                    f"replaced it. Restore it; or stop the sink, and remove {self._beside('journal')} to begin with "
                    "the file as it is"
                )
            if size > self.length:
                os.ftruncate(file, self.length)
        except BaseException:
            os.close(file)
            raise
        return file

    def check(self, records: Records) -> None:
        """Raise `BadRecordError` for a record with an end of line in it, unless the target is `raw`."""
        if self.raw:
            return
        number = 0
        for batch in records.batches():
            for at, record in enumerate(batch, number):
                if b"\n" in record:
                    raise BadRecordError(
                        f"record {at} contains an end of line, and each record is one line of {self.path}: write it as "
                        "JSON, or write raw bytes (raw=True, --raw)",
                        at,
                    )
            number += len(batch)

    def apply(self, transaction: str, records: Records) -> None:
        """Append the lines, then the entry that commits them."""
        try:
            if self._journal is None:
                self._recover()
            journal = self._journal
            assert journal is not None
            if transaction in self._applied:
                return
            end = self._append(records)
            journal.add({"txn": transaction, "end": end})
            self._applied[transaction] = self.length = end
            if journal.lines > _REWRITE_LINES:
                self._applied = dict(list(self._applied.items())[-REMEMBERED_TRANSACTIONS:])
                journal.rewrite({"txn": t, "end": e} for t, e in self._applied.items())
        except BaseException as error:
            self.close_journal()  # the next call reads it again
            if isinstance(error, OSError):
                raise self._error(error) from error
            raise

    def _append(self, records: Records) -> int:
        file = self._opened()
        try:
            at, end = self.length, b"" if self.raw else b"\n"
            for batch in records.batches():
                left = memoryview(end.join((*batch, b"")))
                while left:
                    written = os.pwrite(file, left, at)
                    at, left = at + written, left[written:]
            os.fsync(file)
            return at
        finally:
            os.close(file)

    def _error(self, error: OSError) -> TargetError:
        return TargetError(f"{self.path} cannot be written: {error.strerror or error}")

    def close_journal(self) -> None:
        """Close the journal; the next call that needs it reads it again."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def close(self) -> None:
        """Close the journal, and unlock the file."""
        self.close_journal()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _make_directory(path: Path) -> None:
    """Make a directory and its parents, each synced in its parent."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)
