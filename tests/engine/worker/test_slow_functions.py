"""Users' functions that take their time: how many records they are given at once."""

from __future__ import annotations

from collections.abc import Callable

from railgun import Flow, Stream
from railgun.sinks.collect import Collect
from railgun.sources.items import Items
from railgun.testing import FlowTester

MS = 1_000


def batches_of(records: int, cost_us: Callable[[int], int]) -> list[int]:
    """The sizes of the batches of a `map_batches` step that takes `cost_us(size)`, on one worker."""
    sizes: list[int] = []

    def call(items: list[int]) -> list[int]:
        sizes.append(len(items))
        tester.now += cost_us(len(items))
        return items

    flow = Flow("slow")
    numbers: Stream[int] = flow.source(Items([]), name="numbers")
    numbers.map_batches(call, name="service").sink(Collect(), name="out")
    tester = FlowTester(flow, workers=1, feed=["numbers"])
    tester.feed("numbers", range(records))
    tester.finish()
    assert tester.collected("out") == list(range(records))
    return sizes


def test_a_step_that_waits_100_ms_a_call_is_called_with_many_records() -> None:
    sizes = batches_of(100_000, lambda size: 100 * MS)
    assert len(sizes) <= 40
    assert max(sizes[10:]) == 5_000


def test_a_step_that_takes_10_ms_a_record_is_called_with_few() -> None:
    sizes = batches_of(20_000, lambda size: 10 * MS * size)
    assert max(sizes[1:]) <= 5
