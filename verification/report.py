"""One report for everything that measures: checks with a value, a goal and a verdict.

`./run prove`, `./run demo` and `./run bench NAME` all end with a table of checks for people, or with `--json` with one
line for programs: ``{"name", "pass", "checks": [{"name", "value", "unit", "goal", "pass"}]}``. Their exit code is 0
only if every check passes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Value = int | float | str


@dataclass(frozen=True, slots=True)
class Check:
    """One measurement; without a goal it is only reported, and passes."""

    name: str
    value: Value
    unit: str = ""
    goal: str = ""
    passed: bool = True


@dataclass(slots=True)
class Report:
    """The checks of one run."""

    name: str
    checks: list[Check] = field(default_factory=list)

    def check(
        self, name: str, value: Value, unit: str = "", goal: str = "", passed: bool = True
    ) -> None:
        """Add a check."""
        self.checks.append(Check(name, value, unit, goal, passed))

    @property
    def passed(self) -> bool:
        """Return whether all checks pass."""
        return all(check.passed for check in self.checks)

    def as_json(self) -> str:
        """Return the report as one line of JSON.

        >>> report = Report("example")
        >>> report.check("answers", 42, "answers", goal="= 42", passed=True)
        >>> print(report.as_json())
        {"name": "example", "pass": true, "checks": [{"name": "answers", "value": 42, "unit": "answers", "goal": "= 42", "pass": true}]}
        """  # noqa: E501
        checks = []
        for check in self.checks:
            row = asdict(check)
            row["pass"] = row.pop("passed")
            checks.append(row)
        return json.dumps({"name": self.name, "pass": self.passed, "checks": checks})

    def show(self, console: Console) -> None:
        """Print the report as a table."""
        table = Table(title=self.name, title_justify="left")
        table.add_column("check")
        table.add_column("value", justify="right")
        table.add_column("goal")
        table.add_column("")
        for check in self.checks:
            value = f"{check.value:,}" if isinstance(check.value, int) else f"{check.value}"
            if isinstance(check.value, float):
                value = f"{check.value:,.3g}" if abs(check.value) < 1000 else f"{check.value:,.0f}"
            mark = ("[green]ok[/]" if check.passed else "[red]FAILS[/]") if check.goal else ""
            text = escape(f"{value} {check.unit}".strip())
            table.add_row(escape(check.name), text, escape(check.goal), mark)
        console.print(table)

    def finish(self, options: argparse.Namespace) -> int:
        """Print the report in the form that `options` ask for; return the exit code."""
        if options.json:
            print(self.as_json(), flush=True)
        else:
            console = Console()
            self.show(console)
            console.print("[green]pass[/]" if self.passed else "[red]FAIL[/]")
        return 0 if self.passed else 1


def options(
    name: str,
    description: str,
    argv: Sequence[str] | None = None,
    exhaustive: str = "",
    more: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> tuple[argparse.Namespace, Console]:
    """Parse the options that all measuring commands share; return them, and a console for progress on stderr.

    `exhaustive` is the help text of the option of that name, where there is one; `more` adds further options.
    """
    parser = argparse.ArgumentParser(prog=f"./run {name}", description=description)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="do a smaller run of about a minute")
    if exhaustive:
        size.add_argument("--exhaustive", action="store_true", help=exhaustive)
    more(parser)
    return parser.parse_args(argv), Console(stderr=True)
