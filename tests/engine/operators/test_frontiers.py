"""The frontier that records and timers see: it never goes back for a key, not even after a load or a move."""

from __future__ import annotations

from typing import Any

import pytest

from railgun import Collect, Flow, Items, Stateful
from railgun.engine.operators.operator import Setting
from railgun.engine.operators.stateful import StatefulSteps
from railgun.engine.protocol.frontier import MAX, MIN
from railgun.engine.snapshots.manifest import Manifest
from railgun.testing.flow_tester import FlowTester
from railgun.transport.rows import RowBatch

SECOND = 1_000_000


class Windows(Stateful[Any, Any, Any, Any]):
    """Counts records by windows of ten seconds; what is late for its window is told as such."""

    def initial(self) -> dict[int, int]:
        return {}

    def on_item(self, item: Any, context: Any) -> list[Any]:
        end = (context.time // (10 * SECOND) + 1) * 10 * SECOND
        if end <= context.frontier:
            return [("late", context.key, item[1])]
        context.state[end] = context.state.get(end, 0) + 1
        context.set_timer(end)
        return []

    def on_timer(self, context: Any) -> list[Any]:
        made = [("window", context.key, context.time // SECOND, context.state.pop(context.time))]
        if not context.state:
            context.forget()
        return made


class Times(Stateful[Any, Any, Any, Any]):
    """Tells for each timer its time and the frontier it sees."""

    def initial(self) -> int:
        return 0

    def on_item(self, item: Any, context: Any) -> None:
        context.state += 1
        context.set_timer(context.time + 7 * SECOND)

    def on_timer(self, context: Any) -> list[Any]:
        return [(context.time, context.frontier)]

    def on_end(self, context: Any) -> list[Any]:
        return [(context.time, context.frontier)]


def fed(logic: Stateful[Any, Any, Any, Any], seed: int = 0) -> FlowTester:
    flow = Flow("timed")
    nothing: list[Any] = []
    records = flow.source(Items(nothing), name="in", time=lambda item: item[1] * SECOND)
    keyed = records.key_by(lambda item: item[0], name="by key")
    keyed.stateful(logic, name="timed").sink(Collect(), name="out")
    return FlowTester(flow, workers=2, feed=["in"], snapshots=True, seed=seed)


@pytest.mark.parametrize("seed", range(20))
def test_a_late_record_after_a_restart_opens_no_window_that_was_delivered(seed: int) -> None:
    tester = fed(Windows(), seed)
    tester.feed("in", [("a", 1), ("b", 2), ("a", 25)])
    tester.advance(1)
    delivered = sorted(tester.collected("out"))
    assert delivered == [("window", "a", 10, 1), ("window", "b", 10, 1)]
    tester.snapshot()
    tester.crash(seed % 2, settle=False)
    tester.feed("in", [("b", 3), ("a", 4), ("c", 5)])  # read with the first records after the load
    tester.finish()
    assert sorted(tester.collected("out")) == sorted(
        [*delivered, ("late", "b", 3), ("late", "a", 4), ("late", "c", 5), ("window", "a", 30, 1)]
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_timer_never_sees_a_frontier_below_its_time(seed: int) -> None:
    tester = fed(Times(), seed)
    for second in range(0, 60, 5):
        tester.feed("in", [(key, second) for key in range(10)], settle=False)
        tester.run(seed)
        if second % 20 == 0:
            tester.rescale(1 + (second + seed) % 4, settle=False)
    tester.finish()
    found = tester.collected("out")
    assert len(found) >= 10
    assert [pair for pair in found if pair[1] < pair[0]] == []


def operator_of(logic: Stateful[Any, Any, Any, Any]) -> tuple[StatefulSteps, list[Any]]:
    operator = StatefulSteps(Setting("timed"), logic)
    out: list[Any] = []
    operator.emit = lambda batch: out.extend(batch.values)  # type: ignore[method-assign]
    return operator, out


def push(operator: StatefulSteps, *records: tuple[Any, int]) -> None:
    for key, second in records:
        operator.push(RowBatch.keyed([key], [(key, second)], second * SECOND))


def test_what_is_told_after_a_load_does_not_take_time_back() -> None:
    operator, out = operator_of(Windows())
    operator.restore(25 * SECOND)
    operator.advance(3 * SECOND)
    push(operator, ("a", 4))
    assert out == [("late", "a", 4)]
    assert operator.reached() == 25 * SECOND


def test_timers_that_were_due_by_the_snapshot_fire_with_the_first_word_of_time() -> None:
    operator, out = operator_of(Times())
    push(operator, ("a", 1))
    operator.restore(25 * SECOND)
    operator.advance(3 * SECOND)
    assert out == [(8 * SECOND, 25 * SECOND)]


def test_a_key_that_moves_takes_along_how_far_time_had_come_for_it() -> None:
    old, _ = operator_of(Windows())
    old.advance(25 * SECOND)
    push(old, ("a", 26))
    new, out = operator_of(Windows())
    keys = new.take(memoryview(old.collect(["a"])))
    new.restore_keys(keys, old.reached())
    push(new, ("a", 4), ("b", 4))  # b was here all the time: it is not late
    assert out == [("late", "a", 4)]
    assert (new.reached(), new.reached(anywhere=True)) == (MIN, 25 * SECOND)
    new.advance(26 * SECOND)
    assert new.floors == {}
    push(new, ("b", 4))
    assert out[-1] == ("late", "b", 4)


def test_timers_that_are_left_at_the_end_see_their_time() -> None:
    operator, out = operator_of(Times())
    push(operator, ("a", 1))
    operator.end()
    assert out[0] == (8 * SECOND, 8 * SECOND)
    assert operator.reached() < MAX


def test_a_snapshot_has_the_frontiers_and_one_without_still_loads() -> None:
    tester = fed(Windows())
    tester.feed("in", [("a", 1), ("a", 25)])
    tester.advance(1)
    tester.snapshot()
    assert tester.world.keeper is not None
    manifest = tester.world.keeper.manifest
    assert manifest is not None
    assert manifest.frontiers == {"timed": 25 * SECOND}
    again = Manifest.from_json(manifest.to_json(), "m")
    assert again.frontiers == manifest.frontiers
    old = Manifest(1, "demo", 1, 1, 1, True, False, 0.0, 1.0, (), (), ())
    assert Manifest.from_json(old.to_json(), "m").frontiers == {}
