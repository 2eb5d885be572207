"""Flows with their state on disk do what they do with it in memory, also while they are rescaled."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from railgun import FORGET, Collect, Context, Flow, FlowError, Items, OnDisk, Stateful
from railgun.testing.flow_tester import FlowTester

pytest.importorskip("rocksdict")
Event = tuple[int, int]  # key, time


class Windows(Stateful[int, Event, dict[int, int], tuple[int, Any]]):
    """Counts what comes in every 300 µs; what is told does not depend on when timers happen to fire."""

    def initial(self) -> dict[int, int]:
        return {}

    def on_item(self, item: Event, context: Context[int, dict[int, int]]) -> None:
        end = (item[1] // 300 + 1) * 300
        context.state[end] = context.state.get(end, 0) + 1
        context.set_timer(end)
        context.set_timer(end + 1_000_000)
        context.cancel_timer(end + 1_000_000)

    def on_timer(self, context: Context[int, dict[int, int]]) -> Iterable[tuple[int, Any]]:
        yield context.key, (context.time, context.state.pop(context.time))
        if not context.state and context.key % 3:
            context.forget()

    def on_end(self, context: Context[int, dict[int, int]]) -> Iterable[tuple[int, Any]]:
        yield context.key, ("end", dict(context.state))


def count(so_far: dict[str, int], item: Event) -> tuple[Any, tuple[int, int]]:
    so_far["seen"] = so_far.get("seen", 0) + 1
    return FORGET if so_far["seen"] == 5 else so_far, (item[0], so_far["seen"])


def make(state: Any) -> Flow:
    flow = Flow("events", state=state)
    events = flow.source(Items[Event]([]), name="events", time=lambda event: event[1])
    keyed = events.key_by(lambda event: event[0])
    keyed.stateful_map(count, dict, name="count").sink(Collect(), name="counts")
    keyed.reduce(max, name="latest").sink(Collect(), name="latests")
    keyed.stateful(Windows(), name="windows").sink(Collect(), name="ends")
    return flow


def run(flow: Flow, seed: int, rescale: bool) -> dict[str, Any]:
    chance = random.Random(seed)
    tester = FlowTester(flow, workers=2, feed=["events"], seed=seed)
    time, colder = 0, False
    for _ in range(30):
        made = []
        for _ in range(chance.randint(1, 80)):
            time += chance.randint(0, 3)
            made.append((chance.randrange(300), time))
        tester.feed("events", made, settle=chance.random() < 0.5)
        workers = chance.choice([0, 0, 0, 1, 3, 5])
        if rescale and workers:
            tester.rescale(workers, settle=False)
        tester.run(chance.randint(0, 60))
        for runtime in tester.runtimes.values():
            for operator in runtime.stages[1].operators.keyed:
                colder = colder or len(operator.states) < len(operator.store)
    tester.settle()
    steps = ("count", "latest", "windows")
    found: dict[str, Any] = {"colder": colder}
    tester.finish()
    found |= {step: tester.state(step) for step in steps}
    for sink in ("counts", "latests", "ends"):
        by_key: dict[int, list[Any]] = {}
        for item in tester.collected(sink):
            by_key.setdefault(item[0], []).append(item[1])
        found[sink] = by_key
    for runtime in tester.runtimes.values():
        runtime.close()
    return found


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_results_are_the_same(seed: int, rescale: bool) -> None:
    wanted = run(make("memory"), seed, rescale=False)
    found = run(make(OnDisk(memory=10_000)), seed, rescale)
    assert (wanted.pop("colder"), found.pop("colder")) == (False, True)
    assert found == wanted


def test_how_state_is_kept_is_said_when_the_flow_is_made() -> None:
    assert make("memory").state is None
    assert make("disk").state == OnDisk()
    with pytest.raises(FlowError, match="'memory', 'disk' or an OnDisk"):
        make("tape")


def test_a_worker_that_ends_leaves_nothing(tmp_path: Any) -> None:
    tester = FlowTester(make(OnDisk(1, str(tmp_path))), workers=2, feed=["events"])
    for time in range(4):
        tester.feed("events", [(n + 100 * time, time) for n in range(100)])
    assert len(list(tmp_path.iterdir())) == 2
    tester.rescale(1)
    assert len(list(tmp_path.iterdir())) == 1
    tester.finish()
    [runtime] = tester.runtimes.values()
    runtime.close()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- more state than memory

LARGE = """
import random, resource, sys
from railgun import Flow, Items, OnDisk
from railgun.sinks.collect import Collect
from railgun.testing.flow_tester import FlowTester

KEYS, AGAIN, BATCH = 300_000, 30_000, 5_000

def add(state, n):
    return (state[0] + n, state[1]), None

def initial():
    return 0, random.randbytes(1_000)

flow = Flow("large", state=OnDisk(memory=64 << 20))
numbers = flow.source(Items([]), name="numbers")
summed = numbers.key_by(lambda n: n % KEYS).stateful_map(add, initial, name="sum")
summed.filter(lambda result: result is not None).sink(Collect(), name="out")
tester = FlowTester(flow, workers=1, feed=["numbers"])
fed = tester._fed["numbers"].items

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

before, most = resident(), 0
for n in range(0, KEYS + AGAIN, BATCH):
    tester.feed("numbers", range(n, n + BATCH))
    fed[-BATCH:] = [None] * BATCH
    most = max(most, resident() - before)
[store] = [operator.store for operator in tester.runtimes[0].stages[1].operators.keyed]
assert len(store) == KEYS
sums = 0
for keys, states in store.cut().cold:
    sums += sum(state[0] for state in states)
    assert all(len(state[1]) == 1_000 for state in states)
    most = max(most, resident() - before)
sums += sum(state[0] for state in store.states.values())
assert sums == sum(range(KEYS + AGAIN))
print(most, store)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_bounded_however_much_state_there_is() -> None:
    ran = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    most = int(ran.stdout.split()[0])
    assert most < 200, f"300 MB of state with 64 MiB of memory took {ran.stdout}"
