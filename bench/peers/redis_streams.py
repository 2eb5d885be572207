"""Redis at the work of `bench streams`, through redis-py and hiredis: what it came to is the last line it prints.

    .peers/redis/bin/python -m bench.peers.redis_streams WORK --port PORT [--seconds S] [--messages N]

Publishing is XADD in pipelines (without transactions) of 1,000, by the client that waits and by the one of asyncio,
which has several pipelines under way; consuming is XREADGROUP of 1,000, and one XACK for all of them. Everything is
told by itself; `bench streams` takes the best.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
import redis.asyncio

SIZE = 100
BATCH = 1_000
LANES = 4  # pipelines of asyncio that are under way
Figures = dict[str, float]
clock = time.perf_counter


class Work:
    """What it is asked to do, and where."""

    def __init__(self, port: int, seconds: float, messages: int) -> None:
        self.port = port
        self.seconds = seconds
        self.messages = messages
        self.server = redis.Redis(port=port)
        self.entries = [{b"m": os.urandom(SIZE)} for _ in range(BATCH)]


def publish(work: Work) -> Figures:
    """XADD."""
    add(work, 0.2)  # to become warm
    return {
        "pipelines of 1,000": add(work, work.seconds),
        f"pipelines of 1,000, asyncio, {LANES} under way": asyncio.run(add_async(work)),
    }


def add(work: Work, seconds: float) -> float:
    began, count = clock(), 0
    while clock() < began + seconds:
        count += pipeline(work, "publish")
    return count / (clock() - began)


def pipeline(work: Work, stream: str) -> int:
    together = work.server.pipeline(transaction=False)
    for entry in work.entries:
        together.xadd(stream, entry)
    return len(together.execute())


async def add_async(work: Work) -> float:
    server = redis.asyncio.Redis(port=work.port)
    began, count = clock(), 0

    async def lane() -> None:
        nonlocal count
        while clock() < began + work.seconds:
            together = server.pipeline(transaction=False)
            for entry in work.entries:
                together.xadd("publish", entry)
            added = await together.execute()
            count += len(added)

    await asyncio.gather(*(lane() for _ in range(LANES)))
    took = clock() - began
    await server.aclose()
    return count / took


def consume(work: Work) -> Figures:
    """XREADGROUP and XACK."""
    for _ in range(work.messages // BATCH):
        pipeline(work, "consume")
    return {
        "XREADGROUP 1,000, XACK": take(work),
        "the same, asyncio": asyncio.run(take_async(work)),
    }


def take(work: Work) -> float:
    work.server.xgroup_create("consume", "one", id="0")
    began, count = clock(), 0
    while clock() < began + work.seconds:
        found: Any = work.server.xreadgroup("one", "me", {"consume": ">"}, count=BATCH)
        if not found:
            break
        names = [name for name, _ in found[0][1]]
        count += work.server.xack("consume", "one", *names)
    return count / (clock() - began)


async def take_async(work: Work) -> float:
    server = redis.asyncio.Redis(port=work.port)
    await server.xgroup_create("consume", "other", id="0")
    began, count = clock(), 0
    while clock() < began + work.seconds:
        found: Any = await server.xreadgroup("other", "me", {"consume": ">"}, count=BATCH)
        if not found:
            break
        names = [name for name, _ in found[0][1]]
        acked = await server.xack("consume", "other", *names)
        count += acked
    took = clock() - began
    await server.aclose()
    return count / took


WORKS: dict[str, Callable[[Work], Figures]] = {"publish": publish, "consume": consume}


def main(argv: Sequence[str] | None = None) -> None:
    """Read what to do, do it, and print what it came to."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.redis_streams")
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--port", type=int, required=True, help="of the server")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    parser.add_argument("--messages", type=int, default=100_000, help="to consume")
    chosen = parser.parse_args(argv)
    work = Work(chosen.port, chosen.seconds, chosen.messages)
    figures = WORKS[chosen.work](work)
    info: Any = work.server.info("server")
    client = importlib.metadata.version("redis")
    engine = f"Redis {info['redis_version']}, redis-py {client}"
    print(json.dumps({"engine": engine, "figures": figures}), flush=True)


if __name__ == "__main__":
    main()
