"""railgun: start flows and nodes, and manage those that run."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from railgun import __version__
from railgun.cli import commands
from railgun.cli.commands import ALL, HEADINGS
from railgun.cli.errors import EXIT_CODES, FAILED, INTERRUPTED, USAGE, CommandError
from railgun.cli.output import Output
from railgun.cli.parsing import Parser, did_you_mean, finish, sentence
from railgun.engine.snapshots.option_names import flags
from railgun.errors import RailgunError
from railgun.transport.registry import Registry

DESCRIPTION: Final = "Streams, and stateful flows on Spark that rescale while they run."


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out the command in `argv` (default: that of this process), and return the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    out = Output("--json" in words)
    try:
        options = parse(words)
        with flags():  # errors then name options as they are typed here
            return int(options.execute(options, out, Registry(options.registry)))
    except CommandError as error:
        out.error(error)
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # as when piped into head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except RailgunError as error:
        kind = error.kind or type(error).__name__.removesuffix("Error").lower()
        out.error(CommandError(error.exit_code, kind, str(error)))
        return error.exit_code


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the words of a command line.

    Raise `CommandError` if they make no command; it suggests what may have been meant.
    """
    first = words[0] if words else ""
    if first and not first.startswith("-") and first not in ALL:
        raise CommandError(
            USAGE,
            "usage",
            f"there is no command {first!r}{did_you_mean(first, ALL)}; see railgun --help",
        )
    options, unknown = parser([first] if first in ALL else []).parse_known_args(words)
    if unknown:
        leaf: argparse.ArgumentParser = options.parser
        hints = [did_you_mean(word, leaf._option_string_actions) for word in unknown]
        hint = next((hint for hint in hints if hint), "")
        raise CommandError(
            USAGE,
            "usage",
            f"unrecognized arguments: {' '.join(unknown)}{hint}; see {leaf.prog} --help",
        )
    return options


def parser(names: Iterable[str] = ALL) -> argparse.ArgumentParser:
    """Return the parser of the commands with these names; only their modules are imported."""
    top = Parser(
        prog="railgun",
        usage="railgun COMMAND …",
        description=f"{DESCRIPTION}\n\n{_listing()}",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"railgun {__version__}")
    subparsers = top.add_subparsers(
        required=True, metavar="COMMAND", prog="railgun", help=argparse.SUPPRESS
    )
    for command in map(ALL.__getitem__, names):
        module = importlib.import_module(f"{commands.__name__}.{command.name}")
        command_parser = subparsers.add_parser(
            command.name,
            description=sentence(getattr(module, "DESCRIPTION", command.summary)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if hasattr(module, "execute"):
            finish(command_parser, module.execute)
        module.add_arguments(command_parser)
    return top


def _listing() -> str:
    """Return all commands under their headings, for the help."""
    width = max(map(len, ALL)) + 2
    lines = []
    for heading, group in HEADINGS.items():
        lines += [f"{heading}:", *(f"  {name:<{width}}{summary}" for name, summary in group), ""]
    lines.append("railgun COMMAND --help explains a command.")
    return "\n".join(lines)
