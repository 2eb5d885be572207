"""What a `FlowTester` says of a flow that has failed, and of workers that are not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from railgun import Collect, Flow, FlowFailedError, Items
from railgun.engine.protocol.lifecycle.machine import LifecycleError
from railgun.testing import FlowTester, flow_tester


def counted() -> FlowTester:
    flow = Flow("counted")
    source: Items[int] = Items([])
    numbers = flow.source(source, name="numbers").key_by(lambda n: n % 3, name="keys")
    numbers.stateful_map(lambda count, n: (count + 1, n), initial=int, name="count").sink(
        Collect(), name="out"
    )
    return FlowTester(flow, workers=1, feed=["numbers"], snapshots=True)


def failed() -> FlowTester:
    tester = counted()
    tester.feed("numbers", range(10))
    for _ in range(5):
        tester.crash(0)
    with pytest.raises(FlowFailedError, match=r"worker 0 is lost: it crashed \(failure 6"):
        tester.crash(0)
    return tester


@pytest.mark.parametrize(
    "ask",
    [
        lambda tester: tester.feed("numbers", [1]),
        lambda tester: tester.feed("numbers", [1], settle=False),
        lambda tester: tester.advance(1),
        lambda tester: tester.finish(),
        lambda tester: tester.settle(),
        lambda tester: tester.run(1),
        lambda tester: tester.crash(0),
        lambda tester: tester.state("count"),
        lambda tester: tester.where("count"),
    ],
)
def test_whoever_goes_on_with_a_flow_that_has_failed_is_told_why(
    ask: Callable[[FlowTester], Any],
) -> None:
    tester = failed()
    with pytest.raises(FlowFailedError, match="worker 0 is lost: it crashed"):
        ask(tester)
    assert tester.happened[-1].kind == "failed"
    assert sorted(tester.collected("out")) == list(range(10)), "what there is can be looked at"


def test_a_flow_that_has_failed_cannot_be_rescaled_or_saved() -> None:
    tester = failed()
    for ask in (lambda: tester.rescale(2), tester.snapshot):
        with pytest.raises(LifecycleError, match=r"failed \(worker 0 is lost"):
            ask()


def test_a_worker_that_is_not_there_cannot_crash_and_the_text_says_why() -> None:
    tester = counted()
    with pytest.raises(flow_tester.TesterError, match=r"there is no worker 1: there are 0$"):
        tester.crash(1)
    tester.crash(0, settle=False)
    with pytest.raises(flow_tester.TesterError, match="worker 0 is being launched"):
        tester.crash(0)
    with pytest.raises(flow_tester.TesterError, match="no worker has the state of 'count' now"):
        tester.state("count")
    with pytest.raises(flow_tester.TesterError, match="has no step 'amount' with state"):
        tester.state("amount")
    tester.finish()
    with pytest.raises(
        flow_tester.TesterError, match="has finished: there is no worker 0 any more"
    ):
        tester.crash(0)
    assert tester.state("count") == {}
