"""The layers stay honest: imports point downwards only, and the core stays pure.

What is pure can be simulated and replayed, and what is low knows nothing of what is above it; both
are lost by one careless import, which no other test would notice. So the sources are read as text
here, and the checker itself is shown bad sources, because a check that cannot fail proves nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "railgun"

# From the top down. A package may import from its own layer, but not in a circle, and from those
# below it. Modules that lie in railgun/ itself, and railgun/__init__.py, belong to the top layer.
LAYERS = (
    {"cli", "web"},
    {"controller", "worker", "node", "spark", "batch"},
    {"client", "connectors", "connector"},
    {"flow"},
    {"snapshots", "state"},
    {"wire"},
    {"core"},
)
TESTING = "testing"  # imports anything; is imported by tests, benchmarks and the demo only
USES_TESTING = {TESTING, "demo"}
USES_PYSPARK = {"spark", "demo"}

# Modules of data: no files, no sockets, no clock, no chance, no threads, no event loop.
PURE_MODULES = {
    *("__future__", "abc", "array", "bisect", "collections", "collections.abc", "contextlib"),
    *("copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq"),
    *("itertools", "math", "numbers", "operator", "re", "string", "struct", "types", "typing"),
    *("typing_extensions", "uuid", "zlib", "numpy", "numpy.typing"),
}
# Functions that reach out of the program or differ from run to run.
IMPURE_BUILTINS = {
    "open",
    "print",
    "input",
    "hash",
    "id",
    "eval",
    "exec",
    "__import__",
    "breakpoint",
}
# Doors to the clock and to chance in modules that are pure but for them.
IMPURE_NAMES = {"now", "utcnow", "today", "uuid1", "uuid4", "getnode", "random"}
IMPURE_OWNERS = {"datetime", "date", "uuid", "np", "numpy"}
LONGEST_IN_CORE = 450


class Import(NamedTuple):
    line: int
    module: str


def layer(package: str) -> int:
    """How high a package stands: 0 is the lowest layer."""
    for height, packages in enumerate(reversed(LAYERS)):
        if package in packages:
            return height
    return len(LAYERS) - 1


def known_packages() -> set[str]:
    return {TESTING}.union(*LAYERS)


def package_of(module: str) -> str:
    """Where a module lies: `railgun.core.hashing` in `core`, a public name in `railgun` itself."""
    parts = module.split(".")
    is_package = len(parts) > 1 and parts[1] in known_packages() | USES_TESTING
    is_module = len(parts) > 1 and (SOURCE / f"{parts[1]}.py").exists()
    return parts[1] if is_package or is_module else "railgun"


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[Import]:
    """Every import of a module, at whatever depth, as absolute names."""
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = here[: len(here) - (node.level - 1)]
                base = ".".join([*above, base] if base else above)
            if base == "railgun":
                yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in node.names)
            else:
                yield Import(node.lineno, base)


def complaints(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What is wrong with the source of `module`; nothing, if it keeps the rules."""
    tree = ast.parse(source)
    found = list(imports(tree, module, is_package))
    told = [*layer_complaints(found, package_of(module))]
    if package_of(module) == "core":
        told += [*purity_complaints(tree, found)]
    return [f"{module}:{line}: {what}" for line, what in sorted(told)]


def layer_complaints(found: Iterable[Import], package: str) -> Iterator[tuple[int, str]]:
    for line, name in found:
        top = name.split(".")[0]
        if top == "pyspark" and package not in USES_PYSPARK:
            yield line, f"imports {name}: only spark/ and the demo know PySpark"
        if top != "railgun":
            continue
        target = package_of(name)
        if target == TESTING:
            if package not in USES_TESTING:
                yield line, f"imports {name}: only tests, benchmarks and the demo import testing/"
        elif package != TESTING and layer(target) > layer(package):
            yield line, f"imports {name}, which is in a layer above {package}/"


