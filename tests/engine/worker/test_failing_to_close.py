"""What becomes of a flow whose source or sink cannot be closed: it fails, and the error names what could not be."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.engine.controller import closing, flows
from tests.engine.controller.closing import Out, flow_to, misbehave
from tests.engine.controller.tallies import saved

from railgun import Collect, Flow, FlowFailedError, Items, Reader, Settings, Source, StepError
from railgun.engine.worker.liveness import LOOK_EVERY_S
from railgun.testing import FlowTester

BY_VALUE = [flows, closing, sys.modules[__name__]]


HOWS = ["raise", "OSError", "sys.exit", "KeyboardInterrupt", "os._exit", "hang"]


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("saves", [False, True], ids=["without snapshots", "with snapshots"])
def test_a_sink_that_cannot_be_closed_fails_the_flow_though_everything_is_written(
    how: str, saves: bool, tmp_path: Path
) -> None:
    options = {"snapshots": saved(tmp_path)} if saves else {}
    settings = Settings(hang_after=4.0)
    with flows.started(flow_to(how), 1, settings=settings, by_value=BY_VALUE, **options) as job:
        with pytest.raises(FlowFailedError) as caught:
            job.wait(flows.DEADLINE)
        assert job.status()["state"] == "failed"
        assert [kind for kind in flows.kinds(job) if kind in ("finished", "failed")] == [
            "finished",
            "failed",
        ]
        assert sorted(job.collected("out")) == list(range(20))
    assert "'out'" in str(caught.value)
    assert "Out.close" in str(caught.value)
    assert "\\n" not in str(caught.value)


@pytest.mark.parametrize("how", HOWS[:4])
def test_a_tester_fails_for_a_sink_that_cannot_be_closed(how: str) -> None:
    expected = KeyboardInterrupt if how == "KeyboardInterrupt" else StepError
    with pytest.raises(expected, match=r"(?s)'out'.*Out\.close"):
        FlowTester(flow_to(how), workers=1).finish()


class Endless(Source[int]):
    bounded = False

    def __init__(self, how: str) -> None:
        self.how = how

    def partitions(self) -> list[str]:
        return ["only"]

    def open(self, partition: str, position: Any) -> Reader[int]:
        return EndlessReader(self.how)


class EndlessReader(Reader[int]):
    position = 0

    def __init__(self, how: str) -> None:
        self.how = how

    def read(self, most: int, now: int) -> list[int]:
        self.position += 1
        return [self.position] if self.position < 10 else []

    def close(self) -> None:
        misbehave(self.how)


def test_a_reader_that_cannot_be_closed_is_named_with_its_part(tmp_path: Path) -> None:
    flow = Flow("stopped")
    flow.source(Endless("raise"), name="endless").sink(Collect(), name="out")
    with flows.started(flow, 1, snapshots=saved(tmp_path), by_value=BY_VALUE) as job:
        flows.running(job)
        with pytest.raises(FlowFailedError) as caught:
            job.stop()
        text = str(caught.value)
    assert "source 'endless': Endless.close failed for part 'only'" in text
    assert "a sink" not in text
    assert "SourceError(" not in text


@pytest.mark.parametrize(("how", "kind"), [("raise", "failed"), ("OSError", "trouble")])
def test_a_sink_that_a_worker_cannot_close_when_it_leaves(
    how: str, kind: str, tmp_path: Path
) -> None:
    """What may pass does not end a flow that goes on: what was written is safe."""
    flow = Flow("leaving")
    flow.source(Endless("well"), name="endless").sink(Out(how), name="out")
    with flows.started(flow, 2, snapshots=saved(tmp_path), by_value=BY_VALUE) as job:
        flows.running(job)
        job.scale(1, wait=False)
        [told] = flows.eventually(
            lambda: [e.text for e in job.events() if e.kind == kind and "on its way out" in e.text]
        )
    assert "sink 'out': Out.close failed" in told


def test_a_slow_call_that_has_returned_fails_no_flow() -> None:
    """A worker tells of a call that takes its time; whoever ended in peace did not end inside of it."""

    def slow(number: int) -> int:
        if number == 5:
            time.sleep(4 * LOOK_EVERY_S)  # long enough to be told of
        return number

    flow = Flow("slow")
    flow.source(Items(range(20)), name="numbers").map(slow, name="slow").sink(Collect(), name="out")
    with flows.started(flow, 2, by_value=BY_VALUE) as job:
        assert job.wait(flows.DEADLINE)
        assert "failed" not in flows.kinds(job)
        assert sorted(job.collected("out")) == list(range(20))


class SlowToLoad:
    """A function that no worker has unpickled before it is ended."""

    def __init__(self, sign: Path) -> None:
        self.sign, self.home = sign, os.getpid()

    def __call__(self, item: int) -> int:
        return item

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.home:
            self.sign.touch()
            time.sleep(flows.DEADLINE)


@pytest.mark.parametrize("saves", [False, True], ids=["without snapshots", "with snapshots"])
def test_a_flow_that_is_stopped_while_its_workers_load_it_has_not_failed(
    saves: bool, tmp_path: Path
) -> None:
    options = {"snapshots": saved(tmp_path)} if saves else {}
    flow = Flow("loads")
    loads = SlowToLoad(tmp_path / "loads")
    flow.source(Items(range(20)), name="numbers").map(loads, name="slow").sink(
        Collect(), name="out"
    )
    with flows.started(flow, 1, by_value=BY_VALUE, **options) as job:
        flows.eventually(loads.sign.exists, "it loads the flow")
        assert job.stop(timeout=flows.DEADLINE / 2)
        assert flows.kinds(job) == ["stopping", "finished"]
        assert job.status()["state"] == "finished"
