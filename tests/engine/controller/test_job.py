"""run and Job, from a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.controller import flows
from tests.engine.controller.flows import counting, eventually, more, running, started

from railgun import Event, FlowFailedError, Job, Settings
from railgun.engine.protocol.lifecycle.machine import LifecycleError


def test_results_are_whole_through_rescales_and_a_stop() -> None:
    heard: list[Event] = []
    with started(counting("whole"), watch=heard.append) as job:
        running(job, records=200)
        for workers in (4, 1, 3):
            job.scale(workers, wait=True, timeout=flows.DEADLINE)
            assert job.status()["size"] == workers
            assert len(flows.pids(job)) >= workers
            more(job)
        assert job.stop(timeout=flows.DEADLINE)
        assert flows.check_whole(job) > 500
        assert job.over
        assert job.status()["failures"] == 0
    told = [event.kind for event in heard]
    assert told == ["running", *["rescaling", "rescaled"] * 3, "stopping", "finished"]
    assert [event.number for event in heard] == list(range(1, len(heard) + 1))
    for event in heard:
        if event.kind == "rescaled":
            assert event.data["moved"] > 0
            assert event.data["seconds"] > 0


def test_requests_faster_than_rescales_end_at_the_last() -> None:
    with started(counting("hasty")) as job:
        running(job)
        for workers in (5, 1, 4, 2, 3):
            job.scale(workers)
        job.scale(3, wait=True, timeout=flows.DEADLINE)
        assert job.status()["goal"] == job.status()["size"] == 3
        eventually(lambda: len(job.status()["workers"]) == 3, "nobody is left over")
        assert job.stop(timeout=flows.DEADLINE)
        flows.check_whole(job)


def test_a_bounded_flow_ends_by_itself_also_on_one_worker() -> None:
    for workers in (1, 3):
        flow = counting("bounded", rate=None, count=20_000)
        with started(flow, workers) as job:
            assert job.wait(flows.DEADLINE)
            assert flows.check_whole(job) == 20_000
            with pytest.raises(LifecycleError, match="finished"):
                job.scale(2)


def test_what_there_is_to_know_stays_after_the_end() -> None:
    with started(counting("after", rate=None, count=1000)) as job:
        assert job.wait(flows.DEADLINE)
    assert job.status()["state"] == "finished"
    assert len(job.collected("out")) == 1000
    assert flows.kinds(job)[-1] == "finished"
    assert job.wait(0)
    assert "finished" in repr(job)


def test_waiting_has_an_end() -> None:
    with started(counting("waits")) as job:
        assert not job.wait(0.05)
        running(job)
        assert not job.wait(0.05)
    with pytest.raises(FlowFailedError, match="closed"):
        job.wait()


def test_one_program_runs_several_jobs(tmp_path: Path) -> None:
    with (
        started(counting("one"), 1, http=True, registry=tmp_path) as one,
        started(counting("two"), 1, http=True, registry=tmp_path) as two,
    ):
        running(one)
        running(two)
        assert one.url != two.url
        one.abort()
        more(two)


@pytest.mark.parametrize("module", ["railgun", "railgun.engine.worker.process"])
def test_a_worker_does_not_wait_for_what_it_does_not_need(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "railgun" in loaded
    assert not {"aiohttp", "pyspark", "rich", "cloudpickle", "pandas"} & loaded


def test_the_public_names_are_there() -> None:
    import railgun

    assert railgun.Job is Job
    assert railgun.Settings is Settings
    for name in railgun.__all__:
        assert getattr(railgun, name) is not None
    with pytest.raises(AttributeError, match="surprise"):
        _ = railgun.surprise


CLASSES = """
import enum, sys
from dataclasses import dataclass
from typing import NamedTuple
from railgun import Collect, Flow, Items, run
from railgun.testing.local_workers import SubprocessLauncher

class Colour(enum.Enum):
    RED = 1
    BLUE = 2

@dataclass(frozen=True)
class Visit:
    colour: Colour
    count: int

class Key(NamedTuple):
    name: str

@dataclass(slots=True)
class Slotted:
    count: int

class Lower(Slotted):
    __slots__ = ()

def local():
    class Inner:
        def __init__(self, count):
            self.count = count
    return Inner

Inner = local()

def add(a, b):
    return Visit(a.colour, a.count + b.count)

flow = Flow("classes")
numbers = flow.source(Items(range(1000), partitions=4), name="numbers")
visits = numbers.map(lambda n: Visit(Colour.RED if n % 2 else Colour.BLUE, 1))
totals = visits.key_by(lambda visit: Key(visit.colour.name)).reduce(add)
slotted = visits.map(lambda visit: Lower(visit.count)).key_by(lambda item: item.count)
slotted.reduce(lambda a, b: Lower(a.count + b.count)).sink(Collect(), name="slotted")
totals.map(lambda visit: (visit, Inner(visit.count))).key_by(lambda item: item[1].count).sink(
    Collect(), name="out"
)
if __name__ == "__main__":
    with run(flow, 2, launcher=SubprocessLauncher(), http=False) as job:
        assert job.wait(60)
        found = job.collected("out")
        assert all(type(visit) is Visit and visit.colour in Colour for visit, _ in found)
        assert all(type(inner) is Inner for _, inner in found)
        assert max(visit.count for visit, _ in found) == 500
        slots = job.collected("slotted")
        assert all(type(one) is Lower and not hasattr(one, "__dict__") for one in slots)
        assert max(one.count for one in slots) == 1000
        print(len(found))
"""


def test_classes_of_the_script_travel_between_workers_and_come_back_as_themselves(
    tmp_path: Path,
) -> None:
    script = tmp_path / "classes.py"
    script.write_text(CLASSES)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "1000\n"
