"""Workers as tasks of a local session: real processes, started, ended, lost and cancelled."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from pyspark import TaskContext, cloudpickle
from tests.spark.workers import Desk, Endings, ends, eventually, imports, is_alive, raises, waits

from railgun.engine.controller.launcher import Launcher
from railgun.spark import failure, task
from railgun.spark.conf import TooFewSlotsError
from railgun.spark.launcher import LaunchedTwiceError, SparkLauncher
from railgun.spark.session import SparkSession

SLOTS = 6  # of the session that tests share
pytestmark = pytest.mark.spark


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def ended() -> Endings:
    return Endings()


@pytest.fixture
def waiting(spark: SparkSession, desk: Desk) -> Iterator[Launcher]:
    """A launcher of workers that wait until they are dismissed."""
    launcher: Launcher = SparkLauncher(spark, entry=waits())
    yield launcher
    desk.dismiss_all()
    launcher.close()


def test_a_worker_that_returns_has_ended_of_its_own_accord(
    spark: SparkSession, desk: Desk, ended: Endings
) -> None:
    spec = desk.spec()
    SparkLauncher(spark, entry=ends()).launch(spec, ended)
    assert ended.next() == (spec, None)
    pid = desk.pid(spec)
    eventually("its process is gone", lambda: not is_alive(pid))


def test_workers_come_and_go_one_by_one_each_in_a_process_of_its_own(
    waiting: Launcher, desk: Desk, ended: Endings
) -> None:
    first, second, third = (desk.spec(number, job="trio") for number in range(3))
    waiting.launch(first, ended)
    waiting.launch(second, ended)
    pids = {desk.pid(first), desk.pid(second)}
    waiting.launch(third, ended)
    pids |= {desk.pid(third)}
    assert len(pids) == 3

    desk.dismiss(second)
    assert ended.next() == (second, None)
    again = desk.spec(1, incarnation=1, job="trio")
    waiting.launch(again, ended)
    assert desk.pid(again) not in pids, "a process of its own for each incarnation"
    assert ended.none_left


def test_a_worker_does_not_begin_in_a_process_that_a_query_has_used(
    spark: SparkSession, waiting: Launcher, desk: Desk, ended: Endings
) -> None:
    numbers = spark.sparkContext.parallelize(range(SLOTS), SLOTS)
    used = {*numbers.map(lambda _: os.getpid()).collect()}
    assert any(map(is_alive, used)), "Spark keeps them for the next task"
    spec = desk.spec()
    waiting.launch(spec, ended)
    assert desk.pid(spec) not in used
    eventually("it is not pending", lambda: not waiting.pending(spec))
    assert ended.none_left


def test_a_job_is_readable_in_the_ui_and_has_its_own_pool(
    spark: SparkSession, waiting: Launcher, desk: Desk, ended: Endings
) -> None:
    spec = desk.spec(3, incarnation=2, job="wordcount")
    waiting.launch(spec, ended)
    desk.pid(spec)
    jvm = spark.sparkContext._jsc.sc()
    (job,) = spark.sparkContext.statusTracker().getActiveJobsIds()
    shown = jvm.statusStore().job(job).description().get()
    assert shown == "railgun wordcount worker 3 (incarnation 2)"
    assert jvm.getPoolForName("railgun").isDefined()


def test_what_the_entry_raises_is_told_in_its_last_line(
    spark: SparkSession, desk: Desk, ended: Endings
) -> None:
    launcher = SparkLauncher(spark, entry=raises(ValueError("no such key: 'ada'\nand more")))
    launcher.launch(desk.spec(), ended)
    assert ended.next()[1] == "ValueError: no such key: 'ada'"


@pytest.mark.parametrize(("code", "error"), [(0, None), (3, "SystemExit: 3")])
def test_an_exit_is_an_end(
    spark: SparkSession, desk: Desk, ended: Endings, code: int, error: str | None
) -> None:
    SparkLauncher(spark, entry=raises(SystemExit(code))).launch(desk.spec(), ended)
    assert ended.next()[1] == error


def test_a_module_that_the_executor_lacks_is_named(
    spark: SparkSession, desk: Desk, ended: Endings
) -> None:
    SparkLauncher(spark, entry=imports("no_such_module")).launch(desk.spec(), ended)
    error = ended.next()[1]
    assert error is not None
    assert error.startswith("no module no_such_module on the worker (")
    assert "install it there" in error


def test_on_an_executor_without_railgun_the_task_says_so(desk: Desk, tmp_path: Path) -> None:
    shipped = tmp_path / "task"
    pickled = cloudpickle.dumps((task.body(None), task.row_of(desk.spec())))  # type: ignore[no-untyped-call]
    shipped.write_bytes(pickled)
    bare = (
        "import pickle, sys; sys.modules['railgun'] = None; "
        "body, row = pickle.load(open(sys.argv[1], 'rb')); print(list(body([row])))"
    )
    told = subprocess.run(
        [sys.executable, "-c", bare, shipped], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stderr
    failed = failure.of_outcome(ast.literal_eval(told.stdout)[0])
    assert isinstance(failed, failure.ModuleMissingError)
    assert str(failed).startswith("no module railgun")
    assert f"on the worker ({sys.executable}, Python 3." in str(failed)


def test_a_killed_process_is_told_and_can_be_replaced(
    waiting: Launcher, desk: Desk, ended: Endings
) -> None:
    spec, other = desk.spec(0, job="killed"), desk.spec(1, job="killed")
    waiting.launch(spec, ended)
    waiting.launch(other, ended)
    bystander = desk.pid(other)
    os.kill(desk.pid(spec), signal.SIGKILL)
    lost, error = ended.next()
    assert lost == spec
    assert error == "its process died: killed, out of memory, or crashed in native code"

    again = desk.spec(0, incarnation=1, job="killed")
    waiting.launch(again, ended)
    assert is_alive(desk.pid(again))
    assert is_alive(bystander)
    assert ended.none_left


def test_a_hanging_worker_is_cancelled_and_is_gone_when_that_is_told(
    waiting: Launcher, desk: Desk, ended: Endings
) -> None:
    spec, other = desk.spec(0, job="hangs"), desk.spec(1, job="hangs")
    waiting.launch(spec, ended)
    waiting.launch(other, ended)
    pid, bystander = desk.pid(spec), desk.pid(other)
    os.kill(pid, signal.SIGSTOP)  # it answers to nothing any more
    waiting.cancel(spec)
    waiting.cancel(spec)
    assert ended.next() == (spec, "it was cancelled")
    assert not is_alive(pid)
    assert is_alive(bystander)
    waiting.cancel(spec)
    assert ended.none_left


def test_a_cancel_may_come_at_any_time(waiting: Launcher, desk: Desk, ended: Endings) -> None:
    waiting.cancel(desk.spec())  # never launched
    specs = [desk.spec(number, job="early") for number in range(8)]
    for spec in specs:
        waiting.launch(spec, ended)
        waiting.cancel(spec)
    told = dict(ended.next() for _ in specs)
    assert set(told) == set(specs)
    assert all(error is not None and "cancelled" in error for error in told.values())
    begun = [spec for spec in specs if desk.has_begun(spec)]
    assert not [spec for spec in begun if is_alive(desk.pid(spec))]


def test_close_leaves_no_process_and_starts_nothing_more(
    spark: SparkSession, desk: Desk, ended: Endings
) -> None:
    launcher = SparkLauncher(spark, entry=waits())
    specs = [desk.spec(number, job="closing") for number in range(4)]
    for spec in specs:
        launcher.launch(spec, ended)
    pids = [desk.pid(spec) for spec in specs]
    launcher.close()
    assert not [pid for pid in pids if is_alive(pid)]
    assert {ended.next()[0] for _ in specs} == set(specs)

    launcher.close()
    launcher.launch(desk.spec(), ended)
    assert ended.next()[1] == "the launcher is closed: nothing can start"
    assert spark.sparkContext.parallelize([1], 1).count() == 1, "the session stays"


def test_an_incarnation_is_launched_once(waiting: Launcher, desk: Desk, ended: Endings) -> None:
    spec = desk.spec(job="once")
    waiting.launch(spec, ended)
    with pytest.raises(LaunchedTwiceError, match=r"railgun once worker 0 \(incarnation 0\)"):
        waiting.launch(spec, ended)


def test_a_second_attempt_of_spark_does_not_run_the_entry(spark: SparkSession, desk: Desk) -> None:
    run = task.body(ends())
    spec = desk.spec()

    def second(rows: Iterable[task.Row]) -> Iterable[task.Outcome]:
        context = TaskContext.get()
        assert context is not None
        context._attemptNumber = 1
        return run(rows)

    rows = spark.sparkContext.parallelize([task.row_of(spec)], 1)
    assert rows.mapPartitions(second).collect() == [("refused", "attempt 1")]
    assert not desk.has_begun(spec)


def test_a_worker_is_pending_until_it_has_a_slot(
    waiting: Launcher, desk: Desk, ended: Endings
) -> None:
    *first, last = (desk.spec(number, job="pending") for number in range(SLOTS + 1))
    for spec in first:
        waiting.launch(spec, ended)
    for spec in first:
        desk.pid(spec)
    eventually("all have a slot", lambda: not any(map(waiting.pending, first)))

    waiting.launch(last, ended)
    assert waiting.pending(last)
    desk.dismiss(first[0])
    assert ended.next() == (first[0], None)
    desk.pid(last)
    eventually("it has a slot", lambda: not waiting.pending(last))
    assert not waiting.pending(first[0])


def test_a_worker_that_waits_for_a_slot_can_be_cancelled(
    waiting: Launcher, desk: Desk, ended: Endings
) -> None:
    *first, last = (desk.spec(number, job="queue") for number in range(SLOTS + 1))
    for spec in first:
        waiting.launch(spec, ended)
    for spec in first:
        desk.pid(spec)
    waiting.launch(last, ended)
    waiting.cancel(last)
    told, error = ended.next()
    assert told == last
    assert error in ("it was cancelled", "it was cancelled before it began")
    assert not desk.has_begun(last)


def test_more_workers_than_slots_are_refused_at_the_start(spark: SparkSession) -> None:
    with pytest.raises(TooFewSlotsError, match=rf"local\[{SLOTS}\] has {SLOTS}: .* for life"):
        SparkLauncher(spark, workers=SLOTS + 1)
