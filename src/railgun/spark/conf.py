"""Refuse Spark settings under which workers cannot run.

A worker is a task that runs for as long as its job. Some settings of Spark are made for tasks that end by themselves,
and kill or duplicate long ones, sometimes only after hours. They are refused when the job starts, with the reason and
what to change.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping

from railgun.errors import RailgunError

Conf = Mapping[str, str]
SLOTS = 64
"""Slots of a local session: a worker holds its slot while it lives, and waits most of the time."""


class RefusedConfigurationError(RailgunError):
    """A Spark setting under which workers would be killed, duplicated or starved."""


class TooFewSlotsError(RefusedConfigurationError):
    """A local session with fewer slots than there are workers."""


def refuse(conf: Conf, workers: int = 0) -> None:
    """Raise `RefusedConfigurationError`, with all reasons at once, if `workers` workers cannot run with these settings.

    >>> refuse({"spark.master": "local[4]"}, workers=4)
    >>> refuse({"spark.master": "local[4]", "spark.speculation": "true"})
    Traceback (most recent call last):
    railgun.spark.conf.RefusedConfigurationError: spark.speculation=true would ...
    """
    problems = [*problems_of(conf)]
    if problems:
        raise RefusedConfigurationError("; ".join(problems))
    slots = local_slots(conf)
    if slots is not None and slots < workers:
        raise TooFewSlotsError(
            f"{workers} workers need {workers} slots, and master {conf['spark.master']} has "
            f"{slots}: a worker holds its slot for life. Use local[*], which has {SLOTS} or more, "
            f"or local[{math.ceil(workers * task_cpus(conf))}]."
        )


def problems_of(conf: Conf) -> list[str]:
    """Return the settings under which workers cannot run, each with its reason, a sentence each."""
    problems = []
    if is_true(conf, "spark.speculation"):
        problems.append(
            "spark.speculation=true would run a second copy of a worker for living long (at the "
            "latest after spark.speculation.task.duration.threshold): turn it off for this session"
        )
    idle = seconds(conf.get("spark.python.worker.idleTimeoutSeconds", "0"))
    if is_true(conf, "spark.python.worker.killOnIdleTimeout") and idle > 0:
        problems.append(
            f"spark.python.worker.killOnIdleTimeout=true would kill every worker after {idle:g} s, "
            "because Spark takes a task without output for idle: unset it, or "
            "spark.python.worker.idleTimeoutSeconds"
        )
    if is_true(conf, "spark.task.reaper.enabled") and seconds(
        conf.get("spark.task.reaper.killTimeout", "-1")
    ) not in (-1, 0):
        problems.append(
            "spark.task.reaper.killTimeout would end the executor, with all its workers, when one "
            "cancelled worker is slow to end: unset it"
        )
    return problems


def local_slots(conf: Conf) -> int | None:
    """Return how many tasks run at a time on a local master; None on a cluster, which may grow.

    >>> local_slots({"spark.master": "local[8,2]", "spark.task.cpus": "2"})
    4
    >>> local_slots({"spark.master": "spark://10.0.0.1:7077"})
    """
    master = conf.get("spark.master", "")
    if master == "local":
        cores = 1
    elif match := re.fullmatch(r"local\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\]", master):
        cores = (os.cpu_count() or 1) if match[1] == "*" else int(match[1])
    elif match := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        cores = int(match[1]) * int(match[2])
    else:
        return None
    return int(cores / task_cpus(conf))


def is_local(master: str) -> bool:
    """Return whether all of Spark runs in the JVM of this process.

    >>> is_local("local[*]"), is_local("local-cluster[2,1,512]"), is_local("yarn")
    (True, False, False)
    """
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def is_loopback(master: str) -> bool:
    """Return whether all of Spark is on this machine.

    >>> is_loopback("spark://127.0.0.1:7077"), is_loopback("spark://10.0.0.1:7077")
    (True, False)
    """
    host = re.match(r"\w+://(\[?[^/\]]+?\]?):\d+$", master)
    local = host is not None and (host[1] in ("localhost", "[::1]") or host[1].startswith("127."))
    return local or master.startswith("local")


def task_cpus(conf: Conf) -> float:
    """Return how many cores a task takes; newer versions of Spark allow fractions."""
    return float(conf.get("spark.task.cpus", "1"))


def is_true(conf: Conf, key: str) -> bool:
    """Return whether a setting is on; the settings looked at here are off by default."""
    return conf.get(key, "false").strip().lower() == "true"


SECONDS_PER_UNIT = {
    "us": 1e-6,
    "ms": 1e-3,
    "": 1,
    "s": 1,
    "m": 60,
    "min": 60,
    "h": 3600,
    "d": 86400,
}


def seconds(text: str) -> float:
    """Return the seconds of a time in Spark's notation.

    >>> seconds("200ms"), seconds("2m"), seconds("30")
    (0.2, 120.0, 30.0)
    """
    match = re.fullmatch(r"\s*(-?\d+)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in SECONDS_PER_UNIT:
        raise RefusedConfigurationError(f"{text!r} is not a time that Spark understands")
    return float(match[1]) * SECONDS_PER_UNIT[match[2]]
