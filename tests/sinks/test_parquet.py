"""Parquet: rows as they came, in files that are whole, or an error that names the item and the column."""

from __future__ import annotations

import datetime as dt
import json
import os
import pickle
from collections import defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sinks.crashing_system import staged, visible

from railgun import ConnectorError, DeadLetter, Parquet, Place, TwoPhaseWriter
from railgun.sinks import parquet
from railgun.sinks.parquet import Rows, inferred


def opened(
    sink: Parquet, worker: int = 0, generation: int = 0, transactional: bool = False
) -> TwoPhaseWriter[Any]:
    writer = sink.open(Place("flow", "out", worker, generation, transactional=transactional))
    assert isinstance(writer, TwoPhaseWriter)
    return writer


def wrote(directory: Path, items: list[Any], schema: Any = None) -> list[dict[str, Any]]:
    writer = opened(Parquet(directory, schema))
    writer.write(items)
    writer.close()
    return rows(directory)


def rows(directory: Path) -> list[dict[str, Any]]:
    tables = [pq.read_table(directory / name) for name in visible(directory)]
    return [row for table in tables for row in table.to_pylist()]


@dataclass
class Point:
    x: int
    y: float = 0.5


@dataclass
class Line:
    name: str
    points: list[Point]
    start: Point


Pair = namedtuple("Pair", ["x", "y"])


# ---------------------------------------------------------------- rows


def test_rows_are_dictionaries_dataclasses_and_tuples(tmp_path: Path) -> None:
    items = [{"x": 1, "y": 2.5}, Point(2), Pair(3, 3.5), defaultdict(int, x=4)]
    expected = [{"x": 1, "y": 2.5}, {"x": 2, "y": 0.5}, {"x": 3, "y": 3.5}, {"x": 4, "y": None}]
    assert wrote(tmp_path / "a", items) == expected
    with_names = [("x", pa.int64()), ("y", pa.float64())]
    assert wrote(tmp_path / "b", [*items, (5, None)], with_names) == [
        *expected,
        {"x": 5, "y": None},
    ]


def test_values_may_hold_others(tmp_path: Path) -> None:
    line = Line("l", [Point(1), Point(2, 3.5)], Point(0))
    assert wrote(tmp_path, [line, {"name": "empty", "points": [], "start": None}]) == [
        {
            "name": "l",
            "points": [{"x": 1, "y": 0.5}, {"x": 2, "y": 3.5}],
            "start": {"x": 0, "y": 0.5},
        },
        {"name": "empty", "points": [], "start": None},
    ]


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    row = {
        "bytes": b"\xff\x00",
        "text": "ü\n",
        "yes": True,
        "date": dt.date(2024, 2, 29),
        "time": dt.datetime(2024, 2, 29, 12, 30, 1, 5),
        "there": dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC),
        "money": Decimal("12.50"),
        "big": 2**63 - 1,
        "tags": ["a", None],
    }
    assert wrote(tmp_path, [row]) == [row]


@given(
    st.lists(
        st.fixed_dictionaries(
            {"n": st.integers(-(2**63), 2**63 - 1), "f": st.floats(allow_nan=False)},
            optional={"s": st.text(), "l": st.lists(st.integers(0, 9))},
        ),
        min_size=1,
    )
)
def test_all_that_is_in_an_item_is_in_its_row(items: list[dict[str, Any]]) -> None:
    schema = pa.schema(
        [("n", pa.int64()), ("f", pa.float64()), ("s", pa.string()), ("l", pa.list_(pa.int64()))]
    )
    back = Rows("out", schema, "").encode(items).to_pylist()
    assert back == [{"s": None, "l": None, **item} for item in items]


def test_dead_letters_are_rows_whatever_they_are_about(tmp_path: Path) -> None:
    letters = [
        DeadLetter("s", ("a", 1), {"plain": 1}, 5, "E", "T"),
        DeadLetter("s", None, {1, 2}, 5, "E", "T"),
    ]
    first, second = wrote(tmp_path, letters)
    assert (json.loads(first["key"]), json.loads(first["record"])) == (["a", 1], {"plain": 1})
    assert (second["key"], second["record"], second["time"]) == ("null", "{1, 2}", 5)


