"""Whether a record is late is decided by the records before it in its part of the source, and by nothing else.

However quickly parts are read, on however many workers, live, again after a crash or as a batch run of the source:
the same records are late.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from railgun import Collect, Flow, Stateful
from railgun.engine.batch.local import run_local
from railgun.engine.batch.stages import Feed
from railgun.engine.batch.task import Batch
from railgun.engine.protocol.frontier import MIN, late_rows
from railgun.flows.flow import Stream
from railgun.flows.shipping import ship
from railgun.flows.source import Reader, Source
from railgun.testing.flow_tester import FlowTester
from railgun.transport.rows import RowBatch

PARTS = 3
LATENESS = 20  # µs
WINDOW = 50  # µs
Record = tuple[int, int, int, int]  # part, number, key, time


class Parts(Source[Record]):
    """Brings the records of each part in order, `at_once` of them at most with a call."""

    def __init__(self, records: Sequence[Record], at_once: int) -> None:
        self.records = records
        self.at_once = at_once

    def partitions(self) -> Sequence[int]:
        return range(PARTS)

    def open(self, partition: Any, position: Any) -> Reader[Record]:
        mine = [record for record in self.records if record[0] == partition]
        return PartReader(mine, position or 0, self.at_once)


class PartReader(Reader[Record]):
    def __init__(self, records: list[Record], position: int, at_once: int) -> None:
        self.records = records
        self.position: int = position
        self.at_once = at_once

    def read(self, most: int, now: int) -> Sequence[Record] | None:
        if self.position >= len(self.records):
            return None
        read = self.records[self.position : self.position + min(most, self.at_once)]
        self.position += len(read)
        return read


def drawn(seed: int, count: int = 600) -> list[Record]:
    chance = random.Random(seed)
    records = []
    for number in range(count):
        time = 1_000 + number + chance.choice([0, 0, -10, -30, -60, -150, 5])
        records.append((chance.randrange(PARTS), number, chance.randrange(7), time))
    return records


def late_by_hand(records: Sequence[Record]) -> dict[int, int]:
    """Return the late records by their numbers, each with the bound it is late by."""
    found: dict[int, int] = {}
    latest: dict[int, int] = {}
    for part, number, _, time in records:
        bound = latest.get(part, time) - LATENESS
        if time < bound:
            found[number] = bound
        latest[part] = max(latest.get(part, time), time)
    return found


class Judged(Stateful[int, Record, dict[int, int], Any]):
    """Counts records by windows; tells which record is late, and which is too late for its window."""

    def initial(self) -> dict[int, int]:
        return {}

    def on_item(self, item: Record, context: Any) -> list[Any]:
        end = (context.time // WINDOW + 1) * WINDOW
        told: list[Any] = [("late", item[1])] if context.time < context.frontier else []
        if end <= context.frontier:
            return [*told, ("too late", item[1])]
        context.state[end] = context.state.get(end, 0) + 1
        context.set_timer(end)
        return told

    def on_timer(self, context: Any) -> list[Any]:
        return [("window", context.key, context.time, context.state.pop(context.time))]


def expected(records: Sequence[Record]) -> list[Any]:
    late = late_by_hand(records)
    found: list[Any] = [("late", number) for number in late]
    windows: dict[tuple[int, int], int] = {}
    for _, number, key, time in records:
        end = (time // WINDOW + 1) * WINDOW
        if end <= late.get(number, MIN):
            found.append(("too late", number))
        else:
            windows[key, end] = windows.get((key, end), 0) + 1
    return sorted(found + [("window", *place, count) for place, count in windows.items()])


def judging(records: Sequence[Record], at_once: int) -> Flow:
    flow = Flow("judged")
    read: Stream[Record] = flow.source(
        Parts(records, at_once), name="in", time=lambda record: record[3], lateness=LATENESS / 1e6
    )
    # Steps of every kind stand between: what they make of a record is as late as the record.
    read = read.filter(lambda record: True).flat_map(lambda record: [record])
    keyed = read.key_by(lambda record: record[1] % 5, name="first")
    again = keyed.stateful_map(lambda state, record: (state + 1, record), initial=int, name="count")
    again.key_by(lambda record: record[2], name="second").stateful(Judged(), name="judged").sink(
        Collect(), name="out"
    )
    return flow


@pytest.mark.parametrize("at_once", [1, 7, 100, 5_000])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_records_are_late_at_every_speed(seed: int, at_once: int) -> None:
    records = drawn(seed)
    tester = FlowTester(judging(records, at_once), workers=1 + seed % 3, seed=seed)
    tester.finish()
    assert len(late_by_hand(records)) > 50
    assert sorted(tester.collected("out")) == expected(records)


@pytest.mark.parametrize("seed", range(12))
def test_rescales_and_crashes_make_no_record_late(seed: int) -> None:
    records, chance = drawn(seed), random.Random(seed)
    tester = FlowTester(judging(records, 3), workers=2, seed=seed, snapshots=True)
    for _ in range(6):
        tester.run(chance.randrange(200))
        match chance.randrange(3):
            case 0:
                tester.rescale(chance.randint(1, 4), settle=False)
            case 1:
                tester.snapshot(settle=False)
            case 2:
                tester.crash(chance.choice(tester.workers), settle=False)
    tester.finish()
    assert sorted(tester.collected("out")) == expected(records)


@pytest.mark.parametrize("tasks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_batch_run_of_the_source_finds_the_same_late_records(seed: int, tasks: int) -> None:
    records = drawn(seed)
    flow = judging(records, 10)
    plan = flow.plan()
    run = Batch(ship(flow, plan), 4, 0, {"in": Feed()}, {"out": None}, own={"in": range(PARTS)})
    numbers = [list(range(PARTS))[task::tasks] for task in range(tasks)]
    tables = [[pa.RecordBatch.from_pydict({"part": some})] for some in numbers]
    found, _ = run_local(run, {"in": tables})
    assert sorted(found["out"]) == expected(records)


def test_late_rows_are_found_by_those_before_them_and_by_what_was_reached() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        times = [chance.randrange(200) for _ in range(chance.randint(1, 30))]
        lateness, reached = chance.choice([0, 5, 50]), chance.choice([MIN, 0, 60, 180])
        bounds, bound = [], reached
        for time in times:
            bounds.append(bound if time < bound else MIN)
            bound = max(bound, time - lateness)
        late, after = late_rows(np.array(times), reached, lateness)
        assert ([MIN] * len(times) if late is None else late.tolist()) == bounds
        assert (late is None, after) == (bounds == [MIN] * len(times), bound)


def test_times_near_the_beginning_of_time_are_not_late() -> None:
    late, after = late_rows(np.array([MIN + 3, MIN + 1, MIN + 2]), MIN, 10)
    assert (late, after) == (None, MIN)


def test_late_rows_travel_with_their_batch() -> None:
    batch = RowBatch.keyed(["a", "b", "c"], [1, 2, 3], np.array([5, 6, 7]))
    batch.late = np.array([MIN, 9, MIN])
    came = RowBatch.decode(batch.encode())
    assert came.late is not None
    assert came.late.tolist() == [MIN, 9, MIN]
    assert (came.keys, came.values, came.hashes.tolist()) == (
        batch.keys, batch.values, batch.hashes.tolist(),
    )  # fmt: skip
    assert came.take(np.array([2, 1])).late.tolist() == [MIN, 9]  # type: ignore[union-attr]
