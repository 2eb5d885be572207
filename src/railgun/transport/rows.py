"""RowBatch: records as Python objects, in columns of keys, values and times.

One implementation of `core.batch.Batch`; one of Arrow tables will stand beside it. Whoever is not an operator knows
only the interface: length, key hashes, `take`, `encode` and `decode`.
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

_HEAD: Final = struct.Struct("<IHBI")  # rows, port, which columns follow, length of the keys
_TIMES_DIFFER: Final = 1
_SOME_LATE: Final = 2
_ONE_TIME: Final = struct.Struct("<q")
_FEW: Final = 10  # keys that are shown of a batch that cannot be read
_SHOWN: Final = 100  # characters of each
_NO_HASHES: Final = np.empty(0, dtype=np.uint64)


class RowBatch:
    """Records in columns. `times` is one number where all rows share it; `port` is the side they came in by.

    `origin`, where somebody wants to know: which row each record comes from. The first column is of what went into the
    stage (known in batch runs; else -1); for each place where ways part two follow (see `numbered`).

    `late`: for each row that was late, the frontier of its part of the source when it was read; `MIN` for the other
    rows; None if no row was late. What is made of a late record is late, too.

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
        """A batch that a distributor can route."""
        return RowBatch(values, times, keys, hash_keys(keys), port)

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"RowBatch({len(self)} rows{'' if self.keys is None else ', keyed'})"

    def take(self, rows: NDArray[np.intp]) -> RowBatch:
        """These rows, in this order."""
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
        """Other values for the same keys and times, row by row."""
        return RowBatch(
            values, self.times, self.keys, self.hashes, self.port, self.origin, self.late
        )

    def numbered(self, way: int = 0) -> RowBatch:
        """Return the batch with two more columns of `origin`: the number of each row, and the way it goes."""
        batch = self.with_values(self.values)
        rows = len(self)
        before = (np.full(rows, -1),) if self.origin is None else self.origin
        batch.origin = (*before, np.arange(rows), np.full(rows, way))
        return batch

    def each_time(self) -> Iterable[int]:
        """The time of each row."""
        if isinstance(self.times, int):
            return (self.times,) * len(self.values)
        each: list[int] = self.times.tolist()
        return each

    def encode(self) -> bytes:
        """As bytes. Only keyed batches travel."""
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
        """A batch again."""
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
            raise CannotUnpickleError(f"{error}, in {_tell_records(keys)}") from error.__cause__
        return RowBatch(values, times, keys, hashes, port, late=late)


def _tell_records(keys: list[Any]) -> str:
    """Say which records have these keys: pickle does not tell which of them it was at."""
    if len(keys) == 1:
        return f"the record of key {represent(keys[0])[:_SHOWN]}"
    first = ", ".join(represent(key)[:_SHOWN] for key in keys[:_FEW])
    more = ", …" if len(keys) > _FEW else ""
    return f"one of {len(keys)} records, of the keys {first}{more}"


def joined_times(several: Sequence[tuple[Times | int, int]]) -> Times | int:
    """The times of batches one after the other, each with the number of its rows; one number, if all share it."""
    first = several[0][0]
    if all(isinstance(times, int) and times == first for times, _ in several):
        return first
    return np.concatenate(
        [np.full(rows, times) if isinstance(times, int) else times for times, rows in several]
    )


def joined_late(several: Sequence[tuple[Times | None, int]]) -> Times | None:
    """Join the columns `late` of batches one after the other, each with the number of its rows."""
    if all(late is None for late, _ in several):
        return None
    return np.concatenate([np.full(rows, MIN) if late is None else late for late, rows in several])


def joined(batches: Sequence[RowBatch]) -> RowBatch:
    """Return several batches as one, in this order; `keys` and `origin` only if all of them have some."""
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
    """Join the origins of batches one after the other; -1 stands for a column that one has and another has not."""
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
    """The values of some rows."""
    if len(rows) > 1:
        return list(itemgetter(*rows)(values))
    return [values[row] for row in rows]
