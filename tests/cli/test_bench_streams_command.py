"""`railgun bench streams`, against a node in a process of its own. How fast it is is not for tests to judge."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from railgun.cli.errors import DONE, NO_NODE, USAGE
from railgun.cli.main import main


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("node") / "data"
    command = [sys.executable, "-m", "railgun", "serve", "--port", "0", "--data", str(home)]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        assert b"listening" in node.stdout.readline()
        yield home
        node.terminate()


def test_every_load_is_measured_and_told_to_programs(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("bench", "streams", "--data", str(data), "--seconds", "0.1")
    assert main([*words, "--batch", "50", "--tasks", "20", "--json"]) == DONE
    measured = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["measured"], one["way"]) for one in measured] == [
        ("publish", "batches of 50"),
        ("publish", "20 tasks"),
        ("consume", "batches, acked"),
        ("consume", "singly, acked"),
        ("pubsub", "batches of 50"),
        ("pubsub", "20 tasks"),
        ("request", "one at a time"),
    ]
    for one in measured[:-1]:
        assert one["messages"] > 0
        assert one["messages_per_second"] == pytest.approx(one["messages"] / one["seconds"])
    assert 0 < measured[-1]["p50_seconds"] <= measured[-1]["p99_seconds"]
    assert main(["stream", "ls", "--data", str(data), "--json"]) == DONE
    assert "railgun-bench" not in capsys.readouterr().out, "it leaves nothing behind"


def test_what_is_consumed_is_published_before_and_people_get_a_table(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("bench", "streams", "--data", str(data), "--seconds", "0.05", "--only", "consume")
    assert main(words) == DONE
    told = capsys.readouterr()
    assert "what is to be consumed" in told.out
    assert "singly, acked" in told.out
    assert "request" not in told.out


def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "streams", "--only", "dreams"]) == USAGE
    assert "'dreams': there are publish, consume" in capsys.readouterr().err
    assert main(["bench", "streams", "--data", str(tmp_path)]) == NO_NODE
    assert "no node works in" in capsys.readouterr().err
