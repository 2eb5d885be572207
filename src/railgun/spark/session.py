"""Make a Spark session for workers: quiet, on loopback where possible, with more slots than cores.

By default Spark prints a dozen lines of warnings, listens on the machine's public address, and starts its workers with
the first `python3` in the path. This session is made so that a user sees only Railgun's lines and Spark's errors:

- Spark's logs: `log4j2.properties` beside this file is passed to the JVM.
- The JVM's output while it starts is held back, and shown only if the start fails (`starting`).
- A start that is interrupted or given up leaves no JVM behind (`starting`).
- The environment variables that Spark reads at its start are set only for its duration.
- Ctrl-C keeps its meaning: PySpark would let it cancel all jobs, and so kill all workers.

An active session is the user's: its settings are checked, it is used as it is, and it is never stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from py4j.clientserver import ClientServer  # type: ignore[import-untyped]
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from railgun.spark import daemon
from railgun.spark.archive import archive_options
from railgun.spark.conf import SLOTS, Conf, RefusedConfigurationError, is_local, is_loopback, refuse
from railgun.spark.java import find_java
from railgun.spark.starting import SparkStartError, Start, StartGivenUpError

__all__ = [
    "DataFrame",
    "RefusedConfigurationError",
    "SparkSession",
    "SparkStartError",
    "Start",
    "StartGivenUpError",
    "check",
    "driver_host",
    "interrupts",
    "opened",
    "session",
]

LOOPBACK = "127.0.0.1"
LOG_CONFIG = Path(__file__).with_name("log4j2.properties")
QUICK_JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""JVM options that start it sooner and make it slower in the long run: for tests and the demo, not for benchmarks."""


def session(
    name: str,
    master: str = "local[*]",
    *,
    workers: int = 0,
    conf: Conf | None = None,
    quick: bool = False,
    preload: bool | None = None,
    start: Start | None = None,
) -> SparkSession:
    """Return a Spark session on which `workers` workers can run.

    `master` is local (all of Spark in one JVM beside this process; "local[*]" has a slot for every worker, whatever the
    number of cores), or the URL of a cluster. `conf` overrides the settings made here. `quick` is for short runs: the
    JVM starts sooner and computes slower. `preload` makes the executors load modules before they are needed; by default
    only if they run this process's Python, because where Railgun is not installed no Python task would run at all.
    `start` lets another thread give up the start: then this raises `StartGivenUpError`.

    A process has one session at a time: if one is active, that session is returned, if workers can run on it.
    """
    active = _active()
    if active is not None:
        check(active, workers)
        return active
    settings = configuration(name, master, workers, conf or {}, quick, preload)
    refuse(settings, workers)
    java = find_java(os.environ)
    if quick:
        options = [settings["spark.driver.extraJavaOptions"], *archive_options(java, os.environ)]
        settings["spark.driver.extraJavaOptions"] = " ".join(options)
    environment = _environment_for(settings, java)
    spark_conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    with _environment(environment):
        return SparkSession((start or Start()).context(spark_conf))


def check(active: SparkSession, workers: int = 0) -> None:
    """Raise `RefusedConfigurationError` if workers cannot run on this session."""
    try:
        context = active.sparkContext
    except PySparkException as error:
        raise RefusedConfigurationError(
            "workers are launched from the driver of a Spark session, and this is a Spark Connect "
            "client: start the job with the master's URL, or on the driver"
        ) from error
    if not isinstance(SparkContext._gateway, ClientServer):
        raise RefusedConfigurationError(
            "with PYSPARK_PIN_THREAD=false all threads share one job group, and no worker could be "
            "ended without the others: unset it"
        )
    refuse(dict(context.getConf().getAll()), workers)


@contextmanager
def opened(
    name: str,
    master: str = "local[*]",
    *,
    workers: int = 0,
    conf: Conf | None = None,
    start: Start | None = None,
) -> Iterator[SparkSession]:
    """Open the session for a job: the active one, or a new one.

    A session that was made here is stopped when the last job opened on it has ended; any other is left running.
    """
    was_active = _active() is not None
    spark = session(name, master, workers=workers, conf=conf, start=start)
    context = spark.sparkContext
    with _lock:
        is_own = not was_active or context in _opened
        if is_own:
            _opened[context] = _opened.get(context, 0) + 1
    try:
        yield spark
    finally:
        if is_own:
            with _lock:
                _opened[context] -= 1
                last = not _opened[context]
                if last:
                    del _opened[context]
            if last:
                with suppress(Py4JError, OSError):  # it may be gone
                    spark.stop()


_lock = threading.Lock()
_opened: dict[SparkContext, int] = {}
"""The number of jobs that use each session made by `opened`."""


@contextmanager
def interrupts(drain: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C in the block call `drain`, and the second one interrupt as usual.

    Use it after the session is made, in the main thread. `drain` is called in the signal handler: it should only set a
    flag or an event.
    """

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        drain()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _active() -> SparkSession | None:
    """Return the session of this thread, or else that of another thread of this process; None if there is none."""
    active = SparkSession.getActiveSession()
    if active is None and SparkContext._active_spark_context is not None:
        active = SparkSession(SparkContext._active_spark_context)
    return active


def driver_host(spark: SparkSession) -> str:
    """Return the address by which executors reach this process: the controller should listen there."""
    return spark.sparkContext.getConf().get("spark.driver.host") or LOOPBACK


def configuration(
    name: str, master: str, workers: int, conf: Conf, quick: bool, preload: bool | None
) -> dict[str, str]:
    """Return all settings of a new session; those of the user override ours."""
    master = conf.get("spark.master", master)
    cores = os.cpu_count() or 1
    if master in ("local", "local[*]"):
        master = f"local[{max(SLOTS, workers + cores)}]"
    java = [
        f"-Dlog4j2.configurationFile={LOG_CONFIG.resolve().as_uri()}",
        *([QUICK_JVM_OPTIONS] if quick else []),
    ]
    settings = {
        "spark.app.name": name,
        "spark.driver.extraJavaOptions": " ".join(java),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Jobs of other threads get slots even if a hundred workers wait for some.
        "spark.scheduler.mode": "FAIR",
        # Update the status of tasks at once, not with each heartbeat.
        "spark.ui.liveUpdate.period": "0",
        # A worker is cancelled when it hangs: waiting for it would be useless.
        "spark.python.task.killTimeout": "200ms",
    }
    if is_local(master):
        settings["spark.default.parallelism"] = str(cores)  # there are many more slots
    if is_loopback(master):
        settings["spark.driver.host"] = LOOPBACK
        settings["spark.driver.bindAddress"] = LOOPBACK
    if preload if preload is not None else is_loopback(master):
        settings["spark.python.daemon.module"] = daemon.__name__
        for variable, value in daemon.NO_THREADS.items():
            settings[f"spark.executorEnv.{variable}"] = value
    if options := conf.get("spark.driver.extraJavaOptions"):
        conf = {**conf, "spark.driver.extraJavaOptions": " ".join([*java, options])}
    return {**settings, **conf, "spark.master": master}


def _environment_for(settings: Conf, java: Path) -> dict[str, str]:
    """Return the environment variables that Spark reads while it starts."""
    variables = {"JAVA_HOME": str(java)}
    python = settings.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    if is_loopback(settings["spark.master"]):
        variables["SPARK_LOCAL_IP"] = LOOPBACK
        python = settings.get("spark.pyspark.python") or sys.executable
    if python:  # Spark reads it only from the environment if it is started from Python
        variables["PYSPARK_PYTHON"] = python
    return variables


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {variable: os.environ.get(variable) for variable in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value
