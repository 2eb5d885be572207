"""What a command of the metadata carries, looked at piece by piece.

An entry of the log was written by some node, perhaps of another version, perhaps with a bug, and every node has to
apply it. So nothing in it is believed:

1. Every field is taken by one of the functions here, which gives a value of its type or refuses; values are plain.
2. A refusal is a `RefusedError`. It is raised before anything has changed.
3. Nothing that was not looked at is compared, copied or told: what is nested a thousand times deep does no harm, and
   what a text tells of it is short.
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
"""Lower case: on some disks A and a are the same."""
LARGEST: Final = 1 << 63
MOST_KEYS: Final = 200
LONGEST: Final = 2000


class RefusedError(RailgunError):
    """A command that changes nothing; `code` is one word for programs, `more` goes beside it."""

    def __init__(self, code: str, text: str, **more: Scalar | dict[str, Any]) -> None:
        super().__init__(text)
        self.code = code
        self.more = more

    def result(self) -> dict[str, Any]:
        """As whoever has proposed the command gets it."""
        return {"error": {"code": self.code, "text": str(self), **self.more}}


def bad(text: str) -> RefusedError:
    """The command is not what it should be."""
    return RefusedError("BAD_COMMAND", text)


def told(value: object) -> str:
    """A value in a text: short, whatever it is.

    >>> told("a" * 1000)[:10], told([[1]]), told(7), told(None)
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
    """Some characters that can be printed."""
    value = fields.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
        raise bad(f"{key} is a text of at most {most} characters, not {told(value)}")
    return value


def take_name(fields: Mapping[str, Any], key: str) -> str:
    """A name: letters, digits, `_`, `.` and `-`."""
    return check_name(fields.get(key), key)


def check_name(value: Any, what: str) -> str:
    """See that this is a name."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise bad(
            f"{told(value)} cannot be a name ({what}): letters, digits, '_', '.' and '-', at most 200, none of the "
            "last two at the beginning"
        )
    return value


def check_region(value: Any) -> str:
    """See that this is the name of a region."""
    if not isinstance(value, str) or not REGION.fullmatch(value):
        raise bad(
            f"{told(value)} cannot be a region: lower case letters, digits, '_', '.' and '-', at most 100, none of "
            "the last two at the beginning"
        )
    return value


def take_whole(fields: Mapping[str, Any], key: str, most: int = LARGEST) -> int:
    """A whole number from 0 on."""
    return check_whole(fields.get(key), key, most)


def check_whole(value: Any, what: str, most: int = LARGEST) -> int:
    """See that this is a whole number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise bad(f"{what} is a whole number from 0 to {most}, not {told(value)}")
    return value


def take_flag(fields: Mapping[str, Any], key: str) -> bool:
    """Yes or no; no if it is absent."""
    value = fields.get(key, False)
    if not isinstance(value, bool):
        raise bad(f"{key} is true or false, not {told(value)}")
    return value


def check_object(value: Any, what: str) -> dict[str, Any]:
    """See that this is an object; what is in it was not looked at."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise bad(f"{what} is an object with texts as its keys, not {told(value)}")
    return value


def check_list(value: Any, what: str) -> list[Any]:
    """See that this is a list; what is in it was not looked at."""
    if not isinstance(value, list):
        raise bad(f"{what} is a list, not {told(value)}")
    return value


def check_scalars(value: Any, what: str) -> dict[str, Scalar]:
    """A copy of a flat object: settings that somebody else understands."""
    fields = check_object(value, what)
    if len(fields) > MOST_KEYS:
        raise bad(f"{what} has {len(fields)} keys: {MOST_KEYS} at most")
    for key, one in fields.items():
        if len(key) > 100 or not is_scalar(one):
            raise bad(
                f"{what}: {told(key)} is {told(one)}, and must be a text, a number or nothing"
            )
    return dict(fields)


def is_scalar(value: object) -> bool:
    """Whether this is a value with nothing in it, and is equal to itself when it was written and read."""
    if isinstance(value, str):
        return len(value) <= LONGEST
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -LARGEST <= value <= LARGEST
    return value is None


def difference(differs: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how settings differ from those that were asked for; `differs`: what each `is`, and what was `asked`.

    >>> difference({"max_age": {"is": None, "asked": 200.0}})
    'max_age is none, but 200.0 was asked for'
    """
    return ", ".join(
        f"{key} is {told(one['is'])}, but {told(one['asked'])} was asked for"
        for key, one in differs.items()
    )
