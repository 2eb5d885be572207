"""Copy values that later code may change: plain values so quickly that they can always be copied.

Most values of flows are *plain*: numbers, text, dates, enums; tuples, lists, dicts, sets, named tuples, arrays of
numbers; objects that have nothing but their attributes and slots; and these inside of each other. Rules:

1. A copy shares nothing changeable with its value. A value that cannot change (a tuple of numbers) is its own copy.
2. An object that occurs twice in a value occurs twice in its copy; an object may contain itself.
3. A copy of a plain value equals that of `copy.deepcopy`, and calls no user code but the `__hash__` and `__eq__` of
   keys. It takes some hundred nanoseconds for a small dict, where `deepcopy` takes some microseconds.
4. Any other value is *not plain*: classes that define how they are copied or pickled, subclasses of built-in types,
   classes of other languages. Only `deepcopy` can copy it, which may call user code, take long, or be refused.
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
NOT_PLAIN: Final = object()
"""The result of `plain_copy` for a value that is not plain."""
_FEW_PARTS: Final = 16  # up to so many parts, a loop over them beats one look at all types
MAX_KNOWN_TYPES: Final = 10_000
"""The largest number of types whose copiers are remembered."""

Memo = dict[int, Any]
"""Copies, by the identity of their originals."""
Copier = Callable[[Any, Memo], Any]


class _NotPlainError(Exception):
    """A value contains something that is not plain."""


def plain_copy(value: Any) -> Any:
    """Return a copy of a plain value, or `NOT_PLAIN` if the value is not plain or nested too deeply.

    >>> inner = [1]
    >>> copy = plain_copy({"a": inner, "b": inner, "c": (1, "x")})
    >>> copy, copy["a"] is copy["b"], copy["a"] is inner
    ({'a': [1], 'b': [1], 'c': (1, 'x')}, True, False)
    >>> pair = (1, "x")
    >>> plain_copy(pair) is pair, plain_copy([iter("ab")]) is NOT_PLAIN
    (True, True)
    """
    copier = _copiers.get(type(value))
    try:
        return _copy(value, {}) if copier is None else copier(value, {})
    except (_NotPlainError, RecursionError):
        return NOT_PLAIN


def copied(value: Any) -> Any:
    """Return a copy that shares nothing changeable with the value; raise what `deepcopy` raises if it is not plain."""
    if type(value) in ATOMS:
        return value
    copy = plain_copy(value)
    return deepcopy(value) if copy is NOT_PLAIN else copy


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
    copy = memo.get(id(value))
    if copy is not None:
        return copy
    copier = _copiers.get(kind)
    if copier is None:
        copier = _copier_of(kind)
        if len(_copiers) > MAX_KNOWN_TYPES:
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
    copy = memo.get(id(value))  # copied already if a part contains the tuple itself
    if copy is None:
        copy = memo[id(value)] = tuple.__new__(type(value), parts)
    return copy


def _copy_frozenset(value: frozenset[Any], memo: Memo) -> Any:
    if ATOMS.issuperset(map(type, value)):
        return value
    copy = memo[id(value)] = frozenset([_copy(part, memo) for part in value])
    return copy


def _copy_list(value: list[Any], memo: Memo) -> Any:
    copy = memo[id(value)] = value.copy()
    if len(copy) <= _FEW_PARTS or not ATOMS.issuperset(map(type, copy)):
        for at, part in enumerate(value):
            if type(part) not in ATOMS:
                copy[at] = _copy(part, memo)
    return copy


def _copy_set(value: set[Any], memo: Memo) -> Any:
    copy: set[Any]
    if ATOMS.issuperset(map(type, value)):
        copy = memo[id(value)] = value.copy()
        return copy
    copy = memo[id(value)] = set()
    copy.update([_copy(part, memo) for part in value])
    return copy


def _copy_deque(value: deque[Any], memo: Memo) -> Any:
    copy: deque[Any] = deque(maxlen=value.maxlen)
    memo[id(value)] = copy
    copy.extend([part if type(part) in ATOMS else _copy(part, memo) for part in value])
    return copy


def _copy_dict(value: dict[Any, Any], memo: Memo) -> Any:
    copy = memo[id(value)] = value.copy()
    for key, part in value.items():
        if type(part) not in ATOMS:
            copy[key] = _copy(part, memo)
        if type(key) not in ATOMS:
            copy.clear()
            return _fill(copy, value, memo)
    return copy


def _copy_defaultdict(value: defaultdict[Any, Any], memo: Memo) -> Any:
    return _fill(defaultdict(_copy(value.default_factory, memo)), value, memo)


def _copy_ordered(value: OrderedDict[Any, Any] | Counter[Any], memo: Memo) -> Any:
    if vars(value):
        raise _NotPlainError
    return _fill(type(value)(), value, memo)


def _fill(copy: dict[Any, Any], value: dict[Any, Any], memo: Memo) -> dict[Any, Any]:
    memo[id(value)] = copy
    for key, part in value.items():
        if type(key) not in ATOMS:
            key = _copy(key, memo)
        copy[key] = part if type(part) in ATOMS else _copy(part, memo)
    return copy


def _copy_bytearray(value: bytearray, memo: Memo) -> Any:
    copy = memo[id(value)] = bytearray(value)
    return copy


def _copy_array(value: np.ndarray[Any, Any], memo: Memo) -> Any:
    if value.dtype.hasobject:
        raise _NotPlainError
    copy = memo[id(value)] = value.copy(order="K")
    return copy


def _copy_object(value: Any, memo: Memo) -> Any:
    copy = memo[id(value)] = object.__new__(type(value))
    own = vars(copy)
    for name, part in vars(value).items():
        own[name] = part if type(part) in ATOMS else _copy(part, memo)
    return copy


def _copier_of_slots(slots: Sequence[Any], has_attributes: bool) -> Copier:
    """Return the copier of objects that have these slots and, with `has_attributes`, attributes."""

    def copy_slots(value: Any, memo: Memo) -> Any:
        if has_attributes:
            copy = _copy_object(value, memo)
        else:
            copy = memo[id(value)] = object.__new__(type(value))
        for slot in slots:
            try:
                part = slot.__get__(value)
            except AttributeError:  # the slot is empty
                continue
            slot.__set__(copy, part if type(part) in ATOMS else _copy(part, memo))
        return copy

    return copy_slots


def _is_own_copy(value: Any, memo: Memo) -> Any:
    return value


def _refuse(value: Any, memo: Memo) -> Any:
    raise _NotPlainError


class _Plain:
    """A class without slots: its size is that of an object with nothing but attributes."""


class _Slot:
    __slots__ = ("one",)


_MADE_IN_PYTHON: Final = 1 << 9  # a flag of CPython's types: Py_TPFLAGS_HEAPTYPE
_SIZE: Final = _Plain.__basicsize__
_SLOT: Final = _Slot.__basicsize__ - object.__basicsize__
_COPY_METHODS: Final = (
    "__new__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__getattribute__",
)
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
    if any(getattr(kind, name) is not getattr(object, name) for name in _COPY_METHODS):
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
        for base in kind.__mro__
        for slot in vars(base).values()
        if isinstance(slot, types.MemberDescriptorType)
    ]


def _hides_attributes(kind: type) -> bool:
    """Return whether a class defines a `__dict__` of its own, which does not hold its attributes."""
    descriptor = vars(kind).get("__dict__")
    return descriptor is not None and not isinstance(descriptor, types.GetSetDescriptorType)


def _is_named_tuple(kind: type) -> bool:
    code = getattr(kind.__new__, "__code__", None)
    return (
        kind.__bases__ == (tuple,)
        and hasattr(kind, "_fields")
        and kind.__dictoffset__ == 0
        and code is not None
        and code.co_filename.startswith("<string>")
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
