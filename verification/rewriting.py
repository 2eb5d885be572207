"""Make mutants by rewriting: a production function with some of its text replaced, and the rest unchanged."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from railgun.errors import RailgunError

Change = tuple[Any, str, Any]
"""An attribute of a module or class, and its replacement."""


class StaleMutantError(RailgunError):
    """Raised when the production code does not contain the text that a mutant replaces."""


def rewritten(owner: Any, name: str, *edits: tuple[str, str]) -> Change:
    """Return the replacement of `owner.name` with `edits` (old text, new text) made in its source."""
    original = inspect.getattr_static(owner, name)
    function: Any = original.fget if isinstance(original, property) else original
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in edits:
        if source.count(old) != 1:
            raise StaleMutantError(
                f"{function.__qualname__} has {source.count(old)} times the text {old!r}: rewrite the mutant"
            )
        source = source.replace(old, new)
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<mutant of {name}>", "exec"), function.__globals__, namespace)
    return owner, name, namespace[name]
