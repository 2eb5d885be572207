"""Workers as plain subprocesses, for tests of the runtime that need no Spark."""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import sys
import threading

from railgun.engine.controller.launcher import Ended
from railgun.engine.worker.spec import WorkerSpec

PROGRAM = (
    "import pickle, sys; from railgun.engine.worker.process import run_worker; "
    "run_worker(pickle.load(sys.stdin.buffer))"
)


def why_ended(code: int, told: str) -> str | None:
    """Say why a process ended with `code` that `told` something on its standard error; None: it ended well.

    >>> why_ended(1, "Traceback\\nValueError: no"), why_ended(-11, ""), why_ended(0, "")
    ('exit code 1: ValueError: no', 'killed by SIGSEGV', None)
    """
    if code == 0:
        return None
    last = told.strip().rpartition("\n")[2]
    try:
        how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    except ValueError:  # of a signal without a name
        how = f"killed by signal {-code}"
    return f"{how}: {last}" if last else how


class SubprocessLauncher:
    """A `Launcher` whose workers are children of this process."""

    def __init__(self) -> None:
        self.processes: dict[WorkerSpec, subprocess.Popen[bytes]] = {}

    def refuse(self, workers: int) -> None:
        """Refuse nothing: there is always room."""

    def launch(self, spec: WorkerSpec, ended: Ended) -> None:
        """Start a worker."""
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.processes[spec] = process

        def wait() -> None:
            with contextlib.suppress(OSError):
                _, told = process.communicate(pickle.dumps(spec))
            ended(spec, why_ended(process.returncode, told.decode(errors="replace")))

        threading.Thread(target=wait, daemon=True).start()

    def cancel(self, spec: WorkerSpec) -> None:
        """Kill a worker."""
        if spec in self.processes:
            self.processes[spec].kill()

    def pending(self, spec: WorkerSpec) -> bool:
        """There is always room."""
        return False

    def close(self) -> None:
        """Kill all that are left."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(10)
