"""Encode keyed records as bytes, with their order, on their way from a task of one stage to a task of the next.

A task sorts its records into as many pieces as there are tasks behind the shuffle. Rules:

1. The records of a piece are in order. A task's next piece for the same target begins after its previous one has ended.
2. Numbers that differ little from row to row (places, times) are written as differences.
3. Plain columns of keys and values travel in Arrow's format; others as on the links between workers
   (`transport.columns`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from railgun.client.payloads import to_arrow
from railgun.engine.batch import order as o
from railgun.engine.batch.columns import as_items, as_list
from railgun.transport.columns import decode_column, encode_column
from railgun.transport.rows import Times, joined_late, joined_times, pick

# kind, port, number of rows, number of path columns, whether times differ, whether any record is late
_HEAD: Final = struct.Struct("<cHIBBB")
_NUMBER: Final = struct.Struct("<q")
_LENGTH: Final = struct.Struct("<I")
_ROWS: Final = b"r"
_TABLE: Final = b"t"
_EQUAL_STEPS, _PLAIN = b"s", b"w"
_STEPS: Final = ((7, b"1", "<i1"), (15, b"2", "<i2"), (31, b"4", "<i4"))
_WIDTHS: Final = {code: np.dtype(kind) for _, code, kind in _STEPS}
_NARROW: Final = (pa.int8(), pa.int16(), pa.int32())
KEY: Final = "k"


@dataclass(slots=True)
class Piece:
    """Keyed records for one port of a stage, in order."""

    paths: o.Paths
    keys: list[Any]
    values: list[Any]
    times: Times | int
    port: int
    late: Times | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def encode(self) -> bytes:
        """Return the piece as bytes."""
        keys = encode_column(self.keys)
        head = _encode_head(_ROWS, self.port, len(self), self.paths, self.times, self.late)
        return b"".join((head, _LENGTH.pack(len(keys)), keys, encode_column(self.values)))


def encode_table(
    table: pa.RecordBatch,
    paths: o.Paths,
    times: Times | int,
    port: int,
    late: Times | None = None,
) -> bytes:
    """Encode a piece that is a table: keys in its first column, values in the others (see `as_items`)."""
    head = _encode_head(_TABLE, port, table.num_rows, paths, times, late)
    table = narrowed(table)
    return head + to_arrow(table)


def narrowed(table: pa.RecordBatch) -> pa.RecordBatch:
    """Cast columns of small whole numbers to smaller types; as Python objects the numbers stay the same.

    >>> narrowed(pa.RecordBatch.from_pydict({"a": [1, 2], "b": [1, 70_000]})).schema.types
    [DataType(int8), DataType(int32)]
    """
    columns = []
    for column in table.columns:
        if pa.types.is_int64(column.type):
            bounds = pc.min_max(column).as_py()
            low, high = bounds["min"] or 0, bounds["max"] or 0
            for kind in _NARROW:
                if -(1 << kind.bit_width - 1) <= low and high < 1 << kind.bit_width - 1:
                    column = column.cast(kind, safe=False)
                    break
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, table.schema.names)


def one_batch(data: bytes | memoryview) -> pa.RecordBatch:
    """Return the one record batch in the bytes that `to_arrow` returned."""
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_next_batch()


def decode(data: memoryview) -> Piece:
    """Return the piece that was encoded in `data`."""
    kind, port, rows, columns, times_differ, some_late = _HEAD.unpack_from(data)
    at = _HEAD.size
    paths = []
    for _ in range(columns):
        column, at = _decode_numbers(data, at, rows)
        paths.append(column)
    times: Times | int
    if times_differ:
        times, at = _decode_numbers(data, at, rows)
    else:
        (times,) = _NUMBER.unpack_from(data, at)
        at += _NUMBER.size
    late = None
    if some_late:
        late, at = _decode_numbers(data, at, rows)
    if kind == _TABLE:
        table = one_batch(data[at:])
        values = as_items(table.schema.names[1:], table.columns[1:], rows)
        return Piece(tuple(paths), as_list(table.column(0)), values, times, port, late)
    (length,) = _LENGTH.unpack_from(data, at)
    at += _LENGTH.size
    keys = decode_column(data[at : at + length], rows)
    values = decode_column(data[at + length :], rows)
    return Piece(tuple(paths), keys, values, times, port, late)


def _encode_head(
    kind: bytes,
    port: int,
    rows: int,
    paths: o.Paths,
    times: Times | int,
    late: Times | None = None,
) -> bytes:
    times_differ = not isinstance(times, int)
    parts = [_HEAD.pack(kind, port, rows, len(paths), times_differ, late is not None)]
    parts += map(_encode_numbers, paths)
    parts.append(_NUMBER.pack(times) if isinstance(times, int) else _encode_numbers(times))
    if late is not None:
        parts.append(_encode_numbers(late))
    return b"".join(parts)


def _encode_numbers(numbers: o.Numbers) -> bytes:
    first = _NUMBER.pack(int(numbers[0]))
    steps = np.diff(numbers)
    if not steps.any():
        return _EQUAL_STEPS + first
    least, most = int(steps.min()), int(steps.max())
    if _no_overflow(numbers):
        for bits, code, kind in _STEPS:
            if -(1 << bits) <= least and most < 1 << bits:
                return code + first + steps.astype(kind).tobytes()
    return _PLAIN + numbers.astype("<i8", copy=False).tobytes()


def _no_overflow(numbers: o.Numbers) -> bool:
    return int(numbers.max()) - int(numbers.min()) < 1 << 62


def _decode_numbers(data: memoryview, at: int, rows: int) -> tuple[o.Numbers, int]:
    encoding = bytes(data[at : at + 1])
    at += 1
    if encoding == _PLAIN:
        return np.frombuffer(data, "<i8", rows, at), at + 8 * rows
    (first,) = _NUMBER.unpack_from(data, at)
    at += _NUMBER.size
    numbers = np.full(rows, first, dtype=np.int64)
    if encoding in _WIDTHS:
        width = _WIDTHS[encoding]
        steps = np.frombuffer(data, width, rows - 1, at)
        at += width.itemsize * (rows - 1)
        np.cumsum(steps, out=numbers[1:])
        numbers[1:] += first
    return numbers, at


class Merge:
    """Merge pieces of many tasks, which are added in the order of their first records, into one order.

    Records before the beginning of the next piece are complete and can be released. So a merge holds not much more than
    one piece of each task.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._last: o.Path = ()
        self._sorted = True
        self.rows = 0

    def add(self, piece: Piece) -> None:
        """Add a piece, which begins no earlier than the pieces before it."""
        if self._pieces and (o.first(piece.paths) < self._last or self._mixes(piece)):
            self._sorted = False
        self._pieces.append(piece)
        self._last = max(self._last, o.last(piece.paths))
        self.rows += len(piece)

    def _mixes(self, piece: Piece) -> bool:
        before = self._pieces[-1]
        return len(before.paths) != len(piece.paths) or before.port != piece.port

    def release(self, bound: o.Path | None = None) -> Released | None:
        """Return all records before `bound` (without one: all records), in order; None if there are none."""
        if not self._pieces:
            return None
        whole = Released.of(self._pieces)
        if not self._sorted:
            whole = whole.take(o.ranks(whole.paths))
        if bound is not None and not self._last < bound:
            count = int(np.count_nonzero(o.before(whole.paths, bound)))
            if not count:
                self._put_back(whole)
                return None
            self._put_back(whole.cut(count))
            whole = whole.cut(0, count)
        else:
            self._pieces, self._sorted, self.rows = [], True, 0
        return whole

    def _put_back(self, rest: Released) -> None:
        self._pieces = rest.pieces()
        self._sorted = len(self._pieces) == 1
        self.rows = len(rest)


