"""Which values JSON gives back exactly as they were, and those values as JSON.

Exactly: dicts with text as keys, lists, text, whole numbers, finite floats, True, False and None, of these very types
(a named tuple, a defaultdict, an enum or a number of numpy would come back as something else), with no list or dict in
two places at once (it would come back as two), and not nested so deep that a reader with less stack might fail. Text
must be Unicode: two halves of a surrogate pair would come back as one character.

Columns are looked at as a whole: what all values have in common is told without a loop, and they are encoded and
decoded in one go.
"""

from __future__ import annotations

import json
import math
from itertools import chain
from operator import itemgetter
from typing import Any, Final

_ATOMS: Final = frozenset((str, int, bool, type(None)))
_SCALARS: Final = _ATOMS | {float}
_PLAIN: Final = _SCALARS | {list, dict}
_DEEPEST: Final = 50
_MARK: Final = "\x7f"  # between values in one text of JSON
_REFUSED: Final = (TypeError, ValueError, RecursionError, OverflowError)

# NaN is no JSON, and text that is no Unicode must not hide in escapes.
_json: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False
).encode


def as_json(values: list[Any]) -> list[str | None]:
    """Each value as JSON; None for those that JSON would change.

    >>> as_json([1, [2.5, None], (3,), float("nan"), {"a": {"b": True}}, {4: 5}])
    ['1', '[2.5,null]', None, None, '{"a":{"b":true}}', None]
    """
    kinds = set(map(type, values))
    if values and _are_odd(values, kinds):
        return [None] * len(values)
    if _are_flat(values, kinds):
        return _encoded(values)
    plain = [at for at, value in enumerate(values) if _is_plain(value)]
    if len(plain) == len(values):
        return _encoded(values)
    texts: list[str | None] = [None] * len(values)
    for at, text in zip(plain, _encoded([values[at] for at in plain]), strict=True):
        texts[at] = text
    return texts


def from_json(texts: list[str]) -> list[Any]:
    """The values again; a ValueError if a text is no JSON."""
    try:
        values = json.loads(f"[{','.join(texts)}]")
        if len(values) == len(texts):
            return list(values)
    except ValueError:
        pass
    return [json.loads(text, parse_int=_whole) for text in texts]


def _are_flat(states: list[Any], kinds: set[type]) -> bool:
    """Whether all states are scalars, or all are lists or all dicts of them: told without a loop over rows."""
    if kinds <= _SCALARS:
        return True
    if kinds == {list}:
        return set(map(type, chain.from_iterable(states))) <= _SCALARS
    if kinds == {dict}:
        values = map(type, chain.from_iterable(map(dict.values, states)))
        return set(map(type, chain.from_iterable(states))) <= {str} and set(values) <= _SCALARS
    return False


def _are_odd(states: list[Any], kinds: set[type]) -> bool:
    """Whether it is plain to see that no state is JSON: by the types, or by what all have where the first has it."""
    if kinds.isdisjoint(_PLAIN):
        return True
    if kinds != {list} and kinds != {dict}:
        return False
    items = enumerate(states[0]) if kinds == {list} else states[0].items()
    at = next((at for at, item in items if type(item) not in _PLAIN), None)
    try:
        return at is not None and set(map(type, map(itemgetter(at), states))).isdisjoint(_PLAIN)
    except (IndexError, KeyError):
        return False


def _is_plain(state: Any) -> bool:
    """Whether JSON gives this state back as it is."""
    kind = type(state)
    if kind is not list and kind is not dict:
        return kind in _SCALARS
    return _are_plain(state, kind, set(), _DEEPEST)


def _are_plain(state: Any, kind: type, seen: set[int], depth: int) -> bool:
    if not depth:
        return False
    if kind is dict:
        for key in state:
            if type(key) is not str:
                return False
        items = state.values()
    else:
        items = state
    seen.add(id(state))
    for item in items:
        kind = type(item)
        if kind in _ATOMS:
            continue
        if kind is list or kind is dict:
            if id(item) in seen or not _are_plain(item, kind, seen, depth - 1):
                return False
        elif kind is not float or not math.isfinite(item):
            return False
    return True


def _encoded(states: list[Any]) -> list[str | None]:
    """Each state as JSON; None for those that JSON would change: NaN, text that is no Unicode, numbers too long."""
    if not states:
        return []
    woven: list[Any] = [_MARK] * (2 * len(states) - 1)
    woven[::2] = states
    try:
        text = _json(woven)
        texts: list[str | None] = text[1:-1].split(f',"{_MARK}",')  # type: ignore[assignment]
        # The mark may be in somebody's state.
        if text.count(_MARK) == len(states) - 1 == len(texts) - 1 and is_unicode(text):
            return texts
    except _REFUSED:
        pass
    return list(map(one_as_json, states))


def one_as_json(state: Any) -> str | None:
    """JSON for people: whatever can be written as such, even if it reads as something else."""
    try:
        text = _json(state)
    except _REFUSED:
        return None
    return text if is_unicode(text) else None


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whole(digits: str) -> int:
    """A number of any length; Python itself reads some thousand digits, or as many as it is told to."""
    try:
        return int(digits)
    except ValueError:
        half = len(digits) // 2
        high, low = _whole(digits[:half]), _whole(digits[half:])
        shift: int = 10 ** (len(digits) - half)
        return high * shift + (-low if digits.startswith("-") else low)
