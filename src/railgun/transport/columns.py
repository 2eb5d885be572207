r"""Encode lists of Python values (columns) as bytes, and decode them.

Keys are mostly text, and a list of text takes two C calls to write and two to read. Anything else is pickled: special
columns for numbers and tuples were slower than pickle, since they must check that every value has the exact type. A
reader must trust the writer: links are authenticated before a column is read.

A column is one tag byte, then::

    s  text: "\0".join(values) as UTF-8    (values without NUL only)
    p  pickle, protocol 5
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from operator import countOf
from typing import Any

from railgun.errors import RailgunError, pass_interrupt, represent
from railgun.transport.pickling import dumps, may_unpickle_later


class EncodingError(RailgunError):
    """A value cannot be encoded: pickle refuses it."""

    row: int | None = None
    """The index of the value in its column, if it is known."""


class DecodingError(RailgunError):
    """Received bytes are malformed."""


class CannotUnpickleError(DecodingError):
    """Unpickling a value raises, and would raise again."""


def encode_column(values: list[Any]) -> bytes:
    """Return the values as bytes; raise `EncodingError` if one of them cannot be pickled.

    >>> encode_column(["ada", "grace"])
    b'sada\\x00grace'
    >>> decode_column(encode_column([("ada", 1), ("grace", 2)]), 2)
    [('ada', 1), ('grace', 2)]
    """
    if values and type(values[0]) is str and countOf(map(type, values), str) == len(values):
        joined = "\0".join(values)
        if joined.count("\0") == len(values) - 1:
            return b"s" + joined.encode("utf-8", "surrogatepass")
    try:
        return b"p" + dumps(values)
    except BaseException as error:
        pass_interrupt(error)
        raise _unpicklable_value(values, error) from error


def decode_column(data: bytes | memoryview, rows: int) -> list[Any]:
    """Return the values of an encoded column of `rows` values; raise `DecodingError` if it is malformed."""
    tag, body = bytes(data[:1]), data[1:]
    try:
        if tag == b"s":
            values = str(body, "utf-8", "surrogatepass").split("\0")
        elif tag == b"p":
            values = pickle.loads(body)
        else:
            raise DecodingError(f"a column cannot begin with {tag!r}")
    except DecodingError:
        raise
    except BaseException as error:
        pass_interrupt(error)
        kind = DecodingError if may_unpickle_later(error) else CannotUnpickleError
        raise kind(f"a column cannot be read: {represent(error)}") from error
    if not isinstance(values, list) or len(values) != rows:
        raise DecodingError(f"a column has not the {rows} values that were expected")
    return values


def _unpicklable_value(values: Sequence[Any], error: BaseException) -> EncodingError:
    """Return an error that names the value that cannot be pickled."""
    for row, value in enumerate(values):
        try:
            dumps(value)
        except BaseException as refused:
            pass_interrupt(refused)
            why = represent(refused)
            named = EncodingError(
                f"a value of type {type(value).__name__} cannot be sent between workers: {why}"
            )
            named.row = row
            return named
    return EncodingError(f"values cannot be sent between workers: {represent(error)}")
