"""Public names of a package that are imported when they are first used, so that `import railgun` stays quick."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of `package`, which imports each name from its module; `modules` has the names of each.

    Modules are relative to the package if they begin with a dot.

    >>> lazy_names("json", {".decoder": ("JSONDecoder",)})("JSONDecoder").__name__
    'JSONDecoder'
    """
    where = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(where[name], package), name)

    return find
