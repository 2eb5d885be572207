"""Find which rows of an ordered DataFrame are late, as if the DataFrame were one part of the source.

A row is late if it is older than the bound before it: the latest time of all rows before it, less the lateness (see
`engine.protocol.frontier.late_rows`). That is a running maximum over the whole DataFrame, which would be slow in one
task. So rows are divided into buckets of neighbours, by the first column of the order: each bucket's task computes the
running maximum within the bucket, and one short table has the maximum of all buckets before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812  # its usual name
from pyspark.sql.types import (
    DateType,
    LongType,
    NumericType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from railgun.engine.batch.columns import as_items, column_of
from railgun.engine.batch.stages import BOUND, Feed
from railgun.engine.batch.task import Batch, plan_of
from railgun.engine.operators.calls import Call
from railgun.engine.operators.reading import Clock
from railgun.engine.protocol.frontier import LAST, MIN
from railgun.errors import pass_interrupt

BUCKET_COUNT: Final = 256
# Of the edges of buckets: bucket sizes differ by at most a 10,000th of the rows
_ACCURACY: Final = 10_000
_BUCKET: Final = "__railgun_bucket"
_EDGES: Final = "__railgun_edges"
_TIME: Final = "__railgun_time"
_LATEST: Final = "__railgun_latest"
_BUCKETED_TYPES: Final = (NumericType, DateType, TimestampType, TimestampNTZType)


def can_have_late_rows(feed: Feed, clock: Clock) -> bool:
    """Return whether rows of an input can be late: only with times and with an order that differs from theirs."""
    if clock.time is None or feed.order is None:
        return False
    return feed.item is not None or column_of(clock.time) != feed.order


def with_bounds(
    rows: DataFrame, order: Sequence[Column], first: Column, *, batch: Batch, source: str
) -> DataFrame:
    """Add to each row the bound before it, as column `BOUND`; `MIN` for the first row.

    `order`: the columns by which rows are ordered, unique for each row; `first`: the first of them. `batch` has the
    settings by which the rows of `source` become records.
    """
    clock, feed = _clock(batch, source), batch.feeds[source]
    columns = rows.columns
    time = column_of(clock.time)
    if time is not None and feed.item is None and time in columns:
        timed = rows.withColumn(_TIME, rows[f"`{time}`"].cast("long"))
    else:
        schema = StructType([*rows.schema.fields, StructField(_TIME, LongType())])
        timed = rows.mapInArrow(partial(_add_times, batch, source), schema)
    bucketed = _bucketed(timed, first)
    latest = bucketed.groupBy(_BUCKET).agg(F.max(_TIME).alias(_LATEST))
    buckets_before = Window.orderBy(_BUCKET).rowsBetween(Window.unboundedPreceding, -1)
    before = latest.select(_BUCKET, F.max(_LATEST).over(buckets_before).alias(_LATEST))
    rows_before = (
        Window.partitionBy(_BUCKET).orderBy(*order).rowsBetween(Window.unboundedPreceding, -1)
    )
    lowest = F.lit(MIN + clock.lateness)  # no bound is below MIN
    latest_before = F.greatest(F.max(_TIME).over(rows_before), F.col(_LATEST), lowest)
    joined = bucketed.join(F.broadcast(before), _BUCKET)
    bounded = joined.withColumn(BOUND, latest_before - F.lit(clock.lateness))
    return bounded.select(*(F.col(f"`{name}`") for name in columns), BOUND)


def _clock(batch: Batch, source: str) -> Clock:
    clock: Clock = plan_of(batch.plan).sources[source].ports[0].options["clock"]
    return clock


def _bucketed(rows: DataFrame, first: Column) -> DataFrame:
    """Add to each row its bucket: a bucket has neighbours, and rows with equal values of `first` share a bucket."""
    kind = rows.select(first).schema.fields[0].dataType
    if not isinstance(kind, _BUCKETED_TYPES):
        return rows.withColumn(_BUCKET, F.lit(0))
    quantiles = F.array(*(F.lit(number / BUCKET_COUNT) for number in range(1, BUCKET_COUNT)))
    edges = rows.agg(F.percentile_approx(first, quantiles, _ACCURACY).alias(_EDGES))
    below = F.filter(_EDGES, lambda edge: edge < first)
    bucket = F.coalesce(F.size(below), F.lit(0))  # nulls come first
    return rows.crossJoin(F.broadcast(edges)).withColumn(_BUCKET, bucket).drop(_EDGES)


# ---------------------------------------------------------------- on executors


def _add_times(
    batch: Batch, source: str, tables: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    clock, item = _clock(batch, source), batch.feeds[source].item
    assert clock.time is not None

    def time_of(row: Any) -> int | None:
        """Return the time of a row, or None if it has none; the flow reports that when it works on the row."""
        assert clock.time is not None
        try:
            time = int(clock.time(row if item is None else item(row)))
        except BaseException as error:
            pass_interrupt(error)
            return None
        return time if MIN < time < LAST else None

    for table in tables:
        names = [name for name in table.schema.names if not name.startswith("__railgun_")]
        items = as_items(names, [table.column(name) for name in names], table.num_rows)
        with Call(source, clock.time):
            times = pa.array([time_of(row) for row in items], pa.int64())
        yield table.append_column(_TIME, times)
