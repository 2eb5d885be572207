"""What a job holds, and for how long: its snapshot directory, its name, its place in the registry."""

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
from tests.engine.controller import flows
from tests.engine.controller.flows import counting, eventually, running

from railgun.job import FlowFailedError, Job, NotRescaledError, Snapshots, run
from railgun.storage.errors import LockedError
from railgun.testing.local_workers import SubprocessLauncher
from railgun.transport.registry import JobRunsError, Registry


def start(name: str, tmp_path: Path, *, fresh: bool = False, **options: Any) -> Job:
    return run(
        counting(name, **options),
        1,
        launcher=SubprocessLauncher(),
        snapshots=Snapshots(str(tmp_path / "snapshots"), fresh=fresh),
        registry=tmp_path / "jobs",
        by_value=[sys.modules[flows.__name__]],
    )


@pytest.mark.parametrize("how", ["stop", "wait", "abort"])
def test_a_flow_can_be_run_again_when_its_job_has_ended_and_is_not_closed(
    tmp_path: Path, how: str
) -> None:
    first = start("again", tmp_path, count=2_000 if how == "wait" else None)
    second = None
    try:
        if how == "wait":
            first.wait(flows.DEADLINE)
        else:
            running(first)
            if how == "stop":
                assert first.stop(timeout=flows.DEADLINE)
            else:
                first.abort()
                with pytest.raises(FlowFailedError):
                    first.wait(flows.DEADLINE)
        second = start("again", tmp_path, fresh=how == "wait")
        running(second)
        assert first.status()["state"] in ("finished", "failed")
        first.close()
        known = Registry(tmp_path / "jobs").find(second.name)
        assert known is not None, "closing the first leaves the second alone"
        assert known.url == second.url
        assert second.status()["state"] == "running"
        assert second.snapshot(timeout=flows.DEADLINE) > 0
    finally:
        first.close()
        if second is not None:
            second.close()


def test_a_flow_that_failed_lets_go_of_its_directory_and_its_name(tmp_path: Path) -> None:
    def fail(item: Any) -> Any:
        raise ValueError("no")

    first = run(
        _failing(fail),
        1,
        launcher=SubprocessLauncher(),
        snapshots=tmp_path / "snapshots",
        registry=tmp_path / "jobs",
    )
    with pytest.raises(FlowFailedError, match="ValueError: no"):
        first.wait(flows.DEADLINE)
    again = run(
        _failing(str),
        1,
        launcher=SubprocessLauncher(),
        snapshots=tmp_path / "snapshots",
        registry=tmp_path / "jobs",
    )
    assert again.wait(flows.DEADLINE)
    again.close()
    first.close()


def _failing(function: Any) -> Any:
    from railgun import Collect, Flow, Items

    flow = Flow("failing")
    flow.source(Items(range(10)), name="numbers").map(function).sink(Collect(), name="out")
    return flow


def test_a_job_that_still_runs_keeps_its_directory_and_says_how_to_end_it(tmp_path: Path) -> None:
    with start("twice", tmp_path) as job:
        running(job)
        with pytest.raises(LockedError, match=r"this very process.*stop\(\)"):
            start("twice", tmp_path)
        other = counting("twice")
        with pytest.raises(JobRunsError):
            run(
                other,
                1,
                launcher=SubprocessLauncher(),
                snapshots=tmp_path / "elsewhere",
                registry=tmp_path / "jobs",
                by_value=[sys.modules[flows.__name__]],
            )


def test_an_ended_job_is_still_told_of_until_it_is_closed(tmp_path: Path) -> None:
    with start("told", tmp_path, count=100) as job:
        job.wait(flows.DEADLINE)
        registry = Registry(tmp_path / "jobs")
        known = registry.find("told")
        assert known is not None
        assert known.over
        assert json.loads((tmp_path / "jobs" / "told.json").read_text())["url"] == job.url
    assert eventually(lambda: registry.find("told") is None, "it is removed")


