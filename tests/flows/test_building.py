"""Writing a flow down: names, and errors that name the user's line."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.flows.harness import Keys

from railgun import Collect, Flow, FlowError, Items, Source, Stateful
from railgun.flows.step import caller


def numbers(flow: Flow | None = None) -> Any:
    return (flow or Flow("test")).source(Items([1, 2]), name="numbers")


def names(flow: Flow) -> list[str]:
    return list(flow.steps)


def shout(word: str) -> str:
    return word.upper()


class Shouter:
    def __call__(self, word: str) -> str:
        return word.upper()

    def shout(self, word: str) -> str:
        return word.upper()


def test_a_name_is_derived_from_what_a_step_does() -> None:
    def local(item: Any) -> Any:
        return item

    flow = Flow("test")
    stream: Any = flow.source(Items(["a"]))
    stream = stream.map(shout).map(str.upper).map(Shouter().shout).map(Shouter()).map(local)
    stream = stream.map(lambda x: x).map(partial(shout)).flat_map(str.split).filter(bool)
    keyed = stream.key_by(str)
    keyed.reduce(max).stateful(Keys()).stateful_map(lambda s, x: (s, x), int).with_key().sink(
        Collect()
    )
    assert names(flow) == [
        *("Items", "map:shout", "map:upper", "map:shout-2", "map:Shouter", "map:local", "map"),
        *("map:partial", "flat_map:split", "filter:bool", "key_by", "reduce:max", "stateful:Keys"),
        *("stateful_map", "with_key", "Collect"),
    ]


def test_derived_names_are_the_same_when_the_flow_is_made_again() -> None:
    def make() -> Flow:
        flow = Flow("test")
        first, second = numbers(flow).map(lambda x: x).map(lambda x: x).branch(bool)
        first.union(second).key_by(str).reduce(max).sink(Collect())
        return flow

    assert names(make()) == names(make())


def test_derived_names_count_up_past_names_that_were_given() -> None:
    flow = Flow("test")
    numbers(flow).map(lambda x: x, name="map-2").map(lambda x: x).map(lambda x: x)
    assert names(flow) == ["numbers", "map-2", "map", "map-3"]


def test_the_ways_of_a_branch_are_named_after_it() -> None:
    flow = Flow("test")
    numbers(flow).branch(bool, name="big")
    assert names(flow) == ["numbers", "big", "big.yes", "big.no"]


def test_steps_do_not_change_the_stream_they_are_called_on() -> None:
    flow = Flow("test")
    stream = numbers(flow)
    stream.map(str, name="a").sink(Collect())
    stream.map(str, name="b").sink(Collect())
    assert flow.steps["a"].inputs == flow.steps["b"].inputs == (flow.steps["numbers"],)


# ---------------------------------------------------------------- errors name the line

Wrong = Callable[[Any], Any]
WRONG: dict[str, tuple[Wrong, str]] = {
    "map": (lambda s: s.map(3), "map needs a function, not 3"),
    "filter": (lambda s: s.filter(None), "filter needs a function"),
    "flat_map": (lambda s: s.flat_map([]), "flat_map needs a function"),
    "map_batches": (lambda s: s.map_batches(1), "map_batches needs a function"),
    "inspect": (lambda s: s.inspect("x"), "inspect needs a function"),
    "branch": (lambda s: s.branch("x"), "branch needs a function"),
    "key_by": (lambda s: s.key_by("id"), "key_by needs a function, not 'id'"),
    "value of key_by": (lambda s: s.key_by(str, "id"), "key_by needs a function, not 'id'"),
    "union": (lambda s: s.union(3), "union with 3, which is no stream of this flow"),
    "union with another flow": (lambda s: s.union(numbers()), "no stream of this flow"),
    "sink": (lambda s: s.sink(print), "is not a Sink"),
    "state without key": (lambda s: s.stateful_map(max, int), "stateful_map needs keyed items"),
    "reduce without key": (lambda s: s.reduce(max), "reduce needs keyed items: call key_by"),
    "stateful without key": (lambda s: s.stateful(Keys()), "stateful needs keyed items"),
    "with_key without key": (lambda s: s.with_key(), "with_key needs keyed items"),
    "reduce": (lambda s: s.key_by(str).reduce(3), "reduce needs a function, not 3"),
    "stateful_map": (lambda s: s.key_by(str).stateful_map(3, int), "stateful_map needs a function"),
    "initial state": (
        lambda s: s.key_by(str).stateful_map(max, 0),
        "initial state, needs a function",
    ),
    "stateful": (lambda s: s.key_by(str).stateful(Keys), "needs an instance of Stateful"),
    "keyed map": (lambda s: s.key_by(str).map(3), "map needs a function"),
    "keyed union": (lambda s: s.key_by(str).union(3), "no stream of this flow"),
    "policy": (lambda s: s.map(str, on_error="skip"), "'stop' or 'dead_letter', not 'skip'"),
    "keyed policy": (lambda s: s.key_by(str).reduce(max, on_error="x"), "'stop' or 'dead_letter'"),
    "no dead letters": (
        lambda s: s.map(str, on_error="dead_letter"),
        "give the flow one: Flow('test'",
    ),
    "name": (lambda s: s.map(str, name="a/b"), "'a/b' cannot be the name of a step"),
    "empty name": (lambda s: s.map(str, name=""), "'' cannot be the name of a step"),
    "duplicate": (
        lambda s: s.map(str, name="numbers"),
        "there is a step 'numbers' already, made at",
    ),
    "keyed duplicate": (
        lambda s: s.key_by(str).with_key(name="numbers"),
        "a step 'numbers' already",
    ),
    "source": (
        lambda s: s.flow.source([1, 2]),
        "not a Source; an iterable can be one: Items([1, 2])",
    ),
    "time": (lambda s: s.flow.source(Items([1]), time=3), "time is a function"),
    "lateness": (lambda s: s.flow.source(Items([1]), lateness=-1.0), "lateness and idle_after"),
    "flow": (lambda s: Flow("a b"), "a flow's name is made of letters"),
    "flow without a name": (lambda s: Flow(3), "a flow's name is made of letters"),  # type: ignore[arg-type]
    "sink of dead letters": (lambda s: Flow("x", dead_letters=3), "which 3 is not"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("wrong", "told"), WRONG.values(), ids=WRONG.keys())
def test_an_error_names_the_line_of_the_user(wrong: Wrong, told: str) -> None:
    stream = numbers()
    with pytest.raises(FlowError, match=re.escape(told)) as caught:
        wrong(stream)
    here = f"{__file__}:{wrong.__code__.co_firstlineno}: "
    assert str(caught.value).startswith(here)


def test_in_a_chain_over_several_lines_it_is_the_line_of_the_step() -> None:
    first = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.raises(FlowError) as caught:
        (
            numbers()
            .map(str)
            .key_by(str)
            .reduce(3)
        )  # fmt: skip
    assert str(caught.value).startswith(f"{__file__}:{first + 4}: ")


def test_a_duplicate_tells_where_the_first_one_is() -> None:
    stream = numbers()
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    stream.map(str, name="same")
    with pytest.raises(FlowError, match=re.escape(f"made at {__file__}:{line}:")):
        stream.map(str, name="same")


def test_a_file_beside_the_package_is_the_users() -> None:
    """Whose path merely begins as the package's does."""
    inside = caller.__code__.co_filename.replace("/step.py", "_of_mine.py")
    scope = {"stream": numbers()}
    with pytest.raises(FlowError) as caught:
        exec(compile("\nstream.map(3)", inside, "exec"), scope)
    assert str(caught.value).startswith(f"{inside}:2: ")


def test_an_unknown_step_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Stream has no step 'window'"):
        numbers().window()


def test_a_flow_and_a_stream_show_what_they_are() -> None:
    flow = Flow("test")
    assert repr(numbers(flow).key_by(str)) == "KeyedStream('key_by')"
    assert repr(flow) == "Flow('test', 2 steps)"
    assert repr(flow.steps["key_by"]) == "<key_by 'key_by'>"


def test_classes_of_users_have_to_be_complete() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Source()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="abstract"):
        Stateful()  # type: ignore[abstract]


def test_print_is_a_sink_and_a_file_is_not() -> None:
    with pytest.raises(FlowError, match="is not a Sink"):
        numbers().sink(io.StringIO())
