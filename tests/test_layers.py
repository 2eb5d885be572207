"""The layers stay honest: imports point downwards only, and the protocols stay pure.

What is pure can be simulated and replayed, and what is low knows nothing of what is above it; both
are lost by one careless import, which no other test would notice. So the sources are read as text
here, and the checker itself is shown bad sources, because a check that cannot fail proves nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "railgun"

# From the top down. A room is a package, or a module where one is named; the longest name counts. A room may
# import from the rooms of its own layer, but not in a circle, and from all below. "railgun" are the modules of railgun/
# itself that are not named here: the public names, and `run`.
LAYERS: Final = (
    {"cli", "testing", "__main__"},
    {"railgun"},
    {"spark"},
    {"engine.controller", "engine.batch", "sinkserver", "ingest", "broker.server"},
    {"engine.worker", "broker.cluster"},
    {"sources", "sinks", "broker.streams"},
    {"flows", "broker.log", "broker.discovery"},
    {"engine.operators", "client", "broker.settings"},
    {"flows.source", "flows.sink", "flows.errors", "engine.snapshots", "engine.state"},
    {"transport", "broker.errors", "broker.clock"},
    {"storage"},
    {"engine.protocol", "broker.protocol"},
    {"errors", "hashing", "lazy"},
)
ROOMS: Final[frozenset[str]] = frozenset().union(*LAYERS)
BUILDINGS: Final = {"engine", "broker"}  # they hold rooms and nothing else
TOP: Final = "railgun"
PURE: Final = {"engine.protocol", "broker.protocol", "errors", "hashing"}
TESTING: Final = "testing"  # for users' tests: no other room imports it
USES_PYSPARK: Final = {"spark"}
NOT_SHIPPED: Final = {"verification", "tests", "bench", "examples"}

# Modules of data: no files, no sockets, no clock, no chance, no threads, no event loop.
PURE_MODULES: Final = {
    *("__future__", "abc", "array", "bisect", "collections", "collections.abc", "contextlib"),
    *("copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq"),
    *("itertools", "math", "numbers", "operator", "re", "string", "struct", "types", "typing"),
    *("typing_extensions", "uuid", "zlib", "numpy", "numpy.typing"),
}
# Functions that reach out of the program or differ from run to run.
IMPURE_BUILTINS: Final = {
    *("open", "print", "input", "hash", "id", "eval", "exec", "__import__", "breakpoint"),
}
# The clock and chance, in modules that are pure but for them.
IMPURE_NAMES: Final = {"now", "utcnow", "today", "uuid1", "uuid4", "getnode", "random"}
IMPURE_OWNERS: Final = {"datetime", "date", "uuid", "np", "numpy"}


class Import(NamedTuple):
    line: int
    module: str


def layer(room: str) -> int:
    """Return how high a room is: 0 is the lowest layer."""
    for height, rooms in enumerate(reversed(LAYERS)):
        if room in rooms:
            return height
    raise KeyError(f"name {room} in LAYERS")


def room_of(module: str) -> str:
    """Return the room of a module, or of a name in one: `railgun.broker.log.tail.Tail` is in `broker.log`."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in ROOMS:
            return name
    if parts and parts[0] in BUILDINGS and len(parts) > 1:
        return ".".join(parts[:2])
    return TOP


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[Import]:
    """Yield every import of a module, at whatever depth, as absolute names."""
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = here[: len(here) - (node.level - 1)]
                base = ".".join([*above, base] if base else above)
            if base.split(".")[0] == "railgun":
                yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in node.names)
            else:
                yield Import(node.lineno, base)


