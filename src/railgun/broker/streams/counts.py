"""Counters of a stream for `/metrics`. Counting is only additions, once a publish or less often."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Final

from railgun.errors import RailgunError

BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds, in seconds, of the classes of the histogram; one more class has no bound."""
Done = Callable[[RailgunError | None], None]


class Counts:
    """Counters of one stream since the node was started.

    >>> counts = Counts()
    >>> counts.timed(print)(None)
    None
    >>> sum(counts.commits), counts.seconds < 60
    (1, True)
    """

    __slots__ = ("bytes", "commits", "dead", "messages", "refused", "seconds")

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.dead = 0
        """Messages that were written to the dead letters of the stream."""
        self.refused: Counter[str] = Counter()
        """Messages that were not stored, by error code."""
        self.commits = [0] * (len(BOUNDS) + 1)
        """Publishes that were stored, by class of their duration (`BOUNDS`)."""
        self.seconds = 0.0

    def timed(self, done: Done) -> Done:
        """Return a callback that counts the time until it is called, and calls `done`."""
        begun = perf_counter()

        def timed_done(error: RailgunError | None) -> None:
            if error is None:
                took = perf_counter() - begun
                self.commits[bisect_left(BOUNDS, took)] += 1
                self.seconds += took
            done(error)

        return timed_done
