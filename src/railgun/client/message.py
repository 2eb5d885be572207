"""Messages as a consumer receives them: they arrive in batches, and become objects only when they are taken."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Any

from railgun.client.checks import check_nack
from railgun.client.errors import StreamsError
from railgun.client.payloads import from_arrow, from_json, from_msgpack
from railgun.transport.records import Records, cut

if TYPE_CHECKING:
    import pyarrow

    from railgun.client.subscription import Subscription


class Arrival:
    """A batch that has arrived: what its messages have in common, and how many of them were taken."""

    __slots__ = (
        "_payloads", "acked", "arrived_s", "batch", "delivery", "epoch", "records", "response", "subscription",
        "taken", "topic",
    )  # fmt: skip

    def __init__(
        self,
        subscription: Subscription,
        batch: memoryview,
        delivery: int,
        epoch: int,
        topic: str = "",
        response: str = "",
        arrived_s: float | None = None,
    ) -> None:
        self.subscription = subscription
        self.arrived_s = time.monotonic() if arrived_s is None else arrived_s
        self.batch = batch
        self.records = Records(batch)
        self.delivery = delivery
        self.epoch = epoch
        self.topic = topic
        self.response = response
        self.taken = 0
        self.acked: set[int] = set()  # rows, in an exclusive group
        self._payloads: list[bytes] | None = None

    @property
    def left(self) -> int:
        """The number of its messages that were not taken yet."""
        return self.records.count - self.taken

    def take(self, most: int) -> list[Message]:
        """Take the next messages of the batch, at most `most`."""
        if self._payloads is None:
            self._payloads = self.records.payloads()
        first, self.taken = self.taken, min(self.records.count, self.taken + most)
        message = self.subscription.facade.message
        if most == 1:
            return [message(self, first, self._payloads[first])]
        rows = range(first, self.taken)
        return list(map(message, repeat(self), rows, self._payloads[first : self.taken]))

    def piece(self, first: int, end: int) -> Arrival:
        """Return the part of the batch with the offsets from `first` up to `end`, as a batch of its own."""
        batch = memoryview(cut(self.batch, first, end))
        return Arrival(
            self.subscription, batch, self.delivery, self.epoch, arrived_s=self.arrived_s
        )


class Message:
    """A message of a stream, with the calls that acknowledge or answer it."""

    __slots__ = ("arrival", "payload", "row")

    def __init__(self, arrival: Arrival, row: int, payload: bytes) -> None:
        self.arrival = arrival
        self.row = row
        self.payload = payload

    def __repr__(self) -> str:
        shown = self.payload if len(self.payload) <= 40 else self.payload[:37] + b"..."
        return f"Message({shown!r}, offset={self.offset}, delivery={self.delivery})"

    @property
    def subscription(self) -> Any:
        """The subscription that delivered the message: a `Subscription` or a `SyncSubscription`."""
        return self.arrival.subscription.facade

    @property
    def offset(self) -> int:
        """The message's place in the stream; 0 in an ephemeral stream, which has no offsets."""
        arrival = self.arrival
        return arrival.records.base + self.row if arrival.subscription.persistent else 0

    @property
    def time(self) -> int:
        """When the message was stored, in microseconds since 1970; 0 in an ephemeral stream."""
        return self.arrival.records.time if self.arrival.subscription.persistent else 0

    @property
    def arrived_s(self) -> float:
        """When the message reached this client (`time.monotonic`). It may have waited here to be taken since."""
        return self.arrival.arrived_s

    @property
    def delivery(self) -> int:
        """The number of times the message has been delivered, this time included."""
        return self.arrival.delivery

    @property
    def epoch(self) -> int:
        """The epoch of the group; in an ephemeral stream, the number of times the client had subscribed."""
        return self.arrival.epoch

    @property
    def id(self) -> bytes | None:
        """The ID that the publisher gave the message, or None."""
        return self.arrival.records.id(self.row)

    @property
    def topic(self) -> str:
        """The topic of a message of an ephemeral stream; else empty."""
        return self.arrival.topic

    @property
    def response(self) -> str:
        """The name of the response stream if the message is a request; else empty."""
        return self.arrival.response

    @property
    def headers(self) -> dict[str, str]:
        """The headers that were published with the message."""
        encoded = self.arrival.records.headers(self.row)
        return dict(json.loads(encoded)) if encoded else {}

    @property
    def text(self) -> str:
        """The payload decoded as UTF-8."""
        return self.payload.decode()

    def json(self) -> Any:
        """Return the value of a JSON payload; raise `PayloadError` if it is not JSON."""
        return from_json(self.payload)

    def msgpack(self) -> Any:
        """Return the value of a MessagePack payload; raise `PayloadError` if it is not MessagePack."""
        return from_msgpack(self.payload)

    def arrow(self) -> pyarrow.Table:
        """Return the table of an Arrow payload; raise `PayloadError` if it is no Arrow stream."""
        return from_arrow(self.payload)

    def ack(self) -> None:
        """Acknowledge the message: it is done. The ack is sent soon, together with others; this call never waits."""
        self.subscription.ack(self)

    def nack(self, delay: float = 0.0, reason: str = "", *, block: bool = False) -> None:
        """Refuse the message: have it redelivered after `delay` seconds, to any free member of the group.

        The delay holds back only this message for this group. `block=True` blocks the whole group (or a consumer
        without a group): nothing is delivered to it until the delay is over. An exclusive group is always blocked, so
        that its order is kept. `reason` is recorded in the dead letter, if the message becomes one. Raises
        `StreamsError` (`BAD_DELAY`) for `block` without a delay.
        """
        check_nack(delay, reason, block)
        if block and not delay > 0:
            raise StreamsError("BAD_DELAY", "a nack that blocks needs a delay: for how long?")
        self.subscription.nack(self, delay, reason, block=block)

    def in_progress(self) -> None:
        """Tell the node that the message is still being processed: `ack_wait` starts again."""
        self.subscription.in_progress(self)

    async def respond(self, payload: bytes | str, *, confirm: bool = True) -> None:
        """Answer this request with `payload` (`Client.respond`)."""
        await self.subscription.client.respond(self.response, payload, confirm=confirm)


