"""The processor time of an engine of many processes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def processor_seconds() -> float:
    """The processor time of this process and of all that it has started, directly or not."""
    return processor_seconds_of([os.getpid()])


def processor_seconds_of(processes: Iterable[int]) -> float:
    """The processor time of these processes and of all that they have started, directly or not."""
    used: dict[int, float] = {}
    parents: dict[int, int] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                told = (entry / "stat").read_text("utf-8", "replace")
            except OSError:  # it has just ended
                continue
            fields = told.rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = sum(map(int, fields[11:15])) / tick
    ours = set(processes)
    found = True
    while found:
        found = False
        for child, parent in parents.items():
            if parent in ours and child not in ours:
                ours.add(child)
                found = True
    return sum(used.get(process, 0.0) for process in ours)
