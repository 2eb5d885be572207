"""Report how far Spark is with its current jobs: tasks done, of all tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

POLL_S: Final = 0.5
OnProgress = Callable[[dict[str, Any]], None]


@contextmanager
def watched(spark: SparkSession, on_progress: OnProgress) -> Iterator[None]:
    """Call `on_progress` now and then in the block, with the step (`what`) and how many `tasks` are `done`."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            with suppress(PySparkException, Py4JError, OSError):
                status = current_progress(spark)
                if status is not None:
                    on_progress(status)

    thread = threading.Thread(target=watch, name="spark-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5)


def current_progress(spark: SparkSession) -> dict[str, Any] | None:
    """Return the progress of the active stage; None if Spark is idle or has just begun."""
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
