"""A subscription of the client: receive the messages of a stream, and acknowledge or refuse them.

Rules:

1. Acks of one turn of the event loop are sent together, as ranges. `ack` and `nack` never wait; `await flush()` waits
   until the node has them on disk.
2. When the connection is lost, the client subscribes again. Messages that were not acked are redelivered with a higher
   delivery number; earlier acks are stale, and the node ignores them. A subscription without a group continues behind
   the last message it returned, or where it began, in the same stream: if that was deleted and created anew meanwhile,
   the subscription ends with `STREAM_REPLACED`. Messages that arrived and were not returned are dropped: they are
   delivered again. The same holds when the stream's master steps down: the client subscribes again as soon as there is
   another master.
3. Without a group a message is acked when the next message is requested; with `records`, a whole batch. `ack` does
   nothing there. A nack is possible until then: the message is redelivered as long as the connection lasts, and the
   position does not move. `flush` raises if the connection was lost before the redelivery.
4. In an exclusive group the node recalls the messages behind a message that was nacked or kept too long, and delivers
   them after it, in a later epoch: those that are buffered here are dropped.
5. A nack with `block` blocks this subscription too: messages that have already arrived are returned after the delay.
6. A subscription that the node ends (its tracked ID was taken over, its stream or group was deleted) raises
   `SubscriptionLostError` at once, from every call. Prefetched messages are dropped, because they are no longer this
   consumer's.
7. A stream whose log is damaged ends with `StreamDamagedError` after all messages before the damage. The subscription
   remains: messages that a group has delivered may still be acked.
8. `flush` raises if an ack or a nack since the last `flush` did not count, was refused, or may have been lost with the
   connection. It raises once; the next `flush` is about later acks and nacks. A refused one (`REFUSED_CODES`) changes
   nothing: its messages are still this consumer's. In an exclusive group the client then subscribes again, because the
   messages behind the nacked one have been dropped here.
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
"""The prefix of the name of a tracked consumer's group; the consumer's ID follows."""
Ack = tuple[int, int, int, int]
"""First offset, end offset (exclusive), delivery, epoch."""
STALE_CODES = ("ACK_STALE", "NO_SUBSCRIPTION")
"""Codes of acks for messages that are no longer this consumer's."""
REFUSED_CODES = ("BAD_DELAY", "BAD_RANGE")
"""Codes of acks and nacks that are invalid: nothing has changed."""


