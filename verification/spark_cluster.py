"""Run a real Spark cluster on this machine: Spark's own master and workers, from the pip package.

Local mode has one JVM and no executors to lose. This module starts a standalone cluster on loopback, as processes on
free ports with a scratch directory, and ends all processes it has started::

    with standalone(workers=2) as cluster:
        spark = session("test", cluster.url, conf=DYNAMIC)

Spark's own workers are the machines of the cluster; Railgun's run in tasks on the executors they start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from railgun.errors import RailgunError
from railgun.spark.java import find_java
from railgun.spark.session import LOOPBACK, QUICK_JVM_OPTIONS

__all__ = ["DYNAMIC", "Standalone", "StandaloneError", "standalone"]

DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",  # there is no shuffle service
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.initialExecutors": "0",
    "spark.dynamicAllocation.executorIdleTimeout": "2s",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": QUICK_JVM_OPTIONS,
}
"""Settings that add executors for tasks that wait for a slot, and remove idle executors."""

BEGIN_WITHIN = 120.0
END_WITHIN = 15.0
EXECUTOR = "CoarseGrainedExecutorBackend"


class StandaloneError(RailgunError):
    """Raised when the cluster does not start; has the end of the log in question."""


@dataclass(frozen=True, slots=True)
class Standalone:
    """A running cluster."""

    url: str
    page: str
    """The address of the master's page, which is also served as JSON."""
    processes: tuple[int, ...]
    """Process ids of the master and the workers."""

    def status(self) -> dict[str, Any]:
        """Return the master's report on itself, its workers and applications."""
        with urllib.request.urlopen(f"{self.page}/json/", timeout=10) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    def executors(self) -> list[int]:
        """Return the process ids of the executors."""
        return [
            pid
            for pid, parent, command in _processes()
            if parent in self.processes and EXECUTOR in command
        ]


@contextmanager
def standalone(workers: int = 2, cores: int = 4, memory: str = "4g") -> Iterator[Standalone]:
    """Start a cluster of so many machines, as Spark sees it, each with these cores and this memory."""
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="spark-", ignore_cleanup_errors=True) as directory:
        scratch = Path(directory)
        try:
            logs = [scratch / "master.log"]
            arguments = ["--host", LOOPBACK, "--port", "0", "--webui-port", "0"]
            processes.append(_start("master.Master", arguments, scratch, logs[0]))
            url = _await_line(logs[0], r"Starting Spark master at (spark://\S+)", processes[0])
            port = _await_line(logs[0], r"service 'MasterUI' on port (\d+)", processes[0])
            for number in range(workers):
                logs.append(scratch / f"worker-{number}.log")
                arguments = [
                    *("--host", LOOPBACK, "--webui-port", "0", "--cores", str(cores)),
                    *("--memory", memory, "--work-dir", str(scratch / f"worker-{number}"), url),
                ]
                processes.append(_start("worker.Worker", arguments, scratch, logs[-1]))
            for log, process in zip(logs[1:], processes[1:], strict=True):
                _await_line(log, r"(Successfully registered) with master", process)
            pids = tuple(process.pid for process in processes)
            yield Standalone(url, f"http://{LOOPBACK}:{port}", pids)
        finally:
            _stop(processes)


def _start(role: str, arguments: list[str], scratch: Path, log: Path) -> subprocess.Popen[bytes]:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise StandaloneError("pyspark is not installed")
    home = Path(spec.submodule_search_locations[0])
    environment = os.environ | {
        "JAVA_HOME": str(find_java(os.environ)),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": LOOPBACK,
        "SPARK_LOCAL_DIRS": str(scratch / "local"),
        "SPARK_CONF_DIR": str(scratch / "conf"),  # only the defaults
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": f"{QUICK_JVM_OPTIONS} -Dspark.master.rest.enabled=false",
    }
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{role}", *arguments]
    with log.open("wb") as told:
        # A session of its own: a Ctrl-C here does not reach it, and its group can be ended at once.
        return subprocess.Popen(
            command,
            env=environment,
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=told,
            start_new_session=True,
        )


def _await_line(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + BEGIN_WITHIN
    while True:
        ended = process.poll() is not None
        text = log.read_text(errors="replace")
        if found := re.search(pattern, text):
            return found[1]
        if ended or time.monotonic() > deadline:
            last = "\n".join(text.splitlines()[-20:])
            raise StandaloneError(f"{log.stem} did not come up; the end of its log:\n{last}")
        time.sleep(0.05)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the process groups of these processes, executors included: first by SIGTERM."""
    executors = {
        pid
        for pid, parent, command in _processes()
        if parent in {process.pid for process in processes} and EXECUTOR in command
    }
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in reversed(processes):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        _await(lambda: all(process.poll() is not None for process in processes))
    _await(lambda: not executors & {pid for pid, _, _ in _processes()})


def _await(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_WITHIN
    while not look() and time.monotonic() < deadline:
        time.sleep(0.05)


def _processes() -> Iterator[tuple[int, int, str]]:
    """Yield all processes of the machine: id, parent's id, command."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            if status[0] != "Z":
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                yield int(entry.name), int(status[1]), command.decode(errors="replace")
