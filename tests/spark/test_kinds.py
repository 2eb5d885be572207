"""Kinds: one type for all states of a step, whoever looks at them in whatever order; and every state fits it."""

from __future__ import annotations

import dataclasses
import enum
import json
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_type

from railgun.spark import kinds
from railgun.spark.kinds import MisfitError, SealedError
from railgun.spark.saved_rows import Block, States
from railgun.spark.states import SEALED, SeenKinds, StateDecoder, parse_json

atoms = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.sampled_from([2**63 - 1, 2**63, -(2**63), 10**30])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    | st.sampled_from(["2024-01-01 00:00:00", "1", "true"])
)
names = st.sampled_from(["a", "b", "c", "A"])
jsons = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
alike = st.fixed_dictionaries(
    {"n": st.integers(-9, 9)},
    optional={
        "x": st.floats(0, 1),
        "l": st.lists(st.integers(0, 3)),
        "s": st.none() | st.text("ab"),
    },
)
plains = st.recursive(
    atoms | st.just(datetime(2024, 1, 2, tzinfo=UTC)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(names, inner, max_size=3)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(names, inner, max_size=2).map(kinds.Entries)
    ),
    max_leaves=6,
)


def texts(values: list[Any]) -> pa.Array:
    dumped = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values]
    return pa.array(dumped, pa.string())


def kind(*values: Any) -> Any:
    return kinds.merged_all(kinds.kind_of(kinds.plain(value)) for value in values)


def simple(*values: Any) -> str:
    return kinds.type_of(kind(*values)).simpleString()