def purity_complaints(tree: ast.AST, found: Iterable[Import]) -> Iterator[tuple[int, str]]:
    for line, name in found:
        if name.split(".")[0] != "railgun" and name not in PURE_MODULES:
            yield line, f"imports {name}: core/ imports itself, numpy and modules of data only"
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_BUILTINS:
                yield (
                    node.lineno,
                    f"calls {name}(): core/ has no I/O and nothing that differs by run",
                )
            case (
                ast.Attribute(value=ast.Name(id=owner), attr=name)
                | ast.Attribute(value=ast.Attribute(attr=owner), attr=name)
            ) if owner in IMPURE_OWNERS and name in IMPURE_NAMES:
                yield node.lineno, f"uses {owner}.{name}: core/ has no clock and no chance"
            case ast.ImportFrom(module=owner, names=names) if owner in IMPURE_OWNERS:
                for alias in names:
                    if alias.name in IMPURE_NAMES:
                        yield (
                            node.lineno,
                            f"uses {owner}.{alias.name}: core/ has no clock and no chance",
                        )


def circles(edges: dict[str, set[str]]) -> list[str]:
    """The packages that import themselves by way of others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = set(edges.get(start, ()))
        while todo:
            package = todo.pop()
            seen.add(package)
            todo |= edges.get(package, set()) - seen
        return seen

    return sorted(package for package in edges if package in reached(package))


# --- The sources ----------------------------------------------------------------------------------

FILES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = ["railgun", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_sources_are_found() -> None:
    modules = {module_name(path) for path in FILES}
    assert {"railgun", "railgun.core", "railgun.core.hashing", "railgun.core.rescale"} <= modules
    assert any(module.startswith("railgun.testing.") for module in modules)


@pytest.mark.parametrize("path", FILES, ids=[module_name(path) for path in FILES])
def test_a_module_keeps_the_rules_of_its_layer(path: Path) -> None:
    is_package = path.name == "__init__.py"
    assert complaints(path.read_text("utf-8"), module_name(path), is_package=is_package) == []


def test_every_package_has_a_layer() -> None:
    packages = {path.relative_to(SOURCE).parts[0] for path in FILES if path.parent != SOURCE}
    assert packages <= known_packages(), "name the new package in LAYERS, and in the architecture"


def test_the_packages_of_a_layer_do_not_import_each_other_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for path in FILES:
        package = package_of(module_name(path))
        found = imports(
            ast.parse(path.read_text("utf-8")), module_name(path), path.name == "__init__.py"
        )
        targets = {package_of(i.module) for i in found if i.module.split(".")[0] == "railgun"}
        edges.setdefault(package, set()).update(targets - {package})
    assert circles(edges) == []


CORE_FILES = [path for path in FILES if SOURCE / "core" in path.parents]


@pytest.mark.parametrize("path", CORE_FILES, ids=[module_name(path) for path in CORE_FILES])
def test_a_file_of_the_core_is_one_idea(path: Path) -> None:
    lines = len(path.read_text("utf-8").splitlines())
    assert lines <= LONGEST_IN_CORE, f"{path.name} has {lines} lines: it is probably two ideas"


# --- The checker ----------------------------------------------------------------------------------

BAD: dict[str, tuple[str, str, str]] = {
    "core imports flow": ("railgun.core.x", "import railgun.flow", "above core/"),
    "core imports wire": ("railgun.core.x", "from railgun.wire import frame", "above core/"),
    "core imports the public names": ("railgun.core.x", "from railgun import Flow", "above core/"),
    "core imports the whole": ("railgun.core.x", "import railgun", "above core/"),
    "core imports up relatively": ("railgun.core.x", "from ..flow import plan", "above core/"),
    "core imports a package up": ("railgun.core.a.b", "from ... import flow", "above core/"),
    "snapshots import flow": (
        "railgun.snapshots.x",
        "import railgun.flow.sink",
        "above snapshots/",
    ),
    "snapshots import worker": ("railgun.snapshots.x", "import railgun.worker", "above snapshots/"),
    "wire imports snapshots": ("railgun.wire.x", "from railgun import snapshots", "above wire/"),
    "wire imports flow": ("railgun.wire.x", "from railgun import flow", "above wire/"),
    "flow imports client": ("railgun.flow.x", "import railgun.client.sync as c", "above flow/"),
    "client imports node": ("railgun.client.x", "from railgun.node import log", "above client/"),
    "worker imports cli": ("railgun.worker.x", "from railgun.cli import main", "above worker/"),
    "flow imports the demo": ("railgun.flow.x", "from railgun import demo", "above flow/"),
    "within a function": ("railgun.core.x", "def f():\n    import railgun.flow", "above core/"),
    "for types only": ("railgun.core.x", "if T:\n    from railgun.flow import S", "above core/"),
    "cli imports testing": ("railgun.cli.x", "import railgun.testing.report", "import testing/"),
    "core imports testing": ("railgun.core.x", "from railgun import testing", "import testing/"),
    "public names from testing": ("railgun", "from .testing import report", "import testing/"),
    "worker imports pyspark": ("railgun.worker.x", "import pyspark", "know PySpark"),
    "testing imports pyspark": ("railgun.testing.x", "from pyspark.sql import Row", "know PySpark"),
    "core imports pyspark": ("railgun.core.x", "import pyspark.sql", "know PySpark"),
    **{
        f"core imports {name}": ("railgun.core.x", f"import {name}", "modules of data only")
        for name in (
            *("asyncio", "os", "os.path", "io", "pathlib", "socket", "time", "random", "threading"),
            *("secrets", "logging", "importlib", "builtins", "sys", "numpy.random", "rich"),
        )
    },
    "core imports from os": ("railgun.core.x", "from os import path", "modules of data only"),
    "core imports sleep": ("railgun.core.x", "def f():\n    from time import sleep", "data only"),
    **{
        f"core calls {name}": (
            "railgun.core.x",
            f"class A:\n    x = [{name}(1)]",
            f"calls {name}()",
        )
        for name in ("open", "print", "input", "hash", "id", "eval", "__import__")
    },
    "core reads the clock": ("railgun.core.x", "t = datetime.datetime.now()", "no clock"),
    "core reads the date": ("railgun.core.x", "t = date.today()", "no clock"),
    "core draws a UUID": ("railgun.core.x", "from uuid import UUID, uuid4", "no chance"),
    "core draws a number": ("railgun.core.x", "x = np.random.default_rng()", "no chance"),
    "core takes numpy's chance": ("railgun.core.x", "from numpy import random", "no chance"),
}


@pytest.mark.parametrize(("module", "source", "expected"), BAD.values(), ids=BAD.keys())
def test_the_checker_catches(module: str, source: str, expected: str) -> None:
    told = complaints(source, module, is_package=module == "railgun")
    assert len(told) >= 1
    assert any(expected in complaint for complaint in told), told


GOOD: dict[str, tuple[str, str]] = {
    "core imports itself": ("railgun.core.rescale.x", "from railgun.core import hashing"),
    "core imports itself relatively": (
        "railgun.core.rescale.x",
        "from ..errors import KeyTypeError",
    ),
    "core imports data": ("railgun.core.x", "import collections.abc, uuid\nimport numpy as np"),
    "core has a method open": ("railgun.core.x", "def f(self):\n    return self.open(1)"),
    "core is told the time": ("railgun.core.x", "def f(now):\n    return self.now + now"),
    "core mentions print": ("railgun.core.x", '"""Never print() nor import os."""'),
    "wire imports core": ("railgun.wire.x", "from railgun.core.hashing import key_hash"),
    "snapshots import wire": ("railgun.snapshots.x", "from railgun.wire.pickling import dumps"),
    "wire prints": ("railgun.wire.x", "import os\nprint(open('x'))"),
    "connectors import client": ("railgun.connectors.x", "from railgun.client import Client"),
    "spark imports pyspark": ("railgun.spark.x", "from pyspark.sql import SparkSession"),
    "cli imports all below": ("railgun.cli.x", "import railgun.node, railgun.spark, railgun.core"),
    "cli imports the demo": ("railgun.cli.x", "import railgun.demo"),
    "public names from flow": ("railgun", "from railgun.flow import Flow"),
    "testing imports anything": ("railgun.testing.x", "import railgun.cli, railgun.core, railgun"),
    "demo imports anything": ("railgun.demo", "import pyspark, railgun.testing, railgun.cli"),
}


@pytest.mark.parametrize(("module", "source"), GOOD.values(), ids=GOOD.keys())
def test_the_checker_lets_pass(module: str, source: str) -> None:
    assert complaints(source, module, is_package=module == "railgun") == []


def test_a_complaint_tells_the_module_and_the_line() -> None:
    told = complaints("\n\nimport os\n", "railgun.core.x")
    assert told[0].startswith("railgun.core.x:3: imports os")


def test_a_package_resolves_relative_imports_from_itself() -> None:
    assert complaints("from .hashing import key_hash", "railgun.core", is_package=True) == []
    assert complaints("from . import flow", "railgun.core", is_package=True) == []
    assert len(complaints("from ..flow import x", "railgun.core", is_package=True)) == 1


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
