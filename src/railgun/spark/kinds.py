"""Kinds: what type of column holds all states of a step, and states as values of such a column.

State is whatever a user's functions keep. A column has one type. Rules:

1. **Nothing is lost and nothing is invented.** The kind of a column is the least that holds every value that was seen.
   It does not depend on the order in which they are seen, so parts of a table can be looked at by many, and merged.
2. Whole numbers are `bigint`. With fractions among them they are `double`. Ones of more than 64 bits make a column of
   text, unless there are fractions.
3. Dicts are structs, of all names that any of them has. They are maps if there are more than `MOST_NAMES` names, if two
   differ in nothing but capitals (Spark could not tell them apart), or if a key is no text: then names are data.
4. Lists, sets and deques are arrays. Tuples of one length are structs `_1`, `_2`, …; of several, arrays.
5. What has nothing in common is text, as `from_json` of Spark has it: text as it is, all else as JSON.
6. A value that a type does not hold is an error which says where it is. A struct that a user has written may leave
   names out; one that was guessed from a sample (`strict`) may not.

Kinds are plain data, as they travel between processes: "null", "bool", "long", "big", "double", "string", "time",
"any", or `["list", kind]`, `["map", kind]`, `["struct", {name: kind}]`, `["tuple", [kind, …]]`.
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

MOST_NAMES: Final = 100
MOST_ITEMS: Final = 22  # of a tuple that is a struct, as in Scala

_NUMBERS: Final = {"long": 0, "big": 1, "double": 2}
_ATOMS: Final = frozenset((type(None), bool, int, float))
_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 63) - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class MisfitError(RailgunError):
    """A state does not fit the type of its column."""


def misfit(place: str, value: Any, wanted: str) -> MisfitError:
    """This value is in that place, where something else was wanted."""
    text = json.dumps(value, ensure_ascii=False, default=as_text)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return MisfitError(f"column {place}: {shown} is no {wanted}")


# ------------------------------------------------------------ opening pickles

# Types of data that Python's own pickles name: to make one of them runs nothing of anybody's.
_HARMLESS: Final = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        *(int, float, str, bool, list, dict, set, frozenset, tuple),
        *(OrderedDict, defaultdict, Counter, deque, Decimal),
        *(date, datetime, time, timedelta, timezone),
    )
}


class SealedError(Exception):
    """A pickle names something that is more than data."""


class _Opener(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _HARMLESS.get((module, name))
        if found is None:
            raise SealedError(f"{module}.{name}")
        return found


def opened(data: bytes) -> Any:
    """What is in a pickle, if it is made of Python's own types of data: nothing else is looked up, so nothing runs.

    Raises `SealedError` if there is more in it, and whatever pickle raises.
    """
    return _Opener(io.BytesIO(data)).load()


# ------------------------------------------------------------ values


class Entries(dict[str, Any]):
    """A dict whose keys are no text: they are data, and shown as text."""


def plain(value: Any) -> Any:
    """A state as None, bool, int, float, str, datetime (of a time zone), list, tuple, dict or `Entries`, throughout."""
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
    """Keys as text; as Python shows them, if two would be the same."""
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
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # of numpy
        made = value.tolist()
        return plain(made) if type(made) is not type(value) else repr(made)
    return plain(repr(value))


def as_text(value: Any) -> str | None:
    """A plain value as a column of text has it."""
    if value is None or type(value) is str:
        return value
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=as_text)


def identity(value: Any) -> Any:
    """What two plain values have in common if they are the same, in type too; in what order a dict was made is not."""
    if isinstance(value, dict):
        return type(value), sorted((key, identity(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), [identity(item) for item in value]
    return type(value), repr(value)


def same(one: tuple[str | None, bytes | None], other: tuple[str | None, bytes | None]) -> bool:
    """Whether two states that are written differently are the same: as far as can be seen without running them."""
    try:
        return bool(_identity(*one) == _identity(*other))
    except Exception:
        return False


def _identity(text: str | None, pickled: bytes | None) -> Any:
    if text is not None:
        return identity(from_json([text])[0])
    return None if pickled is None else identity(plain(opened(pickled)))


# ------------------------------------------------------------ kinds of values


def kind_of(value: Any) -> Kind:
    """The kind of a plain value."""
    kind = type(value)
    if kind is int:
        return "long" if _LEAST <= value <= _MOST else "big"
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
    if kind is tuple and 0 < len(value) <= MOST_ITEMS:
        return ["tuple", [kind_of(item) for item in value]]
    if kind is list or kind is tuple:
        return ["list", merged_all(map(kind_of, value))]
    if kind is Entries:
        return ["map", merged_all(map(kind_of, value.values()))]
    return "time"


def merged_all(kinds: Iterable[Kind]) -> Kind:
    """The least kind that holds the values of all these."""
    nothing: Kind = "null"
    return reduce(merged, kinds, nothing)


def merged(one: Kind, other: Kind) -> Kind:
    """The least kind that holds the values of both."""
    if one == other or other == "null":
        return one
    if one == "null":
        return other
    if isinstance(one, str) and isinstance(other, str):
        if one in _NUMBERS and other in _NUMBERS:
            return max(one, other, key=_NUMBERS.__getitem__)
        return "any"
    if isinstance(one, str) or isinstance(other, str):
        return "any"
    names = {one[0], other[0]}
    if names == {"struct"}:
        fields = {name: merged(kind, other[1].get(name, "null")) for name, kind in one[1].items()}
        return _settled(fields | {name: k for name, k in other[1].items() if name not in fields})
    if names <= {"struct", "map"}:
        return ["map", merged(_inside(one), _inside(other))]
    if names == {"tuple"} and len(one[1]) == len(other[1]):
        return ["tuple", list(map(merged, one[1], other[1]))]
    if names <= {"tuple", "list"}:
        return ["list", merged(_inside(one), _inside(other))]
    return "any"


def _settled(fields: dict[str, Kind]) -> Kind:
    if len(fields) > MOST_NAMES or len({name.lower() for name in fields}) < len(fields):
        return ["map", merged_all(fields.values())]
    return ["struct", fields]


def _inside(kind: Kind) -> Kind:
    if kind[0] == "struct":
        return merged_all(kind[1].values())  # type: ignore[union-attr]
    return merged_all(kind[1]) if kind[0] == "tuple" else kind[1]


def arrow_of(kind: Kind) -> pa.DataType | None:
    """The type that Arrow reads JSON of this kind as, and of no other; None if there is none."""
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
    """The type of a column of this kind."""
    if isinstance(kind, str):
        return _TYPES.get(kind, t.StringType())
    what, inner = kind
    if what == "list":
        return t.ArrayType(type_of(inner))
    if what == "map" or not inner:  # dicts that are all empty: Spark has no struct without fields
        return t.MapType(t.StringType(), type_of(inner or "null"))
    fields = inner.items() if what == "struct" else ((f"_{n}", k) for n, k in enumerate(inner, 1))
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
    """Whether Arrow makes such columns of JSON just as `fit` does, wherever it makes them at all."""
    if isinstance(wanted, t.StructType):
        return all(reads_as_json(field.dataType) for field in wanted)
    if isinstance(wanted, t.ArrayType):
        return reads_as_json(wanted.elementType)
    return isinstance(wanted, (t.StringType, t.BooleanType, t.DoubleType, *_WHOLE))


def fit(wanted: t.DataType, place: str, strict: bool = False) -> Fit:
    """A function that makes values for a column of this type of plain ones; `MisfitError` names the place."""
    make = _fit(wanted, place, strict)

    def made(value: Any) -> Any:
        return None if value is None else make(value)

    return made


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
            return [item(one) for one in value]

        return array
    if isinstance(wanted, t.MapType) and isinstance(wanted.keyType, t.StringType):
        inner = fit(wanted.valueType, f"{place}{{}}", strict)

        def mapped(value: Any) -> Any:
            if not isinstance(value, dict):
                raise refuse(value)
            return [(key, inner(one)) for key, one in value.items()]

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
                return moment(value)
            except (ValueError, OverflowError):
                raise refuse(value) from None

        return when
    raise misfit(
        place, name, "type that state can be read as: string, boolean, tinyint to bigint, float, double, timestamp, "
        "array, struct, and map with text as keys"
    )  # fmt: skip


def moment(value: Any) -> datetime:
    """A datetime, a text of ISO 8601 (UTC if it says nothing else), or microseconds since 1970, as in flows."""
    if type(value) is int:
        return _EPOCH + timedelta(microseconds=value)
    found = value if isinstance(value, datetime) else None
    if type(value) is str:
        found = datetime.fromisoformat(value)
    if found is None:
        raise ValueError(value)
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


def _fit_struct(wanted: t.StructType, place: str, strict: bool) -> Fit:
    fields = [(f.name, fit(f.dataType, f"{place}.{f.name}", strict)) for f in wanted]
    names = frozenset(wanted.names)
    numbered = wanted.names == [f"_{n}" for n in range(1, len(fields) + 1)]

    def struct(value: Any) -> Any:
        if isinstance(value, dict):
            if strict and not names >= value.keys():
                more = next(name for name in value if name not in names)
                raise misfit(f"{place}.{more}", value[more], "field of this table")
            return {name: make(value.get(name)) for name, make in fields}
        if numbered and isinstance(value, list | tuple) and len(value) == len(fields):
            return {name: make(item) for (name, make), item in zip(fields, value, strict=True)}
        raise misfit(place, value, wanted.simpleString())

    return struct
