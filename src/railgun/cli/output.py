"""Print the output of commands: lines for people, or with `--json` one JSON object a line for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from railgun.cli.errors import CommandError

if TYPE_CHECKING:
    from rich.table import Table

STYLES = {
    "running": "green",
    "rescaling": "cyan",
    "rescaled": "green",
    "restarting": "yellow",
    "not-rescaled": "yellow",
    "waiting-for-slots": "yellow",
    "warning": "yellow",
    "trouble": "yellow",
    "snapshot": "dim",
    "snapshot-failed": "yellow",
    "finished": "bold green",
    "failed": "bold red",
}


PIPE_COLUMNS = 4000
"""Width of the output in a pipe, where nothing is wrapped."""


class Output:
    """The output of a command: results go to stdout, errors to stderr; with `--json` everything goes to stdout."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = Console(highlight=False, soft_wrap=True)
        if not self.console.is_terminal:
            self.console.width = PIPE_COLUMNS
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)

    def data(self, **what: Any) -> None:
        """Print one JSON object, with `--json` only."""
        if self.as_json:
            print(json.dumps(what, default=str), file=sys.stdout, flush=True)

    def line(self, text: str, style: str = "") -> None:
        """Print a line, for people only."""
        if not self.as_json:
            self.console.print(Text(text, style=style))

    def show(self, what: Any) -> None:
        """Print a table or picture, for people only; in a pipe plainly: no lines around cells, a row a line."""
        if not self.as_json:
            self.console.print(what if self.console.is_terminal else plain(what))

    def listing(
        self, name: str, entries: list[Any], view: Callable[[list[Any]], Any], nothing: str
    ) -> None:
        """Print a list: with `--json` under this name, for people as `view` draws it, or `nothing` if it is empty."""
        self.data(**{name: entries})
        if entries:
            self.show(view(entries))
        else:
            self.line(nothing)

    def raw(self, data: bytes) -> None:
        """Write bytes to stdout as they are, for people and pipes."""
        if not self.as_json:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()

    def warn(self, text: str, **what: Any) -> None:
        """Print a warning, which does not end the command and is not part of its results."""
        self.data(warning={"message": text, **what})
        if not self.as_json:
            self._errors.print(Text.assemble(("railgun: ", "yellow"), text))

    def event(self, event: dict[str, Any]) -> None:
        """Print an event of a flow."""
        self.data(event=event)
        self.line(event_text(event), STYLES.get(event["kind"], ""))

    def error(self, error: CommandError) -> None:
        """Print the error that ends a command."""
        if self.as_json:
            self.data(error={"kind": error.kind, "message": str(error), **error.data})
            return
        if error.details:
            self._errors.print(Text(error.details.rstrip()))
        self._errors.print(Text.assemble(("railgun: ", "bold red"), str(error)))


def event_text(event: dict[str, Any]) -> str:
    """Describe an event of a flow in one line.

    >>> data = {"moved": 1200, "bytes": 3_400_000, "longest_hold_ms": 2.25, "seconds": 0.41}
    >>> event_text({"kind": "rescaled", "text": "runs on 4 workers now", "data": data})
    'rescaled: runs on 4 workers now: 1,200 keys (3.4 MB) moved in 0.41 s, longest hold 2.2 ms'
    """
    kind, text = event["kind"], event["text"]
    text = text if text.startswith(kind) else f"{kind}: {text}"
    data = event.get("data") or {}
    if data.get("moved"):
        text += (
            f": {data['moved']:,} keys ({size(data['bytes'])}) moved in {data['seconds']:.2g} s, "
            f"longest hold {data['longest_hold_ms']:.1f} ms"
        )
    elif kind == "snapshot" and "rows" in data:
        text += f": {data['rows']:,} rows ({size(data['size'])}) in {brief(data['seconds'])}"
    return text


def plain(what: Any) -> Any:
    """Return a picture without boxes, so that `grep` and `cut` find each row of a table on a line of its own."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table

    if isinstance(what, Table):
        what.box, what.show_edge, what.expand, what.pad_edge = None, False, False, False
        what.title_justify = "left"
    elif isinstance(what, Panel):
        return plain(what.renderable)
    elif isinstance(what, Group | Columns):
        what.renderables[:] = [plain(part) for part in what.renderables]
    return what


def columns(*names: str) -> Table:
    """Return an empty table with these columns; those that end with `>` are aligned to the right, for numbers."""
    from rich.table import Table

    table = Table()
    for spec in names:
        name = spec.removesuffix(">")
        table.add_column(name, justify="right" if name != spec else "left", overflow="fold")
    return table


def size(count: float) -> str:
    """Format a number of bytes with a unit.

    >>> size(1_500), size(12), size(3_210_000_000)
    ('1.5 kB', '12 B', '3.2 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def brief(seconds: float) -> str:
    """Format a short time with a unit.

    >>> brief(0.0004), brief(0.0234), brief(1.26), brief(75)
    ('0.4 ms', '23 ms', '1.3 s', '1 min 15 s')
    """
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def duration(seconds: float) -> str:
    """Format a time in seconds, minutes or hours.

    >>> duration(5), duration(65), duration(7260)
    ('5 s', '1 min 5 s', '2 h 1 min')
    """
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
