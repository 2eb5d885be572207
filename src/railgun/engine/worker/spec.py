"""What a worker process has to know to begin."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Who a worker is, and where its controller is."""

    job: str
    worker: int
    incarnation: int
    """Never used twice for a worker of a job: a second attempt of the same one is refused by the controller."""
    host: str
    port: int
    secret: bytes = field(repr=False)
