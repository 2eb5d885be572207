"""A worker's process tells the collector to leave state alone; a test's process is not its own."""

from __future__ import annotations

import gc

from railgun import Collect, Flow, Items
from railgun.testing import FlowTester


def test_a_tester_does_not_freeze_what_it_moves() -> None:
    flow = Flow("counted")
    counted = flow.source(Items(range(0)), name="numbers").key_by(lambda n: n)
    counted.stateful_map(lambda n, item: (n + 1, item), int).sink(Collect())
    frozen = gc.get_freeze_count()
    tester = FlowTester(flow, workers=1, feed=["numbers"])
    tester.feed("numbers", range(100))
    tester.rescale(3)
    assert len(set(tester.where("stateful_map").values())) == 3
    assert gc.get_freeze_count() == frozen
