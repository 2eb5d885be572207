"""docs/operations.md is true: its commands run as they stand there, in order, on ports that are free here."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from railgun.broker.protocol.metadata.alarms import TODO
from railgun.broker.protocol.metadata.options import OPTIONS
from railgun.cli.errors import DONE
from railgun.cli.main import main as command
from railgun.client.sync import connect_sync
from railgun.testing.node import served

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
PORTS = ("718", "728", "738")  # and one more digit: the number of the node
LONGEST = 240.0


def walk() -> str:
    """The commands of the section that begins with three nodes, to the next section."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    [found] = [one for one in section if one.startswith("Three nodes on one machine")]
    blocks = re.findall(r"^```sh\n(.*?)^```$", found, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 8
    return "\n".join(blocks)


def free_tens(count: int) -> list[str]:
    """The beginnings of ports that are free, whatever digit follows; below those that systems give away."""
    found: list[str] = []
    for ten in range(1100 + os.getpid() % 1000, 3200):
        with ExitStack() as stack, suppress(OSError):
            for digit in range(10):
                taken = stack.enter_context(socket.socket())
                taken.bind(("127.0.0.1", 10 * ten + digit))
            found.append(str(ten))
        if len(found) == count:
            return found
    raise AssertionError("no ports")


def test_the_walk_through_runs_as_it_is_written(tmp_path: Path) -> None:
    script = walk()
    for given, free in zip(PORTS, free_tens(len(PORTS)), strict=True):
        script, count = re.subn(rf"\b{given}(?=\d\b|\$n)", free, script)
        assert count
    run = tmp_path / "run"
    run.write_text(f'#!/bin/sh\nexec {sys.executable} -m "$@"\n')
    run.chmod(0o755)
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": source},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=LONGEST)
        logs = "".join(f"{one.name}:\n{one.read_text()}" for one in tmp_path.glob("trio/*.log"))
        assert process.returncode == 0, f"{out}\n{logs}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    lines = [line.strip() for line in out.splitlines()]
    assert "1000" in lines  # what `sub | tail -1` shows
    assert "1002" in lines  # of all that was published, on a node that was made anew
    assert sum("all is well, 3 of 3 nodes are up" in line for line in lines) >= 6
    assert sum("all is well, 4 of 4 nodes are up" in line for line in lines) >= 1


def test_every_alarm_is_explained() -> None:
    told = set(re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE))
    assert told == set(TODO)


def test_every_setting_is_explained() -> None:
    told = dict(re.findall(r"^\| `([a-z_]+)` \| ([\d.]+ s|none) \|", PAGE, re.MULTILINE))
    usual = {key: one.default for key, one in OPTIONS.items()}
    assert told == {key: "none" if one is None else f"{one:g} s" for key, one in usual.items()}


def test_stored_times_are_mended_as_it_is_written(tmp_path: Path) -> None:
    [line] = re.findall(r"^    railgun (stream retime .*)$", PAGE, re.MULTILINE)
    with served(tmp_path / "DIR"), connect_sync(data=tmp_path / "DIR") as client:
        client.ensure("orders")
        client.publish("orders", b"1")
    assert (
        command([str(tmp_path / word) if word == "DIR" else word for word in line.split()]) == DONE
    )
