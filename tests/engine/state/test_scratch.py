"""Scratch directories go with their process; what killed ones have left is found and deleted, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from railgun.engine.state.errors import StateError
from railgun.engine.state.scratch import LOCK, MIN_AGE_S, PREFIX, Scratch, sweep

PROGRAM = """
import sys, time
from railgun.engine.state.scratch import Scratch
scratch = Scratch(sys.argv[1])
(scratch.path / "data").write_text("x")
print(scratch.path, flush=True)
sys.stdin.read()
"""


def test_it_goes_when_it_is_closed_or_no_longer_used(tmp_path: Path) -> None:
    scratch = Scratch(str(tmp_path / "made" / "too"))
    assert scratch.path.stat().st_mode & 0o77 == 0, "others cannot read it"
    scratch.close()
    scratch.close()
    path = Scratch(str(tmp_path)).path
    assert not path.exists()
    assert not scratch.path.exists()


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_killed_process_leaves_is_swept_by_the_next(tmp_path: Path, killed: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert sweep(tmp_path) == [], "it is alive"
        assert (path / "data").exists()
        if killed:
            process.send_signal(signal.SIGKILL)
    assert path.exists() == killed
    mine = Scratch(str(tmp_path))
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.close()


def test_what_is_being_made_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    young, old, other = (tmp_path / name for name in (f"{PREFIX}young", f"{PREFIX}old", "other"))
    for path in (young, old, other):
        path.mkdir()
    (tmp_path / f"{PREFIX}file").write_text("x")
    (tmp_path / f"{PREFIX}link").symlink_to(other)
    (other / LOCK).write_text("")
    long_ago = time.time() - MIN_AGE_S - 10
    os.utime(old, (long_ago, long_ago))
    assert sweep(tmp_path) == [old]
    assert len(list(tmp_path.iterdir())) == 4


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StateError, match="OnDisk"):
        Scratch(str(tmp_path / "file"))
