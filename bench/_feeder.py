"""A program that feeds a flow, for `bench connectors`: its arguments are JSON, so is what it prints."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from railgun.ingest import Connector


def payload(number: int) -> bytes:
    """100 bytes, of one of 1,000 keys."""
    return b"%03d %096d" % (number * 7919 % 1000, number)


async def feed(told: dict[str, Any]) -> dict[str, Any]:
    """One stream, as fast as it goes; from the first message to the last acknowledgement."""
    count, size = told["messages"], told.get("ring", 100_000)
    ring = [payload(number) for number in range(size)]

    def items(after: int | None) -> Iterator[tuple[int, bytes]]:
        begin = 0 if after is None else after + 1
        return ((number, ring[number % size]) for number in range(begin, count))

    async with Connector(told["flow"], registry=told["registry"], keep=1 << 30) as c:
        began = time.perf_counter()
        if told["how"] == "send":
            for number, data in items(None):
                await c.send("stream", number, data)
            await c.end("stream")
        else:
            await c.feed("stream", items)
        return {"seconds": time.perf_counter() - began}


async def pace(told: dict[str, Any]) -> dict[str, Any]:
    """A message every few milliseconds; how long each waits for its acknowledgement."""
    sent: dict[int, float] = {}
    waits: list[float] = []
    known = -1

    def acked(stream: str, por: int) -> None:
        nonlocal known
        now = time.perf_counter()
        waits.extend(now - sent.pop(number) for number in range(known + 1, por + 1))
        known = por

    async with Connector(told["flow"], registry=told["registry"], on_ack=acked) as c:
        end = time.perf_counter() + told["seconds"]
        number = 0
        while time.perf_counter() < end:
            sent[number] = time.perf_counter()
            await c.send("paced", number, payload(number))
            number += 1
            await asyncio.sleep(0.005)
    return {"waits": waits}


async def many(told: dict[str, Any]) -> dict[str, Any]:
    """Many streams over a few connections, slowly enough that the flow can be rescaled meanwhile."""
    names = [f"s{number:04d}" for number in range(told["streams"])]
    count = told["messages"]
    connectors = [
        Connector(told["flow"], registry=told["registry"]) for _ in range(told["connections"])
    ]
    for one in connectors:
        await one.open()

    async def one_stream(place: int, name: str) -> None:
        c = connectors[place % len(connectors)]
        for number in range(count):
            await c.send(name, number, f"{name} {number}")
            await asyncio.sleep(told["pause"])
        await c.end(name)

    began = time.perf_counter()
    await asyncio.gather(*(one_stream(place, name) for place, name in enumerate(names)))
    seconds = time.perf_counter() - began
    made = sum(one.connections for one in connectors)
    for one in connectors:
        await one.close()
    return {"seconds": seconds, "connections": made}


def main() -> None:
    told = json.loads(sys.argv[1])
    work = {"feed": feed, "send": feed, "pace": pace, "many": many}[told["how"]]
    print(json.dumps(asyncio.run(work(told))))


if __name__ == "__main__":
    main()
