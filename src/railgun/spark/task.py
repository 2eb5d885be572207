"""What Spark runs: the body of the one task that is a worker.

Rules:
- The function that is shipped is pickled by value and imports all it needs inside, so that it runs
  on an executor whose Python lacks Railgun, and can say so.
- It takes one row of its input and leaves the rest unread. PySpark then does not use the process
  for another task: a worker's process ends with the worker. Nor does it begin in a process that
  was used before, where that is known (`daemon.py`): who knows what a query left in it.
- It runs the entry in the first attempt only. Spark tries a failed task again, perhaps while the
  first attempt is still alive on an executor it has lost sight of; the controller alone decides
  whether a worker runs again, as another incarnation.
- What the entry raises is a result and not a failure of the task, for the same reason: Spark would
  try it again, and tell it as a Java stack trace.
- A worker does not outlive the daemon that forked it, whatever it does with signals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple

from pyspark import cloudpickle

from railgun.engine.worker.spec import WorkerSpec

Entry = Callable[[WorkerSpec], None]
Row = tuple[object, ...]
"""The fields of a spec: plain values, which any Python reads."""
Outcome = tuple[str, str]
"""How a task ended (one of the words below), and what there is to tell about it."""

ENDED = "ended"
RAISED = "raised"
MISSING = "missing"
REFUSED = "refused"
USED = "used"

PROCESS = "railgun.engine.worker.process"
"""Where the entry of a worker is: `run_worker`."""


def row_of(spec: WorkerSpec) -> Row:
    """What travels of a spec."""
    return astuple(spec)


def body(entry: Entry | None) -> Callable[[Iterable[Row]], Iterable[Outcome]]:
    """The function to ship; without an entry it runs the worker that is installed there."""
    pickled = None if entry is None else cloudpickle.dumps(entry)  # type: ignore[no-untyped-call]
    module = PROCESS

    # Nothing of this module may be named inside: it would travel as an import of Railgun.
    def task(rows: Iterable[Row]) -> Iterable[Outcome]:
        import ctypes
        import importlib
        import os
        import pickle
        import signal
        import sys
        import traceback

        from pyspark import TaskContext

        row = next(iter(rows))
        context = TaskContext.get()
        if context is not None and context.attemptNumber() > 0:
            return [("refused", f"attempt {context.attemptNumber()}")]
        daemon = sys.modules["__main__"]
        if getattr(daemon, "tasks", 1) > 1:
            return [("used", "")]
        started_by = getattr(daemon, "__spec__", None)
        if sys.platform == "linux" and started_by and started_by.name.endswith(".daemon"):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
            if os.getppid() == 1:  # it has gone already
                os._exit(1)
        try:
            spec_type = importlib.import_module("railgun.engine.worker.spec").WorkerSpec
            spec = spec_type(*row)
            if pickled is None:
                importlib.import_module(module).run_worker(spec)
            else:
                pickle.loads(pickled)(spec)
        except ModuleNotFoundError as error:
            where = f"{sys.executable}, Python {sys.version.split()[0]} on {os.uname().nodename}"
            return [("missing", f"{error.name}\n{where}\n{traceback.format_exc()}")]
        except SystemExit as error:
            if error.code not in (None, 0):
                return [("raised", traceback.format_exc())]
        except BaseException:
            return [("raised", traceback.format_exc())]
        return [("ended", "")]

    return task
