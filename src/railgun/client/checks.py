"""Validate the arguments of a client's calls before anything is sent.

An invalid value raises `BadValueError` (code `BAD_REQUEST`), which names the argument, what it must be and what it is.
Nothing was sent then, and the client remains usable.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

from railgun.broker.protocol.groups import LONGEST_DELAY
from railgun.client.errors import StreamsError
from railgun.errors import shortened
from railgun.transport.records import MAX_ID_BYTES

DAY_S: Final = 86_400.0
MAX_DELAY_S: Final = LONGEST_DELAY / 1e6
MAX_REQUEST_S: Final = DAY_S
MAX_PREFETCH: Final = 1 << 31
MAX_OFFSET: Final = 1 << 62


class BadValueError(StreamsError, ValueError):
    """The value of an argument is invalid; nothing was sent."""

    def __init__(self, text: str) -> None:
        super().__init__("BAD_REQUEST", text)


def check_text(name: str, value: Any, *, empty: bool = True) -> str:
    """Return `value` if it is a text that UTF-8 can encode; an empty one only if `empty`.

    >>> check_text("group", 5)
    Traceback (most recent call last):
    railgun.client.checks.BadValueError: group is text, not 5 (BAD_REQUEST)
    """
    if not isinstance(value, str):
        raise BadValueError(f"{name} is text, not {shortened(value)}")
    if not value and not empty:
        raise BadValueError(f"{name} is empty")
    if not value.isascii():
        _encoded(name, value)
    return value


class _LeftOut(str):
    """An empty text that differs from any a caller can pass."""

    __slots__ = ()


LEFT_OUT: Final = _LeftOut()
"""The default of an argument that may be left out, but not be passed as an empty text."""


def check_optional(name: str, value: Any) -> str:
    """Return `value`, a text that must not be empty; return "" if the argument was left out.

    >>> check_optional("group", LEFT_OUT), check_optional("group", "billing")
    ('', 'billing')
    >>> check_optional("group", "")
    Traceback (most recent call last):
    railgun.client.checks.BadValueError: group is empty: leave it out, or name one (BAD_REQUEST)
    """
    if value is LEFT_OUT:
        return ""
    if isinstance(value, str) and not value:
        raise BadValueError(f"{name} is empty: leave it out, or name one")
    return check_text(name, value)


def _encoded(name: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise BadValueError(f"{name} cannot be encoded as UTF-8: {error.reason}") from error


def as_bytes(name: str, value: Any) -> bytes:
    """Return `value` as bytes; a text is encoded as UTF-8.

    >>> as_bytes("payload", "tea"), as_bytes("payload", bytearray(b"tea"))
    (b'tea', b'tea')
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _encoded(name, value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise BadValueError(f"{name} is bytes or text, not {shortened(value)}")


def check_list(name: str, value: Any) -> Sequence[Any]:
    """Return `value` as a sequence.

    Refuse unordered collections, and a single text or bytes, which would be split into characters.
    """
    refused = isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set)
    if refused or not isinstance(value, Iterable):
        raise BadValueError(f"{name} is a list, not {shortened(value)}")
    return value if isinstance(value, Sequence) else list(value)


def check_id(value: Any) -> bytes:
    """Return the ID of a message as bytes, neither empty nor too long."""
    encoded = as_bytes("an ID", value)
    if not encoded:
        raise BadValueError("an ID is empty: leave it out, or give the message one")
    if len(encoded) > MAX_ID_BYTES:
        raise BadValueError(f"an ID has at most {MAX_ID_BYTES} bytes, and this one {len(encoded)}")
    return encoded


def check_headers(value: Any) -> bytes:
    """Return headers (names with values, all text) encoded as JSON, as they are sent."""
    if not isinstance(value, Mapping):
        raise BadValueError(f"headers are names with values, not {shortened(value)}")
    for key, text in value.items():
        check_text("the name of a header", key)
        check_text(f"the header {shortened(key)}", text)
    return json.dumps(dict(value)).encode()


def check_seconds(name: str, value: Any, least: float = 0.0, most: float = math.inf) -> float:
    """Return `value`, a number of seconds from `least` to `most`, as a float.

    >>> check_seconds("timeout", -1)
    Traceback (most recent call last):
    railgun.client.checks.BadValueError: timeout is at least 0 seconds, not -1 (BAD_REQUEST)
    >>> check_seconds("delay", 1e9, 0.0, MAX_DELAY_S)
    Traceback (most recent call last):
    railgun.client.checks.BadValueError: delay is 0 to 31622400 seconds (366 days), not 1000000000.0 (BAD_REQUEST)
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise BadValueError(f"{name} is {_limits(least, most)}, not {shortened(value)}")
    return float(value)


def _limits(least_s: float, most_s: float) -> str:
    if most_s == math.inf:
        return f"at least {least_s:.10g} seconds"
    days = f" ({most_s // DAY_S:.0f} days)" if most_s >= 2 * DAY_S else ""
    return f"{least_s:.10g} to {most_s:.10g} seconds{days}"


def check_timeout(value: Any) -> float | None:
    """Return how long a call may take (seconds); None stands for the client's own timeout."""
    return None if value is None else check_seconds("timeout", value)


def check_whole(name: str, value: Any, least: int, most: int) -> int:
    """Return `value` if it is a whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadValueError(
            f"{name} is a whole number from {least} to {most}, not {shortened(value)}"
        )
    return value


def check_start(value: Any) -> Any:
    """Return `value` if a subscription can begin there: 'start', 'end' or an offset."""
    if isinstance(value, str) and value in ("start", "end"):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_OFFSET:
        return value
    raise BadValueError(f"start is 'start', 'end' or an offset from 0 on, not {shortened(value)}")


def check_nack(delay: Any, reason: Any, block: Any) -> None:
    """Raise `BadValueError` if an argument of a nack is invalid."""
    check_flag("block", block)
    check_seconds("delay", delay, 0.0, MAX_DELAY_S)
    check_text("reason", reason)


def check_flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise BadValueError(f"{name} is True or False, not {shortened(value)}")
    return value
