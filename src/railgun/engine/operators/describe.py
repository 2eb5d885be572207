"""Describe exceptions, functions and values in messages."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from railgun import errors
from railgun.errors import RailgunError, represent
from railgun.flows.errors import StepError

MAX_SHOWN_CHARACTERS: Final = 500
_RAILGUN: Final = str(Path(errors.__file__).parent)
MAX_CACHED_TRACEBACKS: Final = 200  # number of places whose tracebacks are remembered


def describe_error(error: BaseException) -> str:
    """Return an exception as text: with its traceback, unless its message says everything."""
    if isinstance(error, RailgunError) and not isinstance(error, StepError):
        return f"{type(error).__name__}: {error}"
    hidden = error.__suppress_context__ or error.__context__ is None
    if error.__cause__ is not None or not hidden or isinstance(error, BaseExceptionGroup):
        of_user = beyond_railgun(error.__traceback__)
        return "".join(traceback.format_exception(type(error), error, of_user, limit=-8))
    return _traceback_text(error) + "".join(traceback.format_exception_only(error))


def beyond_railgun(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback from the first frame of user code on; all of it if there is none."""
    frame = trace
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_RAILGUN):
        frame = frame.tb_next
    return frame or trace


_traceback_texts: dict[tuple[Any, ...], str] = {}


def _traceback_text(error: BaseException) -> str:
    """Return the traceback of an error as text. It is cached: thousands of records mostly fail at one place."""
    code_positions: list[Any] = []
    trace = first = beyond_railgun(error.__traceback__)
    while trace is not None:
        code = trace.tb_frame.f_code
        code_positions += code.co_filename, code.co_name, trace.tb_lineno, trace.tb_lasti
        trace = trace.tb_next
    trace_key = tuple(code_positions[-32:])  # four values for each of eight frames
    text = _traceback_texts.get(trace_key)
    if text is None:
        if len(_traceback_texts) >= MAX_CACHED_TRACEBACKS:
            _traceback_texts.clear()
        lines = traceback.format_tb(first, limit=-8)
        text = _traceback_texts[trace_key] = "".join(
            ["Traceback (most recent call last):\n", *lines]
        )
    return text


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    return getattr(function, "__qualname__", None) or type(function).__name__


def shorten(value: Any) -> str:
    """Return a value as text for messages: at most `MAX_SHOWN_CHARACTERS` characters."""
    text = represent(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "…"
