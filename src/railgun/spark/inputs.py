"""Read the inputs of batch runs: DataFrames in place of sources, or the sources themselves, read by Spark's tasks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # its usual name
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType

from railgun.engine.batch.columns import VALUE, as_order, column_of
from railgun.engine.batch.errors import BatchError
from railgun.engine.batch.stages import Feed
from railgun.flows.flow import Flow
from railgun.flows.source import Source
from railgun.flows.step import Step

BYTES_PER_TASK: Final = 128 << 20  # of the inputs
MAX_PARTS: Final = 10_000
OWN: Final = "source"
_UNKNOWN_BYTES: Final = 1 << 60  # Spark's answer for a size it does not know is as large
_ROW: Final = "__railgun_row"
_SAME_ITEMS: Final = ("filter", "inspect", "branch", "way", "union")


AddBounds: TypeAlias = Callable[[DataFrame, Sequence[Any], Any], DataFrame]


class Done:
    """The position of a part that has nothing more to read."""

    def __repr__(self) -> str:
        return "DONE"

    def __reduce__(self) -> str:
        return "DONE"


DONE: Final = Done()


@dataclass(frozen=True, slots=True)
class Input:
    """What a source reads in a batch run: a DataFrame, or "source" for what the source itself has now.

    `order_by`: the column, or columns, by which the records are ordered; without it, they keep the order of the
    DataFrame's rows. `item`: a function that makes an item of a row, a dictionary of its columns; without it, the row
    is the item (or the value of its only column, if that is called `value`).

    `positions`: where the source goes on after this input, when the flow goes on live: for each of its parts the
    position, or `DONE` if nothing more of the part is to be read.
    """

    df: DataFrame | Literal["source"]
    order_by: str | Sequence[str] | None = None
    item: Callable[[dict[str, Any]], Any] | None = None
    positions: Mapping[Hashable, Any] | None = None

    @property
    def own(self) -> bool:
        """Return whether the source itself is read."""
        return isinstance(self.df, str)

    @property
    def frame(self) -> DataFrame:
        """Return the DataFrame; call this only if the source itself is not read."""
        assert not isinstance(self.df, str)
        return self.df

    @property
    def order(self) -> tuple[str, ...]:
        """Return the names of the columns to order by."""
        if self.order_by is None:
            return ()
        return (self.order_by,) if isinstance(self.order_by, str) else tuple(self.order_by)


def input_of(name: str, given: DataFrame | Input | str) -> Input:
    """Return what the caller passed for a source as an `Input`; raise `BatchError` if it is not valid."""
    source_input = given if isinstance(given, Input) else Input(given)  # type: ignore[arg-type]
    if isinstance(source_input.df, str):
        if (
            source_input.df != OWN
            or source_input.order_by is not None
            or source_input.item is not None
            or source_input.positions
        ):
            raise BatchError(
                f"the input of source {name!r} is a DataFrame, or {OWN!r}, which has an order, items and positions of "
                f"its own; not {source_input!r}"
            )
        return source_input
    if not isinstance(source_input.df, DataFrame):
        raise BatchError(
            f"the input of source {name!r} is a DataFrame, not {source_input.df!r:.100}"
        )
    if source_input.df.isStreaming:
        raise BatchError(
            f"the input of source {name!r} is a streaming DataFrame, which has no end: read it with spark.read"
        )
    return source_input


def check(flow: Flow, source: Step, source_input: Input) -> None:
    """Raise `BatchError` if columns are missing or of a type that does not fit."""
    if source_input.own:
        return
    df = source_input.frame
    fields = {field.name: field.dataType for field in df.schema.fields}
    if len(fields) < len(df.columns):
        twice = next(name for name in fields if df.columns.count(name) > 1)
        raise BatchError(f"the input of source {source.name!r} has two columns {twice!r}")
    if source_input.order and len({name.lower() for name in fields}) < len(fields):
        raise BatchError(
            f"the input of source {source.name!r} has columns whose names differ only in case, which Spark cannot tell "
            f"apart when it orders by them: it has {listed(fields)}"
        )

    def column(name: str, step: str, action: str) -> DataType:
        if name not in fields:
            raise BatchError(
                f"step {step!r} {action} column {name!r}, and the input of source {source.name!r} has no such column: "
                f"it has {listed(fields)}"
            )
        return fields[name]

    for name in source_input.order:
        kind = column(name, source.name, "is to be ordered by")
        if isinstance(kind, MapType | VariantType):
            raise BatchError(
                f"source {source.name!r} cannot be ordered by column {name!r}: a {kind.simpleString()} has no order"
            )
    if source_input.item is not None or list(fields) == [VALUE]:
        return
    timed = column_of(source.options["clock"].time)
    if timed is not None:
        kind = column(timed, source.name, "takes its time from")
        if kind.typeName() not in ("long", "integer", "short", "byte"):
            raise BatchError(
                f"source {source.name!r} takes its time from column {timed!r}, which is {kind.simpleString()} in its "
                f"input: a time is a whole number of microseconds since 1970, as unix_micros({timed}) makes one"
            )
    for step in _takers(flow, source):
        functions = [step.options.get("key"), step.options.get("value")]
        functions += [getattr(step.make, "keywords", {}).get("function")]
        for function in functions:
            name_of_column = column_of(function)
            if name_of_column is None:
                continue
            kind = column(name_of_column, step.name, "takes")
            if function is step.options.get("key") and isinstance(
                kind, ArrayType | MapType | StructType
            ):
                raise BatchError(
                    f"step {step.name!r} takes its key from column {name_of_column!r}, and a {kind.simpleString()} "
                    "cannot be a key: it can change, so it has no stable hash"
                )


def _takers(flow: Flow, source: Step) -> list[Step]:
    """Return the steps that get the items of a source unchanged."""
    whole, takers = {source.name}, []
    for step in flow.steps.values():
        if step.inputs and all(before.name in whole for before in step.inputs):
            takers.append(step)
            if step.kind in _SAME_ITEMS:
                whole.add(step.name)
    return takers


def feed_of(source_input: Input) -> Feed:
    """Return how the tasks turn the rows of an input into records."""
    return Feed(
        source_input.item,
        source_input.order[0] if source_input.order else None,
        bool(source_input.order),
    )


def bounded(name: str, source: Source[Any]) -> Source[Any]:
    """Return a source that ends with what is there now; raise `BatchError` if it cannot."""
    try:
        return source.as_of_now()
    except NotImplementedError as error:
        raise BatchError(
            f"source {name!r} cannot be read up to now: {error}. Give it a DataFrame, or a source with an end"
        ) from error


def in_order(
    source_input: Input, add_bounds: AddBounds = lambda rows, by, first: rows
) -> DataFrame:
    """Return the rows in order: within partitions if the paths of records do the rest, else over all partitions.

    `add_bounds(rows, by, first)` may add columns to the rows, which are ordered by the columns `by`, the first of which
    the user named.
    """
    if not source_input.order:
        return source_input.frame
    rows = source_input.frame.withColumn(_ROW, F.monotonically_increasing_id())
    kind = (
        to_arrow_schema(
            source_input.frame.select(named(source_input.order[0])).schema, timezone="UTC"
        )
        .field(0)
        .type
    )
    by = [*map(named, source_input.order), F.col(_ROW)]
    rows = add_bounds(rows, by, by[0])
    if len(source_input.order) == 1 and as_order(pa.array([], kind)) is not None:
        return rows.sortWithinPartitions(*by).drop(_ROW)
    return rows.sort(*by).drop(_ROW)


def named(name: str) -> Any:
    """Return the column of exactly this name, even with dots in it."""
    escaped = name.replace("`", "``")
    return F.col(f"`{escaped}`")


def partitions_for(spark: SparkSession, inputs: Sequence[DataFrame]) -> int:
    """Return a number of parts: enough for all cores, and small enough for tasks, as far as Spark knows the sizes."""
    try:
        cores = spark.sparkContext.defaultParallelism
        size = sum(
            int(str(df._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()))
            for df in inputs
        )
    except Exception:  # Spark Connect knows neither cores nor sizes
        return int(spark.conf.get("spark.sql.shuffle.partitions") or 200)
    if size >= _UNKNOWN_BYTES:
        return 4 * cores
    return max(2 * cores, min(MAX_PARTS, size // BYTES_PER_TASK))


def partition() -> int:
    """Return the number of the partition this task works on."""
    context = TaskContext.get()
    assert context is not None
    return context.partitionId()


def listed(names: Iterable[str]) -> str:
    """Return names as text for a message."""
    return ", ".join(map(repr, names)) or "none"
