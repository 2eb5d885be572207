"""Import the public names of a package when they are first used, so that `import railgun` stays quick."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports a name from its module on first use.

    `modules` maps each module to its names. A module that begins with a dot is relative to the package.

    >>> lazy_names("json", {".decoder": ("JSONDecoder",)})("JSONDecoder").__name__
    'JSONDecoder'
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name], package), name)

    return load
