"""FileTarget: records as lines of one file that grows, each once.

Rules:

1. The file is the target's. What was in it at the first start stays at its beginning.
2. Beside it lies a journal, `.<name>.journal`: which transaction ends at which byte. An entry there is the commit. It
   is written when the bytes are safe in the file.
3. Names are made safe, too: of the file, the journal, and directories that were made for them.
4. Bytes after the last entry belong to nobody: a crash has left them. They are cut off before anything is written.
5. A file that is shorter than its journal says was changed by somebody else. Nothing is written then; the error says
   what to do. So was a journal with whole entries after one that is not: a crash tears only the end. With it nothing is
   begun, and the file stays as it is.
6. One program at a time has the file.
7. A reader may see lines before they are committed, or a part of one. The server has decided on them by then, and
   begins with the same ones after a crash: what was seen once is there in the end, at the same place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from railgun.sinks.staging import sync_directory
from railgun.sinkserver.journal import Journal
from railgun.sinkserver.targets import REMEMBERED, BadRecordError, Records, Target, TargetError
from railgun.storage.errors import LockedError
from railgun.storage.lock import FileLock

_LINES: Final = 10 * REMEMBERED  # of a journal, until it is written anew


class FileTarget(Target):
    """One file. `raw`: records as they are, without an end of line after each.

    >>> import tempfile
    >>> from railgun.sinkserver.staged import Given
    >>> target = FileTarget(Path(tempfile.mkdtemp()) / "out.jsonl")
    >>> target.open()
    >>> target.apply("t1", Given([b'{"a":1}', b'{"a":2}'])); target.apply("t1", Given([b'{"a":1}', b'{"a":2}']))
    >>> target.path.read_text()
    '{"a":1}\\n{"a":2}\\n'
    >>> target.close()
    """

    def __init__(self, path: str | os.PathLike[str], *, raw: bool = False) -> None:
        self.path = Path(path).absolute()
        self.raw = raw
        self.length = 0
        """Bytes that are committed."""
        self._journal: Journal | None = None
        self._applied: dict[str, int] = {}  # which transaction ends where; the last ones
        self._lock: FileLock | None = None

    def __str__(self) -> str:
        return str(self.path)

    def open(self) -> None:
        """Take the file, and cut off what a crash has left behind."""
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
        """The file, as long as it is committed."""
        new = not self.path.exists()
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if new:
                sync_directory(self.path.parent)
            size = os.fstat(file).st_size
            if size < self.length:
                raise TargetError(
                    f"{self.path} has {size:,} bytes, and {self.length:,} were written: somebody has cut or replaced "
                    f"it. Put it back; or stop the sink, and take away {self._beside('journal')} to begin with the "
                    "file as it is"
                )
            if size > self.length:
                os.ftruncate(file, self.length)
        except BaseException:
            os.close(file)
            raise
        return file

    def check(self, records: Records) -> None:
        """A record is one line."""
        if self.raw:
            return
        number = 0
        for batch in records.batches():
            for at, record in enumerate(batch, number):
                if b"\n" in record:
                    raise BadRecordError(
                        f"record {at} has an end of line in it, and is to be one line of {self.path}: write it as JSON"
                        ", or let the sink write raw bytes",
                        at,
                    )
            number += len(batch)

    def apply(self, transaction: str, records: Records) -> None:
        """Write the lines, then the entry that makes them count."""
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
            if journal.lines > _LINES:
                self._applied = dict(list(self._applied.items())[-REMEMBERED:])
                journal.rewrite({"txn": t, "end": e} for t, e in self._applied.items())
        except BaseException as error:
            self.close_journal()  # it is read anew
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
        """Leave the journal; it is read anew when it is needed."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def close(self) -> None:
        """Leave the file to others."""
        self.close_journal()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _make_directory(path: Path) -> None:
    """A directory, and those it is in, each safe in the one above."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)
