"""Order: where a record stands among all others of a batch run.

In a live flow records come one after the other. In a batch run they are worked on in parallel, shuffled, and have to be
put back into their order. So a record carries its place: a *path*, a row of whole numbers that is compared from left to
right.

1. A record of an input has the path (order column, partition and row). The first is 0 if no order column was given;
   then it is the order in which the input has its rows.
2. What a stage makes of a record has the record's path, and one number more: the stage, and how many the stage has made
   before. So paths are as long as the way they came, and what comes of earlier records stands before what comes of
   later ones, whichever tasks they went through.
3. What a stage makes of no record, when its input has come to its end (timers that were left, `on_end`), stands behind
   everything that was made of records, and behind what the stages before it made at their end.
4. A shorter path stands before a longer one that begins with it.
5. As bytes (`as_bytes`) paths compare as they do as numbers: that is how Spark sorts them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Paths = tuple[Numbers, ...]
"""The paths of many records, in columns."""
Path = tuple[int, ...]

FIRST: Final = -(1 << 63)
"""Smaller than any number in a path: fills up paths that are shorter than others."""
_END: Final = (1 << 63) - (1 << 20)  # paths of what is made at the end begin here; stages follow
MOST: Final = _END - 1
_FLIP: Final = 1 << 63
_STAGE: Final = 1 << 48


def as_bytes(path: Path) -> bytes:
    """The path, as bytes that compare as paths do.

    >>> as_bytes((-1, 5)) < as_bytes((0,)) < as_bytes((0, -7)) < as_bytes((0, 2))
    True
    """
    return struct.pack(f">{len(path)}Q", *(number + _FLIP for number in path))


def from_bytes(data: bytes) -> Path:
    """The path again.

    >>> from_bytes(as_bytes((-1, 5)))
    (-1, 5)
    """
    return tuple(number - _FLIP for number in struct.unpack(f">{len(data) // 8}Q", data))


def first(paths: Paths) -> Path:
    """The path of the first record."""
    return tuple(int(column[0]) for column in paths)


def last(paths: Paths) -> Path:
    """The path of the last one."""
    return tuple(int(column[-1]) for column in paths)


def onwards(paths: Paths, stage: int, made: int) -> Paths:
    """The paths of what a stage makes of records that have these; `made`: how many it has made before."""
    return (*paths, np.arange(made, made + len(paths[0])) + stage * _STAGE)


def at_the_end(stage: int, phase: int, times: Numbers, hashes: Numbers, made: int) -> Paths:
    """The paths of what a stage makes in one phase of its end: in order of time, then by key."""
    head = np.full(len(times), _END + stage), np.full(len(times), phase)
    return (*head, times, hashes, np.arange(made, made + len(times)))


def joined(several: Sequence[Paths]) -> Paths:
    """Paths one after the other; short ones are filled up."""
    if len(several) == 1:
        return several[0]
    depth = max(map(len, several))
    filled = [
        (*paths, *(np.full(len(paths[0]), FIRST) for _ in range(depth - len(paths))))
        for paths in several
    ]
    return tuple(np.concatenate(columns) for columns in zip(*filled, strict=True))


def before(paths: Paths, bound: Path) -> NDArray[np.bool_]:
    """Which of these paths stand before one.

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
    """The rows in the order of their paths; those with equal ones stay as they are."""
    order: NDArray[np.intp] = np.lexsort(paths[::-1])
    return order
