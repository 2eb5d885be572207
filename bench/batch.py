"""A flow as a Spark batch job, beside the same job written by hand; and Spark reading a stream beside Parquet.

The job: rows of (key, value), 1 M keys, and for every row the sum of its key so far, by a Python function called for
every row. All of it goes to Spark's sink that does nothing. Three ways, in turns, on a session with two
tasks at a time:

- *flow*: `run_batch` of `key_by(...).reduce(operator.add)`; order within a key is kept.
- *by hand*: `repartition(key)` and `mapInArrow` with a loop over the rows; order within a key is whatever the shuffle
  leaves.
- *applyInPandas*: `groupBy(key).applyInPandas` with the same loop, on a hundredth of the rows: its cost is by the
  key, so of fewer keys, with as many rows each.

Each figure is the median of rounds, after one of each with few rows that does not count. Then the streams: see
`bench datasource`, of which this is the part that reads.
"""

from __future__ import annotations

import operator
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from verification.report import Report, options

from bench import _servers, datasource
from railgun import Flow, Items, run_batch
from railgun.flows.flow import Stream
from railgun.sinks.collect import Collect
from railgun.spark.session import opened

COLUMNS = "key long, total long"
BY_HAND = 0.8
FEWER = 100  # times fewer rows and keys for applyInPandas


def table(spark: SparkSession, rows: int, keys: int) -> DataFrame:
    scattered = f"(id * 7919) % {keys} as key"
    return spark.range(0, rows, 1, 8).selectExpr(scattered, "id % 100 as value")


def flow() -> Flow:
    made = Flow("totals")
    rows: Stream[dict[str, int]] = made.source(Items([]), name="rows")
    keyed = rows.key_by(lambda row: row["key"], lambda row: row["value"])
    keyed.reduce(operator.add).with_key().sink(Collect(), name="totals")
    return made


def by_flow(rows: DataFrame) -> DataFrame:
    given = {"rows": rows}
    return run_batch(flow(), rows.sparkSession, given, schemas={"totals": COLUMNS})["totals"]


def fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    totals: dict[int, int] = {}
    for batch in batches:
        told = []
        for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True):
            total = totals.get(key, 0) + value
            totals[key] = total
            told.append(total)
        columns = [batch["key"], pa.array(told, pa.int64())]
        yield pa.RecordBatch.from_arrays(columns, names=["key", "total"])


def by_hand(rows: DataFrame) -> DataFrame:
    partitions = 2 * rows.sparkSession.sparkContext.defaultParallelism  # as the flow has
    return rows.repartition(partitions, "key").mapInArrow(fold, COLUMNS)


def fold_group(group: pd.DataFrame) -> pd.DataFrame:
    total, told = 0, []
    for value in group["value"].tolist():
        total += value
        told.append(total)
    return pd.DataFrame({"key": group["key"], "total": told})


def by_pandas(rows: DataFrame) -> DataFrame:
    return rows.groupBy("key").applyInPandas(fold_group, COLUMNS)


def rate(rows: DataFrame, count: int, work: Callable[[DataFrame], DataFrame]) -> float:
    began = time.perf_counter()
    work(rows).write.format("noop").mode("overwrite").save()
    return count / (time.perf_counter() - began)


def folds(spark: SparkSession, report: Report, rows: int, keys: int, rounds: int) -> None:
    """The job, three ways."""
    large, small = table(spark, rows, keys), table(spark, rows // FEWER, keys // FEWER)
    ways: dict[str, tuple[DataFrame, int, Any]] = {
        "flow": (large, rows, by_flow),
        "by hand": (large, rows, by_hand),
        "applyInPandas": (small, rows // FEWER, by_pandas),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    few = rows // 20
    for _, _, work in ways.values():
        rate(table(spark, few, max(1, few // 1000)), few, work)
    for _ in range(rounds):
        for name, (df, count, work) in ways.items():
            found[name].append(rate(df, count, work))
    rates = {name: median(some) for name, some in found.items()}
    for name, some in found.items():
        report.check(f"fold, {name}", rates[name], f"rows/s ({min(some):,.0f} to {max(some):,.0f})")
    ratio = rates["flow"] / rates["by hand"]
    report.check(
        "fold, flow / by hand", ratio, "times", goal=f">= {BY_HAND}", passed=ratio >= BY_HAND
    )
    ratio = rates["flow"] / rates["applyInPandas"]
    report.check("fold, flow / applyInPandas", ratio, "times", goal="> 1", passed=ratio > 1)


def main(argv: Sequence[str] | None = None) -> int:
    chosen, _ = options("bench batch", __doc__ or "", argv)
    rows, keys, rounds = (400_000, 10_000, 1) if chosen.quick else (50_000_000, 1_000_000, 3)
    messages, reads = (200_000, 1) if chosen.quick else (3_000_000, 5)
    home = Path(tempfile.mkdtemp(prefix="railgun-bench-", dir=Path.cwd()))
    report = Report("batch")
    try:
        with _servers.ours(home / "node"), opened("railgun bench batch", "local[2]") as spark:
            folds(spark, report, rows, keys, rounds)
            datasource.Bench(spark, home, messages, reads, report).read()
    finally:
        with suppress(OSError):
            shutil.rmtree(home)
    return report.finish(chosen)
