"""The state of a flow as a Spark table: what the flow has, key by key; and errors that say what there is instead."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from pyarrow.fs import LocalFileSystem
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import types as t

from railgun import FORGET, Collect, Flow, Items, state_changes, state_table
from railgun.engine.controller.snapshot_directory import NoSnapshotsError
from railgun.engine.snapshots.errors import DamagedError
from railgun.engine.snapshots.manifest import Manifest, Part, StepInfo
from railgun.engine.snapshots.store import SnapshotStore
from railgun.engine.snapshots.table import TableWriter
from railgun.hashing import hash_keys
from railgun.spark import saved_changes, saved_rows
from railgun.spark import state_table as tables
from railgun.spark.kinds import MisfitError
from railgun.spark.saved_changes import StepChanges
from railgun.spark.saved_rows import SavedStep, StepRows
from railgun.spark.session import SparkSession
from railgun.spark.state_table import StateTableError, Table
from railgun.spark.states import StateDecoder
from railgun.storage.errors import MissingError
from railgun.storage.object_store import ArrowDisk, LocalDisk
from railgun.testing.flow_tester import FlowTester

pytestmark = pytest.mark.spark
KEYS = 40


class Written:
    """A directory of snapshots, written without a flow; and what is in each, as dictionaries."""

    def __init__(self, where: Path, step: str = "total", flow: str = "demo") -> None:
        self.where = str(where)
        self.step = step
        self.store = SnapshotStore(self.where, flow)
        self.store.acquire()
        self.number = 0
        self.parts: tuple[Part, ...] = ()
        self.state: dict[Any, Any] = {}
        self.states: dict[int, dict[Any, Any]] = {}

    def save(
        self,
        *files: dict[Any, Any],
        full: bool = False,
        version: int = 1,
        timers: dict[Any, list[int]] | None = None,
        kind: str = "reduce",
    ) -> int:
        """A snapshot: of each worker the keys it saves; the state `FORGET` says that a key is deleted."""
        self.number += 1
        parts = []
        alive: dict[Any, Any] = {}
        gone: set[Any] = set()
        for worker, rows in enumerate(files):
            writer = TableWriter(self.step, version)
            keys, states = list(rows), list(rows.values())
            deleted = [state is FORGET for state in states]
            times = [(timers or {}).get(key, []) for key in keys]
            writer.add(hash_keys(keys), keys, states, times, [False] * len(keys), deleted)
            data = writer.finish()
            where = (self.number, 1, "stage", self.step, worker)
            parts.append(self.store.write_part(*where, data, len(keys)))
            gone |= {key for key, state in rows.items() if state is FORGET}
            alive |= {key: state for key, state in rows.items() if state is not FORGET}
        for key in gone:
            self.state.pop(key, None)
        self.state = alive if full else self.state | alive
        self.parts = tuple(parts) if full else (*self.parts, *parts)
        at = 1_700_000_000.0 + self.number
        steps = (StepInfo(self.step, kind, version), StepInfo("out", "sink", 1))
        head = (1, self.store.flow, self.number, 1, len(files), full, False, at - 1, at)
        self.store.commit(Manifest(*head, self.parts, (), steps))
        self.states[self.number] = dict(self.state)
        return self.number

    def find(self, number: int | None = None) -> SavedStep:
        return SavedStep.find(self.where, number, None, self.step)

    def at(self, number: int) -> str:
        return f"{self.where}#{number}"


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    made = Written(tmp_path / "snapshots")
    yield made
    made.store.release()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of many groups, and batches and shares of a few rows."""
    monkeypatch.setattr("railgun.engine.snapshots.table._GROUP_ROWS", 7)
    for module in (saved_rows, saved_changes):
        monkeypatch.setattr(module, "BATCH_ROWS", 3)


def rows_of(frame: Any) -> dict[Any, Any]:
    """A table as a dictionary; a key that is in there twice is an error."""
    rows = frame.select("key", "state").collect()
    found = {row.key: value_of(row.state) for row in rows}
    assert len(found) == len(rows)
    return found


def value_of(state: Any) -> Any:
    return state.asDict(recursive=True) if isinstance(state, t.Row) else state


# ------------------------------------------------------------ what flows save


def live(state: Any, item: int) -> tuple[Any, int]:
    """Every key dies now and then."""
    made = state | {"n": state["n"] + 1, "last": item}
    return FORGET if made["n"] == 5 else made, item


