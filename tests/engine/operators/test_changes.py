"""Which keys a snapshot saves: those that changed, without work for every record once nearly all have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from railgun.engine.operators import changes
from railgun.engine.operators.changes import Changes
from railgun.engine.operators.operator import Setting
from railgun.engine.operators.stateful import FORGET, StatefulMap
from railgun.engine.snapshots.table import TableWriter, read_rows
from railgun.engine.state.disk import Disk, OnDisk
from railgun.transport.rows import RowBatch

GONE = "deleted"


class CountedKeys(list[Any]):
    """Keys of records that count how often somebody goes through all of them."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return super().__iter__()


def put(state: Any, item: Any) -> tuple[Any, Any]:
    return (FORGET if item == GONE else item), None


def make_step(store: Any = None) -> StatefulMap:
    step = StatefulMap(Setting("put", store=store), put, lambda: None)
    step.emit = lambda batch: None  # type: ignore[method-assign]
    step.watch_changes()
    return step


def changes_of(step: StatefulMap) -> Changes:
    assert step.changes is not None
    return step.changes


def write(step: StatefulMap, keys: list[Any], value: Any) -> None:
    step.push(RowBatch.keyed(keys, [value] * len(keys)))


def save(step: StatefulMap, *, full: bool = False, committed: bool = True) -> dict[Any, Any]:
    """Take a snapshot; return what it saved by key, `GONE` for a key that it says is deleted."""
    table = TableWriter("put", 1)
    changes_of(step).cut(table, full)
    while changes_of(step).saving:
        changes_of(step).step()
    changes_of(step).settle(committed)
    rows = read_rows(table.finish())
    assert len(set(rows.keys)) == len(rows.keys)
    told = zip(rows.keys, rows.states, rows.deleted, strict=True)
    return {key: GONE if deleted else state for key, state, deleted in told}


def let_all_change(step: StatefulMap, keys: list[Any], value: Any) -> None:
    """Write to all keys until they count as changed as a whole."""
    for _ in range(2 * changes.LOOK_INTERVAL_PER_KEY):
        write(step, keys, value)
    assert changes_of(step).all_changed


def test_once_all_keys_have_changed_the_keys_of_records_are_not_gone_through() -> None:
    step = make_step()
    keys = CountedKeys(range(1000))
    write(step, list(keys), 1)
    save(step, full=True)
    for _ in range(20):
        step.touch(keys)
    noted = keys.passes
    for _ in range(20):
        step.touch(keys)
    assert keys.passes == noted
    write(step, [3], 2)
    assert save(step) == {key: 2 if key == 3 else 1 for key in range(1000)}


def test_while_a_snapshot_is_saved_keys_are_saved_before_they_change_though_all_have_changed() -> (
    None
):
    step = make_step()
    write(step, list(range(10)), 1)
    save(step, full=True)
    let_all_change(step, list(range(10)), 2)
    table = TableWriter("put", 1)
    changes_of(step).cut(table, False)
    let_all_change(step, list(range(20)), 3)
    while changes_of(step).saving:
        changes_of(step).step()
    changes_of(step).settle(True)
    rows = read_rows(table.finish())
    assert dict(zip(rows.keys, rows.states, strict=True)) == dict.fromkeys(range(10), 2)
    assert save(step) == dict.fromkeys(range(20), 3)


def test_keys_made_or_deleted_after_all_have_changed_are_saved_as_such() -> None:
    step = make_step()
    write(step, ["a", "b", "c"], 1)
    save(step, full=True)
    let_all_change(step, ["a", "b", "c"], 2)
    write(step, ["new"], 3)
    write(step, ["b"], GONE)
    write(step, ["short-lived"], 4)
    write(step, ["short-lived"], GONE)
    assert save(step) == {"a": 2, "b": GONE, "c": 2, "new": 3}
    assert save(step) == {}


def test_a_key_deleted_before_all_have_changed_and_made_and_deleted_again_is_saved_as_deleted() -> (
    None
):
    step = make_step()
    write(step, ["a", "b"], 1)
    save(step, full=True)
    write(step, ["b"], GONE)
    let_all_change(step, ["a"], 2)
    write(step, ["b"], 3)
    write(step, ["b"], GONE)
    assert save(step) == {"a": 2, "b": GONE}


