"""What a worker process is told at its start; all else it learns from its controller."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker process has to know to begin: who it is and where its controller is.

    >>> WorkerSpec("wordcount", 3, 2, "127.0.0.1", 4000, b"a secret")
    WorkerSpec(job='wordcount', worker=3, incarnation=2, host='127.0.0.1', port=4000)
    """

    job: str
    """The name of the job."""
    worker: int
    incarnation: int
    """Never used twice for a worker of a job: the controller refuses a second attempt of one."""
    host: str
    """Of the controller."""
    port: int
    secret: bytes = field(repr=False)
