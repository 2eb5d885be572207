"""Read the lines of the files in a directory, also of files that appear later and files that still grow.

Rules:

1. A part is a file, by its name relative to the directory; every worker must see the same directory.
2. The position is a byte offset at which a line begins. Nothing else is kept between reads, neither an open file nor
   a buffer: a worker may have ten thousand files, and to move a part is to send a number.
3. A line ends with a newline, or with a carriage return and a newline. Without `watch`, the end of the file ends the
   last line too. With `watch`, a line without a newline is not complete yet, and is not delivered.
4. Files only grow. A file that shrinks or vanishes while it is read is an error, because what was read of it is not
   valid any more.
5. Files whose names begin with a dot are ignored: programs write a file under such a name before they rename it.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, overload

from railgun.engine.operators.operator import shorten
from railgun.flows.errors import ConnectorError
from railgun.flows.source import Reader, Source

T = TypeVar("T")

MIN_READ_BYTES: Final = 1 << 16  # read at once
FIRST_READ_BYTES: Final = 1 << 18
MAX_READ_BYTES: Final = 1 << 23

_JSON: Final = json.JSONDecoder()


class Directory(Source[T], Generic[T]):
    """A source of the lines of all files in a directory that match a pattern (`**/*.log`: at any depth).

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> _ = (place / "a.txt").write_text("one\\ntwo\\nthree")
    >>> source = Directory(place, "*.txt")
    >>> list(source.partitions())
    ['a.txt']
    >>> reader = source.open("a.txt", None)
    >>> reader.read(2, now=0), reader.position, reader.read(2, now=0), reader.read(2, now=0)
    (['one', 'two'], 8, ['three'], None)

    `format="json"`: each line is a JSON value; empty lines are passed over.
    """

    @overload
    def __init__(
        self: Directory[str],
        path: str | os.PathLike[str],
        pattern: str = "*",
        *,
        format: Literal["text"] = "text",
        watch: bool = False,
        encoding: str = "utf-8",
    ) -> None: ...

    @overload
    def __init__(
        self: Directory[Any],
        path: str | os.PathLike[str],
        pattern: str = "*",
        *,
        format: Literal["json"],
        watch: bool = False,
        encoding: str = "utf-8",
    ) -> None: ...

    def __init__(
        self,
        path: str | os.PathLike[str],
        pattern: str = "*",
        *,
        format: str = "text",
        watch: bool = False,
        encoding: str = "utf-8",
    ) -> None:
        if format not in ("text", "json"):
            raise ConnectorError(f"Directory({str(path)!r}) reads 'text' or 'json', not {format!r}")
        try:
            newline = "\n".encode(encoding)
        except LookupError as error:
            raise ConnectorError(f"Directory({str(path)!r}): {error}") from error
        if newline != b"\n":
            raise ConnectorError(
                f"Directory({str(path)!r}) finds lines by their newlines, which {encoding} does not write as "
                "one plain byte; convert the files to UTF-8"
            )
        self.path = Path(path).absolute()
        self.pattern = pattern
        self.format = format
        self.watch = watch
        self.bounded = not watch
        self.encoding = encoding
        # Of the files to read, if they are fixed (`as_of_now`)
        self.sizes: dict[str, int] | None = None

    def as_of_now(self) -> Directory[T]:
        """Return a source of the present files up to their sizes; with `watch`, incomplete lines are left."""
        now = copy.copy(self)
        now.sizes = {name: os.stat(self.path / name).st_size for name in self.partitions()}
        return now

    def partitions(self) -> Sequence[str]:
        """Return the names of the files that exist now."""
        if self.sizes is not None:
            return list(self.sizes)
        if not self.path.is_dir():
            raise ConnectorError(
                f"there is no directory {self.path}; every worker must see it under this name"
            )
        files = (file for file in self.path.glob(self.pattern) if file.is_file())
        names = (file.relative_to(self.path) for file in files)
        return sorted(
            file.as_posix()
            for file in names
            if not any(part.startswith(".") for part in file.parts)
        )

    def open(self, partition: Any, position: Any) -> Reader[T]:
        """Read one file, from a byte offset on."""
        return _Reader(self, partition, position or 0)


class _Reader(Reader[T]):
    def __init__(self, directory: Directory[T], name: str, position: int) -> None:
        self.directory = directory
        self.path = directory.path / name
        self.size = None if directory.sizes is None else directory.sizes[name]
        self.position: int = position
        self.read_bytes = FIRST_READ_BYTES  # about as much as the lines that the flow asks for
        self.found_lines = False  # whether the last read found lines
        self.checked_size = -1  # the file's size when it had no complete line to read

    def read(self, most: int, now: int) -> Sequence[T] | None:
        while True:
            items = self._read(most)
            # Empty lines of JSON are no items, but no reason to wait either: more lines may follow.
            if items != [] or not self.found_lines:
                return items

    def _read(self, most: int) -> Sequence[T] | None:
        self.found_lines = False
        try:
            size = os.stat(self.path).st_size
            if size < self.position:
                raise self._error(
                    self.position,
                    f"the file has shrunk to {size} bytes; files that are read may only grow",
                )
            if (
                self.directory.watch
                and self.size is None
                and size in (self.position, self.checked_size)
            ):
                return []
            data = self._lines(most)
        except FileNotFoundError as error:
            raise self._error(
                self.position, "the file has vanished, or this worker does not see it"
            ) from error
        except OSError as error:
            raise self._error(
                self.position, f"the file cannot be read: {error.strerror}"
            ) from error
        if not data:
            self.checked_size = size
            return [] if self.directory.watch and self.size is None else None
        lines = self._decoded(data)
        items: Sequence[Any] = (
            self._parsed(data, lines) if self.directory.format == "json" else lines
        )
        self.position += len(data)
        self.found_lines = True
        self.read_bytes = min(
            max(MIN_READ_BYTES, len(data) // (len(lines) or 1) * most), MAX_READ_BYTES
        )
        return items

    def _lines(self, max_lines: int) -> bytes:
        """Return the bytes of whole lines, up to `max_lines` of them."""
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.position)
            data = b""
            while True:
                wanted_bytes = max(self.read_bytes, len(data))  # doubled each time for a long line
                most_bytes = wanted_bytes
                if self.size is not None:
                    most_bytes = min(wanted_bytes, self.size - self.position - len(data))
                piece = _read(file, most_bytes)
                data += piece
                end = data.rfind(b"\n") + 1
                if len(piece) < wanted_bytes:
                    if not self.directory.watch:
                        end = len(data)
                    break
                if end:
                    break
        if data.count(b"\n", 0, end) + (data[end - 1 : end] != b"\n") > max_lines:
            rest = data[:end].split(b"\n", max_lines)[max_lines]
            end -= len(rest)
        return data[:end]

    def _decoded(self, data: bytes) -> list[str]:
        try:
            text = data.decode(self.directory.encoding)
        except UnicodeDecodeError as error:
            bad = data[error.start : error.start + 8]
            raise self._error(
                self.position + error.start,
                f"{bad!r} is not {self.directory.encoding}: {error.reason}",
            ) from error
        if self.position == 0:
            text = text.removeprefix("\ufeff")  # a byte order mark is not part of the first line
        if "\r\n" in text:
            text = text.replace("\r\n", "\n")
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        return lines

    def _parsed(self, data: bytes, lines: list[str]) -> list[Any]:
        items: list[Any] = []
        filled = list(filter(str.strip, lines))
        try:
            items.extend(map(_JSON.decode, filled))
        except (ValueError, RecursionError) as error:
            bad = [row for row, line in enumerate(lines) if line.strip()][len(items)]
            offset = self.position + sum(len(line) + 1 for line in data.split(b"\n")[:bad])
            raise self._error(
                offset,
                f"the line {shorten(lines[bad])} is not JSON: {error}. To go on without such lines read them as "
                "text, and parse them with .map(json.loads, on_error='dead_letter')",
            ) from error
        return items

    def _error(self, offset: int, problem: str) -> ConnectorError:
        return ConnectorError(f"{self.path}, byte {offset}: {problem}")


def _read(file: Any, wanted: int) -> bytes:
    """Read `wanted` bytes, or fewer if the file ends."""
    pieces = []
    while wanted:
        piece = file.read(wanted)
        if not piece:
            break
        pieces.append(piece)
        wanted -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
