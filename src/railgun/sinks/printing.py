"""Print results as lines of text, for a first look."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from railgun.flows.sink import Place, Sink, Writer


class Print(Sink[Any]):
    """Writes `format(item)` and a newline to the worker's standard output, or to `file`.

    A `file` must be able to travel to the workers, so it is only for flows that run in this process.

    >>> writer = Print(format="<{}>".format).open(Place("demo", "out", 0, 0))
    >>> writer.write(["a", 1]); writer.flush()
    <a>
    <1>
    """

    def __init__(self, file: TextIO | None = None, *, format: Callable[[Any], str] = str) -> None:
        self.file = file
        self.format = format

    def open(self, place: Place) -> Writer[Any]:
        """Return a writer to this worker's standard output, or to the file."""
        return _Writer(self.file, self.format)


class _Writer(Writer[Any]):
    def __init__(self, file: TextIO | None, format: Callable[[Any], str]) -> None:
        self._file = file
        self.format = format

    @property
    def file(self) -> TextIO:
        return sys.stdout if self._file is None else self._file

    def write(self, items: Sequence[Any]) -> None:
        # One call for all lines, so that other threads print nothing in between.
        self.file.write("\n".join([*map(self.format, items), ""]))

    def flush(self) -> None:
        self.file.flush()
