"""The command line and snapshots: `railgun run` on plain processes, and the commands that look at what it saved."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_cli import Terminal
from tests.engine.controller import flows
from tests.engine.controller.flows import counting, eventually, running, started

from railgun import Job, Snapshots, run
from railgun.cli.errors import DONE, FAILED, FINISHED, INTERRUPTED, NO_JOB, SNAPSHOTS, USAGE
from railgun.testing.local_workers import SubprocessLauncher

FLOW = """
from railgun import Files, Flow, Generate
flow = Flow("{name}")
numbers = flow.source(Generate(lambda index, random: index, rate={rate}, count={count}), name="numbers")
keyed = numbers.key_by(lambda n: n % 50, name="by rest")
counts = keyed.stateful_map(lambda s, n: (s + 1, {{"key": n % 50, "n": s + 1}}), initial=int, name="{step}")
counts.sink(Files("{out}"), name="out")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of one's own; `railgun run` starts plain processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def on_processes(*given: Any, **options: Any) -> Job:
        return run(*given, **options, launcher=SubprocessLauncher())

    monkeypatch.setattr("railgun.cli.commands.run.run", on_processes)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("f_")]:
        del sys.modules[name]


@pytest.fixture
def terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(folder / "jobs", capsys)


def write(folder: Path, name: str, *, count: int | None, step: str = "count") -> str:
    text = FLOW.format(
        name=name, rate=None if count else 5000, count=count, step=step, out=folder / "out"
    )
    file = folder / f"f_{name}_{step}.py"
    file.write_text(text)
    return str(file)


def interrupted(monkeypatch: pytest.MonkeyPatch, kind: str, times: int = 1) -> None:
    """Press Ctrl-C when `railgun run` has told of such an event, each time it is run."""
    from railgun.cli.output import Output

    tell = Output.event
    pressed = False

    def event(self: Output, event: dict[str, Any]) -> None:
        nonlocal pressed
        tell(self, event)
        if event["kind"] == "running":
            pressed = False
        elif event["kind"] == kind and not pressed:
            pressed = True
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Output, "event", event)


def written(folder: Path) -> dict[int, list[int]]:
    counts: dict[int, list[int]] = {}
    for file in (folder / "out").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            one = json.loads(line)
            counts.setdefault(one["key"], []).append(one["n"])
    return counts


def check_exactly_once(folder: Path) -> int:
    found = written(folder)
    for key, numbers in found.items():
        assert sorted(numbers) == list(range(1, len(numbers) + 1)), f"key {key}"
    return sum(map(len, found.values()))


# ---------------------------------------------------------------- railgun run


