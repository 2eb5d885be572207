"""How exceptions, functions and values appear in messages."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from railgun import errors
from railgun.errors import RailgunError, represent
from railgun.flows.errors import StepError

SHOWN: Final = 500
_RAILGUN: Final = str(Path(errors.__file__).parent)
PLACES: Final = 200  # of which tracebacks are remembered


def tell(error: BaseException) -> str:
    """An exception in a message: with its traceback, unless it says all there is to say."""
    if isinstance(error, RailgunError) and not isinstance(error, StepError):
        return f"{type(error).__name__}: {error}"
    hidden = error.__suppress_context__ or error.__context__ is None
    if error.__cause__ is not None or not hidden or isinstance(error, BaseExceptionGroup):
        of_user = beyond_railgun(error.__traceback__)
        return "".join(traceback.format_exception(type(error), error, of_user, limit=-8))
    return _way_to(error) + "".join(traceback.format_exception_only(error))


def beyond_railgun(trace: TracebackType | None) -> TracebackType | None:
    """Return where a traceback comes to code of users, without what leads there; all of it if it never does."""
    at = trace
    while at is not None and at.tb_frame.f_code.co_filename.startswith(_RAILGUN):
        at = at.tb_next
    return at or trace


_ways: dict[tuple[Any, ...], str] = {}


def _way_to(error: BaseException) -> str:
    """Where it was raised: mostly at one place, for thousands of records, so that is worked out once."""
    place: list[Any] = []
    at = first = beyond_railgun(error.__traceback__)
    while at is not None:
        code = at.tb_frame.f_code
        place += code.co_filename, code.co_name, at.tb_lineno, at.tb_lasti
        at = at.tb_next
    known = tuple(place[-32:])  # of eight frames
    found = _ways.get(known)
    if found is None:
        if len(_ways) >= PLACES:
            _ways.clear()
        lines = traceback.format_tb(first, limit=-8)
        found = _ways[known] = "".join(["Traceback (most recent call last):\n", *lines])
    return found


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in a message."""
    return getattr(function, "__qualname__", None) or type(function).__name__


def shorten(value: Any) -> str:
    """Return a value as it appears in a message: at most `SHOWN` characters."""
    text = represent(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
