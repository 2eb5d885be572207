"""Pickle, and what to do about classes that it cannot find by their name.

A user's classes often live where no worker can import them from: in the script that was started, or in a file beside
it. They reach workers by value, with the flow (`adopt_classes` gives them their names there, so that plain pickle finds
them, on all workers and in the program that started the flow). Classes made inside functions have no name to be found
by; values of them are pickled by cloudpickle, which sends the class along.
"""

from __future__ import annotations

import pickle
import sys
from types import ModuleType
from typing import Any, Final

PROTOCOL: Final = 5


def dumps(value: Any) -> bytes:
    """A value as bytes, which `pickle.loads` reads.

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


def adopt_classes() -> None:
    """Let pickle find the classes that came by value, under the names they have where they were made."""
    module = sys.modules.get("cloudpickle.cloudpickle")
    came = getattr(module, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    for known in list(came.values()):
        name, home = known.__qualname__, known.__module__
        if not name.isidentifier() or not isinstance(home, str):
            continue  # made within something else: no name leads there
        namespace = sys.modules.setdefault(home, ModuleType(home))
        if not hasattr(namespace, name):
            setattr(namespace, name, known)