def test_whoever_waits_for_a_rescale_is_told_that_the_flow_started_again_instead(
    tmp_path: Path,
) -> None:
    told: list[BaseException | None] = []

    def scale(job: Job) -> None:
        try:
            job.scale(3, wait=True, timeout=flows.DEADLINE)
            told.append(None)
        except NotRescaledError as error:
            told.append(error)

    with flows.started(counting("interrupted")) as job:
        running(job)
        first = flows.pids(job)[0]
        os.kill(first, signal.SIGSTOP)  # so that the rescale cannot be done
        waiting = threading.Thread(target=scale, args=(job,))
        waiting.start()
        eventually(lambda: "rescaling" in flows.kinds(job), "the rescale begins")
        os.kill(first, signal.SIGKILL)
        waiting.join(flows.DEADLINE)
        assert [str(error) for error in told] == [
            error.text for error in job.events() if error.kind == "not-rescaled"
        ]
        assert "worker 0 is lost" in str(told[0])
        assert job.status()["size"] == 3
        assert job.status()["state"] == "running"
        running(job, records=100)
        job.scale(2, wait=True, timeout=flows.DEADLINE)
        assert job.status()["size"] == 2


FORKS = """
import os, sys
from railgun.errors import RailgunError
from tests.engine.controller import flows
from tests.engine.controller.test_job_lifetime import start
from pathlib import Path

job = start("forks", Path(sys.argv[1]))
flows.running(job)
job.snapshot(timeout=flows.DEADLINE)
told, tell = os.pipe()
child = os.fork()
if child == 0:
    if sys.argv[2] == "exit":
        sys.exit(0)
    if sys.argv[2] == "with":
        with job:
            sys.exit(0)
    for method in ("status", "stop", "abort", "wait", "snapshots", "close", "close"):
        try:
            getattr(job, method)()
            text = "nothing"
        except RailgunError as error:
            text = f"{type(error).__name__}: {error}"
        os.write(tell, f"{method}: {text}\\n".encode())
    os._exit(0)
os.close(tell)
with os.fdopen(told) as words:
    print(words.read(), end="")
print("child", os.waitpid(child, 0)[1])
flows.more(job)
print("state", job.status()["state"], "failures", job.status()["failures"])
print("registry", (Path(sys.argv[1]) / "jobs" / "forks.json").exists())
print("stopped", job.stop(timeout=flows.DEADLINE))
job.close()
"""


@pytest.mark.parametrize("how", ["exit", "with", "methods"])
def test_a_forked_child_leaves_the_job_of_its_parent_alone(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path), how],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=2 * flows.DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *words, child, state, registry, stopped = done.stdout.splitlines()
    assert child == "child 0"
    assert state == "state running failures 0"
    assert (registry, stopped) == ("registry True", "stopped True")
    if how == "methods":
        assert words[-2:] == ["close: nothing"] * 2
        for word in words[:-2]:
            assert "ForkedJobError: the job 'forks' belongs to process" in word


def test_a_flow_that_is_told_to_have_failed_has_let_go_of_its_directory_and_its_name(
    tmp_path: Path,
) -> None:
    def fail(item: Any) -> Any:
        raise ValueError("no")

    for _ in range(3):
        job = run(
            _failing(fail),
            1,
            launcher=SubprocessLauncher(),
            snapshots=tmp_path / "snapshots",
            registry=tmp_path / "jobs",
        )
        try:
            eventually(lambda: job.status()["state"] == "failed", "it is told")  # noqa: B023
            assert job.over
            assert "ValueError: no" in job.status()["cause"]
        finally:
            if not job.over:
                job.close()


ENDS = """
import atexit, sys, time
from railgun.job import Snapshots, run
from railgun.testing.local_workers import SubprocessLauncher
from tests.engine.controller import flows

flow = flows.counting("ends")
snapshots = Snapshots(sys.argv[1], every=0.01)
job = run(flow, 1, launcher=SubprocessLauncher(), snapshots=snapshots, http=False, by_value=[flows])
flows.running(job)
job.snapshot(timeout=flows.DEADLINE)
atexit.register(time.sleep, 1)  # so long the program ends, and the job has not heard of it
"""


def test_a_program_that_ends_while_a_job_takes_snapshots_ends_without_a_word(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=2 * flows.DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
