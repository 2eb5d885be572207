"""Copies and fingerprints of model states.

Machines change in place; the explorer needs each state to stay. `fork` copies what can change (lists, dicts, sets,
our own mutable objects) and shares the rest (arrays, batches and frozen messages are never changed).
`fingerprint` turns a state into nested tuples: equal if and only if the states are. Slots that stay what they were
made with (`CONSTANT`) are shared and left out.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import numpy as np

from railgun.core.placement import Placement
from railgun.core.rescale.arrivals import Arrivals
from railgun.core.rescale.chunks import Chunks
from railgun.core.rescale.machine import Machine
from railgun.core.rescale.migration import Migration
from railgun.testing.rows import Rows

CONSTANT: dict[type, tuple[str, ...]] = {
    Machine: ("worker", "stage", "downstream"),
    Migration: ("old", "new", "members"),
    Arrivals: ("old", "homes", "members", "confirmations"),
    Chunks: ("home",),
}
"""Slots of production classes that never change; the models' own classes name theirs in `constant`."""

_ATOMS = frozenset({int, str, bytes, float, bool, type(None)})


@cache
def _slots(kind: Any) -> tuple[str, ...]:
    """The slots of a class that can change."""
    names: list[str] = []
    constant: set[str] = set(getattr(kind, "constant", ()))
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        names.extend([slots] if isinstance(slots, str) else slots)
        constant.update(CONSTANT.get(base, ()))
    return tuple(name for name in names if name not in constant)


@cache
def _constants(kind: Any) -> tuple[str, ...]:
    """The slots of a class that cannot."""
    changing = set(_slots(kind))
    names = [n for b in kind.__mro__ for n in b.__dict__.get("__slots__", ()) if n not in changing]
    return tuple(names)


@cache
def _is_shared(kind: Any) -> bool:
    """Whether objects of this class never change."""
    if kind in _ATOMS or issubclass(kind, np.ndarray | np.generic | frozenset | Rows | Placement):
        return True
    if hasattr(kind, "__dataclass_params__") and kind.__dataclass_params__.frozen:
        return True
    return issubclass(kind, FunctionType | type) or (issubclass(kind, tuple) and kind is not tuple)


def fork(state: Any) -> Any:
    """A copy that can change without changing the original."""
    kind: Any = type(state)
    if _is_shared(kind):
        return state
    if kind is dict:
        return {key: fork(value) for key, value in state.items()}
    if kind is list:
        return [fork(value) for value in state]
    if kind is set:
        return set(state)
    if kind is tuple:
        return state if all(type(v) in _ATOMS for v in state) else tuple(map(fork, state))
    copy: Any = kind.__new__(kind)
    for name in _constants(kind):
        setattr(copy, name, getattr(state, name))
    for name in _slots(kind):
        value = getattr(state, name)
        setattr(copy, name, value if type(value) in _ATOMS else fork(value))
    return copy


def fingerprint(state: Any) -> Any:
    """Nested tuples that tell one state from another."""
    kind: Any = type(state)
    if kind in _ATOMS:
        return state
    if kind is dict:
        return tuple(sorted([(fingerprint(k), fingerprint(v)) for k, v in state.items()]))
    if kind is list or kind is tuple:
        return tuple([fingerprint(value) for value in state])
    if kind is set or kind is frozenset:
        return tuple(sorted([fingerprint(value) for value in state]))
    if kind is np.ndarray:
        return state.tobytes()
    if kind is Rows:
        return state.items
    if kind is Placement:
        return (state.workers, state.slots, state.keys)
    if hasattr(kind, "__dataclass_fields__"):
        names = kind.__dataclass_fields__
    elif issubclass(kind, tuple):  # a named tuple: equal content is not equal meaning
        names = kind._fields
    elif issubclass(kind, np.generic):
        return state.item()
    else:
        names = _slots(kind)
    return (kind.__name__, *[fingerprint(getattr(state, name)) for name in names])
