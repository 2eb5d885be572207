"""A job that is cut short at any step, by a crash or a power cut, loses nothing that was committed."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from railgun.engine.snapshots.manifest import Manifest, Part
from railgun.engine.snapshots.store import SnapshotStore
from railgun.storage.errors import MissingError
from railgun.testing.disks import STEPS, Crash, SimulatedDisk, Step


@pytest.mark.parametrize("old", [b"old", None])
@pytest.mark.parametrize("step", range(len(STEPS)))
def test_a_write_is_all_or_nothing(step: int, old: bytes | None) -> None:
    seen: set[bytes | None] = set()
    for seed in range(40):
        disk = SimulatedDisk(seed)
        if old is not None:
            disk.write("d/f", old)
        disk.crash_at(step)
        with pytest.raises(Crash, match=f"before {STEPS[step]} of d/f"):
            disk.write("d/f", b"new" * 100)
        disk.lose_power()
        assert disk.list("") in ([], ["d/f"])
        try:
            seen.add(disk.read("d/f"))
        except MissingError:
            seen.add(None)
    old_or_new = {"write": {old}, "sync": {old}, "rename": {old}, "done": {b"new" * 100}}
    assert seen == old_or_new.get(STEPS[step], {old, b"new" * 100})


@pytest.mark.parametrize("without", [("sync",), ("sync directory",)])
def test_the_simulated_disk_notices_what_is_left_out(without: tuple[Step, ...]) -> None:
    seen: set[bytes | None] = set()
    for seed in range(60):
        disk = SimulatedDisk(seed, without=without)
        disk.write("d/f", b"new" * 100)
        disk.lose_power()
        seen.add(disk.read("d/f") if disk.exists("d/f") else None)
    assert len(seen) > 1
    assert seen - {b"new" * 100}


class Job:
    """Takes snapshots, and remembers what it was told is committed."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.committed: list[int] = []
        self.numbers: set[int] = set()
        self.generations: set[int] = set()

    def run(self, snapshots: int) -> None:
        """A driver's life: load, then take snapshots, each with the parts of the last."""
        store = SnapshotStore(self.disk, "demo")
        store.acquire()
        run = store.next_run()
        assert run.generation not in self.generations
        assert not self.numbers or run.snapshot > max(self.numbers)
        self.generations.add(run.generation)
        loaded = store.latest()
        newest = 0 if loaded is None else loaded.snapshot
        assert newest >= max(self.committed, default=0), "a committed snapshot is gone"
        if loaded is not None:
            self.committed.append(newest)  # its sinks' output is visible from here on
        parts: tuple[Part, ...] = () if loaded is None else loaded.parts
        for number in range(run.snapshot, run.snapshot + snapshots):
            assert number not in self.numbers, "an id was used twice"
            store.begun(number, full=False, why="every 10 s")
            self.numbers.add(number)
            data = b"state %d" % number
            part = store.write_part(number, run.generation, "s", "t", 0, data, rows=1)
            parts = (*parts[-2:], part)
            made = Manifest(
                *(1, "demo", number, run.generation, 1, False, False, 0.0, 1.0, parts, (), ())
            )
            store.commit(made)
            self.committed.append(number)
            store.clean(keep=2)


def check(job: Job) -> None:
    store = SnapshotStore(job.disk, "demo")
    for manifest in store.manifests():
        store.check(manifest)


@pytest.mark.parametrize("power", [False, True], ids=["crash", "power cut"])
@pytest.mark.parametrize("seed", range(3))
def test_cut_short_anywhere_nothing_committed_is_lost(seed: int, power: bool) -> None:
    for cut in itertools.count():
        disk = SimulatedDisk(seed * 10_000 + cut)
        job = Job(disk)
        job.run(2)
        disk.crash()
        disk.crash_at(cut)
        try:
            job.run(3)
            whole = True
        except Crash:
            whole = False
        if power:
            disk.lose_power()
        disk.crash()
        check(job)
        job.run(1)
        check(job)
        if whole:
            assert cut > 50, "the cuts went through all of it"
            return


@pytest.mark.parametrize("seed", range(15))
def test_cut_short_again_and_again(seed: int) -> None:
    """A crash first, then power: what a driver has seen after the one must not be gone after the other."""
    disk = SimulatedDisk(seed)
    job = Job(disk)
    for turn in range(25):
        disk.crash_at((seed * 31 + turn * 17) % 60)
        with contextlib.suppress(Crash):
            job.run(3)
        if turn % 3 == 0:
            disk.lose_power()
        disk.crash()
        check(job)
    job.run(1)
    assert job.committed


def test_a_power_cut_does_not_bring_back_a_manifest_without_its_parts() -> None:
    """Parts that come back are harmless, and are deleted by the next to clean."""
    for seed in range(30):
        disk = SimulatedDisk(seed)
        job = Job(disk)
        job.run(6)
        disk.lose_power()
        check(job)
        job.run(1)
        named = {
            part.path for each in SnapshotStore(disk, "demo").manifests() for part in each.parts
        }
        assert {f"data/{name}" for name in disk.list("demo/data")} == named


def test_what_a_driver_has_loaded_is_there_for_good() -> None:
    """A driver is gone between the name of a manifest and its sync; the next one loads it, and then power is cut."""
    for seed in range(30):
        disk = SimulatedDisk(seed)
        job = Job(disk)
        job.run(1)
        disk.crash()

        def gone_before_the_sync(step: Step, path: str, disk: SimulatedDisk = disk) -> None:
            if step == "sync directory" and "manifests" in path:
                disk.crash()
                raise Crash

        disk.hook = gone_before_the_sync
        with pytest.raises(Crash):
            job.run(1)
        loaded = SnapshotStore(disk, "demo").latest()
        assert loaded is not None
        assert loaded.snapshot == 2
        disk.lose_power()
        assert SnapshotStore(disk, "demo").latest() == loaded
