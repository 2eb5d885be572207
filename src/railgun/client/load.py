"""Put load on a node and measure its throughput and latency.

Both `railgun bench streams` and `./run bench streams` measure with these functions.

Rules:

1. A load sends for `seconds`, then waits until the node has answered all that was sent. Messages without an answer do
   not count, and waiting for the last answers is part of the measured time.
2. Messages are made beforehand: only the client and the node are measured.
3. `progress` is called now and then with the number of messages so far.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.client.publisher import Acks
from railgun.client.subscription import Subscription

PREFETCH: Final = 20_000
WINDOW: Final = 10_000  # the most messages of an ephemeral stream that are on their way
RECEIVE_TIMEOUT_S: Final = 30.0  # for the next message of a stream that is not empty
MESSAGES_PER_CHECK: Final = 500  # between two looks at the clock
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a load: messages, and the seconds they took.

    >>> Measured(messages=3_000, seconds=1.5).rate
    2000.0
    """

    messages: int
    seconds: float

    @property
    def rate(self) -> float:
        """Throughput in messages per second."""
        return self.messages / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of calls, in seconds.

    >>> latencies = Latencies([0.004, 0.001, 0.002, 0.003])
    >>> latencies.at(0.5), latencies.at(0.99)
    (0.003, 0.004)
    """

    seconds: Sequence[float]

    def at(self, share: float) -> float:
        """Return the latency that this share of the calls did not exceed: 0.5 is the median."""
        ordered = sorted(self.seconds)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def messages(count: int, size: int) -> list[bytes]:
    """Return `count` random messages of `size` bytes each."""
    return [os.urandom(size) for _ in range(count)]


def _nothing(count: int) -> None:
    pass


# ---------------------------------------------------------------- publishing


async def publish_batches(
    client: Client,
    stream: str,
    payloads: Sequence[bytes],
    seconds: float,
    lanes: int = 8,
    progress: Progress = _nothing,
    acks: Acks = "quorum",
) -> Measured:
    """Publish these messages again and again with `publish_many`, in `lanes` concurrent tasks."""
    clock, count = time.perf_counter, 0
    began = clock()

    async def lane() -> None:
        nonlocal count
        while clock() < began + seconds:
            offsets = await client.publish_many(stream, payloads, acks=acks)
            count += len(
                offsets
            )  # not in one statement with the await: other lanes count meanwhile
            progress(count)

    await _all(lane() for _ in range(lanes))
    return Measured(count, clock() - began)


async def publish_singly(
    client: Client,
    stream: str,
    payload: bytes,
    seconds: float,
    tasks: int = 1_000,
    progress: Progress = _nothing,
) -> Measured:
    """Publish messages one by one in `tasks` concurrent tasks, each of which awaits every `publish`."""
    clock, count = time.perf_counter, 0
    began = clock()

    async def task() -> None:
        nonlocal count
        while clock() < began + seconds:
            await client.publish(stream, payload)
            count += 1
            if not count % MESSAGES_PER_CHECK:
                progress(count)

    await _all(task() for _ in range(tasks))
    return Measured(count, clock() - began)


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines; the first that fails cancels the others."""
    async with asyncio.TaskGroup() as group:
        for coroutine in work:
            group.create_task(coroutine)


# ---------------------------------------------------------------- consuming


