"""Pickle a flow for the workers, with the code that they cannot import by its name.

Functions of `__main__` travel by value, and so do those of modules that lie beside the flow: the workers' Python can
import neither. Installed modules travel by name. A flow that cannot be pickled is refused, and the error names the
step.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from railgun.errors import ExitCode, RailgunError
from railgun.flows.flow import Flow
from railgun.flows.plan import Plan


class FlowNotPicklableError(RailgunError):
    """A flow cannot be pickled to be sent to workers."""

    exit_code = ExitCode.NO_FLOW
    kind = "flow"


def ship(flow: Flow, plan: Plan, by_value: Iterable[ModuleType] = ()) -> bytes:
    """Return the plan as bytes; functions and classes of the modules `by_value` travel by value.

    Raise `FlowNotPicklableError` if something in the flow cannot be pickled.
    """
    with _by_value(by_value):
        try:
            return _pickled(plan)
        except Exception as error:
            raise FlowNotPicklableError(_explain_refusal(flow, error)) from error


def modules_beside(root: Path) -> list[ModuleType]:
    """Return the modules that were imported from files below a directory, except installed ones."""
    root = root.resolve()
    installed = [
        Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")
    ]
    package = Path(__file__).resolve().parent.parent
    modules = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name == "__main__":
            continue
        path = Path(file).resolve()
        elsewhere = [*installed, package]
        if path.is_relative_to(root) and not any(path.is_relative_to(at) for at in elsewhere):
            modules.append(module)
    return modules


@contextmanager
def _by_value(modules: Iterable[ModuleType]) -> Iterator[None]:
    registered = []
    try:
        for module in modules:
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles classes with `__slots__` as they are.

    cloudpickle makes them again with a `__dict__`. Values of such a class cannot be unpickled in the program that
    started the flow, where the class has none.
    """

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if (
            isinstance(obj, type)
            and "__slots__" in vars(obj)
            and not issubclass(obj, tuple)  # a NamedTuple has no slots to fill
            and isinstance(reduced, tuple)
            and reduced[0].__name__ == "_make_skeleton_class"
        ):
            kind, name, bases, body, *rest = reduced[1]
            made_of = kind, name, bases, {**body, "__slots__": vars(obj)["__slots__"]}, *rest
            return reduced[0], made_of, *reduced[2:]
        return reduced


def _pickled(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
        return file.getvalue()


def _explain_refusal(flow: Flow, error: Exception) -> str:
    """Return a message that names the step, and its part, that cannot be pickled."""
    for step in flow.steps.values():
        parts: dict[str, Any] = {}
        if isinstance(step.make, partial):
            parts |= step.make.keywords
        parts |= step.options
        for part_name, part in [*parts.items(), ("operator", step.make)]:
            why = _pickling_error(part)
            if why is not None:
                named = _unpicklable_name(part)
                return (
                    f"{step.where}: step {step.name!r} cannot be sent to the workers: its {part_name}"
                    f"{named} cannot be pickled: {why}. Make such things where they are used: in the "
                    "function itself, or in the methods of a Source, Sink or Stateful."
                )
    why = _pickling_error(flow.dead_letters)
    if why is not None:
        return f"flow {flow.name!r}: its sink for dead letters cannot be pickled: {why}"
    return f"flow {flow.name!r} cannot be sent to the workers: {error}"


def _pickling_error(value: Any) -> str | None:
    try:
        _pickled(value)
    except Exception as error:
        return str(error)
    return None


def _unpicklable_name(value: Any) -> str:
    """Return the variable of a function, or the attribute of an object, that cannot be pickled, as text."""
    if isinstance(value, FunctionType):
        used = inspect.getclosurevars(value)
        for name, held in {**used.globals, **used.nonlocals}.items():
            if _pickling_error(held) is not None:
                return f", by its variable {name!r}"
    for name, held in getattr(value, "__dict__", {}).items():
        if not isinstance(value, FunctionType) and _pickling_error(held) is not None:
            return f", by its attribute {name!r}"
    return ""
