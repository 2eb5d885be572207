"""Copies and fingerprints of model states.

Machines change in place; the explorer needs each state unchanged. `fork` copies what can change (lists, dicts, sets,
our own mutable objects) and shares the rest (arrays, batches and frozen messages never change). `fingerprint` turns a
state into nested tuples: equal if and only if the states are. Slots that never change after construction (`CONSTANT`)
are shared and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np

from railgun.broker.protocol.raft.state import State
from railgun.engine.protocol.placement import Placement
from railgun.engine.protocol.rescale.arrivals import Arrivals
from railgun.engine.protocol.rescale.chunks import Chunks
from railgun.engine.protocol.rescale.machine import Machine
from railgun.engine.protocol.rescale.migration import Migration
from verification.rescale.rows import Rows

CONSTANT: dict[type, tuple[str, ...]] = {
    Machine: ("worker", "stage", "downstream"),
    Migration: ("old", "new", "members"),
    Arrivals: ("old", "homes", "members", "confirmations"),
    Chunks: ("home",),
    State: ("id", "settings", "seed", "attempts", "election", "beat", "heard", "confirmed"),
}
"""Slots of production classes that never change; the models' own classes name theirs in `constant`."""

_ATOMS = frozenset({int, str, bytes, float, bool, type(None)})


@cache
def _slots(kind: Any) -> tuple[str, ...]:
    """Return the slots of a class that can change."""
    names: list[str] = []
    constant: set[str] = set(getattr(kind, "constant", ()))
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        names.extend([slots] if isinstance(slots, str) else slots)
        constant.update(CONSTANT.get(base, ()))
    return tuple(name for name in names if name not in constant)


@cache
def _constants(kind: Any) -> tuple[str, ...]:
    """Return the slots of a class that cannot change."""
    changing = set(_slots(kind))
    names = [n for b in kind.__mro__ for n in b.__dict__.get("__slots__", ()) if n not in changing]
    return tuple(names)


@cache
def _is_shared(kind: Any) -> bool:
    """Return whether objects of this class never change."""
    if kind in _ATOMS or issubclass(
        kind, np.ndarray | np.generic | frozenset | Rows | Placement | Enum
    ):
        return True
    if hasattr(kind, "__dataclass_params__") and kind.__dataclass_params__.frozen:
        return True
    return issubclass(kind, FunctionType | type) or (issubclass(kind, tuple) and kind is not tuple)


def fork(state: Any) -> Any:
    """Return a copy that can change without changing the original."""
    copy = _FORKS[type(state)]
    return state if copy is None else copy(state)


def fingerprint(state: Any) -> Any:
    """Return nested tuples that distinguish states."""
    tell = _PRINTS[type(state)]
    return state if tell is None else tell(state)


# ---------------------------------------------------------------- by class: explorers spend most of their time here


class _Forks(dict[Any, Callable[[Any], Any] | None]):
    """By class: the function that copies its objects; None: they are shared."""

    def __missing__(self, kind: Any) -> Callable[[Any], Any] | None:
        copier = self[kind] = None if _is_shared(kind) else _copier(kind)
        return copier


class _Prints(dict[Any, Callable[[Any], Any] | None]):
    """By class: the function that fingerprints its objects; None: they are their own fingerprints."""

    def __missing__(self, kind: Any) -> Callable[[Any], Any] | None:
        printer = self[kind] = None if kind in _ATOMS else _teller(kind)
        return printer


_FORKS = _Forks()
_PRINTS = _Prints()


def _copier(kind: Any) -> Callable[[Any], Any]:
    if kind is set:
        return set
    if kind is dict:
        return lambda state: (
            {
                key: value if (copy := _FORKS[type(value)]) is None else copy(value)
                for key, value in state.items()
            }
            if state
            else {}
        )
    if kind is list:
        return lambda state: (
            [value if (copy := _FORKS[type(value)]) is None else copy(value) for value in state]
            if state
            else []
        )
    if kind is tuple:
        return lambda state: (
            state if all(type(v) in _ATOMS for v in state) else tuple(map(fork, state))
        )
    lines = [f" new.{name} = state.{name}" for name in _constants(kind)]
    for name in _slots(kind):
        lines.append(f" value = state.{name}; copy = forks[type(value)]")
        lines.append(f" new.{name} = value if copy is None else copy(value)")
    return _written("new = make(kind)", lines, "new", kind)


def _teller(kind: Any) -> Callable[[Any], Any]:
    if kind is dict:
        return lambda state: (
            tuple(sorted([(fingerprint(key), fingerprint(value)) for key, value in state.items()]))
            if state
            else ()
        )
    if kind is list or kind is tuple:
        return lambda state: (
            tuple([v if (tell := _PRINTS[type(v)]) is None else tell(v) for v in state])
            if state
            else ()
        )
    if kind is set or kind is frozenset:
        return lambda state: tuple(sorted(map(fingerprint, state))) if state else ()
    if kind is np.ndarray:
        return lambda state: state.tobytes()
    if kind is Rows:
        return lambda state: state.items
    if issubclass(kind, Enum):
        return lambda state: state.name
    if kind is Placement:
        return lambda state: (state.workers, state.slots, state.keys)
    if hasattr(kind, "__dataclass_fields__"):
        names = tuple(kind.__dataclass_fields__)
    elif issubclass(kind, tuple):  # a named tuple: equal content is not equal meaning
        names = kind._fields
    elif issubclass(kind, np.generic):
        return lambda state: state.item()
    else:
        names = _slots(kind)
    lines, parts = [], [repr(kind.__name__)]
    for at, name in enumerate(names):
        lines.append(f" value = state.{name}; tell = prints[type(value)]")
        lines.append(f" v{at} = value if tell is None else tell(value)")
        parts.append(f"v{at}")
    return _written("", lines, f"({', '.join(parts)},)", kind)


def _written(first: str, lines: Sequence[str], result: str, kind: Any) -> Callable[[Any], Any]:
    """Compile a function of a state, without loops over the names of its slots."""
    names = {"kind": kind, "make": kind.__new__, "forks": _FORKS, "prints": _PRINTS}
    text = "\n".join(["def of(state):", f" {first}", *lines, f" return {result}"])
    exec(text, names)
    function: Callable[[Any], Any] = names["of"]
    return function
