"""Compute stable 64-bit hashes of keys: the same in every process, on every machine, in every run.

The rest of the engine identifies a key only by its hash. Two promises follow:

1. **Equal keys have equal hashes**, across types too, as Python compares them: ``1 == 1.0 == True``, ``Decimal("0.5")
   == 0.5``, a named tuple and the plain tuple. (The converse is not promised: keys that share a hash are placed
   together.)
2. **Hashes are stable**: Python's ``hash()`` is not used, because it is salted per process for strings.

A key must equal itself after it was sent or saved, or its state would not be found again. So these are refused: NaN (of
float, complex, Decimal and numpy, also inside of tuples and other keys), NaT, and classes with ``__stable_key__`` but
without ``__eq__``. A subclass of a key type, such as str, that defines its own ``__eq__`` or ``__hash__`` is refused
too unless it has ``__stable_key__``: otherwise Railgun cannot know which of its objects are equal.

Columns of str, bytes and int are hashed as arrays, without Python code for each key. Any other key is hashed by
`key_hash`: numbers, None, tuples, frozensets, enums, dataclasses, dates, UUIDs, and classes that return their identity
from ``__stable_key__``. Any other type is refused with a `KeyTypeError`. An exception that the code of such a class
raises becomes the cause of a `KeyCodeError`, which names the method; a bare `StopIteration` would silently end the
column.

The hash function, for implementations in other languages. All arithmetic is modulo 2**64::

    text(tag, data):   h = tag ^ (len(data) * P2)
                       for every 8 bytes w of data, little-endian, the last ones padded with zeros:
                           h = (h ^ w) * P1;  h = (h ^ (h >> 32)) * P3;  h = h ^ (h >> 29)
                       return finish(h)
    number(n):         finish((n ^ INT) * P1)          for -2**63 <= n < 2**63
    finish(h):         h = (h ^ (h >> 33)) * P3;  return h ^ (h >> 32)
"""

from __future__ import annotations

import array
import dataclasses
import datetime
import enum
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from types import WrapperDescriptorType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from railgun.errors import KeyCodeError, KeyTypeError, pass_interrupt, represent

Hashes = NDArray[np.uint64]

MASK: Final = (1 << 64) - 1
P1: Final = 0x9E3779B97F4A7C15
P2: Final = 0xC2B2AE3D27D4EB4F
P3: Final = 0xFF51AFD7ED558CCD

# One tag per kind of key, so that "1", b"1" and 1 do not share a hash.
STR: Final = 0x7374720000000001
BYTES: Final = 0x6279746500000002
INT: Final = 0x696E740000000003
OTHER: Final = 0x6F74686500000004

# Masks that keep the first 0..8 bytes of a little-endian word.
_KEEP_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(9)], dtype=np.uint64)
_U = np.uint64
_FEW_ROWS: Final = 8
_PLAIN: Final = frozenset({str, bytes, int, bool, float, tuple, type(None)})
_DATE_TYPES: Final = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta)
_COMPARED: Final = (
    str, bytes, int, float, complex, Decimal, Fraction, tuple, frozenset, uuid.UUID, *_DATE_TYPES, enum.Enum,
)  # fmt: skip
"""Key types that may be subclassed. Railgun hashes exactly what makes two of their objects equal."""
_BLOCK: Final = 2048  # rows hashed at once: the allocator would request larger temporaries from the system each time


def hash_keys(keys: Sequence[Any] | NDArray[Any], walked: Iterator[Any] | None = None) -> Hashes:
    """Return the hashes of a column of keys, computed with array operations where all keys are str, bytes or int.

    `walked`: an iterator over `keys`. Where keys are hashed one by one, they are taken from it, so that its owner knows
    which key was reached if hashing raises. Raises `KeyTypeError` and `KeyCodeError`.

    >>> [hex(h) for h in hash_keys(["ada", "grace"]).tolist()]
    ['0x98e012f8e43a19d2', '0xbd0ef5073afdf83']
    >>> bool((hash_keys([1, 2]) == hash_keys([1.0, 2.0])).all())
    True
    """
    if isinstance(keys, np.ndarray):
        if keys.ndim != 1:
            raise KeyTypeError(f"a column of keys has one dimension, this array has {keys.ndim}")
        if keys.dtype.kind in "ib" or (keys.dtype.kind == "u" and keys.dtype.itemsize < 8):
            return hash_ints(keys.astype(np.int64))
        # As plain values dates would lose their unit. They stay numpy scalars, and are refused.
        column: Sequence[Any] = list(keys) if keys.dtype.kind in "mM" else keys.tolist()
    else:
        column = keys
    if len(column) == 0:
        return np.empty(0, dtype=np.uint64)
    first = column[0]
    if isinstance(first, str | bytes):
        if _all_are(str if isinstance(first, str) else bytes, column):
            blocks = range(0, len(column), _BLOCK)
            hashes = [_hash_texts(column[at : at + _BLOCK]) for at in blocks]
            return hashes[0] if len(hashes) == 1 else np.concatenate(hashes)
    elif isinstance(first, int) and _all_are((int, np.integer), column):
        try:
            return hash_ints(np.frombuffer(array.array("q", column), dtype=np.int64))
        except OverflowError:  # not all of them fit into 64 bits
            pass
    each = column if walked is None else walked
    return np.fromiter(map(key_hash, each), dtype=np.uint64, count=len(column))


