"""A local Spark session: quiet, bound to loopback, its workers in the interpreter that asks for it.

Out of the box Spark greets its user with a dozen lines of warnings, listens on the machine's public
address, and starts its workers with whatever `python3` comes first in the path. Here it is started
so that a user sees our lines and Spark's errors, and nothing else:

- Spark's logs: `log4j2.properties` beside this file is given to the JVM.
- What the JVM prints while it starts is held back, and told only if the start fails (`Relay`).
- The environment variables that Spark reads at its start are set for just that long.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from railgun.core.errors import RailgunError

__all__ = ["JavaMissingError", "SparkSession", "SparkStartError", "local_session"]

JAVA_OLDEST = 17
LOOPBACK = "127.0.0.1"
LOGGING = Path(__file__).with_name("log4j2.properties")
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Starts sooner and runs slower in the long run: for tests and the demo, not for measuring."""


class JavaMissingError(RailgunError):
    """Spark needs a Java runtime, and there is none that is new enough."""


class SparkStartError(RailgunError):
    """Spark did not start."""


def local_session(name: str, cores: int | str = "*", quick: bool = False) -> SparkSession:
    """Start Spark inside this process's own JVM, on `cores` cores ("*": all of them).

    `quick` is for short runs: the JVM starts sooner and computes slower. A process has one session
    at a time: while one is active, it is the one returned.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    settings = {
        "SPARK_LOCAL_IP": LOOPBACK,
        "PYSPARK_PYTHON": sys.executable,
        "JAVA_HOME": str(find_java(os.environ)),
    }
    conf = _configuration(name, cores, quick)
    with _environment(settings):
        if SparkContext._gateway is not None:  # the JVM of an earlier session
            return SparkSession(SparkContext(conf=conf))
        relay = Relay()
        try:
            gateway = launch_gateway(conf, {"stderr": relay.entry})  # type: ignore[no-untyped-call]
            relay.close_entry()
            session = SparkSession(SparkContext(conf=conf, gateway=gateway))
        except (PySparkException, Py4JError, OSError) as error:
            relay.close_entry()
            told = relay.held()
            relay.open()
            raise SparkStartError(
                f"Spark did not start: {error}" + (f"\nIt said:\n{told}" if told else "")
            ) from error
        relay.open()
        return session


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


class Relay:
    """Where the JVM's stderr goes: held back until `open`, passed on to ours from then on.

    Spark starts the JVM with an option at which Java prints a warning that no setting turns off.
    What tasks print comes the same way, so the stream cannot just be thrown away.
    """

    def __init__(self) -> None:
        self._exit, self.entry = os.pipe()
        self._lines: list[bytes] = []
        self._passing = False
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._carry, name="spark-stderr", daemon=True)
        self._thread.start()

    def close_entry(self) -> None:
        """The JVM has its own copy of our end; without ours, its end is the stream's end."""
        if self.entry >= 0:
            os.close(self.entry)
            self.entry = -1

    def open(self) -> None:
        """Spark is up: forget what was said so far, and pass on what comes."""
        with self._guard:
            self._passing = True
            self._lines.clear()

    def held(self) -> str:
        """What was said so far. Waits for the rest if the JVM has just ended."""
        self._thread.join(timeout=2)
        with self._guard:
            return b"".join(self._lines).decode(errors="replace").strip()

    def _carry(self) -> None:
        with os.fdopen(self._exit, "rb") as lines:
            for line in lines:
                with self._guard:
                    if self._passing:
                        os.write(2, line)
                    else:
                        self._lines.append(line)


def _configuration(name: str, cores: int | str, quick: bool) -> SparkConf:
    options = f"-Dlog4j2.configurationFile={LOGGING.resolve().as_uri()}"
    return SparkConf(loadDefaults=False).setAll(
        [
            ("spark.app.name", name),
            ("spark.master", f"local[{cores}]"),
            ("spark.driver.host", LOOPBACK),
            ("spark.driver.bindAddress", LOOPBACK),
            ("spark.driver.extraJavaOptions", f"{options} {QUICK}" if quick else options),
            ("spark.ui.enabled", "false"),
            ("spark.ui.showConsoleProgress", "false"),
        ]
    )


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
