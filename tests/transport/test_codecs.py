"""Columns and batches as bytes: what comes out is what went in, of the same types; what is no column is refused."""

from __future__ import annotations

import enum
import math
import pickle
import threading
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from railgun.hashing import hash_keys
from railgun.transport.columns import DecodingError, EncodingError, decode_column, encode_column
from railgun.transport.rows import RowBatch


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Pair(tuple[int, int]):
    __slots__ = ()


class Named(NamedTuple):
    name: str
    size: int


Untyped = namedtuple("Untyped", "a b")


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


@dataclass(frozen=True)
class Point:
    x: int
    y: float


def same(a: Any, b: Any) -> bool:
    """Equal, of equal types, all the way down; NaN is NaN and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (a != a and b != b))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(),
    st.text(),
    st.text(st.characters(exclude_categories=())),  # also half surrogate pairs
    st.text("a\0"),
    st.binary(),
)
odd = st.sampled_from(
    [
        *(
            Text("a"),
            Number(1),
            Pair((1, 2)),
            Named("a", 1),
            Untyped(1, "b"),
            Colour.RED,
            Level.LOW,
        ),
        *(Word.YES, Point(1, 2.0), True, False, 1, 0, 1.0, -0.0, "yes", (1, 2), ("a", 1), ()),
        *(np.int64(1), np.float64(1.0), np.str_("a"), 1 << 63, -(1 << 63), (1 << 63) - 1, "\ud800"),
    ]
)
values = st.recursive(
    st.one_of(plain, odd),
    lambda inner: st.one_of(
        st.tuples(inner),
        st.tuples(inner, inner),
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)
columns = st.one_of(
    st.lists(values, max_size=8),
    st.lists(odd, max_size=8),
    st.lists(st.integers(-(1 << 64), 1 << 64)),
    st.lists(st.floats()),
    st.lists(st.text(st.characters(exclude_categories=()))),
    st.lists(st.tuples(st.text(), st.integers())),
    st.lists(st.tuples(st.tuples(st.tuples(st.tuples(st.integers()), st.text())), st.none())),
    st.lists(st.none()),
)


@given(columns)
@example([])
@example([""])
@example(["", ""])
@example(["\0"])
@example(["a\0b", "c"])
@example(["\ud83d", "\ude00"])
@example([True, False])
@example([1, True])
@example([Level.LOW, Level.LOW])
@example([Named("a", 1), Named("b", 2)])
@example([Text("a")])
@example([(Text("a"), Number(1)), (Text("b"), Number(2))])
@example([(), ()])
@example([(1,), (1, 2)])
@example([((((1,),),),)])
@example([math.nan, -0.0, math.inf])
@example([(math.nan, "x")])
@example([1 << 63])
@example([None])
def test_a_column_comes_back_as_it_was(column: list[Any]) -> None:
    data = encode_column(column)
    back = decode_column(data, len(column))
    assert same(back, column)
    assert same(decode_column(memoryview(b"xx" + data)[2:], len(column)), column)


FAST: dict[bytes, list[Any]] = {
    b"s": ["a", "", "\ud800"],
    b"p": ["a", "b\0"],
}


@pytest.mark.parametrize(("tag", "column"), FAST.items(), ids=[t.decode() for t in FAST])
def test_plain_columns_take_the_fast_way(tag: bytes, column: list[Any]) -> None:
    assert encode_column(column)[:1] == tag


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(EncodingError, match="a value of type lock cannot be sent between workers"):
        encode_column([1, threading.Lock()])
    with pytest.raises(EncodingError, match=r"a value of type tuple cannot be sent .*lock"):
        encode_column([("a", threading.Lock())])
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(EncodingError):
        encode_column([deep])
    while deep:  # let go of it without a deep recursion
        deep = deep[0]


def decoded_or_refused(data: bytes, rows: int) -> None:
    try:
        column = decode_column(data, rows)
    except DecodingError:
        return
    assert len(column) == rows


@given(st.binary(max_size=60), st.integers(0, 5))
def test_garbage_is_refused(data: bytes, rows: int) -> None:
    decoded_or_refused(data, rows)


@given(st.sampled_from(b"st\0\xff"), st.binary(max_size=60), st.integers(0, 5))
def test_garbage_behind_a_good_tag_is_refused(tag: int, data: bytes, rows: int) -> None:
    decoded_or_refused(bytes([tag]) + data, rows)


@given(columns, st.data())
def test_a_column_cut_short_is_refused(column: list[Any], data: st.DataObject) -> None:
    whole = encode_column(column)
    cut = data.draw(st.integers(0, len(whole) - 1))
    decoded_or_refused(whole[:cut], len(column))


@given(columns, st.integers(0, 5))
def test_a_column_of_another_length_is_refused(column: list[Any], rows: int) -> None:
    decoded_or_refused(encode_column(column), rows)


def test_a_pickle_of_something_else_is_refused() -> None:
    with pytest.raises(DecodingError, match="has not the 1 values"):
        decode_column(b"p" + pickle.dumps({"a": 1}), 1)
    with pytest.raises(DecodingError, match="cannot be read"):
        decode_column(b"p" + pickle.dumps(["a"])[:-1], 1)
    with pytest.raises(DecodingError, match="cannot begin with b''"):
        decode_column(b"", 0)


# ---------------------------------------------------------------- batches

keys = st.one_of(
    st.lists(st.text()),
    st.lists(st.integers()),
    st.lists(st.one_of(st.text(), st.integers(), st.tuples(st.text(), st.integers()), st.none())),
)


@given(keys, st.data(), st.integers(0, 65_535))
def test_a_batch_comes_back_as_it_was(column: list[Any], data: st.DataObject, port: int) -> None:
    rows = len(column)
    items = data.draw(st.lists(values, min_size=rows, max_size=rows))
    time = st.integers(-(1 << 63), (1 << 63) - 1)
    times: Any = data.draw(st.one_of(time, st.lists(time, min_size=rows, max_size=rows)))
    if isinstance(times, list):
        times = np.array(times, dtype=np.int64)
    batch = RowBatch.keyed(column, items, times, port)
    back = RowBatch.decode(batch.encode())
    assert same(back.keys, column)
    assert same(back.values, items)
    assert list(back.each_time()) == list(batch.each_time())
    assert isinstance(back.times, int) == isinstance(times, int)
    assert (back.hashes == hash_keys(column)).all()
    assert back.port == port


@given(keys, st.data())
def test_a_batch_of_some_rows(column: list[Any], data: st.DataObject) -> None:
    batch = RowBatch.keyed(column, list(range(len(column))), np.arange(len(column)), 3)
    rows = data.draw(st.lists(st.integers(0, max(0, len(column) - 1)))) if column else []
    some = batch.take(np.array(rows, dtype=np.intp))
    assert some.values == rows == list(some.each_time())
    assert some.keys == [column[row] for row in rows]
    assert (some.hashes == batch.hashes[rows]).all() if rows else len(some) == 0
    assert some.port == 3


@given(st.binary(max_size=80))
def test_garbage_is_no_batch(data: bytes) -> None:
    try:
        batch = RowBatch.decode(data)
    except DecodingError:
        return
    assert len(batch.values) == len(batch.keys or []) == len(batch.hashes)


@given(st.lists(st.tuples(st.text(), st.integers()), max_size=5), st.data())
def test_a_damaged_batch_is_refused_or_whole(column: list[Any], data: st.DataObject) -> None:
    whole = bytearray(RowBatch.keyed(column, column, np.arange(len(column))).encode())
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole = whole[:at]
    elif whole[at] != ord("p"):  # what is pickled is trusted
        whole[at] ^= data.draw(st.integers(1, 255))
    try:
        batch = RowBatch.decode(bytes(whole))
    except DecodingError:
        return
    assert len(batch.values) == len(batch.keys or []) == len(batch.hashes)


def test_a_batch_without_keys_does_not_travel() -> None:
    with pytest.raises(DecodingError):
        RowBatch.decode(RowBatch([1, 2], 0).encode())