def test_run_again_goes_on_where_ctrl_c_stopped_it(
    folder: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = write(folder, "again", count=None)
    interrupted(monkeypatch, "snapshot")
    assert terminal.type("run", flow, "--every", "0.3") == DONE
    where = folder / "railgun-snapshots" / "again"
    first, second = terminal.out.splitlines()[:2]
    assert first == "again: starting on local Spark"
    assert second == f"snapshots every 0.3 s in {where}; begins afresh"
    assert "run it again, and it goes on from snapshot 2" in terminal.out
    before = check_exactly_once(folder)
    assert before > 0
    assert terminal.type("run", flow, "--every", "0.3") == DONE
    assert f"in {where}; goes on from snapshot 2\n" in terminal.out
    assert "running on 2 workers, from snapshot 2" in terminal.out
    assert check_exactly_once(folder) > before
    code, lines = terminal.json("run", flow, "--from", "2", "--every", "0.3")
    assert code == DONE
    assert lines[0]["job"]["snapshots"]["from"]["snapshot"] == 2


def test_a_second_ctrl_c_ends_it_at_once_and_it_goes_on_from_the_last_snapshot(
    folder: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = write(folder, "twice", count=None)
    interrupted(monkeypatch, "snapshot", times=2)
    assert terminal.type("run", flow, "--every", "0.3") == INTERRUPTED
    assert "it goes on from snapshot" in terminal.out
    check_exactly_once(folder)


def test_a_flow_that_has_come_to_its_end_has_an_exit_code_of_its_own(
    folder: Path, terminal: Terminal
) -> None:
    flow = write(folder, "ended", count=5000)
    assert terminal.type("run", flow) == DONE
    assert check_exactly_once(folder) == 5000
    assert terminal.type("run", flow) == FINISHED
    assert "has finished, in snapshot" in terminal.err
    assert "--fresh" in terminal.err
    code, lines = terminal.json("run", flow)
    assert (code, lines[-1]["error"]["kind"]) == (FINISHED, "finished")
    shutil.rmtree(folder / "out")
    assert terminal.type("run", flow, "--fresh") == DONE
    assert "begins afresh" in terminal.out
    assert check_exactly_once(folder) == 5000
    code, [told] = terminal.json("snapshots", "--dir", "railgun-snapshots")
    assert [one["snapshot"] for one in told["snapshots"]] == [2, 1]
    assert all(one["kept"] for one in told["snapshots"])


def test_without_snapshots_none_are_taken(folder: Path, terminal: Terminal) -> None:
    flow = write(folder, "none", count=1000)
    for _ in range(2):
        assert terminal.type("run", flow, "--no-snapshots") == DONE
        assert "no snapshots: if it fails, it begins anew" in terminal.out
    assert not (folder / "railgun-snapshots").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--no-snapshots", "--every", "3"], "--no-snapshots does not go with --every"),
        (["--no-snapshots", "--from", "3"], "--no-snapshots does not go with --from"),
        (["--no-snapshots", "--fresh"], "--no-snapshots does not go with --fresh"),
        (["--no-snapshots", "--drop-state", "a"], "does not go with --drop-state"),
        (["--fresh", "--from", "3"], "--fresh loads nothing"),
        (["--fresh", "--allow-older"], "--fresh loads nothing"),
        (["--fresh", "--rename", "a=b"], "--fresh loads nothing"),
        (["--from", "3", "--allow-older"], "not both"),
        (["--from", "x#y"], "as in x#7, not 'y'"),
        (["--from", "nowhere"], "there is no directory"),
        (["--from", "3"], "has no snapshot 3; it has none"),
        (["--rename", "a"], "--rename takes OLD=NEW, not 'a'"),
        (["--rename", "=b"], "--rename takes OLD=NEW"),
        (["--rename", "a=b", "--rename", "a=c"], "cannot have two new names"),
        (["--every", "0"], "above 0"),
        (["--every", "nan"], "above 0"),
        (["--every", "soon"], "a number of seconds"),
        (["--keep", "0"], "at least one"),
        (["--keep", "-1"], "a whole number"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    folder: Path, terminal: Terminal, options: list[str], said: str
) -> None:
    code, lines = terminal.json("run", write(folder, "refused", count=10), *options)
    assert code == USAGE
    assert said in lines[-1]["error"]["message"]


def test_snapshots_that_cannot_be_used_are_told(folder: Path, terminal: Terminal) -> None:
    flow = write(folder, "used", count=None)
    with started_from(folder, flow) as job:
        job.snapshot(timeout=flows.DEADLINE)
        job.snapshot(timeout=flows.DEADLINE)
        assert terminal.type("run", flow) == NO_JOB
        assert "held by process" in terminal.err
    other = write(folder, "used", count=None, step="tally")
    assert terminal.type("run", other) == SNAPSHOTS
    assert "--rename count=NAME, or --drop-state count" in terminal.err
    for part in (folder / "railgun-snapshots/used/data/000000000002").rglob("*.parquet"):
        part.unlink()
    assert terminal.type("run", flow) == SNAPSHOTS
    assert "--allow-older" in terminal.err


def started_from(folder: Path, file: str) -> Any:
    """A job of the flow in a file, started by a program."""
    from railgun.cli.loading import load

    loaded = load(file)
    chosen = Snapshots(str(folder / "railgun-snapshots"), every=3600)
    return started(loaded.flow, by_value=loaded.modules, snapshots=chosen)


# ---------------------------------------------------------------- a job that runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli-snapshots")


@pytest.fixture(scope="module")
def job(place: Path) -> Iterator[Job]:
    chosen = Snapshots(str(place / "saved"), every=3600)
    with started(counting("words"), http=True, registry=place / "jobs", snapshots=chosen) as job:
        running(job, flows.KEYS)
        yield job


@pytest.fixture
def there(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> Terminal:
    monkeypatch.setenv("COLUMNS", "200")
    return Terminal(place / "jobs", capsys)


def test_a_snapshot_is_taken_and_listed(job: Job, there: Terminal, place: Path) -> None:
    assert there.type("snapshot", "words", "--timeout", "60") == DONE
    first, second = there.out.splitlines()
    assert first.startswith("snapshot 1 (full) is committed: 201 rows (")
    for word in ("align", "cut", "encode", "write"):
        assert word in second
    code, [told] = there.json("snapshot", "words")
    assert (code, told["snapshot"]["snapshot"], told["snapshot"]["full"]) == (DONE, 2, False)
    eventually(lambda: job.snapshots()[0]["state"] == "committed", "its record is written")
    for where in (
        ["words"],
        ["--dir", str(place / "saved")],
        ["words", "--dir", str(place / "saved")],
    ):
        assert there.type("snapshots", *where) == DONE
        for word in ("id", "committed", "full", "incremental", "asked for", "encode", "201"):
            assert word in there.out
        code, [listed] = there.json("snapshots", *where)
        assert [one["snapshot"] for one in listed["snapshots"]] == [2, 1]
    assert there.type("status", "words") == DONE
    assert "snapshots: 2 was committed" in there.out


def test_a_narrow_terminal_has_room_for_everything(
    job: Job, there: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    job.snapshot(timeout=flows.DEADLINE)
    assert there.type("snapshots", "words") == DONE
    shown = re.sub(r"\x1b\[[0-9;]*m", "", there.out)
    assert "align" in shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_in_a_pipe_each_snapshot_is_one_line_without_boxes(
    job: Job, there: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    job.snapshot(timeout=flows.DEADLINE)
    assert there.type("snapshots", "words") == DONE
    head, *rows = there.out.splitlines()
    assert head.split()[:4] == ["id", "state", "kind", "when"]
    assert len(rows) == len(there.json("snapshots", "words")[1][0]["snapshots"])
    assert not set("─│┃┏━") & set(there.out)


def test_a_snapshot_that_fails_is_told(place: Path, there: Terminal) -> None:
    chosen = Snapshots(str(place / "full"), every=3600)
    with started(counting("full"), http=True, registry=place / "jobs", snapshots=chosen) as job:
        running(job)
        data = place / "full" / "full" / "data"
        data.write_text("no directory")
        assert there.type("snapshot", "full") == FAILED
        assert "snapshot 1 is given up" in there.err
        assert there.type("status", "full") == DONE
        assert "1 failed, last 1: " in there.out
        assert there.type("snapshots", "full") == DONE
        assert "failed" in there.out
        data.unlink()


def test_state_is_told_by_key_and_in_all(job: Job, there: Terminal) -> None:
    assert there.type("state", "words", "--step", "order", "--key", "7") == DONE
    assert int(there.out) >= 0
    code, [told] = there.json("state", "words", "--step", "order", "--key", "7")
    assert (code, told["key"], told["step"]) == (DONE, 7, "order")
    assert there.type("state", "words", "--step", "order") == DONE
    assert "order: 200 keys" in there.out
    assert there.type("state", "words", "--step", "order", "--key", "nobody") == FAILED
    assert "no state of the key 'nobody'" in there.err
    for step in ([], ["--step", "nope"]):
        assert there.type("state", "words", *step) == USAGE
        assert "'records', 'order'" in there.err
    assert there.type("state") == USAGE
    assert there.type("state", "words", "--step", "order", "--limit", "3") == USAGE
    assert "it needs --dir" in there.err


def test_state_is_read_out_of_a_snapshot(job: Job, there: Terminal, place: Path) -> None:
    number = job.snapshot(timeout=flows.DEADLINE)
    state = partial(there.json, "state", "words", "--dir", str(place / "saved"), "--step", "order")
    code, [one] = state("--key", "7")
    assert (code, one["key"], one["snapshot"]) == (DONE, 7, number)
    assert one["state"] <= job.state("order", 7)
    code, [told] = state("--limit", "3")
    assert (code, told["keys"], len(told["rows"])) == (DONE, 200, 3)
    code, [found] = state("--sql", "SELECT count(*) AS n, sum(key = 7) FROM state WHERE state >= 0")
    assert (code, found["columns"][0], found["rows"]) == (DONE, "n", [[200, 1]])
    for wrong, said in (
        (["--key", "nobody"], "no state of the key"),
        (["--sql", "SELEC"], "syntax error; the table is state (key, state"),
        (["--sql", "SELECT 1", "--key", "7"], "either --key or --sql"),
        (["--snapshot", "99"], "has no snapshot 99"),
        (["--snapshot", "x"], "whole number"),
    ):
        code, [told] = state(*wrong)
        assert code == (FAILED if "nobody" in wrong else USAGE)
        assert said in told["error"]["message"]
    assert there.type("state", "--dir", str(place / "saved"), "--step", "order") == DONE
    assert "200 keys; 20 of them are shown" in there.out
    assert there.type("state", "--dir", str(place / "saved"), "--step", "x") == USAGE
    assert "it has that of 'records', 'order'" in there.err
    assert there.type("state", "--dir", str(place / "nowhere"), "--step", "x") == USAGE


def test_stop_takes_a_last_snapshot_and_drain_comes_to_the_end(
    place: Path, there: Terminal
) -> None:
    options: dict[str, Any] = {
        "http": True,
        "registry": place / "jobs",
        "snapshots": str(place / "stops"),
    }
    for how, said in (([], "a last snapshot"), (["--drain"], "sources end")):
        with started(counting("stops"), **options) as job:
            running(job)
            assert there.type("stop", "stops", *how) == DONE
            assert said in there.out
            assert job.wait(flows.DEADLINE)
            assert there.type("snapshot", "stops") == NO_JOB
    assert there.type("stop", "stops", "--drain", "--now") == USAGE
    with pytest.raises(Exception, match="fresh=True"), started(counting("stops"), **options):
        pass
