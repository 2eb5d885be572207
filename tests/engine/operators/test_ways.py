"""Ways that part and meet again inside a stage keep the order of its records."""

from __future__ import annotations

import random
from typing import Any

import pytest

from railgun import Collect, Flow, Items, Stateful
from railgun.testing.flow_tester import FlowTester

Pair = tuple[Any, int]


def history(state: list[Any], item: Any) -> tuple[list[Any], tuple[Any, list[Any]]]:
    state = [*state, item[1]]
    return state, (item[0], state)


def expected(items: list[Pair]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for key, number in items:
        found.setdefault(key, []).append(number)
    return found


def drawn(seed: int) -> list[Pair]:
    chance = random.Random(seed)
    return [(chance.randrange(4), number) for number in range(200)]


@pytest.mark.parametrize("seed", range(10))
def test_a_branch_and_its_union_keep_the_order_of_a_key(seed: int) -> None:
    chance = random.Random(seed)
    flow = Flow("ways")
    source = flow.source(Items(drawn(seed)), name="in")
    keyed = source.key_by(lambda item: item[0], name="by key")
    odd, even = keyed.branch(lambda item: hash((item[1], seed)) % 2)
    ways = [odd.map(lambda item: item), even]
    chance.shuffle(ways)
    united = ways[0].union(ways[1])
    if chance.random() < 0.5:  # and once more
        third, rest = united.branch(lambda item: item[1] % 3 == 0)
        united = third.union(rest.filter(lambda item: True))
    united.stateful_map(history, initial=list, name="history").sink(Collect(), name="out")
    tester = FlowTester(flow, workers=2, seed=seed)
    tester.finish()
    assert tester.state("history") == expected(drawn(seed))


def test_a_branch_within_a_branch_that_all_meet_in_one_union() -> None:
    flow = Flow("ways")
    keyed = flow.source(Items(drawn(1)), name="in").key_by(lambda item: item[0], name="by key")
    odd, even = keyed.branch(lambda item: item[1] % 2)
    low, high = odd.branch(lambda item: item[1] % 5 < 2)
    low.union(even, high).stateful_map(history, initial=list, name="history").sink(
        Collect(), name="out"
    )
    tester = FlowTester(flow, workers=1)
    tester.finish()
    assert tester.state("history") == expected(drawn(1))


def test_a_stream_that_is_united_with_what_comes_of_it() -> None:
    flow = Flow("ways")
    keyed = flow.source(Items(drawn(2)), name="in").key_by(lambda item: item[0], name="by key")
    again = keyed.map(lambda item: (item[0], -item[1]))
    keyed.union(again).stateful_map(history, initial=list, name="history").sink(
        Collect(), name="out"
    )
    tester = FlowTester(flow, workers=1)
    tester.finish()
    wanted = {
        key: [n for number in numbers for n in (-number, number)]
        for key, numbers in expected(drawn(2)).items()
    }
    assert tester.state("history") == wanted


def test_several_results_of_one_record_keep_their_order() -> None:
    flow = Flow("ways")
    keyed = flow.source(Items([("a", 0), ("a", 4)]), name="in").key_by(lambda item: item[0])
    several = keyed.flat_map(lambda item: [(item[0], item[1] + at) for at in range(4)])
    odd, even = several.branch(lambda item: item[1] % 2)
    odd.union(even).stateful_map(history, initial=list, name="history").sink(Collect(), name="out")
    tester = FlowTester(flow, workers=1)
    tester.finish()
    assert tester.state("history") == {"a": list(range(8))}


@pytest.mark.parametrize("seed", range(10))
def test_ways_that_part_and_meet_before_key_by_keep_the_order(seed: int) -> None:
    flow = Flow("ways")
    source = flow.source(Items(drawn(seed)), name="in")
    odd, even = source.branch(lambda item: hash((item[1], seed)) % 2)
    low, high = odd.map(lambda item: item).branch(lambda item: item[1] < 100)
    united = even.union(high.filter(lambda item: True), low)
    united.key_by(lambda item: item[0]).stateful_map(history, initial=list, name="history").sink(
        Collect(), name="out"
    )
    tester = FlowTester(flow, workers=2, seed=seed)
    tester.finish()
    assert tester.state("history") == expected(drawn(seed))


class Heard(Stateful[Any, Pair, list[Any], Any]):
    """Keeps what comes, with the side it comes from."""

    def initial(self) -> list[Any]:
        return []

    def on_item(self, item: Pair, context: Any) -> None:
        context.state = [*context.state, (context.port, item[1])]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_ways_that_are_keyed_one_by_one_keep_the_order_of_a_key(seed: int, workers: int) -> None:
    flow = Flow("ways")
    items = drawn(seed)
    odd, even = flow.source(Items(items), name="in").branch(lambda item: item[1] % 3 == 0)
    united = odd.key_by(lambda item: item[0], name="odd").union(
        even.map(lambda item: item).key_by(lambda item: item[0], name="even")
    )
    united.stateful(Heard(), name="heard").sink(Collect(), name="out")
    tester = FlowTester(flow, workers=workers, seed=seed)
    tester.finish()
    assert tester.state("heard") == {
        key: [(int(number % 3 != 0), number) for number in numbers]
        for key, numbers in expected(items).items()
    }


def any_flow(chance: random.Random) -> Flow:
    """Draw a flow whose ways part and meet again, before it is keyed and behind that."""
    flow = Flow("ways")
    nothing: list[Pair] = []
    stream: Any = flow.source(Items(nothing), name="in")
    names = iter(range(1_000))

    def reshaped(stream: Any) -> Any:
        for _ in range(chance.randrange(4)):
            salt = chance.randrange(100)
            kind = chance.choice(["part", "within", "both", "several", "two of three"])
            if kind == "several":
                stream = stream.flat_map(
                    lambda item, salt=salt: [(item[0], item[1] * 2 + at) for at in range(salt % 3)]
                )
                continue
            if kind == "both":
                stream = stream.map(lambda item: (item[0], -item[1])).union(stream)
                continue
            yes, no = stream.branch(lambda item, salt=salt: hash((item, salt)) % 2)
            if kind == "part":
                stream = yes.map(lambda item: item).union(no)
            elif kind == "within":
                first, second = no.branch(lambda item, salt=salt: hash((salt, item)) % 2)
                stream = second.union(yes, first.filter(lambda item: item[1] % 5))
            else:
                no.sink(Collect(), name=f"rest {next(names)}")
                stream = stream.filter(lambda item: item[1] % 7).union(yes)
        return stream

    stream = reshaped(stream)
    if chance.random() < 0.3:
        yes, no = stream.branch(lambda item: item[1] % 2)
        stream = yes.key_by(lambda item: item[0]).union(no.key_by(lambda item: item[0]))
    else:
        stream = stream.key_by(lambda item: item[0])
    stream = reshaped(stream)
    if chance.random() < 0.5:
        stream.stateful(Heard(), name="heard").sink(Collect(), name="out")
    else:
        stream.stateful_map(history, initial=list, name="heard").sink(Collect(), name="out")
    return flow


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_what_is_read_at_once_gives_what_is_read_one_by_one(first: int) -> None:
    for seed in range(first, first + 50):
        flow, items = any_flow(random.Random(seed)), drawn(seed)[:80]
        states = []
        for size in (1, 80):
            tester = FlowTester(flow, workers=1, feed=["in"], seed=seed)
            for at in range(0, len(items), size):
                tester.feed("in", items[at : at + size])
            tester.finish()
            states.append(tester.state("heard"))
        assert states[0] == states[1], f"seed {seed}"
