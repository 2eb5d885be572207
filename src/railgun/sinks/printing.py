"""Print: results as lines of text, for a first look."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from railgun.flows.sink import Place, Sink, Writer


class Print(Sink[Any]):
    """Writes `format(item)` and a newline, on the worker's standard output unless `file` says otherwise.

    A `file` must be able to travel to the workers, so it is for flows that run in this process.

    >>> writer = Print(format="<{}>".format).open(Place("demo", "out", 0, 0))
    >>> writer.write(["a", 1]); writer.flush()
    <a>
    <1>
    """

    def __init__(self, file: TextIO | None = None, *, format: Callable[[Any], str] = str) -> None:
        self.file = file
        self.format = format

    def open(self, place: Place) -> Writer[Any]:
        """A writer on this worker's standard output, or on the file."""
        return _Writer(self.file, self.format)


class _Writer(Writer[Any]):
    def __init__(self, file: TextIO | None, format: Callable[[Any], str]) -> None:
        self.given = file
        self.format = format

    @property
    def file(self) -> TextIO:
        return sys.stdout if self.given is None else self.given

    def write(self, items: Sequence[Any]) -> None:
        # One call for all lines: what other threads print does not come between.
        self.file.write("\n".join([*map(self.format, items), ""]))

    def flush(self) -> None:
        self.file.flush()
