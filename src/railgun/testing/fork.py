"""Copies and fingerprints of model states.

Machines change in place; the explorer needs each state to stay. `fork` copies what can change (lists, dicts, sets,
our own mutable objects) and shares the rest (arrays, batches and frozen messages are never changed).
`fingerprint` turns a state into nested tuples: equal if and only if the states are.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import numpy as np

from railgun.core.placement import Placement
from railgun.testing.rows import Rows

_ATOMS = (int, str, bytes, float, bool, type(None))


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    names: list[str] = []
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        names.extend([slots] if isinstance(slots, str) else slots)
    return tuple(names)


@cache
def _is_shared(kind: Any) -> bool:
    """Whether objects of this class never change."""
    if issubclass(kind, (*_ATOMS, np.ndarray, np.generic, tuple, frozenset, Rows, Placement)):
        return True
    if hasattr(kind, "__dataclass_params__") and kind.__dataclass_params__.frozen:
        return True
    return issubclass(kind, FunctionType | type)


def fork(state: Any) -> Any:
    """A copy that can change without changing the original."""
    kind: Any = type(state)
    if kind is dict:
        return {key: fork(value) for key, value in state.items()}
    if kind is list:
        return [fork(value) for value in state]
    if kind is set:
        return set(state)
    if kind is tuple:
        return tuple(fork(value) for value in state)
    if _is_shared(kind):
        return state
    copy: Any = kind.__new__(kind)
    for name in _fields(kind):
        setattr(copy, name, fork(getattr(state, name)))
    return copy


def fingerprint(state: Any) -> Any:
    """Nested tuples that tell one state from another."""
    kind: Any = type(state)
    if issubclass(kind, _ATOMS):
        return state
    if kind is dict:
        return tuple(sorted((fingerprint(k), fingerprint(v)) for k, v in state.items()))
    if kind in (list, tuple):
        return tuple(fingerprint(value) for value in state)
    if issubclass(kind, tuple):  # a named tuple: equal content is not equal meaning
        return (kind.__name__, *(fingerprint(value) for value in state))
    if kind in (set, frozenset):
        return tuple(sorted(fingerprint(value) for value in state))
    if kind is np.ndarray:
        return state.tobytes()
    if kind is Rows:
        return state.items
    if kind is Placement:
        return (state.workers, state.slots, state.keys)
    if issubclass(kind, np.generic):
        return state.item()
    if hasattr(kind, "__dataclass_fields__"):
        values = (fingerprint(getattr(state, name)) for name in kind.__dataclass_fields__)
        return (kind.__name__, *values)
    if _is_shared(kind):
        return id(state)
    return (kind.__name__, *(fingerprint(getattr(state, name)) for name in _fields(kind)))
