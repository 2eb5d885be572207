"""A client's subscription to an ephemeral stream, or to the requests of a response stream.

Messages of such a stream are not stored: while more than `MAX_UNSENT_BYTES` wait in the socket of a session, its
subscriptions have no credit; afterwards they are told how many messages they missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from google.protobuf.message import Message

from railgun.broker.streams.node import Ephemeral, Node
from railgun.errors import RailgunError
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import Bytes, cut, head

SOFT_UNSENT_BYTES: Final = 1 << 20
"""While fewer bytes wait in a socket, messages are delivered."""
MAX_UNSENT_BYTES: Final = 32 << 20
"""When as many bytes wait in a socket, messages for its subscriptions are dropped."""


class ListenerSession(Protocol):
    """What a subscription needs of the session it belongs to."""

    node: Node

    @property
    def flooded(self) -> bool:
        """Return whether too many bytes wait in the socket."""

    def drop(self, channel: int) -> None:
        """Forget the subscription of a channel."""

    def send(self, command: Message, blob: Sequence[Bytes], channel: int) -> None:
        """Send a frame on a channel."""

    def fail(self, request: int, error: RailgunError, channel: int) -> None:
        """Send an error that answers a request, or (request 0) ends a subscription."""

    def hold(self) -> None:
        """Withdraw the credit of all subscriptions of the session until its socket has room."""


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
        """The number by which other nodes refer to the subscription."""
        self._held: int | None = None  # withdrawn credit, while too many bytes wait in the socket
        self._unreported = 0  # messages that were missed meanwhile
        stream.exchange.subscribe(self, *self.asked)
        if session.node.events is not None:
            session.node.events.joined(self)

    def grant(self, credit: int) -> None:
        """Add credit: the client is ready for that many more messages."""
        if self._held is None:
            self.stream.exchange.grant(self, credit)
            self._credit_changed()
        else:
            self._held += credit

    def deliver(self, command: p.Deliver, batches: Sequence[Bytes], count: int) -> None:
        """Send batches with `count` messages to the client."""
        if self._held is not None:  # held after this publish was routed to the subscription
            self._held += count
            self.missed(count)
            return
        self.session.send(command, batches, self.channel)
        self._credit_changed()
        if self.session.flooded:
            self.session.hold()

    def _credit_changed(self) -> None:
        """Tell the other nodes of the new credit."""
        if self.session.node.events is not None:
            self.session.node.events.changed(self)

    def missed(self, count: int) -> None:
        """Report that the client missed `count` messages: now, or when the socket has room."""
        if self._held is None:
            self.session.send(p.Lost(count=count), (), self.channel)
        else:
            self._unreported += count

    def hold(self) -> None:
        """Withdraw the credit until `flush`."""
        if self._held is None:
            exchange = self.stream.exchange
            self._held = exchange.credit(self)
            exchange.leave(self)
            exchange.subscribe(self, *self.asked)  # which gives no credit
            self._credit_changed()

    def flush(self) -> None:
        """Restore the credit, because the socket has room again, and report missed messages."""
        if self._held is not None:
            held, self._held = self._held, None
            self.grant(held)
            if self._unreported:
                missed, self._unreported = self._unreported, 0
                self.missed(missed)

    def lost(self, error: RailgunError) -> None:
        """End the subscription with an error."""
        self.session.drop(self.channel)
        self.leave(graceful=False)
        self.session.fail(0, error, self.channel)

    def leave(self, graceful: bool) -> None:
        """End the subscription at the client's request; `graceful` makes no difference, because nothing is stored."""
        self.send_away()

    def send_away(self) -> None:
        """Remove the subscription from the stream."""
        self.stream.exchange.leave(self)
        if self.session.node.events is not None:
            self.session.node.events.left(self)


def slice_batches(batches: Sequence[Bytes], first: int, end: int, count: int) -> Sequence[Bytes]:
    """Return the messages [first, end) of a publish of `count` messages, as batches."""
    if first == 0 and end == count:
        return batches
    chosen, at = [], 0
    for batch in batches:
        header = head(batch)
        low, high = max(first - at, 0), min(end - at, header.count)
        if low < high:
            chosen.append(cut(batch, header.base + low, header.base + high))
        at += header.count
    return chosen
