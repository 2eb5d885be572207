"""Which Spark settings a worker can live with.

A worker is a task that runs for as long as its job. Some settings of Spark are made for tasks that
end by themselves, and kill or double the others, sometimes only after hours. They are refused when
the job starts, each with the reason and the way out.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping

from railgun.errors import RailgunError

Conf = Mapping[str, str]
SLOTS = 64
"""Slots of a local session: a worker holds one for life, and waits most of the time."""


class RefusedConfigurationError(RailgunError):
    """A Spark setting under which workers would be killed, doubled or starved."""


class TooFewSlotsError(RefusedConfigurationError):
    """A local session with fewer slots than there are workers."""


def refuse(conf: Conf, workers: int = 0) -> None:
    """Raise if workers cannot live with these settings; says all that is wrong at once.

    >>> refuse({"spark.master": "local[4]"}, workers=4)
    >>> refuse({"spark.master": "local[4]", "spark.speculation": "true"})
    Traceback (most recent call last):
    railgun.spark.conf.RefusedConfigurationError: spark.speculation=true would ...
    """
    wrong = [*complaints(conf)]
    if wrong:
        raise RefusedConfigurationError("; ".join(wrong))
    slots = local_slots(conf)
    if slots is not None and slots < workers:
        raise TooFewSlotsError(
            f"{workers} workers need {workers} slots, and master {conf['spark.master']} has "
            f"{slots}: a worker holds its slot for life. Use local[*], which has {SLOTS} or more, "
            f"or local[{math.ceil(workers * task_cpus(conf))}]."
        )


def complaints(conf: Conf) -> list[str]:
    """What is wrong with these settings, a sentence each."""
    told = []
    if is_true(conf, "spark.speculation"):
        told.append(
            "spark.speculation=true would run a second copy of a worker for living long (at the "
            "latest after spark.speculation.task.duration.threshold): turn it off for this session"
        )
    idle = seconds(conf.get("spark.python.worker.idleTimeoutSeconds", "0"))
    if is_true(conf, "spark.python.worker.killOnIdleTimeout") and idle > 0:
        told.append(
            f"spark.python.worker.killOnIdleTimeout=true would kill every worker after {idle:g} s, "
            "for Spark takes a task without output for idle: unset it, or "
            "spark.python.worker.idleTimeoutSeconds"
        )
    if is_true(conf, "spark.task.reaper.enabled") and seconds(
        conf.get("spark.task.reaper.killTimeout", "-1")
    ) not in (-1, 0):
        told.append(
            "spark.task.reaper.killTimeout would end the executor, with all its workers, when one "
            "cancelled worker is slow to end: unset it"
        )
    return told


def local_slots(conf: Conf) -> int | None:
    """How many tasks run at a time on a local master; None on a cluster, which may grow.

    >>> local_slots({"spark.master": "local[8,2]", "spark.task.cpus": "2"})
    4
    >>> local_slots({"spark.master": "spark://10.0.0.1:7077"})
    """
    master = conf.get("spark.master", "")
    if master == "local":
        cores = 1
    elif found := re.fullmatch(r"local\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\]", master):
        cores = (os.cpu_count() or 1) if found[1] == "*" else int(found[1])
    elif found := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        cores = int(found[1]) * int(found[2])
    else:
        return None
    return int(cores / task_cpus(conf))


def is_local(master: str) -> bool:
    """Whether all of Spark runs in the JVM of this process.

    >>> is_local("local[*]"), is_local("local-cluster[2,1,512]"), is_local("yarn")
    (True, False, False)
    """
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def is_loopback(master: str) -> bool:
    """Whether nothing of Spark is on another machine.

    >>> is_loopback("spark://127.0.0.1:7077"), is_loopback("spark://10.0.0.1:7077")
    (True, False)
    """
    host = re.match(r"\w+://(\[?[^/\]]+?\]?):\d+$", master)
    local = host is not None and (host[1] in ("localhost", "[::1]") or host[1].startswith("127."))
    return local or master.startswith("local")


def task_cpus(conf: Conf) -> float:
    """How many cores a task takes; newer versions of Spark know fractions."""
    return float(conf.get("spark.task.cpus", "1"))


def is_true(conf: Conf, key: str) -> bool:
    """Whether a setting is on; all that are asked for here are off by default."""
    return conf.get(key, "false").strip().lower() == "true"


UNITS = {"us": 1e-6, "ms": 1e-3, "": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """A time as Spark writes them.

    >>> seconds("200ms"), seconds("2m"), seconds("30")
    (0.2, 120.0, 30.0)
    """
    found = re.fullmatch(r"\s*(-?\d+)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in UNITS:
        raise RefusedConfigurationError(f"{text!r} is not a time that Spark understands")
    return float(found[1]) * UNITS[found[2]]