# ---------------------------------------------------------------- what does not fit

DAY = dt.datetime(2024, 1, 1, 12)


@pytest.mark.parametrize(
    ("first", "bad", "told"),
    [
        (1, 1.5, r"1.5 is not int64: 1.5 would become 1"),
        (1, np.float32(1.5), "would become 1"),
        (1, Decimal("1.5"), "is not int64"),
        (1, "1", "'1' is not int64"),
        (1, True, "True is not int64"),
        (1, 2**70, "is not int64: .*too large"),
        ("a", 1, "1 is not string"),
        ("a", b"\xff", "is not string"),
        (1.5, "x", "'x' is not double"),
        (True, 1, "1 is not bool"),
        ([1], 1, r"1 is not list<item: int64>|1 is not list<.*int64>"),
        ([1], [1.5], "1.5 would become 1"),
        ([1], {1.5}, "1.5 would become 1"),
        ({"a": 1}, {"b": 1}, "it has no field 'b'"),
        ([{"a": {"b": 1}}], [{"a": {"b": 1, "c": 2}}], "it has no field 'c'"),
        (dt.date(2024, 1, 1), DAY, r"would become datetime.date\(2024, 1, 1\)"),
        (DAY, DAY.replace(tzinfo=dt.UTC), "would become"),
        ("a", "half \ud83d", "surrogates not allowed"),
        (1, object(), "<object object at .*> is not int64"),
    ],
)
def test_an_item_that_does_not_fit_is_named_with_its_column(
    tmp_path: Path, first: Any, bad: Any, told: str
) -> None:
    writer = opened(Parquet(tmp_path))
    writer.write([{"id": 1, "v": first}])
    with pytest.raises(ConnectorError, match=told) as caught:
        writer.write([{"id": 2, "v": first}, {"id": 3, "v": bad}, {"id": 4, "v": first}])
    said = str(caught.value)
    assert said.startswith("sink 'out' cannot write the dict {'id': 3, 'v': ")
    assert "column 'v'" in said
    assert "give Parquet a schema all items fit" in said
    assert str(tmp_path / ".staged" / "flow" / "out" / "schema") in said
    writer.close()
    assert [row["id"] for row in rows(tmp_path)] == [1], "nothing of the batch"


def test_numbers_that_are_the_same_in_another_type_fit(tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int32()), ("f", pa.float64()), ("t", pa.timestamp("us"))])
    items = [{"n": 2.0, "f": 3, "t": 5}, {"n": np.int64(7), "f": np.float32(0.5), "t": DAY}]
    found = wrote(tmp_path, items, schema)
    assert [row["n"] for row in found] == [2, 7]
    assert [row["f"] for row in found] == [3.0, 0.5]


def test_a_column_that_is_not_in_the_schema_is_named(tmp_path: Path) -> None:
    writer = opened(Parquet(tmp_path, {"x": pa.int64(), "y": pa.float64()}))
    for bad, told in (
        ({"x": 1, "z": 2}, "column 'z': there is no such column, only x, y. .*that was given"),
        ({"x": 1, 3: 2}, "column 3: there is no such column"),
        (Line("l", [], Point(1)), "the Line .*: column 'name': there is no such column"),
        ((1, 2, 3), r"the tuple \(1, 2, 3\): it has 3 values for the 2 columns x, y"),
        (7, "cannot write the int 7: a row is a dictionary"),
        (None, "cannot write the NoneType None"),
        ("xy", "cannot write the str 'xy'"),
        (Point, "cannot write the type "),
    ):
        with pytest.raises(ConnectorError, match=told):
            writer.write([{"x": 1}, bad])
    writer.close()
    assert visible(tmp_path) == {}