def counting(upgrades: Sequence[Callable[[Any], Any]] = ()) -> Flow:
    flow = Flow("lives")
    numbers = flow.source(Items(list[int]()), name="numbers")
    keyed = numbers.key_by(lambda n: f"key {n % KEYS}")
    lives = keyed.stateful_map(live, lambda: {"n": 0}, name="lives", upgrades=upgrades)
    lives.sink(Collect(), name="out")
    return flow


def test_the_table_of_a_snapshot_is_the_state_at_that_moment(
    spark: SparkSession, tmp_path: Path
) -> None:
    chance = random.Random(1)
    tester = FlowTester(counting(), 2, feed=["numbers"], snapshots=LocalDisk(tmp_path))
    states: dict[int, dict[Any, Any]] = {}
    for _ in range(6):
        tester.feed("numbers", [chance.randrange(KEYS) for _ in range(chance.randint(5, 60))])
        if chance.random() < 0.7:
            tester.rescale(chance.randint(1, 5))
        if chance.random() < 0.3:
            tester.crash(tester.workers[0])
        number = tester.snapshot()
        assert number is not None
        states[number] = tester.state("lives")
    where = str(tmp_path)
    kept = sorted(states)[-3:]
    for number in kept:
        assert rows_of(state_table(spark, f"{where}#{number}", "lives")) == states[number]
    assert rows_of(state_table(spark, tmp_path, "lives")) == states[kept[-1]]
    before, after = states[kept[0]], states[kept[-1]]
    frame = state_changes(spark, kept[0], where, "lives")
    changes = {row.key: (row.change, row.before, row.after) for row in frame.collect()}
    assert {key: what for key, (what, *_) in changes.items()} == expected_changes(before, after)
    for key, (_, was, now) in changes.items():
        assert (value_of(was), value_of(now)) == (before.get(key), after.get(key))


def expected_changes(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, str]:
    found = dict.fromkeys(before.keys() - after.keys(), "removed")
    found |= dict.fromkeys(after.keys() - before.keys(), "added")
    both = before.keys() & after.keys()
    return found | {key: "changed" for key in both if repr(before[key]) != repr(after[key])}


@pytest.mark.parametrize("seed", range(10))
def test_a_table_is_what_workers_would_load_also_if_keys_moved_while_it_was_saved(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    tester = FlowTester(counting(), 2, feed=["numbers"], seed=seed, snapshots=LocalDisk(tmp_path))
    for _ in range(6):
        numbers = [chance.randrange(KEYS) for _ in range(chance.randint(5, 80))]
        tester.feed("numbers", numbers, settle=chance.random() < 0.5)
        tester.rescale(chance.randint(1, 5), settle=False)
        tester.run(chance.randint(0, 40))
        tester.snapshot(settle=False)
        tester.run(chance.randint(0, 40))
        tester.feed("numbers", numbers[:5])
    close(tester)
    found = saved_values(StepRows(SavedStep.find(str(tmp_path), None, None, "lives")), 50)
    loaded = FlowTester(counting(), 3, feed=["numbers"], snapshots=LocalDisk(tmp_path))
    assert found == {shown(key): state for key, state in loaded.state("lives").items()}
    assert found
    close(loaded)


def close(tester: FlowTester) -> None:
    assert tester.world.keeper is not None
    tester.world.keeper.close()


def test_a_source_shows_its_parts_and_positions(spark: SparkSession, tmp_path: Path) -> None:
    tester = FlowTester(counting(), feed=["numbers"], snapshots=LocalDisk(tmp_path))
    tester.feed("numbers", range(50))
    tester.snapshot()
    [row] = state_table(spark, tmp_path, "numbers").collect()
    assert (row.key, row.state.position, row.state.finished) == ("fed", 50, False)


def test_timers_and_when_a_key_changed(spark: SparkSession, written: Written) -> None:
    written.save({"a": 1, "b": 2}, full=True, timers={"a": [1_700_000_000_000_000, 5]})
    written.save({"b": 3})
    rows = {row.key: row for row in state_table(spark, written.where, "total").collect()}
    epoch = [int(time.timestamp() * 1e6) for time in rows["a"].timers]
    assert epoch == [1_700_000_000_000_000, 5]
    assert rows["b"].timers == []
    assert [rows[key].changed_at.timestamp() for key in "ab"] == [1_700_000_001, 1_700_000_002]
    assert [(rows[key].saved, rows[key].worker, rows[key].ended) for key in "ab"] == [
        *((1, 0, False), (2, 0, False)),
    ]


def test_when_a_key_changed_is_known_also_if_that_snapshot_is_cleaned_away(
    spark: SparkSession, tmp_path: Path
) -> None:
    tester = FlowTester(counting(), feed=["numbers"], snapshots=LocalDisk(tmp_path))
    for numbers in (range(KEYS), [2], [3], [4], [5]):
        tester.feed("numbers", numbers)
        tester.snapshot()
    with pytest.raises(MissingError, match="no snapshot 1; it has 3, 4, 5"):
        state_table(spark, f"{tmp_path}#1", "lives")
    rows = state_table(spark, tmp_path, "lives").collect()
    times = {row.saved: row.changed_at for row in rows}
    assert None not in times.values()
    assert [times[number] for number in sorted(times)] == sorted(set(times.values()))
    assert sorted(times) == [1, 2, 3, 4, 5]


# ------------------------------------------------------------ merging


def random_state(chance: random.Random) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: chance.randint(0, 3),
        lambda: {"n": chance.randint(0, 2)},
        lambda: (chance.randint(0, 2), "x"),
        lambda: [chance.randint(0, 1)],
        lambda: None,
    ]
    return chance.choice(kinds)()


