"""A Spark session for workers: quiet, on loopback where it can be, with slots that are not cores.

Out of the box Spark greets its user with a dozen lines of warnings, listens on the machine's public
address, and starts its workers with whatever `python3` comes first in the path. Here it is started
so that a user sees our lines and Spark's errors, and nothing else:

- Spark's logs: `log4j2.properties` beside this file is given to the JVM.
- What the JVM prints while it starts is held back, and told only if the start fails (`starting`).
- A start that is interrupted, or given up, leaves no JVM behind (`starting`).
- The environment variables that Spark reads at its start are set for just that long.
- Ctrl-C stays what it was: PySpark would have it cancel all jobs, and thereby kill all workers.

A session that is active already is the user's: its settings are checked, it is used as it is, and
it is never stopped.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
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

from railgun.errors import RailgunError
from railgun.spark import daemon
from railgun.spark.archive import archive_options
from railgun.spark.conf import SLOTS, Conf, RefusedConfigurationError, is_local, is_loopback, refuse
from railgun.spark.starting import SparkStartError, Start, StartGivenUpError

__all__ = [
    "DataFrame",
    "JavaMissingError",
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

JAVA_OLDEST = 17
LOOPBACK = "127.0.0.1"
LOGGING = Path(__file__).with_name("log4j2.properties")
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Starts sooner and runs slower in the long run: for tests and the demo, not for measuring."""


class JavaMissingError(RailgunError):
    """Spark needs a Java runtime, and there is none that is new enough."""


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
    """A Spark session on which `workers` workers can run.

    `master` is local (all of Spark in one JVM beside this process; "local[*]" has a slot for every
    worker, whatever the number of cores), or the URL of a cluster. `conf` goes over what is set
    here. `quick` is for short runs: the JVM starts sooner and computes slower. `preload` has the
    executors load modules before they are needed; by default only where their Python is ours, for
    where it lacks Railgun no Python task would run at all. `start` is by what another thread gives the
    start up: this raises `StartGivenUpError` then.

    A process has one session at a time: while one is active, it is the one returned, if workers can
    run on it.
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
    made = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    with _environment(environment):
        return SparkSession((start or Start()).context(made))


def check(active: SparkSession, workers: int = 0) -> None:
    """Refuse a session on which workers cannot run."""
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
    """Open the session to run a job on: the active one, or a new one.

    A session that was made here is stopped when the last job opened on it has ended; any other is left running.
    """
    was_active = _active() is not None
    used = session(name, master, workers=workers, conf=conf, start=start)
    context = used.sparkContext
    with _guard:
        ours = not was_active or context in _opened
        if ours:
            _opened[context] = _opened.get(context, 0) + 1
    try:
        yield used
    finally:
        if ours:
            with _guard:
                _opened[context] -= 1
                last = not _opened[context]
                if last:
                    del _opened[context]
            if last:
                with suppress(Py4JError, OSError):  # it may be gone
                    used.stop()


_guard = threading.Lock()
_opened: dict[SparkContext, int] = {}
"""How many jobs use each session that was made by `opened`."""


@contextmanager
def interrupts(drain: Callable[[], None]) -> Iterator[None]:
    """Within this, the first Ctrl-C asks the job to drain, and a second one interrupts as usual.

    To be used after the session is made, in the main thread. `drain` is called within the signal's
    handler: it should only set a flag or an event.
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
    """The session of this process: the one of this thread, or the one another thread has made."""
    active = SparkSession.getActiveSession()
    if active is None and SparkContext._active_spark_context is not None:
        active = SparkSession(SparkContext._active_spark_context)
    return active


def driver_host(used: SparkSession) -> str:
    """The address by which executors reach this process: where a controller should listen."""
    return used.sparkContext.getConf().get("spark.driver.host") or LOOPBACK


def configuration(
    name: str, master: str, workers: int, conf: Conf, quick: bool, preload: bool | None
) -> dict[str, str]:
    """All settings of a new session, the user's own over ours."""
    master = conf.get("spark.master", master)
    cores = os.cpu_count() or 1
    if master in ("local", "local[*]"):
        master = f"local[{max(SLOTS, workers + cores)}]"
    java = [f"-Dlog4j2.configurationFile={LOGGING.resolve().as_uri()}", *([QUICK] if quick else [])]
    settings = {
        "spark.app.name": name,
        "spark.driver.extraJavaOptions": " ".join(java),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Jobs of other threads get slots beside a hundred workers that wait for some.
        "spark.scheduler.mode": "FAIR",
        # The status of tasks as it is, and not as it was up to a heartbeat ago.
        "spark.ui.liveUpdate.period": "0",
        # A worker is cancelled when it hangs: there is nothing to wait for.
        "spark.python.task.killTimeout": "200ms",
    }
    if is_local(master):
        settings["spark.default.parallelism"] = str(cores)  # the slots are many more
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
    """What Spark takes from the environment while it starts."""
    variables = {"JAVA_HOME": str(java)}
    python = settings.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    if is_loopback(settings["spark.master"]):
        variables["SPARK_LOCAL_IP"] = LOOPBACK
        python = settings.get("spark.pyspark.python") or sys.executable
    if python:  # read from the environment alone when Spark is started from Python
        variables["PYSPARK_PYTHON"] = python
    return variables


def find_java(environ: Mapping[str, str]) -> Path:
    """The home of a Java runtime for Spark: the one JAVA_HOME names, else the one in the path."""
    candidates = [environ["JAVA_HOME"] + "/bin/java"] if environ.get("JAVA_HOME") else []
    found = shutil.which("java", path=environ.get("PATH", ""))
    candidates += [found] if found else []
    tried = []
    for java in candidates:
        version = java_version(java)
        if version >= JAVA_OLDEST:
            return Path(java).resolve().parent.parent
        tried.append(f"{java} is version {version}" if version else f"{java} does not run")
    raise JavaMissingError(
        f"Spark needs Java {JAVA_OLDEST} or newer and found none"
        + (f" ({'; '.join(tried)})" if tried else "")
        + ". Start by ./run, which finds or installs one, or set JAVA_HOME."
    )


def java_version(java: str) -> int:
    """The major version a java command tells of itself; 0 if it does not run."""
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)', told.stderr + told.stdout)
    return int(found.group(1)) if found and told.returncode == 0 else 0


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
