"""A batch run gives what a live run gives: flows drawn by chance, run both ways, compared item by item.

The live flow is fed one record at a time, on one worker: so there is one order of things, which a batch run, however
many tasks its input and its keys are divided into, has to find again. Every item shows the order that led to it.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.engine.batch.random_flows import Last, Row, Windows, draw, rows

from railgun import Collect, DeadLetter, Flow, Items
from railgun.engine.batch import order, pieces, task
from railgun.engine.batch.local import run_local
from railgun.engine.batch.stages import Feed, timing_of
from railgun.engine.batch.task import Batch
from railgun.flows.flow import Stream
from railgun.flows.plan import DEAD
from railgun.flows.shipping import ship
from railgun.testing.flow_tester import FlowTester

COLUMNS = pa.schema(
    [("key", pa.int64()), ("n", pa.int64()), ("time", pa.int64()), ("what", pa.string())]
)
SHAPES = [(1, 1, True), (3, 4, False), (4, 7, True)]


def sinks(flow: Flow) -> list[str]:
    return [*(step.name for step in flow.steps.values() if step.kind == "sink"), DEAD]


def told(items: list[Any]) -> Counter[str]:
    """What can be compared of items; dead letters have tracebacks, which differ."""
    return Counter(
        repr((item.step, item.key, item.record)) if isinstance(item, DeadLetter) else repr(item)
        for item in items
    )


def live(flow: Flow, fed: list[Row]) -> dict[str, Counter[str]]:
    tester = FlowTester(flow, workers=1, feed=["s0"], now=0)
    for row in fed:
        tester.feed("s0", [row])
    tester.finish()
    return {sink: told(tester.collected(sink)) for sink in sinks(flow)}


def batch(
    flow: Flow, fed: list[Row], parts: int, partitions: int, ordered: bool
) -> dict[str, Counter[str]]:
    feed = Feed(None, "time" if ordered else None, ordered)
    run = Batch(ship(flow, flow.plan()), parts, 0, {"s0": feed}, dict.fromkeys(sinks(flow)))
    size = max(1, len(fed) // partitions)
    tables = [
        [pa.RecordBatch.from_pylist(fed[at : at + size], COLUMNS)]
        for at in range(0, len(fed), size)
    ]
    found, _ = run_local(run, {"s0": tables})
    return {sink: told(items) for sink, items in found.items()}


@pytest.mark.simulation
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_a_batch_run_gives_what_a_live_run_gives(first: int) -> None:
    compare(range(first, first + 50))


def compare(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        flow = draw(rng)
        fed = rows(rng, rng.randint(0, 60), rng.choice([1, 3, 10]))
        expected = live(flow, fed)
        for shape in SHAPES:
            assert batch(flow, fed, *shape) == expected, f"seed {seed}, {shape}"


def _mutate(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant == "no order":
        monkeypatch.setattr(order, "ranks", lambda paths: np.arange(len(paths[0])))
        monkeypatch.setattr(order, "as_bytes", lambda path: b"")
        monkeypatch.setattr(order, "from_bytes", lambda data: (order.MAX_ORDER_VALUE,))
    elif mutant == "ports forgotten":
        decode = pieces.decode

        def forgetful(data: memoryview) -> pieces.Piece:
            piece = decode(data)
            piece.port = 0
            return piece

        monkeypatch.setattr(task, "decode", forgetful)
    elif mutant == "end first":
        at_the_end = order.at_the_end
        monkeypatch.setattr(
            order, "at_the_end", lambda stage, *rest: at_the_end(stage - (1 << 63), *rest)
        )


@pytest.mark.parametrize("mutant", ["no order", "ports forgotten"])
def test_what_would_be_wrong_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: each of these changes to the rules is caught by some seed."""
    _mutate(mutant, monkeypatch)
    with pytest.raises(AssertionError):
        compare(range(300))


def ends_follow() -> list[str]:
    """What a second stage sees of items, and of what the keys of the first one say at their end."""
    flow = Flow("ends", dead_letters=Collect())
    fed: Stream[Any] = flow.source(Items([]), name="s0")
    told_of = fed.key_by(lambda row: row["key"]).stateful(Last())
    kinds = told_of.map(lambda row: "end" if row["what"] == "end" else "item")
    kinds.key_by(lambda kind: 0).stateful_map(
        lambda state, kind: ([*state, kind],) * 2, initial=list, name="all"
    ).sink(Collect(), name="out")
    items = rows(random.Random(1), 40, 6)
    feed = Feed(None, None, False)
    run = Batch(ship(flow, flow.plan()), 3, 0, {"s0": feed}, {"out": None})
    tables = [[pa.RecordBatch.from_pylist(items[at::4], COLUMNS)] for at in range(4)]
    longest: list[str] = max(run_local(run, {"s0": tables})[0]["out"], key=len)
    return longest


def test_what_the_end_brings_comes_last() -> None:
    assert ends_follow() == ["item"] * 40 + ["end"] * 6


def test_it_would_be_noticed_if_it_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    _mutate("end first", monkeypatch)
    assert ends_follow() != ["item"] * 40 + ["end"] * 6


def run_one(flow: Flow, tables: list[pa.RecordBatch], ordered: str | None = None) -> Any:
    """What the one sink of a flow gets, its input s0 being these tables, in a partition each."""
    feed = Feed(None, ordered, ordered is not None)
    run = Batch(ship(flow, flow.plan()), 2, 0, {"s0": feed}, {"out": None})
    return run_local(run, {"s0": [[table] for table in tables]})[0]["out"]


def test_records_that_go_different_ways_and_meet_again_stay_in_order() -> None:
    flow = Flow("diamond")
    fed: Stream[Any] = flow.source(Items([]), name="s0")
    odd, even = fed.key_by(lambda row: row["key"]).branch(lambda row: row["n"] % 2)
    odd.union(even).stateful_map(lambda state, row: ([*state, row["n"]],) * 2, initial=list).sink(
        Collect(), name="out"
    )
    table = pa.RecordBatch.from_pylist([{"key": 0, "n": n} for n in range(6)])
    assert max(run_one(flow, [table]), key=len) == [0, 1, 2, 3, 4, 5]


def test_a_column_called_value_is_the_item_whatever_is_in_it() -> None:
    flow = Flow("value")
    fed: Stream[Any] = flow.source(Items([]), name="s0")
    fed.key_by(lambda row: row["k"]).reduce(lambda a, b: {"k": a["k"], "n": a["n"] + b["n"]}).sink(
        Collect(), name="out"
    )
    table = pa.RecordBatch.from_pylist([{"value": {"k": 1, "n": 2}}, {"value": {"k": 1, "n": 3}}])
    assert run_one(flow, [table])[-1] == {"k": 1, "n": 5}


def test_a_part_of_a_flow_has_the_time_of_the_whole() -> None:
    """One source has an order, the other has none: whether its sink is asked for alone or not, timers wait."""
    flow = Flow("part")
    ordered: Stream[Any] = flow.source(Items([]), name="a", time=lambda row: row["time"])
    other: Stream[Any] = flow.source(Items([]), name="b", time=lambda row: row["time"])
    windows = ordered.key_by(lambda row: row["key"]).stateful(Windows())
    windows.sink(Collect(), name="one")
    windows.union(other.key_by(lambda row: row["key"])).sink(Collect(), name="two")
    feeds = {"a": Feed(None, "time", True), "b": Feed()}
    whole, part = flow.plan(), flow.plan().leading_to(["one"])
    assert timing_of(whole, feeds)["key_by"] is None
    assert timing_of(part, feeds)["key_by"] == 0  # so that of the whole is told to tasks
