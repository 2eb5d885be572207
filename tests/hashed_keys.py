"""Keys of every kind for the tests of their hashes."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from railgun.hashing import MASK, key_hash

quick = settings(max_examples=100, deadline=None)

UTC = datetime.UTC
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=45))
WEST = datetime.timezone(-datetime.timedelta(hours=8))


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Unit(enum.StrEnum):
    METRE = "m"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    name: str
    number: float


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    note: str = field(default="", compare=False)


def one_by_one(keys: Iterable[object]) -> list[int]:
    return [key_hash(key) for key in keys]


# Characters of every length in UTF-8, the zero character and lone surrogates.
characters = st.one_of(
    st.characters(), st.characters(categories=["Cs"]), st.sampled_from("\0aé€🦀\ud800\udfff")
)
texts = st.text(characters, max_size=40)
blobs = st.one_of(st.binary(max_size=40), st.lists(st.sampled_from([0, 1]), max_size=20).map(bytes))
big_ints = st.integers(-(1 << 80), 1 << 80)
simple = st.one_of(
    st.none(),
    st.booleans(),
    big_ints,
    texts,
    blobs,
    st.floats(allow_nan=False),
    st.decimals(-1000, 1000, places=3),
    st.fractions(max_denominator=1000),
    st.complex_numbers(allow_nan=False),
    st.datetimes(timezones=st.sampled_from([None, UTC, EAST, WEST])),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.sampled_from([*Colour, *Level, *Unit, *Access, Pair("ada", 1), Point(1, 2)]),
    st.sampled_from([np.int8(-3), np.uint64(MASK), np.float32(0.5), np.bool_(True), np.str_("é")]),
)
keys = st.recursive(
    simple,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3).map(tuple),
        st.frozensets(st.one_of(texts, big_ints), max_size=3),
    ),
    max_leaves=5,
)