def save_at_random(written: Written, chance: random.Random) -> None:
    """A few snapshots; keys move between workers, one of which may call a key deleted that lives on another."""
    keys = [*(f"k{n}" for n in range(20)), *range(20), *((n, "t") for n in range(5))]
    for number in range(chance.randint(2, 6)):
        full = number == 0 or chance.random() < 0.2
        workers = chance.randint(1, 4)
        files: list[dict[Any, Any]] = [{} for _ in range(workers)]
        for key in keys:
            if not full and chance.random() < 0.6:
                continue
            dies = chance.random() < 0.3
            owner = chance.randrange(workers)
            if not (full and dies):
                files[owner][key] = FORGET if dies else random_state(chance)
            if not dies and not full and chance.random() < 0.3:
                files[(owner + 1) % workers].setdefault(key, FORGET)
        written.save(*files, full=full)


def saved_values(table: StepRows, rows: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for share in table.shares(rows):
        for block in table.blocks(share):
            values = StateDecoder("total").values(block.states["state"], block.keys)
            for key, pickled, value in zip(
                block.keys.to_pylist(), block.key_pickles.to_pylist(), values, strict=True
            ):
                name = shown(key if pickled is None else pickle.loads(pickled))
                assert name not in found
                found[name] = value
    return found


def shown(key: Any) -> str:
    return repr(key)


@pytest.mark.parametrize("seed", range(40))
def test_merging_is_what_a_dictionary_does(tmp_path: Path, seed: int, tiny: None) -> None:
    chance = random.Random(seed)
    written = Written(tmp_path)
    save_at_random(written, chance)
    for number, state in written.states.items():
        found = saved_values(StepRows(written.find(number)), chance.randint(1, 30))
        assert found == {shown(key): value for key, value in state.items()}
    written.store.release()


@pytest.mark.parametrize("seed", range(20))
def test_changes_are_what_differs_between_dictionaries(
    tmp_path: Path, seed: int, tiny: None
) -> None:
    chance = random.Random(seed)
    written = Written(tmp_path)
    save_at_random(written, chance)
    numbers = list(written.states)
    for _ in range(3):
        one, other = chance.choice(numbers), chance.choice(numbers)
        table = StepChanges(written.find(one), written.find(other))
        before, after = written.states[one], written.states[other]
        found: dict[str, str] = {}
        for share in table.shares(chance.randint(20, 60)):
            for block in table.blocks(share):
                was, now = (
                    StateDecoder("total").values(block.states[side], block.keys)
                    for side in ("before", "after")
                )
                keys, pickles = block.keys.to_pylist(), block.key_pickles.to_pylist()
                for row, change in enumerate(block.columns["change"].to_pylist()):
                    key = keys[row] if pickles[row] is None else pickle.loads(pickles[row])
                    assert shown(key) not in found
                    found[shown(key)] = change
                    assert (was[row], now[row]) == (before.get(key), after.get(key))
        told = expected_changes(before, after)
        assert found == {shown(key): change for key, change in told.items()}
        if one == other:
            assert len(table) == 0  # files of both are not even opened
    written.store.release()


def test_each_row_is_read_by_one_task_and_large_files_by_several(
    written: Written, tiny: None
) -> None:
    written.save({f"k{n}": n for n in range(100)}, {f"w{n}": n for n in range(5)}, full=True)
    table = StepRows(written.find())
    assert len(table.shares(7)) >= 15
    assert len(table.shares(1000)) == 1
    whole = sorted(row for share in table.shares(7) for block in table.blocks(share)
                   for row in block.keys.to_pylist())  # fmt: skip
    assert whole == sorted(written.state)


def test_many_small_files_are_read_together(written: Written) -> None:
    written.save(*({f"{worker} {n}": n for n in range(3)} for worker in range(100)), full=True)
    shares = StepRows(written.find()).shares()
    assert [len(share) for share in shares] == [64, 36]


def test_files_of_object_stores_are_read_in_part_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Written(tmp_path, step="count by/name", flow="a flow")
    written.save({f"k{n}": n for n in range(10)}, full=True)
    written.save({"k3": -3})
    disk = ArrowDisk(str(tmp_path), LocalFileSystem())
    monkeypatch.setattr(SavedStep, "store", lambda self: SnapshotStore(disk, self.flow))
    table = StepRows(written.find())
    found = saved_values(table, 5)
    assert found == {shown(key): value for key, value in written.state.items()}
    Path(written.store.where(written.parts[0].path)).unlink()
    with pytest.raises(
        DamagedError, match="is gone, which snapshot 1 wrote for step 'count by/name'"
    ):
        saved_values(table, 5)


# ------------------------------------------------------------ types


STATES: dict[str, tuple[list[Any], str, list[Any]]] = {
    "whole numbers": ([1, 2, None], "bigint", [1, 2, None]),
    "fractions": ([1, 2.5], "double", [1.0, 2.5]),
    "truth": ([True, False], "boolean", [True, False]),
    "text": (["a", "ö"], "string", ["a", "ö"]),
    "lists": ([[1], []], "array<bigint>", [[1], []]),
    "dicts": (
        [{"a": 1}, {"b": {"c": [0.5]}}],
        "struct<a:bigint,b:struct<c:array<double>>>",
        [{"a": 1, "b": None}, {"a": None, "b": {"c": [0.5]}}],
    ),
    "tuples": ([(1, "a"), (2, "b")], "struct<_1:bigint,_2:string>", [{"_1": 1, "_2": "a"}, {"_1": 2, "_2": "b"}]),
    "sets": ([{2, 1}, set()], "array<bigint>", [[1, 2], []]),
    "many names": ([{f"n{n}": n} for n in range(150)], "map<string,bigint>", [{f"n{n}": n} for n in range(150)]),
    "mixed": ([1, "a", [2], (3,)], "string", ["1", "a", "[2]", "[3]"]),
    "numbers too long": ([1, 2**100], "string", ["1", str(2**100)]),
    "empty dicts": ([{}, {}], "map<string,string>", [{}, {}]),
    "times": ([datetime(2024, 1, 1, tzinfo=UTC)], "timestamp", [datetime(2024, 1, 1, tzinfo=UTC)]),
}  # fmt: skip


def test_states_of_all_types(spark: SparkSession, tmp_path: Path) -> None:
    for name, (states, wanted, values) in STATES.items():
        written = Written(tmp_path / name.replace(" ", "-"))
        written.save({f"{n:03}": state for n, state in enumerate(states)}, full=True)
        table = Table.of({"path": written.where, "step": "total"})
        schema = table.inferred_schema()
        assert schema["state"].dataType.simpleString() == wanted, name
        reader = tables.StateReader(table, schema, inferred=True)
        read = [batch for share in reader.partitions() for batch in reader.read(share)]
        found = [
            dict(v) if wanted.startswith("map") else v for b in read for v in b["state"].to_pylist()
        ]
        assert found == values, name
        if name in ("dicts", "many names", "mixed"):
            frame = state_table(spark, written.where, "total").orderBy("key")
            assert [value_of(row.state) for row in frame.collect()] == values, name
        written.store.release()


def test_keys_are_numbers_if_all_are_and_text_otherwise(
    spark: SparkSession, tmp_path: Path
) -> None:
    for name, keys, wanted, values in (
        ("text", ["a", "5"], "string", ["5", "a"]),
        ("numbers", [5, -7], "bigint", [-7, 5]),
        ("tuples", [("a", 1), ("b", 2)], "string", ['["a",1]', '["b",2]']),
        ("mixed", [1, "a"], "string", ["1", "a"]),
        ("long", [1, 2**70], "string", ["1", str(2**70)]),
    ):
        written = Written(tmp_path / name)
        written.save(dict.fromkeys(keys, 1), full=True)
        table = Table.of({"path": written.where, "step": "total"})
        reader = tables.StateReader(table, table.inferred_schema(), inferred=True)
        assert table.inferred_schema()["key"].dataType.simpleString() == wanted
        [batch] = (batch for share in reader.partitions() for batch in reader.read(share))
        assert sorted(batch["key"].to_pylist()) == values
        if name == "numbers":
            frame = state_table(spark, written.where, "total").selectExpr("sum(key)")
            assert frame.collect()[0][0] == -2
        written.store.release()


def test_states_of_classes_stay_closed_unless_they_may_be_opened(
    spark: SparkSession, written: Written
) -> None:
    one, other = (
        StepInfo("x", "reduce", 1),
        StepInfo("y", "reduce", 2),
    )  # of a class that tasks find
    written.save({"a": one, "b": other}, full=True)
    frame = state_table(spark, written.where, "total")
    rows = frame.orderBy("key").collect()
    assert [row.state for row in rows] == [None, None]
    assert pickle.loads(rows[1].state_pickle) == other
    opened = state_table(spark, written.where, "total", unpickle=True)
    assert rows_of(opened) == {"a": asdict(one), "b": asdict(other)}
    assert "state_pickle" not in opened.columns


def test_versions_are_told_and_state_is_shown_as_it_was_saved(
    spark: SparkSession, written: Written
) -> None:
    written.save({"a": 1, "b": 2}, full=True)
    written.save({"b": {"n": 3}}, version=2)
    rows = state_table(spark, written.where, "total").orderBy("key").collect()
    assert [(row.version, row.state) for row in rows] == [(1, "1"), (2, '{"n":3}')]


def test_after_an_upgrade_keys_are_shown_in_the_form_they_were_saved_in(
    spark: SparkSession, tmp_path: Path
) -> None:
    items = list(range(KEYS))
    tester = FlowTester(counting(), feed=["numbers"], snapshots=LocalDisk(tmp_path))
    tester.feed("numbers", items)
    tester.snapshot()
    close(tester)
    newer = counting(upgrades=[lambda state: state | {"tag": "old"}])
    tester = FlowTester(newer, 3, feed=["numbers"], snapshots=LocalDisk(tmp_path))
    tester.feed("numbers", [*items, 1, 2, 3])
    tester.snapshot()
    state = tester.state("lives")
    rows = state_table(spark, tmp_path, "lives").collect()
    assert {row.key for row in rows} == state.keys()
    for row in rows:
        found = {name: value for name, value in row.state.asDict().items() if value is not None}
        assert (found if row.version == 2 else found | {"tag": "old"}) == state[row.key]
    assert {row.key for row in rows if row.version == 2} == {"key 1", "key 2", "key 3"}


def test_a_schema_of_the_user_is_taken_as_it_is(spark: SparkSession, written: Written) -> None:
    written.save({"a": {"n": 1, "x": "y"}, "b": {"n": 2}}, full=True)
    frame = state_table(
        spark, written.where, "total", schema="state struct<n: double, z: string>, key string"
    )
    assert [(row.key, row.state.n, row.state.z) for row in frame.orderBy("key").collect()] == [
        *(("a", 1.0, None), ("b", 2.0, None)),
    ]
    with pytest.raises(
        PythonException, match=r"step 'total', key 'a', column state\.x: \"y\" is no"
    ):
        state_table(spark, written.where, "total", schema="state struct<x: bigint>").collect()
    with pytest.raises(PythonException, match=r"key 'a', column key: \"a\" is no bigint"):
        state_table(spark, written.where, "total", schema="key bigint").collect()
    table = Table.of({"path": written.where, "step": "total"})
    for column, said in (
        ("total", "no column 'total'; the columns are key, state, worker"),
        ("worker", "column 'worker' is of type int, not string"),
    ):
        with pytest.raises(StateTableError, match=said):
            table.check(t.StructType([t.StructField(column, t.StringType())]))


def test_a_field_that_a_sample_has_not_is_an_error_and_not_left_out(
    written: Written, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.save({f"{n:03}": {"n": n} for n in range(50)} | {"zzz": {"m": 1}}, full=True)
    monkeypatch.setattr(saved_rows.StepRows.shares, "__defaults__", (7,))
    monkeypatch.setattr(tables, "SAMPLE_ROWS", 10)
    table = Table.of({"path": written.where, "step": "total"})
    assert table.inferred_schema()["state"].dataType.simpleString() == "struct<n:bigint>"
    reader = tables.StateReader(table, table.inferred_schema(), inferred=True)
    with pytest.raises(MisfitError, match=r"key 'zzz', column state.m: 1 is no field.*infer"):
        [list(reader.read(partition)) for partition in reader.partitions()]
    told = {"path": written.where, "step": "total", "infer": "all"}
    seen = Table.of(told).inferred_schema()["state"].dataType.simpleString()
    assert seen == "struct<n:bigint,m:bigint>"


def test_types_of_many_rows_are_found_by_tasks(
    spark: SparkSession, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    written.save({n: {"n": n} for n in range(500)}, {-1: {"x": 0.5}}, full=True)
    monkeypatch.setattr(tables, "DRIVER_ROWS", 100)
    frame = state_table(spark, written.where, "total")
    assert frame.schema["state"].dataType.simpleString() == "struct<n:bigint,x:double>"
    assert frame.selectExpr("sum(state.n)", "sum(key)").collect()[0][:] == (124750, 124749)


# ------------------------------------------------------------ the format, and SQL


def test_sql_over_the_state_of_a_flow(spark: SparkSession, written: Written) -> None:
    users = {f"user {n}": {"clicks": n, "country": "no" if n % 2 else "de"} for n in range(10)}
    written.save(users, full=True)
    written.save({"user 9": {"clicks": 100, "country": "no"}, "user 8": FORGET})
    fresh = spark.newSession()
    fresh.sql(
        f"CREATE TEMPORARY VIEW totals USING `railgun-state` OPTIONS (path '{written.where}', step 'total')"
    )
    found = fresh.sql(
        "SELECT state.country, sum(state.clicks) AS clicks FROM totals GROUP BY 1 ORDER BY 1"
    ).collect()
    assert [tuple(row) for row in found] == [("de", 0 + 2 + 4 + 6), ("no", 1 + 3 + 5 + 7 + 100)]
    old = fresh.read.format("railgun-state").option("step", "total").option("snapshot", "1")
    assert old.load(written.where).count() == 10
    assert old.load(written.where).where("key = 'user 8'").count() == 1
    changes = fresh.read.format("railgun-state").option("step", "total").option("since", "1")
    rows = changes.load(written.where).orderBy("key").collect()
    assert [(row.key, row.change) for row in rows] == [("user 8", "removed"), ("user 9", "changed")]
    assert (rows[0].before.clicks, rows[0].after) == (8, None)
    assert (rows[1].before.clicks, rows[1].after.clicks) == (9, 100)
    assert {row.changed_at.timestamp() for row in rows} == {1_700_000_002}


def test_a_format_that_spark_has_not_found_is_registered(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="DATA_SOURCE_NOT_FOUND"):
        spark.read.format("railgun-nothing").load()
    fake, chain = MagicMock(), MagicMock()
    fake.read.format.return_value.options.return_value.schema.return_value = chain
    made = MagicMock()
    chain.load.side_effect = [ValueError("[DATA_SOURCE_NOT_FOUND] …"), made]
    assert tables._load(fake, {}, "key string") is made
    [call] = fake.dataSource.register.call_args_list
    assert call.args[0].name() == "railgun-state"


def test_a_table_stays_with_its_snapshot(spark: SparkSession, written: Written) -> None:
    written.save({"a": 1}, full=True)
    made = state_table(spark, written.where, "total")
    read = spark.read.format("railgun-state").option("step", "total").load(written.where)
    written.save({"a": 2})
    assert rows_of(made) == rows_of(read) == {"a": 1}
    assert rows_of(state_table(spark, written.where, "total")) == {"a": 2}


def test_changes_between_directories(spark: SparkSession, tmp_path: Path) -> None:
    one, other = Written(tmp_path / "one"), Written(tmp_path / "other")
    one.save({"a": 1, "b": 2}, full=True)
    other.save({"a": 1, "b": 3}, full=True)
    rows = state_changes(spark, one.where, other.where, "total").collect()
    assert [(row.key, row.before, row.after) for row in rows] == [("b", 2, 3)]


def test_a_step_without_a_row_is_an_empty_table(spark: SparkSession, written: Written) -> None:
    written.save(full=True)
    assert state_table(spark, written.where, "total").collect() == []
    assert state_changes(spark, 1, written.where, "total").collect() == []


def test_the_module_that_spark_finds_is_cheap_to_import() -> None:
    import subprocess
    import sys

    code = (
        "import sys, pyspark.sql.datasource, pyspark_railgun_state; print('railgun' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


# ------------------------------------------------------------ errors


def test_what_is_not_there_is_said_with_what_is(
    spark: SparkSession, written: Written, tmp_path: Path
) -> None:
    with pytest.raises(NoSnapshotsError, match="there is no directory"):
        state_table(spark, tmp_path / "nowhere", "total")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoSnapshotsError, match="there are no snapshots in"):
        state_table(spark, tmp_path / "empty", "total")
    written.save({"a": 1}, full=True)
    for step in ("totals", "out"):
        with pytest.raises(
            MissingError, match=f"no state of a step '{step}'; it has that of 'total'"
        ):
            state_table(spark, written.where, step)
    with pytest.raises(MissingError, match="has no snapshot 7; it has 1"):
        state_table(spark, written.at(7), "total")
    with pytest.raises(StateTableError, match="DIRECTORY#NUMBER"):
        state_table(spark, "7", "total")
    other = Written(Path(written.where), flow="other")
    other.save({"a": 1}, full=True)
    with pytest.raises(NoSnapshotsError, match="of 'demo', 'other': name one of them"):
        state_table(spark, written.where, "total")
    assert rows_of(state_table(spark, written.where, "total", flow="demo")) == {"a": 1}
    assert rows_of(state_table(spark, f"{written.where}/demo", "total")) == {"a": 1}


def test_the_format_says_the_same(spark: SparkSession, written: Written) -> None:
    written.save({"a": 1}, full=True)
    with pytest.raises(
        AnalysisException, match="MissingError: snapshot 1 has no state of a step 'x'"
    ):
        spark.read.format("railgun-state").options(step="x").load(written.where)
    for options, said in (
        ({}, "the step is missing"),
        ({"step": "total", "snapshot": "x"}, "is the number of a snapshot, not 'x'"),
        ({"step": "total", "keys": "x"}, "no option 'keys'; the options are path, step"),
        ({"step": "total", "until": "1"}, "until goes with since"),
        ({"step": "total", "infer": "none"}, "infer is some or all"),
        ({"step": "total", "unpickle": "yes"}, "unpickle is true or false"),
    ):
        with pytest.raises(StateTableError, match=said):
            Table.of({"path": written.where, **options})


def test_damaged_files_are_named(spark: SparkSession, written: Written) -> None:
    written.save({f"k{n}": n for n in range(100)}, full=True)
    [part] = written.parts
    file = Path(written.store.where(part.path))
    whole = file.read_bytes()
    for harm in (whole[:-10], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        file.write_bytes(harm)
        with pytest.raises(DamagedError, match=f"{file.name} is damaged"):
            state_table(spark, written.where, "total")
    frame_of = "key string, state bigint"
    with pytest.raises(PythonException, match=f"DamagedError: .*{file.name} is damaged"):
        state_table(spark, written.where, "total", schema=frame_of).collect()
    file.unlink()
    with pytest.raises(DamagedError, match=r"not whole.*is gone"):
        state_table(spark, written.where, "total")
    file.write_bytes(whole)
    made = state_table(spark, written.where, "total")
    file.unlink()
    with pytest.raises(
        AnalysisException, match=f"DamagedError: .*{file.name} is damaged: it is gone"
    ):
        made.collect()
