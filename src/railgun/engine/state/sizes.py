"""How much memory a value takes, roughly: containers are judged by their first few elements."""

from __future__ import annotations

import gc
import sys
from collections import deque
from itertools import islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

LOOKED_AT: Final = 8  # elements of a container
DEEP: Final = 5
_ATOMS: Final = frozenset({int, float, str, bytes, bool, type(None), complex, bytearray})
_LISTS: Final = (list, tuple, set, frozenset, deque)
_SHARED: Final = (type, ModuleType, FunctionType, BuiltinFunctionType)


def size_of(value: Any, deep: int = DEEP) -> float:
    """Bytes of memory.

    >>> size_of("a" * 1000) > 1000
    True
    >>> round(size_of(list(range(1_000, 3_000))), -4)  # 28 bytes a number, and 8 to find it
    70000.0
    """
    kind = type(value)
    size = float(sys.getsizeof(value, 64))
    if kind in _ATOMS or not deep:
        return size
    if isinstance(value, dict):
        if value:
            some = [
                size_of(k, deep - 1) + size_of(v, deep - 1)
                for k, v in islice(value.items(), LOOKED_AT)
            ]
            size += sum(some) / len(some) * len(value)
    elif isinstance(value, _LISTS):
        if value:
            looked = [size_of(element, deep - 1) for element in islice(value, LOOKED_AT)]
            size += sum(looked) / len(looked) * len(value)
    else:
        parts = gc.get_referents(value)
        size += sum(size_of(part, deep - 1) for part in parts if not isinstance(part, _SHARED))
    return size