def test_a_column_that_must_not_be_null(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("v", pa.int64())])
    writer = opened(Parquet(tmp_path, schema))
    with pytest.raises(
        ConnectorError, match=r"\{'v': 7\}: column 'id': null in a column that is not"
    ):
        writer.write([{"id": 1}, {"v": 7}])
    writer.write([{"id": 1}])
    writer.close()


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ([{"a": 1, "b": None}], "the type of column 'b' cannot be told from the first items"),
        ([{"b": []}], "the type of column 'b' cannot be told"),
        ([{"b": {}}], "the type of column 'b' cannot be told"),
        ([{"b": {"c": [None]}}], "the type of column 'b' cannot be told"),
        ([{"b": 1}, {"b": "x"}], "no type holds the values of column 'b'"),
        ([{"b": object()}], "no type holds the values of column 'b'"),
        ([{}], "has no columns"),
        ([{1: 2}], "1 cannot be the name of a column"),
        ([(1, 2)], r"the columns of the tuple \(1, 2\) have no names: give Parquet a schema"),
    ],
)
def test_first_items_that_make_no_schema(tmp_path: Path, items: list[Any], told: str) -> None:
    writer = opened(Parquet(tmp_path))
    with pytest.raises(ConnectorError, match=told):
        writer.write(items)
    writer.close()
    assert visible(tmp_path) == {}


def test_what_is_no_schema_is_refused(tmp_path: Path) -> None:
    for bad in (3, ["x"], {"x": "nonsense"}, [], [("x", pa.int64()), ("x", pa.string())]):
        with pytest.raises(ConnectorError, match=r"Parquet\('.*'\): "):
            Parquet(tmp_path, bad)


# ---------------------------------------------------------------- one schema for all


def test_the_first_items_decide_for_all_workers_and_runs(tmp_path: Path) -> None:
    first, second = opened(Parquet(tmp_path)), opened(Parquet(tmp_path), worker=1)
    first.write([{"n": 1.5, "s": "a"}])
    second.write([{"n": 2}])
    first.close()
    second.close()
    third = opened(Parquet(tmp_path), generation=5)
    third.write([{"s": "b"}])
    with pytest.raises(ConnectorError, match="column 'other': there is no such column, only n, s"):
        third.write([{"other": 1}])
    third.close()
    schemas = {pq.read_schema(tmp_path / name) for name in visible(tmp_path)}
    assert schemas == {pa.schema([("n", pa.float64()), ("s", pa.string())])}
    assert len(pd.read_parquet(tmp_path)) == 3


def test_workers_that_see_their_first_items_at_the_same_time_agree(tmp_path: Path) -> None:
    path = tmp_path / "schema"
    assert parquet._write(path, b"first") == b"first"
    assert parquet._write(path, b"second") == b"first"
    assert [found.name for found in tmp_path.iterdir()] == ["schema"]


def test_a_damaged_schema_is_named(tmp_path: Path) -> None:
    writer = opened(Parquet(tmp_path))
    (tmp_path / ".staged" / "flow" / "out" / "schema").write_bytes(b"nonsense")
    with pytest.raises(ConnectorError, match=r"the schema in .*/schema is damaged .*: delete it"):
        writer.write([{"n": 1}])


def test_the_sink_travels_to_the_workers(tmp_path: Path) -> None:
    sink = pickle.loads(pickle.dumps(Parquet(tmp_path, {"n": pa.int8()})))
    writer = opened(sink)
    writer.write([(1,)])
    writer.close()
    assert rows(tmp_path) == [{"n": 1}]


# ---------------------------------------------------------------- files


def test_one_file_for_each_snapshot_and_worker_in_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_GROUP_BYTES", 10_000)
    sink = Parquet(tmp_path)
    writers = [opened(sink, worker, 4, transactional=True) for worker in range(2)]
    tokens = []
    for snapshot in (7, 8):
        for at, writer in enumerate(writers):
            for n in range(100):
                writer.write([{"w": at, "n": n, "s": "x" * 100, "snapshot": snapshot}] * 5)
                writer.flush()
            tokens.append(writer.prepare(snapshot))
            assert writer.prepare(snapshot) is None
    assert visible(tmp_path) == {}
    for token in tokens:
        sink.commit(json.loads(json.dumps(token)))
    assert [name.rsplit("-", 1)[0] for name in visible(tmp_path)] == [
        "part-out-7-0-4", "part-out-7-1-4", "part-out-8-0-4", "part-out-8-1-4",
    ]  # fmt: skip
    for name in visible(tmp_path):
        about = pq.read_metadata(tmp_path / name)
        assert about.num_rows == 500
        assert about.num_row_groups > 3
        assert about.row_group(0).column(0).compression == "ZSTD"
    found = pd.read_parquet(tmp_path)
    assert len(found) == 2_000
    assert found[found.w == 1].n.to_list() == [n for n in range(100) for _ in range(5)] * 2