class Subscription:
    """An async iterator over the messages of one stream. `Client.subscribe` returns it; `async with` ends it."""

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
        self.facade: Any = self
        """The object whose methods messages call: this one, or the `SyncSubscription` around it."""
        self.channel = channel
        self.stream = stream
        self.group = group
        self.consumer = group.removeprefix(TRACKED) if group.startswith(TRACKED) else ""
        """The ID of a tracked consumer, the only member of the group `@ID`; else empty."""
        self._token = uuid4().hex if self.consumer else ""
        self.persistent = True
        self.offset = 0
        """The offset at which the subscription began."""
        self.why = ""
        """Why the subscription began at that offset, as the node says."""
        self.identity = identity
        """Identity of the stream that positions refer to: a stream deleted and created anew has another. Empty: any."""
        self.missed = 0
        """Number of messages that were deleted before they could be delivered."""
        self.lost = 0
        """Number of messages of an ephemeral stream that were dropped because this consumer was too slow."""
        self._settings = (exclusive, start, prefetch, matcher, ack_wait)
        self._life = 0  # how often the node has accepted this subscription
        self._messages = Buffer()
        self._arrived = asyncio.Event()
        self._acks: list[Ack] = []
        self._flushing = False
        self._sent = self._safe = 0  # how often acks were sent, and how many of these are on disk
        self._doubt = StreamsError("ACK_STALE", "")  # why the last acks did not count
        self._doubts = self._reported = (
            0  # how often acks did not count, and how often `flush` raised it
        )
        self._error: StreamsError | None = None
        self.forfeits = 0
        """How often this consumer lost messages of a group, taken or buffered, to other consumers."""
        self._next = -1  # the offset behind the last message that was returned
        self._recalled = -1  # messages of this epoch and earlier ones will be delivered again
        self._ungranted = 0  # ephemeral: messages taken since credit was granted
        self._pending: list[Ack] = []  # without a group: acks of the messages returned last
        self._owed: set[int] = set()  # without a group: offsets nacked and not redelivered yet
        self._blocked_until = 0.0  # no message is returned before this time of the event loop
        self.closed = False
        self.trouble = ""
        """Why no messages can come now: the node is gone, or no node serves the stream. Empty: nothing is wrong."""

    # ------------------------------------------------------------ the connection

    def request(self, number: int) -> p.Subscribe:
        """Return the command that subscribes, for the first time or after a reconnect."""
        exclusive, start, prefetch, matcher, ack_wait = self._settings
        command = p.Subscribe(
            request=number,
            stream=self.stream,
            group=self.group,
            exclusive=exclusive,
            credit=prefetch,
            ack_wait=int(ack_wait * 1e6),
        )
        if self.consumer:
            command.token, command.again = self._token, bool(self._life)
        if matcher is not None:
            command.matcher, command.has_matcher = matcher, True
        if not self.group and self._next >= 0:
            command.start, command.offset, command.identity = p.OFFSET, self._next, self.identity
        elif isinstance(start, int):
            if not self._life:  # only once: the group has its position after that
                command.start, command.offset = p.OFFSET, start
                command.identity = "" if self.group else self.identity
        else:
            command.start = p.END if start == "end" else p.BEGINNING
        return command

    def began(self, answer: p.Subscribed) -> None:
        """Take the node's answer: the subscription exists, and buffered messages are dropped."""
        if not self._life:
            self.offset, self.why = answer.offset, answer.why
            if answer.persistent and not self.group:
                self._next = answer.offset
        self.identity = answer.identity or self.identity
        self._life += 1
        self.persistent = answer.persistent
        self._messages.clear()
        self._acks.clear()
        self._ungranted = 0
        self._recalled = -1
        self._pending = []
        self.trouble = ""
        if self.group:
            self._blocked_until = 0.0  # the buffer is empty, and the node keeps the block itself

    def cut_off(self, error: StreamsError) -> None:
        """Handle the loss of the connection, or of the stream's master."""
        self.trouble = str(error)
        if isinstance(self._error, StreamDamagedError):
            self._error = None  # the client subscribes again, and messages before the damage are delivered again
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
        """Record that the node refused an ack or nack: the block it asked for ends, and `flush` will raise `error`."""
        self._doubted(error)
        self._blocked_until = 0.0
        self._arrived.set()
        if self._settings[0]:
            self._messages.clear()
            self.forfeits += 1
            self.client.renew(self)

    def delivered(self, command: p.Deliver, blob: bytearray | memoryview) -> None:
        """Buffer messages that have arrived."""
        messages, epoch = self._messages, command.epoch
        if not self.persistent:
            for batch in split(blob):
                arrival = Arrival(self, batch, 1, self._life, command.topic, command.response)
                messages.add(arrival)
        elif epoch <= self._recalled:
            return
        else:
            if self._settings[0] and messages.last_epoch < epoch:
                messages.drop(command.ranges[0].first)
            ranges = iter(command.ranges)
            left = delivery = 0  # each batch belongs to one range
            for batch in split(blob):
                if not left:
                    delivered_range = next(ranges)
                    left, delivery = delivered_range.count, delivered_range.delivery
                arrival = Arrival(self, batch, delivery, epoch)
                left -= arrival.left
                messages.add(arrival)
        self._arrived.set()

    def handle(self, command: Any) -> None:
        """Handle a command of the node about this subscription that carries no messages."""
        match command:
            case p.Missed():
                self.missed += command.end - command.first
            case p.Recalled():
                self._messages.drop(command.first, command.end)
            case p.Lost():
                self.lost += command.count
            case p.Failed() if command.code in STALE_CODES:
                self._doubted(StreamsError(command.code, command.text))
            case p.Failed() if command.code in REFUSED_CODES:
                self._refused(StreamsError(command.code, command.text))
            case p.Failed() if command.request:
                pass
            case p.Failed() if resent(command.code):
                self.send_acks()  # the old master may still accept them
                self.cut_off(StreamsError(command.code, command.text))
                self.client.renew(self)
            case p.Failed() if command.code == DAMAGED:
                self._error = StreamDamagedError(command.text)
                self._arrived.set()
            case p.Failed():
                self.failed(StreamsError(command.code, command.text))

    @property
    def over(self) -> bool:
        """Whether the subscription was closed or has failed, and the client must not subscribe again."""
        return self.closed or self._error is not None

    def ended(self) -> None:
        """Mark the subscription as closed, and wake a reader that waits for messages."""
        self.closed = True
        self._arrived.set()

    def failed(self, error: StreamsError) -> None:
        """End with `SubscriptionLostError` because of `error`: the node has ended or refused the subscription."""
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
        await self._wait_for_messages()
        messages = self._messages.take(most)
        if not self.persistent:
            self._grant(len(messages))
        elif not self.group:
            self._owed.difference_update(message.offset for message in messages if self._owed)
            self._pending = _acks(messages)
            self._next = max(self._next, *(end for _, end, *_ in self._pending))
        return messages

    async def _wait_for_messages(self) -> None:
        """Ack the messages returned last, if there is no group; then wait until there are messages to return."""
        if self._pending:
            self._queue_acks(self._pending)
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
        """Whether a nack of this subscription blocks it now."""
        return bool(self._blocked_until) and self._blocked_until > self.client.loop.time()

    async def next(self, timeout: float | None = None) -> Message:
        """Return the next message; raise `TimeoutError` if none arrives within `timeout` seconds."""
        return (await self.batch(1, timeout))[0]

    async def batch(self, most: int = 1000, timeout: float | None = None) -> list[Message]:
        """Return the messages that have arrived, from one up to `most`.

        Raises `TimeoutError` if none arrives within `timeout` seconds.
        """
        check_whole("most", most, 1, MAX_OFFSET)
        check_timeout(timeout)
        if timeout is None or (self._messages and not self._blocked):
            return await self._take(most)
        async with asyncio.timeout(timeout):
            return await self._take(most)

    async def records(self, timeout: float | None = None) -> Records:
        """Return the next batch as it is stored: columns of many messages, without an object for each.

        Only for a persistent stream and a subscription without a group (else `NOT_A_READER`). `position` is then the
        offset behind the batch. Raises `TimeoutError` if no batch arrives within `timeout` seconds.
        """
        check_timeout(timeout)
        if self.group or not self.persistent:
            raise StreamsError(
                "NOT_A_READER",
                "records are for a subscription of a persistent stream, without group",
            )
        async with asyncio.timeout(timeout):
            await self._wait_for_messages()
        taken = self._messages.take_batch()
        records = taken.records
        self._owed.difference_update(range(records.base, records.end) if self._owed else ())
        self._next = max(self._next, records.end)
        self._pending = [(records.base, records.end, taken.delivery, taken.epoch)]
        return records

    @property
    def position(self) -> int:
        """The offset of the next message, of a subscription without a group."""
        return self._next

    def _grant(self, count: int) -> None:
        """Grant credit for as many messages as have been taken, once that is half of the prefetch."""
        self._ungranted += count
        prefetch = self._settings[2]
        if self._ungranted * 2 >= prefetch:
            self.client.send(p.Grant(credit=self._ungranted), (), self.channel)
            self._ungranted = 0

    # ------------------------------------------------------------ acks and nacks

    def ack(self, message: Message) -> None:
        """Acknowledge a message: it is done. Without a group this does nothing."""
        self.check_acks()
        if not self.group:
            return
        if self._settings[0]:
            message.arrival.acked.add(message.row)
        offset = message.offset
        self._queue_acks([(offset, offset + 1, message.delivery, message.epoch)])

    def ack_all(self, messages: Sequence[Message]) -> None:
        """Acknowledge messages: they are done. Without a group this does nothing."""
        self.check_acks()
        if not self.group:
            return
        if self._settings[0]:
            for message in messages:
                message.arrival.acked.add(message.row)
        self._queue_acks(_acks(messages))

    def _queue_acks(self, acks: list[Ack]) -> None:
        self._acks += acks
        if not self._flushing:
            self._flushing = True
            self.client.loop.call_soon(self._flush)

    def nack(self, message: Message, delay: float, reason: str, *, block: bool = False) -> None:
        """Refuse a message: have it redelivered after `delay` seconds; `block`: nothing else is delivered before.

        `reason` is recorded in the dead letter, if the message becomes one.
        """
        self.check_acks()
        check_nack(delay, reason, block)
        ranges = [p.Range(first=message.offset, count=1, delivery=message.delivery)]
        command = p.Nack(
            ranges=ranges,
            epoch=message.epoch,
            delay=math.ceil(delay * 1e6),  # a short delay must not become 0
            reason=reason,
            block=block,
        )
        self.send_acks()  # earlier acks must reach the node first
        if self.client.connected:
            self._sent += 1
            self.client.send(command, (), self.channel)
            if not self.group:
                self._pending = _without(self._pending, message.offset)
                self._owed.add(message.offset)
        else:
            self._doubted(
                StreamsError("CONNECTION_LOST", "it was not sent: there was no connection")
            )
        if block:
            self._blocked_until = max(self._blocked_until, self.client.loop.time() + delay)
        if self._settings[0] and message.row not in message.arrival.acked:  # else it is stale
            self._recalled = max(self._recalled, message.epoch)
            self._messages.drop_until(self._recalled)

    def in_progress(self, message: Message) -> None:
        """Tell the node that a message is still being processed: its `ack_wait` starts again."""
        self.check_acks()
        ranges = [p.Range(first=message.offset, count=1, delivery=message.delivery)]
        self.client.send(p.InProgress(ranges=ranges, epoch=message.epoch), (), self.channel)

    def check_acks(self) -> None:
        """Raise `StreamsError` (`NO_ACKS`) if the stream is ephemeral: its messages are not acked."""
        if not self.persistent:
            raise StreamsError("NO_ACKS", "messages of an ephemeral stream are not acked")

    def send_acks(self) -> None:
        """Send queued acks now: the subscription or the node is about to end."""
        if self._acks:
            self._flush()

    def _flush(self, request: int = 0) -> None:
        self._flushing = False
        acks, self._acks = self._acks, []
        if acks and not self.client.connected:
            self._doubted(
                StreamsError("CONNECTION_LOST", "it was not sent: there was no connection")
            )
            acks = []
        self._sent += bool(acks)
        by_epoch: dict[int, list[tuple[int, int, int]]] = {}
        for first, end, delivery, epoch in acks:
            by_epoch.setdefault(epoch, []).append((first, end, delivery))
        if not by_epoch and request:
            by_epoch[0] = []
        for left, (epoch, epoch_acks) in enumerate(by_epoch.items(), 1 - len(by_epoch)):
            command = p.Ack(ranges=_ranges(epoch_acks), epoch=epoch)
            if not left:  # the answer to the last command answers all of them
                command.request = request
            self.client.send(command, (), self.channel)

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until the node has all acks and nacks on disk.

        Raises `StreamsError` if some of them did not count and their messages may be redelivered (`ACK_STALE`,
        `CONNECTION_LOST`), or were refused (`BAD_DELAY`); `SubscriptionLostError` if the node has ended the
        subscription; `DeadlineError` if the node does not answer within `timeout` seconds.
        """
        check_timeout(timeout)
        if isinstance(self._error, SubscriptionLostError):
            raise self._error
        reported, sent = self._reported, self._safe

        def send(number: int) -> None:
            nonlocal sent
            self._flush(number)
            sent = self._sent

        try:
            await self.client.ask(send, timeout)
        except StreamsError as error:
            if error.code != "DEADLINE":  # this error reports all acks that did not count
                self._reported, self._safe = self._doubts, max(self._safe, sent)
            if isinstance(self._error, SubscriptionLostError):
                raise self._error from error
            raise
        self._safe = max(self._safe, sent)
        if isinstance(self._error, SubscriptionLostError):
            raise self._error
        if self._doubts > reported:
            self._reported = self._doubts
            raise self._doubt

    async def close(self) -> None:
        """End the subscription. Messages that were not acked go to other members, and do not count as delivered."""
        if not self.closed:
            self.send_acks()
            self.ended()
            await self.client.unsubscribe(self)

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _acks(messages: Sequence[Message]) -> list[Ack]:
    """Return the acks of messages: a single range for consecutive messages of one batch."""
    acks: list[Ack] = []
    for arrival, members in groupby(messages, attrgetter("arrival")):
        base, delivery, epoch = arrival.records.base, arrival.delivery, arrival.epoch
        rows = [message.row for message in members]
        first, end = rows[0], rows[-1] + 1
        if rows == list(range(first, end)):
            acks.append((base + first, base + end, delivery, epoch))
        else:
            acks += [(base + row, base + row + 1, delivery, epoch) for row in rows]
    return acks


def _without(acks: list[Ack], offset: int) -> list[Ack]:
    """Return `acks` without the message at `offset`.

    >>> _without([(0, 3, 1, 0), (3, 5, 1, 0)], 3)
    [(0, 3, 1, 0), (4, 5, 1, 0)]
    """
    parts = [((a, min(b, offset), n, e), (max(a, offset + 1), b, n, e)) for a, b, n, e in acks]
    return [part for pair in parts for part in pair if part[0] < part[1]]


def _ranges(acks: list[tuple[int, int, int]]) -> list[p.Range]:
    """Return ranges with delivery numbers; adjacent acks of one delivery become one range.

    >>> [(r.first, r.count) for r in _ranges([(5, 6, 1), (0, 5, 1), (8, 9, 1), (9, 10, 2)])]
    [(0, 6), (8, 1), (9, 1)]
    """
    ranges: list[p.Range] = []
    for first, end, delivery in sorted(acks):
        last = ranges[-1] if ranges else None
        if last is not None and last.first + last.count == first and last.delivery == delivery:
            last.count += end - first
        else:
            ranges.append(p.Range(first=first, count=end - first, delivery=delivery))
    return ranges
