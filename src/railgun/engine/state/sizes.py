"""Estimate the memory of a value: containers are judged by their first few elements."""

from __future__ import annotations

import gc
import sys
from collections import deque
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

SAMPLED_ELEMENTS: Final = 8  # of each container
MAX_DEPTH: Final = 5
_ATOMS: Final = frozenset({int, float, str, bytes, bool, type(None), complex, bytearray})
_LISTS: Final = (list, tuple, set, frozenset, deque)
_SHARED: Final = (type, ModuleType, FunctionType, BuiltinFunctionType)


def size_of(value: Any, depth: int = MAX_DEPTH) -> float:
    """Return the estimated memory of a value in bytes, looking `depth` levels into containers and objects.

    >>> size_of("a" * 1000) > 1000
    True
    >>> round(size_of(list(range(1_000, 3_000))), -4)  # 28 bytes a number, and 8 to find it
    70000.0
    """
    kind = type(value)
    size = float(sys.getsizeof(value, 64))
    if kind in _ATOMS or not depth:
        return size
    if isinstance(value, dict):
        if value:
            item_sizes = [
                size_of(k, depth - 1) + size_of(v, depth - 1)
                for k, v in islice(value.items(), SAMPLED_ELEMENTS)
            ]
            size += sum(item_sizes) / len(item_sizes) * len(value)
    elif isinstance(value, _LISTS):
        if value:
            element_sizes = [
                size_of(element, depth - 1) for element in islice(value, SAMPLED_ELEMENTS)
            ]
            size += sum(element_sizes) / len(element_sizes) * len(value)
    else:
        parts = gc.get_referents(value)
        size += sum(size_of(part, depth - 1) for part in parts if not isinstance(part, _SHARED))
    return size
