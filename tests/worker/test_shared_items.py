"""Several steps take from one stream, and one of them changes the items in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from railgun import Collect, Flow, Items
from railgun.flow.operators.consumers import CHECKED, SAMPLE_ROWS, SharedItemError
from railgun.testing import FlowTester

Item = dict[str, Any]


def spoil(item: Item) -> Item:
    item["n"] = -1
    return item


def spoil_late(item: Item) -> Item:
    """Changes items only after the flow has been watched for a while."""
    return spoil(item) if item["n"] > 4 * CHECKED else item


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
    for start in range(0, 4 * CHECKED, CHECKED // 2):
        made.feed("numbers", range(start, start + CHECKED // 2))
    assert sorted(made.collected("out")) == list(range(4 * CHECKED))
    if wiring == "in state":
        assert sorted(item["n"] for item in made.state("keeps")[0]) == list(range(4 * CHECKED))


def test_live_a_step_that_begins_to_change_items_later_is_named() -> None:
    told: list[str] = []

    def wiring(items: Any) -> None:
        items.map(spoil_late, name="spoils").sink(Collect(), name="spoilt")
        items.map(lambda item: item["n"], name="reads").sink(Collect(), name="out")

    made = one_worker(wiring, strict=False)
    for runtime in made.runtimes.values():
        runtime.outside = replace(runtime.outside, warn=told.append)
    for start in range(0, 8 * CHECKED, CHECKED):
        made.feed("numbers", range(start, start + CHECKED))
        made.advance(1)
    assert len(told) == 1
    assert "'spoils', 'reads'" in told[0]
    assert "'items'" in told[0]
    assert made.collected("out")[-CHECKED:] == list(range(7 * CHECKED, 8 * CHECKED)), "copied now"
    assert SAMPLE_ROWS <= CHECKED


def test_items_that_nobody_changes_are_not_copied_for_ever() -> None:
    seen: dict[str, list[Item]] = {"one": [], "other": []}
    flow = Flow("items")
    numbers: Any = flow.source(Items([]), name="numbers")
    items = numbers.map(lambda n: {"n": n}, name="items")
    for name, found in seen.items():
        items.inspect(found.append, name=name).sink(Collect())
    for strict in (True, False):
        made = FlowTester(flow, workers=1, feed=["numbers"])
        for runtime in made.runtimes.values():
            runtime.be_strict(strict)
        for found in seen.values():
            found.clear()
        made.feed("numbers", range(3 * CHECKED))
        made.feed("numbers", range(10))
        last = seen["one"][-1], seen["other"][-1]
        assert last[0] == last[1]
        assert (last[0] is last[1]) is not strict


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
