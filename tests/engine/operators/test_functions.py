"""Functions that do not return their results: coroutines and generators are refused where they make no sense."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from railgun import Collect, Flow, FlowError, Generate, Items, Sink, Stateful
from railgun.flows.errors import ConnectorError, NotAResultError, SinkError
from railgun.flows.sink import Place, Writer
from railgun.sources.connectors import Connectors
from railgun.testing.flow_tester import FlowTester


async def later(*items: Any) -> Any:
    await asyncio.sleep(0)
    return items[-1]


async def later_many(*items: Any) -> AsyncIterator[Any]:
    yield items[-1]


def several(*items: Any) -> Iterator[Any]:
    yield items[-1]


class Later:
    async def __call__(self, *items: Any) -> Any:
        return items[-1]

    async def method(self, *items: Any) -> Any:
        return items[-1]


ASYNC = {
    "coroutine": later,
    "asynchronous generator": later_many,
    "callable": Later(),
    "method": Later().method,
    "partial": partial(partial(later), 1),
}
Use = Callable[[Any, Any], Any]
"""Gives a function to a step of a stream of pairs."""


def keyed(stream: Any) -> Any:
    return stream.key_by(lambda item: item[0])


PLAIN: dict[str, Use] = {
    "map": lambda stream, f: stream.map(f),
    "filter": lambda stream, f: stream.filter(f),
    "inspect": lambda stream, f: stream.inspect(f),
    "branch": lambda stream, f: stream.branch(f)[0],
    "key_by": lambda stream, f: stream.key_by(f),
    "value": lambda stream, f: stream.key_by(lambda item: item, f),
    "reduce": lambda stream, f: keyed(stream).reduce(f),
    "stateful_map": lambda stream, f: keyed(stream).stateful_map(f, initial=int),
    "initial": lambda stream, f: keyed(stream).stateful_map(lambda s, n: (s, n), initial=f),
    "upgrades": lambda stream, f: keyed(stream).reduce(max, upgrades=[f]),
    "time": lambda stream, f: stream.flow.source(Items([1]), time=f),
}
GENERATES: dict[str, Use] = {
    "flat_map": lambda stream, f: stream.flat_map(f),
    "map_batches": lambda stream, f: stream.map_batches(f),
}


def pairs() -> Any:
    return Flow("functions").source(Items([(1, 2), (3, 4)]), name="pairs")


@pytest.mark.parametrize("kind", ASYNC)
@pytest.mark.parametrize("use", [*PLAIN, *GENERATES])
def test_asynchronous_functions_are_refused_where_the_flow_is_written(use: str, kind: str) -> None:
    with pytest.raises(FlowError) as caught:
        {**PLAIN, **GENERATES}[use](pairs(), ASYNC[kind])
    told = str(caught.value)
    assert re.match(r".*test_functions\.py:\d+: ", told)
    assert "asyncio.run" in told
    assert "later" in told.lower()
    assert (use if use not in ("value", "initial", "upgrades") else "") in told


@pytest.mark.parametrize("use", PLAIN)
def test_generator_functions_are_refused_where_one_result_is_wanted(use: str) -> None:
    with pytest.raises(FlowError, match=r"several is a generator function.*flat_map"):
        PLAIN[use](pairs(), several)


def test_a_step_that_has_a_name_is_named() -> None:
    with pytest.raises(FlowError, match=r"map 'ask': later is asynchronous"):
        pairs().map(later, name="ask")


def test_generator_functions_are_welcome_where_many_results_are() -> None:
    flow = Flow("functions")
    numbers = flow.source(Items([1, 2]), name="numbers")
    numbers.flat_map(several).map_batches(lambda items: (n for n in items)).sink(
        Collect(), name="out"
    )
    tester = FlowTester(flow)
    tester.settle()
    assert sorted(tester.collected("out")) == [1, 2]


class Hooks(Stateful[int, Any, int, Any]):
    def initial(self) -> int:
        return 0

    def on_item(self, item: Any, context: Any) -> Any:
        yield item


def test_a_stateful_whose_hooks_are_asynchronous_is_refused() -> None:
    keyed(pairs()).stateful(Hooks())
    for hook in ("initial", "on_item", "on_timer", "on_end"):
        kind: Any = type("Odd", (Hooks,), {hook: later})
        with pytest.raises(FlowError, match=rf"stateful.*Odd\.{hook} is asynchronous"):
            keyed(pairs()).stateful(kind())
    kind = type("Odd", (Hooks,), {"initial": several})
    with pytest.raises(FlowError, match=r"Odd\.initial is a generator function"):
        keyed(pairs()).stateful(kind())


def test_sources_refuse_them_too() -> None:
    with pytest.raises(ConnectorError, match="later is asynchronous"):
        Generate(later)
    with pytest.raises(ConnectorError, match="several is a generator function"):
        Generate(several)
    with pytest.raises(ConnectorError, match="later is asynchronous"):
        Connectors("in", decode=later)


# ---------------------------------------------------------------- found when they run


@pytest.fixture
def unawaited() -> Iterator[Callable[..., Any]]:
    """A plain function that gives coroutines, which are closed afterwards: Python warns of those nobody awaited."""
    made = []

    def gives(*items: Any) -> Any:
        made.append(later(*items))
        return made[-1]

    yield gives
    for coroutine in made:
        coroutine.close()


@pytest.mark.parametrize(
    "use", ["map", "filter", "inspect", "branch", "key_by", "value", "reduce", "stateful_map"]
)
def test_a_coroutine_as_a_result_fails_the_flow_by_name(
    use: str, unawaited: Callable[..., Any]
) -> None:
    stream = Flow("functions", on_error="dead_letter", dead_letters=Collect()).source(
        Items([(1, 1), (1, 2), (1, 3)]), name="pairs"
    )
    gives: Any = lambda *items: unawaited(*items)  # noqa: E731
    if use == "stateful_map":
        gives = lambda state, item: (state, unawaited(item))  # noqa: E731
    made = PLAIN[use](stream, gives)
    made.sink(Collect(), name="out")
    if use == "branch":
        made.flow.steps.pop("branch.no")  # it leads nowhere
    with pytest.raises(NotAResultError) as caught:
        FlowTester(made.flow).settle()
    assert made.step.name.removesuffix(".yes") in str(caught.value)
    assert "<lambda>" in str(caught.value)
    assert "coroutine" in str(caught.value)
    assert "asyncio.run" in str(caught.value)


class Asking(Stateful[int, Any, int, Any]):
    """Returns a coroutine from one of its methods."""

    def __init__(self, method: str) -> None:
        self.method = method

    def initial(self) -> int:
        return 0

    def asked(self, method: str) -> Any:
        return later() if method == self.method else None

    def on_item(self, item: Any, context: Any) -> Any:
        context.set_timer(context.time + 1)
        return self.asked("on_item")

    def on_timer(self, context: Any) -> Any:
        return self.asked("on_timer")

    def on_end(self, context: Any) -> Any:
        return self.asked("on_end")


@pytest.mark.parametrize("use", ["flat_map", "map_batches", "on_item", "on_timer", "on_end"])
def test_a_coroutine_in_place_of_many_results_is_no_dead_letter(use: str) -> None:
    flow = Flow("functions", on_error="dead_letter", dead_letters=Collect())
    stream: Any = flow.source(Items([(1, 1), (1, 2)]), name="pairs", time=lambda pair: pair[1])
    if use.startswith("on_"):
        stream = stream.key_by(lambda pair: pair[0]).stateful(Asking(use))
    else:
        stream = getattr(stream, use)(lambda given: later(given))
    stream.sink(Collect(), name="out")
    with pytest.raises(NotAResultError, match=r"coroutine.*asyncio\.run"):
        FlowTester(flow).finish()


class Posting(Sink[Any]):
    """A sink whose writer returns a coroutine from one of its plain methods."""

    def __init__(self, method: str) -> None:
        self.method = method

    def open(self, place: Place) -> Writer[Any]:
        return PostingWriter(self.method)


class PostingWriter(Writer[Any]):
    def __init__(self, method: str) -> None:
        self.method = method

    def write(self, items: Sequence[Any]) -> Any:
        return later(items) if self.method == "write" else None

    def flush(self) -> Any:
        return later() if self.method == "flush" else None

    def close(self) -> Any:
        return later() if self.method == "close" else None


@pytest.mark.parametrize("method", ["write", "flush", "close"])
def test_a_writer_that_returns_a_coroutine_has_written_nothing_and_fails(method: str) -> None:
    flow = Flow("functions")
    flow.source(Items([1, 2]), name="numbers").sink(Posting(method), name="out")
    with pytest.raises(SinkError, match=rf"(?s)'out'.*{method}.*returned a coroutine"):
        FlowTester(flow).finish()


@pytest.mark.parametrize("use", ["filter", "branch", "key_by", "reduce", "stateful_map"])
def test_a_generator_as_an_answer_fails_the_flow_by_name(use: str) -> None:
    stream = Flow("functions").source(Items([(1, 1), (1, 2), (1, 3)]), name="pairs")
    gives: Any = lambda *items: (n for n in items)  # noqa: E731
    if use == "stateful_map":
        gives = lambda state, item: ((n for n in (state, item)), item)  # noqa: E731
    made = PLAIN[use](stream, gives)
    made.sink(Collect(), name="out")
    if use == "branch":
        made.flow.steps.pop("branch.no")
    as_what = "as the state of key 1.*no state" if use == "stateful_map" else "no result"
    with pytest.raises(NotAResultError, match=rf"<lambda> returned a generator.*{as_what}"):
        FlowTester(made.flow).settle()


def test_methods_of_sources_and_sinks_are_looked_at() -> None:
    for method in ("open", "layout"):
        kind: Any = type("Slow", (Items,), {method: later})
        with pytest.raises(FlowError, match=rf"source 'in': Slow\.{method} is asynchronous"):
            Flow("functions").source(kind([1]), name="in")
    many: Any = type("Many", (Items,), {"partitions": lambda self: (n for n in [0])})
    Flow("functions").source(many([1]))
    kind = type("Slow", (Collect,), {"open": later})
    with pytest.raises(FlowError, match=r"sink 'out': Slow\.open is asynchronous"):
        pairs().sink(kind(), name="out")


class Writes(Sink[Any]):
    def __init__(self, hook: str) -> None:
        self.hook = hook

    def open(self, place: Place) -> Writer[Any]:
        kind: Any = type("Slow", (_Nowhere,), {self.hook: later})
        made: Writer[Any] = kind()
        return made


class _Nowhere(Writer[Any]):
    def write(self, items: Sequence[Any]) -> None: ...


@pytest.mark.parametrize("hook", ["write", "flush", "close"])
def test_a_writer_that_is_asynchronous_would_write_nothing_and_is_refused(hook: str) -> None:
    flow = Flow("functions")
    flow.source(Items([1]), name="numbers").sink(Writes(hook), name="out")
    with pytest.raises(SinkError, match=rf"Slow\.{hook} is asynchronous"):
        FlowTester(flow)
