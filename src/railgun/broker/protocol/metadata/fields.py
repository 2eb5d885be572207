"""Validation of the fields of metadata commands.

An entry of the log was written by some node, perhaps of another version, perhaps with a bug, and every node has to
apply it. So nothing in it is trusted:

1. Every field is read by one of the functions here, which returns a value of its type or refuses; values are plain.
2. A refusal is a `RefusedError`. It is raised before anything has changed.
3. No value is compared, copied or shown before it was checked: a value nested a thousand times deep does no harm, and
   error messages show little of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from railgun.errors import RailgunError, shortened

Scalar: TypeAlias = str | int | float | bool | None
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
REGION: Final = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,99}")
"""Lower case only: some file systems do not distinguish A from a."""
MAX_INTEGER: Final = 1 << 63
MAX_KEYS: Final = 200
MAX_TEXT_CHARS: Final = 2000


class RefusedError(RailgunError):
    """A command that is refused and changes nothing; `code` is one word for programs, `more` further fields."""

    def __init__(self, code: str, text: str, **more: Scalar | dict[str, Any]) -> None:
        super().__init__(text)
        self.code = code
        self.more = more

    def result(self) -> dict[str, Any]:
        """Return the result of the command, as sent to its proposer."""
        return {"error": {"code": self.code, "text": str(self), **self.more}}


def invalid(text: str) -> RefusedError:
    """Return the error for an invalid command."""
    return RefusedError("BAD_COMMAND", text)


def quoted(value: object) -> str:
    """Return a value for an error message: short, whatever the value is.

    >>> quoted("a" * 1000)[:10], quoted([[1]]), quoted(7), quoted(None)
    ("'aaaaaaaaa", 'a list', '7', 'none')
    """
    if isinstance(value, str):
        return shortened(value)
    if value is None:
        return "none"
    if isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int) and value.bit_length() <= 64:
        return repr(value)
    return f"a {type(value).__name__}"


def take_text(fields: Mapping[str, Any], key: str, most: int = 200) -> str:
    """Return a field that is a printable text of 1 to `most` characters."""
    value = fields.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
        raise invalid(f"{key} is a text of at most {most} characters, not {quoted(value)}")
    return value


def take_name(fields: Mapping[str, Any], key: str) -> str:
    """Return a field that is a name: letters, digits, `_`, `.` and `-`."""
    return check_name(fields.get(key), key)


def check_name(value: Any, what: str) -> str:
    """Return `value` if it is a name; `what` describes it in the error."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise invalid(
            f"{quoted(value)} cannot be a name ({what}): letters, digits, '_', '.' and '-', at most 200, none of the "
            "last two at the beginning"
        )
    return value


def check_region(value: Any) -> str:
    """Return `value` if it is the name of a region."""
    if not isinstance(value, str) or not REGION.fullmatch(value):
        raise invalid(
            f"{quoted(value)} cannot be a region: lower case letters, digits, '_', '.' and '-', at most 100, none of "
            "the last two at the beginning"
        )
    return value


def take_whole(fields: Mapping[str, Any], key: str, most: int = MAX_INTEGER) -> int:
    """Return a field that is an integer from 0 to `most`."""
    return check_whole(fields.get(key), key, most)


def check_whole(value: Any, what: str, most: int = MAX_INTEGER) -> int:
    """Return `value` if it is an integer from 0 to `most`; `what` describes it in the error."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise invalid(f"{what} is a whole number from 0 to {most}, not {quoted(value)}")
    return value


def take_flag(fields: Mapping[str, Any], key: str) -> bool:
    """Return a field that is a boolean; False if it is absent."""
    value = fields.get(key, False)
    if not isinstance(value, bool):
        raise invalid(f"{key} is true or false, not {quoted(value)}")
    return value


def check_object(value: Any, what: str) -> dict[str, Any]:
    """Return `value` if it is an object; its values are not checked."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise invalid(f"{what} is an object with texts as its keys, not {quoted(value)}")
    return value


def check_list(value: Any, what: str) -> list[Any]:
    """Return `value` if it is a list; its items are not checked."""
    if not isinstance(value, list):
        raise invalid(f"{what} is a list, not {quoted(value)}")
    return value


def check_scalars(value: Any, what: str) -> dict[str, Scalar]:
    """Return a copy of a flat object, such as settings whose meaning is checked elsewhere."""
    fields = check_object(value, what)
    if len(fields) > MAX_KEYS:
        raise invalid(f"{what} has {len(fields)} keys: {MAX_KEYS} at most")
    for key, item in fields.items():
        if len(key) > 100 or not is_scalar(item):
            raise invalid(
                f"{what}: {quoted(key)} is {quoted(item)}, and must be a text, a number or nothing"
            )
    return dict(fields)


def is_scalar(value: object) -> bool:
    """Return whether a value is plain and short, and equals itself after being written and read."""
    if isinstance(value, str):
        return len(value) <= MAX_TEXT_CHARS
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -MAX_INTEGER <= value <= MAX_INTEGER
    return value is None


def difference(differs: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe how settings differ from those requested: for each, what it `is`, and what was `asked`.

    >>> difference({"max_age": {"is": None, "asked": 200.0}})
    'max_age is none, but 200.0 was asked for'
    """
    return ", ".join(
        f"{key} is {quoted(values['is'])}, but {quoted(values['asked'])} was asked for"
        for key, values in differs.items()
    )
