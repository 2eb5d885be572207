"""Inputs of batch runs: DataFrames in place of sources, or the sources themselves, read by Spark's tasks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # as everybody calls it  # noqa: N812  # as everybody calls it
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType

from railgun.engine.batch.columns import VALUE, as_order, column_of
from railgun.engine.batch.errors import BatchError
from railgun.engine.batch.stages import Feed
from railgun.flows.flow import Flow
from railgun.flows.source import Source
from railgun.flows.step import Step

BYTES: Final = 128 << 20  # of the inputs, for one task
MOST_PARTS: Final = 10_000
OWN: Final = "source"
_UNKNOWN: Final = 1 << 60  # what Spark says of the size of what it has not counted
_ROW: Final = "__railgun_row"
_SAME_ITEMS: Final = ("filter", "inspect", "branch", "way", "union")


Judged: TypeAlias = Callable[[DataFrame, Sequence[Any], Any], DataFrame]


class Done:
    """The position of a part that has nothing more to read."""

    def __repr__(self) -> str:
        return "DONE"

    def __reduce__(self) -> str:
        return "DONE"


DONE: Final = Done()


@dataclass(frozen=True, slots=True)
class Input:
    """What a source reads in a batch run: a DataFrame, or "source", which is what the source itself has now.

    `order_by`: the column, or columns, whose order is the order of the records; without, they have the order the
    DataFrame has its rows in. `item` makes an item of a row, which is a dictionary of its columns; without, the row is
    the item (or its one column, if that is called `value`).

    `positions`: where the source is to go on after this input, when the flow goes on live: for each of its parts the
    position, or `DONE` if there is nothing more in it.
    """

    df: DataFrame | Literal["source"]
    order_by: str | Sequence[str] | None = None
    item: Callable[[dict[str, Any]], Any] | None = None
    positions: Mapping[Hashable, Any] | None = None

    @property
    def own(self) -> bool:
        """Whether the source itself is read."""
        return isinstance(self.df, str)

    @property
    def frame(self) -> DataFrame:
        """The DataFrame, if there is one."""
        assert not isinstance(self.df, str)
        return self.df

    @property
    def order(self) -> tuple[str, ...]:
        """The columns to order by."""
        if self.order_by is None:
            return ()
        return (self.order_by,) if isinstance(self.order_by, str) else tuple(self.order_by)


def input_of(name: str, given: DataFrame | Input | str) -> Input:
    """What was given for a source."""
    made = given if isinstance(given, Input) else Input(given)  # type: ignore[arg-type]
    if isinstance(made.df, str):
        if made.df != OWN or made.order_by is not None or made.item is not None or made.positions:
            raise BatchError(
                f"the input of source {name!r} is a DataFrame, or {OWN!r}, which has an order, items and positions of "
                f"its own; not {made!r}"
            )
        return made
    if not isinstance(made.df, DataFrame):
        raise BatchError(f"the input of source {name!r} is a DataFrame, not {made.df!r:.100}")
    if made.df.isStreaming:
        raise BatchError(
            f"the input of source {name!r} is a streaming DataFrame, which has no end: read it with spark.read"
        )
    return made


def check(flow: Flow, source: Step, given: Input) -> None:
    """Refuse columns that are not there, or of a type that does not fit."""
    if given.own:
        return
    df = given.frame
    fields = {field.name: field.dataType for field in df.schema.fields}
    if len(fields) < len(df.columns):
        twice = next(name for name in fields if df.columns.count(name) > 1)
        raise BatchError(f"the input of source {source.name!r} has two columns {twice!r}")
    if given.order and len({name.lower() for name in fields}) < len(fields):
        raise BatchError(
            f"the input of source {source.name!r} has columns that differ in nothing but case, which Spark takes for "
            f"the same when it is to order by them: it has {listed(fields)}"
        )

    def column(name: str, step: str, what: str) -> DataType:
        if name not in fields:
            raise BatchError(
                f"step {step!r} {what} column {name!r}, and the input of source {source.name!r} has no such column: "
                f"it has {listed(fields)}"
            )
        return fields[name]

    for name in given.order:
        kind = column(name, source.name, "is to be ordered by")
        if isinstance(kind, MapType | VariantType):
            raise BatchError(
                f"source {source.name!r} cannot be ordered by column {name!r}: a {kind.simpleString()} has no order"
            )
    if given.item is not None or list(fields) == [VALUE]:
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
    """The steps that get the items of a source as they are."""
    whole, takers = {source.name}, []
    for step in flow.steps.values():
        if step.inputs and all(before.name in whole for before in step.inputs):
            takers.append(step)
            if step.kind in _SAME_ITEMS:
                whole.add(step.name)
    return takers


def feed_of(given: Input) -> Feed:
    """What tasks are told of an input."""
    return Feed(given.item, given.order[0] if given.order else None, bool(given.order))


def bounded(name: str, source: Source[Any]) -> Source[Any]:
    """A source with nothing but what is there now."""
    try:
        return source.as_of_now()
    except NotImplementedError as error:
        raise BatchError(
            f"source {name!r} cannot be read up to now: {error}. Give it a DataFrame, or a source with an end"
        ) from error


def in_order(given: Input, judged: Judged = lambda rows, by, first: rows) -> DataFrame:
    """The rows in order: within partitions if the places tell the rest, else over all of them.

    `judged(rows, by, first)` may add to the rows, which are ordered `by` these columns; the user named the `first`.
    """
    if not given.order:
        return given.frame
    rows = given.frame.withColumn(_ROW, F.monotonically_increasing_id())
    kind = (
        to_arrow_schema(given.frame.select(named(given.order[0])).schema, timezone="UTC")
        .field(0)
        .type
    )
    by = [*map(named, given.order), F.col(_ROW)]
    rows = judged(rows, by, by[0])
    if len(given.order) == 1 and as_order(pa.array([], kind)) is not None:
        return rows.sortWithinPartitions(*by).drop(_ROW)
    return rows.sort(*by).drop(_ROW)


def named(name: str) -> Any:
    """The column of this very name, dots and all."""
    escaped = name.replace("`", "``")
    return F.col(f"`{escaped}`")


def partitions_for(spark: SparkSession, inputs: Sequence[DataFrame]) -> int:
    """Enough parts for all cores, and none with more than some hundred MiB of the input, as far as Spark knows that."""
    try:
        cores = spark.sparkContext.defaultParallelism
        size = sum(
            int(str(df._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()))
            for df in inputs
        )
    except Exception:  # Spark Connect has neither
        return int(spark.conf.get("spark.sql.shuffle.partitions") or 200)
    if size >= _UNKNOWN:
        return 4 * cores
    return max(2 * cores, min(MOST_PARTS, size // BYTES))


def partition() -> int:
    """The number of the partition this task works on."""
    context = TaskContext.get()
    assert context is not None
    return context.partitionId()


def listed(names: Iterable[str]) -> str:
    """Names in a message."""
    return ", ".join(map(repr, names)) or "none"