class Buffer:
    """The batches that have arrived and were not taken yet, in order."""

    def __init__(self) -> None:
        self._arrivals: deque[Arrival] = deque()

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    @property
    def last_epoch(self) -> float:
        """The epoch of the last batch; infinite if there is none."""
        return self._arrivals[-1].epoch if self._arrivals else math.inf

    def add(self, arrival: Arrival) -> None:
        """Append a batch that has arrived."""
        self._arrivals.append(arrival)

    def clear(self) -> None:
        """Drop all buffered batches."""
        self._arrivals.clear()

    def take(self, most: int) -> list[Message]:
        """Take the next messages, at most `most`; return an empty list only if the buffer is empty."""
        messages: list[Message] = []
        while self._arrivals and len(messages) < most:
            arrival = self._arrivals[0]
            messages += arrival.take(most - len(messages))
            if not arrival.left:
                self._arrivals.popleft()
        return messages

    def take_batch(self) -> Arrival:
        """Take the messages of the next batch that were not taken yet, as one batch."""
        arrival = self._arrivals.popleft()
        if not arrival.taken:
            return arrival
        return arrival.piece(arrival.records.base + arrival.taken, arrival.records.end)

    def drop(self, first: int, end: float = math.inf) -> None:
        """Drop the messages with the offsets from `first` up to `end`."""
        arrivals, self._arrivals = self._arrivals, deque()
        for arrival in arrivals:
            low, high = arrival.records.base + arrival.taken, arrival.records.end
            if high <= first or low >= end:
                self._arrivals.append(arrival)
                continue
            if low < first:
                self._arrivals.append(arrival.piece(low, first))
            if end < high:
                self._arrivals.append(arrival.piece(int(end), high))

    def drop_until(self, epoch: int) -> None:
        """Drop the batches of this epoch and of earlier ones."""
        self._arrivals = deque(arrival for arrival in self._arrivals if arrival.epoch > epoch)
