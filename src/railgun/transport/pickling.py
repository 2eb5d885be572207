"""Pickle values, also those of classes that pickle cannot find by name.

A user's classes often live where no worker can import them from: in the script that was started, or in a file beside
it. They reach workers by value, with the flow. `adopt_classes` registers them there under their names, so that plain
pickle finds them, on all workers and in the program that started the flow. Classes made inside functions cannot be
found by name; cloudpickle pickles their values together with the class.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

from railgun.errors import pass_interrupt

PROTOCOL: Final = 5
_ATOMS: Final = frozenset({int, float, bool, str, bytes, type(None)})


def dumps(value: Any) -> bytes:
    """Return a value as bytes, which `pickle.loads` reads.

    >>> def make():
    ...     class Point:
    ...         x = 1
    ...     return Point()
    >>> pickle.loads(dumps(make())).x
    1
    """
    try:
        return pickle.dumps(value, PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        import cloudpickle  # type: ignore[import-untyped]  # only where it is needed

        pickled: bytes = cloudpickle.dumps(value, PROTOCOL)
        return pickled


def may_unpickle_later(error: BaseException) -> bool:
    """Return whether an error of unpickling is transient: memory was short, or an outside system did not answer."""
    return isinstance(error, MemoryError | OSError)


def find_unloadable(values: Sequence[Any], tried: set[type]) -> tuple[int, BaseException] | None:
    """Pickle and unpickle one value of each type that is not in `tried`, and add the types to it.

    Return the position of a value that cannot be unpickled and the error it raised, or None. So values that could be
    saved and never loaded are detected before they are needed, at the cost of one value of each type.

    >>> class Strange(Exception):
    ...     def __init__(self, code, text): super().__init__(text)
    >>> find_unloadable([1, 2, ValueError(3)], set()), find_unloadable([1, Strange(2, "x")], set())
    (None, (1, TypeError("Strange.__init__() missing 1 required positional argument: 'text'")))
    """
    fresh = set(map(type, values)) - tried - _ATOMS
    if not fresh:
        return None
    tried |= fresh
    for row, value in enumerate(values):
        if type(value) not in fresh:
            continue
        fresh.discard(type(value))
        data = dumps(value)
        try:
            pickle.loads(data)
        except BaseException as error:
            pass_interrupt(error)
            if not may_unpickle_later(error):
                return row, error
        if not fresh:
            break
    return None


def adopt_classes() -> None:
    """Register the classes that arrived by value under their original modules and names, so that pickle finds them."""
    module = sys.modules.get("cloudpickle.cloudpickle")
    tracked = getattr(module, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    for adopted in list(tracked.values()):
        name, home = adopted.__qualname__, adopted.__module__
        if not name.isidentifier() or not isinstance(home, str):
            continue  # defined inside a function or class: pickle cannot find it by name
        namespace = sys.modules.setdefault(home, ModuleType(home))
        if not hasattr(namespace, name):
            setattr(namespace, name, adopted)
