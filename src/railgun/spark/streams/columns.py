"""Batches of messages as Arrow arrays: of their tables of ends and their bytes, without an object for a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from railgun.spark.streams.feed import Span
from railgun.transport.records import Column

METADATA: Final = ("offset", "time", "id", "headers", "payload")
"""What there is to a message: columns of format bytes, and with a `_` before them of the others."""


def column(name: str, spans: Sequence[Span]) -> Any:
    """One of `METADATA`: int64, timestamp, or binary with null where there is none."""
    match name:
        case "offset":
            return offsets(spans)
        case "time":
            times = np.array([span.records.time for span in spans], np.int64)
            every = np.repeat(times, [len(span) for span in spans])
            return pa.array(every).cast(pa.timestamp("us", "UTC"))
        case "id":
            return binary(spans, [span.records.id_column() for span in spans], empty_is_null=True)
        case "headers":
            found = [span.records.header_column() for span in spans]
            return binary(spans, found, empty_is_null=True)
        case _:
            return payloads(spans)


def offsets(spans: Sequence[Span]) -> Any:
    """Where each message lies in its stream.

    >>> from railgun.transport.records import Records, build
    >>> offsets([Span(Records(build([b"a", b"b", b"c"])), 1, 3)]).to_pylist()
    [1, 2]
    """
    first, last = spans[0].first, spans[-1].first + len(spans[-1])
    if last - first == sum(map(len, spans)):
        return pa.array(np.arange(first, last, dtype=np.int64))
    every = [np.arange(span.first, span.first + len(span), dtype=np.int64) for span in spans]
    return pa.array(np.concatenate(every))


def payloads(spans: Sequence[Span]) -> Any:
    """The payload of each message.

    >>> from railgun.transport.records import Records, build
    >>> batch = Records(build([b"tea", b"", b"cake"]))
    >>> payloads([Span(batch, 1, 3), Span(batch, 0, 1)]).to_pylist()
    [b'', b'cake', b'tea']
    """
    return binary(spans, [span.records.payload_column() for span in spans])


def binary(
    spans: Sequence[Span], columns: Sequence[Column | None], *, empty_is_null: bool = False
) -> Any:
    """One array of the same column of many batches; None: this one has no such column."""
    count = sum(map(len, spans))
    if not any(columns):
        return pa.nulls(count, pa.binary())
    ends = np.zeros(count + 1, np.int32)
    pieces: list[memoryview] = []
    at = total = 0
    for span, found in zip(spans, columns, strict=True):
        rows = len(span)
        if found is None:
            ends[at + 1 : at + 1 + rows] = total
        else:
            theirs, data = found
            begin = int(theirs[span.low - 1]) if span.low else 0
            stop = int(theirs[span.high - 1])
            ends[at + 1 : at + 1 + rows] = theirs[span.low : span.high]
            ends[at + 1 : at + 1 + rows] += total - begin
            pieces.append(data[begin:stop])
            total += stop - begin
        at += rows
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)  # type: ignore[assignment]
    valid, nulls = None, 0
    if empty_is_null:
        there = ends[1:] > ends[:-1]
        nulls = count - int(there.sum())
        valid = pa.py_buffer(np.packbits(there, bitorder="little")) if nulls else None
    buffers = [valid, pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), count, buffers, nulls)
