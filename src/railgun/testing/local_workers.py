"""Run workers as plain subprocesses, for tests that need no Spark."""

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


def why_ended(code: int, stderr: str) -> str | None:
    """Return why a process ended, given its exit code and standard error; None if it succeeded.

    >>> why_ended(1, "Traceback\\nValueError: no"), why_ended(-11, ""), why_ended(0, "")
    ('exit code 1: ValueError: no', 'killed by SIGSEGV', None)
    """
    if code == 0:
        return None
    last_line = stderr.strip().rpartition("\n")[2]
    try:
        reason = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    except ValueError:  # the signal has no name
        reason = f"killed by signal {-code}"
    return f"{reason}: {last_line}" if last_line else reason


class SubprocessLauncher:
    """A `Launcher` whose workers are children of this process."""

    def __init__(self) -> None:
        self.processes: dict[WorkerSpec, subprocess.Popen[bytes]] = {}

    def refuse(self, workers: int) -> None:
        """Refuse nothing: any number of workers can run."""

    def launch(self, spec: WorkerSpec, ended: Ended) -> None:
        """Start a worker as a subprocess, and call `ended` when it has ended."""
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.processes[spec] = process

        def wait() -> None:
            with contextlib.suppress(OSError):
                _, stderr = process.communicate(pickle.dumps(spec))
            ended(spec, why_ended(process.returncode, stderr.decode(errors="replace")))

        threading.Thread(target=wait, daemon=True).start()

    def cancel(self, spec: WorkerSpec) -> None:
        """Kill the worker's process."""
        if spec in self.processes:
            self.processes[spec].kill()

    def pending(self, spec: WorkerSpec) -> bool:
        """Return False: a subprocess never waits for a slot."""
        return False

    def close(self) -> None:
        """Kill all processes that are left."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(10)
