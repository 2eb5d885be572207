"""NATS at the work of `bench streams`, through nats-py: what it came to is the last line it prints.

    .peers/nats/bin/python -m bench.peers.nats_streams WORK --port PORT [--seconds S] [--messages N]
    .peers/nats/bin/python -m bench.peers.nats_streams WORK --cluster PORT,PORT,PORT ...

nats-py has no publish of many messages at once. So there are as many single ones under way as it is fastest with:
several windows are tried, with `publish_async` and with tasks that await `publish`, and told each by itself;
`bench streams` takes the best. Likewise for the batches that are fetched.

With `--cluster` there are servers n0, n1, n2 with these ports, and streams have a copy on each. Whoever publishes or
consumes is connected to the server that leads the stream: that is the shortest way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import nats
from nats.js.api import AckPolicy, ConsumerConfig, StorageType

SIZE = 100
WINDOWS = (256, 1_000, 4_000)
TASKS = 1_000
FETCHES = (100, 1_000)
IN_FLIGHT = 20_000  # messages that are on their way to the consumer and not acked, at most
PATIENCE = 30.0  # seconds for a cluster to find itself
LOAD = 10_000  # messages of core publish and subscribe that are on their way, at most
Figures = dict[str, float]
clock = time.perf_counter


class Work:
    """What it is asked to do, and where."""

    def __init__(self, ports: Sequence[int], seconds: float, messages: int) -> None:
        self.ports = ports
        self.port = ports[0]
        self.seconds = seconds
        self.messages = messages
        self.payload = os.urandom(SIZE)

    async def connect(self) -> Any:
        return await nats.connect(f"nats://127.0.0.1:{self.port}")

    async def stream(self, connection: Any, name: str) -> Any:
        """Make a stream, with a copy on each server; a connection to the one that leads it."""
        config = {"name": name, "subjects": [name], "storage": StorageType.FILE}
        if len(self.ports) == 1:
            await connection.jetstream().add_stream(**config)
            return connection
        end = clock() + PATIENCE
        while True:  # the servers may not have found each other yet
            try:
                await connection.jetstream().add_stream(num_replicas=len(self.ports), **config)
                break
            except (nats.errors.Error, nats.js.errors.Error):
                if clock() > end:
                    raise
                await asyncio.sleep(0.2)
        cluster = (await connection.jsm().stream_info(name)).cluster
        while not cluster.leader:
            await asyncio.sleep(0.1)
            cluster = (await connection.jsm().stream_info(name)).cluster
        port = self.ports[int(cluster.leader.removeprefix("n"))]
        return await nats.connect(f"nats://127.0.0.1:{port}")


async def publish(work: Work, connection: Any) -> Figures:
    """Publishes to JetStream, each acknowledged."""
    connection = await work.stream(connection, "publish")
    await futures(connection, work.payload, 0.2, 1_000)  # to become warm
    found = {}
    for window in WINDOWS:
        found[f"publish_async, {window:,} under way"] = await futures(
            connection, work.payload, work.seconds, window
        )
    found["1,000 tasks"] = await tasks(connection, work.payload, work.seconds)
    stored = (await connection.jsm().stream_info("publish")).state.messages
    if stored < work.seconds * sum(found.values()):
        raise RuntimeError(f"only {stored:,} messages were stored")
    return found


async def futures(connection: Any, payload: bytes, seconds: float, window: int) -> float:
    """`publish_async`, with so many futures that are not done."""
    stream = connection.jetstream(publish_async_max_pending=window)
    began, count = clock(), 0
    failed: list[BaseException] = []

    def done(future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            failed.append(error)

    while clock() < began + seconds:
        future = await stream.publish_async("publish", payload)
        future.add_done_callback(done)
        count += 1
    await stream.publish_async_completed()
    if failed:
        raise failed[0]
    return count / (clock() - began)


async def tasks(connection: Any, payload: bytes, seconds: float) -> float:
    """Tasks, each of which awaits one `publish` after the other."""
    stream = connection.jetstream(timeout=30)
    began, count = clock(), 0

    async def task() -> None:
        nonlocal count
        while clock() < began + seconds:
            await stream.publish("publish", payload)
            count += 1

    await asyncio.gather(*(task() for _ in range(TASKS)))
    return count / (clock() - began)


async def consume(work: Work, connection: Any) -> Figures:
    """A pull consumer: batches are fetched, each message is acked."""
    connection = await work.stream(connection, "consume")
    stream = connection.jetstream(publish_async_max_pending=1_000)
    for _ in range(work.messages):
        await stream.publish_async("consume", work.payload)
    await stream.publish_async_completed()
    return {f"fetch {size:,}": await fetch(work, stream, connection, size) for size in FETCHES}


async def fetch(work: Work, stream: Any, connection: Any, size: int) -> float:
    config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=IN_FLIGHT)
    consumer = await stream.pull_subscribe("consume", durable=f"by-{size}", config=config)
    began, count = clock(), 0
    while count < work.messages and clock() < began + work.seconds:
        for message in await consumer.fetch(min(size, work.messages - count), timeout=30):
            await message.ack()
            count += 1
    await connection.flush(30)
    took = clock() - began
    acked = 0
    while acked < count:  # the server takes acks later than it answers; that is not in the time
        acked = (await consumer.consumer_info()).ack_floor.stream_seq
        if clock() > began + took + 10:
            raise RuntimeError(f"{count:,} messages were acked, and {acked:,} acks have arrived")
    return count / took


async def pubsub(work: Work, connection: Any) -> Figures:
    """Core publish and subscribe, each with a connection of its own."""
    other = await work.connect()
    try:
        return {
            f"{lot:,} between two looks": await scatter(work, connection, other, lot)
            for lot in (100, 1_000)
        }
    finally:
        await other.close()


async def scatter(work: Work, publisher: Any, subscriber: Any, lot: int) -> float:
    received = sent = 0

    async def take(message: Any) -> None:
        nonlocal received
        received += 1

    subscription = await subscriber.subscribe("pubsub", cb=take)
    await subscriber.flush()
    began = clock()
    while clock() < began + work.seconds:
        for _ in range(lot):
            await publisher.publish("pubsub", work.payload)
        sent += lot
        await asyncio.sleep(0)
        while sent - received > LOAD:
            await asyncio.sleep(0)
    await publisher.flush()
    while received < sent and clock() < began + work.seconds + 10:
        await asyncio.sleep(0.0005)
    took = clock() - began
    await subscription.unsubscribe()
    if received != sent:
        raise RuntimeError(f"{sent - received:,} of {sent:,} messages did not arrive")
    return received / took


async def request(work: Work, connection: Any) -> Figures:
    """Requests, one after the other, to a responder in another process."""
    responder = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.peers.nats_streams", "respond", "--port", str(work.port),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert responder.stdout is not None
        await responder.stdout.readline()  # it listens
        for seconds in (work.seconds / 4, work.seconds):
            waits = []
            end = clock() + seconds
            while clock() < end:
                began = clock()
                await connection.request("request", work.payload, timeout=30)
                waits.append(clock() - began)
    finally:
        with contextlib.suppress(ProcessLookupError):
            responder.kill()
        await responder.wait()
    waits.sort()
    return {name: 1e6 * waits[int(share * len(waits))] for name, share in PERCENTILES.items()}


PERCENTILES = {"p50": 0.5, "p99": 0.99}


def end_with_requester() -> None:
    """Whoever has started this process holds the other end of its stdin."""
    sys.stdin.buffer.read()
    os._exit(0)


async def respond(work: Work, connection: Any) -> Figures:
    """The other side of `request`, until that ends."""
    threading.Thread(target=end_with_requester, daemon=True).start()

    async def answer(message: Any) -> None:
        await message.respond(message.data)

    await connection.subscribe("request", cb=answer)
    await connection.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()
    return {}


WORKS: dict[str, Callable[[Work, Any], Awaitable[Figures]]] = {
    "publish": publish, "consume": consume, "pubsub": pubsub, "request": request, "respond": respond,
}  # fmt: skip


async def do(name: str, work: Work) -> None:
    """Do some work, and print what it came to."""
    connection = await work.connect()
    figures = await WORKS[name](work, connection)
    client = importlib.metadata.version("nats-py")
    server = str(connection.connected_server_version).strip("<>").split()[-1].removeprefix("v")
    engine = f"NATS {server}, nats-py {client}"
    await connection.close()
    print(json.dumps({"engine": engine, "figures": figures}), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Read what to do, and do it."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.nats_streams")
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--port", type=int, help="of the server")
    parser.add_argument("--cluster", default="", help="ports of the servers n0, n1, ...")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    parser.add_argument("--messages", type=int, default=50_000, help="to consume")
    chosen = parser.parse_args(argv)
    ports = [int(port) for port in chosen.cluster.split(",") if port] or [chosen.port]
    asyncio.run(do(chosen.work, Work(ports, chosen.seconds, chosen.messages)))


if __name__ == "__main__":
    main()
