r"""Columns: lists of Python values as bytes.

Keys are mostly text, and a list of text is two C calls to write and two to read. Anything else is pickled: columns of
our own for numbers and tuples lost to pickle once they had checked that every value is of the exact type. A reader
must trust the writer: links are authenticated before a column is read.

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
    """A value cannot travel: pickle refuses it."""

    row: int | None = None
    """Which value of its column it is, if that is known."""


class DecodingError(RailgunError):
    """Bytes are not what they should be."""


class CannotUnpickleError(DecodingError):
    """A value was pickled, and unpickling it raises: it would do so again."""


def encode_column(values: list[Any]) -> bytes:
    """The values as bytes.

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
        raise _blame(values, error) from error


def decode_column(data: bytes | memoryview, rows: int) -> list[Any]:
    """The values again; `rows` says how many there must be."""
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


def _blame(values: Sequence[Any], error: BaseException) -> EncodingError:
    """Which value it is that cannot be pickled."""
    for row, value in enumerate(values):
        try:
            dumps(value)
        except BaseException as refused:
            pass_interrupt(refused)
            why = represent(refused)
            blamed = EncodingError(
                f"a value of type {type(value).__name__} cannot travel between workers: {why}"
            )
            blamed.row = row
            return blamed
    return EncodingError(f"values cannot travel between workers: {represent(error)}")
