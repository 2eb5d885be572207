"""Values that a program gives to a client, looked at before anything is sent.

What cannot be meant is a `BadValueError` (code `BAD_REQUEST`), which names the argument, what it has to be and what it
is. Nothing was sent then, and the client goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

from railgun.broker.protocol.groups import LONGEST_DELAY
from railgun.client.errors import StreamsError
from railgun.errors import shortened
from railgun.transport.records import LONGEST_ID

DAY_S: Final = 86_400.0
MAX_DELAY_S: Final = LONGEST_DELAY / 1e6
MAX_REQUEST_S: Final = DAY_S
MAX_PREFETCH: Final = 1 << 31
MAX_OFFSET: Final = 1 << 62


class BadValueError(StreamsError, ValueError):
    """A program gave a value that cannot be meant; nothing was sent."""

    def __init__(self, text: str) -> None:
        super().__init__("BAD_REQUEST", text)


def check_text(name: str, value: Any, *, empty: bool = True) -> str:
    """Return a text that can be sent.

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
    """An empty text that no caller gives."""

    __slots__ = ()


LEFT_OUT: Final = _LeftOut()
"""The default of an argument that may be left out, but not be given as an empty text."""


def check_optional(name: str, value: Any) -> str:
    """Return a text that is not empty; or an empty one if the argument was left out.

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
        raise BadValueError(f"{name} is no text that UTF-8 can say: {error.reason}") from error


def as_bytes(name: str, value: Any) -> bytes:
    """Return bytes, or a text as UTF-8.

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
    """Return a sequence of values: nothing unordered, and no single text or bytes, which would be taken apart."""
    apart = isinstance(value, str | bytes | bytearray | memoryview | Mapping | Set)
    if apart or not isinstance(value, Iterable):
        raise BadValueError(f"{name} is a list, not {shortened(value)}")
    return value if isinstance(value, Sequence) else list(value)


def check_id(value: Any) -> bytes:
    """Return the ID of a message as bytes."""
    found = as_bytes("an ID", value)
    if not found:
        raise BadValueError("an ID is empty: leave it out, or give the message one")
    if len(found) > LONGEST_ID:
        raise BadValueError(f"an ID has at most {LONGEST_ID} bytes, and this one {len(found)}")
    return found


def check_headers(value: Any) -> bytes:
    """Return headers as they are sent."""
    if not isinstance(value, Mapping):
        raise BadValueError(f"headers are names with values, not {shortened(value)}")
    for key, one in value.items():
        check_text("the name of a header", key)
        check_text(f"the header {shortened(key)}", one)
    return json.dumps(dict(value)).encode()


def check_seconds(name: str, value: Any, least: float = 0.0, most: float = math.inf) -> float:
    """Return a number of seconds.

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
    """Return how long a call may take (seconds); None: as long as the client says."""
    return None if value is None else check_seconds("timeout", value)


def check_whole(name: str, value: Any, least: int, most: int) -> int:
    """Return a whole number within limits."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadValueError(
            f"{name} is a whole number from {least} to {most}, not {shortened(value)}"
        )
    return value


def check_start(value: Any) -> Any:
    """Return where a subscription begins: 'start', 'end' or an offset."""
    if isinstance(value, str) and value in ("start", "end"):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_OFFSET:
        return value
    raise BadValueError(f"start is 'start', 'end' or an offset from 0 on, not {shortened(value)}")


def check_nack(delay: Any, reason: Any, block: Any) -> None:
    """Refuse a nack that cannot be meant."""
    check_flag("block", block)
    check_seconds("delay", delay, 0.0, MAX_DELAY_S)
    check_text("reason", reason)


def check_flag(name: str, value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise BadValueError(f"{name} is True or False, not {shortened(value)}")
    return value
