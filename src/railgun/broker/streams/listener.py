"""A subscription of a client's session to an ephemeral stream, or to the requests of a response stream.

Nothing of such a stream is stored: while more than `FLOOD` bytes wait in the socket of a session, its subscriptions
have no credit, and are told afterwards how many messages they missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from google.protobuf.message import Message

from railgun.broker.streams.node import Ephemeral, Node
from railgun.errors import RailgunError
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import Bytes, cut, head

ROOM: Final = 1 << 20  # bytes that wait in a socket
FLOOD: Final = 32 << 20  # bytes that wait in a socket and are too many


class ListenerSession(Protocol):
    """What a subscription needs of the session it belongs to."""

    node: Node

    @property
    def flooded(self) -> bool:
        """Whether too many bytes wait in its socket."""

    def drop(self, channel: int) -> None:
        """Forget the subscription of a channel."""

    def send(self, command: Message, blob: Sequence[Bytes], channel: int) -> None:
        """Send a frame."""

    def fail(self, request: int, error: RailgunError, channel: int) -> None:
        """Send an error."""

    def hold(self) -> None:
        """Take the credit of all its subscriptions away until there is room in its socket."""


class Listener:
    """A subscription of a session to an ephemeral stream."""

    def __init__(
        self,
        session: ListenerSession,
        channel: int,
        stream: Ephemeral,
        matcher: str,
        group: str | None,
    ) -> None:
        self.session = session
        self.channel = channel
        self.stream = stream
        self.asked = (matcher, group)
        self.number = 0
        """What other nodes call it."""
        self._held: int | None = None  # its credit, while too much waits in the socket
        self._untold = 0  # what it lost meanwhile
        stream.exchange.subscribe(self, *self.asked)
        if session.node.events is not None:
            session.node.events.joined(self)

    def grant(self, credit: int) -> None:
        """It is ready for so many more."""
        if self._held is None:
            self.stream.exchange.grant(self, credit)
            self._changed()
        else:
            self._held += credit

    def deliver(self, command: p.Deliver, batches: Sequence[Bytes], count: int) -> None:
        """Send these; they are so many messages."""
        if self._held is not None:  # since this publish was shared out
            self._held += count
            self.missed(count)
            return
        self.session.send(command, batches, self.channel)
        self._changed()
        if self.session.flooded:
            self.session.hold()

    def _changed(self) -> None:
        """Other nodes may want to know of its credit."""
        if self.session.node.events is not None:
            self.session.node.events.changed(self)

    def missed(self, count: int) -> None:
        """It has lost so many."""
        if self._held is None:
            self.session.send(p.Lost(count=count), (), self.channel)
        else:
            self._untold += count

    def hold(self) -> None:
        """It gets nothing more for the time being."""
        if self._held is None:
            exchange = self.stream.exchange
            self._held = exchange.credit(self)
            exchange.leave(self)
            exchange.subscribe(self, *self.asked)  # which gives no credit
            self._changed()

    def flush(self) -> None:
        """There is room: it gets messages again, and hears what it has lost."""
        if self._held is not None:
            held, self._held = self._held, None
            self.grant(held)
            if self._untold:
                untold, self._untold = self._untold, 0
                self.missed(untold)

    def lost(self, error: RailgunError) -> None:
        """There is nothing more to hear."""
        self.session.drop(self.channel)
        self.leave(graceful=False)
        self.session.fail(0, error, self.channel)

    def leave(self, graceful: bool) -> None:
        """It goes."""
        self.send_away()

    def send_away(self) -> None:
        """It is to go."""
        self.stream.exchange.leave(self)
        if self.session.node.events is not None:
            self.session.node.events.left(self)


def some(batches: Sequence[Bytes], first: int, end: int, count: int) -> Sequence[Bytes]:
    """Messages [first, end) of a publish, as batches."""
    if first == 0 and end == count:
        return batches
    chosen, at = [], 0
    for batch in batches:
        found = head(batch)
        low, high = max(first - at, 0), min(end - at, found.count)
        if low < high:
            chosen.append(cut(batch, found.base + low, found.base + high))
        at += found.count
    return chosen