def _hash_texts(column: Sequence[Any]) -> Hashes:
    """Return the hashes of keys that are all str or all bytes."""
    if isinstance(column[0], str):
        return _hash_joined(STR, "\0".join(column).encode("utf-8", "surrogatepass"), column)
    return _hash_joined(BYTES, b"\0".join(column), column)


def _all_are(kind: type | tuple[type, ...], column: Sequence[Any]) -> bool:
    """Return whether all keys are of type `kind` and are compared as keys of that type are."""
    key_types: list[Any] = list(map(type, column))
    distinct_types: Collection[Any] = (
        key_types[:1] if key_types.count(key_types[0]) == len(key_types) else set(key_types)
    )  # faster than a set
    return all(
        issubclass(key_type, kind) and key_type is not np.timedelta64 and not _differs(key_type)
        for key_type in distinct_types
    )


@lru_cache(1 << 12)
def _differs(kind: Any) -> bool:
    """Return whether a subclass of a key type defines its own equality.

    Types of numpy and other types that are not written in Python compare like the type they derive from.

    >>> class Name(str): pass
    >>> class AnyCase(str):
    ...     def __eq__(self, other): return self.lower() == other.lower()
    ...     def __hash__(self): return hash(self.lower())
    >>> _differs(Name), _differs(AnyCase)
    (False, True)
    """
    base = next((base for base in _COMPARED if issubclass(kind, base)), None)
    if base is None or kind is base:
        return False
    if (
        base is enum.Enum
    ):  # the type of its values may define `__eq__` without changing the enum's equality
        own_classes = [
            own_class
            for own_class in kind.__mro__
            if issubclass(own_class, enum.Enum) and own_class.__module__ != "enum"
        ]
        return any("__eq__" in vars(own_class) for own_class in own_classes)
    # Some libraries override only `__hash__` of dates and times, which leaves their equality as it is.
    names = ("__eq__",) if base in _DATE_TYPES else ("__eq__", "__hash__")
    return any(
        getattr(kind, name) is not getattr(base, name)
        and not isinstance(getattr(kind, name), WrapperDescriptorType)
        for name in names
    )


