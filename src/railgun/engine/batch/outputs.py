"""Turn what sinks get in a batch run into tables.

An item becomes a row as in `sinks.parquet`: dictionaries, dataclasses and named tuples by the names of their fields,
plain tuples by the order of the columns. Anything else becomes a row of one column, `value`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa

from railgun.engine.batch.columns import VALUE
from railgun.engine.batch.errors import BatchError
from railgun.engine.operators.operator import DeadLetter
from railgun.engine.snapshots.arrays import ints
from railgun.flows.errors import ConnectorError
from railgun.flows.sink import Place, Sink, Writer
from railgun.sinks.parquet import Rows, inferred

BATCH_ITEMS: Final = 10_000  # items in one record batch of a table

DEAD_LETTER_SCHEMA: Final = pa.schema(
    [
        ("step", pa.string()),
        ("key", pa.string()),
        ("record", pa.string()),
        ("time", pa.int64()),
        ("error", pa.string()),
        ("traceback", pa.string()),
    ]
)
"""The columns of the table of dead letters."""


def infer(step: str, items: Sequence[Any]) -> pa.Schema:
    """Return the schema of a sink's table, inferred from `items`.

    >>> infer("out", [("ada", 1), ("grace", 2)]).names, infer("out", ["ada"]).names
    (['_1', '_2'], ['value'])
    """
    rows = [_as_row(item) for item in items]
    try:
        return inferred(step, rows)
    except ConnectorError as error:
        raise BatchError(f"{error}; schemas={{{step!r}: ...}} says what its columns are") from error


def _as_row(item: Any) -> Any:
    if is_row(item):
        return item
    if isinstance(item, tuple):
        return {f"_{at}": value for at, value in enumerate(item, 1)}
    return {VALUE: item}


def is_row(item: Any) -> bool:
    """Return whether the columns of an item have names."""
    return (
        isinstance(item, Mapping | DeadLetter)
        or hasattr(item, "_fields")
        or (dataclasses.is_dataclass(item) and not isinstance(item, type))
    )


class Table:
    """Encode the items of one sink as record batches."""

    def __init__(self, step: str, schema: pa.Schema) -> None:
        self.rows = Rows(step, schema, f"the schema of {step!r}")
        self.schema = schema
        self.plain = schema.names == [VALUE]

    def encode(self, items: Sequence[Any]) -> pa.RecordBatch:
        """Return the items as rows of one record batch."""
        kinds = set(map(type, items))
        if self.plain and not any(map(is_row, items[:1])):
            return self._of([list(items)], items)
        if kinds == {tuple} and set(map(len, items)) == {len(self.schema)}:
            columns = [list(map(itemgetter(at), items)) for at in range(len(self.schema))]
            return self._of(columns, items)
        return self.rows.encode(items)

    def _of(self, columns: Sequence[list[Any]], items: Sequence[Any]) -> pa.RecordBatch:
        arrays = []
        for field, column in zip(self.schema, columns, strict=True):
            fast = None
            if pa.types.is_int64(field.type):
                with suppress(TypeError, OverflowError):  # a value is not a whole number of 64 bits
                    fast = ints(column)
            arrays.append(self.rows.column(field, column, items) if fast is None else fast)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


class Captured(Sink[Any]):
    """Replaces a sink of the flow in a batch run: its items are handed to the task, which yields them."""

    def __init__(self, take: Callable[[Sequence[Any]], None]) -> None:
        self.take = take

    def open(self, place: Place) -> Writer[Any]:
        """Return a writer that hands items on."""
        return _Capturing(self.take)


class _Capturing(Writer[Any]):
    def __init__(self, take: Callable[[Sequence[Any]], None]) -> None:
        self.take = take

    def write(self, items: Sequence[Any]) -> None:
        self.take(items)
