"""Stored time of messages: the time of day, smoothed by a steady clock.

The time of day of a machine may be wrong, and may jump. A steady clock never does, but means nothing by itself, and
ends with the machine. Rules:

1. A node takes the time of day when it starts. From then on its *paced time* follows the steady clock, and approaches
   the time of day by gaining or losing at most one part in `SLEW`. So within the life of a node it never leaps and
   never steps back, whatever the time of day does. A restart takes the time of day anew.
2. Stored time of a stream is paced time, but never before the last batch of the stream. If that batch lies ahead (it
   was stored by a clock that was wrong), stored time moves on from it at half the speed of the steady clock until paced
   time has caught up: it never stands still.
3. So between two batches of one epoch (one life of one master), stored time advances by at most `1 + 1/SLEW` of the
   time that has passed. Between two epochs it may advance by anything.
"""

from __future__ import annotations

from typing import Final

SLEW: Final = 10


class PacedClock:
    """The paced time of a node (µs).

    >>> clock = PacedClock()
    >>> clock.read(wall=1_000_000, steady=0)
    1000000
    >>> clock.read(wall=9_000_000, steady=100)  # the time of day has leapt
    1000110
    >>> clock.read(wall=0, steady=200)  # and steps back
    1000200
    """

    __slots__ = ("_steady", "_time", "stepped")

    def __init__(self) -> None:
        self._time: int | None = None
        self._steady = 0
        self.stepped = 0
        """µs by which the time of day was ahead of paced time at the last reading; negative: behind."""

    def read(self, wall: int, steady: int) -> int:
        """Return the paced time, given the time of day and the steady clock."""
        if self._time is None:
            self._time, self._steady = wall, steady
            return wall
        passed = max(0, steady - self._steady)
        least, most = passed - passed // SLEW, passed + passed // SLEW
        self._time = min(max(wall, self._time + least), self._time + most)
        self._steady = max(steady, self._steady)
        self.stepped = wall - self._time
        return self._time


class StreamTime:
    """The clock from which one stream takes its stored time.

    >>> time = StreamTime()
    >>> time.at(paced=1000, last=500, steady=0)
    1000
    >>> time.at(paced=1000, last=9000, steady=0), time.at(paced=1100, last=9000, steady=100)
    (9000, 9050)
    """

    __slots__ = ("_ahead",)

    def __init__(self) -> None:
        self._ahead: tuple[int, int] | None = None
        """The stored time of a last batch that lies ahead, and the steady time when that was noticed."""

    def at(self, paced: int, last: int, steady: int) -> int:
        """Return the stored time for the next batch, given the node's paced time and the last batch's stored time."""
        if last <= paced:
            self._ahead = None
            return paced
        if self._ahead is None:
            self._ahead = last, steady
        time, since = self._ahead
        return max(last, time + max(0, steady - since) // 2)


def min_elapsed(advance: int) -> int:
    """Return the least time that has passed while stored time of one epoch advanced by `advance`."""
    return advance * SLEW // (SLEW + 1)


def max_advance(passed: int) -> int:
    """Return the most by which stored time of one epoch may have advanced while `passed` has passed."""
    return passed + -(-passed // SLEW)
