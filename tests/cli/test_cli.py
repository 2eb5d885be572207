"""The command line, on jobs that run on plain processes; `railgun run` itself is tested with Spark."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.controller import closing, flows
from tests.engine.controller.flows import counting, eventually, more, running, started

from railgun import Collect, Flow, Items, Job, __version__
from railgun.cli.commands.run import Happenings, follow
from railgun.cli.errors import DONE, EXIT_CODES, FAILED, INTERRUPTED, NO_FLOW, NO_JOB, USAGE
from railgun.cli.main import main
from railgun.cli.output import Output

ROOT = Path(__file__).parents[2]


class Terminal:
    """Types commands, and reads what they say."""

    def __init__(self, registry: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.registry = registry
        self.capsys = capsys
        self.out = self.err = ""

    def type(self, *words: str) -> int:
        self.capsys.readouterr()
        where = [] if words[0] == "draw" else ["--registry", str(self.registry)]
        code = main([*words, *where])
        self.out, self.err = self.capsys.readouterr()
        return code

    def json(self, *words: str) -> tuple[int, list[dict[str, Any]]]:
        code = self.type(*words, "--json")
        assert self.err == ""
        return code, [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli") / "jobs"


@pytest.fixture(scope="module")
def job(registry: Path) -> Iterator[Job]:
    with started(counting("words"), http=True, registry=registry) as job:
        running(job)
        yield job


@pytest.fixture
def terminal(
    registry: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Terminal:
    monkeypatch.setenv("COLUMNS", "200")
    return Terminal(registry, capsys)


# ---------------------------------------------------------------- a job that runs


def test_scale_watch_ends_when_the_rescale_is_over(job: Job, terminal: Terminal) -> None:
    for workers in (4, 1):
        assert terminal.type("scale", "words", str(workers), "--watch") == DONE
        assert job.status()["size"] == workers
        assert f"rescaled: runs on {workers} worker" in terminal.out
        assert "longest hold" in terminal.out
        more(job)
    code, told = terminal.json("scale", "words", "2", "--watch")
    assert code == DONE
    assert {"rescaling", "rescaled"} <= {line["event"]["kind"] for line in told if "event" in line}
    assert told[-1]["status"]["size"] == 2
    assert job.status()["failures"] == 0


def test_scale_alone_returns_at_once(job: Job, terminal: Terminal) -> None:
    code, [told] = terminal.json("scale", "words", "3")
    assert code == DONE
    assert told["accepted"] is True
    assert told["status"]["goal"] == 3
    eventually(lambda: job.status()["size"] == 3, "it is rescaled")
    assert terminal.type("scale", "words", "2") == DONE
    assert "asked for 2 workers" in terminal.out
    eventually(lambda: job.status()["size"] == 2, "it is rescaled")


def test_status_shows_the_job_its_workers_and_all_jobs(job: Job, terminal: Terminal) -> None:
    assert terminal.type("status", "words") == DONE
    for word in ("words", "running", "2 workers", "records", "keys", str(flows.pids(job)[0])):
        assert word in terminal.out
    code, [told] = terminal.json("status", "words")
    assert code == DONE
    assert told["status"]["workers"][0]["worker"] == 0
    assert terminal.type("status") == DONE
    assert "words" in terminal.out
    code, [told] = terminal.json("status")
    assert [status["name"] for status in told["jobs"]] == ["words"]


def test_a_key_is_typed_as_json_or_text(job: Job, terminal: Terminal) -> None:
    for typed, key in (("ada", "ada"), ("42", 42), ('"42"', "42"), ('["a", 1]', ["a", 1])):
        code, [told] = terminal.json("pin", "words", typed, "1")
        assert (code, told["key"]) == (DONE, key)
    assert terminal.type("pin", "words", "ada", "7") == USAGE
    assert "there is no worker 7: there are 0, 1" in terminal.err
    eventually(lambda: job.status()["state"] == "running", "it has moved")


def test_an_unknown_job_names_those_that_run(job: Job, terminal: Terminal) -> None:
    assert terminal.type("scale", "wrods", "3") == NO_JOB
    assert "did you mean words?" in terminal.err
    assert "running: words" in terminal.err
    code, [told] = terminal.json("stop", "other")
    assert code == NO_JOB
    assert told["error"]["kind"] == "no-job"
    assert told["error"]["running"] == ["words"]
    assert job.status()["state"] == "running"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["scale", "words", "0"], "at least one worker"),
        (["scale", "words", "-1"], "at least one worker"),
        (["scale", "words", "two"], "whole number"),
        (["scale", "words", "99999"], "more than the 1024"),
        (["scale", "words"], "required"),
        (["dance"], "there is no command 'dance'"),
        (["status", "--watch"], "name of a job"),
        (["run", "flow.py", "--set", "nonsense"], "name=value"),
        ([], "required"),
    ],
)
def test_what_makes_no_sense_is_refused(
    job: Job, terminal: Terminal, words: list[str], said: str
) -> None:
    if words:
        code, [told] = terminal.json(*words)
        assert code == USAGE
        assert said in told["error"]["message"]
    assert terminal.type(*words) == USAGE if words else main([]) == USAGE
    assert said in (terminal.err if words else terminal.capsys.readouterr().err)


def test_a_job_that_was_stopped_has_ended(terminal: Terminal, registry: Path) -> None:
    with started(counting("short"), http=True, registry=registry) as short:
        running(short)
        assert terminal.type("stop", "short") == DONE
        assert "sources end" in terminal.out
        assert short.wait(flows.DEADLINE)
        flows.check_whole(short)
        assert terminal.type("scale", "short", "3") == NO_JOB
        assert "the flow is finished" in terminal.err
    assert terminal.type("status", "short") == NO_JOB
    assert "there is no job 'short', or it has ended" in terminal.err


def test_status_watch_and_scale_watch_end_with_a_job_that_is_aborted(
    terminal: Terminal, registry: Path
) -> None:
    with started(counting("aborted"), http=True, registry=registry) as aborted:
        running(aborted)
        command = [sys.executable, "-m", "railgun", "status", "aborted", "--watch", "--json",
                   "--registry", str(registry)]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            assert "status" in json.loads(watching.stdout.readline())
            assert terminal.type("stop", "aborted", "--now") == DONE
            lines = [json.loads(line) for line in watching.stdout]
            assert watching.wait(flows.DEADLINE) == FAILED
        assert lines[-1]["status"]["state"] == "failed"
        assert "aborted" in lines[-1]["status"]["cause"]


def test_the_commands_need_no_spark_and_no_server() -> None:
    program = "import sys, railgun.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "rich" in loaded
    assert not {"aiohttp", "pyspark", "pandas"} & loaded


def test_the_version_is_the_package_s() -> None:
    told = subprocess.run([sys.executable, "-m", "railgun", "--version"], capture_output=True)
    assert told.stdout.decode().strip() == f"railgun {__version__}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


def test_the_exit_codes_are_documented() -> None:
    page = (ROOT / "docs" / "running.md").read_text()
    for line in EXIT_CODES.splitlines()[1:]:
        code, meaning = line.split(maxsplit=1)
        assert f"| {code} | {meaning} |" in page


# ---------------------------------------------------------------- following a job


def followed(flow: Flow, signals: list[int], as_json: bool = False) -> tuple[int, Job]:
    happenings: Happenings = queue.SimpleQueue()
    with started(flow, watch=happenings.put) as job:
        if signals:
            running(job)
        for number in signals:
            happenings.put(signal.Signals(number))
        return follow(job, happenings, Output(as_json)), job


def test_run_tells_what_happens_and_ends_with_the_flow(capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = followed(counting("told", rate=None, count=1000), [])
    assert code == DONE
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "running on 2 workers"
    assert out[-1] == "finished: all sources have ended, and everything is written"


def test_ctrl_c_stops_gracefully(capsys: pytest.CaptureFixture[str]) -> None:
    code, job = followed(counting("ctrl-c"), [signal.SIGINT], as_json=True)
    assert code == DONE
    flows.check_whole(job)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"]["kind"] for line in lines[:-1]] == ["running", "stopping", "finished"]
    assert lines[-1]["status"]["state"] == "finished"


def never_ends(item: Any) -> None:
    time.sleep(3600)


def test_a_second_ctrl_c_ends_at_once() -> None:
    happenings: Happenings = queue.SimpleQueue()
    flow = Flow("stuck")
    flow.source(Items([1]), name="numbers").map(never_ends).sink(Collect(), name="out")
    with started(flow, 1, watch=happenings.put, by_value=[sys.modules[__name__]]) as job:
        eventually(lambda: job.status()["state"] == "running", "it runs")
        happenings.put(signal.SIGINT)
        happenings.put(signal.SIGINT)
        assert follow(job, happenings, Output()) == INTERRUPTED


def test_a_flow_that_fails_ends_with_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    flow = Flow("fails")
    flow.source(Items([1, 0]), name="numbers").map(lambda n: 1 // n, name="divide").sink(
        Collect(), name="out"
    )
    happenings: Happenings = queue.SimpleQueue()
    by_value = [sys.modules[__name__]]
    with started(flow, watch=happenings.put, by_value=by_value) as job:
        assert follow(job, happenings, Output(True)) == FAILED
    *_, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "ZeroDivisionError" in last["error"]["message"]
    assert "step 'divide'" in last["error"]["message"]


def test_a_flow_that_finishes_and_cannot_close_its_sink_shows_both(
    capsys: pytest.CaptureFixture[str],
) -> None:
    happenings: Happenings = queue.SimpleQueue()
    with started(closing.flow_to("raise"), watch=happenings.put, by_value=[closing]) as job:
        assert follow(job, happenings, Output(True)) == FAILED
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"]["kind"] for line in lines][:3] == ["running", "finished", "failed"]
    assert "sink 'out': Out.close failed" in last["error"]["message"]


# ---------------------------------------------------------------- finding a flow

GOOD = """
from railgun import Collect, Flow, Items
from beside import double
flow = Flow("good")
flow.source(Items([1, 2]), name="numbers").map(double).sink(Collect(), name="out")
"""
TWO = GOOD + 'second = Flow("second")\nsame = flow\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    (tmp_path / "beside.py").write_text("def double(n):\n    return 2 * n\n")
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "two.py").write_text(TWO)
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "wrong.py").write_text("def f():\n    return 1 / 0\n\nf()\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "lacks.py").write_text("import a_module_nobody_has\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.mark.parametrize("named", ["good.py", "good.py:flow", "good", "good:flow", "./good.py"])
def test_a_flow_is_found_and_takes_the_modules_beside_it_along(
    folder: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from railgun.cli.loading import load

    loaded = load(named)
    assert loaded.flow.name == "good"
    assert {"good", "beside"} <= {module.__name__ for module in loaded.modules}
    if named == "good.py":
        with started(loaded.flow, by_value=loaded.modules) as job:
            assert job.wait(flows.DEADLINE)
            assert sorted(job.collected("out")) == [2, 4]


@pytest.mark.parametrize(
    ("named", "kind", "said"),
    [
        ("nowhere.py", "no-file", "there is no file nowhere.py"),
        ("nowhere", "no-module", "there is no module 'nowhere'"),
        ("nowhere.deep:flow", "no-module", "there is no module 'nowhere.deep'"),
        ("good.py:other", "no-flow", "nothing of that name, and no Flow; it has flow"),
        ("good.py:double", "no-flow", "is a function, and no Flow"),
        ("empty.py", "no-flow", "has no flow"),
        ("two.py", "several-flows", "flow, second: name one, two.py:flow"),
        ("good.py:", "bad-name", "module:flow"),
        ("wrong.py", "not-importable", "ZeroDivisionError: division by zero"),
        ("syntax.py", "not-importable", "SyntaxError"),
        ("lacks.py", "not-importable", "No module named 'a_module_nobody_has'"),
        ("lacks", "not-importable", "No module named 'a_module_nobody_has'"),
        ("exits.py", "not-importable", "SystemExit"),
    ],
)
@pytest.mark.parametrize("command", ["run", "draw"])
def test_a_flow_that_cannot_be_found_is_told(
    folder: Path, terminal: Terminal, command: str, named: str, kind: str, said: str
) -> None:
    code, lines = terminal.json(command, named)
    assert code == NO_FLOW
    assert lines[-1]["error"]["kind"] == kind
    assert said in lines[-1]["error"]["message"]


def test_the_traceback_has_the_user_s_lines_and_none_of_ours(
    folder: Path, terminal: Terminal
) -> None:
    assert terminal.type("draw", "wrong.py") == NO_FLOW
    assert "return 1 / 0" in terminal.err
    assert 'wrong.py", line 4' in terminal.err
    assert "loading.py" not in terminal.err
    assert "importlib" not in terminal.err


def test_a_flow_is_drawn(folder: Path, terminal: Terminal) -> None:
    pytest.importorskip("railgun.flows.draw")
    assert terminal.type("draw", "good.py") == DONE
    assert "numbers" in terminal.out
    assert terminal.type("draw", "good.py", "--svg", "flow.svg") == DONE
    assert (folder / "flow.svg").read_text().startswith("<svg")
    assert terminal.type("draw", "two.py:second") == NO_FLOW
    assert "has no source" in terminal.err
