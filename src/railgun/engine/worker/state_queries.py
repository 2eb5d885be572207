"""Answer queries for a worker's state while it works: one key, or the number of keys.

A query comes from outside, perhaps from someone who types at random. So any error here, in unpickling the key or in
methods of users' classes, becomes part of the answer, and the worker goes on. It answers between two batches, so the
answer shows the state between whole records.
"""

from __future__ import annotations

import pickle
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from railgun.engine.snapshots.plain import display_json
from railgun.engine.worker.control_messages import Found, Look
from railgun.transport.pickling import dumps

if TYPE_CHECKING:
    from railgun.engine.operators.keyed import Keyed
    from railgun.engine.worker.runtime import Runtime

MAX_TEXT_CHARACTERS: Final = 1 << 20  # of a state for people
MAX_STATE_BYTES: Final = 64 << 20  # of a state for a program
MAX_KEY_CHARACTERS: Final = 200  # of a sample key
_ABSENT: Final = object()


def look(runtime: Runtime | None, question: Look) -> Found:
    """Return the answer to a query; its `ready` is False if there is no running flow yet."""
    if runtime is None:
        return Found(question.number, ready=False)
    try:
        return _look(runtime, question)
    except BaseException as error:  # users' classes may raise anything
        error_text = f"{type(error).__name__}: {error}"
        return Found(question.number, error=f"worker {runtime.worker} cannot answer: {error_text}")


def _look(runtime: Runtime, question: Look) -> Found:
    number = question.number
    operators = [op for op in runtime.keyed() if op.step == question.step]
    keys = sum(len(operator.store) for operator in operators)
    if question.key is None:
        sample_keys = islice((key for op in operators for key in op.states), question.samples)
        samples = tuple(shown(key, MAX_KEY_CHARACTERS) for key in sample_keys)
        return Found(number, worker=runtime.worker, keys=keys, samples=samples)
    key = pickle.loads(question.key)
    for operator in operators:
        operator.fetch_missing([key])
        state = operator.states.get(key, _ABSENT)
        if state is not _ABSENT:
            return _found(runtime, question, operator, key, state)
    return Found(number, worker=runtime.worker, keys=keys)


def _found(runtime: Runtime, question: Look, operator: Keyed, key: Any, state: Any) -> Found:
    [state] = operator.saved([key], [state])
    text, is_json, pickled = "", False, b""
    if question.whole:
        pickled = dumps(state)
        if len(pickled) > MAX_STATE_BYTES:
            raise ValueError(
                f"the state has {len(pickled)} bytes, and at most {MAX_STATE_BYTES} are sent"
            )
    else:
        text, is_json = shown(state)
    return Found(
        question.number,
        worker=runtime.worker,
        found=True,
        text=text,
        is_json=is_json,
        pickled=pickled,
        timers=tuple(operator.timers.of([key])[0]),
        ended=key in operator.ended,
    )


def shown(value: Any, longest: int = MAX_TEXT_CHARACTERS) -> tuple[str, bool]:
    """Return a value as text for people and whether the text is JSON; otherwise it is as Python shows it.

    >>> shown({"n": [1, (2, 3)]}), shown({1, 2})
    (('{"n":[1,[2,3]]}', True), ('{1, 2}', False))
    """
    text = display_json(value)
    if text is not None and len(text) <= longest:
        return text, True
    text = repr(value).encode("utf-8", "backslashreplace").decode()
    if len(text) > longest:
        text = f"{text[:longest]}… ({len(text)} characters)"
    return text, False
