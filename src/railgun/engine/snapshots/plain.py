"""Encode values as JSON where JSON returns them exactly as they were.

These are: dicts with text as keys, lists, text, whole numbers, finite floats, True, False and None, of exactly these
types (a named tuple, a defaultdict, an enum or a number of numpy would be read as something else). No list or dict may
occur twice (it would be read as two), and values must not be nested so deeply that a reader with less stack might fail.
Text must be valid Unicode: two halves of a surrogate pair would be read as one character.

Columns are handled as a whole: properties that all values share are tested without a loop, and all values are encoded
or decoded at once.
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
_MAX_DEPTH: Final = 50
_SEPARATOR: Final = "\x7f"  # between values in one text of JSON
_ENCODING_ERRORS: Final = (TypeError, ValueError, RecursionError, OverflowError)

# NaN is not JSON, and escapes must not hide invalid Unicode.
_json: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False
).encode


def as_json(values: list[Any]) -> list[str | None]:
    """Return each value as JSON, or None for a value that JSON would change.

    >>> as_json([1, [2.5, None], (3,), float("nan"), {"a": {"b": True}}, {4: 5}])
    ['1', '[2.5,null]', None, None, '{"a":{"b":true}}', None]
    """
    kinds = set(map(type, values))
    if values and _none_is_json(values, kinds):
        return [None] * len(values)
    if _all_flat(values, kinds):
        return _encode(values)
    plain = [at for at, value in enumerate(values) if _is_exact(value)]
    if len(plain) == len(values):
        return _encode(values)
    texts: list[str | None] = [None] * len(values)
    for at, text in zip(plain, _encode([values[at] for at in plain]), strict=True):
        texts[at] = text
    return texts


def from_json(texts: list[str]) -> list[Any]:
    """Return the values of JSON texts. Raises `ValueError` if a text is not JSON."""
    try:
        values = json.loads(f"[{','.join(texts)}]")
        if len(values) == len(texts):
            return list(values)
    except ValueError:
        pass
    return [json.loads(text, parse_int=_parse_int) for text in texts]


def _all_flat(states: list[Any], kinds: set[type]) -> bool:
    """Return whether all states are scalars, all are lists of scalars, or all are dicts of scalars, without a loop over
    rows.
    """
    if kinds <= _SCALARS:
        return True
    if kinds == {list}:
        return set(map(type, chain.from_iterable(states))) <= _SCALARS
    if kinds == {dict}:
        values = map(type, chain.from_iterable(map(dict.values, states)))
        return set(map(type, chain.from_iterable(states))) <= {str} and set(values) <= _SCALARS
    return False


def _none_is_json(states: list[Any], kinds: set[type]) -> bool:
    """Return whether it is obvious that no state is JSON.

    This looks at the types, and at one item that is no JSON in the first state: it compares the same item of all
    states.
    """
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


def _is_exact(state: Any) -> bool:
    """Return whether JSON returns this state exactly as it is."""
    kind = type(state)
    if kind is not list and kind is not dict:
        return kind in _SCALARS
    return _is_exact_container(state, kind, set(), _MAX_DEPTH)


def _is_exact_container(state: Any, kind: type, seen: set[int], depth: int) -> bool:
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
            if id(item) in seen or not _is_exact_container(item, kind, seen, depth - 1):
                return False
        elif kind is not float or not math.isfinite(item):
            return False
    return True


def _encode(states: list[Any]) -> list[str | None]:
    """Return each state as JSON, or None for one that JSON would change: NaN, invalid Unicode, too long a number."""
    if not states:
        return []
    interleaved: list[Any] = [_SEPARATOR] * (2 * len(states) - 1)
    interleaved[::2] = states
    try:
        text = _json(interleaved)
        texts: list[str | None] = text[1:-1].split(f',"{_SEPARATOR}",')  # type: ignore[assignment]
        # A state may contain the separator.
        if text.count(_SEPARATOR) == len(states) - 1 == len(texts) - 1 and is_unicode(text):
            return texts
    except _ENCODING_ERRORS:
        pass
    return list(map(display_json, states))


def display_json(state: Any) -> str | None:
    """Return a value as JSON for display, even if it would be read as something else; None if it cannot be encoded."""
    try:
        text = _json(state)
    except _ENCODING_ERRORS:
        return None
    return text if is_unicode(text) else None


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_int(digits: str) -> int:
    """Return a whole number of any length. Python's `int` refuses more than some thousand digits."""
    try:
        return int(digits)
    except ValueError:
        half = len(digits) // 2
        high, low = _parse_int(digits[:half]), _parse_int(digits[half:])
        shift: int = 10 ** (len(digits) - half)
        return high * shift + (-low if digits.startswith("-") else low)
