"""Why a worker ended, in words for the one who runs the job.

Spark tells everything as a Java exception whose text holds, several frames deep, the line that
matters. These errors say that line: what happened, to which worker, and what to do next.
"""

from __future__ import annotations

import re

from railgun.errors import RailgunError
from railgun.spark import task

__all__ = [
    "AttemptRefusedError",
    "CancelledError",
    "LauncherClosedError",
    "ModuleMissingError",
    "SparkJobError",
    "SparkStoppedError",
    "WorkerDiedError",
    "WorkerFailure",
    "WorkerRaisedError",
    "of_outcome",
    "of_spark",
    "of_task",
]


class WorkerFailure(RailgunError):  # noqa: N818 - the family; its members are the errors
    """A worker did not start, or did not end of its own accord."""


class WorkerRaisedError(WorkerFailure):
    """The worker's own code raised; `traceback` is the whole of what Python told."""

    def __init__(self, traceback: str) -> None:
        self.traceback = traceback
        super().__init__(last_line(traceback))


class ModuleMissingError(WorkerFailure):
    """The Python of the executor lacks a module."""


class WorkerDiedError(WorkerFailure):
    """The process or its executor died, with no word from the worker itself."""


class AttemptRefusedError(WorkerDiedError):
    """Spark lost the worker and tried it again; the second attempt did not run."""


class CancelledError(WorkerFailure):
    """It was ended by force, as asked."""


class SparkStoppedError(WorkerFailure):
    """The Spark session has been stopped, or its JVM has ended."""


class SparkJobError(WorkerFailure):
    """Anything else Spark tells."""


class LauncherClosedError(WorkerFailure):
    """The launcher has been closed and starts nothing more."""


def of_outcome(outcome: task.Outcome) -> WorkerFailure | None:
    """What the result of a worker's task says; None if it ended of its own accord."""
    kind, text = outcome
    if kind == task.ENDED:
        return None
    if kind == task.MISSING:
        module, where, _ = text.split("\n", 2)
        return ModuleMissingError(missing(module, where))
    if kind == task.REFUSED:
        return AttemptRefusedError(
            f"Spark lost the worker and started {text} of it, which was refused: "
            "its process or its executor died"
        )
    return WorkerRaisedError(text)


def of_spark(text: str, stopped: bool = False) -> WorkerFailure:
    """What a Spark job's exception or a task's error message says."""
    if module := re.search(r"No module named '?([\w.]+)", text):
        return ModuleMissingError(missing(module[1], "the Python of the executor"))
    if "PYTHON_VERSION_MISMATCH" in text or "Python in worker has different version" in text:
        return SparkJobError(
            "the executors run another version of Python than this process: set PYSPARK_PYTHON or "
            f"spark.pyspark.python to the same one ({first_line(text)})"
        )
    if 'Cannot run program "' in text:
        program = text.split('Cannot run program "', 1)[1].split('"', 1)[0]
        return SparkJobError(
            f"the executors have no Python at {program}: set PYSPARK_PYTHON or spark.pyspark.python"
        )
    if "Python worker exited unexpectedly" in text:
        return WorkerDiedError("its process died: killed, out of memory, or crashed in native code")
    if "ExecutorLostFailure" in text or "Executor lost" in text:
        reason = re.search(r"ExecutorLostFailure \((.*)", text)
        return WorkerDiedError(f"its executor was lost ({reason[1] if reason else 'no reason'})")
    if stopped or is_stopped(text):
        return SparkStoppedError("the Spark session was stopped while the worker ran")
    if "SPARK_JOB_CANCELLED" in text or re.search(r"\bJob \d+ cancelled", text):
        return CancelledError("its Spark job was cancelled, and not by Railgun")
    if "Traceback (most recent call last)" in text:
        return WorkerRaisedError(python_part(text))
    return SparkJobError(first_line(text))


def of_task(text: str) -> str:
    """What a task of a Spark job has failed with: our own words, if it was one of our errors; else what Spark says."""
    ours = list(re.finditer(r"^railgun(?:\.\w+)+: ", text, re.MULTILINE))
    if not ours:
        return str(of_spark(text))
    told = text[ours[-1].end() :]
    end = re.search(r"^(?:JVM stacktrace:|\tat )", told, re.MULTILINE)
    return (told[: end.start()] if end else told).strip()


def is_stopped(text: str) -> bool:
    """Whether a text is Spark's way to say that it is no more."""
    return any(
        sign in text
        for sign in (
            "SparkContext was shut down",
            "SparkContext has been shutdown",
            "stopped SparkContext",
            "Error while sending or receiving",
            "Connection refused",
            "'NoneType' object has no attribute",
        )
    )


def missing(module: str, where: str) -> str:
    """What to do about a module that is not there."""
    return (
        f"no module {module} on the worker ({where}): install it there, or ship it with the "
        "session (spark.submit.pyFiles, spark.archives, or an image that has it)"
    )


def python_part(text: str) -> str:
    """The traceback of Python within a text of Java."""
    start = text.index("Traceback (most recent call last)")
    lines = text[start:].splitlines()
    end = next((n for n, line in enumerate(lines) if line.startswith("\tat ")), len(lines))
    return "\n".join(lines[:end]).rstrip()


def last_line(traceback: str) -> str:
    """The line that names the exception: `ValueError: no such key`."""
    lines = traceback.rpartition("Traceback (most recent call last)")[2].splitlines()[1:]
    named = [line for line in lines if line.strip() and not line.startswith(" ")]
    return named[0].strip() if named else traceback.strip()


def first_line(text: str) -> str:
    """What a Java exception says before its frames, without the class names in front."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("at ", "An error occurred while"))]
    line = (told or lines or [""])[0].lstrip(": ")
    while named := re.match(r"(?:[a-z]\w*\.)+[A-Z]\w*: (.+)", line):
        line = named[1]
    return line
