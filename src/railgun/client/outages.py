"""Record which outages of outside systems the sources and sinks of this process wait for.

A source or sink that waits calls `OUTAGES.begin`, and `OUTAGES.end` when it continues, from the same thread. A sink may
wait in several threads at once: it flushes while it prepares. The worker reports outages to its controller
(`engine.worker.liveness`), which shows them as events. A worker that waits for an outage is not hanging: the controller
does not give it up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

SETTLED_S: Final = 2.0
"""Outages shorter than this many seconds are not reported: they are common."""


class Outages:
    """The outages that sources and sinks wait for, by waiting part and thread. Safe to use from any thread.

    >>> now = [0.0]
    >>> outages = Outages(lambda: now[0])
    >>> outages.begin("StreamSink('totals')", "no master")
    >>> outages.describe()
    ''
    >>> now[0] += SETTLED_S
    >>> outages.describe()
    "StreamSink('totals'): no master"
    >>> outages.end("StreamSink('totals')")
    >>> outages.describe()
    ''
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, int], tuple[float, str]] = {}
        self._blocked: set[tuple[str, int]] = set()

    def begin(self, who: str, why: str, *, blocks: bool = False) -> None:
        """Record that `who` waits in the calling thread because of `why`.

        The time counts from the first call after `end`. `blocks`: the calling thread does nothing else meanwhile.
        """
        key = who, threading.get_ident()
        with self._lock:
            since = self._waiting[key][0] if key in self._waiting else self._clock()
            self._waiting[key] = (since, why)
            if blocks:
                self._blocked.add(key)

    def end(self, who: str) -> None:
        """Record that `who` no longer waits in the calling thread."""
        if self._waiting:
            key = who, threading.get_ident()
            with self._lock:
                self._waiting.pop(key, None)
                self._blocked.discard(key)

    def blocks(self, thread: int) -> bool:
        """Return whether the thread with this identifier has recorded that it does nothing but wait."""
        with self._lock:
            return any(blocked == thread for _, blocked in self._blocked)

    def describe(self) -> str:
        """Return a text with the outages that have lasted `SETTLED_S` or longer; empty if there are none."""
        with self._lock:
            now = self._clock()
            settled = {
                f"{who}: {why}"
                for (who, _), (since, why) in self._waiting.items()
                if now - since >= SETTLED_S
            }
        return "; ".join(sorted(settled))


OUTAGES: Final = Outages()
"""The outages of this process."""
