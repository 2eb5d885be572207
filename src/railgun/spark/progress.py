"""How far Spark is with what this thread has asked of it: tasks done, of all there are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

EVERY: Final = 0.5  # seconds
Tell = Callable[[dict[str, Any]], None]


@contextmanager
def watched(spark: SparkSession, tell: Tell) -> Iterator[None]:
    """Within this, `tell` is called now and then with what is being done: `what`, and how many `tasks` are `done`."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY):
            with suppress(PySparkException, Py4JError, OSError):
                told = look(spark)
                if told is not None:
                    tell(told)

    thread = threading.Thread(target=watch, name="spark-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5)


def look(spark: SparkSession) -> dict[str, Any] | None:
    """What Spark is doing now; None if it is doing nothing, or has just begun."""
    tracker = spark.sparkContext.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getActiveJobsIds()]
    stages = [stage for job in jobs if job is not None for stage in job.stageIds]
    active = set(tracker.getActiveStageIds())
    for number, stage in enumerate(sorted(stages), 1):
        info = tracker.getStageInfo(stage) if stage in active else None
        if info is not None:
            return {
                "what": f"step {number} of {len(stages)}",
                "done": info.numCompletedTasks,
                "tasks": info.numTasks,
            }
    return None
