"""Spark reading a stream through format("railgun"), beside Spark reading the same rows from Parquet.

Messages of 100 bytes, published in batches of 1,000 to a node in a process of its own; a Spark session with two tasks
at a time. Everything is on this machine: node, JVM and Python workers share its cores. Each figure is the median of
rounds in turns (stream, Parquet, stream, ...), after one round of each that does not count, by which the JVM has
compiled what it needs.

- *count*: `count()`. Parquet answers it from the footers of its files, and is the peer to lose against.
- *noop*: every column of every row goes to Spark's sink that does nothing.
- *sum*: the sum of the lengths of all payloads.
- *JSON*: payloads of 100 bytes that are JSON objects, as three columns, beside the same rows from Parquet.
- *micro-batches*: a query from start to end, 500,000 messages a micro-batch, to the sink that does nothing.
- *write*: rows to a stream, exactly once, in one write; beside the same rows to Parquet.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from pyspark.sql import DataFrame, SparkSession
from verification.report import Report, options

from bench import _servers
from railgun.client.sync import SyncClient, connect_sync
from railgun.spark.session import opened

SIZE, TOGETHER, UNDER_WAY = 100, 1_000, 16
GOAL = 1_000_000  # messages/s
COLUMNS = "customer STRING, amount BIGINT, note STRING"
Work = Callable[[DataFrame], object]


def count(rows: DataFrame) -> object:
    return rows.count()


def noop(rows: DataFrame) -> None:
    rows.write.format("noop").mode("overwrite").save()


def total(rows: DataFrame) -> object:
    return rows.selectExpr("sum(length(payload))").collect()


def payload(n: int) -> bytes:
    """A JSON object of 100 bytes.

    >>> len(payload(0)), len(payload(123_456_789))
    (100, 100)
    """
    start = f'{{"customer":"c{n % 1_000}","amount":{n},"note":"'
    return (start + "x" * (SIZE - len(start) - 2) + '"}').encode()


def publish(client: SyncClient, stream: str, messages: int) -> float:
    """So many messages; how many a second."""
    client.ensure(stream)
    under_way = []
    began = time.perf_counter()
    for first in range(0, messages, TOGETHER):
        under_way.append(
            client.publish_soon(stream, [payload(n) for n in range(first, first + TOGETHER)])
        )
        if len(under_way) >= UNDER_WAY:
            under_way.pop(0).result()
    for made in under_way:
        made.result()
    return messages / (time.perf_counter() - began)


class Bench:
    """One run."""

    def __init__(
        self, spark: SparkSession, home: Path, messages: int, rounds: int, report: Report
    ) -> None:
        self.spark = spark
        self.data = str(home / "node")
        self.home = home
        self.messages = messages
        self.rounds = rounds
        self.report = report

    def stream(self, **chosen: str) -> DataFrame:
        reader = self.spark.read.format("railgun").option("data", self.data).options(**chosen)
        if chosen.get("format") == "json":
            reader = reader.schema(COLUMNS)
        return reader.load("messages")

    def parquet(self, name: str) -> DataFrame:
        return self.spark.read.parquet(str(self.home / name))

    def beside(
        self, name: str, work: Work, ours: Callable[[], DataFrame], theirs: Callable[[], DataFrame]
    ) -> None:
        """Both in turns: messages a second."""
        found: dict[str, list[float]] = {"stream": [], "Parquet": []}
        for turn in range(self.rounds + 1):
            for who, made in (("stream", ours), ("Parquet", theirs)):
                began = time.perf_counter()
                work(made())
                if turn:
                    found[who].append(self.messages / (time.perf_counter() - began))
        rates = {who: median(some) for who, some in found.items()}
        slowest, fastest = min(found["stream"]), max(found["stream"])
        self.report.check(
            f"{name}, stream",
            rates["stream"],
            f"messages/s ({slowest:,.0f} to {fastest:,.0f})",
            goal="" if name == "JSON" else f">= {GOAL:,}",
            passed=name == "JSON" or rates["stream"] >= GOAL,
        )
        self.report.check(f"{name}, Parquet", rates["Parquet"], "rows/s")
        self.report.check(f"{name}, stream / Parquet", rates["stream"] / rates["Parquet"], "times")

    def micro_batches(self) -> None:
        reader = self.spark.readStream.format("railgun").option("data", self.data)
        rows = reader.option("maxMessages", 500_000).load("messages")
        began = time.perf_counter()
        writer = rows.writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.home / "checkpoint")).start()
        query.awaitTermination()
        took = time.perf_counter() - began
        self.report.check("micro-batches, start included", self.messages / took, "messages/s")

    def write(self) -> None:
        rows = self.parquet("plain").select("payload")
        began = time.perf_counter()
        writer = rows.write.format("railgun").mode("append").option("data", self.data)
        writer.option("stream", "written").save()
        ours = self.messages / (time.perf_counter() - began)
        began = time.perf_counter()
        rows.write.parquet(str(self.home / "again"))
        theirs = self.messages / (time.perf_counter() - began)
        self.report.check("write, stream, exactly once", ours, "messages/s")
        self.report.check("write, Parquet", theirs, "rows/s")

    def read(self) -> None:
        """Plain messages, beside the same from Parquet."""
        with connect_sync(data=self.data) as client:
            self.report.check("publish", publish(client, "messages", self.messages), "messages/s")
        self.stream().write.parquet(str(self.home / "plain"))
        for name, work in (("count", count), ("noop", noop), ("sum", total)):
            self.beside(name, work, self.stream, lambda: self.parquet("plain"))

    def run(self) -> None:
        """All of it."""
        self.read()
        self.stream(format="json").write.parquet(str(self.home / "columns"))
        as_columns = lambda: self.stream(format="json")  # noqa: E731
        self.beside("JSON", noop, as_columns, lambda: self.parquet("columns"))
        self.micro_batches()
        self.write()


def main(argv: Sequence[str] | None = None) -> int:
    chosen, _ = options("bench datasource", __doc__ or "", argv)
    messages, rounds = (200_000, 1) if chosen.quick else (3_000_000, 5)
    assert json.loads(payload(7))["amount"] == 7
    home = Path(tempfile.mkdtemp(prefix="railgun-bench-", dir=Path.cwd()))
    report = Report("datasource")
    try:
        with (
            _servers.ours(home / "node"),
            opened("railgun bench datasource", "local[2]") as spark,
        ):
            Bench(spark, home, messages, rounds, report).run()
    finally:
        with suppress(OSError):
            shutil.rmtree(home)
    return report.finish(chosen)
