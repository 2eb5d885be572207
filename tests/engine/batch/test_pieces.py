"""Pieces: encoded and decoded, sorted out and merged, records keep their places and their order."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railgun.engine.batch import order as o
from railgun.engine.batch.columns import as_items, as_list, as_order, column_of, hashes_of
from railgun.engine.batch.pieces import Merge, Piece, decode, encode_table, narrowed
from railgun.engine.batch.sorting import Sorter
from railgun.hashing import hash_keys
from railgun.transport.rows import RowBatch

whole = st.integers(-(1 << 62), 1 << 62)


@given(st.lists(st.tuples(whole, whole), min_size=1, max_size=50), st.integers(0, 9))
def test_a_piece_comes_out_as_it_went_in(paths: list[tuple[int, int]], port: int) -> None:
    columns = tuple(np.array(column, dtype=np.int64) for column in zip(*paths, strict=True))
    values: list[Any] = [{"n": n} for n, _ in enumerate(paths)]
    piece = Piece(columns, list(range(len(paths))), values, columns[1], port)
    back = decode(memoryview(piece.encode()))
    assert [column.tolist() for column in back.paths] == [column.tolist() for column in columns]
    assert (back.keys, back.values, back.port) == (piece.keys, piece.values, port)
    assert not isinstance(back.times, int)
    assert back.times.tolist() == columns[1].tolist()


@pytest.mark.parametrize("largest", [1, 127, 128, 40_000, 1 << 40])
def test_a_table_comes_out_as_it_went_in(largest: int) -> None:
    numbers = [0, -largest, largest, None, 5]
    table = pa.RecordBatch.from_pydict(
        {"k": ["a", "b", "a", "c", "d"], "n": pa.array(numbers, pa.int64()), "x": [1.5] * 5}
    )
    places = (np.arange(5), np.arange(5) * 1000)
    back = decode(memoryview(encode_table(table, places, 7, 1)))
    assert back.keys == ["a", "b", "a", "c", "d"]
    assert back.values == [{"n": n, "x": 1.5} for n in numbers]
    assert (back.times, back.port) == (7, 1)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1))
def test_narrow_numbers_are_the_same_numbers(numbers: list[int]) -> None:
    table = pa.RecordBatch.from_pydict({"n": pa.array(numbers, pa.int64())})
    assert narrowed(table).column(0).to_pylist() == numbers


paths_of = st.lists(st.lists(whole, min_size=1, max_size=4), min_size=2, max_size=2)


@given(paths_of)
def test_bytes_compare_as_paths_do(two: list[list[int]]) -> None:
    left, right = map(tuple, two)
    assert (left < right) == (o.as_bytes(left) < o.as_bytes(right))
    assert o.from_bytes(o.as_bytes(left)) == left


@pytest.mark.parametrize("seed", range(30))
def test_what_is_sorted_out_and_merged_is_in_order(seed: int) -> None:
    """Tasks that each have some of the records, and a task behind the shuffle that has some of the keys."""
    rng = random.Random(seed)
    parts, tasks, count = rng.randint(1, 4), rng.randint(1, 5), rng.randint(0, 400)
    share = [[n for n in range(count) if n % tasks == task] for task in range(tasks)]
    rows = []
    for task, mine in enumerate(share):
        sorter = Sorter(1, parts)
        while mine:
            some, mine = mine[: rng.randint(1, 40)], mine[40:]
            port = rng.randint(0, 1)
            keys = [f"k{n % 11}" for n in some]
            depth = (np.array(some, dtype=np.int64), np.full(len(some), task))
            order = depth if port else (*depth, np.arange(len(some)))
            sorter.add(order, RowBatch(some, 0, keys, hash_keys(keys), port))
            if rng.random() < 0.4:
                rows += sorter.flush()
        rows += sorter.flush()
    found = []
    for part in range(parts):
        merge = Merge()
        released: list[int] = []
        for row in sorted((row for row in rows if row.part == part), key=lambda row: row.first):
            if rng.random() < 0.5:
                complete = merge.release(o.from_bytes(row.first))
                released += [] if complete is None else complete.values
            merge.add(decode(memoryview(row.blob)))
        last = merge.release()
        released += [] if last is None else last.values
        assert released == sorted(released)
        found += released
    assert sorted(found) == sorted(n for row in rows for n in decode(memoryview(row.blob)).values)
    assert len(found) == sum(len(decode(memoryview(row.blob))) for row in rows)


def test_what_a_merge_holds_is_bounded() -> None:
    """Pieces of many tasks, each a short stretch: what stands before the next one is let go."""
    merge, most = Merge(), 0
    for at in range(200):
        for task in range(5):
            start = at * 100 + task
            places = (np.arange(start, start + 120), np.full(120, task))
            piece = Piece(places, [0] * 120, [0] * 120, 0, 0)
            if merge.rows >= 1000:
                merge.release(o.first(places))
            merge.add(piece)
            most = max(most, merge.rows)
    assert most < 3000


def test_hashes_of_columns_are_those_of_keys() -> None:
    columns: list[pa.Array] = [
        pa.array([1, -5, 1 << 40]),
        pa.array([1, 200], pa.uint8()),
        pa.array([1, (1 << 64) - 1], pa.uint64()),
        pa.array(["ada", "", "grüße", "x" * 100]),
        pa.array(["ada", None]),
        pa.array([1.0, 2.5, None]),
        pa.array([b"a", b""]),
        pa.array(["a", "b", "c", "d"]).slice(1, 2),
        pa.array([True, False]),
    ]
    for column in columns:
        assert hashes_of(column).tolist() == hash_keys(column.to_pylist()).tolist()
        assert as_list(column) == column.to_pylist()


def test_numbers_that_stand_in_the_order_of_values() -> None:
    floats = [float("-inf"), -2.5, -0.0, 0.0, 1e-300, 3.5, float("inf")]
    assert as_order(pa.array(floats)).tolist() == sorted(as_order(pa.array(floats)).tolist())
    for odd in (float("nan"), -float("nan")):  # whatever its sign, it comes last
        assert as_order(pa.array([odd, float("inf")])).tolist() == sorted(
            as_order(pa.array([odd, float("inf")])).tolist(), reverse=True
        )
    assert as_order(pa.array([None, float("-inf")])).tolist()[0] == -(1 << 63)
    both = as_order(pa.array([-0.0, 0.0])).tolist()
    assert both[0] == both[1]
    for column in (pa.array([None, -3, 7]), pa.array([None, -3, 7], pa.timestamp("us"))):
        numbers = as_order(column).tolist()
        assert numbers == sorted(numbers)
    assert as_order(pa.array(["a"])) is None


def test_functions_that_look_a_column_up() -> None:
    from operator import attrgetter, itemgetter

    name = "who"

    def looks_up(row: Any) -> Any:
        return row["who"]

    assert column_of(lambda row: row["who"]) == "who"
    assert column_of(itemgetter("who")) == "who"
    assert column_of(looks_up) in ("who", None)  # a docstring or a name may make it look different
    others: list[Any] = [
        lambda row: row[name], lambda row: row["who"].lower(), lambda row: row["a"]["b"], lambda row: row[0],
        lambda *row: row["who"], lambda row, other=1: row["who"], itemgetter("a", "b"), itemgetter(0), attrgetter("a"),
        len, None,
    ]  # fmt: skip
    for other in others:
        assert column_of(other) is None


def test_rows_are_items() -> None:
    assert as_items([], [], 2) == [{}, {}]
    maps = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))
    assert as_items(["m", "s"], [maps, pa.array([{"x": 1}])], 1) == [{"m": {"a": 1}, "s": {"x": 1}}]
