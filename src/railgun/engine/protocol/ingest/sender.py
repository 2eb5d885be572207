"""Track a connector's streams: which are open, how far they were sent, and what is acknowledged.

1. A stream is announced, and sent after the answer: always from the point that the answer names, whatever
   was sent before. That point may lie before what was sent (the flow has gone back) and after what is
   acknowledged (the flow has it, but no snapshot does yet).
2. Only what an acknowledgement names is *acknowledged*. The flow may ask again for anything after that. If an operator
   starts the flow from an older snapshot, it may ask for earlier messages too, and they are acknowledged no more.
3. A lost connection closes all streams. Each is announced again on the next connection.
4. Credits are bytes. A batch takes from them; nothing is sent while there are none. The last batch may take
   more than there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from railgun.engine.protocol.ingest.messages import NONE


class Phase(Enum):
    """The state of a stream in this connection."""

    IDLE = "idle"
    ASKED = "asked"
    OPEN = "open"
    ENDED = "ended"  # all messages were sent, and the end of the stream


@dataclass(slots=True)
class Sent:
    """A stream of this connector, and how far it was sent."""

    name: str
    number: int
    phase: Phase = Phase.IDLE
    at: int = NONE  # the id of the last message that was sent, or that need not be sent
    acked: int = NONE


class Sender:
    """The streams of one connector, over its successive connections."""

    __slots__ = ("credits", "numbers", "streams")

    def __init__(self) -> None:
        self.streams: dict[str, Sent] = {}
        self.numbers: dict[int, Sent] = {}
        self.credits = 0

    def stream(self, name: str) -> Sent:
        """Return the stream of this name; add it if it is new."""
        sent = self.streams.get(name)
        if sent is None:
            sent = Sent(name, len(self.numbers) + 1)
            self.streams[name] = self.numbers[sent.number] = sent
        return sent

    def opened(self, credits: int) -> None:
        """Begin a connection with this many credits."""
        self.credits = credits

    def lost(self) -> None:
        """End the connection: no credits, all streams idle."""
        self.credits = 0
        for stream in self.streams.values():
            stream.phase = Phase.IDLE

    def asks(self, stream: Sent) -> None:
        """Take note that a stream was announced."""
        stream.phase = Phase.ASKED

    def granted(self, stream: Sent, por: int) -> None:
        """Open a stream, to be sent after the id `por`."""
        stream.phase = Phase.OPEN
        stream.at = por
        stream.acked = min(stream.acked, por)

    def refused(self, stream: Sent) -> None:
        """Set a stream idle: the worker refused it for now."""
        stream.phase = Phase.IDLE

    def sent(self, stream: Sent, last: int, size: int) -> None:
        """Take note that messages up to the id `last` were sent, in a batch of `size` bytes."""
        stream.at = last
        self.credits -= size

    def ended(self, stream: Sent) -> None:
        """Take note that the end of a stream was sent."""
        stream.phase = Phase.ENDED

    def granted_credits(self, credits: int) -> None:
        """Add credits that the worker granted."""
        self.credits += credits

    def acknowledged(self, stream: Sent, por: int) -> bool:
        """Record an acknowledgement up to the id `por`; return whether it is new."""
        is_new = por > stream.acked
        stream.acked = max(stream.acked, por)
        return is_new

    def may_send(self, stream: Sent) -> bool:
        """Return whether a batch of the stream may be sent now."""
        return stream.phase is Phase.OPEN and self.credits > 0
