"""A program in one terminal feeds a flow in another: readings of sensors come in, their means go out, exactly once.

./run railgun run examples/gateway.py                           (the flow)
./run python examples/gateway.py feed                           (the program; in another terminal)
./run railgun scale gateway 4 --watch                           (in a third one, while it feeds)

Kill either of them, as hard as you like, and start it again: it goes on where the flow is. In gateway-output there is
one line for each reading, whatever happened.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from railgun import Connectors, Files, Flow
from railgun.ingest import Connector

SENSORS, READINGS = 5, 20_000


def mean(state: tuple[int, float], reading: dict[str, Any]) -> tuple[tuple[int, float], list[Any]]:
    """One more reading of a sensor."""
    count, total = state[0] + 1, state[1] + reading["value"]
    return (count, total), [reading["sensor"], reading["number"], round(total / count, 3)]


flow = Flow("gateway")
readings = flow.source(Connectors("readings"), name="readings")
by_sensor = readings.key_by(lambda reading: reading["sensor"], name="by sensor")
means = by_sensor.stateful_map(mean, initial=lambda: (0, 0.0), name="mean")
means.sink(Files("gateway-output"), name="output")


async def measured(sensor: str, after: int | None) -> AsyncIterator[tuple[int, str]]:
    """What a sensor has measured, after the reading of this number."""
    for number in range(0 if after is None else after + 1, READINGS):
        value = (number * 7919) % 1000 / 10
        if number % 100 == 0:
            await asyncio.sleep(0.1)
        yield number, json.dumps({"sensor": sensor, "number": number, "value": value})


async def feed() -> None:
    """Send all readings of all sensors at the same time; each sensor is a stream."""
    async with Connector("gateway") as connector:

        async def send(sensor: str) -> None:
            after = await connector.position(sensor)
            print(f"{sensor}: from reading {0 if after is None else after + 1} on", flush=True)
            await connector.feed(sensor, partial(measured, sensor))
            print(f"{sensor}: all {READINGS:,} are in a snapshot", flush=True)

        await asyncio.gather(*(send(f"sensor-{number}") for number in range(SENSORS)))


if __name__ == "__main__" and sys.argv[1:] == ["feed"]:
    asyncio.run(feed())
