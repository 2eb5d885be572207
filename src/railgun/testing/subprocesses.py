"""Workers as plain subprocesses, for tests of the runtime that need no Spark."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import threading

from railgun.controller.launcher import Ended
from railgun.worker.spec import WorkerSpec

PROGRAM = (
    "import pickle, sys; from railgun.worker.process import run_worker; "
    "run_worker(pickle.load(sys.stdin.buffer))"
)


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
            text = told.decode(errors="replace").strip()
            last = text.rpartition("\n")[2]
            ended(spec, f"exit code {process.returncode}: {last}" if process.returncode else None)

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
