"""Flows on simulated workers, rescaled while records flow: nothing lost, doubled or out of order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from railgun import FORGET, Context, Flow, Stateful
from railgun.engine.operators import keyed
from railgun.engine.protocol.placement import Placement
from railgun.engine.worker import stage
from railgun.hashing import key_hash
from railgun.sinks.collect import Collect
from railgun.sources.items import Items
from railgun.testing.flow_tester import FlowTester

Record = tuple[int, int]  # key, number within the key


def in_order(last: int, record: Record) -> tuple[int, Record]:
    """State is the number of the last record: the next one has to follow it."""
    number = record[1]
    assert number == last + 1, f"{record} came after {last}"
    return number, record


class InOrderByKey(Stateful[int, Record, dict[int, int], Record]):
    """The second stage sees several keys of the first: each has to come in order."""

    def initial(self) -> dict[int, int]:
        return {}

    def on_item(self, item: Record, context: Context[int, dict[int, int]]) -> Iterable[Record]:
        key, number = item
        assert number == context.state.get(key, 0) + 1, f"{item} came after {context.state}"
        context.state[key] = number
        return (item,)


def two_stages() -> Flow:
    flow = Flow("two-stages")
    records = flow.source(Items[Record]([]), name="records")
    first = records.key_by(lambda r: r[0], name="first").stateful_map(
        in_order, initial=int, name="order"
    )
    second = first.key_by(lambda r: r[0] % 7, name="second")
    second.stateful(InOrderByKey(), name="order again").sink(Collect(), name="out")
    return flow


class Load:
    """Numbered records of random keys."""

    def __init__(self, seed: int, keys: int) -> None:
        self.random = random.Random(seed)
        self.keys = keys
        self.counts: dict[int, int] = {}
        self.records: list[Record] = []

    def make(self, count: int) -> list[Record]:
        made = []
        for _ in range(count):
            key = self.random.randrange(self.keys)
            self.counts[key] = self.counts.get(key, 0) + 1
            made.append((key, self.counts[key]))
        self.records += made
        return made


@pytest.mark.parametrize("seed", range(25))
def test_records_flow_while_stages_move(seed: int) -> None:
    chance = random.Random(seed)
    tester = FlowTester(two_stages(), workers=chance.randint(1, 4), feed=["records"], seed=seed)
    load = Load(seed, keys=chance.choice([5, 200]))
    for _ in range(12):
        tester.feed("records", load.make(chance.randint(1, 60)), settle=False)
        if chance.random() < 0.5:
            tester.rescale(chance.randint(1, 6), settle=False)
        tester.run(chance.randint(0, 80))
    tester.settle()
    assert tester.rescales > 0
    assert tester.state("order") == load.counts
    owners = tester.where("order")
    placement = Placement.of(tester.workers)
    assert all(worker == placement.owner(key_hash(key)) for key, worker in owners.items())
    tester.finish()
    assert sorted(tester.collected("out")) == sorted(load.records)


@pytest.mark.parametrize("seed", range(10))
def test_a_flow_may_end_while_it_moves(seed: int) -> None:
    chance = random.Random(seed)
    load = Load(seed, keys=50)
    flow = Flow("ends")
    records = flow.source(Items(load.make(300), partitions=1), name="records")
    records.key_by(lambda r: r[0]).stateful_map(in_order, initial=int, name="order").sink(
        Collect(), name="out"
    )
    tester = FlowTester(flow, workers=2, seed=seed)
    tester.run(chance.randint(0, 12))
    tester.rescale(chance.choice([1, 3, 5]), settle=False)
    tester.finish()
    assert sorted(tester.collected("out")) == sorted(load.records)


def test_a_hot_key_gets_a_worker_of_its_own() -> None:
    tester = FlowTester(two_stages(), workers=3, feed=["records"])
    load = Load(1, keys=20)
    tester.feed("records", load.make(200))
    home = tester.where("order")[7]
    other = (home + 1) % 3
    tester.place(Placement.of(range(3), keys={key_hash(7): other}))
    assert tester.where("order")[7] == other
    tester.feed("records", load.make(200))
    assert tester.state("order") == load.counts


def test_a_crash_starts_the_flow_from_its_sources() -> None:
    tester = FlowTester(two_stages(), workers=3, feed=["records"])
    load = Load(1, keys=20)
    tester.feed("records", load.make(200))
    tester.crash(1)
    tester.feed("records", load.make(200))
    assert tester.state("order") == load.counts
    tester.finish()
    assert sorted(tester.collected("out")) == sorted(load.records)


class Quiet(Stateful[int, Record, list[int], tuple[int, int, int]]):
    """Tells how many records a key had when it has been quiet for ten seconds, and at the end."""

    def initial(self) -> list[int]:
        return [0, 0]

    def on_item(self, item: Record, context: Context[int, list[int]]) -> Iterable[Any]:
        context.cancel_timer(context.state[1])
        context.state[0] += 1
        context.state[1] = context.time + 10_000_000
        context.set_timer(context.state[1])
        return ()

    def on_timer(self, context: Context[int, list[int]]) -> Iterable[tuple[int, int, int]]:
        yield context.key, context.state[0], context.time
        context.forget()

    def on_end(self, context: Context[int, list[int]]) -> Iterable[tuple[int, int, int]]:
        yield context.key, context.state[0], -1


@pytest.mark.parametrize("seed", range(8))
def test_timers_move_with_their_keys_and_fire_once(seed: int) -> None:
    chance = random.Random(seed)
    flow = Flow("quiet")
    records = flow.source(Items[Record]([]), name="records")
    records.key_by(lambda r: r[0]).stateful(Quiet(), name="quiet").sink(Collect(), name="out")
    tester = FlowTester(flow, workers=2, feed=["records"], seed=seed)
    load = Load(seed, keys=40)
    begin = tester.now
    tester.feed("records", load.make(100))
    tester.rescale(chance.randint(1, 5))
    tester.advance(6)
    later = dict(load.counts)
    tester.feed("records", [(1, 0), (2, 0)], settle=False)
    tester.rescale(chance.randint(1, 5), settle=False)
    tester.run(chance.randint(0, 60))
    tester.advance(5)
    told = sorted(tester.collected("out"))
    assert told == sorted(
        (key, count, begin + 10_000_000) for key, count in later.items() if key not in (1, 2)
    )
    tester.finish()
    rest = sorted(tester.collected("out"))[len(told) :] and [
        entry for entry in tester.collected("out") if entry[0] in (1, 2)
    ]
    assert sorted((key, count) for key, count, _ in rest) == [
        (key, later.get(key, 0) + 1) for key in (1, 2)
    ]


def test_fewer_records_are_read_at_once_where_functions_are_slow() -> None:
    flow = Flow("slow")
    numbers = flow.source(Items(range(12_000)), name="numbers")
    sizes: list[int] = []

    def slow(items: list[int]) -> list[int]:
        sizes.append(len(items))
        tester.now += 1_000 * len(items)  # a millisecond each
        return items

    numbers.map_batches(slow).sink(Collect(), name="out")
    tester = FlowTester(flow, workers=1)
    tester.finish()
    assert tester.collected("out") == list(range(12_000))
    assert sizes[0] == 5_000
    assert max(sizes[2:]) <= 100


Marked = tuple[int, tuple[bool, ...]]  # key, and which of the operators forget it


class Alike:
    """Keys of which every third has the hash of the one before it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __stable_key__(self) -> int:
        return self.number - (self.number % 3 == 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike) and self.number == other.number

    def __hash__(self) -> int:
        return self.number


