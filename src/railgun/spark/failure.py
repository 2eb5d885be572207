"""Say why a worker ended, in words for the person who runs the job.

Spark reports everything as a Java exception; the line that matters is several frames deep in its text. These errors
have that line: what happened, to which worker, and what to do next.
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


class WorkerFailure(RailgunError):  # noqa: N818 - the base class; its subclasses are the errors
    """A worker did not start, or did not end by itself."""


class WorkerRaisedError(WorkerFailure):
    """The worker's own code raised; `traceback` is the whole traceback of Python."""

    def __init__(self, traceback: str) -> None:
        self.traceback = traceback
        super().__init__(last_line(traceback))


class ModuleMissingError(WorkerFailure):
    """The Python of the executor lacks a module."""


class WorkerDiedError(WorkerFailure):
    """The worker's process or its executor died without a message."""


class AttemptRefusedError(WorkerDiedError):
    """Spark lost the worker and tried it again; the second attempt did not run."""


class CancelledError(WorkerFailure):
    """The worker was ended by force, as requested."""


class SparkStoppedError(WorkerFailure):
    """The Spark session has been stopped, or its JVM has ended."""


class SparkJobError(WorkerFailure):
    """Any other failure that Spark reports."""


class LauncherClosedError(WorkerFailure):
    """The launcher is closed and starts no more workers."""


def of_outcome(outcome: task.Outcome) -> WorkerFailure | None:
    """Return the failure that the result of a worker's task stands for; None if the worker ended by itself."""
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
    """Return the failure that a Spark job's exception or a task's error message stands for."""
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
    """Return why a task of a Spark job failed: the message of our own error if there is one, else Spark's."""
    ours = list(re.finditer(r"^railgun(?:\.\w+)+: ", text, re.MULTILINE))
    if not ours:
        return str(of_spark(text))
    message = text[ours[-1].end() :]
    end = re.search(r"^(?:JVM stacktrace:|\tat )", message, re.MULTILINE)
    return (message[: end.start()] if end else message).strip()


def is_stopped(text: str) -> bool:
    """Return whether the text is one of those by which Spark reports that it has been stopped."""
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
    """Return a message that says what to do about a missing module."""
    return (
        f"no module {module} on the worker ({where}): install it there, or ship it with the "
        "session (spark.submit.pyFiles, spark.archives, or an image that has it)"
    )


def python_part(text: str) -> str:
    """Return Python's traceback within a text of Java."""
    start = text.index("Traceback (most recent call last)")
    lines = text[start:].splitlines()
    end = next((n for n, line in enumerate(lines) if line.startswith("\tat ")), len(lines))
    return "\n".join(lines[:end]).rstrip()


def last_line(traceback: str) -> str:
    """Return the line that names the exception: `ValueError: no such key`."""
    lines = traceback.rpartition("Traceback (most recent call last)")[2].splitlines()[1:]
    named = [line for line in lines if line.strip() and not line.startswith(" ")]
    return named[0].strip() if named else traceback.strip()


def first_line(text: str) -> str:
    """Return the message of a Java exception, without its frames and the class names in front."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    messages = [line for line in lines if not line.startswith(("at ", "An error occurred while"))]
    line = (messages or lines or [""])[0].lstrip(": ")
    while named := re.match(r"(?:[a-z]\w*\.)+[A-Z]\w*: (.+)", line):
        line = named[1]
    return line
