"""Several steps take from one stream, and one of them changes the items in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from railgun import Collect, Flow, Items
from railgun.engine.operators.consumers import SharedItemError
from railgun.testing import FlowTester

Item = dict[str, Any]


def spoil(item: Item) -> Item:
    item["n"] = -1
    return item


def keep(state: list[Item], item: Item) -> tuple[list[Item], int]:
    return [*state, item], item["n"]


def spoil_state(state: list[Item], item: Item) -> tuple[list[Item], int]:
    """Changes the item with the next record of its key."""
    if state:
        spoil(state[-1])
    return [item], 0


Wiring = Callable[[Any], None]


def before(items: Any) -> None:
    items.map(spoil, name="spoils").sink(Collect(), name="spoilt")
    items.map(lambda item: item["n"], name="reads").sink(Collect(), name="out")


def after(items: Any) -> None:
    items.map(lambda item: item["n"], name="reads").sink(Collect(), name="out")
    items.filter(lambda item: True, name="spoils").map(spoil).sink(Collect(), name="spoilt")


def beside_a_key(items: Any) -> None:
    """What is keyed waits to be sent, and is changed meanwhile."""
    items.key_by(lambda item: item["n"] % 2).map(lambda item: item["n"]).sink(Collect(), name="out")
    items.map(spoil, name="spoils").sink(Collect(), name="spoilt")


def in_another_stage(items: Any) -> None:
    keyed = items.key_by(lambda item: 0, name="spoils")
    keyed.stateful_map(spoil_state, initial=list, name="holds").sink(Collect(), name="spoilt")
    other = items.key_by(lambda item: item["n"], name="others")
    other.map(lambda item: item["n"]).sink(Collect(), name="out")


def in_state(items: Any) -> None:
    keyed = items.key_by(lambda item: 0)
    keyed.stateful_map(keep, initial=list, name="keeps").map(lambda n: n).sink(
        Collect(), name="out"
    )
    items.map(spoil, name="spoils").sink(Collect(), name="spoilt")


WIRINGS: dict[str, Wiring] = {
    "before": before,
    "after": after,
    "beside a key": beside_a_key,
    "in another stage": in_another_stage,
    "in state": in_state,
}


def one_worker(wiring: Wiring, *, strict: bool) -> FlowTester:
    """A flow on one worker; not strict, it does what workers do live."""
    flow = Flow("items")
    numbers: Any = flow.source(Items([]), name="numbers")
    wiring(numbers.map(lambda n: {"n": n}, name="items"))
    made = FlowTester(flow, workers=1, feed=["numbers"])
    made.world.strict = strict
    for runtime in made.runtimes.values():
        runtime.be_strict(strict)
    return made


@pytest.mark.parametrize("wiring", WIRINGS)
def test_the_tester_names_the_step_that_changes_items_of_others(wiring: str) -> None:
    with pytest.raises(SharedItemError, match=r"'spoils'.*'items'.*copy") as found:
        one_worker(WIRINGS[wiring], strict=True).feed("numbers", range(10))
    assert found.value.step == "spoils"


@pytest.mark.parametrize("wiring", WIRINGS)
def test_live_nobody_sees_what_another_step_changes(wiring: str) -> None:
    made = one_worker(WIRINGS[wiring], strict=False)
    for start in range(0, 4_000, 500):
        made.feed("numbers", range(start, start + 500))
    assert sorted(made.collected("out")) == list(range(4_000))
    if wiring == "in state":
        assert sorted(item["n"] for item in made.state("keeps")[0]) == list(range(4_000))


class Odd:
    """An item that says itself how it is copied, as those of other languages do."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __reduce__(self) -> Any:
        return Odd, (self.n,)

    def __getitem__(self, name: str) -> int:
        return self.n

    def __setitem__(self, name: str, value: int) -> None:
        self.n = value


MAKERS: dict[str, Callable[[int], Any]] = {
    "plain": lambda n: {"n": n},
    "odd": Odd,
    "an array": lambda n: np.array((n,), dtype=[("n", int)]),
}


@pytest.mark.parametrize("rarely", [1, 50, 997])
@pytest.mark.parametrize("made", MAKERS)
def test_live_nobody_sees_what_another_step_changes_late_and_rarely(made: str, rarely: int) -> None:
    def spoil_late(item: Any) -> Any:
        return spoil(item) if item["n"] > 3_000 and item["n"] % rarely == 0 else item

    flow = Flow("items")
    numbers: Any = flow.source(Items([]), name="numbers")
    items = numbers.map(MAKERS[made], name="items")
    items.map(spoil_late, name="spoils").sink(Collect(), name="spoilt")
    items.map(lambda item: int(item["n"]), name="reads").sink(Collect(), name="out")
    tester = FlowTester(flow, workers=1, feed=["numbers"])
    for runtime in tester.runtimes.values():
        runtime.be_strict(False)
    for start in range(0, 8_000, 1_000):
        tester.feed("numbers", range(start, start + 1_000))
    assert tester.collected("out") == list(range(8_000))


def test_items_that_cannot_change_are_not_copied() -> None:
    seen: dict[str, list[Any]] = {"one": [], "other": []}
    flow = Flow("items")
    numbers: Any = flow.source(Items([]), name="numbers")
    items = numbers.map(lambda n: (n, "text"), name="items")
    for name, found in seen.items():
        items.inspect(found.append, name=name).sink(Collect())
    made = FlowTester(flow, workers=1, feed=["numbers"])
    made.feed("numbers", range(10))
    assert all(one is other for one, other in zip(seen["one"], seen["other"], strict=True))


def test_one_consumer_may_change_its_items() -> None:
    made = one_worker(lambda items: items.map(spoil).sink(Collect(), name="out"), strict=True)
    made.feed("numbers", range(10))
    assert len(made.collected("out")) == 10


def test_items_that_cannot_be_copied_pass() -> None:
    flow = Flow("items")
    numbers: Any = flow.source(Items([1, 2]), name="numbers")
    items = numbers.map(lambda n: (m for m in [n]))
    for name in ("one", "other"):
        items.inspect(lambda item: None).flat_map(list).sink(Collect(), name=name)
    made = FlowTester(flow)
    made.settle()
    assert sorted(made.collected("one") + made.collected("other")) == [1, 2]
