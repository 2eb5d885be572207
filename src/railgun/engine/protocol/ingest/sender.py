"""A connector's side: which of its streams are open, how far they were sent, and what is safe.

1. A stream is announced, and sent after the answer: always from the point that the answer names, whatever
   was sent before. That point may lie before what was sent (the flow has gone back) and after what is
   acknowledged (the flow has it, but no snapshot does yet).
2. *Acknowledged* is only what an acknowledgement names. Whatever is after that may be asked for again. If people start
   the flow from an older snapshot, so may what is before, and it counts no more.
3. A lost connection closes all streams. Each is announced again with the next one.
4. Credits are bytes. What is sent takes from them; nothing is sent while there are none. The last batch may take
   more than there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from railgun.engine.protocol.ingest.messages import NONE


class Phase(Enum):
    """How far a stream is in this connection."""

    IDLE = "idle"
    ASKED = "asked"
    OPEN = "open"
    ENDED = "ended"  # all was sent, and its end


@dataclass(slots=True)
class Sent:
    """A stream of this connector."""

    name: str
    number: int
    phase: Phase = Phase.IDLE
    at: int = NONE  # the id of the last message that was sent, or that need not be
    acked: int = NONE


class Sender:
    """The streams of one connector, over one connection after the other."""

    __slots__ = ("credits", "numbers", "streams")

    def __init__(self) -> None:
        self.streams: dict[str, Sent] = {}
        self.numbers: dict[int, Sent] = {}
        self.credits = 0

    def stream(self, name: str) -> Sent:
        """A stream by its name."""
        found = self.streams.get(name)
        if found is None:
            found = Sent(name, len(self.numbers) + 1)
            self.streams[name] = self.numbers[found.number] = found
        return found

    def opened(self, credits: int) -> None:
        """A connection is open."""
        self.credits = credits

    def lost(self) -> None:
        """The connection is lost."""
        self.credits = 0
        for stream in self.streams.values():
            stream.phase = Phase.IDLE

    def asks(self, stream: Sent) -> None:
        """A stream is announced."""
        stream.phase = Phase.ASKED

    def granted(self, stream: Sent, por: int) -> None:
        """It may be sent, after this id."""
        stream.phase = Phase.OPEN
        stream.at = por
        stream.acked = min(stream.acked, por)

    def refused(self, stream: Sent) -> None:
        """It may not be sent now."""
        stream.phase = Phase.IDLE

    def sent(self, stream: Sent, last: int, size: int) -> None:
        """Messages up to this id were sent, in a batch of this size."""
        stream.at = last
        self.credits -= size

    def ended(self, stream: Sent) -> None:
        """Its end was sent."""
        stream.phase = Phase.ENDED

    def granted_credits(self, credits: int) -> None:
        """There is room for more."""
        self.credits += credits

    def acknowledged(self, stream: Sent, por: int) -> bool:
        """What is safe; whether that is news."""
        news = por > stream.acked
        stream.acked = max(stream.acked, por)
        return news

    def may_send(self, stream: Sent) -> bool:
        """Whether a batch may be sent now."""
        return stream.phase is Phase.OPEN and self.credits > 0
