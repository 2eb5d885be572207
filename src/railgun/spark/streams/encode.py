"""Encode rows of Spark as payloads: one column as it is, or all columns as JSON objects or Arrow batches.

Rules:

1. What a format cannot write is refused when Spark plans, and the error names the column. A column that would be left
   out is refused too: leave it out of the selection instead.
2. A value that no payload can hold (null for a whole payload, NaN in JSON) is an error, and nothing of the write
   appears.
3. Equal rows give equal bytes.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pyspark.sql.types import BinaryType, StringType, StructType

from railgun.client.payloads import to_arrow
from railgun.spark.streams.errors import BadColumnError

PAYLOAD_COLUMNS: Final = ("payload", "value")
"""The names that the column of whole payloads may have."""
_CONTROL: Final = "[\\x00-\\x1f]"


class Encoder(ABC):
    """Encodes rows as payloads. It is made when Spark plans, and sent to the tasks."""

    def __init__(self, stream: str, schema: StructType, rows: int) -> None:
        self.subject = f"railgun, stream {stream!r}"
        self.names = schema.fieldNames()
        self.rows = rows
        if not self.names:
            raise BadColumnError(f"{self.subject}: there are no columns to write")
        self.check(schema)

    @abstractmethod
    def check(self, schema: StructType) -> None:
        """Raise `BadColumnError` if the schema cannot be written."""

    @abstractmethod
    def payloads(self, batch: Any) -> list[bytes]:
        """Return the payloads of the rows of an Arrow batch."""

    def wrong(self, name: str, problem: str) -> BadColumnError:
        """Return the error for a column."""
        return BadColumnError(f"{self.subject}, column {name!r}: {problem}")


class FromColumn(Encoder):
    """Writes one column of whole payloads: one message per row."""

    def check(self, schema: StructType) -> None:
        """Raise `BadColumnError` unless the only column is a payload column of bytes or text."""
        matches = [name for name in self.names if name in PAYLOAD_COLUMNS]
        names = ", ".join(self.names)
        if not matches:
            raise BadColumnError(
                f"{self.subject}: no column 'payload' or 'value' among {names}. Make one, or write all columns: option "
                "format = 'json' or 'arrow'"
            )
        if len(self.names) > 1:
            raise BadColumnError(
                f"{self.subject}: of {names} only {matches[0]!r} would be written. Select it alone, or write all "
                "columns: option format = 'json' or 'arrow'"
            )
        self.name = matches[0]
        if not isinstance(schema[self.name].dataType, BinaryType | StringType):
            type_name = schema[self.name].dataType.simpleString()
            raise self.wrong(self.name, f"a payload is binary or string, not {type_name}")

    def payloads(self, batch: Any) -> list[bytes]:
        """Return the payloads of the rows of an Arrow batch."""
        column = batch.column(0)
        if column.null_count:
            raise self.wrong(self.name, "a payload is null; leave such rows out")
        payloads: list[bytes] = column.cast(pa.binary()).to_pylist()
        return payloads


class AsArrow(Encoder):
    """Writes all columns as Arrow streams: one message for many rows."""

    def check(self, schema: StructType) -> None:
        """Accept every schema: Arrow has a type for everything that Spark hands over."""

    def payloads(self, batch: Any) -> list[bytes]:
        """Return the rows of an Arrow batch in pieces that are no larger than a message may be."""
        pieces = [batch.slice(at, self.rows) for at in range(0, batch.num_rows, self.rows)]
        return [to_arrow(piece) for piece in pieces]


class AsJson(Encoder):
    """Writes all columns as JSON objects: one message per row."""

    def check(self, schema: StructType) -> None:
        """Raise `BadColumnError` if two columns have the same name."""
        twice = {name for name in self.names if self.names.count(name) > 1}
        if twice:
            raise self.wrong(
                min(twice), "two columns have this name, and a JSON object has one field of a name"
            )

    def payloads(self, batch: Any) -> list[bytes]:
        """Return the payloads of the rows of an Arrow batch; they are built column by column."""
        parts: list[Any] = []
        for name, column in zip(self.names, batch.columns, strict=True):
            before = "," if parts else "{"
            parts += [f"{before}{json.dumps(name, ensure_ascii=False)}:", self._texts(name, column)]
        joined = pc.binary_join_element_wise(*parts, "}", "")
        payloads: list[bytes] = joined.cast(pa.binary()).to_pylist()
        return payloads

    def _texts(self, name: str, column: Any) -> Any:
        """Return each value as JSON text."""
        kind = column.type
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_decimal(kind):
            texts = column.cast(pa.string())
        elif types.is_floating(kind):
            if not pc.all(pc.is_finite(column)).as_py() and column.null_count < len(column):
                raise self.wrong(name, "NaN and infinity cannot be JSON; make them null, or text")
            texts = column.cast(pa.string())
        elif types.is_string(kind) or types.is_large_string(kind):
            texts = _quoted(column.cast(pa.string()))
        else:
            texts = _each(column, lambda value: self._dumped(name, value))
        return pc.fill_null(texts, "null")

    def _dumped(self, name: str, value: Any) -> str:
        try:
            return json.dumps(
                _plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False
            )
        except (TypeError, ValueError) as error:
            raise self.wrong(name, f"{value!r} cannot be JSON: {error}") from error


def _quoted(texts: Any) -> Any:
    """Return texts as JSON strings.

    >>> _quoted(pa.array(['a"b', None, 'c'])).to_pylist()
    ['"a\\\\"b"', None, '"c"']
    """
    if pc.any(pc.match_substring_regex(texts, _CONTROL)).as_py():
        return _each(texts, lambda text: json.dumps(text, ensure_ascii=False))
    for letter in ("\\", '"'):
        if pc.any(pc.match_substring(texts, letter)).as_py():
            texts = pc.replace_substring(texts, letter, "\\" + letter)
    return pc.binary_join_element_wise('"', texts, '"', "")


def _each(column: Any, dump: Callable[[Any], str]) -> Any:
    values = column.to_pylist()
    return pa.array([None if value is None else dump(value) for value in values], pa.string())


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold, in forms that Spark's from_json() and Arrow's parser read."""
    match value:
        case dt.datetime():
            if value.tzinfo is not None:
                return value.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")
            return value.isoformat()
        case dt.date():
            return value.isoformat()
        case bytes():
            return base64.b64encode(value).decode()
        case decimal.Decimal():
            return str(value)
        case float() if not math.isfinite(value):
            raise ValueError("NaN and infinity cannot be JSON")
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() if value and all(isinstance(item, tuple) for item in value):  # a map
            return {str(key): _plain(item) for key, item in value}
        case list():
            return [_plain(item) for item in value]
        case _:
            return value


ENCODERS: Final[dict[str, type[Encoder]]] = {
    "bytes": FromColumn,
    "json": AsJson,
    "arrow": AsArrow,
}
