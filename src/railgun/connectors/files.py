"""Files: results as lines of files, one file for each worker.

Rules:

1. A worker appends to `part-<step>-<worker>-<generation>.jsonl` (or `.txt`). No two workers share a file, and after the
   flow went back to a snapshot its workers begin new ones. What the older ones hold from after that snapshot comes
   again: this sink delivers at least once.
2. Whole lines are written at once, so a reader never sees half of one before another.
3. An item is one line. What cannot be is refused, and nothing of its batch is written.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from railgun.connectors.errors import ConnectorError
from railgun.flow.operators.operator import DeadLetter, shorten
from railgun.flow.sink import Place, Sink, Writer

_ENOUGH: Final = 1 << 18  # bytes that are written without waiting for more


class Files(Sink[Any]):
    """Lines of JSON (dataclasses as objects), or of `str(item)`, in files of a directory, which is made if need be.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp()) / "out"
    >>> writer = Files(directory).open(Place("demo", "totals", worker=3, generation=1))
    >>> writer.write([{"name": "ada", "n": 1}, ["grace", 2.5]]); writer.flush()
    >>> print((directory / "part-totals-3-1.jsonl").read_text(), end="")
    {"name":"ada","n":1}
    ["grace",2.5]
    """

    def __init__(
        self, directory: str | os.PathLike[str], format: Literal["json", "text"] = "json"
    ) -> None:
        if format not in ("json", "text"):
            raise ConnectorError(
                f"Files({str(directory)!r}) writes 'json' or 'text', not {format!r}"
            )
        self.directory = Path(directory).absolute()
        self.format = format

    def open(self, place: Place) -> Writer[Any]:
        """The file of one worker."""
        end = "jsonl" if self.format == "json" else "txt"
        name = f"part-{place.step}-{place.worker}-{place.generation}.{end}"
        encode = as_json if self.format == "json" else as_text
        return _Writer(place.step, self.directory / name, encode)


class _Writer(Writer[Any]):
    def __init__(self, step: str, path: Path, encode: Callable[[Any], str]) -> None:
        self.step = step
        self.path = path
        self.encode = encode
        self.waiting: list[bytes] = []
        self.size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConnectorError(f"sink {step!r} cannot write {path}: {error.strerror}") from error

    def write(self, items: Sequence[Any]) -> None:
        lines: list[str] = []
        try:
            lines.extend(map(self.encode, items))
        except (TypeError, ValueError, RecursionError) as error:
            item = items[len(lines)]
            raise ConnectorError(
                f"sink {self.step!r} cannot write the {type(item).__name__} {shorten(item)} to {self.path}: "
                f"{error}; .map() it to something else before the sink"
            ) from error
        lines.append("")
        data = "\n".join(lines).encode("utf-8", "backslashreplace")  # half a surrogate pair: \ud83d
        self.waiting.append(data)
        self.size += len(data)
        if self.size >= _ENOUGH:
            self.flush()

    def flush(self) -> None:
        data = memoryview(b"".join(self.waiting))
        self.waiting, self.size = [], 0
        try:
            while data:
                data = data[os.write(self.file, data) :]
        except OSError as error:
            raise ConnectorError(
                f"sink {self.step!r} cannot write {self.path}: {error.strerror}"
            ) from error

    def close(self) -> None:
        if self.file >= 0:
            self.flush()
            os.close(self.file)
            self.file = -1


def as_text(item: Any) -> str:
    """An item as a line of text."""
    text = str(item)
    if "\n" in text:
        raise ValueError("it has a newline in it; write it as JSON")
    return text


def as_json(item: Any) -> str:
    """An item as a line of JSON. A dead letter has one whatever its key and record are."""
    if isinstance(item, DeadLetter):
        return _letter(item)
    return _encode(item)


def _letter(letter: DeadLetter) -> str:
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


# NaN and the infinities are no JSON, though Python would write them.
_encode: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_fields
).encode
