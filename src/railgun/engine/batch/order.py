"""Order the records of a batch run: where each record stands among all others.

In a live flow records come one after the other. A batch run works on them in parallel and shuffles them, and has to put
them back into order. So each record carries its place: a *path*, a tuple of whole numbers that is compared from left to
right.

1. A record of an input has the path (value of the order column, partition and row). The first number is 0 if no order
   column was named; then records keep the order of the input's rows.
2. A record that a stage makes of another has that record's path plus one number: the stage, and how many records the
   stage made before. So a path has one number for each stage on its way, and what is made of earlier records stands
   before what is made of later ones, whichever tasks they went through.
3. Records that a stage makes at the end of its input (of timers that were left, or in `on_end`) come from no record.
   They stand behind everything that was made of records, and behind what earlier stages made at their end.
4. A shorter path stands before a longer one that begins with it.
5. As bytes (`as_bytes`), paths compare as they do as numbers: Spark sorts them by their bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Paths = tuple[Numbers, ...]
"""The paths of many records, as columns."""
Path = tuple[int, ...]

FIRST: Final = -(1 << 63)
"""Smaller than any number in a path: pads paths that are shorter than others."""
# First number of paths made at the end of an input, plus the stage's index
_END_BASE: Final = (1 << 63) - (1 << 20)
MAX_ORDER_VALUE: Final = _END_BASE - 1
_SIGN_OFFSET: Final = 1 << 63  # makes signed numbers unsigned, in the same order
_STAGE_UNIT: Final = 1 << 48  # leaves room for so many records of each stage


def as_bytes(path: Path) -> bytes:
    """Return a path as bytes that compare as paths do.

    >>> as_bytes((-1, 5)) < as_bytes((0,)) < as_bytes((0, -7)) < as_bytes((0, 2))
    True
    """
    return struct.pack(f">{len(path)}Q", *(number + _SIGN_OFFSET for number in path))


def from_bytes(data: bytes) -> Path:
    """Return the path that `as_bytes` encoded.

    >>> from_bytes(as_bytes((-1, 5)))
    (-1, 5)
    """
    return tuple(number - _SIGN_OFFSET for number in struct.unpack(f">{len(data) // 8}Q", data))


def first(paths: Paths) -> Path:
    """Return the path of the first record."""
    return tuple(int(column[0]) for column in paths)


def last(paths: Paths) -> Path:
    """Return the path of the last record."""
    return tuple(int(column[-1]) for column in paths)


def onwards(paths: Paths, stage: int, made_before: int) -> Paths:
    """Return the paths of the records that a stage makes of records with `paths`, after `made_before` others."""
    return (*paths, np.arange(made_before, made_before + len(paths[0])) + stage * _STAGE_UNIT)


def at_the_end(stage: int, phase: int, times: Numbers, hashes: Numbers, made_before: int) -> Paths:
    """Return the paths of records made in one phase of a stage's end: ordered by time, then by key."""
    head = np.full(len(times), _END_BASE + stage), np.full(len(times), phase)
    return (*head, times, hashes, np.arange(made_before, made_before + len(times)))


def joined(groups: Sequence[Paths]) -> Paths:
    """Concatenate groups of paths; pad those that are shorter than others."""
    if len(groups) == 1:
        return groups[0]
    depth = max(map(len, groups))
    filled = [
        (*paths, *(np.full(len(paths[0]), FIRST) for _ in range(depth - len(paths))))
        for paths in groups
    ]
    return tuple(np.concatenate(columns) for columns in zip(*filled, strict=True))


def before(paths: Paths, bound: Path) -> NDArray[np.bool_]:
    """Return which of these paths stand before `bound`, as a mask.

    >>> before((np.array([1, 2, 2]), np.array([9, 3, 4])), (2, 4)).tolist()
    [True, True, False]
    """
    less = np.zeros(len(paths[0]), dtype=bool)
    equal = ~less
    width = max(len(paths), len(bound))
    for at in range(width):
        column = paths[at] if at < len(paths) else np.full(len(less), FIRST)
        number = bound[at] if at < len(bound) else FIRST
        less |= equal & (column < number)
        equal &= column == number
    return less


def ranks(paths: Paths) -> NDArray[np.intp]:
    """Return the indices of rows in the order of their paths; rows with equal paths keep their order."""
    order: NDArray[np.intp] = np.lexsort(paths[::-1])
    return order
