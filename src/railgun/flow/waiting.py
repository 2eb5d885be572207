"""What the sources and sinks of this process wait for: outages outside of the flow that may pass.

A source or sink that waits says so with `WAITS.begin`, and `WAITS.end` when it goes on. The worker tells its controller
(`worker.pulse`), which shows it to people as events. Waiting is no hang: a worker that waits is not given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

SETTLED_S: Final = 2.0
"""Seconds that something has to be waited for until it is told: shorter waits are everyday."""


class Waits:
    """What is waited for, by who waits. Any thread may use it.

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
        self._waiting: dict[str, tuple[float, str]] = {}
        self._blocked: dict[str, int] = {}

    def begin(self, who: str, why: str, *, blocks: bool = False) -> None:
        """Note that `who` waits because of `why`; the time counts from the first call until `end`.

        With `blocks` the calling thread does nothing else meanwhile.
        """
        with self._lock:
            since = self._waiting[who][0] if who in self._waiting else self._clock()
            self._waiting[who] = (since, why)
            if blocks:
                self._blocked[who] = threading.get_ident()

    def end(self, who: str) -> None:
        """Note that `who` waits no more."""
        if self._waiting:
            with self._lock:
                self._waiting.pop(who, None)
                self._blocked.pop(who, None)

    def blocks(self, thread: int) -> bool:
        """Return whether a thread does nothing but wait, and says so."""
        with self._lock:
            return thread in self._blocked.values()

    def told(self) -> str:
        """Return what has been waited for longer than `SETTLED_S`, for people; empty: nothing."""
        with self._lock:
            now = self._clock()
            settled = [
                f"{who}: {why}"
                for who, (since, why) in sorted(self._waiting.items())
                if now - since >= SETTLED_S
            ]
        return "; ".join(settled)


WAITS: Final = Waits()
"""Of this process."""
