"""Imports that wait until they are used: public names, so that `import railgun` stays quick, and packages of extras."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

from railgun.errors import ExitCode, RailgunError

EXTRAS: Final = {"pyarrow": "spark", "pandas": "spark", "pyspark": "spark"}
"""Packages that not every installation has, and the extra of railgun that brings each."""


class MissingExtraError(RailgunError, ImportError):
    """A package is not installed that belongs to an extra of railgun."""

    exit_code = ExitCode.USAGE
    kind = "missing-extra"


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


def optional_import(module: str) -> ModuleType:
    """Import a module of an extra.

    Raise `MissingExtraError`, which names the extra, if its package is not installed.
    """
    need_extra(module.partition(".")[0])
    return importlib.import_module(module)


def need_extra(package: str) -> None:
    """Raise `MissingExtraError` if a package of an extra is not installed; do not import it."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(
            f"this needs the package {package}, which is not installed: pip install 'railgun[{EXTRAS[package]}]'"
        )


class LazyModule:
    """A module of an extra that is imported when a name of it is first used.

    >>> LazyModule("pyarrow").int64()
    DataType(int64)
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(optional_import(self._module), name)
        setattr(self, name, value)
        return value
