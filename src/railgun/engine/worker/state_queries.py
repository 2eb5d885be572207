"""Looking at the state of a worker while it works: one key, or how many there are.

A question comes from outside, perhaps from someone who types at random. So whatever happens here, in unpickling the
key or in methods of users' classes, becomes part of the answer, and the worker goes on. It answers between two batches:
what is told is the state after whole records.
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

LONGEST: Final = 1 << 20  # characters of a state for people
LARGEST: Final = 64 << 20  # bytes of a state for a program
SAMPLE: Final = 200  # characters of a sample of a key
_NONE: Final = object()


def look(runtime: Runtime | None, question: Look) -> Found:
    """The answer to a question; `ready` is False if there is nothing to look at yet."""
    if runtime is None:
        return Found(question.number, ready=False)
    try:
        return _look(runtime, question)
    except BaseException as error:  # a user's class may raise anything
        told = f"{type(error).__name__}: {error}"
        return Found(question.number, error=f"worker {runtime.worker} cannot tell: {told}")


def _look(runtime: Runtime, question: Look) -> Found:
    number = question.number
    operators = [op for op in runtime.keyed() if op.step == question.step]
    keys = sum(len(operator.store) for operator in operators)
    if question.key is None:
        some = islice((key for op in operators for key in op.states), question.samples)
        samples = tuple(shown(key, SAMPLE) for key in some)
        return Found(number, worker=runtime.worker, keys=keys, samples=samples)
    key = pickle.loads(question.key)
    for operator in operators:
        operator.fetch_missing([key])
        state = operator.states.get(key, _NONE)
        if state is not _NONE:
            return _found(runtime, question, operator, key, state)
    return Found(number, worker=runtime.worker, keys=keys)


def _found(runtime: Runtime, question: Look, operator: Keyed, key: Any, state: Any) -> Found:
    [state] = operator.saved([key], [state])
    text, is_json, pickled = "", False, b""
    if question.whole:
        pickled = dumps(state)
        if len(pickled) > LARGEST:
            raise ValueError(f"the state has {len(pickled)} bytes, and at most {LARGEST} are sent")
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


def shown(value: Any, longest: int = LONGEST) -> tuple[str, bool]:
    """A value for people, as JSON if it can be written so (True), or else as Python shows it.

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
