"""Find the type of column that holds all states of a step (its kind), and convert states to values of such a column.

State is whatever a user's functions keep. A column has one type. Rules:

1. **Nothing is lost and nothing is invented.** The kind of a column is the narrowest that holds every value seen. It
   does not depend on the order of the values, so many tasks can look at parts of a table and merge their results.
2. Whole numbers are `bigint`. With fractions among them they are `double`. Whole numbers of more than 64 bits make a
   column of text, unless there are fractions.
3. Dicts are structs, of all names that any of them has. They are maps if there are more than `MAX_STRUCT_NAMES` names,
   if two names differ only in case (Spark could not tell them apart), or if a key is not text: then names are data.
4. Lists, sets and deques are arrays. Tuples of one length are structs `_1`, `_2`, …; of several lengths, arrays.
5. Values that have no kind in common are text, as Spark's `from_json` has it: text as it is, all else as JSON.
6. A value that does not fit its type is an error which says where the value is. A struct that a user has written may
   leave names out; a struct that was inferred from a sample (`strict`) may not.

Kinds are plain data, so that they can travel between processes: "null", "bool", "long", "big", "double", "string",
"time", "any", or `["list", kind]`, `["map", kind]`, `["struct", {name: kind}]`, `["tuple", [kind, …]]`.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import reduce
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as t

from railgun.engine.snapshots.plain import from_json
from railgun.errors import RailgunError

Kind = str | list[Any]
Fit = Callable[[Any], Any]

MAX_STRUCT_NAMES: Final = 100
MAX_TUPLE_ITEMS: Final = 22  # of a tuple that becomes a struct, as in Scala

_NUMBERS: Final = {"long": 0, "big": 1, "double": 2}
_ATOMS: Final = frozenset((type(None), bool, int, float))
_MIN_LONG: Final = -(1 << 63)
_MAX_LONG: Final = (1 << 63) - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class MisfitError(RailgunError):
    """A state does not fit the type of its column."""


def misfit(place: str, value: Any, wanted: str) -> MisfitError:
    """Return the error for a value at `place`, where a `wanted` was expected."""
    text = json.dumps(value, ensure_ascii=False, default=as_text)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return MisfitError(f"column {place}: {shown} is no {wanted}")


# ------------------------------------------------------------ opening pickles

# Types of data that Python's own pickles name: creating one of them runs no code of users.
_HARMLESS: Final = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        *(int, float, str, bool, list, dict, set, frozenset, tuple),
        *(OrderedDict, defaultdict, Counter, deque, Decimal),
        *(date, datetime, time, timedelta, timezone),
    )
}


class SealedError(Exception):
    """A pickle names a class that is not plain data."""


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        kind = _HARMLESS.get((module, name))
        if kind is None:
            raise SealedError(f"{module}.{name}")
        return kind


def unpickle_data(data: bytes) -> Any:
    """Unpickle data made only of Python's own types of data; no other class is looked up, so no foreign code runs.

    Raise `SealedError` if the pickle names another class, and whatever `pickle` raises.
    """
    return _DataUnpickler(io.BytesIO(data)).load()


# ------------------------------------------------------------ values


class Entries(dict[str, Any]):
    """A dict whose keys are not text: they are data, and shown as text."""


def plain(value: Any) -> Any:
    """Return a state made only of None, bool, int, float, str, datetime (in UTC), list, tuple, dict and `Entries`."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is str:
        return value.encode("utf-8", "backslashreplace").decode()
    if kind is dict or isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {plain(key): plain(item) for key, item in value.items()}
        return Entries(zip(_names(value), map(plain, value.values()), strict=True))
    if kind is tuple:
        return tuple(map(plain, value))
    if kind is list or kind is deque:
        return list(map(plain, value))
    if kind is set or kind is frozenset:
        return sorted(map(plain, value), key=lambda item: (type(item).__name__, as_text(item)))
    return _plain_object(value)


def _names(keys: Iterable[Any]) -> list[str]:
    """Return keys as text; or as Python shows them, if two of those texts would be the same."""
    names = [as_text(plain(key)) or "null" for key in keys]
    return names if len(set(names)) == len(names) else [plain(repr(key)) for key in keys]


def _plain_object(value: Any) -> Any:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, tuple):
        return plain(value._asdict()) if hasattr(value, "_asdict") else tuple(map(plain, value))
    if isinstance(value, list | set | frozenset | deque):
        return list(map(plain, value))
    for base in (int, float, str):
        if isinstance(value, base):
            return plain(base(value))
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # a numpy value
        converted = value.tolist()
        return plain(converted) if type(converted) is not type(value) else repr(converted)
    return plain(repr(value))


