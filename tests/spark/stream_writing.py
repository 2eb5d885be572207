"""What tests of streams written by Spark share: a clock that can be set ahead, writes, and what was stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from railgun.broker.clock import time_of_day
from railgun.client.sync import SyncClient
from railgun.spark.session import SparkSession
from railgun.spark.streams.commit import Target
from railgun.spark.streams.staging import TaskReport, pieces
from railgun.testing.node import Served

needs_spark = pytest.mark.spark
PATIENCE = 240  # seconds: a busy machine starts few micro-batches in a minute
SECOND = 1_000_000


class Clock:
    """The time of a node, which may be set ahead."""

    ahead = 0

    def __call__(self) -> int:
        return time_of_day() + self.ahead


def stored(client: SyncClient, stream: str) -> list[bytes]:
    """All payloads of a stream."""
    told = client.admin("describe", name=stream)
    found: list[bytes] = []
    at = told["first"]
    if at < told["end"]:
        with client.subscribe(stream, start=at) as reader:
            while at < told["end"]:
                records = reader.records(PATIENCE)
                at = records.end
                found += records.payloads()
    return found


def left_behind(client: SyncClient, stream: str) -> dict[str, int]:
    """Messages that are staged for a stream, by producers and sequences."""
    return {
        f"{one['name']}/{sequence}": count
        for one in client.admin("producers", name=stream)
        for sequence, count in one["staged"].items()
    }


def texts(first: int, end: int, size: int = 0) -> list[bytes]:
    return [f"{n:06}".encode() + b"." * size for n in range(first, end)]


class Writing:
    """Writes to streams of the node with Spark."""

    def __init__(self, spark: SparkSession, node: Served) -> None:
        self.spark = spark
        self.data = str(node.data)

    def rows(self, first: int, end: int, parts: int = 3, size: int = 0) -> DataFrame:
        made = f"concat(format_string('%06d', id), repeat('.', {size})) AS payload"
        return self.spark.range(first, end, 1, parts).selectExpr(made)

    def write(self, given: DataFrame, stream: str, mode: str = "append", **options: Any) -> None:
        writer = given.write.format("railgun").mode(mode).option("data", self.data)
        writer.options(stream=stream, **options).save()

    def copy(
        self, source: str, stream: str, checkpoint: Path, change: str = "payload", most: int = 100
    ) -> StreamingQuery:
        """From one stream to another, as far as there is something."""
        reader = self.spark.readStream.format("railgun").option("data", self.data)
        rows = reader.options(stream=source, partitions=2, maxMessages=most).load()
        writer = rows.selectExpr(change).writeStream.format("railgun").option("data", self.data)
        writer = writer.options(stream=stream, checkpointLocation=str(checkpoint))
        return writer.trigger(availableNow=True).start()


def finish(query: StreamingQuery) -> None:
    assert query.awaitTermination(PATIENCE)


def forget(checkpoint: Path) -> None:
    """As if Spark had died right before it noted that the last micro-batch is done."""
    last = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink()


class Cut(Exception):  # noqa: N818
    """The process of a commit ends here."""


class Batch:
    """A micro-batch of one run of a query, its tasks done by hand."""

    def __init__(
        self, client: SyncClient, stream: str, label: int = 0, run: str | None = "run-1"
    ) -> None:
        self.target = Target(client, stream, PATIENCE, "q", run, label)

    def task(self, partition: int, payloads: Sequence[bytes]) -> TaskReport:
        return self.target.stage(partition, pieces([list(payloads)]))

    def write(self, *parts: Sequence[bytes]) -> int:
        return self.target.commit([self.task(n, part) for n, part in enumerate(parts)])
