"""What a job asks of its store, besides snapshots."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.engine.controller.tallies import tallies

from railgun import Collect, Flow, FlowError, Generate, Items, Reader, Source
from railgun.engine.controller import storekeeper
from railgun.engine.controller.storekeeper import (
    RESERVED_GENERATIONS,
    ChoiceError,
    Snapshots,
    Storekeeper,
)
from railgun.engine.protocol.lifecycle import messages as o
from railgun.engine.snapshots.errors import DoesNotFitError
from railgun.flows.errors import SourceError
from railgun.storage.object_store import disk_error
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
    for _ in range(2 * RESERVED_GENERATIONS):
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
    monkeypatch.setattr(storekeeper, "TAKE_BACK_PAUSE_S", 0.0)
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
    keeper.write(o.Write(1, False), 1, told.append, {}, {})
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


def numbers(source: Source[int]) -> Flow:
    flow = Flow("numbers")
    flow.source(source, name="in").sink(Collect(), name="out")
    return flow


def item(index: int, chance: Random) -> int:
    return index


def committed(source: Source[int], where: Path) -> None:
    """Commit a snapshot of a flow with this source."""
    keeper = Storekeeper(numbers(source).plan(), Snapshots(str(where)), "numbers")
    keeper.submit = lambda work: work()
    told: list[str] = []
    keeper.record(o.Record(1, True, "asked for"), told.append)
    keeper.write(o.Write(1, False), 1, told.append, {}, {})
    keeper.close()
    assert told == ["", ""]


def begin(source: Source[int], where: Path, **chosen: Any) -> None:
    """Begin a job that goes on from the snapshot, and end it."""
    Storekeeper(numbers(source).plan(), Snapshots(str(where), **chosen), "numbers").close()


@pytest.mark.parametrize(
    ("before", "now", "word"),
    [
        (Generate(item, count=900, partitions=2), Generate(item, count=900, partitions=4), "2"),
        (Generate(item, count=900, partitions=4), Generate(item, count=900, partitions=2), "4"),
        (Generate(item, seed=1), Generate(item, seed=2), "seed"),
        (Generate(item, count=900), Generate(item, count=1800), "count"),
        (Items(range(9), partitions=2), Items(range(9), partitions=3), "partitions"),
        (Items(range(9)), Items(range(10)), "items"),
    ],
    ids=["more", "fewer", "seed", "count", "items dealt out", "items"],
)
def test_a_source_whose_positions_mean_something_else_now_is_refused(
    before: Source[int], now: Source[int], word: str, tmp_path: Path
) -> None:
    """Otherwise records are left out and others come twice, and nobody is told."""
    committed(before, tmp_path)
    begin(before, tmp_path)
    with pytest.raises(DoesNotFitError) as caught:
        begin(now, tmp_path)
    assert "source 'in'" in str(caught.value)
    assert word in str(caught.value)
    begin(now, tmp_path, drop=frozenset({"in"}))
    begin(now, tmp_path, fresh=True)


class Odd(Source[int]):
    """Says of its positions what cannot be saved."""

    def partitions(self) -> list[str]:
        """One part."""
        return ["all"]

    def open(self, partition: object, position: object) -> Reader[int]:
        """Nobody comes here."""
        raise AssertionError

    def layout(self) -> dict[str, object]:
        """Not JSON."""
        return {"parts": object()}


def test_a_layout_that_is_not_json_is_refused_where_the_flow_is_written(tmp_path: Path) -> None:
    with pytest.raises(FlowError, match=r"test_storekeeper.py:\d+: .*layout of source 'in'"):
        begin(Odd(), tmp_path)


class Raising(Odd):
    """A source whose layout cannot be told."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def layout(self) -> dict[str, object]:
        """Fail."""
        raise self.error


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), StopIteration("no"), SystemExit("no"), asyncio.CancelledError("no")],
    ids=repr,
)
def test_what_a_layout_raises_names_the_source(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"(?s)'in': Raising.layout failed.*no") as found:
        begin(Raising(error), tmp_path)
    assert found.value.__cause__ is error


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"rename": "a=b"}, r"rename=\{'old': 'new'\}.*'a=b'"),
        ({"rename": ["a", "b"]}, "rename="),
        ({"rename": {"a": 1}}, "rename="),
        ({"drop": "total"}, r"drop=\{'step'\}.*'total'"),
        ({"drop": 7}, "drop="),
        ({"drop": {7}}, "drop="),
        ({"begin": 1.5}, "begin="),
        ({"begin": True}, "begin="),
        ({"every": "10"}, "seconds"),
        ({"url": 7}, "directory"),
    ],
    ids=str,
)
def test_choices_of_the_wrong_type_say_what_is_expected(
    chosen: dict[str, Any], told: str, tmp_path: Path
) -> None:
    flow = numbers(Items(range(3)))
    with pytest.raises(ChoiceError, match=told):
        Storekeeper(flow.plan(), Snapshots(**{"url": str(tmp_path), **chosen}), "numbers")


def test_names_to_drop_may_be_a_list_and_a_directory_a_path(tmp_path: Path) -> None:
    committed(Items(range(3)), tmp_path)
    dropped: Any = ["in"]
    begin(Items(range(4)), tmp_path, drop=dropped)
    where: Any = tmp_path
    Storekeeper(numbers(Items(range(3))).plan(), Snapshots(where, begin=where), "numbers").close()
