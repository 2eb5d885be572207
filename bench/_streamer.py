"""Our client at the work of `bench streams`, in a process of its own: it prints what it measured as its last line.

    python -m bench._streamer WORK --data DIR [--seconds S] [--messages N]

The node works in DIR, on the same machine. What peers do as well is in `railgun.client.load`; what has no peer is here:
bare writes beside ours, the memory of the node, and a node with many streams. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from railgun import __version__
from railgun.broker.protocol.groups import Group, GroupConfig, Receipt
from railgun.client import load
from railgun.client.client import Client, connect
from railgun.client.message import Message
from railgun.transport.records import build

SIZE = 100
BATCH, SMALL_BATCH = 1_000, 100
LANES, SMALL_LANES = 8, 32  # publishes at once
TASKS = 1_000
TOGETHER = 4  # batches that share a sync in the bare loop: as many as a client has under way
OPEN = 100_000  # messages published and not yet consumed, at most, in `through`
TRACED = 20_000  # messages with which allocations are traced, which takes its time
EVERY = 0.1  # seconds between two looks at the memory of the node
PAGE = os.sysconf("SC_PAGE_SIZE")
Figures = dict[str, float]


class Work:
    """What it is asked to do, and where."""

    def __init__(self, data: Path, seconds: float, messages: int) -> None:
        self.data = data
        self.seconds = seconds
        self.messages = messages
        self.payloads = load.messages(BATCH, SIZE)
        self._told = 0.0

    def progress(self, text: str) -> None:
        """Tell it, once a second."""
        if time.monotonic() > self._told + 1:
            self._told = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def node_bytes(self) -> int:
        """The memory of the node: what is resident of it."""
        process = json.loads((self.data / "node.json").read_text("utf-8"))["pid"]
        return int(Path(f"/proc/{process}/statm").read_text("ascii").split()[1]) * PAGE


# ---------------------------------------------------------------- beside peers


async def publish(work: Work, client: Client) -> Figures:
    """Durable publishes."""
    await client.ensure("publish")
    await load.publish_batches(client, "publish", work.payloads, 0.2)
    small, one = work.payloads[:SMALL_BATCH], work.payloads[0]
    large = await load.publish_batches(client, "publish", work.payloads, work.seconds, LANES)
    less = await load.publish_batches(client, "publish", small, work.seconds, SMALL_LANES)
    singly = await load.publish_singly(client, "publish", one, work.seconds, TASKS)
    await check_stored(client, "publish", large.messages + less.messages + singly.messages)
    return {
        "batches of 1,000": large.rate, "batches of 100": less.rate, "1,000 tasks": singly.rate,
    }  # fmt: skip


async def check_stored(client: Client, stream: str, count: int) -> None:
    """What was counted is there."""
    stored = (await client.admin("describe", name=stream))["end"]
    assert stored >= count, f"{count:,} messages were published, and {stored:,} are stored"


async def consume(work: Work, client: Client) -> Figures:
    """Consume and ack what was published before, as groups that begin at the start."""
    await client.ensure("consume")
    count = 0
    for _ in range(max(1, work.messages // (LANES * BATCH))):
        some = [client.publish_many("consume", work.payloads) for _ in range(LANES)]
        count += sum(map(len, await asyncio.gather(*some)))
    await load.consume_batches(client, "consume", "warm", count, 0.2)
    batches = await load.consume_batches(client, "consume", "one", count, work.seconds)
    singly = await load.consume_singly(client, "consume", "other", count, work.seconds)
    return {"batches": batches.rate, "singly": singly.rate}


async def pubsub(work: Work, client: Client) -> Figures:
    """An ephemeral stream, one publisher and one subscriber, each with a connection of its own."""
    await client.ensure("pubsub", kind="ephemeral")
    async with await connect(data=work.data) as other:
        await load.scatter_batches(client, other, "pubsub", work.payloads, 0.2)
        batches = await load.scatter_batches(client, other, "pubsub", work.payloads, work.seconds)
        singly = await load.scatter_singly(
            client, other, "pubsub", work.payloads[0], work.seconds, TASKS
        )
    return {"batches of 1,000": batches.rate, "1,000 tasks": singly.rate}


async def request(work: Work, client: Client) -> Figures:
    """Requests, one after the other, to a responder in another process."""
    await client.ensure("request", kind="ephemeral")
    responder = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench._streamer", "respond", "--data", str(work.data),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert responder.stdout is not None
        await responder.stdout.readline()  # it listens
        await load.requests(client, "request", work.payloads[0], work.seconds / 4)
        waits = await load.requests(client, "request", work.payloads[0], work.seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            responder.kill()
        await responder.wait()
    return {"p50": 1e6 * waits.at(0.5), "p99": 1e6 * waits.at(0.99)}


def end_with_requester() -> None:
    """Whoever has started this process holds the other end of its stdin."""
    sys.stdin.buffer.read()
    os._exit(0)


async def respond(work: Work, client: Client) -> Figures:
    """The other side of `request`, until that ends."""
    threading.Thread(target=end_with_requester, daemon=True).start()
    await load.respond(client, "request", ready=lambda: print("ready", flush=True))
    return {}


# ---------------------------------------------------------------- beside bare writes


async def single(work: Work, client: Client) -> Figures:
    """One awaited publish after the other, and one bare append and sync after the other, in turns of fifty."""
    await client.ensure("single")
    one = work.payloads[0]
    same = build([one])
    times: dict[str, list[float]] = {"awaited": [], "bare": []}
    file = os.open(work.data / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    clock, end, warm = time.perf_counter, time.perf_counter() + work.seconds, True
    while clock() < end or warm:
        for _ in range(50):
            began = clock()
            os.writev(file, [same])
            os.fdatasync(file)
            times["bare"].append(clock() - began)
        for _ in range(50):
            began = clock()
            await client.publish("single", one)
            times["awaited"].append(clock() - began)
        if warm:
            warm = False
            for found in times.values():
                found.clear()
            end = max(end, clock() + 0.1)
    os.close(file)
    return {name: 1e6 * statistics.median(found) for name, found in times.items()}


async def limit(work: Work, client: Client) -> Figures:
    """Batches of 1,000, one at a time and several at once, each beside bare appends and syncs of the same bytes."""
    await client.ensure("limit")
    same = build(work.payloads)
    file = os.open(work.data / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    clock = time.perf_counter

    def bare(together: int) -> float:
        began, count, batches = clock(), 0, [same] * together
        while clock() < began + work.seconds:
            os.writev(file, batches)
            os.fdatasync(file)
            count += together * BATCH
        return count / (clock() - began)

    await load.publish_batches(client, "limit", work.payloads, 0.2)
    figures = {}
    for lanes, together in ((1, 1), (LANES, TOGETHER)):
        figures[f"bare, {together}"] = bare(together)
        ours = await load.publish_batches(client, "limit", work.payloads, work.seconds, lanes)
        figures[f"ours, {lanes}"] = ours.rate
    os.close(file)
    return figures


# ---------------------------------------------------------------- the memory of the node


async def through(work: Work, client: Client) -> Figures:
    """Many messages published, consumed and acked; the memory of the node meanwhile, by quarters of the messages."""
    await client.ensure("through")
    published = consumed = 0
    room = asyncio.Event()
    quarters: list[list[int]] = [[], [], [], []]
    began = time.perf_counter()

    async def lane() -> None:
        nonlocal published
        while published < work.messages:
            while published - consumed > OPEN:
                room.clear()
                await room.wait()
            published += BATCH
            await client.publish_many("through", work.payloads)

    async def take() -> None:
        nonlocal consumed
        subscription = await client.subscribe("through", group="all", prefetch=load.PREFETCH)
        async with subscription:
            while consumed < work.messages:
                batch = await subscription.batch(load.PREFETCH // 2, load.RECEIVE_TIMEOUT_S)
                subscription.ack_all(batch)
                consumed += len(batch)
                room.set()
            await subscription.flush()

    async def look() -> None:
        while True:
            found = work.node_bytes()
            quarters[min(3, 4 * consumed // work.messages)].append(found)
            work.progress(f"{consumed:,} messages, the node has {found / 2**20:,.0f} MiB")
            await asyncio.sleep(EVERY)

    looking = asyncio.create_task(look())
    try:
        await asyncio.gather(take(), *(lane() for _ in range(LANES)))
    finally:
        looking.cancel()
    took = time.perf_counter() - began
    for n, found in enumerate(quarters):  # a quarter may be over between two looks
        if not found:
            found.append(quarters[n - 1][-1] if n else work.node_bytes())
    peaks = [max(found) for found in quarters]
    return {"rate": consumed / took, "second": peaks[1], "last": peaks[3], "all": max(peaks)}


async def unacked(work: Work, client: Client) -> Figures:
    """A group with so many messages in flight, each alone, and then acked in any order: bytes each in the node.

    Twice as many are delivered, and every second one is acked: all those between are ranges of their own, which is the
    worst there is. Memory that the node has had before and not given back is not seen in what is resident; so there is
    `machine_bytes`, too.
    """
    count = work.messages
    await client.ensure("unacked")
    for _ in range(2 * count // BATCH):
        await client.publish_many("unacked", work.payloads)
    await load.consume_batches(client, "unacked", "warm", 2 * count)
    subscription = await client.subscribe("unacked", group="held", prefetch=2 * count)
    before = work.node_bytes()
    held: list[Message] = []
    while len(held) < 2 * count:
        held += await subscription.batch(2 * count, load.RECEIVE_TIMEOUT_S)
    await subscription.flush()
    delivered = peak = work.node_bytes()
    acked, longest = 0, 0.0

    async def ack(some: list[Message]) -> None:
        nonlocal peak, acked, longest
        random.Random(7).shuffle(some)
        for message in some:
            message.ack()
            await asyncio.sleep(0)  # in a frame of its own
            acked += 1
            if not acked % 1_000:
                began = time.perf_counter()
                await subscription.flush()
                longest = max(longest, time.perf_counter() - began)
                peak = max(peak, work.node_bytes())
                work.progress(f"{acked:,} of {2 * count:,} acked one by one")
        await subscription.flush()

    await ack(held[1::2])
    alone = work.node_bytes()
    await ack(held[::2])
    told = await client.admin("group", name="unacked", group="held")
    return {
        "delivered": (delivered - before) / count,
        "alone": (alone - before) / count,
        "peak": (peak - before) / count,
        "left": told["lag"],
        "wait": longest,
        **machine_bytes(min(count, TRACED)),
    }


def machine_bytes(count: int) -> Figures:
    """The same in the machine of a group, by what Python has allocated for it."""
    order = list(range(0, 2 * count, 2))
    random.Random(7).shuffle(order)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        group = _group(2 * count)
        for offset in range(1, 2 * count, 2):
            group.ack("one", [Receipt(offset, offset + 1, 1, 0)], 2)
        alone = peak = tracemalloc.get_traced_memory()[0] - before
        for n, offset in enumerate(order):
            group.ack("one", [Receipt(offset, offset + 1, 1, 0)], 2)
            if not n % 500:
                peak = max(peak, tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    return {"machine, alone": alone / count, "machine, peak": peak / count}


def _group(count: int) -> Group:
    group = Group(GroupConfig(), None, start=0, first=0, end=count)
    group.join("one", 0)
    group.grant("one", count, 0)
    group.take(1)
    return group


# ---------------------------------------------------------------- many streams


async def many(work: Work, client: Client) -> Figures:
    """So many streams with a consumer each, on twenty connections: messages to each, and all consumed."""
    names = [f"many-{n:05d}" for n in range(work.messages)]
    each = 10
    clock = time.perf_counter
    began = clock()
    for name in names:
        await client.ensure(name)
        work.progress(f"{int(name[5:]) + 1:,} streams are made")
    made = clock()
    right = 0

    async def consumer(who: Client, name: str) -> None:
        nonlocal right
        async with await who.subscribe(name, group="all") as subscription:
            found: list[bytes] = []
            while len(found) < each:
                batch = await subscription.batch(each, load.RECEIVE_TIMEOUT_S)
                subscription.ack_all(batch)
                found += [message.payload for message in batch]
            await subscription.flush()
            right += found == [f"{name} {n}".encode() for n in range(each)]

    clients = [await connect(data=work.data) for _ in range(20)]
    try:
        consuming = [
            asyncio.create_task(consumer(clients[n % 20], name)) for n, name in enumerate(names)
        ]
        sent = [client.publish_many(name, [f"{name} {n}" for n in range(each)]) for name in names]
        await asyncio.gather(*sent)
        await asyncio.gather(*consuming)
    finally:
        await asyncio.gather(*(one.close() for one in clients))
    return {
        "made": made - began,
        "worked": clock() - made,
        "right": right,
        "bytes": work.node_bytes(),
    }


WORKS: dict[str, Callable[[Work, Client], Awaitable[Figures]]] = {
    "publish": publish, "consume": consume, "pubsub": pubsub, "request": request, "respond": respond,
    "single": single, "limit": limit, "through": through, "unacked": unacked, "many": many,
}  # fmt: skip


async def do(name: str, work: Work) -> None:
    """Do some work, and print what it came to."""
    async with await connect(data=work.data) as client:
        figures = await WORKS[name](work, client)
    print(json.dumps({"engine": f"railgun {__version__}", "figures": figures}), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Read what to do, and do it."""
    parser = argparse.ArgumentParser(prog="python -m bench._streamer")
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--data", type=Path, required=True, help="where the node works")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    parser.add_argument("--messages", type=int, default=100_000, help="or streams, for many")
    chosen = parser.parse_args(argv)
    asyncio.run(do(chosen.work, Work(chosen.data, chosen.seconds, chosen.messages)))


if __name__ == "__main__":
    main()
