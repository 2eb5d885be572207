"""What `railgun` makes of words: suggestions for those that are wrong, help for all, completion in a shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from railgun.cli.commands import ALL, HEADINGS
from railgun.cli.commands.completion import candidates
from railgun.cli.errors import USAGE
from railgun.cli.main import main, parser
from railgun.transport.registry import Registry


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["strem", "ls"], "did you mean stream?"),
        (["stream", "lss"], "did you mean ls?"),
        (["stream", "ensure", "orders", "--maxage", "3"], "did you mean --max-age?"),
        (["scale", "words", "3", "--wacth"], "did you mean --watch?"),
        (["xyz"], "there is no command 'xyz'; see railgun --help"),
    ],
)
def test_a_wrong_word_is_told_with_the_one_that_was_meant(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == USAGE
    assert hint in capsys.readouterr().err


def test_the_help_lists_every_command_under_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for heading, group in HEADINGS.items():
        assert f"\n{heading}:\n" in text
        for command in group:
            assert f"  {command.name} " in text
            assert command.summary in text


def options_of(words: list[str]) -> list[tuple[str, str | None]]:
    """Return every argument of a command and those below, with its help."""
    import argparse

    found: list[tuple[str, str | None]] = []
    todo = [parser([words[0]])]
    while todo:
        for action in todo.pop()._actions:
            if isinstance(action, argparse._SubParsersAction):
                todo += action.choices.values()
            else:
                found.append(("/".join(action.option_strings) or action.dest, action.help))
    return found


VAGUE = {"of", "at", "between", "for", "what", "who", "which", "where", "it"}


@pytest.mark.parametrize("name", ALL)
def test_every_argument_has_a_help_that_says_what_it_does(name: str) -> None:
    for argument, text in options_of([name]):
        assert text, f"{name} {argument} has no help"
        assert text.split()[0].lower() not in VAGUE, f"{name} {argument}: {text}"


def test_candidates_are_commands_options_and_names_of_jobs(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    assert candidates(["sn"], registry) == ["snapshot", "snapshots"]
    assert candidates(["stream", "r"], registry) == ["retime", "rm"]
    assert "--max-age" in candidates(["stream", "ensure", "--m"], registry)
    assert candidates(["cluster", "settings", "x", "y"], registry) == []
    assert candidates(["nonsense", ""], registry) == []
    assert candidates(["scale", ""], registry) == []


def test_bash_completes_what_is_typed(tmp_path: Path) -> None:
    (tmp_path / "railgun").write_text(f'#!/bin/sh\nexec {sys.executable} -m railgun "$@"\n')
    (tmp_path / "railgun").chmod(0o755)
    script = """
        eval "$(railgun completion bash)"
        COMP_WORDS=(railgun stream en); COMP_CWORD=2; _railgun; echo "${COMPREPLY[@]}"
        COMP_WORDS=(railgun sub orders --ex); COMP_CWORD=3; _railgun; echo "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert done.stdout.splitlines() == ["ensure", "--exclusive"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_the_script(shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} here")
    text = subprocess.run(
        [sys.executable, "-m", "railgun", "completion", shell],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    subprocess.run([program, "-n"], input=text, text=True, check=True)
