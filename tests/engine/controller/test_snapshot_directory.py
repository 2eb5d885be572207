"""What a job begins with, and what lies in a directory of snapshots. Jobs here are real; most cases need none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.controller import flows
from tests.engine.controller.flows import counting, eventually, running, started

from railgun import Collect, Flow, Items, Snapshots
from railgun.engine.controller.snapshot_directory import (
    NoSnapshotsError,
    SavedState,
    Sealed,
    attempts_as_dicts,
    find_store,
    jobs_in,
)
from railgun.engine.controller.storekeeper import ChoiceError, FinishedError, Storekeeper
from railgun.engine.snapshots.errors import DamagedError, DoesNotFitError
from railgun.engine.snapshots.manifest import Manifest, Part, StepInfo
from railgun.engine.snapshots.store import SnapshotStore
from railgun.engine.snapshots.table import TableWriter
from railgun.hashing import hash_keys
from railgun.storage.errors import LockedError, MissingError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The snapshots of a job that was stopped; there are three."""
    where = tmp_path_factory.mktemp("saved")
    with started(counting("words"), snapshots=Snapshots(str(where), every=3600)) as job:
        running(job)
        assert [job.snapshot(timeout=flows.DEADLINE) for _ in range(2)] == [1, 2]
        assert job.stop(timeout=flows.DEADLINE)
    return where


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "saved")
    return tmp_path / "saved"


def begun(where: Path, flow: Flow | None = None, **chosen: Any) -> int | None:
    """The snapshot that a job would begin with."""
    flow = flow or counting("words")
    keeper = Storekeeper(flow.plan(), Snapshots(str(where), **chosen), flow.name)
    try:
        return None if keeper.manifest is None else keeper.manifest.snapshot
    finally:
        keeper.close()


def spoil(where: Path, snapshot: int) -> None:
    first = next((where / "words" / "data" / f"{snapshot:012d}").rglob("*.parquet"))
    first.write_bytes(first.read_bytes()[:-1])


# ---------------------------------------------------------------- what a job begins with


def test_a_job_begins_with_the_latest_or_with_what_is_asked_for(copy: Path, saved: Path) -> None:
    assert begun(copy) == 3
    assert begun(copy, begin=2) == 2
    assert begun(copy, begin="2") == 2
    assert begun(copy, begin=f"{saved}#1") == 1
    assert begun(copy, begin=f"{saved}/words#1") == 1
    assert begun(copy, begin=str(saved)) == 3
    assert begun(copy, fresh=True) is None
    assert begun(copy / "new") is None
    assert begun(copy / "new", begin=str(saved)) == 3


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"begin": "old#x"}, "as in old#7, not 'x'"),
        ({"begin": "#"}, "not ''"),
        ({"begin": ""}, "a number, DIRECTORY#NUMBER or a directory"),
        ({"begin": -1}, "not '-1'"),
        ({"begin": "9" * 30}, "a snapshot has a number"),
        ({"begin": 2, "allow_older": True}, "not both"),
        ({"begin": 2, "fresh": True}, "fresh=True loads nothing"),
        ({"fresh": True, "drop": frozenset(["order"])}, "fresh=True loads nothing"),
        ({"every": 0}, "more than 0"),
        ({"every": float("nan")}, "more than 0"),
        ({"keep": 0}, "at least one"),
    ],
)
def test_choices_that_make_no_sense_are_refused(
    tmp_path: Path, chosen: dict[str, Any], said: str
) -> None:
    with pytest.raises(ChoiceError, match=said):
        begun(tmp_path / "none", **chosen)
    assert not (tmp_path / "none").exists()