@dataclass(slots=True)
class Released:
    """Records in order, for any port."""

    paths: o.Paths
    keys: list[Any]
    values: list[Any]
    times: Times | int
    ports: NDArray[np.int32] | int
    late: Times | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @staticmethod
    def of(pieces: Sequence[Piece]) -> Released:
        """Concatenate pieces; the records keep the order of the pieces."""
        head = pieces[0]
        if len(pieces) == 1:
            return Released(head.paths, head.keys, head.values, head.times, head.port, head.late)
        keys = list(chain.from_iterable(piece.keys for piece in pieces))
        values = list(chain.from_iterable(piece.values for piece in pieces))
        times = joined_times([(piece.times, len(piece)) for piece in pieces])
        ports: NDArray[np.int32] | int = head.port
        if any(piece.port != ports for piece in pieces):
            sizes = [len(piece) for piece in pieces]
            ports = np.repeat(np.array([p.port for p in pieces], dtype=np.int32), sizes)
        late = joined_late([(piece.late, len(piece)) for piece in pieces])
        paths = o.joined([piece.paths for piece in pieces])
        return Released(paths, keys, values, times, ports, late)

    def take(self, rows: NDArray[np.intp]) -> Released:
        """Return these rows, in this order."""
        index = rows.tolist()
        return Released(
            tuple(column[rows] for column in self.paths),
            pick(self.keys, index),
            pick(self.values, index),
            self.times if isinstance(self.times, int) else self.times[rows],
            self.ports if isinstance(self.ports, int) else self.ports[rows],
            None if self.late is None else self.late[rows],
        )

    def cut(self, start: int, end: int | None = None) -> Released:
        """Return the rows from `start` up to `end`."""
        part = slice(start, end)
        return Released(
            tuple(column[part] for column in self.paths),
            self.keys[part],
            self.values[part],
            self.times if isinstance(self.times, int) else self.times[part],
            self.ports if isinstance(self.ports, int) else self.ports[part],
            None if self.late is None else self.late[part],
        )

    def pieces(self) -> list[Piece]:
        """Return the records as one piece for each port."""
        if isinstance(self.ports, int):
            return [Piece(self.paths, self.keys, self.values, self.times, self.ports, self.late)]
        pieces = []
        for port in np.unique(self.ports).tolist():
            rows = self.take(np.flatnonzero(self.ports == port))
            pieces.append(Piece(rows.paths, rows.keys, rows.values, rows.times, port, rows.late))
        return pieces
