"""Copy values that later code may change: plain values so quickly that they can always be copied.

Most values of flows are *plain*: numbers, text, dates, enums; tuples, lists, dicts, sets, named tuples, arrays of
numbers; objects that have nothing but their attributes and slots; and these inside of each other. Rules:

1. A copy shares nothing changeable with its value. A value that cannot change (a tuple of numbers) is its own copy.
2. An object that occurs twice in a value occurs twice in its copy; an object may contain itself.
3. A copy of a plain value equals that of `copy.deepcopy`, and calls no user code but the `__hash__` and `__eq__` of
   keys. It takes some hundred nanoseconds for a small dict, where `deepcopy` takes some microseconds.
4. Any other value is *odd*: classes that define how they are copied or pickled, subclasses of built-in types, classes
   of other languages. Only `deepcopy` can copy it, which may call user code, take long, or be refused.
"""

from __future__ import annotations

import copyreg
import datetime
import decimal
import enum
import fractions
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Final

import numpy as np

from railgun.errors import pass_interrupt

ATOMS: Final = frozenset({
    int, float, complex, bool, str, bytes, type(None), range, type, types.FunctionType,
    types.BuiltinFunctionType, types.ModuleType, datetime.datetime, datetime.date, datetime.time,
    datetime.timedelta, decimal.Decimal, fractions.Fraction, uuid.UUID,
})  # fmt: skip
"""Types of values that cannot change, and have nothing changeable inside."""
ODD: Final = object()
"""The result of `plain_copy` for a value that is not plain."""
_FEW: Final = 16  # up to so many parts, a loop over them beats one look at all types
MOST_KNOWN: Final = 10_000
"""The largest number of types whose copiers are remembered."""

Memo = dict[int, Any]
"""Copies, by the identity of their originals."""
Copier = Callable[[Any, Memo], Any]


class _OddError(Exception):
    """A value contains something odd."""


def plain_copy(value: Any) -> Any:
    """Return a copy of a plain value, or `ODD` if the value is not plain or nested too deeply.

    >>> inner = [1]
    >>> copy = plain_copy({"a": inner, "b": inner, "c": (1, "x")})
    >>> copy, copy["a"] is copy["b"], copy["a"] is inner
    ({'a': [1], 'b': [1], 'c': (1, 'x')}, True, False)
    >>> pair = (1, "x")
    >>> plain_copy(pair) is pair, plain_copy([iter("ab")]) is ODD
    (True, True)
    """
    copier = _copiers.get(type(value))
    try:
        return _copy(value, {}) if copier is None else copier(value, {})
    except (_OddError, RecursionError):
        return ODD


def copied(value: Any) -> Any:
    """Return a copy that shares nothing changeable with the value; raise what `deepcopy` raises for an odd value."""
    if type(value) in ATOMS:
        return value
    made = plain_copy(value)
    return deepcopy(value) if made is ODD else made


def own_copy(value: Any) -> Any:
    """Return a copy that shares nothing changeable, or the value itself if it cannot be copied."""
    try:
        return copied(value)
    except BaseException as error:
        pass_interrupt(error)
        return value


def _copy(value: Any, memo: Memo) -> Any:
    kind = type(value)
    if kind in ATOMS:
        return value
    made = memo.get(id(value))
    if made is not None:
        return made
    copier = _copiers.get(kind)
    if copier is None:
        copier = _copier_of(kind)
        if len(_copiers) > MOST_KNOWN:
            _copiers.clear()
            _copiers.update(_BUILT_IN)
        _copiers[kind] = copier
    return copier(value, memo)


def _copy_tuple(value: tuple[Any, ...], memo: Memo) -> Any:
    for part in value:
        if type(part) not in ATOMS:
            break
    else:
        return value
    parts = [part if type(part) in ATOMS else _copy(part, memo) for part in value]
    made = memo.get(id(value))  # if it contains a list, say, that contains it
    if made is None:
        made = memo[id(value)] = tuple.__new__(type(value), parts)
    return made


def _copy_frozenset(value: frozenset[Any], memo: Memo) -> Any:
    if ATOMS.issuperset(map(type, value)):
        return value
    made = memo[id(value)] = frozenset([_copy(part, memo) for part in value])
    return made


def _copy_list(value: list[Any], memo: Memo) -> Any:
    made = memo[id(value)] = value.copy()
    if len(made) <= _FEW or not ATOMS.issuperset(map(type, made)):
        for at, part in enumerate(value):
            if type(part) not in ATOMS:
                made[at] = _copy(part, memo)
    return made


def _copy_set(value: set[Any], memo: Memo) -> Any:
    made: set[Any]
    if ATOMS.issuperset(map(type, value)):
        made = memo[id(value)] = value.copy()
        return made
    made = memo[id(value)] = set()
    made.update([_copy(part, memo) for part in value])
    return made


def _copy_deque(value: deque[Any], memo: Memo) -> Any:
    made: deque[Any] = deque(maxlen=value.maxlen)
    memo[id(value)] = made
    made.extend([part if type(part) in ATOMS else _copy(part, memo) for part in value])
    return made


def _copy_dict(value: dict[Any, Any], memo: Memo) -> Any:
    made = memo[id(value)] = value.copy()
    for key, part in value.items():
        if type(part) not in ATOMS:
            made[key] = _copy(part, memo)
        if type(key) not in ATOMS:
            made.clear()
            return _fill(made, value, memo)
    return made


