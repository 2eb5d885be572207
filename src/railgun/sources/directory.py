"""Directory: the lines of the files in a directory, also of files that come later and files that still grow.

Rules:

1. A part is a file, by its name relative to the directory; every worker must see the same directory.
2. The position is a byte offset at which a line begins. Nothing else is kept between reads, neither an open file nor
   a buffer: a worker may have ten thousand files, and a part moves at the cost of a number.
3. A line ends with a newline, or with a carriage return and a newline. Without `watch`, the end of the file ends the
   last line too. With `watch`, a line without a newline is not complete yet, and is not delivered.
4. Files only grow. One that shrinks or vanishes while it is read is an error, for what was read of it no longer holds.
5. Files whose names begin with a dot are left alone: that is how a file is written before it is renamed.
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

LEAST: Final = 1 << 16  # bytes read at once
FIRST: Final = 1 << 18
LARGEST: Final = 1 << 23

_JSON: Final = json.JSONDecoder()


class Directory(Source[T], Generic[T]):
    """The lines of all files in a directory that match a pattern (`**/*.log`: at any depth).

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
        self.sizes: dict[str, int] | None = None  # if it is bounded by what was there at some time

    def as_of_now(self) -> Directory[T]:
        """The files there are, as large as they are. A line that is not complete yet is left, if files are watched."""
        now = copy.copy(self)
        now.sizes = {name: os.stat(self.path / name).st_size for name in self.partitions()}
        return now

    def partitions(self) -> Sequence[str]:
        """The names of the files that are there now."""
        if self.sizes is not None:
            return list(self.sizes)
        if not self.path.is_dir():
            raise ConnectorError(
                f"there is no directory {self.path}; every worker must see it under this name"
            )
        found = (name for name in self.path.glob(self.pattern) if name.is_file())
        names = (name.relative_to(self.path) for name in found)
        return sorted(
            name.as_posix()
            for name in names
            if not any(part.startswith(".") for part in name.parts)
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
        self.block = FIRST  # what to read at once, about as much as the lines that are asked for
        self.more = False  # whether the last read found lines
        self.seen = -1  # how large the file was when it had no whole line for us

    def read(self, most: int, now: int) -> Sequence[T] | None:
        while True:
            items = self._read(most)
            # Empty lines of JSON are no items, but no reason to wait either: more may follow.
            if items != [] or not self.more:
                return items

    def _read(self, most: int) -> Sequence[T] | None:
        self.more = False
        try:
            size = os.stat(self.path).st_size
            if size < self.position:
                raise self._error(
                    self.position,
                    f"the file has shrunk to {size} bytes; files that are read may only grow",
                )
            if self.directory.watch and self.size is None and size in (self.position, self.seen):
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
            self.seen = size
            return [] if self.directory.watch and self.size is None else None
        lines = self._decoded(data)
        items: Sequence[Any] = (
            self._parsed(data, lines) if self.directory.format == "json" else lines
        )
        self.position += len(data)
        self.more = True
        self.block = min(max(LEAST, len(data) // (len(lines) or 1) * most), LARGEST)
        return items

    def _lines(self, most: int) -> bytes:
        """The bytes of up to so many whole lines."""
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.position)
            data = b""
            while True:
                wanted = max(self.block, len(data))  # of a long line twice as much each time
                most_bytes = wanted
                if self.size is not None:
                    most_bytes = min(wanted, self.size - self.position - len(data))
                piece = _read(file, most_bytes)
                data += piece
                end = data.rfind(b"\n") + 1
                if len(piece) < wanted:
                    if not self.directory.watch:
                        end = len(data)
                    break
                if end:
                    break
        if data.count(b"\n", 0, end) + (data[end - 1 : end] != b"\n") > most:
            rest = data[:end].split(b"\n", most)[most]
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
            text = text.removeprefix("\ufeff")  # a byte order mark is no part of the first line
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

    def _error(self, offset: int, what: str) -> ConnectorError:
        return ConnectorError(f"{self.path}, byte {offset}: {what}")


def _read(file: Any, wanted: int) -> bytes:
    """So many bytes, or fewer if the file ends."""
    pieces = []
    while wanted:
        piece = file.read(wanted)
        if not piece:
            break
        pieces.append(piece)
        wanted -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
