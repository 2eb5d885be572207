"""What a job asks of its store, besides snapshots."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.controller.tallies import tallies

from railgun.controller import storekeeper
from railgun.controller.storekeeper import GENERATIONS, Snapshots, Storekeeper
from railgun.core import orders as o
from railgun.snapshots.disk import disk_error
from railgun.testing.disks import SimulatedDisk, Step


def test_a_job_that_starts_again_very_often_uses_no_generation_that_the_next_may_use(
    tmp_path: Path,
) -> None:
    def keeper() -> Storekeeper:
        made = Storekeeper(
            tallies(tmp_path / "out").plan(), Snapshots(str(tmp_path / "s")), "tallies"
        )
        made.submit = lambda work: work()
        return made

    first = keeper()
    last = first.generation + 1
    for _ in range(2 * GENERATIONS):
        last += 2  # as a restart does
        first.new_generation(last)
    first.close()
    second = keeper()
    assert second.generation + 1 > last
    second.close()


def test_a_manifest_that_may_be_there_keeps_the_snapshot_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is taken back for good nobody is told that the snapshot failed: a flow could go back too early."""
    monkeypatch.setattr(storekeeper, "UNDECIDED_S", 0.0)
    disk = SimulatedDisk()
    plan = tallies(tmp_path / "out").plan()
    keeper = Storekeeper(plan, Snapshots(str(tmp_path / "s")), "tallies", disk=disk)
    work: deque[Callable[[], None]] = deque()
    keeper.submit = work.append
    told: list[str] = []

    def broken(step: Step, path: str) -> None:
        if "/manifests/" in path and step in ("done", "delete"):
            raise disk_error("write", path, OSError(errno.EIO, os.strerror(errno.EIO)))

    keeper.record(o.Record(1, True, "asked for"), told.append)
    work.popleft()()
    assert told == [""]
    disk.hook = broken
    keeper.write(o.Write(1, False), 1, told.append, {})
    for _ in range(5):
        work.popleft()()
        assert told == [""], "the manifest is there, and nobody knows for how long"
    assert keeper.store.has(1)
    disk.hook = None
    work.popleft()()
    assert len(told) == 2
    assert "could not be taken back" in told[1]
    assert not work
    assert not keeper.store.has(1)
    keeper.close()