def as_text(value: Any) -> str | None:
    """Return a plain value as a column of text holds it."""
    if value is None or type(value) is str:
        return value
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=as_text)


def identity(value: Any) -> Any:
    """Return a value that is equal for equal plain values of equal types, whatever the order of dicts."""
    if isinstance(value, dict):
        return type(value), sorted((key, identity(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), [identity(item) for item in value]
    return type(value), repr(value)


def same(first: tuple[str | None, bytes | None], second: tuple[str | None, bytes | None]) -> bool:
    """Return whether two states with different bytes are the same, as far as can be seen without running their code."""
    try:
        return bool(_identity(*first) == _identity(*second))
    except Exception:
        return False


def _identity(text: str | None, pickled: bytes | None) -> Any:
    if text is not None:
        return identity(from_json([text])[0])
    return None if pickled is None else identity(plain(unpickle_data(pickled)))


# ------------------------------------------------------------ kinds of values


def kind_of(value: Any) -> Kind:
    """Return the kind of a plain value."""
    kind = type(value)
    if kind is int:
        return "long" if _MIN_LONG <= value <= _MAX_LONG else "big"
    if kind is str:
        return "string"
    if kind is float:
        return "double"
    if value is None:
        return "null"
    if kind is bool:
        return "bool"
    if kind is dict:
        return _settled({name: kind_of(item) for name, item in value.items()})
    if kind is tuple and 0 < len(value) <= MAX_TUPLE_ITEMS:
        return ["tuple", [kind_of(item) for item in value]]
    if kind is list or kind is tuple:
        return ["list", merged_all(map(kind_of, value))]
    if kind is Entries:
        return ["map", merged_all(map(kind_of, value.values()))]
    return "time"


def merged_all(kinds: Iterable[Kind]) -> Kind:
    """Return the narrowest kind that holds the values of all these kinds."""
    nothing: Kind = "null"
    return reduce(merged, kinds, nothing)


def merged(first: Kind, second: Kind) -> Kind:
    """Return the narrowest kind that holds the values of both kinds."""
    if first == second or second == "null":
        return first
    if first == "null":
        return second
    if isinstance(first, str) and isinstance(second, str):
        if first in _NUMBERS and second in _NUMBERS:
            return max(first, second, key=_NUMBERS.__getitem__)
        return "any"
    if isinstance(first, str) or isinstance(second, str):
        return "any"
    names = {first[0], second[0]}
    if names == {"struct"}:
        fields = {
            name: merged(kind, second[1].get(name, "null")) for name, kind in first[1].items()
        }
        return _settled(fields | {name: k for name, k in second[1].items() if name not in fields})
    if names <= {"struct", "map"}:
        return ["map", merged(_inside(first), _inside(second))]
    if names == {"tuple"} and len(first[1]) == len(second[1]):
        return ["tuple", list(map(merged, first[1], second[1]))]
    if names <= {"tuple", "list"}:
        return ["list", merged(_inside(first), _inside(second))]
    return "any"


def _settled(fields: dict[str, Kind]) -> Kind:
    if len(fields) > MAX_STRUCT_NAMES or len({name.lower() for name in fields}) < len(fields):
        return ["map", merged_all(fields.values())]
    return ["struct", fields]


def _inside(kind: Kind) -> Kind:
    if kind[0] == "struct":
        return merged_all(kind[1].values())  # type: ignore[union-attr]
    return merged_all(kind[1]) if kind[0] == "tuple" else kind[1]


def arrow_of(kind: Kind) -> pa.DataType | None:
    """Return the type that Arrow reads JSON of this kind as, and of no other; None if there is no such type."""
    if isinstance(kind, str):
        return _ARROW.get(kind)
    if kind[0] == "list":
        item = arrow_of(kind[1])
        return None if item is None else pa.list_(item)
    if kind[0] != "struct":
        return None
    fields = {name: arrow_of(field) for name, field in kind[1].items()}
    return None if None in fields.values() else pa.struct(list(fields.items()))


_ARROW: Final = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "long": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
}


# ------------------------------------------------------------ types of columns


def type_of(kind: Kind) -> t.DataType:
    """Return the type of a column of this kind."""
    if isinstance(kind, str):
        return _TYPES.get(kind, t.StringType())
    family, inner = kind
    if family == "list":
        return t.ArrayType(type_of(inner))
    if family == "map" or not inner:  # dicts that are all empty: Spark has no struct without fields
        return t.MapType(t.StringType(), type_of(inner or "null"))
    fields = inner.items() if family == "struct" else ((f"_{n}", k) for n, k in enumerate(inner, 1))
    return t.StructType([t.StructField(name, type_of(field)) for name, field in fields])


_TYPES: Final = {
    "bool": t.BooleanType(),
    "long": t.LongType(),
    "double": t.DoubleType(),
    "time": t.TimestampType(),
}
_WHOLE: Final[dict[type[t.DataType], int]] = {
    t.ByteType: 8,
    t.ShortType: 16,
    t.IntegerType: 32,
    t.LongType: 64,
}


def reads_as_json(wanted: t.DataType) -> bool:
    """Return whether Arrow, wherever it can read JSON as this type, returns the same values as `fit`."""
    if isinstance(wanted, t.StructType):
        return all(reads_as_json(field.dataType) for field in wanted)
    if isinstance(wanted, t.ArrayType):
        return reads_as_json(wanted.elementType)
    return isinstance(wanted, (t.StringType, t.BooleanType, t.DoubleType, *_WHOLE))


def fit(wanted: t.DataType, place: str, strict: bool = False) -> Fit:
    """Return a function that converts plain values to values of `wanted`; its `MisfitError` names `place`."""
    make = _fit(wanted, place, strict)

    def fit_or_none(value: Any) -> Any:
        return None if value is None else make(value)

    return fit_or_none


def _fit(wanted: t.DataType, place: str, strict: bool) -> Fit:
    name = wanted.simpleString()

    def refuse(value: Any) -> MisfitError:
        return misfit(place, value, name)

    if isinstance(wanted, t.StringType):
        return as_text
    if isinstance(wanted, t.StructType):
        return _fit_struct(wanted, place, strict)
    if isinstance(wanted, t.ArrayType):
        item = fit(wanted.elementType, f"{place}[]", strict)

        def array(value: Any) -> Any:
            if not isinstance(value, list | tuple):
                raise refuse(value)
            return [item(element) for element in value]

        return array
    if isinstance(wanted, t.MapType) and isinstance(wanted.keyType, t.StringType):
        inner = fit(wanted.valueType, f"{place}{{}}", strict)

        def mapped(value: Any) -> Any:
            if not isinstance(value, dict):
                raise refuse(value)
            return [(key, inner(element)) for key, element in value.items()]

        return mapped
    if type(wanted) in _WHOLE:
        limit = 1 << (_WHOLE[type(wanted)] - 1)

        def whole(value: Any) -> Any:
            if type(value) is not int or not -limit <= value < limit:
                raise refuse(value)
            return value

        return whole
    if isinstance(wanted, t.FloatType | t.DoubleType):

        def fraction(value: Any) -> Any:
            if type(value) is not int and type(value) is not float:
                raise refuse(value)
            try:
                return float(value)
            except OverflowError:
                raise refuse(value) from None

        return fraction
    if isinstance(wanted, t.BooleanType):

        def truth(value: Any) -> Any:
            if type(value) is not bool:
                raise refuse(value)
            return value

        return truth
    if isinstance(wanted, t.TimestampType):

        def when(value: Any) -> Any:
            try:
                return as_datetime(value)
            except (ValueError, OverflowError):
                raise refuse(value) from None

        return when
    raise misfit(
        place, name, "type that state can be read as: string, boolean, tinyint to bigint, float, double, timestamp, "
        "array, struct, and map with text as keys"
    )  # fmt: skip


def as_datetime(value: Any) -> datetime:
    """Return a time from a datetime, ISO 8601 text (UTC unless it names a zone), or microseconds since 1970."""
    if type(value) is int:
        return _EPOCH + timedelta(microseconds=value)
    when = value if isinstance(value, datetime) else None
    if type(value) is str:
        when = datetime.fromisoformat(value)
    if when is None:
        raise ValueError(value)
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when


def _fit_struct(wanted: t.StructType, place: str, strict: bool) -> Fit:
    fields = [(f.name, fit(f.dataType, f"{place}.{f.name}", strict)) for f in wanted]
    names = frozenset(wanted.names)
    numbered = wanted.names == [f"_{n}" for n in range(1, len(fields) + 1)]

    def struct(value: Any) -> Any:
        if isinstance(value, dict):
            if strict and not names >= value.keys():
                extra = next(name for name in value if name not in names)
                raise misfit(f"{place}.{extra}", value[extra], "field of this table")
            return {name: make(value.get(name)) for name, make in fields}
        if numbered and isinstance(value, list | tuple) and len(value) == len(fields):
            return {name: make(item) for (name, make), item in zip(fields, value, strict=True)}
        raise misfit(place, value, wanted.simpleString())

    return struct
