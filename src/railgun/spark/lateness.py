"""Which rows of an ordered DataFrame are late: judged as if the DataFrame were one part of the source.

A row is late if it is older than the bound before it: the latest time of all rows before it, less the lateness (see
`engine.protocol.frontier.late_rows`). That is a running maximum over the whole DataFrame. In one task it would be slow,
so rows are divided into buckets of neighbours, by the first column of the order: the running maximum within a bucket is
found by the bucket's task, and the maximum of all buckets before it in one short table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # as everybody calls it  # noqa: N812  # as everybody calls it
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

BUCKETS: Final = 256
_ACCURACY: Final = 10_000  # of the edges of buckets: their sizes differ by a 10,000th of the rows
_BUCKET: Final = "__railgun_bucket"
_EDGES: Final = "__railgun_edges"
_TIME: Final = "__railgun_time"
_LATEST: Final = "__railgun_latest"
_DIVIDED: Final = (NumericType, DateType, TimestampType, TimestampNTZType)


def is_judged(feed: Feed, clock: Clock) -> bool:
    """Return whether any row of an input can be late: not without times or an order, nor in the order of times."""
    if clock.time is None or feed.order is None:
        return False
    return feed.item is not None or column_of(clock.time) != feed.order


def with_bounds(
    rows: DataFrame, order: Sequence[Column], first: Column, *, batch: Batch, source: str
) -> DataFrame:
    """Add to each row the bound before it, as column `BOUND`; `MIN` for the first one.

    `order`: the columns that rows are ordered by, no two rows alike; `first`: the first of them. `batch` tells how the
    rows of `source` become records.
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
    """Add the bucket of each row: those of a bucket are neighbours, and rows that are alike in `first` are together."""
    kind = rows.select(first).schema.fields[0].dataType
    if not isinstance(kind, _DIVIDED):
        return rows.withColumn(_BUCKET, F.lit(0))
    shares = F.array(*(F.lit(number / BUCKETS) for number in range(1, BUCKETS)))
    edges = rows.agg(F.percentile_approx(first, shares, _ACCURACY).alias(_EDGES))
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
        """Return the time of a row; None if it has none. The flow itself tells of that, where it works on the row."""
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