def test_what_is_not_there_is_told_with_what_is(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(NoSnapshotsError, match="has no snapshot 9; it has 1, 2, 3"):
        begun(copy, begin=9)
    with pytest.raises(NoSnapshotsError, match=r"there is no directory .*nowhere"):
        begun(copy, begin=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoSnapshotsError, match=r"there are no snapshots in .*empty"):
        begun(copy, begin=str(tmp_path / "empty"))
    with pytest.raises(NoSnapshotsError, match="no snapshots of 'other'; it has those of 'words'"):
        begun(tmp_path / "new", counting("other"), begin=str(copy))
    with pytest.raises(NoSnapshotsError, match="has the snapshots of 'words', not of 'other'"):
        begun(tmp_path / "new", counting("other"), begin=str(copy / "words"))
    with pytest.raises(ChoiceError, match=r"no snapshot .* renamed or dropped"):
        begun(tmp_path / "new", drop=frozenset(["order"]))


def test_a_damaged_snapshot_is_refused_with_the_ways_out(copy: Path) -> None:
    spoil(copy, 3)
    with pytest.raises(DamagedError, match=r"worker-\d.*allow_older=True.*fresh=True"):
        begun(copy)
    with pytest.raises(DamagedError, match=r"another than snapshot 3 \(begin="):
        begun(copy, begin=3)
    assert begun(copy, allow_older=True) == 2
    spoil(copy, 1)
    with pytest.raises(DamagedError, match="fresh=True"):
        begun(copy, allow_older=True)
    assert begun(copy, fresh=True) is None


def test_who_holds_the_directory_is_told(copy: Path) -> None:
    keeper = Storekeeper(counting("words").plan(), Snapshots(str(copy)), "words")
    try:
        with pytest.raises(LockedError, match=r"held by process \d+ on .*, since 2"):
            begun(copy)
    finally:
        keeper.close()


def renamed(step: str) -> Flow:
    flow = Flow("words")
    records = flow.source(counting("x").steps["records"].options["source"], name="records")
    keyed = records.key_by(lambda item: item[0], name="keys")
    keyed.stateful_map(flows.in_order, initial=lambda: -1, name=step).sink(Collect(), name="out")
    return flow


def test_a_step_that_is_gone_is_refused_with_the_ways_out(copy: Path) -> None:
    with pytest.raises(DoesNotFitError, match="rename=\\{'order': NAME\\}, or drop=\\{'order'\\}"):
        begun(copy, renamed("sorted"))
    assert begun(copy, renamed("sorted"), rename={"order": "sorted"}) == 3
    assert begun(copy, renamed("sorted"), drop=frozenset(["order"])) == 3


def test_older_state_is_taken_by_a_step_that_has_upgrades(copy: Path) -> None:
    flow = counting("words")
    flow.steps["order"].options["upgrades"] = (lambda state: state,)
    assert begun(copy, flow) == 3


def test_a_renamed_step_goes_on_with_its_state_also_in_the_run_after_it(copy: Path) -> None:
    """In order it can only be if the state has come along."""
    chosen = Snapshots(str(copy), every=3600, rename={"order": "sorted"})
    with started(renamed("sorted"), snapshots=chosen) as job:
        running(job)
        assert job.state("sorted", 7) > 0
        assert job.stop(timeout=flows.DEADLINE)
    with started(renamed("sorted"), snapshots=str(copy)) as job:
        running(job)
        assert job.events()[0].text == "running on 2 workers, from snapshot 4"


def test_a_flow_that_has_come_to_its_end_says_so_and_can_begin_afresh(tmp_path: Path) -> None:
    flow = counting("short", rate=None, count=1000)
    for fresh in (False, True):
        chosen = Snapshots(str(tmp_path), every=3600, fresh=fresh)
        with started(flow, snapshots=chosen) as job:
            assert job.wait(flows.DEADLINE)
            assert flows.check_whole(job) == 1000
        with pytest.raises(FinishedError, match=r"nothing left to do.*fresh=True"):
            begun(tmp_path, flow)
    numbers = [one["snapshot"] for one in attempts_as_dicts(SnapshotStore(str(tmp_path), "short"))]
    assert numbers == [2, 1]


def test_who_begins_afresh_keeps_the_latest_of_before(copy: Path) -> None:
    chosen = Snapshots(str(copy), every=3600, keep=1, fresh=True)
    for begin in (chosen, Snapshots(str(copy), every=3600, keep=1)):
        with started(counting("words"), snapshots=begin) as job:
            running(job)
            for _ in range(2):
                job.snapshot(timeout=flows.DEADLINE)
    kept = [
        one["snapshot"]
        for one in attempts_as_dicts(SnapshotStore(str(copy), "words"))
        if one["kept"]
    ]
    assert kept == [7, 3]
    assert begun(copy, begin=3) == 3


# ---------------------------------------------------------------- what is in a snapshot


def put(store: SnapshotStore, snapshot: int, worker: int, states: dict[Any, Any]) -> Part:
    """A file of state; None: the key is deleted."""
    table = TableWriter("count", 1)
    keys = list(states)
    gone = [state is None for state in states.values()]
    table.add(hash_keys(keys), keys, list(states.values()), None, None, gone)
    return store.write_part(snapshot, 1, "stage", "count", worker, table.finish(), table.rows)


def manifest(snapshot: int, parts: list[Part], flow: str = "words") -> Manifest:
    steps = (StepInfo("count", "reduce", 1), StepInfo("out", "sink", 1))
    return Manifest(1, flow, snapshot, 1, 2, False, False, 0.0, 1.0, tuple(parts), (), steps)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SnapshotStore]:
    store = SnapshotStore(str(tmp_path), "words")
    store.acquire()
    yield store
    store.release()


