"""Flows on Spark, as users run them: rescaled under load, hurt, started and stopped from a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.spark.workers import eventually, is_alive
from verification.numbered_load import Load, numbered_flow
from verification.rescale_run import RescaleRun

from railgun import Collect, Flow, Items, run
from railgun.engine.controller.controller import FlowFailedError
from railgun.spark.session import SparkSession

pytestmark = pytest.mark.spark

WORDCOUNT = Path(__file__).parents[2] / "examples" / "wordcount.py"


def pids(job: Any) -> list[int]:
    return [worker["pid"] for worker in job.status()["workers"] if worker["pid"]]


def test_a_flow_is_rescaled_under_load_and_every_record_is_there_once_in_order(
    spark: SparkSession, tmp_path: Path
) -> None:
    load = Load(keys=8_000, rate=4_000, directory=str(tmp_path))
    with run(numbered_flow("rescaled", load), workers=2, spark=spark, http=False) as job:
        result = RescaleRun(job, load, (4, 1, 3), "", "", pause=0.5).run()
    assert result.verdict.good, result.verdict
    assert result.restarts == 0
    assert [(span.before, span.after) for span in result.spans] == [(2, 4), (4, 1), (1, 3)]
    assert all(span.moved_keys > 0 for span in result.spans)


def test_a_worker_that_is_killed_is_replaced_and_the_flow_starts_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    load = Load(keys=800, rate=500, directory=str(tmp_path))
    with run(numbered_flow("killed", load), workers=2, spark=spark, http=False) as job:
        eventually("both run", lambda: job.status()["state"] == "running")
        (victim, other) = pids(job)
        os.kill(victim, signal.SIGKILL)
        eventually("it says so", lambda: "restarting" in [e.kind for e in job.events()])
        eventually("it runs again", lambda: job.status()["state"] == "running")
        [told] = [event.text for event in job.events() if event.kind == "restarting"]
        assert "starts again from its sources" in told
        assert victim not in pids(job)
        assert other in pids(job), "the one that is well stays"
        left = pids(job)
        job.stop()
    eventually("no process is left", lambda: not any(map(is_alive, left)))


def test_a_job_can_be_run_again_in_the_same_session(spark: SparkSession) -> None:
    for _ in range(2):
        flow = Flow("again")
        flow.source(Items(range(10)), name="numbers").key_by(str).reduce(max).sink(Collect())
        with run(flow, workers=2, spark=spark, http=False) as job:
            eventually("it runs or has ended", lambda: job.status()["state"] != "starting")
            job.abort("so that its workers are cancelled")


def test_a_function_that_raises_stops_the_flow_with_record_and_step(spark: SparkSession) -> None:
    flow = Flow("raises")
    numbers = flow.source(Items([3, 2, 1, 0]), name="numbers")
    numbers.map(lambda n: 6 // n, name="divide").key_by(str).reduce(max).sink(Collect())
    with run(flow, workers=2, spark=spark, http=False) as job:
        with pytest.raises(FlowFailedError) as failed:
            job.wait(60)
        assert "step 'divide'" in str(failed.value)
        assert "for the record 0" in str(failed.value)
        assert "ZeroDivisionError" in str(failed.value)


def command(home: Path, *arguments: str) -> list[str]:
    """The command line, with a home of its own to keep its registry in."""
    return ["env", f"HOME={home}", sys.executable, "-m", "railgun", *arguments]


def ask(home: Path, *arguments: str) -> Any:
    done = subprocess.run(
        command(home, *arguments), capture_output=True, text=True, timeout=120, cwd=home
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_from_the_terminal_run_scale_status_stop(tmp_path: Path) -> None:
    running = subprocess.Popen(
        command(tmp_path, "run", str(WORDCOUNT), "--workers", "2"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:

        def is_running() -> bool:
            assert running.poll() is None, running.communicate()
            told = subprocess.run(
                command(tmp_path, "status", "wordcount", "--json"), capture_output=True, text=True
            )
            return told.returncode == 0 and '"state": "running"' in told.stdout

        eventually("the job runs", is_running, 120)
        ask(tmp_path, "scale", "wordcount", "4", "--watch", "--json")
        assert ask(tmp_path, "status", "wordcount", "--json")["status"]["size"] == 4
        ask(tmp_path, "scale", "wordcount", "1", "--watch", "--json")
        workers = [
            w["pid"] for w in ask(tmp_path, "status", "wordcount", "--json")["status"]["workers"]
        ]
        ask(tmp_path, "stop", "wordcount", "--json")
        told, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 0, told
    assert "WARN" not in told
    assert "runs on 4 workers now" in told
    eventually("no process is left", lambda: not any(map(is_alive, workers)))
    counts: dict[str, list[int]] = {}
    for file in (tmp_path / "wordcount").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            counts.setdefault(entry["word"], []).append(entry["count"])
    assert len(counts) > 50
    for word, told_counts in counts.items():
        assert sorted(told_counts) == list(range(1, len(told_counts) + 1)), word


@pytest.mark.slow
def test_a_job_that_was_killed_goes_on_when_it_is_run_again(tmp_path: Path) -> None:
    """Twice: the first run is killed with its driver, the second is stopped. What is written is there once."""

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command(tmp_path, "run", str(WORDCOUNT), "--every", "0.5"),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def told(running: subprocess.Popen[str], words: str) -> str:
        """The next line that has these words; if they do not come in time, all that came instead."""
        assert running.stdout is not None
        before = []
        late = threading.Timer(180, running.kill)
        late.start()
        try:
            for line in running.stdout:
                before.append(line)
                if words in line:
                    return line
        finally:
            late.cancel()
        raise AssertionError(f"no {words!r} in:\n{''.join(before)}")

    with start() as first:
        told(first, "begins afresh")
        told(first, "snapshot 2 ")
        assert (
            ask(tmp_path, "state", "wordcount", "--step", "count", "--key", "ba", "--json")["state"]
            > 0
        )
        first.kill()
    with start() as second:
        try:
            last = int(told(second, "goes on from snapshot").split()[-1])
            assert last >= 2
            told(second, f"running on 2 workers, from snapshot {last}")
            told(second, f"snapshot {last + 2} ")
            ask(tmp_path, "stop", "wordcount", "--json")
            assert second.stdout is not None
            rest = second.stdout.read()
            assert second.wait(60) == 0, rest
        finally:
            second.kill()
    counts: dict[str, list[int]] = {}
    for file in (tmp_path / "wordcount").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            counts.setdefault(entry["word"], []).append(entry["count"])
    where = str(tmp_path / "railgun-snapshots")
    for word, numbers in counts.items():
        assert sorted(numbers) == list(range(1, len(numbers) + 1)), word
    sql = "SELECT sum(state) FROM state"
    saved = ask(tmp_path, "state", "--dir", where, "--step", "count", "--sql", sql, "--json")
    assert saved["rows"] == [[sum(map(len, counts.values()))]]
