"""A subscription: messages as they come, and what is said of them.

Rules:

1. Acks of one turn of the event loop travel together, as ranges. `ack` and `nack` never wait; `await flush()` waits
   until the node has them on disk.
2. When the connection is lost the subscription is made anew, by the client. Messages that were not acked come again,
   with a higher delivery number; acks of before are stale, and the node passes over them. One without a group goes on
   behind the last message it gave, or where it began.
3. Without a group a message is acked when the next one is asked for.
4. What comes behind a message that was nacked or kept too long, in an exclusive group, is recalled by the node and
   comes again after it, in a later epoch: what is here of it is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal

from railgun.client.errors import StreamsError
from railgun.client.message import Message
from railgun.wire.proto import streams_pb2 as p
from railgun.wire.records import Records, split

if TYPE_CHECKING:
    from railgun.client.client import Client

Start = Literal["start", "end"]
PASSED_OVER = ("ACK_STALE", "NO_SUBSCRIPTION")
"""What a node says of messages that are not ours any more."""


class Subscription:
    """Messages of one stream: an async iterator. Made by `Client.subscribe`; `async with` ends it."""

    def __init__(
        self,
        client: Client,
        channel: int,
        stream: str,
        *,
        group: str,
        exclusive: bool,
        start: Start | int,
        prefetch: int,
        matcher: str | None,
        ack_wait: float,
    ) -> None:
        self.client = client
        self.channel = channel
        self.stream = stream
        self.group = group
        self.persistent = True
        self.offset = 0
        """Where it began."""
        self.why = ""
        self.missed = 0
        """Messages that were deleted before they could be delivered."""
        self.lost = 0
        """Messages of an ephemeral stream that this consumer was too slow for."""
        self._asked = (exclusive, start, prefetch, matcher, ack_wait)
        self._life = 0  # how often it was made
        self._messages: deque[Message] = deque()
        self._arrived = asyncio.Event()
        self._acks: list[tuple[int, int, int]] = []  # offset, delivery, epoch
        self._flushing = False
        self._error: Exception | None = None
        self._next = -1  # the offset behind the last message that was given
        self._recalled = -1  # messages of this epoch and before will come again
        self._given = 0  # ephemeral: since credit was granted
        self._pending: Message | None = None
        self.closed = False

    # ------------------------------------------------------------ the connection

    def request(self, number: int) -> p.Subscribe:
        """What to ask the node for, also after a reconnect."""
        exclusive, start, prefetch, matcher, ack_wait = self._asked
        asked = p.Subscribe(
            request=number,
            stream=self.stream,
            group=self.group,
            exclusive=exclusive,
            credit=prefetch,
            ack_wait=int(ack_wait * 1e6),
        )
        if matcher is not None:
            asked.matcher, asked.has_matcher = matcher, True
        if not self.group and self._next >= 0:
            asked.start, asked.offset = p.OFFSET, self._next
        elif isinstance(start, int):
            if not self._life:  # only once: the group has its position after that
                asked.start, asked.offset = p.OFFSET, start
        else:
            asked.start = p.END if start == "end" else p.BEGINNING
        return asked

    def began(self, answer: p.Subscribed) -> None:
        """The node has answered."""
        if not self._life:
            self.offset, self.why = answer.offset, answer.why
            if answer.persistent and not self.group:
                self._next = answer.offset
        self._life += 1
        self.persistent = answer.persistent
        self._messages.clear()
        self._acks.clear()
        self._given = 0
        self._recalled = -1
        self._pending = None

    def delivered(self, command: p.Deliver, blob: bytearray) -> None:
        """Messages have come."""
        messages, epoch = self._messages, command.epoch
        if not self.persistent:
            for batch in split(blob):
                self._add(Records(batch), 1, self._life, command.topic, command.response)
            self._arrived.set()
            return
        if epoch <= self._recalled:
            return
        if self._asked[0] and messages and messages[-1].epoch < epoch:
            lowest = command.ranges[0].first
            while messages and messages[-1].offset >= lowest:
                messages.pop()
        ranges = iter(command.ranges)
        left = delivery = 0  # each batch belongs to one range
        for batch in split(blob):
            records = Records(batch)
            if not left:
                told = next(ranges)
                left, delivery = told.count, told.delivery
            left -= records.count
            self._add(records, delivery, epoch)
        self._arrived.set()

    def _add(
        self, records: Records, delivery: int, epoch: int, topic: str = "", response: str = ""
    ) -> None:
        time, add = (records.time if self.persistent else 0), self._messages.append
        offsets = range(records.base, records.end) if self.persistent else [0] * records.count
        every = zip(offsets, records.payloads(), records.ids(), records.all_headers(), strict=True)
        for offset, payload, found, headers in every:
            add(
                Message(
                    self, payload, offset, delivery, epoch, time, found, headers, topic, response
                )
            )

    def told(self, command: Any) -> None:
        """Something else about it has come."""
        match command:
            case p.Missed():
                self.missed += command.end - command.first
            case p.Recalled():
                first, end = command.first, command.end
                kept = [m for m in self._messages if not first <= m.offset < end]
                self._messages = deque(kept)
            case p.Lost():
                self.lost += command.count
            case p.Failed() if command.code in PASSED_OVER or command.request:
                pass
            case p.Failed():
                self.failed(StreamsError(command.code, command.text))

    def ended(self) -> None:
        """Nothing more comes."""
        self.closed = True
        self._arrived.set()

    def failed(self, error: Exception) -> None:
        """It is over."""
        self._error = error
        self._arrived.set()

    # ------------------------------------------------------------ messages

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        if self._pending is not None:
            self.ack(self._pending)
            self._pending = None
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self.closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        message = self._messages.popleft()
        if not self.persistent:
            self._grant()
        elif not self.group:
            self._next = message.offset + 1
            self._pending = message
        return message

    async def next(self, timeout: float | None = None) -> Message:
        """The next message; `TimeoutError` if none comes in time."""
        if self._messages:
            return await self.__anext__()
        async with asyncio.timeout(timeout):
            return await self.__anext__()

    async def batch(self, most: int = 1000, timeout: float | None = None) -> list[Message]:
        """The messages that are there, at least one."""
        found = [await self.next(timeout)]
        while self._messages and len(found) < most:
            found.append(await self.__anext__())
        return found

    def _grant(self) -> None:
        """Let as many come as have been taken, half a window at a time."""
        self._given += 1
        prefetch = self._asked[2]
        if self._given * 2 >= prefetch:
            self.client.send(p.Grant(credit=self._given), (), self.channel)
            self._given = 0

    # ------------------------------------------------------------ what is said of them

    def ack(self, message: Message) -> None:
        """It is done."""
        self._check()
        self._acks.append((message.offset, message.delivery, message.epoch))
        self._flush_soon()

    def ack_all(self, messages: list[Message]) -> None:
        """They are done."""
        self._check()
        self._acks += [(m.offset, m.delivery, m.epoch) for m in messages]
        self._flush_soon()

    def nack(self, message: Message, delay: float, reason: str) -> None:
        """It is to come again."""
        self._check()
        ranges = [p.Range(first=message.offset, count=1, delivery=message.delivery)]
        told = p.Nack(ranges=ranges, epoch=message.epoch, delay=int(delay * 1e6), reason=reason)
        if self._acks:
            self._flush()  # those that were said before count before
        self.client.send(told, (), self.channel)
        if self._asked[0]:
            self._recalled = max(self._recalled, message.epoch)
            self._messages = deque(m for m in self._messages if m.epoch > self._recalled)

    def in_progress(self, message: Message) -> None:
        """It is being worked on."""
        self._check()
        ranges = [p.Range(first=message.offset, count=1, delivery=message.delivery)]
        self.client.send(p.InProgress(ranges=ranges, epoch=message.epoch), (), self.channel)

    def _check(self) -> None:
        if not self.persistent:
            raise StreamsError("NO_ACKS", "messages of an ephemeral stream are not acked")

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self.client.loop.call_soon(self._flush)

    def _flush(self, request: int = 0) -> None:
        self._flushing = False
        acks, self._acks = self._acks, []
        by_epoch: dict[int, list[tuple[int, int]]] = {}
        for offset, delivery, epoch in acks:
            by_epoch.setdefault(epoch, []).append((offset, delivery))
        if not by_epoch and request:
            by_epoch[0] = []
        for epoch, some in by_epoch.items():
            self.client.send(
                p.Ack(request=request, ranges=_ranges(some), epoch=epoch), (), self.channel
            )

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until the node has all acks on disk."""
        await self.client.ask(self._flush, timeout)

    async def close(self) -> None:
        """No more; what was not acked goes to others, and does not count as delivered."""
        if not self.closed:
            if self._acks:
                self._flush()
            self.ended()
            await self.client.unsubscribe(self)

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _ranges(acks: list[tuple[int, int]]) -> list[p.Range]:
    """Offsets with delivery numbers, as few ranges."""
    found: list[p.Range] = []
    first = end = delivery = -1
    for offset, number in sorted(acks):
        if offset == end and number == delivery:
            end += 1
            continue
        if end > first:
            found.append(p.Range(first=first, count=end - first, delivery=delivery))
        first, end, delivery = offset, offset + 1, number
    if end > first:
        found.append(p.Range(first=first, count=end - first, delivery=delivery))
    return found
