"""Copy results that could share objects with the state, so that a later change of the state does not change them.

A function that ends in `return state, state` emits its state itself. The next record of the key changes it, and with
it every result that was emitted and not yet encoded: they would all show the last state. The same happens to results
that share a part with the state, look at its memory, or are a list that the function fills again each time. Rules:

1. A returned result is copied at once and the copy is emitted, for every result that could change: some calls of a
   function do not show what it will return in others. Results that cannot change (numbers, text, tuples of these) cost
   one look at their type; of the others, plain ones are copied quickly (`copying`).
2. A generator's result is copied when it is yielded: the generator may change the state before it yields again.
3. A result that cannot be copied (a lock, an open file) is emitted as it is if no object shared with the state is
   found in it. Otherwise it is as if the function had raised for this record.
4. Sharing is no mistake in itself: a function may make a new state each time and return that. So the flow goes on.
5. In strict mode (`FlowTester`) results are not copied but checked: each is compared with its value at its return, also
   later; a changed result is an error that says how to fix the function. The following steps get copies, for they may
   change their items.
"""

from __future__ import annotations

import copyreg
import enum
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import chain, islice
from typing import Any, Final

import numpy as np

from railgun.engine.operators.copying import ATOMS, NOT_PLAIN, plain_copy
from railgun.engine.operators.describe import name_of, shorten
from railgun.errors import pass_interrupt, represent
from railgun.flows.errors import StepError
from railgun.transport.pickling import dumps

REMEMBERED_RESULTS: Final = 1_000
"""The number of results that are remembered and compared, in strict mode."""
MAX_INSPECTED_OBJECTS: Final = 4_000
"""The largest number of objects inspected within a value."""


class SharedStateError(StepError):
    """A result changed after it was returned, because it shares an object with the state of its key."""

    def __str__(self) -> str:
        return (
            f"step {self.step!r}: {self.function} returned a result that shares an object with the state of key "
            f"{self.key}, and changed it later: it is {self.record} now. {self.cause}"
            "Return a copy instead, for example `return state, copy.deepcopy(state)`."
        )


class Watched:
    """A value, and its pickled form from when the watch began."""

    __slots__ = ("_data", "value")

    def __init__(self, value: Any, data: bytes) -> None:
        self.value = value
        self._data = data

    @staticmethod
    def of(value: Any) -> Watched | None:
        """Watch a value; return None if it cannot change, or cannot be pickled, so that changes cannot be detected."""
        if type(value) in ATOMS:
            return None
        data = _bytes(value)
        return None if data is None else Watched(value, data)

    def has_changed(self) -> bool:
        """Return whether the value has changed."""
        return _bytes(self.value) != self._data and not _equal(self.before(), self.value)

    def before(self) -> Any:
        """Return the value as it was when the watch began."""
        return pickle.loads(self._data)


class ResultChecks:
    """Checks the results of one step, in strict mode."""

    __slots__ = ("_keys", "_seen", "strict")

    def __init__(self) -> None:
        self.strict = False
        self._seen: deque[Watched] = deque(maxlen=REMEMBERED_RESULTS)  # results
        self._keys: dict[int, Any] = {}  # keys of those results, by the results' identity

    def note(self, result: Any) -> None:
        """Remember a result as it is when it is returned."""
        watched = Watched.of(result)
        if watched is not None:
            self._seen.append(watched)

    def compare(
        self, step: str, function: Callable[..., Any], keys: Iterable[Any], results: Iterable[Any]
    ) -> None:
        """Raise `SharedStateError` if a noted result changed; `keys` and `results` are those of the last batch."""
        if not self._seen:
            return
        seen = {id(watched.value) for watched in self._seen}
        self._keys = {number: key for number, key in self._keys.items() if number in seen}
        self._keys.update(zip(map(id, results), keys, strict=True))
        for watched in self._seen:
            if watched.has_changed():
                was = f"It was {shorten(watched.before())}. "
                result = watched.value
                details = shorten(self._keys.get(id(result))), shorten(result), was
                raise SharedStateError(step, name_of(function), *details)


def copy_result(state: Any, result: Any) -> Any:
    """Return a copy of `result`, which was returned or yielded along with `state`.

    Raise `TypeError` if the result shares an object with the state and cannot be copied.
    """
    copy = plain_copy(result)
    if copy is not NOT_PLAIN:
        return copy
    try:
        return deepcopy(result)
    except BaseException as error:
        pass_interrupt(error)
        if shares(state, result):
            raise TypeError(
                "the result shares an object with the state, so a copy of it would have to be emitted, and it cannot "
                f"be copied: {represent(error)}. Return something else than the state or a part of it"
            ) from error
        return result


def shares(state: Any, result: Any) -> bool:
    """Return whether the two values have a changeable object in common, or look at the same memory.

    >>> state = {"n": [1]}
    >>> shares(state, state), shares(state, ("key", state)), shares(state, {"copied": state["n"]})
    (True, True, True)
    >>> shares(state, {"n": [1]}), shares(1, 1), shares((1, "a"), (1, "a"))
    (False, False, False)
    >>> array = np.zeros(3)
    >>> shares(array[1:], {"view": array[:2]}), shares(array, array.copy())
    (True, False)
    """
    if type(state) in ATOMS or type(result) in ATOMS:
        return False
    inside = {id(part) for part in changeable(state)}
    return bool(inside) and any(id(part) in inside for part in changeable(result))


def changeable(value: Any) -> Iterator[Any]:
    """Yield the objects in a value that can change, outer ones first; up to `MAX_INSPECTED_OBJECTS`."""
    waiting: deque[Any] = deque((value,))
    seen: set[int] = set()
    parts_left = MAX_INSPECTED_OBJECTS
    while waiting:
        part = waiting.popleft()
        if type(part) in ATOMS or isinstance(part, enum.Enum | type):
            continue
        part = _owner(part)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, tuple | frozenset | bytes):
            yield part
        if parts_left > 0:
            before = len(waiting)
            waiting.extend(islice(_parts(part), parts_left))
            parts_left -= len(waiting) - before


def _owner(value: Any) -> Any:
    """Return the object whose memory a value looks at: that of a view of numpy, or the value itself."""
    while True:
        inner: Any
        if isinstance(value, np.ndarray):
            inner = value.base
        elif isinstance(value, memoryview):
            inner = value.obj
        else:
            return value
        if inner is None:
            return value
        value = inner


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, tuple | list | set | frozenset | deque):
        return value
    if isinstance(value, np.ndarray):
        return value.flat if value.dtype.hasobject else ()
    attributes = getattr(value, "__dict__", None)
    slots = [getattr(value, name, None) for name in copyreg._slotnames(type(value))]  # type: ignore[attr-defined]
    return chain(attributes.values() if isinstance(attributes, dict) else (), slots)


def _equal(before: Any, after: Any) -> bool:
    try:
        return bool(before == after)
    except Exception:
        return False


def _bytes(value: Any) -> bytes | None:
    try:
        return dumps(value)
    except Exception:
        return None
