"""Turn columns of tables into items of flows, and recognize functions that only look a column up.

A row of a table is an item: a dictionary of its columns. A table whose only column is called `value` has plain values
as items, as the lines of a text file have. A function that only takes one column of such an item is recognized, and
its work is done for the whole column at once:

>>> column_of(itemgetter("customer")), column_of(lambda order: order["customer"]), column_of(len)
('customer', 'customer', None)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import FunctionType
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from railgun.hashing import STR, Hashes, hash_buffer, hash_ints, hash_keys

VALUE: Final = "value"
_ROWS_AT_ONCE: Final = 1 << 16  # strings that are hashed at once
_NULL_RANK: Final = -(1 << 63)  # the number nulls sort by: they come first


def as_list(column: pa.Array) -> list[Any]:
    """Return the values of a column as Python objects.

    >>> as_list(pa.array([1, None, 3])), as_list(pa.array(["a", "b"]))
    ([1, None, 3], ['a', 'b'])
    """
    plain = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if plain and not column.null_count:
        listed: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    else:
        listed = column.to_pylist(maps_as_pydicts="strict")
    return listed


def as_items(names: Sequence[str], columns: Sequence[pa.Array], rows: int) -> list[Any]:
    """Return the rows of a table as items.

    >>> as_items(["a", "b"], [pa.array([1, 2]), pa.array(["x", "y"])], 2)
    [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'y'}]
    >>> as_items(["value"], [pa.array(["x", "y"])], 2)
    ['x', 'y']
    """
    if list(names) == [VALUE]:
        return as_list(columns[0])
    if not names:
        return [{} for _ in range(rows)]
    return as_dicts(names, columns)


def as_dicts(names: Sequence[str], columns: Sequence[pa.Array]) -> list[dict[str, Any]]:
    """Return the rows of a table, which has at least one column, as dictionaries."""
    each = zip(*map(as_list, columns), strict=True)
    return [dict(zip(names, row, strict=True)) for row in each]


def column_of(function: Callable[..., Any] | None) -> str | None:
    """Return the column that a function takes of an item, or None if the function does anything else."""
    if type(function) is itemgetter:
        names = function.__reduce__()[1]
        return names[0] if len(names) == 1 and isinstance(names[0], str) else None
    if type(function) is not FunctionType:
        return None
    code, lookup = function.__code__, _LOOKUP.__code__
    is_lookup = (
        code.co_code == lookup.co_code
        and len(code.co_consts) == len(lookup.co_consts)
        and (code.co_argcount, code.co_kwonlyargcount) == (lookup.co_argcount, 0)
        and not code.co_names
        and not code.co_flags & _OTHER_ARGUMENTS
    )
    if not is_lookup:
        return None
    name = code.co_consts[lookup.co_consts.index("a name")]
    return name if isinstance(name, str) else None


_OTHER_ARGUMENTS: Final = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_LOOKUP: Final[Any] = lambda item: item["a name"]  # compared with users' functions  # noqa: E731


def hashes_of(column: pa.Array) -> Hashes:
    """Return the hashes of keys, equal to `hash_keys` of the values; where possible without a Python object per key."""
    if pa.types.is_integer(column.type) and not column.null_count:
        numbers = column.to_numpy(zero_copy_only=False)
        if numbers.dtype != np.uint64:
            return hash_ints(numbers.astype(np.int64))
    if pa.types.is_string(column.type) and not column.null_count and len(column):
        return _hash_texts(column)
    return hash_keys(as_list(column))


def _hash_texts(column: pa.Array) -> Hashes:
    hashes = []
    for at in range(0, len(column), _ROWS_AT_ONCE):
        part = column.slice(at, _ROWS_AT_ONCE)
        offsets = np.frombuffer(part.buffers()[1], np.int32)[
            part.offset : part.offset + len(part) + 1
        ]
        start, end = int(offsets[0]), int(offsets[-1])
        data = np.zeros(end - start + 8, dtype=np.uint8)
        if end > start:
            data[:-8] = np.frombuffer(part.buffers()[2], np.uint8)[start:end]
        starts = offsets.astype(np.int64) - start
        hashes.append(hash_buffer(STR, data, starts[:-1], np.diff(starts)))
    return np.concatenate(hashes)


def as_order(column: pa.Array) -> Any:
    """Return whole numbers that sort as the values do, with nulls first, or None if the type has no such numbers."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        numbers = column.cast(pa.int64(), safe=False)
    elif pa.types.is_timestamp(kind) or pa.types.is_date64(kind) or pa.types.is_duration(kind):
        numbers = column.view(pa.int64())
    elif pa.types.is_date32(kind):
        numbers = column.view(pa.int32()).cast(pa.int64())
    elif pa.types.is_floating(kind):
        # As whole numbers the bits of floats are in order; those of negative ones the other way round.
        floats = column.cast(pa.float64()).to_numpy(zero_copy_only=False) + 0.0
        floats[np.isnan(floats)] = np.nan  # of which there are several; all come last
        bits = floats.view(np.int64)
        bits = bits ^ ((bits >> 63) & np.int64((1 << 63) - 1))
        bits[column.is_null().to_numpy(zero_copy_only=False)] = _NULL_RANK
        return bits
    else:
        return None
    return pc.fill_null(numbers, _NULL_RANK).to_numpy(zero_copy_only=False)
