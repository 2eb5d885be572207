"""What a stream counts while it works, for `/metrics`: additions, once a publish or rarer, and nothing else."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Final

from railgun.errors import RailgunError

BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds: the upper ends of the classes of a histogram; a last one has no end."""
Done = Callable[[RailgunError | None], None]


class Counts:
    """Since the node was started.

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
        """Letters that were written to its dead letters."""
        self.refused: Counter[str] = Counter()
        """Messages that were not stored, by code."""
        self.commits = [0] * (len(BOUNDS) + 1)
        """Publishes that were stored, by how long that took."""
        self.seconds = 0.0

    def timed(self, done: Done) -> Done:
        """The same, and how long it took until it was called is counted."""
        begun = perf_counter()

        def told(error: RailgunError | None) -> None:
            if error is None:
                took = perf_counter() - begun
                self.commits[bisect_left(BOUNDS, took)] += 1
                self.seconds += took
            done(error)

        return told
