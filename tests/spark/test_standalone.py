"""Workers on the executors of a real cluster, which come, go and die.

The driver is a process of its own, since the one of the tests has its session already; what is
tested runs there, function by function, on one session.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from tests.spark.workers import Desk, Endings, eventually, is_alive, waits
from verification.chaos import Storm, calm, flow, lines
from verification.numbered_load import Load, numbered_flow
from verification.rescale_run import RescaleRun
from verification.spark_cluster import DYNAMIC, Standalone, standalone

from railgun import run as start
from railgun.job import Job, Snapshots
from railgun.spark.launcher import SparkLauncher
from railgun.spark.session import session

pytestmark = pytest.mark.spark

CONF = {
    **DYNAMIC,
    # An executor that is silent is given up soon; the default is after two minutes.
    "spark.executor.heartbeatInterval": "1s",
    "spark.network.timeout": "10s",
    "spark.network.timeoutInterval": "1s",
}

Program = Callable[[Standalone, SparkLauncher, Desk, Endings], None]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Standalone]:
    with standalone(workers=2, cores=4, memory="3g") as started:
        yield started
    assert not [pid for pid in started.processes if is_alive(pid)]
    assert started.executors() == []


@pytest.fixture(scope="module")
def driver(cluster: Standalone) -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool
        pool.submit(stop).result(timeout=60)


@pytest.fixture
def run(
    driver: ProcessPoolExecutor, cluster: Standalone, tmp_path: Path
) -> Callable[[Program], None]:
    """Runs a program in the driver's process."""

    def program_in_driver(program: Program) -> None:
        driver.submit(in_driver, program, cluster, tmp_path).result(timeout=240)

    return program_in_driver


# ---------------------------------------------------------------- in the driver's process


def in_driver(program: Program, cluster: Standalone, directory: Path) -> None:
    spark = session("railgun tests", cluster.url, conf=CONF, quick=True)
    desk = Desk(directory)
    launcher = SparkLauncher(spark, entry=waits())
    try:
        program(cluster, launcher, desk, Endings())
    finally:
        desk.dismiss_all()
        launcher.close()


def stop() -> None:
    session("railgun tests").stop()


def executor_of(pid: int) -> int:
    """The executor whose daemon has forked the process of a worker."""
    daemon = parent_of(pid)
    return parent_of(daemon)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def executors_come_with_workers_and_go_with_them(
    cluster: Standalone, launcher: SparkLauncher, desk: Desk, ended: Endings
) -> None:
    assert cluster.executors() == []
    words = session("railgun tests").sparkContext.parallelize(["map", "of", "words"], 1)
    counts = words.map(lambda word: (len(word), 1)).reduceByKey(lambda a, b: a + b, 1)
    assert dict(counts.collect()) == {3: 1, 2: 1, 5: 1}
    (holder,) = cluster.executors()  # of shuffle data: it is kept for that

    first, second = desk.spec(0, job="two"), desk.spec(1, job="two")
    launcher.launch(first, ended)
    assert launcher.pending(first), "there is no executor for it yet"
    launcher.launch(second, ended)
    homes = {executor_of(desk.pid(spec)) for spec in (first, second)}
    assert len(homes) == 2
    assert homes < set(cluster.executors())
    assert holder not in homes, "workers have executors of their own"
    eventually("none is pending", lambda: not (launcher.pending(first) or launcher.pending(second)))

    gone = executor_of(desk.pid(first))
    desk.dismiss(first)
    assert ended.next() == (first, None)
    eventually("its executor is released", lambda: gone not in cluster.executors())
    assert is_alive(desk.pid(second))
    assert homes - {gone} < set(cluster.executors())


def a_killed_executor_is_told_and_its_worker_is_gone(
    cluster: Standalone, launcher: SparkLauncher, desk: Desk, ended: Endings
) -> None:
    spec = desk.spec(0, job="executor")
    launcher.launch(spec, ended)
    pid = desk.pid(spec)
    os.kill(executor_of(pid), signal.SIGKILL)
    told, error = ended.next()
    assert told == spec
    assert error is not None
    assert error.startswith("its executor was lost ("), error
    eventually("it does not outlive its executor", lambda: not is_alive(pid))
    assert desk.pid(spec) == pid, "Spark's second attempt did not run"

    again = desk.spec(0, incarnation=1, job="executor")
    launcher.launch(again, ended)
    assert is_alive(desk.pid(again))
    assert ended.none_left


def a_killed_process_is_not_tried_again_by_spark(
    cluster: Standalone, launcher: SparkLauncher, desk: Desk, ended: Endings
) -> None:
    spec = desk.spec(job="process")
    launcher.launch(spec, ended)
    pid = desk.pid(spec)
    os.kill(pid, signal.SIGKILL)
    error = "its process died: killed, out of memory, or crashed in native code"
    assert ended.next() == (spec, error)
    assert desk.pid(spec) == pid
    assert ended.none_left


