"""Check that the output of a flow is its input, stream by stream: nothing lost, nothing twice, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def check_streams(
    found: Iterable[tuple[str, Any]], sent: Mapping[str, Sequence[Any]], *, whole: bool
) -> str:
    """Return how the output of a flow differs from its input, or an empty text.

    `found` has the output as `(stream, message)` in order. The messages of each stream must be the first ones that were
    sent, or, `whole`, all of them.

    >>> check_streams([("a", 1), ("b", 7), ("a", 2)], {"a": [1, 2, 3], "b": [7]}, whole=False)
    ''
    >>> check_streams([("a", 1), ("a", 2)], {"a": [1, 2, 3]}, whole=True)
    "'a' ends after 2 of 3 messages"
    >>> check_streams([("a", 1), ("a", 1), ("a", 2)], {"a": [1, 2, 3]}, whole=False)
    "'a' has at place 1 not 2, but 1, which was there before: it came twice"
    """
    streams: dict[str, list[Any]] = {}
    for name, message in found:
        streams.setdefault(name, []).append(message)
    for name, messages in sorted(streams.items()):
        if name not in sent:
            return f"{name!r} was never sent"
        wanted = sent[name]
        for place, message in enumerate(messages):
            if place >= len(wanted):
                return f"{name!r} goes on after its end, with {message!r:.80}"
            if message != wanted[place]:
                return f"{name!r} has at place {place} not {wanted[place]!r:.80}, but {_fault(messages, wanted, place)}"
    if whole:
        for name, wanted in sorted(sent.items()):
            has = len(streams.get(name, []))
            if has < len(wanted):
                return f"{name!r} ends after {has} of {len(wanted)} messages"
    return ""


def _fault(messages: Sequence[Any], wanted: Sequence[Any], place: int) -> str:
    message = messages[place]
    if message in messages[:place]:
        return f"{message!r:.80}, which was there before: it came twice"
    if message not in wanted:
        return f"{message!r:.80}, which was never sent"
    if wanted[place] in messages[place:]:
        return f"{message!r:.80}: it is out of order"
    return f"{message!r:.80}: one is lost"
