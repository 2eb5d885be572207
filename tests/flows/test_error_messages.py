"""Slips of those who write flows are told in their words: what is wrong, where, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import railgun
from railgun import Collect, Flow, Items, Reader, Source, StepError
from railgun.engine.operators.describe import describe_error
from railgun.engine.operators.functions import check_time
from railgun.flows.errors import InterruptedCallError
from railgun.testing.flow_tester import FlowTester

RAILGUN = str(Path(railgun.__file__).parent)


class Parts(Source[int]):
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def partitions(self) -> list[Any]:
        return list(self.parts)

    def open(self, partition: Any, position: Any) -> Reader[int]:
        raise AssertionError("it has no such part")


@pytest.mark.parametrize(
    ("part", "kind"), [(["a"], "list"), ({"name": "a"}, "dict"), (("a", [1]), "tuple")]
)
def test_a_part_that_is_not_hashable_is_named_with_what_to_do(part: Any, kind: str) -> None:
    flow = Flow("parts")
    flow.source(Parts(part), name="numbers").sink(Collect(), name="out")
    with pytest.raises(StepError) as caught:
        FlowTester(flow).finish()
    told = str(caught.value)
    assert "source 'numbers': Parts.partitions failed" in told
    assert f"the part {part!r} is of type {kind}, and not hashable" in told
    assert "make them of numbers, text, or tuples of these" in told
    assert "Traceback" not in told


def counting(function: Callable[[int, int], Any]) -> Flow:
    flow = Flow("pairs")
    numbers = flow.source(Items(range(5)), name="numbers").key_by(lambda n: n % 2)
    numbers.stateful_map(function, initial=int, name="count").sink(Collect(), name="out")
    return flow


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (7, "7, of type int"),
        (None, "None, of type NoneType"),
        ((1, 2, 3), "(1, 2, 3), of type tuple"),
    ],
)
def test_a_function_with_state_that_returns_no_pair_is_told_what_it_returned(
    made: Any, told: str
) -> None:
    with pytest.raises(StepError) as caught:
        FlowTester(counting(lambda state, item: made)).finish()
    text = str(caught.value)
    assert "the function of step 'count' must return a pair, (state, result), and returned" in text
    assert told in text
    assert "unpack" not in text


def test_what_a_function_with_state_raises_itself_is_told_as_it_is() -> None:
    def unpacks(state: int, item: int) -> Any:
        first: int
        second: int
        first, second = item  # type: ignore[misc]
        return first, second

    with pytest.raises(StepError, match="cannot unpack non-iterable int object"):
        FlowTester(counting(unpacks)).finish()


@pytest.mark.parametrize(
    ("time", "told"),
    [
        (
            2**70,
            "a time is between -9223372036854775807 and 9223372036854775805 µs since 1970, and 118",
        ),
        (-(2**63), "is out of that range"),
        ("noon", "a time is a whole number of microseconds, not 'noon'"),
        (1.5, "a time is a whole number of microseconds, not 1.5"),
    ],
)
def test_a_time_that_is_none_or_too_far_away_is_told_which_it_is(time: Any, told: str) -> None:
    flow = Flow("times")
    source = flow.source(Items(range(5)), name="numbers", time=lambda item: time)
    source.sink(Collect(), name="out")
    with pytest.raises(StepError, match=re.escape(told)):
        FlowTester(flow).finish()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError, GeneratorExit])
@pytest.mark.parametrize("caused", [False, True])
def test_the_way_to_what_was_raised_begins_in_code_of_users(
    kind: type[BaseException], caused: bool
) -> None:
    def function(state: int, item: int) -> Any:
        try:
            raise LookupError("the cause")
        except LookupError as error:
            if caused:
                raise kind from error
        raise kind

    with pytest.raises((StepError, InterruptedCallError)) as caught:
        FlowTester(counting(function)).finish()
    frames = re.findall(r'File "([^"]+)"', str(caught.value))
    assert frames
    assert all(frame == __file__ for frame in frames)


def test_what_railgun_raises_itself_keeps_its_way() -> None:
    with pytest.raises(TypeError) as caught:
        check_time("a time", "noon")
    caught.value.__traceback__ = caught.tb.tb_next
    assert RAILGUN in describe_error(caught.value)
