"""Ways that part and meet again inside a keyed stage keep the order of a key's records."""

from __future__ import annotations

import random
from typing import Any

import pytest

from railgun import Collect, Flow, Items
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
