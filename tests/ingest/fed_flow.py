"""A flow that connectors feed, and what comes out of it, for the tests of this directory."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verification.stream_validator import check_streams

from railgun import Flow, Job, run
from railgun.engine.controller.storekeeper import Snapshots
from railgun.ingest import Connector
from railgun.sinks.files import Files
from railgun.sources.connectors import ConnectorMessage, Connectors
from railgun.testing.local_workers import SubprocessLauncher

SECRET = bytes(range(32))


def line(message: ConnectorMessage) -> str:
    return f"{message.stream}\t{message.id}\t{message.payload.decode()}"


def fed_flow(out: Path, **options: Any) -> Flow:
    flow = Flow("fed")
    source = Connectors("feed", decode="message", secret=SECRET, **options)
    flow.source(source, name="in").map(line).sink(Files(out, "text"), name="out")
    return flow


@contextmanager
def fed_job(
    tmp: Path,
    workers: int = 2,
    every: float = 0.25,
    *,
    spark: Any = None,
    fresh: bool = False,
    **options: Any,
) -> Iterator[Job]:
    with run(
        fed_flow(tmp / "out", **options),
        workers,
        launcher=SubprocessLauncher() if spark is None else None,
        spark=spark,
        snapshots=Snapshots(str(tmp / "snapshots"), every=every, fresh=fresh),
        registry=tmp / "jobs",
        by_value=[sys.modules[__name__]],
    ) as job:
        yield job


def connector(tmp: Path, where: str = "fed", **options: Any) -> Connector:
    return Connector(where, registry=tmp / "jobs", **options)


def shown(out: Path) -> list[tuple[str, str]]:
    """The lines of all files, in the order of their snapshots, by stream."""
    files = sorted(out.glob("part-out-*.txt"), key=lambda path: int(path.name.split("-")[2]))
    lines = [text for path in files for text in path.read_text("utf-8").splitlines()]
    return [(text.split("\t")[0], text) for text in lines]


def sent(streams: dict[str, int]) -> dict[str, list[str]]:
    """What was sent of streams of so many messages."""
    return {
        name: [f"{name}\t{number}\t{text(name, number)}" for number in range(count)]
        for name, count in streams.items()
    }


def text(name: str, number: int) -> str:
    return f"{name} says {number * 7919 % 1000}"


def items(name: str, count: int, after: int | None = None) -> Iterator[tuple[int, str]]:
    begin = 0 if after is None else after + 1
    return ((number, text(name, number)) for number in range(begin, count))


def check(out: Path, streams: dict[str, int]) -> None:
    """What was committed is what was sent."""
    trouble = check_streams(shown(out), sent(streams), whole=True)
    assert not trouble, trouble


async def until(done: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Wait for something to become true."""
    for _ in range(int(seconds / 0.02)):
        if done():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"in {seconds} s it did not happen: {what}")


def doors(job: Job) -> list[str]:
    """Where the workers listen."""
    found: list[str] = job._controller.doors()["in"]["workers"]
    return found
