"""The types of items follow through a flow: what is asserted here is checked by mypy, and run too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, assert_type

from railgun import (
    Collect,
    Context,
    Directory,
    Files,
    Flow,
    Generate,
    Items,
    KeyedStream,
    Place,
    Print,
    Sink,
    Stateful,
    Stream,
    Writer,
)  # fmt: skip


def length(word: str) -> int:
    return len(word)


def count(seen: int, word: str) -> tuple[int, float]:
    return seen + 1, float(seen)


def average(numbers: list[int]) -> Iterable[float]:
    return [sum(numbers) / len(numbers)]


def reading(index: int, random: Random) -> tuple[str, float]:
    return f"sensor-{index % 10}", random.random()


class Longest(Stateful[int, str, list[str], tuple[int, str]]):
    def initial(self) -> list[str]:
        return []

    def on_item(self, item: str, context: Context[int, list[str]]) -> Iterable[tuple[int, str]]:
        assert_type(context.key, int)
        assert_type(context.state, list[str])
        assert_type(context.time, int)
        context.state.append(item)
        return [(context.key, max(context.state, key=len))]


class Numbers(Sink[int]):
    def open(self, place: Place) -> Writer[int]:
        return Collect().open(place)


def words() -> Stream[str]:
    return Flow("types").source(Items(["to", "be"]))


def test_sources() -> None:
    flow = Flow("types")
    assert_type(flow.source(Items([1, 2])), Stream[int])
    assert_type(flow.source(Generate(reading)), Stream[tuple[str, float]])
    assert_type(flow.source(Directory(Path("in"))), Stream[str])
    assert_type(flow.source(Directory("in", format="text", watch=True)), Stream[str])
    assert_type(flow.source(Directory("in", format="json")), Stream[Any])


def test_steps_without_state() -> None:
    stream = words()
    assert_type(stream.map(length), Stream[int])
    assert_type(stream.map(lambda word: (word, len(word))), Stream[tuple[str, int]])
    assert_type(stream.filter(str.isalpha), Stream[str])
    assert_type(stream.flat_map(lambda word: list(word.encode())), Stream[int])
    assert_type(stream.map(length).map_batches(average), Stream[float])
    assert_type(stream.inspect(print), Stream[str])
    assert_type(stream.branch(str.isalpha), tuple[Stream[str], Stream[str]])


def test_keys() -> None:
    stream = words()
    keyed = stream.key_by(length)
    assert_type(keyed, KeyedStream[int, str])
    assert_type(stream.key_by(length, str.encode), KeyedStream[int, bytes])
    assert_type(keyed.with_key(), KeyedStream[int, tuple[int, str]])
    assert_type(keyed.map(length), KeyedStream[int, int])
    assert_type(keyed.filter(str.isalpha), KeyedStream[int, str])
    assert_type(keyed.flat_map(lambda word: [1.5]), KeyedStream[int, float])
    assert_type(keyed.map(length).map_batches(lambda ns: ns), KeyedStream[int, int])
    assert_type(keyed.inspect(print), KeyedStream[int, str])
    yes, no = keyed.branch(str.isalpha)
    assert_type(yes, KeyedStream[int, str])
    assert_type(no, KeyedStream[int, str])
    assert_type(keyed.key_by(str.upper), KeyedStream[str, str])


def test_state() -> None:
    keyed = words().key_by(length)
    assert_type(keyed.stateful_map(count, initial=int), KeyedStream[int, float])
    assert_type(
        keyed.stateful_map(lambda seen, word: (seen + 1, (word, seen)), initial=int),
        KeyedStream[int, tuple[str, int]],
    )
    assert_type(keyed.reduce(max), KeyedStream[int, str])
    assert_type(keyed.stateful(Longest()), KeyedStream[int, tuple[int, str]])


def test_unions() -> None:
    stream = words()
    keyed = stream.key_by(length)
    assert_type(stream.union(stream), Stream[str])
    assert_type(stream.union(stream.map(length)), Stream[str | int])
    assert_type(keyed.union(keyed), KeyedStream[int, str])
    assert_type(keyed.union(keyed.map(length)), KeyedStream[int, str | int])
    assert_type(keyed.union(stream), Stream[str])
    assert_type(stream.union(keyed.map(length)), Stream[str | int])


def test_sinks() -> None:
    stream = words()
    stream.sink(Collect())
    stream.sink(Print(format=str.upper))
    stream.key_by(length).sink(Files("out"))
    stream.map(length).sink(Numbers())
    stream.sink(Numbers())  # type: ignore[arg-type]
    assert_type(stream.sink(Collect(), name="last"), None)


def test_what_does_not_fit_is_found() -> None:
    """Each of these is an error to mypy, which says so if one is not: an `ignore` nobody needs is an error too."""
    stream = words()
    keyed = stream.key_by(length)
    stream.map(abs)  # type: ignore[arg-type]
    stream.flat_map(length)  # type: ignore[arg-type]
    keyed.reduce(lambda a, b: 3)  # type: ignore[arg-type,return-value]
    keyed.stateful_map(count, initial=str)  # type: ignore[misc]
    keyed.map(length).stateful(Longest())  # type: ignore[arg-type]
    stream.key_by(str.upper).stateful(Longest())  # type: ignore[arg-type]
    items: Sequence[Stream[int]] = [stream.map(length)]
    assert len(items) == 1
