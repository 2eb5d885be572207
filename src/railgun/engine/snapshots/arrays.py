"""Make Arrow arrays from Python lists and back, at C speed and without pandas.

The first call of `pa.array` or `to_numpy` imports pandas, which takes longer than most snapshots and would pause the
first one. So this module makes arrays from buffers.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from railgun.hashing import Hashes
from railgun.lazy import LazyModule

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:  # of an extra, and slow to import: when they are needed
    pa = LazyModule("pyarrow")
    pc = LazyModule("pyarrow.compute")


ARRAY_MIN_VALUES: Final = 64
"""With fewer values than this, a list is faster than an array."""

MAX_ARRAY_BYTES: Final = (1 << 31) - 1
"""The size limit of one Arrow array, whose offsets have 32 bits."""

_MAX_WAITING_VALUES: Final = 1 << 14  # in a list, before they become an array


class Column:
    """A column that grows.

    Small batches of values wait in a list, because making an array costs more than they do.
    """

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self.arrays: list[pa.Array] = []
        self.waiting: list[Any] = []

    def extend(self, values: Sequence[Any] | pa.Array | None, count: int) -> None:
        """Append `values`; if they are None, append `count` nulls."""
        if values is None:
            if count < ARRAY_MIN_VALUES:
                self.waiting += [None] * count
            else:
                self._settle()
                self.arrays.append(pa.nulls(count, self.kind))
        elif isinstance(values, pa.Array):
            self._settle()
            self.arrays.append(values)
        else:
            self.waiting += values
            if len(self.waiting) >= _MAX_WAITING_VALUES:
                self._settle()

    def _settle(self) -> None:
        if self.waiting:
            self.arrays += arrays(self.waiting, self.kind)
            self.waiting = []

    def finish(self) -> pa.ChunkedArray:
        """Return all values and empty the column."""
        self._settle()
        arrays, self.arrays = self.arrays, []
        return pa.chunked_array(arrays, self.kind)


def fixed(kind: pa.DataType, count: int, buffer: Any) -> pa.Array:
    """Return an array of `count` values of a fixed-width type, given their bytes."""
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(buffer)])


def bits(flags: bytes | bytearray | NDArray[np.bool_]) -> pa.Array:
    """Return an array of truth values, given one byte for each."""
    packed = np.packbits(np.frombuffer(flags, dtype=np.bool_), bitorder="little")
    return fixed(pa.bool_(), len(flags), packed)


def ints(values: list[int]) -> pa.Array:
    """Return an array of whole numbers. Raises `OverflowError` if one does not fit into 64 bits."""
    return fixed(pa.int64(), len(values), array.array("q", values))


def arrays(values: list[Any], kind: pa.DataType) -> list[pa.Array]:
    """Return text or bytes, of which some may be None, as an array.

    The list has several arrays if the values do not fit into one.
    """
    nulls = values.count(None)
    valid = bits(bytes([value is not None for value in values])).buffers()[1] if nulls else None
    empty: Any = "" if kind == pa.string() else b""
    parts = [value or empty for value in values] if nulls else values
    if kind == pa.string():
        text = "".join(parts)
        data = text.encode()
        if len(data) != len(text):
            parts = list(map(str.encode, parts))
    else:
        data = b"".join(parts)
    if len(data) > MAX_ARRAY_BYTES and len(values) > 1:
        half = len(values) // 2
        return arrays(values[:half], kind) + arrays(values[half:], kind)
    offsets = np.zeros(len(parts) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, parts), dtype=np.int32, count=len(parts)), out=offsets[1:])
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(data)]
    return [pa.Array.from_buffers(kind, len(values), buffers, nulls)]


# A pickle of any number of 64 bits: the opcodes PROTO 5 and LONG1 of 8 bytes, the number, STOP.
_INT_PICKLE: Final = np.dtype([("head", "<u4"), ("value", "<i8"), ("stop", "u1")])
_INT_HEAD: Final = int.from_bytes(b"\x80\x05\x8a\x08", "little")
_INT_STOP: Final = ord(".")


def pickled_ints(numbers: pa.Array) -> pa.Array:
    """Return the pickle of each number, made without a call for each.

    >>> import pickle
    >>> [pickle.loads(data) for data in pickled_ints(ints([1, -(2**63)])).to_pylist()]
    [1, -9223372036854775808]
    """
    records = np.empty(len(numbers), dtype=_INT_PICKLE)
    records["head"], records["stop"] = _INT_HEAD, _INT_STOP
    records["value"] = np.frombuffer(numbers.buffers()[1], dtype=np.int64)
    offsets = np.arange(len(numbers) + 1, dtype=np.int32) * np.int32(_INT_PICKLE.itemsize)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(records)]
    return pa.Array.from_buffers(pa.binary(), len(numbers), buffers)


def unpickled_ints(pickles: pa.ChunkedArray) -> list[Any] | None:
    """Return the numbers if all pickles were made by `pickled_ints`; else None."""
    numbers: list[Any] = []
    for chunk in pickles.chunks:
        if not len(chunk):
            continue
        _, places, data = chunk.buffers()
        offsets = np.frombuffer(places, dtype=np.int32)[chunk.offset :][: len(chunk) + 1]
        if chunk.null_count or (np.diff(offsets) != _INT_PICKLE.itemsize).any():
            return None
        records = np.frombuffer(data, _INT_PICKLE, count=len(chunk), offset=int(offsets[0]))
        if (records["head"] != _INT_HEAD).any() or (records["stop"] != _INT_STOP).any():
            return None
        numbers += records["value"].tolist()
    return numbers


def ints_of(texts: pa.ChunkedArray) -> list[Any] | None:
    """Return the numbers if all texts are whole numbers of 64 bits; else None."""
    if not len(texts) or not texts[0].as_py().lstrip("-").isdecimal():
        return None
    try:
        column = texts.cast(pa.int64())
    except pa.ArrowInvalid:
        return None
    numbers: list[Any] = hashes_of(column).view(np.int64).tolist()
    return numbers


def hashes_of(column: pa.ChunkedArray) -> Hashes:
    """Return the hashes in a column of int64."""
    pieces = [
        np.frombuffer(chunk.buffers()[1], dtype=np.uint64)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint64)


def flags(column: pa.ChunkedArray) -> list[bool]:
    """Return the truth values of a column, which are mostly all False."""
    if not pc.any(column).as_py():
        return [False] * len(column)
    return [*column.to_pylist()]