@settings(max_examples=300, deadline=None)
@given(st.lists(plains, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_kind_does_not_depend_on_the_order_and_holds_all(
    values: list[Any], chance: random.Random
) -> None:
    found = kinds.merged_all(map(kinds.kind_of, values))
    shuffled = chance.sample(values, len(values))
    cut = chance.randint(0, len(values))
    halves = [
        kinds.merged_all(map(kinds.kind_of, half)) for half in (shuffled[:cut], shuffled[cut:])
    ]
    assert kinds.merged(*halves) == found == kinds.merged(*reversed(halves))
    wanted = kinds.type_of(found)
    fit = kinds.fit(wanted, "state", strict=True)
    made = pa.array([fit(value) for value in values], to_arrow_type(wanted, timezone="UTC"))
    for value, there in zip(values, made.to_pylist(), strict=True):
        assert (value is None) == (there is None)


@settings(max_examples=400, deadline=None)
@given(st.lists(jsons, min_size=1, max_size=6) | st.lists(alike, min_size=1, max_size=6))
def test_arrow_reads_json_just_as_fit_does_or_not_at_all(values: list[Any]) -> None:
    wanted = kinds.type_of(kinds.merged_all(map(kinds.kind_of, values)))
    if kinds.reads_as_json(wanted):
        arrow = to_arrow_type(wanted, timezone="UTC")
        quick = parse_json(texts(values), arrow, strict=True)
        fit = kinds.fit(wanted, "state")
        if quick is not None:
            assert quick.to_pylist() == pa.array(list(map(fit, values)), arrow).to_pylist()


@settings(max_examples=400, deadline=None)
@given(
    st.lists(alike | jsons, min_size=1, max_size=4), st.lists(alike | jsons, min_size=1, max_size=4)
)
def test_what_arrow_says_is_known_adds_nothing(some: list[Any], more: list[Any]) -> None:
    known = kinds.merged_all(map(kinds.kind_of, some))
    arrow = kinds.arrow_of(known)
    if arrow is not None and parse_json(texts(more), arrow, strict=True) is not None:
        assert kinds.merged_all([known, *map(kinds.kind_of, more)]) == known


@settings(max_examples=100, deadline=None)
@given(st.lists(alike, min_size=1, max_size=40))
def test_looking_at_blocks_is_looking_at_each_row(values: list[Any]) -> None:
    seen = SeenKinds()
    for start in range(0, len(values), 7):
        some = texts(values[start : start + 7])
        nothing = pa.nulls(len(some), pa.binary())
        seen.look(Block(some, nothing, {"state": States(some, nothing)}, {}), StateDecoder("step"))
    assert seen.states == kinds.merged_all(map(kinds.kind_of, values))


def test_types_of_states() -> None:
    assert simple(1, 2) == "bigint"
    assert simple(1, 2.5) == "double"
    assert simple(1, 2**70) == "string"
    assert simple(1, 2**70, 0.5) == "double"
    assert simple(True, None) == "boolean"
    assert simple(None) == "string"
    assert simple("a") == "string"
    assert simple(1, "a") == "string"
    assert simple({"a": 1}, {"b": [1.5]}) == "struct<a:bigint,b:array<double>>"
    assert simple({}) == "map<string,string>"
    assert simple([]) == "array<string>"
    assert simple((1, "a"), (2, None)) == "struct<_1:bigint,_2:string>"
    assert simple((1, 2), (1, 2, 3)) == simple((1,), [2]) == "array<bigint>"
    assert simple({1: 0.5}) == "map<string,double>"
    assert simple({"a": 1, "A": 2}) == simple({"a": 1}, {"A": 2}) == "map<string,bigint>"
    assert simple(*({f"user {n}": n} for n in range(1000))) == "map<string,bigint>"
    assert simple({3, 4}) == simple(deque([1])) == "array<bigint>"
    assert simple(datetime(2024, 1, 1, tzinfo=UTC)) == "timestamp"


def test_text_is_text_and_all_else_json() -> None:
    fit = kinds.fit(t.StringType(), "state")
    assert [fit(v) for v in (None, "a", 1, [1, "b"], {"a": True}, (1, 2.5))] == [
        *(None, "a", "1", '[1,"b"]'),
        *('{"a":true}', "[1,2.5]"),
    ]


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int
    y: list[int]


Pair = namedtuple("Pair", ["left", "right"])


def test_objects_as_plain_values() -> None:
    assert kinds.plain(Point(1, [2])) == {"x": 1, "y": [2]}
    assert kinds.plain(Pair(1, 2)) == {"left": 1, "right": 2}
    assert kinds.plain([Colour.RED, Decimal("1.50"), date(2024, 1, 2), timedelta(1)]) == [
        *("RED", "1.50", "2024-01-02", "1 day, 0:00:00"),
    ]
    assert kinds.plain((np.int64(3), np.float64(0.5), np.array([1, 2]))) == (3, 0.5, [1, 2])
    assert kinds.plain({1: "a", "1": "b"}) == {"1": "a", "'1'": "b"}
    assert kinds.plain("\ud800") == "\\ud800"
    assert kinds.plain(b"\x00") == "b'\\x00'"


def test_pickles_of_data_are_opened_and_nothing_else_is() -> None:
    data = [
        *((1, "a"), {1, 2}, frozenset({3}), b"x", float("inf"), 2**80, deque([1], 5)),
        *(defaultdict(list, a=[1]), Counter("aab"), OrderedDict(a=1), Decimal("1.5")),
        *(datetime(2024, 1, 1, tzinfo=UTC), date(2024, 1, 1), timedelta(1)),
    ]
    for value in data:
        assert kinds.unpickle_data(pickle.dumps(value, 5)) == value
    for value in (Point(1, []), Colour.RED, print, np.int64(1)):
        with pytest.raises(SealedError):
            kinds.unpickle_data(pickle.dumps(value, 5))
    with pytest.raises(SealedError, match="system"):
        kinds.unpickle_data(b"cposix\nsystem\n(S'echo pwned'\ntR.")


def test_a_state_that_does_not_fit_says_where() -> None:
    wanted = t.StructType([t.StructField("n", t.ArrayType(t.IntegerType()))])
    fit = kinds.fit(wanted, "state")
    assert fit({"n": [1], "more": 2}) == {"n": [1]}
    with pytest.raises(MisfitError, match=r"column state\.n\[\]: 3000000000 is no int$"):
        fit({"n": [3_000_000_000]})
    with pytest.raises(MisfitError, match=r"column state\.more: 2 is no field"):
        kinds.fit(wanted, "state", strict=True)({"n": [1], "more": 2})
    with pytest.raises(MisfitError, match=r"column state: 5 is no struct<n:array<int>>"):
        fit(5)
    with pytest.raises(
        MisfitError, match=r"column state: .*decimal\(10,0\).* is no type that state"
    ):
        kinds.fit(t.DecimalType(), "state")


def test_times_are_read_from_text_and_microseconds() -> None:
    fit = kinds.fit(t.TimestampType(), "state.at")
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    assert fit("2024-01-01T00:00:00") == fit("2024-01-01T01:00:00+01:00") == moment
    assert fit(int(moment.timestamp() * 1e6)) == moment
    with pytest.raises(MisfitError):
        fit("soon")


def test_what_is_sealed_stays_closed_unless_it_is_asked_for() -> None:
    states = States(pa.nulls(1, pa.string()), pa.array([pickle.dumps(Point(1, []))]))
    keys = pa.array(["ada"])
    assert StateDecoder("step").values(states, keys) == [SEALED]
    assert StateDecoder("step", unpickle=True).values(states, keys) == [{"x": 1, "y": []}]


def test_states_are_the_same_however_they_are_written() -> None:
    assert kinds.same(('{"a":1,"b":[2]}', None), ('{"b":[2],"a":1}', None))
    assert not kinds.same(("1", None), ("1.0", None))
    assert not kinds.same(("1", None), ("true", None))
    one, other = pickle.dumps({"x", "y", "z"}, 5), pickle.dumps({"z", "y", "x"}, 4)
    assert kinds.same((None, one), (None, other))
    assert not kinds.same((None, pickle.dumps((1, 2))), ("[1,2]", None))
