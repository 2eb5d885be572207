"""A subscription: messages as they come, and what is said of them.

Rules:

1. Acks of one turn of the event loop travel together, as ranges. `ack` and `nack` never wait; `await flush()` waits
   until the node has them on disk.
2. When the connection is lost the subscription is made anew, by the client. Messages that were not acked come again,
   with a higher delivery number; acks of before are stale, and the node passes over them. One without a group goes on
   behind the last message it gave, or where it began, of the same stream: if that was deleted and made anew meanwhile,
   it ends with `STREAM_REPLACED`. What has come and was not given is dropped: it comes again.
   So is it when its master is none any more: it is made anew as soon as there is another one.
3. Without a group a message is acked when the next one is asked for; with `records`, a whole batch. `ack` means nothing
   there. A nack counts until then: the message comes again, as long as the connection lasts, and the position stays
   where it is. `flush` raises if the connection was lost before it came.
4. What comes behind a message that was nacked or kept too long, in an exclusive group, is recalled by the node and
   comes again after it, in a later epoch: what is here of it is dropped.
5. A nack with `block` blocks this subscription, too: what has come already is given when the delay is over.
6. A subscription that the node ends (its tracked ID was taken over, its stream or group was deleted) raises
   `SubscriptionLostError` at once, from every call: messages that were prefetched are dropped, because they are not
   this consumer's any more.
7. A stream whose log is damaged ends with `StreamDamagedError` when all before the damage was given. The subscription
   stays: what a group has delivered may still be acked.
8. `flush` raises if an ack or a nack that was said since the last one did not count, was refused, or may have been lost
   with the connection: once, and then it is about what is said from there on. One that was refused (`REFUSED`) changes
   nothing: its messages are still this consumer's. In an exclusive group the subscription is made anew then, because
   what came behind a message that was to be nacked has been dropped here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import uuid4

from railgun.client.checks import MAX_OFFSET, check_nack, check_timeout, check_whole
from railgun.client.errors import DAMAGED, StreamDamagedError, StreamsError, SubscriptionLostError
from railgun.client.message import Arrival, Buffer, Message
from railgun.transport.error_codes import resent
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import Records, split

if TYPE_CHECKING:
    from railgun.client.client import Client

Start = Literal["start", "end"]
TRACKED: Final = "@"
"""Before the ID of a tracked consumer, in the name of its group."""
Ack = tuple[int, int, int, int]
"""First offset, the one after the last, delivery, epoch."""
PASSED_OVER = ("ACK_STALE", "NO_SUBSCRIPTION")
"""What a node says of messages that are not ours any more."""
REFUSED = ("BAD_DELAY", "BAD_RANGE")
"""What a node says of an ack or a nack that cannot be: nothing has changed."""


class Subscription:
    """Messages of one stream: an async iterator. Made by `Client.subscribe`; `async with` ends it."""

    message = Message

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
        identity: str = "",
    ) -> None:
        self.client = client
        self.face: Any = self
        """What messages are acked by: this, or who stands before it for another thread."""
        self.channel = channel
        self.stream = stream
        self.group = group
        self.consumer = group.removeprefix(TRACKED) if group.startswith(TRACKED) else ""
        """Of a tracked consumer: its ID. It is the only member of the group `@ID`."""
        self._token = uuid4().hex if self.consumer else ""
        self.persistent = True
        self.offset = 0
        """Where it began."""
        self.why = ""
        self.identity = identity
        """Of the stream: one that is deleted and made anew has another. Positions are of one stream; empty: any."""
        self.missed = 0
        """Messages that were deleted before they could be delivered."""
        self.lost = 0
        """Messages of an ephemeral stream that this consumer was too slow for."""
        self._asked = (exclusive, start, prefetch, matcher, ack_wait)
        self._life = 0  # how often it was made
        self._messages = Buffer()
        self._arrived = asyncio.Event()
        self._acks: list[Ack] = []
        self._flushing = False
        self._sent = self._safe = 0  # how often acks were sent, and of these are on disk
        self._doubt = StreamsError("ACK_STALE", "")  # what became of acks that did not count
        self._doubts = self._known = 0  # how often that was, and how often it was told
        self._error: StreamsError | None = None
        self.forfeits = 0
        """How often messages of a group that were taken, or could have been, became another consumer's."""
        self._next = -1  # the offset behind the last message that was given
        self._recalled = -1  # messages of this epoch and before will come again
        self._given = 0  # ephemeral: since credit was granted
        self._pending: list[Ack] = []  # without a group: of what was given last
        self._owed: set[int] = set()  # without a group: what was nacked, and has not come again
        self._blocked_until = 0.0  # no message is given before, by the clock of the event loop
        self.closed = False
        self.trouble = ""
        """Why nothing comes now: the node is gone, or nobody serves the stream. Empty: nothing stands against it."""

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
        if self.consumer:
            asked.token, asked.again = self._token, bool(self._life)
        if matcher is not None:
            asked.matcher, asked.has_matcher = matcher, True
        if not self.group and self._next >= 0:
            asked.start, asked.offset, asked.identity = p.OFFSET, self._next, self.identity
        elif isinstance(start, int):
            if not self._life:  # only once: the group has its position after that
                asked.start, asked.offset = p.OFFSET, start
                asked.identity = "" if self.group else self.identity
        else:
            asked.start = p.END if start == "end" else p.BEGINNING
        return asked

    def began(self, answer: p.Subscribed) -> None:
        """The node has answered."""
        if not self._life:
            self.offset, self.why = answer.offset, answer.why
            if answer.persistent and not self.group:
                self._next = answer.offset
        self.identity = answer.identity or self.identity
        self._life += 1
        self.persistent = answer.persistent
        self._messages.clear()
        self._acks.clear()
        self._given = 0
        self._recalled = -1
        self._pending = []
        self.trouble = ""
        if self.group:
            self._blocked_until = 0.0  # what was here is gone, and the node knows of the block

    def cut_off(self, error: StreamsError) -> None:
        """The connection is lost."""
        self.trouble = str(error)
        if isinstance(self._error, StreamDamagedError):
            self._error = (
                None  # it is made again, and what was not given comes again before the damage
            )
        if self.persistent:
            self._messages.clear()
            self.forfeits += bool(self.group)
        if self._owed or (self.group and (self._acks or self._sent > self._safe)):
            self._doubted(error)
        self._owed.clear()
        self._acks.clear()
        self._safe = self._sent

    def _doubted(self, error: StreamsError) -> None:
        self._doubt = error
        self._doubts += 1

    def _refused(self, error: StreamsError) -> None:
        """Take note of an ack or nack that the node refused: it blocks nothing, and `flush` is to raise `error`."""
        self._doubted(error)
        self._blocked_until = 0.0
        self._arrived.set()
        if self._asked[0]:
            self._messages.clear()
            self.forfeits += 1
            self.client.renew(self)

    def delivered(self, command: p.Deliver, blob: bytearray | memoryview) -> None:
        """Messages have come."""
        messages, epoch = self._messages, command.epoch
        if not self.persistent:
            for batch in split(blob):
                told = Arrival(self, batch, 1, self._life, command.topic, command.response)
                messages.add(told)
        elif epoch <= self._recalled:
            return
        else:
            if self._asked[0] and messages.last_epoch < epoch:
                messages.drop(command.ranges[0].first)
            ranges = iter(command.ranges)
            left = delivery = 0  # each batch belongs to one range
            for batch in split(blob):
                if not left:
                    told_range = next(ranges)
                    left, delivery = told_range.count, told_range.delivery
                arrival = Arrival(self, batch, delivery, epoch)
                left -= arrival.left
                messages.add(arrival)
        self._arrived.set()

    def told(self, command: Any) -> None:
        """Something else about it has come."""
        match command:
            case p.Missed():
                self.missed += command.end - command.first
            case p.Recalled():
                self._messages.drop(command.first, command.end)
            case p.Lost():
                self.lost += command.count
            case p.Failed() if command.code in PASSED_OVER:
                self._doubted(StreamsError(command.code, command.text))
            case p.Failed() if command.code in REFUSED:
                self._refused(StreamsError(command.code, command.text))
            case p.Failed() if command.request:
                pass
            case p.Failed() if resent(command.code):
                self.send_acks()  # its master may take them still
                self.cut_off(StreamsError(command.code, command.text))
                self.client.renew(self)
            case p.Failed() if command.code == DAMAGED:
                self._error = StreamDamagedError(command.text)
                self._arrived.set()
            case p.Failed():
                self.failed(StreamsError(command.code, command.text))

    @property
    def over(self) -> bool:
        """Whether it was closed or has failed, and is not to be made again."""
        return self.closed or self._error is not None

    def ended(self) -> None:
        """Nothing more comes."""
        self.closed = True
        self._arrived.set()

    def failed(self, error: StreamsError) -> None:
        """End with `SubscriptionLostError`: the node has ended it, or does not make it again, for this reason."""
        self._error = SubscriptionLostError(error.code, error.text)
        self._messages.clear()
        self.forfeits += 1
        self._arrived.set()

    # ------------------------------------------------------------ messages

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        return (await self._take(1))[0]

    async def _take(self, most: int) -> list[Message]:
        await self._some()
        found = self._messages.take(most)
        if not self.persistent:
            self._grant(len(found))
        elif not self.group:
            self._owed.difference_update(message.offset for message in found if self._owed)
            self._pending = _acks(found)
            self._next = max(self._next, *(end for _, end, *_ in self._pending))
        return found

    async def _some(self) -> None:
        """Wait until there are messages."""
        if self._pending:
            self._said(self._pending)
            self._pending = []
        while not self._messages or self._blocked:
            if self._error is not None:
                raise self._error
            if self.closed:
                raise StopAsyncIteration
            self._arrived.clear()
            blocked_s = self._blocked_until - self.client.loop.time() if self._blocked else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(blocked_s):
                    await self._arrived.wait()

    @property
    def _blocked(self) -> bool:
        """Whether a nack of this subscription blocks it."""
        return bool(self._blocked_until) and self._blocked_until > self.client.loop.time()

    async def next(self, timeout: float | None = None) -> Message:
        """The next message; `TimeoutError` if none comes in time."""
        return (await self.batch(1, timeout))[0]

    async def batch(self, most: int = 1000, timeout: float | None = None) -> list[Message]:
        """The messages that are there, at least one; `TimeoutError` if none comes in time."""
        check_whole("most", most, 1, MAX_OFFSET)
        check_timeout(timeout)
        if timeout is None or (self._messages and not self._blocked):
            return await self._take(most)
        async with asyncio.timeout(timeout):
            return await self._take(most)

    async def records(self, timeout: float | None = None) -> Records:
        """The next batch as it lies on disk: columns of many messages, and no object for each.

        For a subscription without a group: `position` is where it stands behind this batch.
        """
        check_timeout(timeout)
        if self.group or not self.persistent:
            raise StreamsError(
                "NOT_A_READER",
                "records are for a subscription of a persistent stream, without group",
            )
        async with asyncio.timeout(timeout):
            await self._some()
        taken = self._messages.take_batch()
        records = taken.records
        self._owed.difference_update(range(records.base, records.end) if self._owed else ())
        self._next = max(self._next, records.end)
        self._pending = [(records.base, records.end, taken.delivery, taken.epoch)]
        return records

    @property
    def position(self) -> int:
        """Without a group: the offset of the next message."""
        return self._next

    def _grant(self, count: int) -> None:
        """Let as many come as have been taken, half a window at a time."""
        self._given += count
        prefetch = self._asked[2]
        if self._given * 2 >= prefetch:
            self.client.send(p.Grant(credit=self._given), (), self.channel)
            self._given = 0

    # ------------------------------------------------------------ what is said of them

    def ack(self, message: Message) -> None:
        """It is done; without a group this means nothing."""
        self.check_acks()
        if not self.group:
            return
        if self._asked[0]:
            message.arrival.acked.add(message.row)
        offset = message.offset
        self._said([(offset, offset + 1, message.delivery, message.epoch)])

    def ack_all(self, messages: Sequence[Message]) -> None:
        """They are done; without a group this means nothing."""
        self.check_acks()
        if not self.group:
            return
        if self._asked[0]:
            for message in messages:
                message.arrival.acked.add(message.row)
        self._said(_acks(messages))

    def _said(self, acks: list[Ack]) -> None:
        self._acks += acks
        if not self._flushing:
            self._flushing = True
            self.client.loop.call_soon(self._flush)

    def nack(self, message: Message, delay: float, reason: str, *, block: bool = False) -> None:
        """Let a message come again after `delay` seconds; `block`: nothing else comes before."""
        self.check_acks()
        check_nack(delay, reason, block)
        ranges = [p.Range(first=message.offset, count=1, delivery=message.delivery)]
        told = p.Nack(
            ranges=ranges,
            epoch=message.epoch,
            delay=math.ceil(delay * 1e6),  # never none
            reason=reason,
            block=block,
        )
        self.send_acks()  # those that were said before count before
        if self.client.connected:
            self._sent += 1
            self.client.send(told, (), self.channel)
            if not self.group:
                self._pending = _without(self._pending, message.offset)
                self._owed.add(message.offset)
        else:
            self._doubted(StreamsError("CONNECTION_LOST", "there was no node to be told"))
        if block:
            self._blocked_until = max(self._blocked_until, self.client.loop.time() + delay)
        if self._asked[0] and message.row not in message.arrival.acked:  # else it is stale
            self._recalled = max(self._recalled, message.epoch)
            self._messages.drop_until(self._recalled)

    def in_progress(self, message: Message) -> None:
        """It is being worked on."""
        self.check_acks()
        ranges = [p.Range(first=message.offset, count=1, delivery=message.delivery)]
        self.client.send(p.InProgress(ranges=ranges, epoch=message.epoch), (), self.channel)

    def check_acks(self) -> None:
        """Refuse acks of messages that have none."""
        if not self.persistent:
            raise StreamsError("NO_ACKS", "messages of an ephemeral stream are not acked")

    def send_acks(self) -> None:
        """Send what was said, now: the node is about to end it, or to end."""
        if self._acks:
            self._flush()

    def _flush(self, request: int = 0) -> None:
        self._flushing = False
        acks, self._acks = self._acks, []
        if acks and not self.client.connected:
            self._doubted(StreamsError("CONNECTION_LOST", "there was no node to be told"))
            acks = []
        self._sent += bool(acks)
        by_epoch: dict[int, list[tuple[int, int, int]]] = {}
        for first, end, delivery, epoch in acks:
            by_epoch.setdefault(epoch, []).append((first, end, delivery))
        if not by_epoch and request:
            by_epoch[0] = []
        for left, (epoch, some) in enumerate(by_epoch.items(), 1 - len(by_epoch)):
            told = p.Ack(ranges=_ranges(some), epoch=epoch)
            if not left:  # the last one: when it is answered, so are all
                told.request = request
            self.client.send(told, (), self.channel)

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until the node has all acks and nacks on disk.

        Raises `StreamsError` if some of them did not count and may come again (`ACK_STALE`, `CONNECTION_LOST`), or
        were refused (`BAD_DELAY`); `SubscriptionLostError` if the node has ended the subscription.
        """
        check_timeout(timeout)
        if isinstance(self._error, SubscriptionLostError):
            raise self._error
        known, sent = self._known, self._safe

        def send(number: int) -> None:
            nonlocal sent
            self._flush(number)
            sent = self._sent

        try:
            await self.client.ask(send, timeout)
        except StreamsError as error:
            if error.code != "DEADLINE":  # so it is told
                self._known, self._safe = self._doubts, max(self._safe, sent)
            if isinstance(self._error, SubscriptionLostError):
                raise self._error from error
            raise
        self._safe = max(self._safe, sent)
        if isinstance(self._error, SubscriptionLostError):
            raise self._error
        if self._doubts > known:
            self._known = self._doubts
            raise self._doubt

    async def close(self) -> None:
        """No more; what was not acked goes to others, and does not count as delivered."""
        if not self.closed:
            self.send_acks()
            self.ended()
            await self.client.unsubscribe(self)

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _acks(messages: Sequence[Message]) -> list[Ack]:
    """Of messages, as few as may be where they are as they came."""
    acks: list[Ack] = []
    for arrival, some in groupby(messages, attrgetter("arrival")):
        base, delivery, epoch = arrival.records.base, arrival.delivery, arrival.epoch
        rows = [message.row for message in some]
        first, end = rows[0], rows[-1] + 1
        if rows == list(range(first, end)):
            acks.append((base + first, base + end, delivery, epoch))
        else:
            acks += [(base + row, base + row + 1, delivery, epoch) for row in rows]
    return acks


def _without(acks: list[Ack], offset: int) -> list[Ack]:
    """Return acks without that of one message.

    >>> _without([(0, 3, 1, 0), (3, 5, 1, 0)], 3)
    [(0, 3, 1, 0), (4, 5, 1, 0)]
    """
    parts = [((a, min(b, offset), n, e), (max(a, offset + 1), b, n, e)) for a, b, n, e in acks]
    return [part for pair in parts for part in pair if part[0] < part[1]]


def _ranges(acks: list[tuple[int, int, int]]) -> list[p.Range]:
    """Ranges with delivery numbers, as few as may be.

    >>> [(r.first, r.count) for r in _ranges([(5, 6, 1), (0, 5, 1), (8, 9, 1), (9, 10, 2)])]
    [(0, 6), (8, 1), (9, 1)]
    """
    found: list[p.Range] = []
    for first, end, delivery in sorted(acks):
        last = found[-1] if found else None
        if last is not None and last.first + last.count == first and last.delivery == delivery:
            last.count += end - first
        else:
            found.append(p.Range(first=first, count=end - first, delivery=delivery))
    return found
