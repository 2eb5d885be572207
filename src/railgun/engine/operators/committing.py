"""Commit what the writers of a sink have prepared for a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from railgun.engine.operators.calls import TokenCall
from railgun.engine.operators.functions import check_done
from railgun.flows.sink import Token, TwoPhaseSink


def commit_calls(
    step: str, sink: TwoPhaseSink[Any], tokens: Sequence[Token]
) -> Iterator[Callable[[], None]]:
    """Yield the calls that commit tokens: one for all if the sink commits them together, else one for each.

    An error that a call raises names the step, the sink and the tokens (`TokenError`).
    """
    if not sink.commits_together:
        for token in tokens:
            yield partial(_call, step, sink, "commit", sink.commit, token, [token])
    elif tokens:
        yield partial(_call, step, sink, "commit_all", sink.commit_all, tokens, tokens)


def _call(
    step: str,
    sink: TwoPhaseSink[Any],
    name: str,
    method: Callable[[Any], object],
    argument: Any,
    tokens: Sequence[Token],
) -> None:
    with TokenCall(step, sink, name, tokens):
        check_done(method(argument))
