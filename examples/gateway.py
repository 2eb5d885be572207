"""A program in one terminal feeds a flow in another: readings of sensors come in, their means go out, exactly once.

./run railgun run examples/gateway.py                           (the flow)
./run python examples/gateway.py feed                           (the program; in another terminal)
./run railgun scale gateway 4 --watch                           (in a third one, while it feeds)

Kill either of them, as hard as you like, and start it again: it goes on where the flow is. In gateway-output there is
one line for each reading, whatever happened.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from railgun import Connectors, Files, Flow
from railgun.connector import SyncConnector

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


def measured(sensor: str, after: int | None) -> Iterator[tuple[int, str]]:
    """What a sensor has measured, after the reading of this number."""
    for number in range(0 if after is None else after + 1, READINGS):
        value = (number * 7919) % 1000 / 10
        if number % 100 == 0:
            time.sleep(0.01)
        yield number, json.dumps({"sensor": sensor, "number": number, "value": value})


def feed() -> None:
    """Send all readings of all sensors; each sensor is a stream."""
    with SyncConnector("gateway") as connector:
        for number in range(SENSORS):
            sensor = f"sensor-{number}"
            begin = connector.position(sensor)
            print(f"{sensor}: from reading {0 if begin is None else begin + 1} on", flush=True)
            connector.feed(sensor, lambda after, sensor=sensor: measured(sensor, after))  # type: ignore[misc]
            print(f"{sensor}: all {READINGS:,} are in a snapshot", flush=True)


if __name__ == "__main__" and sys.argv[1:] == ["feed"]:
    feed()
