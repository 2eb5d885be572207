"""Ctrl-C and its like while `railgun run` starts Spark: an orderly end, no JVM is left, nothing of Python is shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from railgun.cli.errors import DONE, INTERRUPTED

FLOW = """
from railgun import Flow, Generate, Print
flow = Flow("early")
flow.source(Generate(lambda i, r: i, rate=500), name="s").filter(lambda n: False).sink(Print(), name="o")
"""
NEVER_UP = """#!/bin/sh
echo $$ > {pid}.new
mv {pid}.new {pid}
sleep 600 &
wait
wait
"""
"""In the place of `spark-submit`: a JVM that starts for ever."""
DEAF = NEVER_UP.replace("#!/bin/sh\n", "#!/bin/sh\ntrap '' TERM\n")
WITHIN_S = 30.0


def until(happened: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def command(folder: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    (folder / "f_early.py").write_text(FLOW)
    return subprocess.Popen(
        [sys.executable, "-m", "railgun", "run", "f_early.py", "--master", "local[3]"],
        cwd=folder,
        env={
            **os.environ,
            "RAILGUN_JOBS": str(folder / "jobs"),
            "MARKED": str(folder),
            **(environment or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def spark_that_is_never_up(folder: Path, program: str = NEVER_UP) -> tuple[Path, dict[str, str]]:
    """Where it says its number, and what has it started."""
    (folder / "spark" / "bin").mkdir(parents=True)
    submit = folder / "spark" / "bin" / "spark-submit"
    submit.write_text(program.format(pid=folder / "pid"))
    submit.chmod(0o755)
    return folder / "pid", {"SPARK_HOME": str(folder / "spark")}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_while_spark_starts_stops_the_job_and_ends_the_jvm(
    tmp_path: Path, number: signal.Signals, to_all: bool
) -> None:
    told, environment = spark_that_is_never_up(tmp_path)
    process = command(tmp_path, environment)
    until(told.exists, "the JVM starts")
    (os.killpg if to_all else os.kill)(process.pid, number)
    out, _ = process.communicate(timeout=WITHIN_S)
    assert out.splitlines()[:1] == ["early: starting on local[3]"]
    assert "stopping: it has not begun" in out
    assert "before it began" in out.splitlines()[-1]
    assert "Traceback" not in out
    assert "KeyboardInterrupt" not in out
    assert process.returncode == DONE
    until(lambda: not marked(tmp_path), "the JVM is gone")
    assert not list((tmp_path / "jobs").glob("*.json"))


def test_a_jvm_that_does_not_end_is_killed_by_further_signals_at_the_latest(tmp_path: Path) -> None:
    told, environment = spark_that_is_never_up(tmp_path, DEAF)
    process = command(tmp_path, environment)
    until(told.exists, "the JVM starts")
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.3)
    out, _ = process.communicate(timeout=WITHIN_S)
    assert "Traceback" not in out
    assert process.returncode in (DONE, INTERRUPTED)
    until(lambda: not marked(tmp_path), "the JVM is gone")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("presses", [1, 2, 3])
@pytest.mark.parametrize("after_s", [0.2, 1.2, 2.2])
def test_no_jvm_is_left_whenever_it_is_interrupted(
    tmp_path: Path, presses: int, after_s: float
) -> None:
    process = command(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "early: starting on local[3]\n"
    time.sleep(after_s)
    for _ in range(presses):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.05)
    out, _ = process.communicate(timeout=WITHIN_S)
    assert "Traceback" not in out
    ends = (
        (DONE,) if presses == 1 else (DONE, INTERRUPTED, -signal.SIGINT)
    )  # the last for shells is 130, too
    assert process.returncode in ends
    until(lambda: not marked(tmp_path), "the JVM is gone")


def marked(folder: Path) -> list[str]:
    """The processes that were started from there, and live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MARKED={folder}\0".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:  # it is gone
            continue
    return found
