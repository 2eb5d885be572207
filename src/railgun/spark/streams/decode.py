"""Decode messages into rows for Spark: rows of their bytes, of their JSON, or of the Arrow batches in them.

Rules:

1. If a schema wants what a format cannot provide, an error names the column when Spark plans.
2. A message that does not fit is an error with its stream, its offset and the column. Nothing becomes null because it
   could not be read. A field that a JSON object lacks is null; a column that an Arrow batch lacks is an error.
3. In JSON and Arrow, the columns `_offset`, `_time`, `_id`, `_headers` and `_payload` are of the message itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from railgun.client.payloads import PayloadError, from_arrow
from railgun.spark.streams.columns import METADATA, column, offsets
from railgun.spark.streams.errors import BadColumnError
from railgun.spark.streams.feed import Span

BYTES_SCHEMA: Final = "offset BIGINT, time TIMESTAMP, id BINARY, headers BINARY, payload BINARY"
"""The schema of messages as bytes."""
TYPES: Final = {
    "offset": (pa.int64(),),
    "time": (pa.timestamp("us", "UTC"), pa.timestamp("us")),
    "id": (pa.binary(), pa.string()),
    "headers": (pa.binary(), pa.string()),
    "payload": (pa.binary(), pa.string()),
}


class Decoder(ABC):
    """Decodes messages into rows. It is made when Spark plans, and sent to the tasks."""

    prefix = "_"
    """The prefix of columns of the message itself."""

    def __init__(self, stream: str, schema: StructType) -> None:
        self.subject = f"railgun, stream {stream!r}"
        self.schema: Any = to_arrow_schema(schema, timezone="UTC")
        self.own = [name for name in self.schema.names if self.of_message(name) is None]
        """The columns that are in payloads."""
        for field in self.schema:
            self.check(field)

    def of_message(self, name: str) -> str | None:
        """Return the metadata that a column has, or None if it is a column of payloads."""
        metadata_name = name.removeprefix(self.prefix) if name.startswith(self.prefix) else ""
        return metadata_name if metadata_name in METADATA else None

    def check(self, field: Any) -> None:
        """Raise `BadColumnError` if a column cannot be provided."""
        metadata_name = self.of_message(field.name)
        if metadata_name is not None and field.type not in TYPES[metadata_name]:
            raise self.wrong(
                field.name, f"it is {' or '.join(map(str, TYPES[metadata_name]))}, not {field.type}"
            )

    def wrong(self, name: str, problem: str, offset: int | None = None) -> BadColumnError:
        """Return the error for a column."""
        where = "" if offset is None else f", offset {offset}"
        return BadColumnError(f"{self.subject}{where}, column {name!r}: {problem}")

    @abstractmethod
    def rows(self, spans: Sequence[Span]) -> Iterator[Any]:
        """Yield Arrow batches of these messages."""

    def metadata(self, name: str, spans: Sequence[Span]) -> Any:
        """Return a column of message metadata, in the type that the schema wants."""
        array = column(self.of_message(name) or "", spans)
        wanted = self.schema.field(name).type
        if array.type == wanted:
            return array
        try:
            return array.cast(wanted)
        except pa.ArrowInvalid as error:
            at = _first_bad(array, wanted)
            offset = offsets(spans)[at].as_py()
            raise self.wrong(name, "it is not text (UTF-8): read it as binary", offset) from error

    def finished(self, arrays: Sequence[Any], row_offsets: Any) -> Any:
        """Return an Arrow batch with the schema that Spark wants; `row_offsets` are the offsets of its rows."""
        for field, array in zip(self.schema, arrays, strict=True):
            if array.null_count and not field.nullable:
                at = array.is_null().index(True).as_py()
                raise self.wrong(
                    field.name, "it is null, and the schema says NOT NULL", row_offsets[at].as_py()
                )
        return pa.RecordBatch.from_arrays(list(arrays), schema=self.schema)


def _first_bad(array: Any, wanted: Any) -> int:
    for at in range(len(array)):
        try:
            array.slice(at, 1).cast(wanted)
        except pa.ArrowInvalid:
            return at
    return 0


class FromBytes(Decoder):
    """Decodes messages as bytes."""

    prefix = ""

    def check(self, field: Any) -> None:
        """Raise `BadColumnError` if a column cannot be provided."""
        super().check(field)
        if self.of_message(field.name) is None:
            raise self.wrong(
                field.name,
                f"messages as bytes have {', '.join(METADATA)}. For the fields of payloads: option format = 'json' or "
                "'arrow'",
            )

    def rows(self, spans: Sequence[Span]) -> Iterator[Any]:
        """Yield one Arrow batch of all these messages."""
        arrays = [self.metadata(name, spans) for name in self.schema.names]
        yield self.finished(arrays, _LazyOffsets(spans))


class _LazyOffsets:
    """The offsets of messages, computed only if one is needed."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    def __getitem__(self, at: int) -> Any:
        return offsets(self._spans)[at]


class FromArrow(Decoder):
    """Decodes messages that are Arrow streams, with any number of rows each."""

    def rows(self, spans: Sequence[Span]) -> Iterator[Any]:
        """Yield the rows of these messages, in larger batches."""
        tables: list[Any] = []
        waiting = 0
        for span in spans:
            payloads = span.records.payloads()
            for row in range(span.low, span.high):
                span_of_row = Span(span.records, row, row + 1)
                table = self._table(span_of_row, payloads[row])
                tables.append(table)
                waiting += table.num_rows
                if waiting >= 100_000:
                    yield from self._flush(tables)
                    tables, waiting = [], 0
        if waiting:
            yield from self._flush(tables)

    def _flush(self, tables: Sequence[Any]) -> Iterator[Any]:
        yield from pa.concat_tables(tables).combine_chunks().to_batches()

    def _table(self, span: Span, payload: bytes) -> Any:
        try:
            batch = from_arrow(payload)
        except PayloadError as error:
            raise BadColumnError(f"{self.subject}, offset {span.first}: {error}") from error
        count = batch.num_rows
        arrays = []
        for field in self.schema:
            if self.of_message(field.name) is not None:
                value = self.metadata(field.name, [span])[0]
                arrays.append(pa.repeat(value, count))
            elif field.name not in batch.schema.names:
                names = ", ".join(batch.schema.names)
                raise self.wrong(field.name, f"the batch has {names}", span.first)
            else:
                arrays.append(self._cast(batch.column(field.name), field, span.first))
        row_offsets = pa.repeat(pa.scalar(span.first), count)
        return pa.Table.from_batches([self.finished(arrays, row_offsets)], schema=self.schema)

    def _cast(self, column: Any, field: Any, offset: int) -> Any:
        try:
            chunks = [chunk.cast(field.type) for chunk in column.chunks]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise self.wrong(
                field.name, f"{column.type} does not fit into {field.type}: {error}", offset
            ) from error
        return pa.concat_arrays(chunks) if chunks else pa.array([], field.type)


def first_schema(payload: bytes) -> Any:
    """Return the schema of the Arrow batch in a payload."""
    return from_arrow(payload).schema
