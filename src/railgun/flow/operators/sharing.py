"""Results that share objects with the state: kept apart, so that a later change of the state does not change them.

A function that ends in `return state, state` emits its state itself. The next record of the key changes it, and with
it every result that was emitted and not yet encoded: they all show the last state. Rules:

1. The first `CHECKED` results of a step are looked at. If one shares a mutable object with the state, the step is
   *sharing*, and from this one on its results are copied as they are made. So what is emitted is what was returned.
2. Objects may be hidden where nobody finds them. So these results are also *watched*: one that has changed at the end
   of its batch is put back to what it was when it was returned, and the step is sharing.
3. What a generator yields is looked at when it is yielded: it may change the state before it yields again.
4. Sharing is no mistake in itself: a function may make a new state each time and return that. So the flow goes on.
5. Later one result of each batch is looked at. A step that turns out to be sharing only then fails the flow by name, if
   the same key had several results in this batch: it cannot be told any more what the earlier ones were.
6. Where results must not be copied but checked (`FlowTester`), each is compared with what it was when it was returned,
   also later; one that has changed is an error that says how to mend the function. The steps that follow get copies,
   for they may change what they are given.

Steps with states that cannot change (numbers, text) pay for the look at a type, once a batch.
"""

from __future__ import annotations

import copyreg
import datetime
import decimal
import enum
import fractions
import pickle
import types
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import chain, islice
from typing import Any, Final

import numpy as np

from railgun.core.errors import pass_interrupt
from railgun.flow.errors import StepError
from railgun.flow.telling import name_of, shorten
from railgun.wire.pickling import dumps

CHECKED: Final = 1_000
MOST_PARTS: Final = 4_000
"""Objects within a value that are looked at."""
_ATOMS: Final = frozenset({
    int, float, complex, bool, str, bytes, type(None), range, type, types.FunctionType,
    types.BuiltinFunctionType, types.ModuleType, datetime.datetime, datetime.date, datetime.time,
    datetime.timedelta, decimal.Decimal, fractions.Fraction, uuid.UUID,
})  # fmt: skip


class SharedStateError(StepError):
    """A result changed after it was returned, because it shares an object with the state of its key."""

    def __str__(self) -> str:
        return (
            f"step {self.step!r}: {self.function} returned a result that shares an object with the state of key "
            f"{self.key}, and changed it later: it is {self.record} now. {self.cause}"
            "Return a copy instead, for example `return state, copy.deepcopy(state)`."
        )


class Watched:
    """A value, and what it was when it began to be watched."""

    __slots__ = ("_data", "value")

    def __init__(self, value: Any, data: bytes) -> None:
        self.value = value
        self._data = data

    @staticmethod
    def of(value: Any) -> Watched | None:
        """Watch a value; None if it cannot change, or cannot be pickled, so that nobody can tell."""
        if type(value) in _ATOMS:
            return None
        data = _bytes(value)
        return None if data is None else Watched(value, data)

    def has_changed(self) -> bool:
        """Whether the value is not what it was."""
        return _bytes(self.value) != self._data and not _equal(self.before(), self.value)

    def before(self) -> Any:
        """Return the value as it was."""
        return pickle.loads(self._data)