def test_the_newest_row_counts_and_what_was_deleted_is_gone(store: SnapshotStore) -> None:
    parts = [
        put(store, 1, 0, {"ada": 1, "bob": 1, "cyd": 1, "eve": 1, 42: 1, "42": 2, ("a", 1): 3}),
        put(store, 2, 0, {"ada": 2, "bob": None}),
        put(store, 3, 0, {"ada": None, "cyd": None, "bob": 3}),
        put(store, 3, 1, {"ada": 9}),  # moved here, and so deleted there
    ]
    found = SavedState(store, manifest(3, parts), "count")
    rows = {json.dumps(row.key): row.state for row in found.rows()}
    assert rows == {'"ada"': 9, '"bob"': 3, '"eve"': 1, "42": 1, '"42"': 2, '["a", 1]': 3}
    assert found.count() == {0: 5, 1: 1}
    for key, state in (("ada", 9), ("bob", 3), ("eve", 1), (42, 1), ("42", 2), (("a", 1), 3)):
        row = found.get(key)
        assert row is not None
        assert row.state == state
    assert found.get("cyd") is None
    assert found.get("nobody") is None


def test_an_older_snapshot_is_read_as_it_was(store: SnapshotStore) -> None:
    parts = [put(store, 1, 0, {"ada": 1, "bob": 1}), put(store, 2, 0, {"ada": 2, "bob": None})]
    assert SavedState(store, manifest(1, parts[:1]), "count").count() == {0: 2}
    with pytest.raises(MissingError, match=r"no state of a step 'x'; it has that of 'count'$"):
        SavedState(store, manifest(1, parts), "x")


def test_what_cannot_be_unpickled_is_still_shown(store: SnapshotStore) -> None:
    class Odd:
        def __reduce__(self) -> Any:
            return (open, ("/there/is/no/such/file",))

    parts = [put(store, 1, 0, {"ada": Odd(), "bob": {1, 2}})]
    found = {row.key: row.state for row in SavedState(store, manifest(1, parts), "count").rows()}
    assert found["bob"] == {1, 2}
    assert isinstance(found["ada"], Sealed)
    assert "FileNotFoundError" in repr(found["ada"])


def test_a_directory_is_that_of_all_jobs_or_of_one(tmp_path: Path) -> None:
    for name in ("a", "b.c"):
        store = SnapshotStore(str(tmp_path), name)
        store.acquire()
        store.begun(1, True, "asked for")
        store.commit(manifest(1, [put(store, 1, 0, {"ada": 1})], name))
        store.release()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("not ours")
    assert jobs_in(str(tmp_path)) == ["a", "b.c"]
    assert find_store(str(tmp_path), "a")[1].flow == "a"
    assert find_store(str(tmp_path / "b.c"))[1].flow == "b.c"
    assert find_store(f"file://{tmp_path}", "a")[1].flow == "a"
    with pytest.raises(NoSnapshotsError, match=r"of 'a', 'b.c': name one"):
        find_store(str(tmp_path))


def test_a_job_tells_of_its_snapshots(tmp_path: Path) -> None:
    flow = Flow("told")
    flow.source(Items(range(50)), name="n").key_by(lambda n: n).reduce(max).sink(
        Collect(), name="o"
    )
    with started(flow, snapshots=Snapshots(str(tmp_path), every=3600)) as job:
        assert job.status()["snapshots"]["every"] == 3600
        assert job.wait(flows.DEADLINE)
        eventually(lambda: job.snapshots()[0]["state"] == "committed", "its record is written")
    [one] = job.snapshots()
    assert (one["full"], one["why"], one["kept"]) == (True, "the last one", True)
    assert {"align", "cut", "encode", "write"} == one["phases"].keys()
    assert sum(one["phases"].values()) <= one["ended"] - one["began"] + 1
    last = job.status()["snapshots"]["last"]
    assert (last["snapshot"], last["rows"]) == (1, one["rows"])
