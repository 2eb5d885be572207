"""Decode messages that are JSON objects, many at once with Arrow's parser.

The payloads of a batch are given to the parser joined by newlines. The parser ignores lines: it would accept half an
object in one payload and its other half in the next. Two checks exclude that. First, each payload begins with `{` and
ends with `}`. An object that is unfinished at such an end would have to go on with a comma or another `}`, or be within
a string, where no newline may be; and the next payload begins with none of these. So each payload has at least one
object, or is an error. Second, if there are as many objects as payloads, each payload is one object.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyarrow import json as arrow_json
from pyarrow import types
from pyspark.sql.types import StructType

from railgun.spark.streams.columns import offsets
from railgun.spark.streams.decode import Decoder
from railgun.spark.streams.errors import BadColumnError
from railgun.spark.streams.feed import Span

_PARSED_FROM_TEXT: Final[tuple[Callable[[Any], bool], ...]] = (types.is_date, types.is_binary)
"""Types that Arrow's parser does not read from texts, but this module does."""
_SHOWN_BYTES: Final = 60


class FromJson(Decoder):
    """Decodes messages that are JSON objects: one column per field."""

    def __init__(self, stream: str, schema: StructType) -> None:
        super().__init__(stream, schema)
        fields = [self.schema.field(name) for name in self.own]
        self.parsed = pa.schema(
            [
                pa.field(field.name, _parsed(field.type)) for field in fields
            ]  # nulls are looked at later
        )

    def check(self, field: Any) -> None:
        """Raise `BadColumnError` if a column cannot be provided."""
        super().check(field)
        if self.of_message(field.name) is None and _unreadable(field.type, top=True):
            raise self.wrong(
                field.name,
                f"{field.type} cannot be read from JSON here; read the messages as bytes, and use from_json()",
            )

    def rows(self, spans: Sequence[Span]) -> Iterator[Any]:
        """Yield one Arrow batch of all these messages."""
        row_offsets = offsets(spans)
        payloads: list[bytes] = []
        for span in spans:
            payloads += span.records.payloads()[span.low : span.high]
        table = self._parse(payloads, row_offsets)
        arrays = []
        for field in self.schema:
            if self.of_message(field.name) is None:
                arrays.append(self._cast(table.column(field.name), field, row_offsets))
            else:
                arrays.append(self.metadata(field.name, spans))
        yield self.finished(arrays, row_offsets)

    # ------------------------------------------------------------ parsing

    def _parse(self, payloads: list[bytes], row_offsets: Any) -> Any:
        if not _enclosed(payloads):
            payloads = [payload.strip() for payload in payloads]
        try:
            table = _parsed_by_arrow(payloads, self.parsed)
        except (pa.ArrowInvalid, ValueError) as error:
            raise self._error_of(payloads, row_offsets, error) from error
        if table.num_rows == len(payloads):
            return table
        raise self._error_of(payloads, row_offsets, None)

    def _error_of(
        self, payloads: list[bytes], row_offsets: Any, error: Exception | None
    ) -> BadColumnError:
        """Return the error that names the first bad message, and its column."""
        low, high = 0, len(payloads)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_bad(payloads[low:middle]) else (middle, high)
        payload, offset = payloads[low], row_offsets[low].as_py()
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError) as parse_error:
            return BadColumnError(
                f"{self.subject}, offset {offset}: {_start(payload)} is not JSON: {parse_error}"
            )
        if not isinstance(value, dict):
            return BadColumnError(
                f"{self.subject}, offset {offset}: {_start(payload)} is not a JSON object"
            )
        for field in self.parsed:
            if self._is_bad([payload], pa.schema([field])):
                type_name = self.schema.field(field.name).type
                shown = _start(json.dumps(value.get(field.name)).encode())
                return self.wrong(field.name, f"{shown} does not fit into {type_name}", offset)
        return BadColumnError(
            f"{self.subject}, offset {offset}: {_start(payload)} cannot be read: {error}"
        )

    def _is_bad(self, payloads: list[bytes], schema: Any = None) -> bool:
        try:
            wanted = self.parsed if schema is None else schema
            return bool(_parsed_by_arrow(payloads, wanted).num_rows != len(payloads))
        except (pa.ArrowInvalid, ValueError):
            return True

    # ------------------------------------------------------------ types

    def _cast(self, column: Any, field: Any, row_offsets: Any) -> Any:
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.chunks else pa.array([], field.type)
        if array.type == field.type:
            return array
        try:
            return _from_text(array, field.type)
        except ValueError:
            for at in range(len(array)):
                try:
                    _from_text(array.slice(at, 1), field.type)
                except ValueError as error:
                    problem = f"{array[at].as_py()!r} does not fit into {field.type}"
                    raise self.wrong(field.name, problem, row_offsets[at].as_py()) from error
            raise


def _parsed_by_arrow(payloads: list[bytes], schema: Any) -> Any:
    if not _enclosed(payloads):
        raise ValueError("these are no objects")
    data = b"\n".join(payloads)
    if not data.isascii():
        data.decode()  # Arrow would accept bytes that are not UTF-8
    return arrow_json.read_json(
        pa.BufferReader(data),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=arrow_json.ParseOptions(
            explicit_schema=schema, newlines_in_values=True, unexpected_field_behavior="ignore"
        ),
    )


def _enclosed(payloads: list[bytes]) -> bool:
    """Return whether each payload is within braces."""
    return {payload[:1] for payload in payloads} == {b"{"} and {
        payload[-1:] for payload in payloads
    } == {b"}"}


def _parsed(wanted: Any) -> Any:
    """Return the type that Arrow's parser should return."""
    return pa.string() if any(is_type(wanted) for is_type in _PARSED_FROM_TEXT) else wanted


def _unreadable(wanted: Any, top: bool = False) -> bool:
    if types.is_struct(wanted):
        return any(_unreadable(field.type) for field in wanted)
    if types.is_list(wanted):
        return _unreadable(wanted.value_type)
    if any(is_type(wanted) for is_type in _PARSED_FROM_TEXT):
        return not top
    readable = (
        types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_decimal,
        types.is_timestamp, types.is_null,
    )  # fmt: skip
    return not any(is_type(wanted) for is_type in readable)


def _from_text(array: Any, wanted: Any) -> Any:
    if not types.is_binary(wanted):
        return array.cast(wanted)
    try:
        return pa.array(
            [None if v is None else base64.b64decode(v, validate=True) for v in array.to_pylist()],
            wanted,
        )
    except binascii.Error as error:
        raise ValueError(str(error)) from error


def _start(payload: bytes) -> str:
    return repr(payload if len(payload) <= _SHOWN_BYTES else payload[: _SHOWN_BYTES - 3] + b"...")
