"""What a consumer gets: messages, which come in batches and are made of them when they are asked for."""

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
    """A batch as it came: what its messages have in common, and how far it was taken."""

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
        """How many messages of it were not taken yet."""
        return self.records.count - self.taken

    def take(self, most: int) -> list[Message]:
        """The next messages of it."""
        if self._payloads is None:
            self._payloads = self.records.payloads()
        first, self.taken = self.taken, min(self.records.count, self.taken + most)
        made = self.subscription.face.message
        if most == 1:
            return [made(self, first, self._payloads[first])]
        rows = range(first, self.taken)
        return list(map(made, repeat(self), rows, self._payloads[first : self.taken]))

    def piece(self, first: int, end: int) -> Arrival:
        """The part of it with these offsets."""
        batch = memoryview(cut(self.batch, first, end))
        return Arrival(
            self.subscription, batch, self.delivery, self.epoch, arrived_s=self.arrived_s
        )


class Message:
    """One message."""

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
        """Where it came from."""
        return self.arrival.subscription.face

    @property
    def offset(self) -> int:
        """Its place in the stream; 0 in an ephemeral one, which has none."""
        arrival = self.arrival
        return arrival.records.base + self.row if arrival.subscription.persistent else 0

    @property
    def time(self) -> int:
        """When it was stored, in microseconds since 1970; 0 in an ephemeral stream."""
        return self.arrival.records.time if self.arrival.subscription.persistent else 0

    @property
    def arrived_s(self) -> float:
        """When it came to this client, in seconds of `time.monotonic`; it may have waited here to be taken since."""
        return self.arrival.arrived_s

    @property
    def delivery(self) -> int:
        """How often it has been delivered, this time included."""
        return self.arrival.delivery

    @property
    def epoch(self) -> int:
        """The epoch of the group, or which life of the subscription it came in."""
        return self.arrival.epoch

    @property
    def id(self) -> bytes | None:
        """Its ID, if it was given one."""
        return self.arrival.records.id(self.row)

    @property
    def topic(self) -> str:
        """Of an ephemeral stream: what it is about."""
        return self.arrival.topic

    @property
    def response(self) -> str:
        """Of a request: where the answer goes."""
        return self.arrival.response

    @property
    def headers(self) -> dict[str, str]:
        """What was given with it."""
        found = self.arrival.records.headers(self.row)
        return dict(json.loads(found)) if found else {}

    @property
    def text(self) -> str:
        """The payload as text."""
        return self.payload.decode()

    def json(self) -> Any:
        """What the payload says, which is JSON."""
        return from_json(self.payload)

    def msgpack(self) -> Any:
        """What the payload says, which is MessagePack."""
        return from_msgpack(self.payload)

    def arrow(self) -> pyarrow.Table:
        """The table in the payload, which is an Arrow stream."""
        return from_arrow(self.payload)

    def ack(self) -> None:
        """It is done. The node hears of it soon."""
        self.subscription.ack(self)

    def nack(self, delay: float = 0.0, reason: str = "", *, block: bool = False) -> None:
        """Let the message come again after `delay` seconds, to whoever is free.

        The delay holds back this message for this group, and nothing else. `block=True` blocks the group (or the
        consumer without one): nothing is delivered to it until the delay is over. An exclusive group always is
        blocked, so that its order is kept. Raises `StreamsError` (`BAD_DELAY`) for `block` without a delay.
        """
        check_nack(delay, reason, block)
        if block and not delay > 0:
            raise StreamsError("BAD_DELAY", "a nack that blocks needs a delay: for how long?")
        self.subscription.nack(self, delay, reason, block=block)

    def in_progress(self) -> None:
        """It takes longer: `ack_wait` begins anew."""
        self.subscription.in_progress(self)

    async def respond(self, payload: bytes | str, *, confirm: bool = True) -> None:
        """Answer a request."""
        await self.subscription.client.respond(self.response, payload, confirm=confirm)


class Buffer:
    """What has come and was not taken yet, in order."""

    def __init__(self) -> None:
        self._arrivals: deque[Arrival] = deque()

    def __bool__(self) -> bool:
        return bool(self._arrivals)

    @property
    def last_epoch(self) -> float:
        """Of what came last; larger than any if there is nothing."""
        return self._arrivals[-1].epoch if self._arrivals else math.inf

    def add(self, arrival: Arrival) -> None:
        """One more batch."""
        self._arrivals.append(arrival)

    def clear(self) -> None:
        """Nothing."""
        self._arrivals.clear()

    def take(self, most: int) -> list[Message]:
        """The next messages, at most so many, at least one if there is one."""
        found: list[Message] = []
        while self._arrivals and len(found) < most:
            arrival = self._arrivals[0]
            found += arrival.take(most - len(found))
            if not arrival.left:
                self._arrivals.popleft()
        return found

    def take_batch(self) -> Arrival:
        """What is left of the next batch."""
        arrival = self._arrivals.popleft()
        if not arrival.taken:
            return arrival
        return arrival.piece(arrival.records.base + arrival.taken, arrival.records.end)

    def drop(self, first: int, end: float = math.inf) -> None:
        """Forget the messages of these offsets."""
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
        """Forget what came in this epoch or before."""
        self._arrivals = deque(one for one in self._arrivals if one.epoch > epoch)
