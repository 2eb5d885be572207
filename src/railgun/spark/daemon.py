"""PySpark's daemon with its modules loaded: a worker begins in a fork of it, and imports nothing.

Spark starts one daemon of Python per executor and has it fork a process for each task that finds no
idle one. PySpark's own daemon imports next to nothing before it forks, so every process imports
PySpark, numpy and us again. This one (`spark.python.daemon.module`) imports them once.

Rules:
- No thread is running when it forks: a lock held by another thread would stay locked for ever in
  the child. BLAS and the allocator of pyarrow start threads of their own unless told not to.
- A module that is missing or broken is passed over: whoever needs it will tell, and tell it better.
- Nothing is printed to stdout, where Spark reads the daemon's port.
- A process knows how many tasks it has run: a worker does not begin in one that a query has used.
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
"""To be set before numpy and pyarrow are loaded."""

tasks = 0
"""How many tasks this process has begun; none in the daemon itself."""


def preload(modules: tuple[str, ...] = MODULES) -> list[str]:
    """Import what can be imported of these; the names of the others."""
    missing = []
    with contextlib.redirect_stdout(sys.stderr):
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception:
                missing.append(name)
    gc.collect()
    gc.freeze()  # what all processes share is not touched by the collector of each
    return missing


def main() -> None:
    """Load, then be PySpark's daemon."""
    if not NO_THREADS.keys() <= os.environ.keys():
        # Too late for this process: to import this module is to import numpy.
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
