"""What rows of Spark become: payloads, from one column, or from all of them as JSON objects or Arrow batches.

Rules:

1. What a format cannot write is refused when Spark plans, with the column. A column that would be left out is refused,
   too: who does not want it does not select it.
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

PAYLOADS: Final = ("payload", "value")
"""What the column of whole payloads may be called."""
_CONTROL: Final = "[\\x00-\\x1f]"


class Encoder(ABC):
    """Makes payloads of rows. It is made when Spark plans, and sent to the tasks."""

    def __init__(self, stream: str, schema: StructType, rows: int) -> None:
        self.who = f"railgun, stream {stream!r}"
        self.names = schema.fieldNames()
        self.rows = rows
        if not self.names:
            raise BadColumnError(f"{self.who}: there are no columns to write")
        self.check(schema)

    @abstractmethod
    def check(self, schema: StructType) -> None:
        """Refuse what cannot be written."""

    @abstractmethod
    def payloads(self, batch: Any) -> list[bytes]:
        """Of the rows of an Arrow batch."""

    def wrong(self, name: str, what: str) -> BadColumnError:
        """A column that is not as it should be."""
        return BadColumnError(f"{self.who}, column {name!r}: {what}")


class FromColumn(Encoder):
    """A column of whole payloads: a message a row."""

    def check(self, schema: StructType) -> None:
        """There is one column, with one of the right names, of bytes or text."""
        found = [name for name in self.names if name in PAYLOADS]
        told = ", ".join(self.names)
        if not found:
            raise BadColumnError(
                f"{self.who}: no column 'payload' or 'value' among {told}. Make one, or write all columns: option "
                "format = 'json' or 'arrow'"
            )
        if len(self.names) > 1:
            raise BadColumnError(
                f"{self.who}: of {told} only {found[0]!r} would be written. Select it alone, or write all columns: "
                "option format = 'json' or 'arrow'"
            )
        self.name = found[0]
        if not isinstance(schema[self.name].dataType, BinaryType | StringType):
            told = schema[self.name].dataType.simpleString()
            raise self.wrong(self.name, f"a payload is binary or string, not {told}")

    def payloads(self, batch: Any) -> list[bytes]:
        """Of the rows of an Arrow batch."""
        column = batch.column(0)
        if column.null_count:
            raise self.wrong(self.name, "a payload is null; leave such rows out")
        found: list[bytes] = column.cast(pa.binary()).to_pylist()
        return found


class AsArrow(Encoder):
    """All columns, as Arrow streams: a message for many rows."""

    def check(self, schema: StructType) -> None:
        """Arrow has a type for everything that Spark hands over."""

    def payloads(self, batch: Any) -> list[bytes]:
        """Of the rows of an Arrow batch, in pieces that are no larger than a message may be."""
        pieces = [batch.slice(at, self.rows) for at in range(0, batch.num_rows, self.rows)]
        return [to_arrow(piece) for piece in pieces]


class AsJson(Encoder):
    """All columns, as JSON objects: a message a row."""

    def check(self, schema: StructType) -> None:
        """No two columns have the same name."""
        twice = {name for name in self.names if self.names.count(name) > 1}
        if twice:
            raise self.wrong(min(twice), "there are two of this name, and an object has one")

    def payloads(self, batch: Any) -> list[bytes]:
        """Of the rows of an Arrow batch, column by column."""
        parts: list[Any] = []
        for name, column in zip(self.names, batch.columns, strict=True):
            before = "," if parts else "{"
            parts += [f"{before}{json.dumps(name, ensure_ascii=False)}:", self._texts(name, column)]
        joined = pc.binary_join_element_wise(*parts, "}", "")
        found: list[bytes] = joined.cast(pa.binary()).to_pylist()
        return found

    def _texts(self, name: str, column: Any) -> Any:
        """Each value as JSON."""
        kind = column.type
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_decimal(kind):
            found = column.cast(pa.string())
        elif types.is_floating(kind):
            if not pc.all(pc.is_finite(column)).as_py() and column.null_count < len(column):
                raise self.wrong(name, "NaN and infinity cannot be JSON; make them null, or text")
            found = column.cast(pa.string())
        elif types.is_string(kind) or types.is_large_string(kind):
            found = _quoted(column.cast(pa.string()))
        else:
            found = _each(column, lambda value: self._dumped(name, value))
        return pc.fill_null(found, "null")

    def _dumped(self, name: str, value: Any) -> str:
        try:
            return json.dumps(
                _plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False
            )
        except (TypeError, ValueError) as error:
            raise self.wrong(name, f"{value!r} cannot be JSON: {error}") from error


def _quoted(texts: Any) -> Any:
    """Texts as JSON.

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
    return pa.array([None if one is None else dump(one) for one in values], pa.string())


def _plain(value: Any) -> Any:
    """What JSON has no word for, in words that Spark's from_json() and Arrow's parser read."""
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
            return {str(key): _plain(one) for key, one in value.items()}
        case list() if value and all(isinstance(one, tuple) for one in value):  # a map
            return {str(key): _plain(one) for key, one in value}
        case list():
            return [_plain(one) for one in value]
        case _:
            return value


ENCODERS: Final[dict[str, type[Encoder]]] = {
    "bytes": FromColumn,
    "json": AsJson,
    "arrow": AsArrow,
}
