"""Parsers of the command line: errors with suggestions, and commands below commands."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from railgun.cli.errors import USAGE, CommandError
from railgun.cli.output import Output
from railgun.transport.registry import Registry

Execute = Callable[[argparse.Namespace, Output, Registry], int]


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return a hint at the known word that is most like `word`, or nothing.

    >>> did_you_mean("strem", ["stream", "status"]), did_you_mean("xyz", ["stream"])
    ('; did you mean stream?', '')
    """
    close = difflib.get_close_matches(word.partition("=")[0], list(words), n=1)
    return f"; did you mean {close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are `CommandError`s, with suggestions."""

    def error(self, message: str) -> NoReturn:
        """Raise `CommandError` with the message of argparse, and point to `--help`."""
        raise CommandError(USAGE, "usage", f"{message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action,
                f"there is no {value!r}{did_you_mean(str(value), names) or '; choose from ' + ', '.join(names)}",
            )


class Subcommands:
    """The commands below a command: `ls` and `rm` of `stream`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._subparsers = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    def add(self, name: str, execute: Execute, summary: str) -> argparse.ArgumentParser:
        """Add a command; return its parser."""
        parser = self._subparsers.add_parser(name, help=summary, description=sentence(summary))
        return finish(parser, execute)


def finish(parser: argparse.ArgumentParser, execute: Execute) -> argparse.ArgumentParser:
    """Add what every command has: `--json`, and the function that carries it out."""
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.set_defaults(execute=execute, parser=parser, registry=None)
    return parser


def sentence(summary: str) -> str:
    """Return a summary as a sentence: with a capital letter and a full stop."""
    text = summary[0].upper() + summary[1:]
    return text if text.endswith((".", ")")) else f"{text}."
