"""Define how the controller starts and ends workers (`Launcher`), so that it does not depend on Spark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from railgun.engine.worker.spec import WorkerSpec

Ended = Callable[[WorkerSpec, str | None], None]


class Launcher(Protocol):
    """Starts and ends worker processes when the controller says so."""

    def refuse(self, workers: int) -> None:
        """Raise a `RailgunError` if so many workers can never run at once; a cluster may grow."""
        ...

    def launch(self, spec: WorkerSpec, ended: Ended) -> None:
        """Start the worker that `spec` describes.

        `ended(spec, error)` is called from any thread, exactly once, when the process has certainly ended or could not
        start. `error` is None if the process ended by itself, without an error.
        """
        ...

    def cancel(self, spec: WorkerSpec) -> None:
        """End a worker by force, because it hangs or is not needed. This is safe to call at any time."""
        ...

    def pending(self, spec: WorkerSpec) -> bool:
        """Return whether the worker waits for a slot of the cluster."""
        ...

    def close(self) -> None:
        """End all workers, and wait until no process is left."""
        ...
