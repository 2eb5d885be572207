r"""Columns: lists of Python values as bytes, fast where a list is of one plain type.

Most lists that cross a link are all text, all whole numbers, all floats, or tuples of these. Such a list is a
handful of C calls to write and to read, several times faster than pickle. Anything else is pickled, so a reader must
trust the writer: links are authenticated before a column is read.

A column is one tag byte, then::

    s  text: "\0".join(values) as UTF-8          (values without NUL only)
    i  whole numbers of 64 bits    f  floats     8 bytes each, little-endian
    n  None, as often as the batch has rows      nothing more
    t  tuples of one length: their number, then each position as a column of its own, led by its length
    p  pickle, protocol 5
"""

from __future__ import annotations

import pickle
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Final

from railgun.core.errors import RailgunError

_LENGTH: Final = struct.Struct("<I")
_NESTED: Final = 2  # tuples of tuples are columns too; deeper ones are pickled
_SWAP: Final = sys.byteorder == "big"


class EncodingError(RailgunError):
    """A value cannot travel: pickle refuses it."""


class DecodingError(RailgunError):
    """Bytes are not what they should be."""


def encode_column(values: Sequence[Any], depth: int = 0) -> bytes:
    """The values as bytes.

    >>> encode_column(["ada", "grace"])
    b'sada\\x00grace'
    >>> decode_column(encode_column([("ada", 1), ("grace", 2)]), 2)
    [('ada', 1), ('grace', 2)]
    """
    kinds = set(map(type, values))
    if len(kinds) == 1:
        (kind,) = kinds
        encode = _ENCODERS.get(kind)
        encoded: bytes | None = encode(values) if encode is not None else None
        if kind is tuple and depth < _NESTED:
            encoded = _encode_tuples(values, depth)
        if encoded is not None:
            return encoded
    try:
        return b"p" + pickle.dumps(values if isinstance(values, list) else list(values), 5)
    except Exception as error:
        raise EncodingError(_blame(values, error)) from error


def decode_column(data: bytes | memoryview, rows: int) -> list[Any]:
    """The values again; `rows` says how many there must be."""
    try:
        values = _decode(memoryview(data), rows)
    except DecodingError:
        raise
    except Exception as error:
        raise DecodingError(f"a column cannot be read: {error}") from error
    if len(values) != rows:
        raise DecodingError(f"a column has {len(values)} values where {rows} were expected")
    return values


def _encode_text(values: Sequence[str]) -> bytes | None:
    joined = "\0".join(values)
    if joined.count("\0") != len(values) - 1:
        return None
    return b"s" + joined.encode("utf-8", "surrogatepass")


def _encode_ints(values: Sequence[int]) -> bytes | None:
    try:
        return b"i" + _portable(array("q", values))
    except OverflowError:
        return None


def _encode_floats(values: Sequence[float]) -> bytes:
    return b"f" + _portable(array("d", values))


def _encode_nones(values: Sequence[None]) -> bytes:
    return b"n"


_ENCODERS: Final[dict[type, Any]] = {
    str: _encode_text,
    int: _encode_ints,
    float: _encode_floats,
    type(None): _encode_nones,
}


def _encode_tuples(values: Sequence[tuple[Any, ...]], depth: int) -> bytes | None:
    widths = set(map(len, values))
    if len(widths) != 1 or widths == {0}:
        return None
    parts = [encode_column(column, depth + 1) for column in zip(*values, strict=True)]
    led = [b"t", _LENGTH.pack(len(parts))]
    for part in parts:
        led += [_LENGTH.pack(len(part)), part]
    return b"".join(led)


def _decode(data: memoryview, rows: int) -> list[Any]:
    tag, body = data[:1].tobytes(), data[1:]
    if tag == b"s":
        return str(body, "utf-8", "surrogatepass").split("\0")
    if tag in (b"i", b"f"):
        numbers = array("q" if tag == b"i" else "d")
        numbers.frombytes(body)
        if _SWAP:
            numbers.byteswap()
        return numbers.tolist()
    if tag == b"n":
        return [None] * rows
    if tag == b"t":
        (width,) = _LENGTH.unpack_from(body)
        at, columns = _LENGTH.size, []
        for _ in range(width):
            (length,) = _LENGTH.unpack_from(body, at)
            at += _LENGTH.size
            columns.append(decode_column(body[at : at + length], rows))
            at += length
        return list(zip(*columns, strict=True))
    if tag == b"p":
        values = pickle.loads(body)
        if isinstance(values, list):
            return values
    raise DecodingError(f"a column cannot begin with {tag!r}")


def _portable(numbers: array[Any]) -> bytes:
    if _SWAP:
        numbers.byteswap()
    return numbers.tobytes()


def _blame(values: Sequence[Any], error: Exception) -> str:
    """Which value it is that cannot be pickled."""
    for value in values:
        try:
            pickle.dumps(value, 5)
        except Exception as refused:
            return (
                f"a value of type {type(value).__name__} cannot travel between workers: {refused}"
            )
    return f"values cannot travel between workers: {error}"
