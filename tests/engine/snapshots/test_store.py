"""The store of a flow: numbers, commits, damage, retention."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from verification.rewriting import rewritten

from railgun.engine.snapshots.errors import (
    DamagedError,
    DoesNotFitError,
    FormatError,
    SnapshotError,
    UndecidedError,
)
from railgun.engine.snapshots.manifest import Manifest, Part, seal
from railgun.engine.snapshots.store import ATTEMPTS_KEPT, Run, SnapshotStore, encode_name
from railgun.storage import object_store as disk_module
from railgun.storage.errors import (
    DiskError,
    FullDiskError,
    LockedError,
    MissingError,
    ReadOnlyError,
    StorageError,
)
from railgun.storage.object_store import ArrowDisk, Disk, LocalDisk, disk_error
from railgun.testing.disks import SimulatedDisk, Step

MAKERS: dict[str, Callable[[Path], Disk]] = {
    "local": LocalDisk,
    "simulated": lambda path: SimulatedDisk(),
    "arrow": lambda path: ArrowDisk(path.as_uri()),
}


@pytest.fixture(params=MAKERS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return MAKERS[request.param](tmp_path)


def driver(disk: Disk, flow: str = "demo") -> SnapshotStore:
    store = SnapshotStore(disk, flow)
    store.acquire()
    return store


def manifest(snapshot: int, *parts: Part, flow: str = "demo", generation: int = 1) -> Manifest:
    return Manifest(
        *(1, flow, snapshot, generation, 2, True, False, 10.0, 11.5, parts, (), ()),
        phases={"write": 0.5},
    )


def part(store: SnapshotStore, snapshot: int, worker: int = 0, generation: int = 1) -> Part:
    data = b"state of %d on %d in %d" % (snapshot, worker, generation)
    return store.write_part(snapshot, generation, "stage", "step", worker, data, rows=3)


def take(store: SnapshotStore, snapshot: int, *older: Part) -> Manifest:
    store.begun(snapshot, full=not older, why="every 10 s")
    made = manifest(snapshot, *older, part(store, snapshot, 0), part(store, snapshot, 1))
    store.commit(made)
    return made


# ------------------------------------------------------------ parts


def test_a_part_comes_back_as_it_was(disk: Disk) -> None:
    store = SnapshotStore(disk, "my flow/1")
    made = store.write_part(7, 3, "a/b", "..", 12, b"rows", rows=4)
    assert made.path == "data/000000000007/a%2Fb/%2E%2E/worker-12-g3.parquet"
    assert (made.snapshot, made.stage, made.step, made.worker) == (7, "a/b", "..", 12)
    assert (made.rows, made.size) == (4, 4)
    assert store.read_part(made) == b"rows"
    assert disk.list("") == [f"my%20flow%2F1/{made.path}"]


def test_a_part_is_never_overwritten(disk: Disk) -> None:
    store = SnapshotStore(disk, "demo")
    one = store.write_part(1, 1, "s", "t", 0, b"one", rows=1)
    two = store.write_part(1, 1, "s", "t", 0, b"two", rows=1)
    assert (store.read_part(one), store.read_part(two)) == (b"one", b"two")


def test_a_part_that_is_gone_or_changed_is_named() -> None:
    disk = SimulatedDisk(seed=3)
    store = SnapshotStore(disk, "demo")
    made = store.write_part(1, 1, "s", "t", 0, bytes(1000), rows=1)
    path = f"demo/{made.path}"
    disk.flip(path)
    with pytest.raises(DamagedError, match=rf"{path} is damaged: its checksum"):
        store.read_part(made)
    disk.truncate(path, 999)
    with pytest.raises(DamagedError, match=rf"{path} is damaged: it has 999 bytes, and 1000"):
        store.read_part(made)
    disk.delete(path)
    with pytest.raises(DamagedError, match=rf"{path} is gone, which snapshot 1 wrote"):
        store.read_part(made)


def test_names_of_people_are_safe_and_stay_apart() -> None:
    names = ["a", "A b", "a/b", "a%2Fb", "..", ".", "", "%", "té", "\ud83d", "x" * 400, "x" * 401]
    encoded = [encode_name(name) for name in names]
    assert len(set(encoded)) == len(names)
    for name in encoded:
        assert name.isascii()
        assert "/" not in name
        assert not name.startswith(".")
        assert 0 < len(name) < 200


# ------------------------------------------------------------ one driver


def test_what_a_driver_does_needs_the_lock(disk: Disk) -> None:
    store = SnapshotStore(disk, "demo")
    for act in (
        store.next_run,
        lambda: store.use_generation(1),
        lambda: store.begun(1, True, ""),
        lambda: store.commit(manifest(1)),
        lambda: store.failed(1, ""),
        store.clean,
    ):
        with pytest.raises(SnapshotError, match="is not acquired"):
            act()
    assert disk.list("") == []


def test_two_jobs_in_one_directory_are_refused_and_two_flows_are_not(disk: Disk) -> None:
    first = driver(disk)
    with pytest.raises(LockedError, match=rf"demo/lock is held by process {os.getpid()}"):
        driver(disk)
    with pytest.raises(SnapshotError, match="acquired already"):
        first.acquire()
    driver(disk, "other")
    first.release()
    driver(disk)


def test_a_driver_that_has_lost_its_lock_writes_nothing_more(tmp_path: Path) -> None:
    for disk in (LocalDisk(tmp_path / "a"), ArrowDisk((tmp_path / "b").as_uri())):
        first = driver(disk)
        made = part(first, 1)
        first.begun(1, True, "")
        disk.delete("demo/lock")  # somebody thought it was dead
        second = driver(disk)
        with pytest.raises(LockedError, match=r"demo/lock was lost.*This one must end"):
            first.commit(manifest(1, made))
        assert second.latest() is None
        first.release()
        second.next_run()
        second.release()


KILLED = """
import os, signal, sys
from railgun.engine.snapshots.store import SnapshotStore
store = SnapshotStore(sys.argv[1], "demo")
store.acquire()
run = store.next_run()
store.begun(run.snapshot, True, "every 10 s")
store.write_part(run.snapshot, run.generation, "s", "t", 0, b"half done", rows=1)
print(run.generation, run.snapshot, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_kill_9_the_next_driver_goes_on_with_numbers_of_its_own(tmp_path: Path) -> None:
    for turn in (1, 2, 3):
        told = subprocess.run(
            [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True
        )
        assert told.stdout == f"{turn} {turn}\n", told.stderr
    store = driver(LocalDisk(tmp_path))
    assert store.next_run() == Run(4, 4)
    assert store.latest() is None
    assert [attempt.state for attempt in store.attempts()] == ["aborted"] * 3
    take(store, 4)
    store.clean()
    assert store.disk.list("demo/data") == [
        f"000000000004/stage/step/worker-{n}-g1.parquet" for n in (0, 1)
    ]


# ------------------------------------------------------------ numbers


def test_numbers_are_above_all_that_were_ever_given_out(disk: Disk) -> None:
    store = driver(disk)
    assert store.next_run() == Run(1, 1)
    assert store.next_run() == Run(2, 1)
    store.use_generation(5)
    store.use_generation(4)
    assert store.next_run() == Run(6, 1)
    store.begun(3, True, "")
    assert store.next_run() == Run(7, 4)
    with pytest.raises(SnapshotError, match="begun before; ids are used once"):
        store.begun(3, True, "")
    part(store, 9, generation=20)
    assert store.next_run() == Run(21, 10)
    store.commit(manifest(12, generation=30))
    assert store.next_run() == Run(31, 13)


def test_when_the_numbers_are_lost_the_next_ones_are_well_above(disk: Disk) -> None:
    store = driver(disk)
    store.next_run()
    take(store, 1)
    disk.delete("demo/run.json")
    run = store.next_run()
    assert run.generation > 100
    assert run.snapshot > 100
    assert store.next_run() == Run(run.generation + 1, run.snapshot)


def test_damaged_numbers_are_named() -> None:
    disk = SimulatedDisk()
    store = driver(disk)
    store.next_run()
    disk.truncate("demo/run.json", 20)
    with pytest.raises(DamagedError, match=r"demo/run\.json is damaged.* Delete it"):
        store.next_run()
    disk.delete("demo/run.json")
    assert store.next_run() == Run(1, 1), "nothing was ever written"


# ------------------------------------------------------------ commits


def test_a_committed_snapshot_is_the_latest(disk: Disk) -> None:
    store = driver(disk)
    assert store.latest() is None
    one = take(store, 1)
    two = take(store, 2, *one.parts)
    reader = SnapshotStore(disk, "demo")
    assert reader.latest() == reader.latest(thorough=False) == two
    assert reader.manifests() == [two, one]
    assert reader.get(1) == one
    with pytest.raises(MissingError, match=r"'demo' has no snapshot 3; it has 1, 2\."):
        reader.get(3)


def test_a_snapshot_is_committed_once_and_in_order(disk: Disk) -> None:
    store = driver(disk)
    take(store, 2)
    for number in (1, 2):
        with pytest.raises(SnapshotError, match=f"snapshot {number} .* comes after 2"):
            store.commit(manifest(number))
    with pytest.raises(SnapshotError, match="committed, and cannot fail"):
        store.failed(2, "why not")


def test_a_snapshot_that_names_what_is_not_there_is_not_committed(disk: Disk) -> None:
    store = driver(disk)
    made = part(store, 1)
    disk.delete(f"demo/{made.path}")
    with pytest.raises(DamagedError, match=r"cannot be committed: .*worker-0-g1.parquet is gone"):
        store.commit(manifest(1, made))
    assert store.latest() is None


def test_attempts_tell_what_became_of_each(disk: Disk) -> None:
    store = driver(disk)
    take(store, 1)
    store.begun(2, full=False, why="on demand")
    store.failed(2, "no room")
    store.begun(3, full=False, why="every 10 s")
    four = SnapshotStore(disk, "demo")
    told = {attempt.snapshot: attempt for attempt in store.attempts()}
    assert list(told) == [3, 2, 1]
    assert (told[1].state, told[1].why, told[1].full) == ("committed", "every 10 s", True)
    assert (told[1].rows, told[1].ended, told[1].phases) == (6, 11.5, {"write": 0.5})
    assert told[1].size == sum(each.size for each in store.get(1).parts)
    assert (told[2].state, told[2].error, told[2].why) == ("failed", "no room", "on demand")
    assert told[3].state == "running"
    assert four.attempts()[0].state == "running", "seen by another process"
    store.release()
    assert four.attempts()[0].state == "aborted"


def test_when_a_snapshot_was_committed_is_known_also_after_it_is_gone(disk: Disk) -> None:
    store = driver(disk)
    for number in range(1, 4):
        store.begun(number, full=True, why="test")
        store.commit(manifest(number, part(store, number)))
    store.begun(4, full=True, why="test")
    store.failed(4, "no room")
    store.clean(keep=1)
    assert [store.committed_at(number) for number in range(1, 6)] == [11.5, 11.5, 11.5, None, None]


def test_a_full_disk_fails_the_snapshot_and_nothing_else() -> None:
    disk = SimulatedDisk()
    store = driver(disk)
    one = take(store, 1)
    store.begun(2, full=False, why="every 10 s")
    made = part(store, 2)
    disk.full = True
    with pytest.raises(FullDiskError, match=r"cannot write simulated:demo/data/.*no room"):
        part(store, 2, worker=1)
    with pytest.raises(FullDiskError, match=r"manifests/000000000002\.json: there is no room"):
        store.commit(manifest(2, made))
    store.failed(2, "no room")  # cannot be written either
    with pytest.raises(FullDiskError):
        store.begun(3, full=False, why="every 10 s")
    store.failed(3, "no room")
    assert [attempt.state for attempt in store.attempts()] == ["failed", "failed", "committed"]
    assert store.latest() == one
    assert disk.temporary_files() == 0
    store.clean()  # makes room
    disk.full = False
    four = take(store, 4, *one.parts)
    assert store.latest() == four


def test_what_cannot_be_written_can_be_read() -> None:
    disk = SimulatedDisk()
    one = take(driver(disk), 1)
    disk.crash()
    disk.read_only = True
    with pytest.raises(ReadOnlyError, match=r"demo/lock: Read-only"):
        driver(disk)
    reader = SnapshotStore(disk, "demo")
    assert reader.latest() == one
    assert reader.attempts()[0].state == "committed"
    with pytest.raises(ReadOnlyError, match="Let this user write there, or use another directory"):
        part(reader, 2)


@pytest.mark.parametrize("step", ["rename", "sync directory", "done"])
@pytest.mark.parametrize("seed", range(8))
def test_a_commit_that_raises_does_not_count_even_after_a_power_cut(step: str, seed: int) -> None:
    check_a_commit_that_raises(step, seed)


@pytest.mark.parametrize(
    ("rule", "old"),
    [
        ("_take_back", 'self.disk.sync(self._at("manifests"))'),
        ("_take_back", "self.disk.delete(path)"),
        ("commit", "self._take_back(manifest.snapshot, error)"),
    ],
)
def test_a_store_that_does_not_take_it_back_is_found(
    monkeypatch: pytest.MonkeyPatch, rule: str, old: str
) -> None:
    monkeypatch.setattr(*rewritten(SnapshotStore, rule, (old, "pass")))

    def eight_times() -> None:
        for seed in range(8):
            check_a_commit_that_raises("done", seed)

    with pytest.raises(AssertionError):
        eight_times()


def check_a_commit_that_raises(step: str, seed: int) -> None:
    disk = SimulatedDisk(seed)
    store = driver(disk)
    take(store, 1)
    store.begun(2, full=True, why="")
    made = manifest(2, part(store, 2))
    disk.hook = failing(step)
    with pytest.raises(DiskError, match="Input/output error"):
        store.commit(made)
    disk.hook = None
    assert not store.has(2)
    disk.lose_power()
    newest = driver(disk).latest()
    assert newest is not None
    assert newest.snapshot == 1


def test_a_manifest_that_cannot_be_taken_back_is_undecided_until_it_is() -> None:
    disk = SimulatedDisk()
    store = driver(disk)
    store.begun(1, full=True, why="")
    made = manifest(1, part(store, 1))
    disk.hook = failing("done", "delete")
    with pytest.raises(UndecidedError, match="could not be taken back"):
        store.commit(made)
    with pytest.raises(UndecidedError):
        store.take_back(1)
    disk.hook = None
    store.take_back(1)
    disk.lose_power()
    assert driver(disk).latest() is None


def failing(*steps: str) -> Callable[[Step, str], None]:
    """A hook by which these steps of manifests fail, each time."""

    def hook(step: Step, path: str) -> None:
        if step in steps and "/manifests/" in path:
            raise disk_error("write", path, OSError(errno.EIO, os.strerror(errno.EIO)))

    return hook


def test_a_directory_that_went_with_its_last_file_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory above is synced instead: a power cut must not bring both back."""
    synced: list[Path] = []
    monkeypatch.setattr(disk_module, "_sync", synced.append)
    disk = LocalDisk(tmp_path)
    disk.write("demo/manifests/1.json", b"{}")
    disk.write("demo/run.json", b"{}")
    synced.clear()
    disk.delete("demo/manifests/1.json")
    disk.sync("demo/manifests")
    assert synced == [tmp_path / "demo"]


def test_a_record_that_cannot_be_written_does_not_undo_a_commit() -> None:
    disk = SimulatedDisk()
    store = driver(disk)
    store.begun(1, True, "on demand")
    made = part(store, 1)

    def full_after_the_manifest(step: str, path: str) -> None:
        disk.full = disk.full or (step == "done" and "manifests" in path)

    disk.hook = full_after_the_manifest
    store.commit(manifest(1, made))
    assert disk.full
    assert store.latest() is not None
    assert store.attempts()[0].state == "committed"


# ------------------------------------------------------------ damage


def damaged_store() -> tuple[SimulatedDisk, SnapshotStore, list[Manifest]]:
    disk = SimulatedDisk(seed=5)
    store = driver(disk)
    return disk, store, [take(store, number) for number in (1, 2, 3)]


def test_a_damaged_manifest_is_named_and_not_skipped_without_a_word() -> None:
    disk, store, made = damaged_store()
    disk.flip("demo/manifests/000000000003.json", 8 * 300)
    with pytest.raises(DamagedError, match=r"manifests/000000000003\.json is damaged"):
        store.manifests()
    told: list[SnapshotError | StorageError] = []
    assert store.manifests(told) == [made[1], made[0]]
    assert "manifests/000000000003.json" in str(told[0])
    with pytest.raises(DamagedError, match=r"newest snapshot of 'demo' is not whole.*000003\.json"):
        store.latest()
    assert store.latest(allow_older=True) == made[1]


def test_a_snapshot_with_a_damaged_or_missing_part_is_refused() -> None:
    disk, store, made = damaged_store()
    disk.flip(f"demo/{made[2].parts[1].path}")
    with pytest.raises(DamagedError, match=r"000000000003/stage/step/worker-1-g1.parquet is dam"):
        store.latest()
    assert store.latest(thorough=False) == made[2], "workers will notice"
    assert store.latest(allow_older=True) == made[1]
    disk.delete(f"demo/{made[1].parts[0].path}")
    assert store.latest(allow_older=True, thorough=True) == made[0]
    disk.delete(f"demo/{made[2].parts[0].path}")
    with pytest.raises(DamagedError, match=r"worker-0-g1\.parquet is damaged: it is gone"):
        store.latest(thorough=False)
    disk.truncate(f"demo/{made[0].parts[0].path}", 3)
    with pytest.raises(DamagedError, match=r"none of the snapshots of 'demo' is whole"):
        store.latest(allow_older=True)


def test_a_snapshot_of_another_flow_is_refused_wherever_it_lies() -> None:
    disk = SimulatedDisk()
    take(driver(disk), 1)
    for name in disk.list("demo"):
        disk.write(f"other/{name}", disk.read(f"demo/{name}"))
    other = driver(disk, "other")
    for look in (other.latest, other.manifests, lambda: other.get(1)):
        with pytest.raises(DoesNotFitError, match=r"is of flow 'demo', .* directory of 'other'"):
            look()
    with pytest.raises(DoesNotFitError):
        other.commit(manifest(2, flow="demo"))


def test_a_newer_format_is_never_skipped() -> None:
    disk, store, made = damaged_store()
    later = dataclasses.asdict(made[2]) | {"format": 2}
    disk.replace("demo/manifests/000000000003.json", seal("manifest", later))
    with pytest.raises(FormatError):
        store.latest(allow_older=True)


def test_a_renamed_manifest_is_refused() -> None:
    disk, store, _ = damaged_store()
    disk.write("demo/manifests/000000000009.json", disk.read("demo/manifests/000000000002.json"))
    with pytest.raises(DamagedError, match="is of snapshot 2: it has been renamed"):
        store.latest()


def test_files_of_others_are_left_alone() -> None:
    disk, store, made = damaged_store()
    for name in ("manifests/notes.txt", "manifests/copy of 3.json", "data/mine/x", "attempts/x"):
        disk.write(f"demo/{name}", b"hello")
    assert store.latest() == made[2]
    assert len(store.attempts()) == 3
    store.clean(keep=1)
    assert disk.exists("demo/manifests/notes.txt")
    assert disk.exists("demo/data/mine/x")


# ------------------------------------------------------------ retention


def test_clean_keeps_what_kept_snapshots_need_and_nothing_else(disk: Disk) -> None:
    store = driver(disk)
    base = take(store, 1)
    take(store, 2)
    three = take(store, 3, base.parts[0])
    four = take(store, 4, *three.parts)
    store.begun(5, False, "")
    under_way = part(store, 5)
    gone = store.clean(keep=2)
    assert (gone.manifests, gone.parts, gone.undecided) == (2, 3, ())
    assert store.manifests() == [four, three]
    store.check(three)
    store.check(four)
    assert store.read_part(under_way)
    assert {f"data/{name}" for name in disk.list("demo/data")} == {
        *(each.path for each in four.parts),
        under_way.path,
    }
    assert [attempt.state for attempt in store.attempts()] == ["running", *["committed"] * 4]
    assert store.clean(keep=2).parts == 0
    with pytest.raises(SnapshotError, match="at least one"):
        store.clean(keep=0)


def test_clean_deletes_what_older_generations_still_write(disk: Disk) -> None:
    store = driver(disk)
    take(store, 1)
    late = part(store, 1, worker=7, generation=99)
    assert store.latest() is not None
    store.clean()
    assert not disk.exists(f"demo/{late.path}")
    assert store.latest() is not None
    store.clean()


def test_clean_keeps_all_parts_while_a_damaged_manifest_might_need_them() -> None:
    disk, store, made = damaged_store()
    stray = part(store, 2, worker=9)
    whole = disk.read("demo/manifests/000000000003.json")
    disk.truncate("demo/manifests/000000000003.json", 40)
    told = store.clean(keep=1)
    assert told.parts == 0
    assert told.undecided == ("simulated:demo/manifests/000000000003.json",)
    assert store.read_part(stray)
    disk.replace("demo/manifests/000000000003.json", whole)  # from a copy
    assert store.latest() == made[2]
    disk.truncate("demo/manifests/000000000003.json", 40)
    take(store, 4)
    assert store.clean(keep=1).parts == 7, "it is older than all that are kept"
    assert store.latest(allow_older=True) == store.get(4)


def test_clean_keeps_what_a_flow_was_loaded_from() -> None:
    disk, store, made = damaged_store()
    disk.flip(f"demo/{made[2].parts[0].path}")
    disk.flip(f"demo/{made[1].parts[0].path}")
    assert store.latest(allow_older=True) == made[0]
    store.clean(keep=1)
    store.check(made[0])
    four = take(store, 4, *made[0].parts)
    store.clean(keep=1)
    assert store.manifests() == [four]
    store.check(four)


def test_attempts_do_not_pile_up() -> None:
    store = driver(SimulatedDisk())
    for number in range(1, ATTEMPTS_KEPT + 21):
        store.begun(number, False, "")
        store.failed(number, "why not")
    store.clean()
    assert len(store.attempts()) == ATTEMPTS_KEPT
    assert store.attempts()[0].snapshot == ATTEMPTS_KEPT + 20


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_done_the_newest_snapshots_stay_whole(seed: int) -> None:
    chance = random.Random(seed)
    disk = SimulatedDisk(seed)
    store = driver(disk)
    store.next_run()
    parts: tuple[Part, ...] = ()
    for number in range(1, 41):
        store.begun(number, False, "")
        fresh = [part(store, number, worker) for worker in range(chance.randrange(1, 4))]
        part(store, chance.randrange(1, number + 1), 9, generation=0)  # a worker given up for dead
        if chance.random() < 0.2:
            store.failed(number, "why not")
        else:
            parts = (*(() if chance.random() < 0.3 else parts), *fresh)
            store.commit(manifest(number, *parts))
        if chance.random() < 0.5:
            store.clean(keep=chance.randrange(1, 4))
        if chance.random() < 0.2:
            disk.crash()
            store = driver(disk)
            assert store.next_run().snapshot == number + 1
        for each in store.manifests():
            store.check(each)
    latest = store.latest()
    assert latest is None or latest.parts == parts