def counting_some(operator: int) -> Callable[[int, Marked], tuple[Any, Marked]]:
    def count(seen: int, record: Marked) -> tuple[Any, Marked]:
        return FORGET if record[1][operator] else seen + 1, record

    return count


def counted_thrice() -> Flow:
    """Three operators in one stage; a key may have state in any of them."""
    flow = Flow("thrice")
    stream = flow.source(Items[Marked]([]), name="records").key_by(lambda r: Alike(r[0]))
    for operator in range(3):
        stream = stream.stateful_map(counting_some(operator), initial=int, name=f"count {operator}")
    stream.sink(Collect(), name="out")
    return flow


@pytest.mark.parametrize("seed", range(60))
def test_keys_of_several_operators_leave_together(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that share a hash, that come while others are counted, and that only some operators have."""
    chance = random.Random(seed)
    monkeypatch.setattr(keyed, "BLOCK_KEYS", chance.choice([1, 2, 7]))
    monkeypatch.setattr(stage, "CHUNK_KEYS", chance.choice([10, 30]))
    monkeypatch.setattr(stage, "MIN_CHUNK_KEYS", chance.choice([1, 5]))
    tester = FlowTester(counted_thrice(), workers=2, feed=["records"], seed=seed)
    wanted: list[dict[Alike, int]] = [{}, {}, {}]
    keys = chance.choice([6, 40, 200])
    for workers in (3, 1, 4, 2):
        for _ in range(chance.randint(1, 6)):
            records = []
            for _ in range(chance.randint(0, keys)):
                number, forget = chance.randrange(keys), [chance.random() < 0.4 for _ in wanted]
                records.append((number, tuple(forget)))
                for states, forgets in zip(wanted, forget, strict=True):
                    count = states.pop(Alike(number), 0)
                    if not forgets:
                        states[Alike(number)] = count + 1
            tester.feed("records", records, settle=False)
            tester.run(chance.randint(0, 30))
        tester.rescale(workers, settle=False)
        tester.run(chance.randint(0, 30))
    tester.settle()
    assert tester.rescales > 0
    placement = Placement.of(tester.workers)
    for operator, states in enumerate(wanted):
        assert tester.state(f"count {operator}") == states
        for key, worker in tester.where(f"count {operator}").items():
            assert worker == placement.owner(key_hash(key))
