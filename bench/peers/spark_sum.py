"""Spark Structured Streaming: a sum per key in Python (transformWithState on rows) or in the JVM.

`python` is the fastest way Spark has to call a Python function with state: every record gives one
output, as in the workload. `jvm` is groupBy(key).sum(value), with no Python at all, and one output
a key and micro-batch: less work than the others do, and told as what it is. Both read the source
that makes records inside the JVM, keep their state in RocksDB and drop the output.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StructField, StructType

from bench._workload import CORES, KEYS, Rate, add
from bench.peers._processor import processor_seconds

ROWS = 200_000  # in a micro-batch
WARM_UP = 6.0  # seconds, and at least one micro-batch
LOOK = 0.02  # seconds between looks at the progress
TIMEOUT = 300  # seconds for one micro-batch
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class Sum(StatefulProcessor):
    """The running sum of a key."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        schema = StructType([StructField("total", LongType())])
        self._state = handle.getValueState("total", schema)

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[Any],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[Row]:
        stored = self._state.get()
        total = stored[0] if stored else 0
        for row in rows:
            total = add(total, row[1])
            yield Row(key=key[0], total=total)
        self._state.update((total,))

    def close(self) -> None:
        pass


def session(scratch: str) -> SparkSession:
    """Spark on two cores, set for speed rather than for a quick start."""
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    settings = {
        "spark.master": f"local[{CORES}]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "3g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": scratch,
        "spark.sql.shuffle.partitions": str(CORES),
        "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }
    builder = SparkSession.builder.appName("sums")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def records(spark: SparkSession, rows: int) -> DataFrame:
    """The records, made by Spark's own source, which gives `rows` of them to each micro-batch."""
    made = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", rows)
        .option("numPartitions", CORES)
        .load()
    )
    number = F.pmod(F.xxhash64("value"), F.lit(KEYS)).cast("string")
    key = F.concat(F.lit("customer-"), F.lpad(number, 5, "0"))
    return made.select(key.alias("key"), (F.col("value") % 100).alias("value"))


def sums(engine: str, made: DataFrame) -> DataFrame:
    """The query."""
    if engine == "jvm":
        return made.groupBy("key").agg(F.sum("value").alias("total"))
    return made.groupBy("key").transformWithState(
        statefulProcessor=Sum(),
        outputStructType="key string, total long",
        outputMode="Update",
        timeMode="None",
    )


def batches_done(query: StreamingQuery, more_than: int) -> int:
    """Wait until more micro-batches than these are done; how many are."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        problem = query.exception()
        if problem is not None:
            raise problem
        progress = query.lastProgress
        if progress is not None and progress.batchId + 1 > more_than:
            return int(progress.batchId) + 1
        time.sleep(LOOK)
    raise TimeoutError(f"no micro-batch was done in {TIMEOUT} seconds")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=WARM_UP)
    parser.add_argument("--rows", type=int, default=ROWS, help="records in a micro-batch")
    parser.add_argument("--engine", choices=("python", "jvm"), default="python")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="sums-", ignore_cleanup_errors=True) as scratch:
        spark = session(scratch)
        query = (
            sums(chosen.engine, records(spark, chosen.rows))
            .writeStream.format("noop")
            .outputMode("update")
            .option("checkpointLocation", f"{scratch}/checkpoint")
            .start()
        )
        begun = batches_done(query, 0)
        warm = time.monotonic() + chosen.warm_up
        while time.monotonic() < warm:
            begun = batches_done(query, begun)
        begin, processor = time.monotonic(), processor_seconds()
        done, seconds = begun, 0.0
        while seconds < chosen.seconds:
            done = batches_done(query, done)
            seconds = time.monotonic() - begin
        processor = processor_seconds() - processor
        query.stop()
        version = spark.version
        spark.stop()
    count = (done - begun) * chosen.rows
    how = "transformWithState" if chosen.engine == "python" else "groupBy.sum"
    print(Rate(count / seconds, processor * 1e9 / count, f"Spark {version}, {how}").as_line())


if __name__ == "__main__":
    main()
