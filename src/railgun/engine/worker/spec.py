"""Define what a worker process has to know at its start."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The identity of a worker, and the address of its controller."""

    job: str
    worker: int
    incarnation: int
    """Never used twice for a worker of a job: the controller refuses a second process with the same incarnation."""
    host: str
    port: int
    secret: bytes = field(repr=False)
