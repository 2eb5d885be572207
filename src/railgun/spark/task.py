"""Define the body of the one Spark task that is a worker.

Rules:
- The shipped function is pickled by value and imports all it needs inside, so that it runs on an executor whose Python
  lacks Railgun, and can report that.
- It takes one row of its input and leaves the rest unread. PySpark then does not use the process for another task: a
  worker's process ends with the worker. Nor does a worker begin in a process that ran other tasks, where that is known
  (`daemon.py`): a query may have left anything in it.
- It runs the entry in the first attempt only. Spark retries a failed task, perhaps while the first attempt is still
  alive on an executor it has lost contact with. Only the controller decides whether a worker runs again, as another
  incarnation.
- An exception of the entry is a result, not a failure of the task, for the same reason: Spark would retry it, and
  report it as a Java stack trace.
- A worker does not outlive the daemon that forked it, whatever it does with signals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple

from pyspark import cloudpickle

from railgun.engine.worker.spec import WorkerSpec

Entry = Callable[[WorkerSpec], None]
Row = tuple[object, ...]
"""The fields of a spec: plain values, which any Python can unpickle."""
Outcome = tuple[str, str]
"""How a task ended (one of the words below), and the text that belongs to it."""

ENDED = "ended"
RAISED = "raised"
MISSING = "missing"
REFUSED = "refused"
USED = "used"

PROCESS = "railgun.engine.worker.process"
"""The module that has the entry of a worker, `run_worker`."""


def row_of(spec: WorkerSpec) -> Row:
    """Return a spec as plain values, to be sent to a task."""
    return astuple(spec)


def body(entry: Entry | None) -> Callable[[Iterable[Row]], Iterable[Outcome]]:
    """Return the function to ship; without an entry it runs the worker that is installed on the executor."""
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
            if os.getppid() == 1:  # the daemon is gone already
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
