"""What the sources and sinks of this process wait for: outages outside of the flow that may pass.

A source or sink that waits says so with `WAITS.begin`, and `WAITS.end` when it goes on, from the same thread. A sink
may wait in several threads at once: it flushes while it prepares. The worker tells its controller
(`engine.worker.liveness`), which shows it to people as events. Waiting is no hang: a worker that waits is not given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

SETTLED_S: Final = 2.0
"""Seconds that something has to be waited for until it is told: shorter waits are everyday."""


class Waits:
    """What is waited for, by who waits and in which thread. Any thread may use it, for itself.

    >>> now = [0.0]
    >>> waits = Waits(lambda: now[0])
    >>> waits.begin("StreamSink('totals')", "no master")
    >>> waits.told()
    ''
    >>> now[0] += SETTLED_S
    >>> waits.told()
    "StreamSink('totals'): no master"
    >>> waits.end("StreamSink('totals')")
    >>> waits.told()
    ''
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, int], tuple[float, str]] = {}
        self._blocked: set[tuple[str, int]] = set()

    def begin(self, who: str, why: str, *, blocks: bool = False) -> None:
        """Note that `who` waits because of `why`; the time counts from the first call until `end`.

        With `blocks` the calling thread does nothing else meanwhile.
        """
        key = who, threading.get_ident()
        with self._lock:
            since = self._waiting[key][0] if key in self._waiting else self._clock()
            self._waiting[key] = (since, why)
            if blocks:
                self._blocked.add(key)

    def end(self, who: str) -> None:
        """Note that `who` waits no more in the calling thread."""
        if self._waiting:
            key = who, threading.get_ident()
            with self._lock:
                self._waiting.pop(key, None)
                self._blocked.discard(key)

    def blocks(self, thread: int) -> bool:
        """Return whether a thread does nothing but wait, and says so."""
        with self._lock:
            return any(blocked == thread for _, blocked in self._blocked)

    def told(self) -> str:
        """Return what has been waited for longer than `SETTLED_S`, for people; empty: nothing."""
        with self._lock:
            now = self._clock()
            settled = {
                f"{who}: {why}"
                for (who, _), (since, why) in self._waiting.items()
                if now - since >= SETTLED_S
            }
        return "; ".join(sorted(settled))


WAITS: Final = Waits()
"""Of this process."""
