"""RowBatch: a batch of records as Python objects, in columns of keys, values and times.

It implements `engine.protocol.batch.Batch`; an implementation of Arrow tables is to follow. Only operators access the
columns; all other code uses the interface: length, key hashes, `take`, `encode` and `decode`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from railgun.engine.protocol.frontier import MIN
from railgun.errors import represent
from railgun.hashing import Hashes, hash_keys
from railgun.transport.columns import (
    CannotUnpickleError,
    DecodingError,
    decode_column,
    encode_column,
)

Times = NDArray[np.int64]
Origin = tuple[NDArray[np.intp], ...]

_HEAD: Final = struct.Struct("<IHBI")  # rows, port, flags of optional columns, bytes of the keys
_TIMES_DIFFER: Final = 1
_SOME_LATE: Final = 2
_ONE_TIME: Final = struct.Struct("<q")
_MAX_KEYS_SHOWN: Final = 10  # in the error about a batch that cannot be decoded
_MAX_KEY_LENGTH: Final = 100  # characters of each key shown there
_NO_HASHES: Final = np.empty(0, dtype=np.uint64)


class RowBatch:
    """Records in columns. `times` is one number if all rows share it; `port` is the input by which they came.

    `origin`, where it is recorded: the row from which each record comes. The first column refers to the rows that went
    into the stage (known in batch runs; else -1); two columns follow for each place where the flow branches (see
    `numbered`).

    `late`: for each row that was late, the frontier of its part of the source when it was read; `MIN` for the other
    rows; None if no row was late. A record made from a late record is late, too.

    >>> batch = RowBatch.keyed(["a", "b", "a"], [1, 2, 3], times=7)
    >>> batch.take(np.array([0, 2])).values
    [1, 3]
    >>> RowBatch.decode(batch.encode()).keys
    ['a', 'b', 'a']
    """

    __slots__ = ("hashes", "keys", "late", "origin", "port", "times", "values")

    def __init__(
        self,
        values: list[Any],
        times: Times | int,
        keys: list[Any] | None = None,
        hashes: Hashes = _NO_HASHES,
        port: int = 0,
        origin: Origin | None = None,
        late: Times | None = None,
    ) -> None:
        self.values = values
        self.times = times
        self.keys = keys
        self.hashes = hashes
        self.port = port
        self.origin = origin
        self.late = late

    @staticmethod
    def keyed(
        keys: list[Any], values: list[Any], times: Times | int = 0, port: int = 0
    ) -> RowBatch:
        """Return a batch with keys and their hashes, which a distributor can route."""
        return RowBatch(values, times, keys, hash_keys(keys), port)

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"RowBatch({len(self)} rows{'' if self.keys is None else ', keyed'})"

    def take(self, rows: NDArray[np.intp]) -> RowBatch:
        """Return a batch of these rows, in this order."""
        index = rows.tolist()
        return RowBatch(
            pick(self.values, index),
            self.times if isinstance(self.times, int) else self.times[rows],
            None if self.keys is None else pick(self.keys, index),
            self.hashes[rows] if self.keys is not None else _NO_HASHES,
            self.port,
            None if self.origin is None else tuple(column[rows] for column in self.origin),
            None if self.late is None else self.late[rows],
        )

    def with_values(self, values: list[Any]) -> RowBatch:
        """Return a batch of other values with the same keys and times, row by row."""
        return RowBatch(
            values, self.times, self.keys, self.hashes, self.port, self.origin, self.late
        )

    def numbered(self, way: int = 0) -> RowBatch:
        """Return the batch with two more columns of `origin`: the number of each row, and its branch (`way`)."""
        batch = self.with_values(self.values)
        rows = len(self)
        before = (np.full(rows, -1),) if self.origin is None else self.origin
        batch.origin = (*before, np.arange(rows), np.full(rows, way))
        return batch

    def each_time(self) -> Iterable[int]:
        """Return the time of each row."""
        if isinstance(self.times, int):
            return (self.times,) * len(self.values)
        each: list[int] = self.times.tolist()
        return each

    def encode(self) -> bytes:
        """Return the batch as bytes; only batches with keys are sent. Raises `EncodingError`."""
        keys = encode_column(self.keys or [])
        columns, late = 0, b""
        if isinstance(self.times, int):
            times = _ONE_TIME.pack(self.times)
        else:
            columns |= _TIMES_DIFFER
            times = self.times.astype("<i8", copy=False).tobytes()
        if self.late is not None:
            columns |= _SOME_LATE
            late = self.late.astype("<i8", copy=False).tobytes()
        head = _HEAD.pack(len(self.values), self.port, columns, len(keys))
        hashes = self.hashes.astype("<u8", copy=False).tobytes()
        return b"".join((head, times, late, hashes, keys, encode_column(self.values)))

    @staticmethod
    def decode(data: bytes | memoryview) -> RowBatch:
        """Decode a batch; raise `DecodingError` if it is malformed or a value cannot be unpickled."""
        try:
            rows, port, columns, length = _HEAD.unpack_from(data)
            at = _HEAD.size
            times: Times | int
            if columns & _TIMES_DIFFER:
                times = np.frombuffer(data, "<i8", rows, at)
                at += 8 * rows
            else:
                (times,) = _ONE_TIME.unpack_from(data, at)
                at += 8
            late = None
            if columns & _SOME_LATE:
                late = np.frombuffer(data, "<i8", rows, at)
                at += 8 * rows
            hashes = np.frombuffer(data, "<u8", rows, at)
        except (struct.error, ValueError) as error:
            raise DecodingError(f"a batch cannot be read: {error}") from error
        at += 8 * rows
        view = memoryview(data)
        keys = decode_column(view[at : at + length], rows)
        try:
            values = decode_column(view[at + length :], rows)
        except CannotUnpickleError as error:
            raise CannotUnpickleError(f"{error}, in {_name_records(keys)}") from error.__cause__
        return RowBatch(values, times, keys, hashes, port, late=late)


def _name_records(keys: list[Any]) -> str:
    """Describe the records with these keys: pickle does not say at which of them it failed."""
    if len(keys) == 1:
        return f"the record of key {represent(keys[0])[:_MAX_KEY_LENGTH]}"
    first = ", ".join(represent(key)[:_MAX_KEY_LENGTH] for key in keys[:_MAX_KEYS_SHOWN])
    more = ", …" if len(keys) > _MAX_KEYS_SHOWN else ""
    return f"one of {len(keys)} records, of the keys {first}{more}"


def joined_times(several: Sequence[tuple[Times | int, int]]) -> Times | int:
    """Join the times of consecutive batches, given with the number of rows of each; one number if all share it."""
    first = several[0][0]
    if all(isinstance(times, int) and times == first for times, _ in several):
        return first
    return np.concatenate(
        [np.full(rows, times) if isinstance(times, int) else times for times, rows in several]
    )


def joined_late(several: Sequence[tuple[Times | None, int]]) -> Times | None:
    """Join the columns `late` of consecutive batches, given with the number of rows of each."""
    if all(late is None for late, _ in several):
        return None
    return np.concatenate([np.full(rows, MIN) if late is None else late for late, rows in several])


def joined(batches: Sequence[RowBatch]) -> RowBatch:
    """Join several batches into one, in this order; with `keys` and `origin` only if all of them have these."""
    values = [value for batch in batches for value in batch.values]
    times = joined_times([(batch.times, len(batch)) for batch in batches])
    late = joined_late([(batch.late, len(batch)) for batch in batches])
    origin = joined_origin([batch.origin for batch in batches])
    if any(batch.keys is None for batch in batches):
        return RowBatch(values, times, origin=origin, late=late)
    keys = [key for batch in batches for key in batch.keys or ()]
    hashes = np.concatenate([batch.hashes for batch in batches])
    return RowBatch(values, times, keys, hashes, batches[0].port, origin, late)


def joined_origin(several: Sequence[Origin | None]) -> Origin | None:
    """Join the origins of consecutive batches; -1 fills the columns that some of them lack."""
    origins = [origin for origin in several if origin is not None]
    if len(origins) < len(several):
        return None
    columns = max(map(len, origins))
    filled = [
        (*origin, *(np.full(len(origin[0]), -1) for _ in range(columns - len(origin))))
        for origin in origins
    ]
    return tuple(np.concatenate(column) for column in zip(*filled, strict=True))


def pick(values: Sequence[Any], rows: list[int]) -> list[Any]:
    """Return the values of the rows with these indexes."""
    if len(rows) > 1:
        return list(itemgetter(*rows)(values))
    return [values[row] for row in rows]
