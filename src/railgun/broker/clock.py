"""The clocks of a node."""

from __future__ import annotations

import time

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def time_of_day() -> int:
    """Return the time of day (µs), which may be wrong, and may jump."""
    return time.time_ns() // 1000


def steady_us() -> int:
    """Return the time of a clock that never jumps (µs); where there is one, it goes on while the machine sleeps."""
    return time.clock_gettime_ns(_STEADY) // 1000
