"""PySpark's daemon with its modules loaded: a worker begins in a fork of it, and imports nothing.

Spark starts one daemon of Python per executor and has it fork a process for each task that finds no
idle one. PySpark's own daemon imports next to nothing before it forks, so every process imports
PySpark, numpy and us again. This one (`spark.python.daemon.module`) imports them once.

Rules:
- No thread is running when it forks: a lock held by another thread would stay locked for ever in
  the child. BLAS and the allocator of pyarrow start threads of their own unless told not to.
- A module that is missing or broken is passed over: whoever needs it will tell, and tell it better.
- Nothing is printed to stdout, where Spark reads the daemon's port.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

MODULES = (
    "pyspark.worker",
    "pyspark.cloudpickle",
    "numpy",
    "pyarrow",
    "cloudpickle",
    "railgun.spark.task",
    "railgun.worker.process",
)
NO_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


def preload(modules: tuple[str, ...] = MODULES) -> list[str]:
    """Import what can be imported of these; the names of the others."""
    for variable, value in NO_THREADS.items():
        os.environ.setdefault(variable, value)
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
    from pyspark import daemon

    preload()
    daemon.manager()


if __name__ == "__main__":
    main()