def _copy_defaultdict(value: defaultdict[Any, Any], memo: Memo) -> Any:
    return _fill(defaultdict(_copy(value.default_factory, memo)), value, memo)


def _copy_ordered(value: OrderedDict[Any, Any] | Counter[Any], memo: Memo) -> Any:
    if vars(value):
        raise _OddError
    return _fill(type(value)(), value, memo)


def _fill(made: dict[Any, Any], value: dict[Any, Any], memo: Memo) -> dict[Any, Any]:
    memo[id(value)] = made
    for key, part in value.items():
        if type(key) not in ATOMS:
            key = _copy(key, memo)
        made[key] = part if type(part) in ATOMS else _copy(part, memo)
    return made


def _copy_bytearray(value: bytearray, memo: Memo) -> Any:
    made = memo[id(value)] = bytearray(value)
    return made


def _copy_array(value: np.ndarray[Any, Any], memo: Memo) -> Any:
    if value.dtype.hasobject:
        raise _OddError
    made = memo[id(value)] = value.copy(order="K")
    return made


def _copy_object(value: Any, memo: Memo) -> Any:
    made = memo[id(value)] = object.__new__(type(value))
    own = vars(made)
    for name, part in vars(value).items():
        own[name] = part if type(part) in ATOMS else _copy(part, memo)
    return made


def _copier_of_slots(slots: Sequence[Any], has_attributes: bool) -> Copier:
    """Return the copier of objects that have these slots and, with `has_attributes`, attributes."""

    def copy_slots(value: Any, memo: Memo) -> Any:
        if has_attributes:
            made = _copy_object(value, memo)
        else:
            made = memo[id(value)] = object.__new__(type(value))
        for slot in slots:
            try:
                part = slot.__get__(value)
            except AttributeError:  # the slot is empty
                continue
            slot.__set__(made, part if type(part) in ATOMS else _copy(part, memo))
        return made

    return copy_slots


def _is_own_copy(value: Any, memo: Memo) -> Any:
    return value


def _refuse(value: Any, memo: Memo) -> Any:
    raise _OddError


class _Plain:
    """A class without slots: its size is that of an object with nothing but attributes."""


class _Slot:
    __slots__ = ("one",)


_MADE_IN_PYTHON: Final = 1 << 9  # a flag of CPython's types: Py_TPFLAGS_HEAPTYPE
_SIZE: Final = _Plain.__basicsize__
_SLOT: Final = _Slot.__basicsize__ - object.__basicsize__
_MAKES: Final = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__getattribute__")
"""Methods that all classes have; a class that overrides one may copy itself in its own way."""
_HOOKS: Final = (
    "__deepcopy__", "__copy__", "__setstate__", "__getnewargs__", "__getnewargs_ex__", "__getattr__",
)  # fmt: skip


def _copier_of(kind: type) -> Copier:
    """Return the function that copies values of a type that is not built in."""
    if issubclass(kind, enum.Enum | type):
        return _is_own_copy
    if issubclass(kind, np.generic):
        return _refuse if issubclass(kind, np.void | np.object_) else _is_own_copy
    if kind in copyreg.dispatch_table or not kind.__flags__ & _MADE_IN_PYTHON:
        return _refuse
    if _is_named_tuple(kind):
        return _copy_tuple
    if any(getattr(kind, name) is not getattr(object, name) for name in _MAKES):
        return _refuse
    if any(hasattr(kind, name) for name in _HOOKS) or any(map(_hides_attributes, kind.__mro__)):
        return _refuse
    slots = _slots_of(kind)
    has_attributes = kind.__dictoffset__ != 0
    size = (_SIZE if has_attributes else object.__basicsize__) + len(slots) * _SLOT
    if kind.__basicsize__ != size or kind.__itemsize__:
        return _refuse  # its objects hold more than Python shows
    if has_attributes and not slots:
        return _copy_object
    return _copier_of_slots(slots, has_attributes)


def _slots_of(kind: type) -> list[Any]:
    """Return the slots of a class and of its base classes."""
    return [
        slot
        for one in kind.__mro__
        for slot in vars(one).values()
        if isinstance(slot, types.MemberDescriptorType)
    ]


def _hides_attributes(kind: type) -> bool:
    """Return whether a class defines a `__dict__` of its own, which does not hold its attributes."""
    found = vars(kind).get("__dict__")
    return found is not None and not isinstance(found, types.GetSetDescriptorType)


def _is_named_tuple(kind: type) -> bool:
    made_by = getattr(kind.__new__, "__code__", None)
    return (
        kind.__bases__ == (tuple,)
        and hasattr(kind, "_fields")
        and kind.__dictoffset__ == 0
        and made_by is not None
        and made_by.co_filename.startswith("<string>")
        and all(
            getattr(kind, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__")
        )
        and not hasattr(kind, "__deepcopy__")
    )


_BUILT_IN: Final[dict[type, Copier]] = {
    tuple: _copy_tuple,
    frozenset: _copy_frozenset,
    list: _copy_list,
    set: _copy_set,
    deque: _copy_deque,
    dict: _copy_dict,
    defaultdict: _copy_defaultdict,
    OrderedDict: _copy_ordered,
    Counter: _copy_ordered,
    bytearray: _copy_bytearray,
    np.ndarray: _copy_array,
}
_copiers: dict[type, Copier] = dict(_BUILT_IN)
