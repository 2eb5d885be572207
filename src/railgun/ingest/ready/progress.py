"""Progress: how far a ready-made connector is, for people and programs.

Messages are counted by the chunks in which they were handed over: a chunk is acknowledged when its last message is.
When the flow goes back, what it wants again is taken off, and counted as it is sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Progress:
    """Figures of all streams of a connector.

    >>> progress = Progress()
    >>> progress.took("a", 9, 3); progress.took("a", 12, 2); progress.acknowledged("a", 10)
    >>> progress.sent, progress.acked
    (5, 3)
    """

    sent: int = 0
    acked: int = 0
    streams: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Streams that stand still, and why."""
    waits: str = ""
    """What is waited for, if that is worth a word."""
    _open: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)

    def took(self, stream: str, last: int, count: int) -> None:
        """So many messages were handed over; the last one has this id."""
        self.sent += count
        self._open.setdefault(stream, deque()).append((last, count))

    def acknowledged(self, stream: str, id: int) -> None:
        """All up to this id are in a committed snapshot."""
        chunks = self._open.get(stream)
        while chunks and chunks[0][0] <= id:
            self.acked += chunks.popleft()[1]

    def again(self, stream: str, after: int | None) -> None:
        """What comes after an id (None: all of it) is sent again."""
        chunks = self._open.get(stream)
        while chunks and (after is None or chunks[-1][0] > after):
            self.sent -= chunks.pop()[1]

    def told(self) -> dict[str, Any]:
        """For programs."""
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
