"""Count the messages that a ready-made connector has sent and the flow has acknowledged.

Messages are counted by the chunks in which they were handed over: a chunk is acknowledged when its last message is.
When the flow goes back, the messages it requests again are subtracted, and counted anew when they are sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Progress:
    """The counters of all streams of a connector.

    >>> progress = Progress()
    >>> progress.took("a", 9, 3); progress.took("a", 12, 2); progress.acknowledged("a", 10)
    >>> progress.sent, progress.acked
    (5, 3)
    """

    sent: int = 0
    acked: int = 0
    streams: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Streams that have stopped, and why."""
    waits: str = ""
    """What the connector waits for, if it is something unusual."""
    _open: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)

    def took(self, stream: str, last: int, count: int) -> None:
        """Count `count` messages that were handed over; `last` is the id of the last one."""
        self.sent += count
        self._open.setdefault(stream, deque()).append((last, count))

    def acknowledged(self, stream: str, id: int) -> None:
        """Count the messages up to this id as acknowledged: they are in a committed snapshot."""
        chunks = self._open.get(stream)
        while chunks and chunks[0][0] <= id:
            self.acked += chunks.popleft()[1]

    def again(self, stream: str, after: int | None) -> None:
        """Subtract the messages after an id (None: all), which are about to be sent again."""
        chunks = self._open.get(stream)
        while chunks and (after is None or chunks[-1][0] > after):
            self.sent -= chunks.pop()[1]

    def figures(self) -> dict[str, Any]:
        """Return the counters as JSON values, for programs."""
        return {
            "sent": self.sent,
            "acknowledged": self.acked,
            "streams": self.streams,
            "failed": len(self.failed),
            **({"waits": self.waits} if self.waits else {}),
        }

    def __str__(self) -> str:
        text = f"{self.sent:,} sent, {self.acked:,} acknowledged, {self.streams:,} stream{'s' * (self.streams != 1)}"
        if self.failed:
            text += f", {len(self.failed):,} failed"
        return f"{text}; {self.waits}" if self.waits else text
