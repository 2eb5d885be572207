"""Keys of flows: a key finds its state again, wherever it was, or is refused where it is made."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from railgun import Collect, Flow, Items, StepError
from railgun.testing.disks import SimulatedDisk
from railgun.testing.flow_tester import FlowTester

ODD: list[Any] = [math.nan, ("a", math.nan), Decimal("NaN")]


def counting(**options: Any) -> Flow:
    flow = Flow("counting", **options)
    nothing: list[Any] = []
    keyed = flow.source(Items(nothing), name="in").key_by(lambda item: item, name="by itself")
    keyed.stateful_map(lambda n, item: (n + 1, n + 1), int, name="count").sink(
        Collect(), name="out"
    )
    return flow


@pytest.mark.parametrize("key", ODD, ids=repr)
def test_a_key_that_does_not_equal_itself_stops_the_flow_by_name(key: Any) -> None:
    tester = FlowTester(counting(), feed=["in"])
    with pytest.raises(StepError, match="cannot be a key, nor a part of one") as caught:
        tester.feed("in", [1.5, key])
    assert caught.value.step == "by itself"


@pytest.mark.parametrize("key", ODD, ids=repr)
def test_such_keys_are_dead_letters_and_no_states_multiply(key: Any) -> None:
    flow = counting(dead_letters=Collect(), on_error="dead_letter")
    tester = FlowTester(flow, feed=["in"], snapshots=True)
    tester.feed("in", [1.5, key, 1.5])
    tester.snapshot()
    tester.crash(0)
    tester.feed("in", [key, 1.5])
    assert tester.state("count") == {1.5: 3}
    assert [letter.error[:12] for letter in tester.dead_letters] == ["KeyTypeError"] * 2


def test_equal_keys_of_different_types_are_one_key_everywhere() -> None:
    tester = FlowTester(counting(), workers=3, feed=["in"], snapshots=True)
    tester.feed("in", [0.0, -0.0, 0, False, 1, True, 1.0, Decimal(1), (1, -0.0), (True, 0)])
    tester.snapshot()
    tester.crash(1)
    tester.rescale(2)
    tester.feed("in", [-0.0, True, (1.0, False)])
    assert tester.state("count") == {0: 5, 1: 5, (1, 0): 3}


@pytest.mark.parametrize(
    ("before", "now", "had", "has"),
    [(1, None, "int", "NoneType"), (None, 1, "NoneType", "int"), ("a", None, "str", "NoneType")],
)
def test_keys_of_another_type_than_in_the_snapshot_are_told_also_if_they_are_none(
    before: Any, now: Any, had: str, has: str
) -> None:
    disk = SimulatedDisk()
    first = FlowTester(counting(), workers=1, feed=["in"], snapshots=disk)
    first.feed("in", [before])
    first.snapshot()
    assert first.world.keeper is not None
    first.world.keeper.release()
    told: list[str] = []

    def warn(text: str, about: str) -> None:
        told.append(text)

    second = FlowTester(counting(), workers=1, feed=["in"], snapshots=disk)
    for runtime in second.runtimes.values():
        runtime.environment = replace(runtime.environment, warn=warn)
    second.feed("in", [now, now])
    assert len(told) == 1
    assert f"step 'count': the snapshot has keys of type {had} ({before!r})" in told[0]
    assert f"the flow makes keys of type {has} ({now!r}) now" in told[0]


def mixed(key: Any) -> list[str]:
    """What is told of a flow that goes on with other keys than 0 … 9, which are in the snapshot."""
    disk = SimulatedDisk()
    first = FlowTester(counting(), workers=2, feed=["in"], snapshots=disk)
    first.feed("in", range(10))
    first.snapshot()
    assert first.world.keeper is not None
    first.world.keeper.release()
    told: dict[str, str] = {}

    def warn(text: str, about: str) -> None:
        told.setdefault(about, text)  # as a controller does

    second = FlowTester(counting(), workers=2, feed=["in"], snapshots=disk)
    for runtime in second.runtimes.values():
        runtime.environment = replace(runtime.environment, warn=warn)
    for start in range(0, 100, 10):
        second.feed("in", [key(number) for number in range(start, start + 10)])
    return sorted(told.values())


def test_keys_of_which_some_are_of_another_type_are_told_once_for_each_type() -> None:
    assert mixed(lambda n: n) == []
    assert mixed(lambda n: n / 2) == []
    [told] = mixed(lambda n: n if n % 2 else str(n))
    assert "step 'count': the snapshot has keys of type int (" in told
    assert "and the flow makes some keys of type str ('" in told
    [late] = mixed(lambda n: n if n < 60 else (n, 1))
    assert "makes some keys of type (int, int) ((" in late
    both = mixed(lambda n: (n, str(n), str(n).encode())[n % 3])
    assert len(both) == 2
    assert "type bytes (b'" in both[0]
    assert "type str ('" in both[1]


def test_a_type_of_which_few_keys_are_saved_is_known() -> None:
    disk = SimulatedDisk()
    first = FlowTester(counting(), workers=1, feed=["in"], snapshots=disk)
    first.feed("in", [*range(500), None])
    first.snapshot()
    assert first.world.keeper is not None
    first.world.keeper.release()
    told: list[str] = []
    second = FlowTester(counting(), workers=1, feed=["in"], snapshots=disk)
    for runtime in second.runtimes.values():
        runtime.environment = replace(
            runtime.environment, warn=lambda text, about: told.append(text)
        )
    second.feed("in", [1, None])
    assert told == []
