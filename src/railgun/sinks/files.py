"""Write results as lines of files.

Rules:

1. Exactly once, the default of a flow that takes snapshots: what a worker writes between two snapshots is one file,
   `part-<step>-<snapshot>-<worker>-<generation>-<random>.jsonl` (or `.txt`). The file appears, complete, once the
   second snapshot is on disk, and never changes. `staging.py` says how, whatever crashes. Every worker, and the program
   that starts the flow, must see the same directory.
2. At least once, and in a flow without snapshots: a worker appends to `part-<step>-<worker>-<generation>.jsonl`, and
   lines are visible about a second later. No two workers share a file, and after the flow went back to a snapshot its
   workers begin new files. Lines that the older files have from after that snapshot appear again.
3. Whole lines are written at once, so a reader never sees half a line before another.
4. An item is one line. An item that cannot be encoded is refused, and nothing of its batch is written.
"""

from __future__ import annotations

import dataclasses
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from railgun.engine.operators.operator import DeadLetter, shorten
from railgun.flows.errors import ConnectorError
from railgun.flows.sink import Place, Token, TwoPhaseWriter, Writer
from railgun.sinks.staging import Mode, StagedFile, StagedSink, Staging, sync_directory

T = TypeVar("T")
_FLUSH_BYTES: Final = 1 << 18  # collected before they are written


class Files(StagedSink):
    """Writes lines of JSON (dataclasses as objects), or of `str(item)`, to files of a directory, which is made if
    missing.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp()) / "out"
    >>> writer = Files(directory).open(Place("demo", "totals", worker=3, generation=1))
    >>> writer.write([{"name": "ada", "n": 1}, ["grace", 2.5]]); writer.flush()
    >>> print((directory / "part-totals-3-1.jsonl").read_text(), end="")
    {"name":"ada","n":1}
    ["grace",2.5]

    If the flow takes snapshots, lines appear with them, exactly once; with `mode="at-least-once"` they appear at once.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        format: Literal["json", "text"] = "json",
        mode: Mode = "exactly-once",
    ) -> None:
        super().__init__(directory, mode)
        if format not in ("json", "text"):
            raise ConnectorError(
                f"Files({str(directory)!r}) writes 'json' or 'text', not {format!r}"
            )
        self.format = format

    def open(self, place: Place) -> Writer[Any]:
        """Return the writer of one worker."""
        ending = ".jsonl" if self.format == "json" else ".txt"
        encode = as_json if self.format == "json" else as_text
        if place.transactional and self.mode == "exactly-once":
            return _Staging(encode, Staging(self.directory, place, ending))
        name = f"part-{place.step}-{place.worker}-{place.generation}{ending}"
        return _Appending(encode, place.step, self.directory / name)


def encoded(
    encode: Callable[[Any], T], items: Sequence[Any], step: str, verb: str, target: str
) -> list[T]:
    """Encode all items; if one cannot be encoded, raise `ConnectorError` with the item and its target."""
    results: list[T] = []
    try:
        results.extend(map(encode, items))
    except (TypeError, ValueError, RecursionError) as error:
        item = items[len(results)]
        raise ConnectorError(
            f"sink {step!r} cannot {verb} the {type(item).__name__} {shorten(item)} {target}: {error}; .map() it to "
            "something else before the sink"
        ) from error
    return results


class _Lines(TwoPhaseWriter[Any]):
    """Encodes items as lines, and writes many lines at once."""

    def __init__(self, encode: Callable[[Any], str], step: str, path: Path) -> None:
        self.encode = encode
        self.step = step
        self.path = path
        self.waiting: list[bytes] = []
        self.size = 0

    def write(self, items: Sequence[Any]) -> None:
        lines = encoded(self.encode, items, self.step, "write", f"to {self.path}")
        lines.append("")
        data = "\n".join(lines).encode("utf-8", "backslashreplace")  # half a surrogate pair: \ud83d
        self.waiting.append(data)
        self.size += len(data)
        if self.size >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            self.put(b"".join(self.waiting))
            self.waiting, self.size = [], 0

    @abstractmethod
    def put(self, data: bytes) -> None:
        """Write the bytes of whole lines to the file."""


class _Appending(_Lines):
    """Appends lines to a file that readers see at once."""

    def __init__(self, encode: Callable[[Any], str], step: str, path: Path) -> None:
        super().__init__(encode, step, path)
        self.unsafe = False  # whether something was written since the last fsync
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise self._error(error) from error

    def put(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self.file, left) :]
        except OSError as error:
            self.waiting = [bytes(left)]
            raise self._error(error) from error
        self.unsafe = True

    def prepare(self, snapshot: int) -> Token | None:
        return self.cut(snapshot)()

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        """Leave nothing to commit, but make sure that lines written before the snapshot survive a loss of power."""
        self.flush()
        unsafe, self.unsafe = self.unsafe, False
        return self._sync if unsafe else lambda: None

    def _sync(self) -> None:
        try:
            os.fsync(self.file)
            sync_directory(self.path.parent)
        except OSError as error:
            self.unsafe = True
            raise self._error(error) from error

    def close(self) -> None:
        if self.file >= 0:
            self.flush()
            os.close(self.file)
            self.file = -1

    def _error(self, error: OSError) -> ConnectorError:
        return ConnectorError(f"sink {self.step!r} cannot write {self.path}: {error.strerror}")


class _Staging(_Lines):
    """Writes lines for the next snapshot to a file that readers do not see."""

    def __init__(self, encode: Callable[[Any], str], staging: Staging) -> None:
        super().__init__(encode, staging.place.step, staging.directory)
        self.staging = staging
        self.staged: StagedFile | None = None
        self.sealed: StagedFile | None = None  # the last file that was cut

    def put(self, data: bytes) -> None:
        if self.staged is None:
            self.staged = self.staging.create()
        self.staged.write(data)
        self.staged.flush()

    def prepare(self, snapshot: int) -> Token | None:
        return self.cut(snapshot)()

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        if self.sealed is not None:
            self.sealed.check()
        self.flush()
        staged, self.staged = self.staged, None
        self.sealed = staged
        return lambda: None if staged is None else staged.seal(snapshot)

    def close(self) -> None:
        self.waiting, self.size = [], 0
        if self.sealed is not None:
            self.sealed.discard_failed()
        if self.staged is not None:
            self.staged.discard()
            self.staged = None


def as_text(item: Any) -> str:
    """Return an item as a line of text."""
    text = str(item)
    if "\n" in text:
        raise ValueError("it has a newline in it; write it as JSON")
    return text


def as_json(item: Any) -> str:
    """Return an item as a line of JSON. A dead letter has such a line whatever its key and record are."""
    if isinstance(item, DeadLetter):
        return _dead_letter_line(item)
    return _encode(item)


def _dead_letter_line(letter: DeadLetter) -> str:
    fields = _fields(letter)
    for name in ("key", "record"):
        try:
            _encode(fields[name])
        except Exception:
            fields[name] = shorten(fields[name])
    return _encode(fields)


def _fields(item: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    raise TypeError(f"a {type(item).__name__} is not JSON")


# NaN and the infinities are not valid JSON, though Python would write them.
_encode: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_fields
).encode