async def consume_batches(
    client: Client,
    stream: str,
    group: str,
    most: int,
    seconds: float = RECEIVE_TIMEOUT_S,
    prefetch: int = PREFETCH,
    progress: Progress = _nothing,
) -> Measured:
    """Consume up to about `most` messages as a member of a group, acking whole batches, until the acks are on disk."""
    clock, count = time.perf_counter, 0
    began = clock()
    async with await client.subscribe(stream, group=group, prefetch=prefetch) as subscription:
        while count < most and clock() < began + seconds:
            batch = await subscription.batch(prefetch // 2, RECEIVE_TIMEOUT_S)
            subscription.ack_all(batch)
            count += len(batch)
            progress(count)
        await subscription.flush()
        return Measured(count, clock() - began)


async def consume_singly(
    client: Client,
    stream: str,
    group: str,
    most: int,
    seconds: float = RECEIVE_TIMEOUT_S,
    prefetch: int = PREFETCH,
    progress: Progress = _nothing,
) -> Measured:
    """Consume as `consume_batches` does, but message by message: `async for`, and `ack` of each."""
    clock, count = time.perf_counter, 0
    began = clock()
    async with await client.subscribe(stream, group=group, prefetch=prefetch) as subscription:
        async for message in subscription:
            message.ack()
            count += 1
            if not count % MESSAGES_PER_CHECK:
                progress(count)
                if clock() > began + seconds:
                    break
            if count == most:
                break
        await subscription.flush()
        return Measured(count, clock() - began)


# ---------------------------------------------------------------- ephemeral streams


class _Window:
    """Limit the messages that are on their way from publishers to the subscriber to `WINDOW`."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._room = asyncio.Event()

    async def send(self, count: int) -> None:
        """Wait until `count` more messages may be sent."""
        while self.sent + count - self.received > WINDOW:
            self._room.clear()
            await self._room.wait()
        self.sent += count

    def receive(self, count: int) -> None:
        """Count messages that have arrived."""
        self.received += count
        self._room.set()


async def scatter_batches(
    publisher: Client,
    subscriber: Client,
    stream: str,
    payloads: Sequence[bytes],
    seconds: float,
    lanes: int = 4,
    progress: Progress = _nothing,
) -> Measured:
    """Measure an ephemeral stream: `publisher` calls `publish_many`, and `subscriber` receives batches."""
    clock, window = time.perf_counter, _Window()

    async def lane(until: float) -> None:
        while clock() < until:
            await window.send(len(payloads))
            await publisher.publish_many(stream, payloads)

    async def receive(subscription: Subscription) -> None:
        while True:
            batch = await subscription.batch(WINDOW)
            window.receive(len(batch))
            progress(window.received)

    return await _scatter(subscriber, stream, seconds, window, lane, lanes, receive)


async def scatter_singly(
    publisher: Client,
    subscriber: Client,
    stream: str,
    payload: bytes,
    seconds: float,
    tasks: int = 1_000,
    progress: Progress = _nothing,
) -> Measured:
    """Measure an ephemeral stream message by message: tasks await `publish`, and `async for` receives."""
    clock, window = time.perf_counter, _Window()

    async def task(until: float) -> None:
        while clock() < until:
            await window.send(1)
            await publisher.publish(stream, payload)

    async def receive(subscription: Subscription) -> None:
        async for _ in subscription:
            window.receive(1)
            if not window.received % MESSAGES_PER_CHECK:
                progress(window.received)

    return await _scatter(subscriber, stream, seconds, window, task, tasks, receive)


async def _scatter(
    subscriber: Client,
    stream: str,
    seconds: float,
    window: _Window,
    send: Callable[[float], Coroutine[Any, Any, None]],
    senders: int,
    receive: Callable[[Subscription], Coroutine[Any, Any, None]],
) -> Measured:
    clock = time.perf_counter
    # The prefetch exceeds what may be on its way or not yet granted again: grants and later publishes travel over two
    # connections, and a node may receive the publish first.
    async with await subscriber.subscribe(stream, prefetch=4 * WINDOW) as subscription:
        receiving = asyncio.create_task(receive(subscription))
        began = clock()
        try:
            await _all(send(began + seconds) for _ in range(senders))
            while window.received < window.sent and clock() < began + seconds + RECEIVE_TIMEOUT_S:
                await asyncio.sleep(0.0005)
            took = clock() - began
        finally:
            receiving.cancel()
        if subscription.lost or window.received != window.sent:
            raise StreamsError(
                "LOST", f"{window.sent - window.received:,} of {window.sent:,} did not arrive"
            )
        return Measured(window.received, took)


# ---------------------------------------------------------------- requests


async def respond(client: Client, stream: str, ready: Callable[[], object] = lambda: None) -> None:
    """Answer every request with its own payload, until this task is cancelled."""
    async with await client.subscribe(stream) as subscription:
        ready()
        async for message in subscription:
            await message.respond(message.payload, confirm=False)


async def requests(
    client: Client,
    stream: str,
    payload: bytes,
    seconds: float,
    most: int = 1_000_000,
    progress: Progress = _nothing,
) -> Latencies:
    """Send requests one after the other; return how long each took."""
    clock, latencies_s = time.perf_counter, list[float]()
    end = clock() + seconds
    while clock() < end and len(latencies_s) < most:
        began = clock()
        await client.request(stream, payload)
        latencies_s.append(clock() - began)
        if not len(latencies_s) % MESSAGES_PER_CHECK:
            progress(len(latencies_s))
    return Latencies(latencies_s)