def hash_buffer(
    tag: int, data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Hashes:
    """Return the hashes of byte strings that lie in one buffer.

    `data` must go on for 8 bytes after the last string. Columns that already have a buffer and offsets, such as
    Arrow's, are hashed by this function too.
    """
    words = np.ndarray((len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))
    hashes = _U(tag) ^ (lengths.astype(np.uint64) * _U(P2))
    longest = int(lengths.max(initial=0))
    shortest = int(lengths.min(initial=longest))
    rows: Any = slice(None)  # the rows that have bytes left
    for at in range(0, longest, 8):
        if at + 8 <= shortest:  # a whole word in every row
            hashes = _mix(hashes, words[starts + at])
            continue
        if at >= shortest:
            longer = np.flatnonzero(lengths[rows] > at)
            rows = longer if isinstance(rows, slice) else rows[longer]
            if len(rows) <= _FEW_ROWS and longest - at > 64:  # few very long keys among short ones
                for row in rows.tolist():
                    rest = data[starts[row] + at : starts[row] + lengths[row]].tobytes()
                    hashes[row] = _mix_bytes(int(hashes[row]), rest)
                break
        word = words[starts[rows] + at] & _KEEP_MASKS[np.minimum(lengths[rows] - at, 8)]
        hashes[rows] = _mix(hashes[rows], word)
    return finish(hashes)


def _mix(hashes: Hashes, word: Hashes) -> Hashes:
    """Return `hashes` with one word of each key mixed in; `word` is overwritten."""
    mixed = np.bitwise_xor(hashes, word, out=word)
    mixed *= _U(P1)
    mixed ^= mixed >> _U(32)
    mixed *= _U(P3)
    mixed ^= mixed >> _U(29)
    return mixed


def _hash_joined(tag: int, joined: bytes, keys: Sequence[Any]) -> Hashes:
    """Return the hashes of `keys`, given their concatenation with a zero byte between them."""
    data = np.frombuffer(joined + bytes(8), dtype=np.uint8)
    ends = np.flatnonzero(data[: len(joined)] == 0)
    if len(ends) == len(keys) - 1:
        ends = np.append(ends, len(joined))
        starts = np.empty_like(ends)
        starts[0] = 0
        starts[1:] = ends[:-1] + 1
        return hash_buffer(tag, data, starts, ends - starts)
    # A key contains a zero byte, so the zero bytes do not tell where keys end.
    encoded = [k.encode("utf-8", "surrogatepass") if isinstance(k, str) else k for k in keys]
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    data = np.frombuffer(b"".join(encoded) + bytes(8), dtype=np.uint8)
    return hash_buffer(tag, data, np.cumsum(lengths) - lengths, lengths)


def hash_ints(values: NDArray[np.int64]) -> Hashes:
    """Return the hashes of an array of 64-bit integers."""
    return finish((values.view(np.uint64) ^ _U(INT)) * _U(P1))


def finish(hashes: Hashes) -> Hashes:
    """Return `hashes` with their bits spread over the whole word."""
    spread = hashes ^ (hashes >> _U(33))
    spread *= _U(P3)
    spread ^= spread >> _U(32)
    return spread


def key_hash(key: object) -> int:
    """Return the hash of one key of any supported type. Raises `KeyTypeError` and `KeyCodeError`.

    >>> key_hash(1) == key_hash(1.0) == key_hash(True)
    True
    >>> key_hash(("ada", 1)) == key_hash(("ada", 1.0))
    True
    >>> key_hash(["ada"])
    Traceback (most recent call last):
    railgun.errors.KeyTypeError: a list cannot be a key: it can change, so it has no stable hash...
    """
    kind: Any = type(key)
    if kind not in _PLAIN and _differs(kind):
        if hasattr(key, "__stable_key__"):
            return _identified(key)
        raise KeyTypeError(
            f"a {kind.__qualname__} cannot be a key: the class has an __eq__ or __hash__ of its own, so Railgun "
            "does not know which of them are equal. Use a key of the type it comes from, or give the class a method "
            f"__stable_key__() that returns such a key, the same one for equal keys. The key was {_short(key)}"
        )
    if isinstance(key, str):
        return _text(STR, key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return _text(BYTES, key)
    if isinstance(key, int):
        return _integer(int(key))
    return _other(key)


def _other(key: object) -> int:
    """Return the hash of a key that is not str, bytes or int. A key with parts is hashed by its parts' hashes."""
    if key is None:
        return _text(OTHER, b"none")
    if isinstance(key, type):
        raise _unknown(key)
    if hasattr(key, "__stable_key__"):
        return _identified(key)
    if type(key).__hash__ is None or (isinstance(key, memoryview) and not key.readonly):
        raise KeyTypeError(
            f"a {type(key).__qualname__} cannot be a key: it can change, so it has no stable hash. "
            f"Use a tuple, a string or a frozen dataclass instead. The key was {_short(key)}"
        )
    if isinstance(key, tuple):
        return _parts(b"tuple", [key_hash(part) for part in key])
    if isinstance(key, np.generic) and not isinstance(key, np.datetime64 | np.timedelta64):
        plain = key.item()
        if not isinstance(plain, np.generic):
            return key_hash(plain)
    if isinstance(key, float | Decimal | Fraction | complex):
        return _number(key)
    if isinstance(key, datetime.date | datetime.time | datetime.timedelta):
        if key != key:  # pandas' NaT
            raise _unknown(key)
        return _text(OTHER, b"time" + repr(_date_fields(key)).encode())
    if isinstance(key, enum.Enum):
        name = f"{type(key).__qualname__}.{key.name}"
        return _text(OTHER, b"enum" + name.encode())
    if isinstance(key, uuid.UUID):
        return _text(OTHER, b"uuid" + key.bytes)
    if isinstance(key, frozenset):
        return _parts(b"frozenset", sorted([key_hash(part) for part in key]))
    if isinstance(key, memoryview):
        return key_hash(key.tobytes())
    if dataclasses.is_dataclass(key) and _compares_fields(type(key)):
        compared = [getattr(key, f.name) for f in dataclasses.fields(key) if f.compare]
        return _parts(type(key).__qualname__.encode(), [key_hash(part) for part in compared])
    raise _unknown(key)


def _identified(key: Any) -> int:
    """Return the hash of a key that has `__stable_key__`."""
    kind: Any = type(key)
    try:
        identity = key.__stable_key__()
    except BaseException as error:
        raise _raised_by(f"{kind.__qualname__}.__stable_key__", error) from error
    hashed = key_hash(identity)
    if kind.__eq__ is object.__eq__:
        raise KeyTypeError(
            f"a {kind.__qualname__} cannot be a key: it has __stable_key__(), but two of them are never "
            "equal, so a key would not find its state again after it was saved or moved. "
            "Give the class __eq__ and __hash__. "
            f"The key was {_short(key)}"
        )
    if kind.__hash__ is None:
        raise KeyTypeError(
            f"a {kind.__qualname__} cannot be a key: it has __stable_key__() and __eq__, but no __hash__, which Python "
            f"takes from a class that has an __eq__ of its own. Give the class __hash__. The key was {_short(key)}"
        )
    try:
        key.__hash__()  # if it raises, let it be here, where the caller knows the record of the key
    except BaseException as error:
        raise _raised_by(f"{kind.__qualname__}.__hash__", error) from error
    return hashed


def _raised_by(method: str, error: BaseException) -> KeyCodeError:
    pass_interrupt(error)
    return KeyCodeError(method, represent(error))


def _compares_fields(kind: Any) -> bool:
    """Return whether a dataclass has the generated `__eq__` that compares its fields."""
    code = getattr(kind.__eq__, "__code__", None)
    return kind.__dataclass_params__.eq and code is not None and code.co_filename == "<string>"


def _unknown(key: object) -> KeyTypeError:
    return KeyTypeError(
        f"a {type(key).__qualname__} cannot be a key: Railgun does not know which of them are equal. "
        "Use a string, a number, a tuple or a frozen dataclass, or give the class a method "
        f"__stable_key__() that returns one of these. The key was {_short(key)}"
    )


def _number(key: float | Decimal | Fraction | complex) -> int:
    """Return the hash of a number, the same for equal numbers of different types.

    Whole numbers hash like an int, others by their ratio.
    """
    if isinstance(key, complex):
        if key.imag:
            return _parts(b"complex", (_number(key.real), _number(key.imag)))
        key = key.real
    # Comparing a signalling NaN raises an exception in Python.
    if key.is_nan() if isinstance(key, Decimal) else key != key:
        raise KeyTypeError(
            f"{_short(key)} cannot be a key, nor a part of one: NaN does not equal itself, so it would have a state "
            "for every time it is seen. Use None, or a string, for what has no value"
        )
    try:
        over, under = key.as_integer_ratio()
    except OverflowError:
        return _text(OTHER, b"infinite" if key > 0 else b"-infinite")
    if under == 1:
        return _integer(over)
    return _text(OTHER, f"ratio{over:x}/{under:x}".encode())


def _date_fields(key: datetime.date | datetime.time | datetime.timedelta) -> tuple[object, ...]:
    """Return a tuple that is equal for equal dates or times: of aware ones the instant, of naive ones the fields."""
    if isinstance(key, datetime.timedelta):
        return ("span", key.days, key.seconds, key.microseconds)
    if isinstance(key, datetime.datetime):
        key = key.replace(fold=0)
        fields = (key.toordinal(), key.hour, key.minute, key.second, key.microsecond)
        offset = key.utcoffset()
    elif isinstance(key, datetime.date):
        return ("date", key.toordinal())
    else:
        fields = (0, key.hour, key.minute, key.second, key.microsecond)
        offset = key.utcoffset()
    if offset is None:
        return ("naive", *fields)
    days, hours, minutes, seconds, micros = fields
    whole = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return ("aware", (whole * 1_000_000 + micros) - offset // datetime.timedelta(microseconds=1))


def _integer(value: int) -> int:
    if -(1 << 63) <= value < 1 << 63:
        return _finish_one(((value ^ INT) * P1) & MASK)
    return _text(OTHER, f"int{value:x}".encode())


def _parts(kind: bytes, hashes: Iterable[int]) -> int:
    return _text(OTHER, kind + b"".join(h.to_bytes(8, "little") for h in hashes))


def _text(tag: int, data: bytes) -> int:
    return _finish_one(_mix_bytes(tag ^ ((len(data) * P2) & MASK), data))


def _mix_bytes(mixed: int, data: bytes) -> int:
    for at in range(0, len(data), 8):
        mixed = ((mixed ^ int.from_bytes(data[at : at + 8], "little")) * P1) & MASK
        mixed = ((mixed ^ (mixed >> 32)) * P3) & MASK
        mixed ^= mixed >> 29
    return mixed


def _finish_one(mixed: int) -> int:
    mixed = ((mixed ^ (mixed >> 33)) * P3) & MASK
    return mixed ^ (mixed >> 32)


def _short(key: object) -> str:
    text = represent(key)
    return text if len(text) <= 80 else text[:77] + "..."
