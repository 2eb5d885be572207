"""Check that the functions of steps return their result when they are called.

A coroutine function returns a coroutine, which is no result, and true to every filter. So does a generator function,
whose body has not begun when it returns. Such functions are refused when the flow is built (`reason_to_refuse`).
Another function may still return such an object: this is noticed when it runs, at the first and the last result of each
batch (`check_result`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Final

import numpy as np

from railgun.engine.operators.describe import name_of, shorten
from railgun.engine.protocol.frontier import LAST, MIN
from railgun.flows.errors import NotAPairError, NotAResultError, NotAStateError, PartError

ASYNCHRONOUS: Final = frozenset({CoroutineType, AsyncGeneratorType})
UNFINISHED: Final = ASYNCHRONOUS | {GeneratorType}
_HOW_TO_RUN: Final = "call asyncio.run(...) in a plain function, which waits for the result"


def reason_to_refuse(function: Any, *, generates: bool = False) -> str:
    """Return why a function cannot be a step's function, or ""; with `generates` it may be a generator function.

    >>> async def ask(item): ...
    >>> reason_to_refuse(ask)
    'ask is asynchronous, and would give coroutines instead of results: call asyncio.run(...) in a plain function, ...
    >>> def words(line): yield from line.split()
    >>> reason_to_refuse(words)
    'words is a generator function, and would give generators instead of results: return the result, or use ...
    >>> reason_to_refuse(words, generates=True), reason_to_refuse(str)
    ('', '')
    """
    plain = function
    while isinstance(plain, partial):
        plain = plain.func
    called = plain if inspect.isroutine(plain) else type(plain).__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        return f"{name_of(plain)} is asynchronous, and would give coroutines instead of results: {_HOW_TO_RUN}"
    if not generates and inspect.isgeneratorfunction(called):
        return (
            f"{name_of(plain)} is a generator function, and would give generators instead of results: return the "
            "result, or use flat_map for several of them"
        )
    return ""


def check_methods(thing: object, plain: Sequence[str], generating: Sequence[str] = ()) -> str:
    """Return which of the methods of `thing` is asynchronous or a generator function, with the reason, or "".

    `generating` names the methods that may be generator functions.
    """
    for names, generates in ((plain, False), (generating, True)):
        for name in names:
            method = getattr(type(thing), name, None)
            if method is not None and (why := reason_to_refuse(method, generates=generates)):
                return f"{type(thing).__name__}.{name} {why.partition(' ')[2]}"
    return ""


def check_done(result: Any) -> None:
    """Raise `TypeError` if a method called for its effect returned a generator or coroutine, which has not run.

    >>> check_done(None)
    >>> check_done(number for number in range(3))
    Traceback (most recent call last):
    TypeError: it returned a generator instead of doing its work: do the work, and return when it is done
    """
    if type(result) not in UNFINISHED:
        return
    if type(result) is GeneratorType:
        raise TypeError(
            "it returned a generator instead of doing its work: do the work, and return when it is done"
        )
    if type(result) is CoroutineType:
        result.close()  # Python would warn that nobody has awaited it
    raise TypeError(f"it returned a coroutine instead of doing its work: {_HOW_TO_RUN}")


def check_time(what: str, time: Any) -> int:
    """Return a time (µs) from a user's function as an `int`; raise `TypeError` or `ValueError` if it is not a time.

    >>> check_time("a time", 2**70)
    Traceback (most recent call last):
    ValueError: a time is between -9223372036854775807 and 9223372036854775805 µs since 1970, and ... out of that range
    """
    if not isinstance(time, int | np.integer):
        raise TypeError(f"{what} is a whole number of microseconds, not {shorten(time)}")
    if not MIN < time < LAST:
        raise ValueError(
            f"{what} is between {MIN + 1} and {LAST - 1} µs since 1970, and {shorten(time)} is out of that range"
        )
    return int(time)


def check_pair(step: str, returned: Any) -> tuple[Any, Any]:
    """Return the state and result that a function of `stateful_map` returned; raise `NotAPairError` if it is no pair.

    >>> check_pair("total", 5)
    Traceback (most recent call last):
    railgun.flows.errors.NotAPairError: the function of step 'total' must return a pair, (state, result), ...
    """
    try:
        state, result = returned
    except (TypeError, ValueError) as error:
        trace = error.__traceback__
        if trace is not None and trace.tb_next is not None:  # raised inside a user's iterator
            raise
        kind = type(returned).__name__
        raise NotAPairError(
            f"the function of step {step!r} must return a pair, (state, result), and returned {shorten(returned)}, "
            f"of type {kind}"
        ) from None
    return state, result


def check_part(part: Any) -> None:
    """Raise `PartError` if a part of a source is not hashable."""
    try:
        hash(part)
    except TypeError as error:
        trace = error.__traceback__
        if trace is not None and trace.tb_next is not None:  # raised inside a user's __hash__
            raise
        raise PartError(
            f"the part {shorten(part)} is of type {type(part).__name__}, and not hashable ({error}): parts are found "
            "again by their hash, so make them of numbers, text, or tuples of these"
        ) from None


def check_result(
    step: str, function: Callable[..., Any], result: Any, refused: frozenset[type]
) -> None:
    """Raise `NotAResultError` if a result is of a refused type."""
    if type(result) in refused:
        kind_text = _kind_of_unfinished(result)
        instead = "return the result itself" if kind_text == "generator" else _HOW_TO_RUN
        raise NotAResultError(step, name_of(function), "", kind_text, instead)


def check_state(
    step: str, function: Callable[..., Any], key: Any, state: Any, refused: frozenset[type]
) -> None:
    """Raise `NotAStateError` if the state of a key that a function returned is of a refused type."""
    if type(state) in refused:
        kind_text = _kind_of_unfinished(state)
        instead = "return what it gives, as a list" if kind_text == "generator" else _HOW_TO_RUN
        raise NotAStateError(step, name_of(function), shorten(key), kind_text, instead)


def _kind_of_unfinished(result: Any) -> str:
    """Return the kind of an object that is no result, and close it if it is a coroutine."""
    if type(result) is CoroutineType:
        result.close()  # Python would warn that nobody has awaited it
    if type(result) is AsyncGeneratorType:
        return "asynchronous generator"
    return "generator" if type(result) is GeneratorType else "coroutine"