class Sharing:
    """Keeps the results of one step apart from its states."""

    __slots__ = ("_keys", "_seen", "copying", "left", "strict")

    def __init__(self) -> None:
        self.left = CHECKED
        self.copying = False
        self.strict = False
        self._seen: deque[Watched] = deque(maxlen=CHECKED)  # results
        self._keys: dict[int, Any] = {}  # of results that were seen, by their identity

    @property
    def watching(self) -> bool:
        """Whether each result is to be looked at."""
        return not self.strict and (self.copying or self.left > 0)

    def learn(self, state: Any, result: Any) -> None:
        """Look at a call that was given or left `state`, and returned `result`."""
        if not self.copying:
            self.left -= 1
            self.copying = shares(state, result)

    def apart(self, state: Any, result: Any) -> Any:
        """Return `result`, which was returned or yielded while there was `state`, or a copy if the step is sharing."""
        self.learn(state, result)
        if self.copying:
            return copied(result)
        self.note(result)
        return result

    def put_back(self, results: list[Any]) -> bool:
        """Put results that are about to be emitted back to what they were when they were returned.

        Returns whether one of them had changed, so that the step is sharing.
        """
        changed = {id(watched.value): watched for watched in self._seen if watched.has_changed()}
        if changed:
            self.copying = True
            for row, result in enumerate(results):
                if id(result) in changed:
                    results[row] = changed[id(result)].before()
        self._seen.clear()
        return bool(changed)

    def found_late(
        self,
        step: str,
        function: Callable[..., Any],
        keys: Sequence[Any],
        results: list[Any],
    ) -> None:
        """Copy the results of a batch, now that its step is known to be sharing.

        Raises `SharedStateError` if there are several of one key, so that the earlier ones may have changed already.
        """
        self.copying = True
        later: set[Any] = set()
        for row in range(len(results) - 1, -1, -1):
            if keys[row] in later and any(changeable(results[row])):
                why = "Another record of this key has come, so what was returned is not known any more. "
                told = shorten(keys[row]), shorten(results[row]), why
                raise SharedStateError(step, name_of(function), *told)
            results[row] = copied(results[row])
            later.add(keys[row])

    # ------------------------------------------------------------ watching

    def note(self, result: Any) -> None:
        """Remember what a result is when it is returned."""
        watched = Watched.of(result)
        if watched is not None:
            self._seen.append(watched)

    def compare(
        self, step: str, function: Callable[..., Any], keys: Iterable[Any], results: Iterable[Any]
    ) -> None:
        """Raise `SharedStateError` if a result that was noted changed; these are the last ones, and their keys."""
        if not self._seen:
            return
        seen = {id(watched.value) for watched in self._seen}
        self._keys = {number: key for number, key in self._keys.items() if number in seen}
        self._keys.update(zip(map(id, results), keys, strict=True))
        for watched in self._seen:
            if watched.has_changed():
                was = f"It was {shorten(watched.before())}. "
                result = watched.value
                told = shorten(self._keys.get(id(result))), shorten(result), was
                raise SharedStateError(step, name_of(function), *told)


def copied(value: Any) -> Any:
    """Return a copy that shares nothing that can change."""
    return value if type(value) in _ATOMS else deepcopy(value)


def own_copy(value: Any) -> Any:
    """Return a copy that shares nothing that can change, or the value itself if it cannot be copied."""
    try:
        return copied(value)
    except BaseException as error:
        pass_interrupt(error)
        return value


def shares(state: Any, result: Any) -> bool:
    """Whether the two have an object in common that can change, or look at the same memory.

    >>> state = {"n": [1]}
    >>> shares(state, state), shares(state, ("key", state)), shares(state, {"copied": state["n"]})
    (True, True, True)
    >>> shares(state, {"n": [1]}), shares(1, 1), shares((1, "a"), (1, "a"))
    (False, False, False)
    >>> array = np.zeros(3)
    >>> shares(array[1:], {"view": array[:2]}), shares(array, array.copy())
    (True, False)
    """
    if type(state) in _ATOMS or type(result) in _ATOMS:
        return False
    inside = {id(part) for part in changeable(state)}
    return bool(inside) and any(id(part) in inside for part in changeable(result))


def changeable(value: Any) -> Iterator[Any]:
    """Yield the objects in a value that can change, those that lie further outside first; up to `MOST_PARTS`."""
    waiting: deque[Any] = deque((value,))
    seen: set[int] = set()
    room = MOST_PARTS
    while waiting:
        part = waiting.popleft()
        if type(part) in _ATOMS or isinstance(part, enum.Enum | type):
            continue
        part = _owner(part)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if not isinstance(part, tuple | frozenset | bytes):
            yield part
        if room > 0:
            before = len(waiting)
            waiting.extend(islice(_parts(part), room))
            room -= len(waiting) - before


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
    found = getattr(value, "__dict__", None)
    slots = [getattr(value, name, None) for name in copyreg._slotnames(type(value))]  # type: ignore[attr-defined]
    return chain(found.values() if isinstance(found, dict) else (), slots)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:
        return False


def _bytes(value: Any) -> bytes | None:
    try:
        return dumps(value)
    except Exception:
        return None
