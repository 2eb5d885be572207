"""Settings that workers cannot live with are refused, with the reason and the way out; no JVM needed."""

from __future__ import annotations

import doctest

import pytest

from railgun.spark import conf, failure
from railgun.spark.conf import RefusedConfigurationError, TooFewSlotsError, refuse
from railgun.spark.session import LOOPBACK, configuration

DAEMON = "railgun.spark.daemon"
LOCAL = {"spark.master": "local[4]"}


def test_the_examples_run() -> None:
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    assert doctest.testmod(conf, optionflags=options).failed == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"spark.speculation": "true"}, r"second copy of a worker"),
        ({"spark.speculation": "TRUE"}, r"spark\.speculation=true"),
        (
            {
                "spark.python.worker.killOnIdleTimeout": "true",
                "spark.python.worker.idleTimeoutSeconds": "30",
            },
            r"kill every worker after 30 s",
        ),
        (
            {"spark.task.reaper.enabled": "true", "spark.task.reaper.killTimeout": "1m"},
            r"end the executor, with all its workers",
        ),
        ({"spark.python.worker.idleTimeoutSeconds": "soon"}, r"'soon' is not a time"),
    ],
)
def test_refused(settings: dict[str, str], told: str) -> None:
    with pytest.raises(RefusedConfigurationError, match=told):
        refuse(LOCAL | settings)


def test_all_that_is_wrong_is_told_at_once() -> None:
    wrong = {
        "spark.speculation": "true",
        "spark.python.worker.killOnIdleTimeout": "true",
        "spark.python.worker.idleTimeoutSeconds": "1",
    }
    with pytest.raises(RefusedConfigurationError, match=r"speculation.*; .*killOnIdleTimeout"):
        refuse(wrong)


@pytest.mark.parametrize(
    "settings",
    [
        {"spark.speculation": "false", "spark.speculation.task.duration.threshold": "1h"},
        {"spark.python.worker.killOnIdleTimeout": "true"},
        {"spark.python.worker.idleTimeoutSeconds": "30"},
        {"spark.task.reaper.enabled": "true"},
    ],
)
def test_what_does_no_harm_is_let_pass(settings: dict[str, str]) -> None:
    refuse(LOCAL | settings, workers=4)


@pytest.mark.parametrize(
    ("master", "cpus", "slots"),
    [("local", "1", 1), ("local[3, 2]", "1", 3), ("local[5]", "2", 2), ("local[2]", "0.5", 4)],
)
def test_slots_of_local_masters_are_counted(master: str, cpus: str, slots: int) -> None:
    settings = {"spark.master": master, "spark.task.cpus": cpus}
    refuse(settings, workers=slots)
    with pytest.raises(TooFewSlotsError, match=rf"has {slots}: a worker holds its slot for life"):
        refuse(settings, workers=slots + 1)


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://https://host:6443"])
def test_a_cluster_may_grow_so_its_slots_are_not_counted(master: str) -> None:
    refuse({"spark.master": master}, workers=1000)


def test_a_local_session_has_a_slot_for_every_worker_and_parallelism_for_its_cores() -> None:
    few = configuration("x", "local[*]", 3, {}, False, None)
    many = configuration("x", "local[*]", 500, {}, False, None)
    assert few["spark.master"] == "local[64]"
    slots = conf.local_slots(many)
    assert slots is not None
    assert slots > 500
    assert int(few["spark.default.parallelism"]) < 64
    assert configuration("x", "local[2]", 0, {}, False, None)["spark.master"] == "local[2]"


@pytest.mark.parametrize("master", ["local[*]", "spark://127.0.0.1:7077", "spark://localhost:7077"])
def test_on_this_machine_alone_spark_stays_on_loopback_and_loads_ahead(master: str) -> None:
    settings = configuration("x", master, 1, {}, False, None)
    assert settings["spark.driver.host"] == LOOPBACK
    assert settings["spark.driver.bindAddress"] == LOOPBACK
    assert settings["spark.python.daemon.module"] == DAEMON


@pytest.mark.parametrize("master", ["spark://10.0.0.1:7077", "yarn", "k8s://https://host:6443"])
def test_on_a_cluster_the_address_and_the_daemon_are_left_to_spark(master: str) -> None:
    settings = configuration("x", master, 1, {}, False, None)
    assert settings["spark.master"] == master
    assert "spark.driver.host" not in settings
    assert "spark.driver.bindAddress" not in settings
    assert "spark.python.daemon.module" not in settings
    asked = configuration("x", master, 1, {}, False, True)
    assert asked["spark.python.daemon.module"] == DAEMON


def test_the_settings_of_the_user_go_over_ours() -> None:
    own = {"spark.ui.enabled": "true", "spark.driver.extraJavaOptions": "-Dmine=1"}
    settings = configuration("x", "local[*]", 1, own, False, None)
    assert settings["spark.ui.enabled"] == "true"
    assert settings["spark.driver.extraJavaOptions"].endswith("log4j2.properties -Dmine=1")


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        (
            "An error occurred while calling z:x.\n: org.apache.spark.SparkException: Error from "
            "python worker:\n  /usr/bin/python3: No module named 'railgun'\n\tat x.y(Z.scala:1)",
            failure.ModuleMissingError,
            "no module railgun on the worker",
        ),
        (
            'java.io.IOException: Cannot run program "/opt/python": error=2',
            failure.SparkJobError,
            "the executors have no Python at /opt/python: set PYSPARK_PYTHON",
        ),
        (
            "PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version",
            failure.SparkJobError,
            "the executors run another version of Python",
        ),
        (
            "Job 7 cancelled because SparkContext was shut down",
            failure.SparkStoppedError,
            "the Spark session was stopped",
        ),
        (
            "[SPARK_JOB_CANCELLED] Job 0 cancelled SQLSTATE: XXKDA",
            failure.CancelledError,
            "its Spark job was cancelled, and not by Railgun",
        ),
        (
            "x.PythonException: Traceback (most recent call last):\n  File x\nKeyError: 'a'\n\n\tat x",
            failure.WorkerRaisedError,
            "KeyError: 'a'",
        ),
        (
            "An error occurred while calling o1.x.\n: org.apache.spark.SparkException: no way\n\tat x",
            failure.SparkJobError,
            "no way",
        ),
    ],
)
def test_what_spark_tells_is_told_in_a_line(
    text: str, kind: type[failure.WorkerFailure], told: str
) -> None:
    found = failure.of_spark(text)
    assert type(found) is kind
    assert str(found).startswith(told)
    assert "\tat" not in str(found)