def a_frozen_executor_is_given_up_and_its_worker_does_not_run_twice(
    cluster: Standalone, launcher: SparkLauncher, desk: Desk, ended: Endings
) -> None:
    spec, again = desk.spec(0, job="frozen"), desk.spec(0, incarnation=1, job="frozen")
    launcher.launch(spec, ended)
    pid = desk.pid(spec)
    frozen = executor_of(pid)
    os.kill(frozen, signal.SIGSTOP)
    try:
        told, error = ended.next()
        assert told == spec
        assert error is not None
        assert error.startswith("its executor was lost ("), error
        assert is_alive(pid), "this is what the fence by incarnation is for"
        launcher.launch(again, ended)
        assert desk.pid(again) != pid
        assert desk.pid(spec) == pid, "Spark's second attempt did not run"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(frozen, signal.SIGCONT)
    eventually("it ends with its executor", lambda: not (is_alive(pid) or is_alive(frozen)))
    assert is_alive(desk.pid(again))


def a_flow_scales_with_its_executors_and_outlives_one(
    cluster: Standalone, launcher: SparkLauncher, desk: Desk, ended: Endings
) -> None:
    load = Load(keys=8_000, rate=2_000, directory=str(desk.path))
    before = set(cluster.executors())
    with start(numbered_flow("cluster", load), workers=1, spark=session("railgun tests")) as job:
        eventually("it runs", lambda: job.status()["state"] == "running", 120)
        one = len(set(cluster.executors()) - before)
        job.scale(3, wait=True, timeout=120)
        assert len(set(cluster.executors()) - before) > one, "executors came with the workers"
        pids = [worker["pid"] for worker in job.status()["workers"]]
        os.kill(executor_of(pids[-1]), signal.SIGKILL)
        eventually("it is told", lambda: "restarting" in [event.kind for event in job.events()])
        eventually("it runs again", lambda: job.status()["state"] == "running", 120)
        assert job.status()["size"] == 3
        now = f"log-{job.status()['generation']}-"
        for log in [*desk.path.glob("read-*"), *desk.path.glob("log-*")]:
            if not log.name.startswith(now):
                log.unlink()  # of the life before
        result = RescaleRun(job, load, (2, 1), "", "", pause=0.5).run()
        assert result.verdict.good, result.verdict
        released = lambda: len(set(cluster.executors()) - before) == 0  # noqa: E731
    eventually("idle executors are released", released, 120)


def a_flow_goes_on_from_its_snapshot_without_an_executor_and_at_another_size(
    cluster: Standalone, launcher: SparkLauncher, desk: Desk, ended: Endings
) -> None:
    storm = Storm(str(desk.path), seconds=20, rate=1_000)
    wanted = calm(storm)
    spark = session("railgun tests")
    snapshots = Snapshots(storm.snapshots, every=1.0)

    def told(job: Job, kind: str) -> list[str]:
        return [event.text for event in job.events() if event.kind == kind]

    with start(
        flow(storm.out, storm.count, storm.rate), 2, spark=spark, snapshots=snapshots
    ) as job:
        eventually("a snapshot is committed", lambda: told(job, "snapshot"))
        lost = job.status()["workers"][1]
        os.kill(executor_of(lost["pid"]), signal.SIGKILL)
        eventually("it runs again", lambda: len(told(job, "running")) == 2)
        [why] = told(job, "restarting")
        assert "goes back to snapshot" in why
        now = job.status()["workers"][1]
        assert now["incarnation"] > lost["incarnation"], "its task was launched again"
        assert not is_alive(lost["pid"])
        assert job.stop(timeout=120)
        number = job.status()["snapshot"]
    with start(
        flow(storm.out, storm.count, storm.rate), 3, spark=spark, snapshots=snapshots
    ) as job:
        assert job.wait(120)
        assert told(job, "running") == [f"running on 3 workers, from snapshot {number}"]
    assert lines(storm.out) == wanted


# ---------------------------------------------------------------- the tests


@pytest.mark.parametrize(
    "program",
    [
        executors_come_with_workers_and_go_with_them,
        a_killed_executor_is_told_and_its_worker_is_gone,
        a_killed_process_is_not_tried_again_by_spark,
        a_frozen_executor_is_given_up_and_its_worker_does_not_run_twice,
        a_flow_scales_with_its_executors_and_outlives_one,
        a_flow_goes_on_from_its_snapshot_without_an_executor_and_at_another_size,
    ],
    ids=lambda program: program.__name__,
)
def test_on_a_standalone_cluster(run: Callable[[Program], None], program: Program) -> None:
    run(program)


def test_the_master_knows_its_machines(cluster: Standalone) -> None:
    status = cluster.status()
    assert status["aliveworkers"] == 2
    assert status["cores"] == 8
