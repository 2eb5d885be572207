"""Clocks of a node: the time of day, and a clock that never jumps."""

from __future__ import annotations

import time

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def time_of_day() -> int:
    """Return the time of day (µs), which may be wrong, and may jump."""
    return time.time_ns() // 1000


def steady_us() -> int:
    """Return the time (µs) of a clock that never jumps.

    Where the system has such a clock, it runs while the machine sleeps.
    """
    return time.clock_gettime_ns(_STEADY) // 1000
