"""What `bench cluster` does with a cluster of ours, and how long that takes.

Each work gets a cluster that has found itself, and returns figures. The client is in this process, which does nothing
else meanwhile. What is bare (a write and its sync, without any node) is measured in between, on the same file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from bench._clusters import NODES, NodeProcess, OurCluster, State
from bench._peers import PeerError
from railgun.client import load
from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.client.load import Latencies
from railgun.client.publisher import Acks
from railgun.transport.records import build

SIZE = 100
BATCH = 1_000
LANES, MANY_LANES = 8, 16
TASKS = 1_000
STREAM = "bench"
CHUNK, TOGETHER = 1 << 20, 16  # bytes of a bare write, and how many of them have one sync
TURN = 50  # single publishes, then as many bare writes
OUTAGE = 30.0  # seconds that a publish may take while there is no master
PAUSE = 0.02  # seconds between two publishes of the one who looks on, who takes little from those he looks at
Figures = dict[str, float]
clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class Much:
    """How much of it."""

    seconds: float
    consumed: int
    kills: int
    metadata: int
    gone: int
    """Bytes that a replica misses."""


async def begin(cluster: OurCluster) -> None:
    """Wait until the cluster is there, and has a stream."""
    await cluster.until(lambda states: len(states) == NODES and any(s.leads for s in states))
    async with await cluster.client() as client:
        await client.ensure(STREAM)
    await cluster.settled()


async def same_term(cluster: OurCluster, before: list[State]) -> float:
    """How many times there was another leader or master since then."""
    states = await cluster.states()
    terms = max(s.term for s in states) - max(s.term for s in before)
    return terms + max(s.epoch for s in states) - max(s.epoch for s in before)


# ---------------------------------------------------------------- throughput


async def publish(cluster: OurCluster, much: Much) -> Figures:
    """Durable publishes, with each of the promises, to the master and through another node."""
    _, master, other = await cluster.roles()
    before = await cluster.states()
    payloads = load.messages(BATCH, SIZE)
    small, found = payloads[:100], Figures()
    levels: tuple[Acks, ...] = ("quorum", "master", "all")
    async with await cluster.client(master) as client:
        await load.publish_batches(client, STREAM, payloads, 0.3, LANES)  # to become warm
        total = 0
        for acks in levels:
            one = await load.publish_batches(
                client, STREAM, payloads, much.seconds, LANES, acks=acks
            )
            found[f"acks={acks}, batches of 1,000"] = one.rate
            total += one.messages
        less = await load.publish_batches(client, STREAM, small, much.seconds, 4 * LANES)
        singly = await load.publish_singly(client, STREAM, payloads[0], much.seconds, TASKS)
        found |= {"batches of 100": less.rate, "1,000 tasks": singly.rate}
        total += less.messages + singly.messages
        await _check_stored(client, total)
    async with await cluster.client(other) as client:
        await load.publish_batches(client, STREAM, payloads, 0.3, LANES)
        through = await load.publish_batches(client, STREAM, payloads, much.seconds, LANES)
        found["through another node"] = through.rate
    found["changes"] = await same_term(cluster, before)
    return found


async def _check_stored(client: Client, count: int) -> None:
    """What was counted is there."""
    stored = (await client.describe(STREAM))["end"]
    if stored < count:
        raise PeerError(f"{count:,} messages were published, and {stored:,} are stored")


async def consume(cluster: OurCluster, much: Much) -> Figures:
    """A group that acks, through the master and through another node; a reader without a group, at a replica."""
    _, master, other = await cluster.roles()
    payloads = load.messages(BATCH, SIZE)
    async with await cluster.client(master) as client, await cluster.client(other) as far:
        count = 0
        while count < much.consumed:
            some = [client.publish_many(STREAM, payloads) for _ in range(LANES)]
            count += sum(map(len, await asyncio.gather(*some)))
        await load.consume_batches(client, STREAM, "warm", count, 0.3)
        near = await load.consume_batches(client, STREAM, "near", count, much.seconds)
        through = await load.consume_batches(far, STREAM, "far", count, much.seconds)
        reader = await _read(far, count, much.seconds)
    return {"master": near.rate, "another node": through.rate, "a reader": reader.rate}


async def _read(client: Client, most: int, seconds: float) -> load.Measured:
    """Messages from the first one on, without a group and without acks."""
    count, began = 0, clock()
    async with await client.subscribe(STREAM, prefetch=load.PREFETCH) as subscription:
        while count < most and clock() < began + seconds:
            count += len(await subscription.batch(load.PREFETCH // 2, load.RECEIVE_TIMEOUT_S))
        return load.Measured(count, clock() - began)


# ---------------------------------------------------------------- single publishes


async def single(cluster: OurCluster, much: Much) -> Figures:
    """One awaited publish after the other, with each of the promises; beside bare appends and syncs, in turns."""
    _, master, other = await cluster.roles()
    payload = os.urandom(SIZE)
    times: dict[str, list[float]] = {}
    bare = os.open(cluster.home / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    same = build([payload])
    levels: tuple[Acks, ...] = ("quorum", "master", "all")

    async def turn(who: str, client: Client, acks: Acks) -> None:
        for _ in range(TURN):
            began = clock()
            await client.publish(STREAM, payload, acks=acks)
            times.setdefault(who, []).append(clock() - began)

    try:
        async with await cluster.client(master) as client, await cluster.client(other) as far:
            for warm in (True, False):
                end = clock() + (0.3 if warm else len(levels) * much.seconds)
                times.clear()
                while clock() < end:
                    for acks in levels:
                        await turn(acks, client, acks)
                    await turn("through", far, "quorum")
                    for _ in range(TURN):
                        began = clock()
                        os.writev(bare, [same])
                        os.fdatasync(bare)
                        times.setdefault("bare", []).append(clock() - began)
    finally:
        os.close(bare)
    return {
        f"{who}, {name}": 1e6 * Latencies(found).at(share)
        for who, found in times.items()
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


async def metadata(cluster: OurCluster, much: Much) -> Figures:
    """New streams, one after the other, on a cluster that has nothing else to do: by the leader, and another node."""
    leader, _, _ = await cluster.roles()
    elsewhere = next(node for node in cluster.nodes if node is not leader)
    found = Figures()
    for who, node in (("at the leader", leader), ("through another node", elsewhere)):
        waits = []
        async with await cluster.client(node) as client:
            for n in range(-3, much.metadata):
                began = clock()
                made = await client.ensure(f"new-{node.port}-{n + 3}")
                if n >= 0:
                    waits.append(clock() - began)
                if made["result"] != "CREATED":
                    raise PeerError(f"a new stream was not made: {made}")
        found |= {
            f"{who}, p50": 1e3 * Latencies(waits).at(0.5),
            f"{who}, p99": 1e3 * Latencies(waits).at(0.99),
        }
    return found


# ---------------------------------------------------------------- failover


async def failover(cluster: OurCluster, much: Much) -> Figures:
    """How long nothing can be published when a master goes, in several ways; one figure for each time."""
    found = Figures()
    for n in range(much.kills):
        for both, what in ((True, "leader and master"), (False, "master only")):
            master = await _bring_about(cluster, both)
            found[f"kill -9, {what}, {n}"] = await _outage(cluster, master, signal.SIGKILL)
            master.start()
        _, master, _ = await cluster.roles()
        found[f"SIGSTOP, {n}"] = await _outage(cluster, master, signal.SIGSTOP)
    await cluster.settled()
    return found


async def _bring_about(cluster: OurCluster, both: bool) -> NodeProcess:
    """Let the leader be the master, too, or not: kill leaders until it is so. The master."""
    while True:
        leader, master, _ = await cluster.roles()
        if (leader is master) == both:
            return master
        leader.signal(signal.SIGKILL)
        await cluster.until(lambda states: any(s.leads for s in states))
        leader.start()


async def _outage(cluster: OurCluster, master: NodeProcess, how: int) -> float:
    """From the end of the master to the first publish that was begun after it and is acknowledged.

    One client is connected to the master, and one to another node; the slower one counts. Of a process that is stopped
    its client hears nothing and waits (as the network tells it nothing either): the other one counts alone.
    """
    numbers = itertools.count()
    name = os.urandom(8).hex()
    others = [node for node in cluster.nodes if node is not master]
    async with contextlib.AsyncExitStack() as stack:
        near = await stack.enter_async_context(
            await cluster.client(master, *others, timeout=OUTAGE)
        )
        far = await stack.enter_async_context(await cluster.client(*others, master, timeout=OUTAGE))
        clients = [near, far] if how == signal.SIGKILL else [far]

        async def put(client: Client) -> float:
            while True:
                with contextlib.suppress(StreamsError):
                    await client.publish(STREAM, b"after", id=f"{name}-{next(numbers)}")
                    return clock()

        for client in (near, far):
            await put(client)
        master.signal(how)
        began = clock()
        ended = await asyncio.gather(*map(put, clients))
        if how == signal.SIGSTOP:
            master.signal(signal.SIGCONT)
        return max(ended) - began


# ---------------------------------------------------------------- catching up


async def catch_up(cluster: OurCluster, much: Much) -> Figures:
    """A replica that was away while so many bytes were published; what others see meanwhile; and the bare disk."""
    _, master, other = await cluster.roles()
    payloads = load.messages(BATCH, SIZE)
    batch = len(build(payloads))
    other.signal(signal.SIGKILL)
    async with await cluster.client(master) as client:
        published = 0
        began = clock()
        while published * batch < much.gone:
            some = [client.publish_many(STREAM, payloads) for _ in range(MANY_LANES)]
            published += len(await asyncio.gather(*some))
        two = published * BATCH / (clock() - began)
        size = published * batch
        bare = bare_writes(cluster.home / "bare", min(size, 512 << 20))
        before = await cluster.states()
        quiet = await _look_on(client, much.seconds)
        other.start()
        await cluster.until(lambda states: len(states) == NODES)
        began = clock()
        looking = asyncio.create_task(_look_on(client, 600.0))
        try:
            ended = await cluster.until(
                lambda states: any(len(s.caught_up) == NODES - 1 for s in states), 600.0, [master]
            )
        finally:
            looking.cancel()
        busy = await looking
    bare = (bare + bare_writes(cluster.home / "bare", min(size, 512 << 20))) / 2
    return {
        "published with two of three": two,
        "bytes": size,
        "MB/s": size / (ended - began) / 1e6,
        "bare MB/s": bare / 1e6,
        "quiet, p50": 1e3 * quiet.at(0.5),
        "quiet, p99": 1e3 * quiet.at(0.99),
        "meanwhile, p50": 1e3 * busy.at(0.5),
        "meanwhile, p99": 1e3 * busy.at(0.99),
        "meanwhile, longest": 1e3 * max(busy.seconds),
        "changes": await same_term(cluster, before),
    }


async def _look_on(client: Client, seconds: float) -> Latencies:
    """Publish a message now and then, until it is cancelled; how long each took."""
    waits, end = [], clock() + seconds
    with contextlib.suppress(asyncio.CancelledError):
        while clock() < end:
            began = clock()
            await client.publish(STREAM, b"x" * SIZE)
            waits.append(clock() - began)
            await asyncio.sleep(PAUSE)
    return Latencies(waits or [0.0])


def bare_writes(path: Path, size: int) -> float:
    """Bytes a second of a file that is written from begin to end, with a sync now and then as a replica has it.

    What is synced is not kept in memory, as a replica has it, too. Otherwise it would be memory that is measured: some
    machines take five times as long for a page that was not in use before.
    """
    data = os.urandom(CHUNK)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    began, written = clock(), 0
    try:
        while written < size:
            for _ in range(TOGETHER):
                written += os.write(file, data)
            os.fdatasync(file)
            os.posix_fadvise(
                file, written - TOGETHER * CHUNK, TOGETHER * CHUNK, os.POSIX_FADV_DONTNEED
            )
        return written / (clock() - began)
    finally:
        os.close(file)
        path.unlink()


WORKS: dict[str, Callable[[OurCluster, Much], Awaitable[Figures]]] = {
    "publish": publish, "single": single, "consume": consume, "metadata": metadata,
    "failover": failover, "catch-up": catch_up,
}  # fmt: skip


async def do(work: str, cluster: OurCluster, much: Much) -> Figures:
    """Do some work with a cluster that has just been started."""
    await begin(cluster)
    return await WORKS[work](cluster, much)
