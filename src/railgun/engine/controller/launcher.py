"""How the controller starts and ends workers: the interface behind which Spark is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from railgun.engine.worker.spec import WorkerSpec

Ended = Callable[[WorkerSpec, str | None], None]


class Launcher(Protocol):
    """Starts and ends worker processes; the controller owns when."""

    def refuse(self, workers: int) -> None:
        """Raise a `RailgunError` if so many workers can never run at a time; a cluster may grow."""
        ...

    def launch(self, spec: WorkerSpec, ended: Ended) -> None:
        """Start a worker.

        `ended(spec, error)` is called from any thread, exactly once, when it is certain to have ended or could not
        start; without an error it ended of its own accord.
        """
        ...

    def cancel(self, spec: WorkerSpec) -> None:
        """End a worker by force (it hangs, or is not wanted): safe to call at any time."""
        ...

    def pending(self, spec: WorkerSpec) -> bool:
        """Whether it waits for a slot on the cluster."""
        ...

    def close(self) -> None:
        """End all workers; no process is left."""
        ...
