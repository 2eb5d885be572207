"""`railgun completion`: print a script that completes commands in bash, zsh or fish.

The scripts call `railgun completion words` for the words that may follow what is typed: commands, options, and the
names of running jobs.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Final

from railgun.cli.commands import ALL
from railgun.cli.errors import DONE
from railgun.cli.output import Output
from railgun.cli.parsing import Subcommands
from railgun.transport.registry import Registry

BASH: Final = """\
_railgun() {
    local words
    words=$(railgun completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _railgun railgun
"""
ZSH: Final = """\
#compdef railgun
_railgun() {
    local -a found
    found=(${(f)"$(railgun completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    compadd -a found || _files
}
compdef _railgun railgun
"""
FISH: Final = """\
function __railgun_words
    railgun completion words -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null
end
complete -c railgun -a '(__railgun_words)'
"""
SCRIPTS: Final = {"bash": BASH, "zsh": ZSH, "fish": FISH}
HOW: Final = {
    "bash": 'print the script for bash: eval "$(railgun completion bash)" in ~/.bashrc',
    "zsh": 'print the script for zsh: eval "$(railgun completion zsh)" in ~/.zshrc',
    "fish": "print the script for fish: railgun completion fish | source, in config.fish",
}


def print_script(shell: str, options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Print the script for a shell."""
    print(SCRIPTS[shell], end="")
    return DONE


def words(options: argparse.Namespace, out: Output, registry: Registry) -> int:
    """Print the words that may come next, one on each line."""
    for word in candidates(options.words, registry):
        print(word)
    return DONE


def candidates(typed: list[str], registry: Registry) -> list[str]:
    """Return the words that complete the last of the typed words.

    >>> candidates(["st"], Registry(None))
    ['state', 'status', 'stop', 'stream']
    """
    from railgun.cli.main import parser  # imports the module of the command

    *before, last = typed or [""]
    if not before:
        return sorted(name for name in ALL if name.startswith(last))
    if before[0] not in ALL:
        return []
    leaf, taken = parser([before[0]]), 0
    for word in before:
        nested = _subparsers(leaf)
        if nested is None:
            taken += not word.startswith("-")
        elif word in nested:
            leaf = nested[word]
    nested = _subparsers(leaf)
    if nested is not None:
        matching = list(nested)
    elif last.startswith("-"):
        matching = [option for option in leaf._option_string_actions if option.startswith("--")]
    else:
        matching = _positional(leaf, taken, registry)
    return sorted(word for word in matching if word.startswith(last))


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser] | None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return None


def _positional(leaf: argparse.ArgumentParser, taken: int, registry: Registry) -> list[str]:
    """Return the values of the next positional argument, as far as they are known: names of jobs, and choices."""
    actions = [action for action in leaf._actions if not action.option_strings]
    if taken >= len(actions):
        return []
    action = actions[taken]
    if action.metavar == "NAME" and action.dest == "name":
        return [job.name for job in registry.jobs()]
    return [str(choice) for choice in action.choices or ()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a command for each shell."""
    commands = Subcommands(parser)
    for shell in SCRIPTS:
        commands.add(shell, partial(print_script, shell), HOW[shell])
    command = commands.add("words", words, "print the words that may come next, for these scripts")
    command.add_argument(
        "words", metavar="WORD", nargs="*", help="the words typed so far, after --"
    )
