"""PySpark's daemon with modules loaded, so that a worker begins in a fork of it and imports nothing.

Spark starts one Python daemon per executor, which forks a process for each task that finds no idle one. PySpark's own
daemon imports next to nothing before it forks, so every process imports PySpark, numpy and Railgun again. This daemon
(`spark.python.daemon.module`) imports them once.

Rules:
- No thread is running when it forks: a lock held by another thread would stay locked for ever in the child. BLAS and
  the allocator of pyarrow start threads of their own unless configured not to.
- A module that is missing or broken is skipped: the code that needs it reports that with a better message.
- Nothing is printed to stdout, where Spark reads the daemon's port.
- A process counts the tasks it has run: a worker does not begin in a process that a query has used.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from socket import socket

MODULES = (
    "pyspark.worker",
    "pyspark.cloudpickle",
    "numpy",
    "pyarrow",
    "cloudpickle",
    "railgun.spark.task",
    "railgun.engine.worker.process",
    "railgun.engine.snapshots.table",
    "railgun.spark.streams.source",
)
NO_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Environment variables that must be set before numpy and pyarrow are loaded."""

tasks = 0
"""The number of tasks this process has begun; 0 in the daemon itself."""


def preload(modules: tuple[str, ...] = MODULES) -> list[str]:
    """Import those of `modules` that can be imported; return the names of the others."""
    missing = []
    with contextlib.redirect_stdout(sys.stderr):
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception:
                missing.append(name)
    gc.collect()
    gc.freeze()  # keeps the garbage collector of each process from copying the pages that all share
    return missing


def main() -> None:
    """Load the modules, then run PySpark's daemon."""
    if not NO_THREADS.keys() <= os.environ.keys():
        # Too late for this process: importing this module has imported numpy.
        os.environ.update({**NO_THREADS, **os.environ})
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    from pyspark import daemon

    run_one = daemon.worker

    def run_and_count(sock: socket, authenticated: bool) -> int:
        global tasks
        tasks += 1
        return run_one(sock, authenticated)

    preload()
    daemon.worker = run_and_count
    daemon.manager()


if __name__ == "__main__":
    main()