def test_without_snapshots_a_file_appears_when_it_is_old_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000.0]
    monkeypatch.setattr(parquet._Writer, "clock", lambda self: now[0])
    writer = opened(Parquet(tmp_path, every=60), worker=2, generation=3)
    seen = []
    for second in range(200):
        now[0] = 1_000.0 + second
        if second < 100:
            writer.write([{"n": second}])
        writer.flush()
        seen.append(len(visible(tmp_path)))
    assert [seen.index(files) for files in range(1, max(seen) + 1)] == [60, 121]
    assert all(name.startswith("part-out-2-3-") for name in visible(tmp_path))
    assert sorted(row["n"] for row in rows(tmp_path)) == list(range(100))
    writer.close()
    writer.close()
    assert len(visible(tmp_path)) == 2


def test_without_snapshots_a_file_appears_when_it_is_large_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_GROUP_BYTES", 1_000)
    writer = opened(Parquet(tmp_path, size=5_000))
    for n in range(1_000):
        writer.write([{"n": n, "s": f"{n * 7919 % 1000}" * 5}])
    assert len(visible(tmp_path)) > 1
    writer.close()
    assert staged(tmp_path) == []
    assert sorted(row["n"] for row in rows(tmp_path)) == list(range(1_000))
    assert max(map(len, visible(tmp_path).values())) < 12_000


def test_at_least_once_a_file_appears_with_each_snapshot(tmp_path: Path) -> None:
    sink = Parquet(tmp_path, mode="at-least-once")
    writer = opened(sink, transactional=True)
    writer.write([{"n": 1}])
    assert visible(tmp_path) == {}
    assert writer.prepare(1) is None
    assert rows(tmp_path) == [{"n": 1}]
    assert writer.prepare(2) is None
    writer.write([{"n": 2}])
    sink.recover("flow", "out", 0, [])
    writer.close()
    assert sorted(row["n"] for row in rows(tmp_path)) == [1, 2]
    assert staged(tmp_path) == []


def test_a_file_that_cannot_appear_is_an_error_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(Parquet(tmp_path))
    writer.write([{"n": 1}])

    def fails(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(ConnectorError, match=r"sink 'out' cannot rename .*: Permission denied"):
        writer.close()
    writer.close()
    assert (visible(tmp_path), staged(tmp_path)) == ({}, [])


def test_a_schema_of_first_items() -> None:
    assert inferred("out", [Point(1), {"z": "a"}]) == pa.schema(
        [("x", pa.int64()), ("y", pa.float64()), ("z", pa.string())]
    )


READERS: list[Callable[[Path], int]] = [
    lambda path: len(pd.read_parquet(path)),
    lambda path: int(pq.read_table(path).num_rows),
    lambda path: sum(pq.read_metadata(file).num_rows for file in path.glob("*.parquet")),
    lambda path: sum(pq.read_metadata(file).num_rows for file in path.rglob("*.parquet")),
]


@pytest.mark.parametrize("reader", READERS)
def test_readers_pass_over_what_is_staged(tmp_path: Path, reader: Callable[[Path], int]) -> None:
    sink = Parquet(tmp_path)
    writer = opened(sink, transactional=True)
    writer.write([{"n": 1}] * 3)
    token = writer.prepare(1)
    writer.write([{"n": 2}] * 5)
    writer.prepare(2)
    writer.write([{"n": 3}] * 7)
    sink.commit(token)
    assert reader(tmp_path) == 3
    writer.close()
