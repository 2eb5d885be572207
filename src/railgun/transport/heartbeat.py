"""Heartbeat of a connection: decide when the other end is dead, without false alarms on a busy machine.

Rules:

1. Time is an argument. The owner of the connection calls `tick` every `interval_s` seconds (more often does no harm)
   and sets `heard_s` whenever bytes arrive.
2. A connection on which bytes arrive needs no pings, except one every `KEEP_ALIVE_S` seconds, which shows the other end
   that this process is alive.
3. The other end is dead after `MAX_UNANSWERED` ticks in a row that found a ping unanswered: after `silence_s` seconds,
   or up to one interval more.
4. A tick that comes more than an interval late does not count: this process was itself busy or suspended, and the
   answer may wait in its socket.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

MAX_UNANSWERED: Final = 4
KEEP_ALIVE_S: Final = 5.0


class Beat(Enum):
    """What a tick asks the owner of the connection to do."""

    NOTHING = "nothing"
    PING = "ping"
    DEAD = "dead"


class Heartbeat:
    """The pings of one connection.

    >>> heartbeat = Heartbeat(silence_s=2.0, now_s=0.0)
    >>> [heartbeat.tick(0.4 * n).value for n in range(1, 7)]
    ['ping', 'ping', 'ping', 'ping', 'dead', 'dead']
    """

    __slots__ = ("_pinged_s", "_ticked_s", "_unanswered", "heard_s", "silence_s")

    def __init__(self, silence_s: float, now_s: float) -> None:
        self.silence_s = silence_s
        """Seconds without an answer after which the other end is dead; may be changed at any time."""
        self.heard_s = now_s
        """The time at which bytes arrived last."""
        self._ticked_s = now_s
        self._pinged_s = now_s
        self._unanswered = 0

    @property
    def interval_s(self) -> float:
        """Seconds between two ticks."""
        return self.silence_s / (MAX_UNANSWERED + 1)

    def tick(self, now_s: float) -> Beat:
        """Return whether to ping, to give the connection up, or to do nothing."""
        if now_s - self._ticked_s < 0.9 * self.interval_s:
            return Beat.NOTHING
        late = now_s - self._ticked_s > 2 * self.interval_s
        quiet = self.heard_s <= self._ticked_s
        if not quiet:
            self._unanswered = 0
        elif self._pinged_s > self.heard_s and not late:
            self._unanswered += 1
        self._ticked_s = now_s
        if self._unanswered >= MAX_UNANSWERED:
            return Beat.DEAD
        if quiet or now_s - self._pinged_s >= KEEP_ALIVE_S:
            self._pinged_s = now_s
            return Beat.PING
        return Beat.NOTHING
