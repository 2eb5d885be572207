"""User code may raise anything, on real workers: no event loop swallows it, and no record with it."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import tests.flows.raising
from tests.engine.controller import flows
from tests.engine.controller.tallies import saved
from tests.flows.raising import (
    BAD,
    EXCEPTIONS,
    OTHER_HOOKS,
    RECORD_HOOKS,
    ROWS,
    SAVING_HOOKS,
    TRAVELLING_HOOKS,
    Trip,
    flow_of,
)

from railgun import Collect, Flow, FlowFailedError, Items, Settings

RAISING = [tests.flows.raising, sys.modules[__name__]]


def drawn(hook: str) -> str:
    """One of the exceptions that are no `Exception`."""
    unusual = sorted(EXCEPTIONS.keys() - {"LookupError"})
    return random.Random(hook).choice(unusual)


@pytest.mark.parametrize(
    "hook", ["map", "key", "time", "on_item", "on_timer", "on_end", "map_batches", "partitions", "open", "read",
             "reader_close", "sink_open", "write"],
)  # fmt: skip
def test_whatever_a_hook_raises_fails_the_job_by_name(hook: str) -> None:
    exception = drawn(hook)
    step = {**RECORD_HOOKS, **OTHER_HOOKS}[hook]
    with flows.started(flow_of(Trip(hook, exception)), by_value=RAISING) as job:
        with pytest.raises(FlowFailedError) as caught:
            job.wait(flows.DEADLINE)
        assert step in str(caught.value)
        assert exception in str(caught.value)


@pytest.mark.parametrize("exception", ["CancelledError", "StopIteration"])
@pytest.mark.parametrize("hook", SAVING_HOOKS)
def test_whatever_a_sink_raises_for_a_snapshot_fails_the_job(
    hook: str, exception: str, tmp_path: Path
) -> None:
    flow = flow_of(Trip(hook, exception))
    with flows.started(flow, snapshots=saved(tmp_path), by_value=RAISING) as job:
        with pytest.raises(FlowFailedError) as caught:
            job.wait(flows.DEADLINE)
        assert "sink 'out'" in str(caught.value)
        assert exception in str(caught.value)


@pytest.mark.parametrize("hook", TRAVELLING_HOOKS)
def test_whatever_pickling_raises_fails_the_job(hook: str) -> None:
    flow, once = flow_of(Trip(hook, "CancelledError")), Settings(restarts=0)
    with (
        flows.started(flow, settings=once, by_value=RAISING) as job,
        pytest.raises(FlowFailedError),
    ):
        job.wait(flows.DEADLINE)


@pytest.mark.parametrize("hook", ["map", "on_item"])
def test_whatever_a_function_raises_for_a_record_is_a_dead_letter(hook: str) -> None:
    exception = drawn(hook + " again")
    flow = flow_of(Trip(hook, exception), on_error="dead_letter")
    with flows.started(flow, by_value=RAISING) as job:
        assert job.wait(flows.DEADLINE)
        [letter] = job.collected("dead_letters")
        assert exception in letter.error
        assert sorted(job.collected("out")) == [n for n in range(ROWS) if n != BAD]


def exit_at_seven(number: int) -> int:
    if number == 7:
        sys.exit("enough")
    return number


def test_a_function_that_exits_fails_the_job_with_step_function_and_record() -> None:
    flow = Flow("exits")
    numbers = flow.source(Items(range(10)), name="numbers")
    numbers.map(exit_at_seven, name="look up").sink(Collect(), name="out")
    with flows.started(flow, by_value=RAISING) as job:
        with pytest.raises(FlowFailedError) as caught:
            job.wait(flows.DEADLINE)
        assert "step 'look up': exit_at_seven raised for the record 7" in str(caught.value)
        assert "SystemExit: enough" in str(caught.value)
        assert "restarting" not in flows.kinds(job)
