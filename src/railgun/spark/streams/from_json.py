"""Messages that are JSON objects, many at once through Arrow's parser.

The payloads of a batch are given to the parser one below the other. It does not care for lines: it would take half an
object here and its other half there. That it cannot: each payload begins with `{` and ends with `}`. Behind such an end
an unfinished object goes on with a comma or with another `}`, or is within a text, where no line ends; and the next
payload brings none of these. So each payload is at least one object, or an error; and if there are as many objects as
payloads, each is one.
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

_TEXTS: Final[tuple[Callable[[Any], bool], ...]] = (types.is_date, types.is_binary)
"""Types that Arrow's parser does not read from texts, and we do."""
_SHOWN: Final = 60


class FromJson(Decoder):
    """Messages that are JSON objects: a column for a field."""

    def __init__(self, stream: str, schema: StructType) -> None:
        super().__init__(stream, schema)
        fields = [self.schema.field(name) for name in self.own]
        self.parsed = pa.schema(
            [
                pa.field(field.name, _parsed(field.type)) for field in fields
            ]  # nulls are looked at later
        )

    def check(self, field: Any) -> None:
        """Refuse a column that cannot be."""
        super().check(field)
        if self.of_message(field.name) is None and _unreadable(field.type, top=True):
            raise self.wrong(
                field.name,
                f"{field.type} cannot be read from JSON here; read the messages as bytes, and use from_json()",
            )

    def rows(self, spans: Sequence[Span]) -> Iterator[Any]:
        """One Arrow batch of all of these messages."""
        of = offsets(spans)
        payloads: list[bytes] = []
        for span in spans:
            payloads += span.records.payloads()[span.low : span.high]
        table = self._parse(payloads, of)
        arrays = []
        for field in self.schema:
            if self.of_message(field.name) is None:
                arrays.append(self._as(table.column(field.name), field, of))
            else:
                arrays.append(self.metadata(field.name, spans))
        yield self.finished(arrays, of)

    # ------------------------------------------------------------ parsing

    def _parse(self, payloads: list[bytes], of: Any) -> Any:
        if not _enclosed(payloads):
            payloads = [one.strip() for one in payloads]
        try:
            found = _parsed_by_arrow(payloads, self.parsed)
        except (pa.ArrowInvalid, ValueError) as error:
            raise self._blame(payloads, of, error) from error
        if found.num_rows == len(payloads):
            return found
        raise self._blame(payloads, of, None)

    def _blame(self, payloads: list[bytes], of: Any, error: Exception | None) -> BadColumnError:
        """Which message it was, and which column."""
        low, high = 0, len(payloads)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._bad(payloads[low:middle]) else (middle, high)
        payload, offset = payloads[low], of[low].as_py()
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError) as wrong:
            return BadColumnError(
                f"{self.who}, offset {offset}: {_start(payload)} is not JSON: {wrong}"
            )
        if not isinstance(value, dict):
            return BadColumnError(
                f"{self.who}, offset {offset}: {_start(payload)} is no JSON object"
            )
        for field in self.parsed:
            if self._bad([payload], pa.schema([field])):
                told = self.schema.field(field.name).type
                shown = _start(json.dumps(value.get(field.name)).encode())
                return self.wrong(field.name, f"{shown} does not fit into {told}", offset)
        return BadColumnError(
            f"{self.who}, offset {offset}: {_start(payload)} cannot be read: {error}"
        )

    def _bad(self, payloads: list[bytes], schema: Any = None) -> bool:
        try:
            wanted = self.parsed if schema is None else schema
            return bool(_parsed_by_arrow(payloads, wanted).num_rows != len(payloads))
        except (pa.ArrowInvalid, ValueError):
            return True

    # ------------------------------------------------------------ types

    def _as(self, found: Any, field: Any, of: Any) -> Any:
        array = found.combine_chunks()
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
                    told = f"{array[at].as_py()!r} does not fit into {field.type}"
                    raise self.wrong(field.name, told, of[at].as_py()) from error
            raise


def _parsed_by_arrow(payloads: list[bytes], schema: Any) -> Any:
    if not _enclosed(payloads):
        raise ValueError("these are no objects")
    data = b"\n".join(payloads)
    if not data.isascii():
        data.decode()  # Arrow would take anything for text
    return arrow_json.read_json(
        pa.BufferReader(data),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=arrow_json.ParseOptions(
            explicit_schema=schema, newlines_in_values=True, unexpected_field_behavior="ignore"
        ),
    )


def _enclosed(payloads: list[bytes]) -> bool:
    """Whether each is within braces."""
    return {one[:1] for one in payloads} == {b"{"} and {one[-1:] for one in payloads} == {b"}"}


def _parsed(wanted: Any) -> Any:
    """The type that Arrow's parser is asked for."""
    return pa.string() if any(one(wanted) for one in _TEXTS) else wanted


def _unreadable(wanted: Any, top: bool = False) -> bool:
    if types.is_struct(wanted):
        return any(_unreadable(field.type) for field in wanted)
    if types.is_list(wanted):
        return _unreadable(wanted.value_type)
    if any(one(wanted) for one in _TEXTS):
        return not top
    fine = (
        types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_decimal,
        types.is_timestamp, types.is_null,
    )  # fmt: skip
    return not any(one(wanted) for one in fine)


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
    return repr(payload if len(payload) <= _SHOWN else payload[: _SHOWN - 3] + b"...")
