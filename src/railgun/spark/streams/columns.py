"""Turn batches of messages into Arrow arrays, from their tables of ends and their bytes, without an object a
message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from railgun.spark.streams.feed import Span
from railgun.transport.records import Column

METADATA: Final = ("offset", "time", "id", "headers", "payload")
"""The columns of a message's own data: of the format bytes, and of the others with a `_` in front."""


def column(name: str, spans: Sequence[Span]) -> Any:
    """Return the column of `METADATA` with this name: int64, timestamp, or binary with null for a missing value."""
    match name:
        case "offset":
            return offsets(spans)
        case "time":
            times = np.array([span.records.time for span in spans], np.int64)
            repeated = np.repeat(times, [len(span) for span in spans])
            return pa.array(repeated).cast(pa.timestamp("us", "UTC"))
        case "id":
            return binary(spans, [span.records.id_column() for span in spans], empty_is_null=True)
        case "headers":
            headers = [span.records.header_column() for span in spans]
            return binary(spans, headers, empty_is_null=True)
        case _:
            return payloads(spans)


def offsets(spans: Sequence[Span]) -> Any:
    """Return the offset of each message.

    >>> from railgun.transport.records import Records, build
    >>> offsets([Span(Records(build([b"a", b"b", b"c"])), 1, 3)]).to_pylist()
    [1, 2]
    """
    first, last = spans[0].first, spans[-1].first + len(spans[-1])
    if last - first == sum(map(len, spans)):
        return pa.array(np.arange(first, last, dtype=np.int64))
    ranges = [np.arange(span.first, span.first + len(span), dtype=np.int64) for span in spans]
    return pa.array(np.concatenate(ranges))


def payloads(spans: Sequence[Span]) -> Any:
    """Return the payload of each message.

    >>> from railgun.transport.records import Records, build
    >>> batch = Records(build([b"tea", b"", b"cake"]))
    >>> payloads([Span(batch, 1, 3), Span(batch, 0, 1)]).to_pylist()
    [b'', b'cake', b'tea']
    """
    return binary(spans, [span.records.payload_column() for span in spans])


def binary(
    spans: Sequence[Span], columns: Sequence[Column | None], *, empty_is_null: bool = False
) -> Any:
    """Return one binary array from the same column of many batches; None stands for a batch without this column."""
    count = sum(map(len, spans))
    if not any(columns):
        return pa.nulls(count, pa.binary())
    ends = np.zeros(count + 1, np.int32)
    pieces: list[memoryview] = []
    at = total = 0
    for span, column in zip(spans, columns, strict=True):
        rows = len(span)
        if column is None:
            ends[at + 1 : at + 1 + rows] = total
        else:
            column_ends, joined = column
            begin = int(column_ends[span.low - 1]) if span.low else 0
            stop = int(column_ends[span.high - 1])
            ends[at + 1 : at + 1 + rows] = column_ends[span.low : span.high]
            ends[at + 1 : at + 1 + rows] += total - begin
            pieces.append(joined[begin:stop])
            total += stop - begin
        at += rows
    joined = pieces[0] if len(pieces) == 1 else b"".join(pieces)  # type: ignore[assignment]
    valid, nulls = None, 0
    if empty_is_null:
        present = ends[1:] > ends[:-1]
        nulls = count - int(present.sum())
        valid = pa.py_buffer(np.packbits(present, bitorder="little")) if nulls else None
    buffers = [valid, pa.py_buffer(ends), pa.py_buffer(joined)]
    return pa.Array.from_buffers(pa.binary(), count, buffers, nulls)
