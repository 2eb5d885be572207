"""Import modules on first use: public names, so that `import railgun` stays quick, and packages of extras."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Final

from railgun.errors import ExitCode, RailgunError

EXTRAS: Final = {"pyarrow": "spark", "pandas": "spark", "pyspark": "spark"}
"""Packages that not every installation has, and the extra of railgun that brings each."""


class MissingExtraError(RailgunError, ImportError):
    """A package is not installed that belongs to an extra of railgun."""

    exit_code = ExitCode.USAGE
    kind = "missing-extra"


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
        need_extra(self._module.partition(".")[0])
        value = getattr(importlib.import_module(self._module), name)
        setattr(self, name, value)
        return value