def test_a_snapshot_that_fails_after_all_have_changed_is_followed_by_one_with_its_keys() -> None:
    step = make_step()
    write(step, ["a", "b"], 1)
    save(step, full=True)
    let_all_change(step, ["a", "b"], 2)
    write(step, ["new"], 3)
    assert save(step, committed=False) == {"a": 2, "b": 2, "new": 3}
    write(step, ["a"], 4)
    assert save(step) == {"a": 4, "b": 2, "new": 3}


def test_few_keys_that_did_not_change_are_saved_with_all_others_and_many_are_not() -> None:
    step = make_step()
    keys = list(range(320))
    write(step, keys, 1)
    save(step, full=True)
    let_all_change(step, keys[10:], 2)  # ten in 320 did not change, which is as many as may be
    assert save(step) == {key: 1 if key < 10 else 2 for key in keys}
    for _ in range(20):
        write(step, keys[11:], 3)
    assert not changes_of(step).all_changed
    assert save(step) == dict.fromkeys(keys[11:], 3)


def test_keys_that_rest_are_not_saved_because_many_others_come_and_go() -> None:
    step = make_step()
    write(step, ["a", "b", "c"], 1)
    save(step, full=True)
    for number in range(100):
        write(step, [number], 2)
        write(step, [number], GONE)
    assert save(step) == dict.fromkeys(range(100), GONE)


def test_a_key_that_comes_after_all_have_changed_is_saved_only_if_it_changed_or_is_deleted() -> (
    None
):
    there, here = make_step(), make_step()
    write(there, ["rests", "changed", "goes"], 1)
    write(here, ["a"], 1)
    save(there, full=True)
    save(here, full=True)
    write(there, ["changed"], 2)
    let_all_change(here, ["a"], 2)
    here.take(memoryview(there.collect(["rests", "changed", "goes"])))
    write(here, ["goes"], GONE)
    assert save(here) == {"a": 2, "changed": 2, "goes": GONE}
    assert save(there) == {}


def test_a_key_made_after_all_have_changed_has_changed_for_the_worker_it_moves_to() -> None:
    there, here = make_step(), make_step()
    write(there, ["a"], 1)
    save(there, full=True)
    save(here, full=True)
    let_all_change(there, ["a"], 2)
    write(there, ["new"], 3)
    here.take(memoryview(there.collect(["a", "new", "never seen"])))
    assert save(here) == {"a": 2, "new": 3}
    assert save(there) == {}


def test_a_store_that_has_grown_large_is_not_noted_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(changes, "MAX_ALL_CHANGED_KEYS", 4)
    step = make_step()
    write(step, ["a", "b"], 1)
    save(step, full=True)
    let_all_change(step, ["a", "b"], 2)
    for number in range(6):
        write(step, [number], 3)
    assert not changes_of(step).all_changed
    write(step, [0], GONE)
    for _ in range(50):
        write(step, ["a"], 4)
    assert not changes_of(step).all_changed
    wanted: dict[Any, Any] = {"a": 4, "b": 2, 0: GONE, 1: 3, 2: 3, 3: 3, 4: 3, 5: 3}
    assert save(step) == wanted


def test_state_on_disk_is_never_noted_as_a_whole(tmp_path: Path) -> None:
    disk = Disk(OnDisk(memory=1, directory=str(tmp_path)))
    try:
        step = make_step(disk.store)
        keys = list(range(3000))
        for value in range(2 * changes.LOOK_INTERVAL_PER_KEY):
            for at in range(0, len(keys), 500):
                write(step, keys[at : at + 500], value)
        assert step.store.spilled
        assert not changes_of(step).all_changed
        assert save(step) == dict.fromkeys(keys, 2 * changes.LOOK_INTERVAL_PER_KEY - 1)
    finally:
        disk.close()


def test_a_key_that_comes_while_a_snapshot_is_saved_and_did_not_change_is_not_saved_as_deleted() -> (
    None
):
    there, here = make_step(), make_step()
    write(there, ["rests"], 1)
    write(here, ["a"], 1)
    save(there, full=True)
    save(here, full=True)
    write(here, ["a"], 2)
    assert save(there) == {}  # where it was at the cut there is nothing left to save
    table = TableWriter("put", 1)
    changes_of(here).cut(table, False)
    here.take(memoryview(there.collect(["rests"])))
    while changes_of(here).saving:
        changes_of(here).step()
    assert read_rows(table.finish()).keys == ["a"]