def complaints(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return what is wrong with the source of `module`; an empty list if it keeps the rules."""
    tree = ast.parse(source)
    found = list(imports(tree, module, is_package))
    wrong = [*layer_complaints(found, room_of(module))]
    if room_of(module) in PURE:
        wrong += [*purity_complaints(tree, found)]
    return [f"{module}:{line}: {text}" for line, text in sorted(wrong)]


def layer_complaints(found: Iterable[Import], room: str) -> Iterator[tuple[int, str]]:
    for line, name in found:
        top = name.split(".")[0]
        if top == "pyspark" and room not in USES_PYSPARK:
            yield line, f"imports {name}: only spark/ knows PySpark"
        if top in NOT_SHIPPED:
            yield line, f"imports {name}, which is not shipped"
        if top != "railgun":
            continue
        target = room_of(name)
        if target == TESTING and room != TESTING:
            yield line, f"imports {name}: testing/ is for the tests of users"
        elif layer(target) > layer(room) and room != TESTING:
            yield line, f"imports {name}, which is in a layer above {room}"


def purity_complaints(tree: ast.AST, found: Iterable[Import]) -> Iterator[tuple[int, str]]:
    for line, name in found:
        if name.split(".")[0] != "railgun" and name not in PURE_MODULES:
            yield line, f"imports {name}: protocols import numpy and modules of data only"
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_BUILTINS:
                yield node.lineno, f"calls {name}(): protocols do no I/O and are the same each run"
            case (
                ast.Attribute(value=ast.Name(id=owner), attr=name)
                | ast.Attribute(value=ast.Attribute(attr=owner), attr=name)
            ) if owner in IMPURE_OWNERS and name in IMPURE_NAMES:
                yield node.lineno, f"uses {owner}.{name}: protocols have no clock and no chance"
            case ast.ImportFrom(module=owner, names=names) if owner in IMPURE_OWNERS:
                for alias in names:
                    if alias.name in IMPURE_NAMES:
                        yield (
                            node.lineno,
                            f"uses {owner}.{alias.name}: protocols have no clock and no chance",
                        )


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Return the rooms that import themselves by way of others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = set(edges.get(start, ()))
        while todo:
            room = todo.pop()
            seen.add(room)
            todo |= edges.get(room, set()) - seen
        return seen

    return sorted(room for room in edges if room in reached(room))


# --- The sources ----------------------------------------------------------------------------------

FILES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = ["railgun", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_sources_are_found() -> None:
    modules = {module_name(path) for path in FILES}
    assert {"railgun", "railgun.hashing", "railgun.engine.protocol.rescale"} <= modules


@pytest.mark.parametrize("path", FILES, ids=[module_name(path) for path in FILES])
def test_a_module_keeps_the_rules_of_its_layer(path: Path) -> None:
    is_package = path.name == "__init__.py"
    assert complaints(path.read_text("utf-8"), module_name(path), is_package=is_package) == []


def test_every_package_is_a_room_and_has_a_layer() -> None:
    packages = {
        package_with_rooms(path) for path in FILES if path.parent != SOURCE and path.name[0] != "_"
    }
    assert packages <= ROOMS, "name the new package in LAYERS, and in the map of CONTRIBUTING.md"


def package_with_rooms(path: Path) -> str:
    """Return the package of a file, down to where rooms are: `engine.worker`, `client`."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:2] if parts[0] in BUILDINGS else parts[:1])


def test_every_room_is_there() -> None:
    modules = {module_name(path) for path in FILES}
    assert {f"railgun.{room}" for room in ROOMS - {TOP}} <= modules


def test_rooms_do_not_import_each_other_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for path in FILES:
        room = room_of(module_name(path))
        found = imports(
            ast.parse(path.read_text("utf-8")), module_name(path), path.name == "__init__.py"
        )
        targets = {room_of(i.module) for i in found if i.module.split(".")[0] == "railgun"}
        edges.setdefault(room, set()).update(targets - {room})
    assert circles(edges) == []


# --- The checker ----------------------------------------------------------------------------------

PROTOCOL = "railgun.engine.protocol.x"
BAD: dict[str, tuple[str, str, str]] = {
    "protocol imports flows": (PROTOCOL, "import railgun.flows", "above engine.protocol"),
    "protocol imports transport": (PROTOCOL, "from railgun.transport import frames", "above"),
    "protocol imports the public names": (PROTOCOL, "from railgun import Flow", "above"),
    "protocol imports the whole": (PROTOCOL, "import railgun", "above"),
    "protocol imports up relatively": (PROTOCOL, "from ..worker import stage", "above"),
    "protocol imports a package up": ("railgun.engine.protocol.a.b", "from ... import worker", "a"),
    "protocol of the broker imports its log": (
        "railgun.broker.protocol.x",
        "from railgun.broker.log.tail import Tail",
        "above broker.protocol",
    ),
    "snapshots import flows": ("railgun.engine.snapshots.x", "import railgun.flows.flow", "above"),
    "snapshots import worker": (
        "railgun.engine.snapshots.x",
        "from railgun.engine import worker",
        "above engine.snapshots",
    ),
    "transport imports snapshots": (
        "railgun.transport.x",
        "from railgun.engine import snapshots",
        "above transport",
    ),
    "storage imports transport": ("railgun.storage.x", "import railgun.transport.http", "above"),
    "operators import flows": (
        "railgun.engine.operators.x",
        "from railgun.flows.plan import Plan",
        "above engine.operators",
    ),
    "client imports the broker": (
        "railgun.client.x",
        "from railgun.broker.streams import node",
        "above client",
    ),
    "streams import the cluster": (
        "railgun.broker.streams.x",
        "from railgun.broker.cluster import member",
        "above broker.streams",
    ),
    "worker imports cli": ("railgun.engine.worker.x", "from railgun.cli import main", "above"),
    "within a function": (PROTOCOL, "def f():\n    import railgun.flows", "above"),
    "for types only": (PROTOCOL, "if T:\n    from railgun.flows import S", "above"),
    "cli imports testing": ("railgun.cli.x", "import railgun.testing.node", "tests of users"),
    "public names from testing": ("railgun", "from .testing import node", "tests of users"),
    "worker imports pyspark": ("railgun.engine.worker.x", "import pyspark", "knows PySpark"),
    "protocol imports pyspark": (PROTOCOL, "import pyspark.sql", "knows PySpark"),
    "cli imports verification": ("railgun.cli.x", "import verification.prove", "not shipped"),
    "testing imports verification": (
        "railgun.testing.x",
        "from verification.rescale import rows",
        "not shipped",
    ),
    **{
        f"protocol imports {name}": (PROTOCOL, f"import {name}", "modules of data only")
        for name in (
            *("asyncio", "os", "os.path", "io", "pathlib", "socket", "time", "random", "threading"),
            *("secrets", "logging", "importlib", "builtins", "sys", "numpy.random", "rich"),
        )
    },
    "protocol imports from os": (PROTOCOL, "from os import path", "modules of data only"),
    "protocol imports sleep": (PROTOCOL, "def f():\n    from time import sleep", "data only"),
    **{
        f"protocol calls {name}": (PROTOCOL, f"class A:\n    x = [{name}(1)]", f"calls {name}()")
        for name in ("open", "print", "input", "hash", "id", "eval", "__import__")
    },
    "protocol reads the clock": (PROTOCOL, "t = datetime.datetime.now()", "no clock"),
    "protocol reads the date": (PROTOCOL, "t = date.today()", "no clock"),
    "protocol draws a UUID": (PROTOCOL, "from uuid import UUID, uuid4", "no chance"),
    "protocol draws a number": (PROTOCOL, "x = np.random.default_rng()", "no chance"),
    "protocol takes numpy's chance": (PROTOCOL, "from numpy import random", "no chance"),
    "hashes read a file": ("railgun.hashing", "import pathlib", "modules of data only"),
}


@pytest.mark.parametrize(("module", "source", "expected"), BAD.values(), ids=BAD.keys())
def test_the_checker_catches(module: str, source: str, expected: str) -> None:
    wrong = complaints(source, module, is_package=module == "railgun")
    assert len(wrong) >= 1
    assert any(expected in complaint for complaint in wrong), wrong


GOOD: dict[str, tuple[str, str]] = {
    "protocol imports itself": (
        "railgun.engine.protocol.rescale.x",
        "from railgun.engine.protocol import placement",
    ),
    "protocol imports itself relatively": (
        "railgun.engine.protocol.rescale.x",
        "from ..placement import Placement",
    ),
    "protocol imports hashes": (PROTOCOL, "from railgun.hashing import key_hash"),
    "protocol imports data": (PROTOCOL, "import collections.abc, uuid\nimport numpy as np"),
    "protocol has a method open": (PROTOCOL, "def f(self):\n    return self.open(1)"),
    "protocol is told the time": (PROTOCOL, "def f(now):\n    return self.now + now"),
    "protocol mentions print": (PROTOCOL, '"""Never print() nor import os."""'),
    "operators import the interface of sinks": (
        "railgun.engine.operators.x",
        "from railgun.flows.sink import Sink",
    ),
    "snapshots import transport": (
        "railgun.engine.snapshots.x",
        "from railgun.transport.pickling import dumps",
    ),
    "transport prints": ("railgun.transport.x", "import os\nprint(open('x'))"),
    "sinks import client": ("railgun.sinks.x", "from railgun.client import Client"),
    "spark imports pyspark": ("railgun.spark.x", "from pyspark.sql import SparkSession"),
    "cli imports all below": ("railgun.cli.x", "import railgun.broker.server, railgun.spark"),
    "public names from flows": ("railgun", "from railgun.flows import Flow"),
    "testing imports anything": ("railgun.testing.x", "import railgun.cli, railgun"),
}


@pytest.mark.parametrize(("module", "source"), GOOD.values(), ids=GOOD.keys())
def test_the_checker_lets_pass(module: str, source: str) -> None:
    assert complaints(source, module, is_package=module == "railgun") == []


def test_a_complaint_tells_the_module_and_the_line() -> None:
    wrong = complaints("\n\nimport os\n", PROTOCOL)
    assert wrong[0].startswith(f"{PROTOCOL}:3: imports os")


def test_a_package_resolves_relative_imports_from_itself() -> None:
    package = "railgun.engine.protocol"
    assert complaints("from .placement import Placement", package, is_package=True) == []
    assert complaints("from . import placement", package, is_package=True) == []
    assert len(complaints("from ..worker import x", package, is_package=True)) == 1


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
