"""What the controller asks of whoever starts its workers.

A launcher starts and ends processes and tells when they have ended. It decides nothing: when to
start a worker, and whether to start a lost one again, is the controller's business alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from railgun.worker.spec import WorkerSpec

Ended = Callable[[WorkerSpec, str | None], None]
"""Called when a worker has ended; with what went wrong, or None if it ended of its own accord."""


class Launcher(Protocol):
    """Starts and ends worker processes; the controller owns when."""

    def launch(self, spec: WorkerSpec, ended: Ended) -> None:
        """Start a worker.

        `ended(spec, error)` is called from any thread, exactly once, when it is certain to have
        ended or could not start; error None: it ended of its own accord.
        """

    def cancel(self, spec: WorkerSpec) -> None:
        """End a worker by force (it hangs, or is not wanted): safe to call at any time."""

    def pending(self, spec: WorkerSpec) -> bool:
        """Whether it waits for a slot on the cluster."""

    def close(self) -> None:
        """End all workers; no process is left."""
