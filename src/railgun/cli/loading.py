"""Load a flow by its name: `module:flow`, or `path/file.py[:flow]`.

Errors in the user's file are shown with the lines of that file, without frames of Railgun.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from railgun.cli.errors import NO_FLOW, CommandError
from railgun.flows.flow import Flow
from railgun.flows.shipping import modules_beside


@dataclass(frozen=True, slots=True)
class Loaded:
    """A flow, and the modules that have to be sent along with it."""

    flow: Flow
    modules: list[ModuleType]


def load(spec: str) -> Loaded:
    """Load the flow that `spec` names; raise `CommandError` if there is none, or if its module cannot be imported."""
    place, name = _split(spec)
    is_file = place.endswith(".py") or os.sep in place
    path = Path(place)
    if is_file:
        if not path.is_file():
            raise CommandError(NO_FLOW, "no-file", f"there is no file {place}")
        root, module = path.resolve().parent, _from_file(path)
    else:
        root, module = Path.cwd(), _from_module(place, spec)
    flow = _flow_of(module, name, place)
    return Loaded(flow, modules_beside(root))


def _split(spec: str) -> tuple[str, str]:
    place, colon, name = spec.rpartition(":")
    if not colon:
        return spec, ""
    if not place or not all(part.isidentifier() for part in name.split(".")):
        raise CommandError(
            NO_FLOW, "bad-name", f"a flow is named module:flow or path/file.py:flow, not {spec!r}"
        )
    return place, name


def _from_file(path: Path) -> ModuleType:
    name = re.sub(r"\W", "_", path.stem)
    if name in sys.modules or name in sys.stdlib_module_names or not name.isidentifier():
        name = f"railgun_flow_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as for `python file.py`
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _not_importable(str(path), error) from error
    return module


def _from_module(name: str, spec: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(missing + "."):
            hint = f"; did you mean the file {name}.py?" if Path(f"{name}.py").exists() else ""
            raise CommandError(
                NO_FLOW, "no-module", f"there is no module {name!r}, for {spec!r}{hint}"
            ) from error
        raise _not_importable(name, error) from error
    except (Exception, SystemExit) as error:
        raise _not_importable(name, error) from error


def _not_importable(place: str, error: BaseException) -> CommandError:
    """Return the error of a failed import, with the traceback through the user's code."""
    return CommandError(
        NO_FLOW,
        "not-importable",
        f"{place} cannot be imported: {type(error).__name__}: {error}",
        _users_traceback(error),
    )


def _users_traceback(error: BaseException) -> str:
    report = traceback.TracebackException.from_exception(error)
    current = report
    while True:  # causes and contexts have frames too
        own_file = str(Path(__file__).resolve())
        user_frames = [
            frame
            for frame in current.stack
            if not frame.filename.startswith("<frozen importlib")
            and os.path.realpath(frame.filename) != own_file
            and frame.filename != importlib.__file__
        ]
        current.stack = traceback.StackSummary.from_list(user_frames)
        following = current.__cause__ or current.__context__
        if following is None:
            return "".join(report.format())
        current = following


def _flow_of(module: ModuleType, name: str, place: str) -> Flow:
    if name:
        value: object = module
        for part in name.split("."):
            value = getattr(value, part, None)
        if isinstance(value, Flow):
            return value
        flows = _flows(module)
        hint = f"; it has {_comma_separated(flows)}" if flows else ""
        kind = "nothing of that name" if value is None else f"a {type(value).__name__}"
        raise CommandError(
            NO_FLOW, "no-flow", f"{place}:{name} is {kind}, and no Flow{hint}", flows=flows
        )
    flows = _flows(module)
    if len(flows) == 1:
        flow = getattr(module, flows[0])
        assert isinstance(flow, Flow)
        return flow
    if not flows:
        raise CommandError(
            NO_FLOW, "no-flow", f"{place} has no flow: make one at the top level, flow = Flow(...)"
        )
    raise CommandError(
        NO_FLOW,
        "several-flows",
        f"{place} has several flows, {_comma_separated(flows)}: name one, {place}:{flows[0]}",
        flows=flows,
    )


def _flows(module: ModuleType) -> list[str]:
    """Return the names of the flows in a module, one name for each flow."""
    names: dict[int, str] = {}
    for name, value in vars(module).items():
        if isinstance(value, Flow):
            names.setdefault(id(value), name)
    return list(names.values())


def _comma_separated(names: list[str]) -> str:
    return ", ".join(names)
