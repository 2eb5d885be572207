"""The steps of a flow: its nodes, as the user wrote them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from railgun.engine.operators.operator import Operator, Setting

ErrorPolicy = Literal["stop", "dead_letter"]
Make = Callable[[Setting], Operator]


@dataclass(eq=False, slots=True)
class Step:
    """A node of a flow. `make` returns the operator that does its work; kinds that need more are known to the plan."""

    name: str
    kind: str
    inputs: tuple[Step, ...]
    where: str
    keyed: bool = False
    make: Make | None = None
    on_error: ErrorPolicy = "stop"
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name!r}>"


def caller() -> str:
    """Return the user's line that is being run, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_HERE: Final = os.path.join(os.path.dirname(caller.__code__.co_filename), "")
