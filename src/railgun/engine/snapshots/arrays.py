"""Arrow arrays from Python lists and back, at C speed and without pandas.

`pa.array` and `to_numpy` import pandas when they are first called, which takes longer than most snapshots and would
be a pause in the first of them. So arrays are made from buffers here.
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


MANY: Final = 64
"""Values from which an array is worth making."""

MOST: Final = (1 << 31) - 1
"""Bytes an array can hold."""

_ENOUGH: Final = 1 << 14  # values that wait as a list


class Column:
    """A column that grows. Few values at a time wait as a list: making an array costs more than they do."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self.arrays: list[pa.Array] = []
        self.waiting: list[Any] = []

    def extend(self, values: Sequence[Any] | pa.Array | None, count: int) -> None:
        """Append the values; None: as many nulls as `count`."""
        if values is None:
            if count < MANY:
                self.waiting += [None] * count
            else:
                self._settle()
                self.arrays.append(pa.nulls(count, self.kind))
        elif isinstance(values, pa.Array):
            self._settle()
            self.arrays.append(values)
        else:
            self.waiting += values
            if len(self.waiting) >= _ENOUGH:
                self._settle()

    def _settle(self) -> None:
        if self.waiting:
            self.arrays += arrays(self.waiting, self.kind)
            self.waiting = []

    def finish(self) -> pa.ChunkedArray:
        """All values."""
        self._settle()
        arrays, self.arrays = self.arrays, []
        return pa.chunked_array(arrays, self.kind)


def fixed(kind: pa.DataType, count: int, buffer: Any) -> pa.Array:
    """Values of one width, from their bytes."""
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(buffer)])


def bits(flags: bytes | bytearray | NDArray[np.bool_]) -> pa.Array:
    """Truth values, from a byte each."""
    packed = np.packbits(np.frombuffer(flags, dtype=np.bool_), bitorder="little")
    return fixed(pa.bool_(), len(flags), packed)


def ints(values: list[int]) -> pa.Array:
    """Whole numbers; an OverflowError if one has more than 64 bits."""
    return fixed(pa.int64(), len(values), array.array("q", values))


def arrays(values: list[Any], kind: pa.DataType) -> list[pa.Array]:
    """Text or bytes, some of them perhaps None, as an array; as several, if one cannot hold them."""
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
    if len(data) > MOST and len(values) > 1:
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
    """One pickle a number, without a call for each.

    >>> import pickle
    >>> [pickle.loads(data) for data in pickled_ints(ints([1, -(2**63)])).to_pylist()]
    [1, -9223372036854775808]
    """
    made = np.empty(len(numbers), dtype=_INT_PICKLE)
    made["head"], made["stop"] = _INT_HEAD, _INT_STOP
    made["value"] = np.frombuffer(numbers.buffers()[1], dtype=np.int64)
    offsets = np.arange(len(numbers) + 1, dtype=np.int32) * np.int32(_INT_PICKLE.itemsize)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(made)]
    return pa.Array.from_buffers(pa.binary(), len(numbers), buffers)


def unpickled_ints(pickles: pa.ChunkedArray) -> list[Any] | None:
    """The numbers, if all pickles are of the kind above."""
    numbers: list[Any] = []
    for chunk in pickles.chunks:
        if not len(chunk):
            continue
        _, places, data = chunk.buffers()
        offsets = np.frombuffer(places, dtype=np.int32)[chunk.offset :][: len(chunk) + 1]
        if chunk.null_count or (np.diff(offsets) != _INT_PICKLE.itemsize).any():
            return None
        made = np.frombuffer(data, _INT_PICKLE, count=len(chunk), offset=int(offsets[0]))
        if (made["head"] != _INT_HEAD).any() or (made["stop"] != _INT_STOP).any():
            return None
        numbers += made["value"].tolist()
    return numbers


def ints_of(texts: pa.ChunkedArray) -> list[Any] | None:
    """The numbers, if all texts are whole numbers of 64 bits."""
    if not len(texts) or not texts[0].as_py().lstrip("-").isdecimal():
        return None
    try:
        column = texts.cast(pa.int64())
    except pa.ArrowInvalid:
        return None
    numbers: list[Any] = hashes_of(column).view(np.int64).tolist()
    return numbers


def hashes_of(column: pa.ChunkedArray) -> Hashes:
    """The hashes of a column of int64."""
    pieces = [
        np.frombuffer(chunk.buffers()[1], dtype=np.uint64)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint64)


def flags(column: pa.ChunkedArray) -> list[bool]:
    """The truth values of a column, which are mostly all False."""
    if not pc.any(column).as_py():
        return [False] * len(column)
    return [*column.to_pylist()]
