"""The local session: it runs our code in its tasks, as it runs here, and says plainly what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from verification.rescale.simulator import simulate

from railgun.spark.archive import archive_options, archive_path
from railgun.spark.conf import RefusedConfigurationError, TooFewSlotsError
from railgun.spark.java import JavaMissingError, find_java
from railgun.spark.session import (
    SparkSession,
    check,
    driver_host,
    opened,
    session,
)

SEEDS = (1, 2, 3, 5, 8)


@pytest.mark.spark
def test_a_seed_gives_the_same_trace_in_a_spark_task_as_here(spark: SparkSession) -> None:
    def digests(seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
        for seed in seeds:
            yield seed, simulate(seed, 0.1).digest

    there = spark.sparkContext.parallelize(SEEDS, 2).mapPartitions(digests).collect()
    assert dict(there) == dict(digests(SEEDS))


@pytest.mark.spark
def test_tasks_run_in_our_interpreter(spark: SparkSession) -> None:
    assert spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect() == [
        sys.executable
    ]


@pytest.mark.spark
def test_an_active_session_is_used_as_it_is_and_never_stopped(spark: SparkSession) -> None:
    assert session("another") is spark
    with opened("another") as used:
        assert used is spark
    assert spark.sparkContext.parallelize([1], 1).count() == 1


@pytest.mark.spark
def test_an_active_session_is_found_from_any_thread(spark: SparkSession) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(session, "another").result(timeout=60)
    assert other.sparkContext is spark.sparkContext


@pytest.mark.spark
def test_an_active_session_that_kills_workers_is_refused(spark: SparkSession) -> None:
    with pytest.raises(TooFewSlotsError, match=r"7 workers need 7 slots"):
        session("another", workers=7)
    refused = spark.sparkContext.getConf()  # a copy
    refused.set("spark.speculation", "true")
    with (
        mock.patch.object(type(spark.sparkContext), "getConf", return_value=refused),
        pytest.raises(RefusedConfigurationError, match=r"spark\.speculation=true"),
    ):
        check(spark)


@pytest.mark.spark
def test_threads_that_share_their_job_group_are_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("railgun.spark.session.SparkContext._gateway", object())
    with pytest.raises(RefusedConfigurationError, match=r"PYSPARK_PIN_THREAD=false"):
        check(spark)


@pytest.mark.spark
def test_the_controller_learns_where_to_listen(spark: SparkSession) -> None:
    assert driver_host(spark) == "127.0.0.1"


@pytest.mark.spark
def test_a_lost_worker_is_told_once_and_not_by_spark_as_well(spark: SparkSession) -> None:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    for name in (
        *("executor.Executor", "scheduler.TaskSetManager", "scheduler.DAGScheduler"),
        "api.python.PythonRunner",
    ):
        logger = jvm.org.apache.logging.log4j.LogManager.getLogger(f"org.apache.spark.{name}")
        assert logger.getLevel().toString() == "OFF"


@pytest.mark.spark
def test_it_listens_on_loopback_only_and_leaves_the_environment_alone(spark: SparkSession) -> None:
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert "SPARK_LOCAL_IP" not in os.environ
    assert "PYSPARK_PYTHON" not in os.environ


@pytest.mark.spark
def test_spark_tells_errors_and_nothing_less(spark: SparkSession) -> None:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    level = jvm.org.apache.logging.log4j.LogManager.getRootLogger().getLevel()
    assert level.toString() == "ERROR"


def java_that_tells(directory: Path, version: str) -> Path:
    """A Java home whose runtime says that it is of this version."""
    java = directory / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    return directory


def test_without_java_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(JavaMissingError, match=r"Java 17 or newer .*railgun\[java\].* JAVA_HOME"):
        find_java({"PATH": str(tmp_path)})


def test_a_java_that_is_too_old_is_named(tmp_path: Path) -> None:
    home = java_that_tells(tmp_path / "old", "11.0.2")
    with pytest.raises(JavaMissingError, match=r"old/bin/java is version 11"):
        find_java({"JAVA_HOME": str(home), "PATH": ""})


def test_a_newer_java_in_the_path_makes_up_for_an_old_java_home(tmp_path: Path) -> None:
    old = java_that_tells(tmp_path / "old", "1.8.0_392")
    new = java_that_tells(tmp_path / "new", "21.0.8")
    assert find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")}) == new


def test_a_session_without_java_is_refused_before_anything_starts(tmp_path: Path) -> None:
    program = "from railgun.spark.session import session; session('none')"
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 1
    assert "railgun.spark.java.JavaMissingError: Spark needs Java 17" in told.stderr


def test_an_archive_of_classes_is_used_if_it_is_there(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    java = Path("/opt/java")
    assert archive_options(java, environment) == []
    path = archive_path(java, environment)
    path.parent.mkdir()
    path.touch()
    assert archive_options(java, environment)[0] == f"-XX:SharedArchiveFile={path}"
    assert archive_options(Path("/opt/other"), environment) == [], "each runtime has its own"


@pytest.mark.slow
@pytest.mark.spark
def test_a_broken_archive_does_no_harm_and_is_not_mentioned(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    path = archive_path(find_java(environment), environment)
    path.parent.mkdir()
    path.write_bytes(b"no archive" * 1000)
    program = (
        "from railgun.spark.session import session; spark = session('broken', quick=True); "
        "assert 'SharedArchiveFile' in spark.conf.get('spark.driver.extraJavaOptions'); "
        "print(spark.range(3).count()); spark.stop()"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert (told.stdout, told.stderr) == ("3\n", "")
