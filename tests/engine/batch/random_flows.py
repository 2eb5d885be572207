"""Flows drawn by chance, to be run live and as a batch: both must give the same, key by key."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from railgun import FORGET, Collect, Context, Flow, FlowError, Items, Stateful
from railgun.flows.flow import KeyedStream, Stream

WINDOW = 50
Row = dict[str, Any]


class Windows(Stateful[Any, Any, dict[int, list[str]], Any]):
    """Tumbling windows, told when they are over: whatever the moment they are told at, they hold the same."""

    def initial(self) -> dict[int, list[str]]:
        return {}

    def on_item(self, item: Any, context: Context[Any, dict[int, list[str]]]) -> Iterable[Any]:
        window = context.time // WINDOW
        context.state.setdefault(window, []).append(f"{context.port}{item['n']}")
        context.set_timer((window + 1) * WINDOW + 1000)  # later than anything late
        return ()

    def on_timer(self, context: Context[Any, dict[int, list[str]]]) -> Iterator[Any]:
        window = (context.time - 1000) // WINDOW - 1
        told = context.state.pop(window, [])
        yield {"key": context.key, "n": window, "what": " ".join(told)}
        if not context.state:
            context.forget()

    def on_end(self, context: Context[Any, dict[int, list[str]]]) -> Iterator[Any]:
        yield {"key": context.key, "n": -1, "what": f"end {sorted(context.state)}"}


class Last(Stateful[Any, Any, list[Any], Any]):
    """Tells the item before, the port, and at the end how many there were."""

    def initial(self) -> list[Any]:
        return []

    def on_item(self, item: Any, context: Context[Any, list[Any]]) -> Iterable[Any]:
        before = context.state[-1] if context.state else None
        context.state.append(item["n"])
        return [{"key": context.key, "n": item["n"], "what": [before, context.port]}]

    def on_end(self, context: Context[Any, list[Any]]) -> Iterable[Any]:
        return ({"key": context.key, "n": len(context.state), "what": "end"},)


class Bag(Stateful[Any, Any, list[str], Any]):
    """Tells at the end what came, in whatever order."""

    def initial(self) -> list[str]:
        return []

    def on_item(self, item: Any, context: Context[Any, list[str]]) -> None:
        context.state.append(repr(item))

    def on_end(self, context: Context[Any, list[str]]) -> Iterable[Any]:
        return [{"key": context.key, "n": len(context.state), "what": sorted(context.state)}]


def running(state: list[Any], item: Any) -> tuple[Any, Any]:
    """Not commutative: the order of items shows. Now and then a key is forgotten."""
    state = [*state[-3:], item["n"]]
    told = {"key": item["key"], "n": item["n"], "what": state}
    return (FORGET if item["n"] % 7 == 6 else state), told


def joined(so_far: Any, item: Any) -> Any:
    """Not commutative either."""
    return {
        "key": item["key"],
        "n": item["n"],
        "what": [so_far["n"], so_far["what"] if item["n"] % 3 else 0],
    }


def spread(item: Any) -> Iterator[Any]:
    """None, one or two of an item, with other keys."""
    for at in range(item["n"] % 3):
        yield {"key": item["n"] % 4 + at, "n": item["n"] * 2 + at, "what": at}


def rows(rng: random.Random, count: int, keys: int) -> list[Row]:
    """Input, in order of time."""
    times = sorted(rng.sample(range(1000), count))
    return [
        {"key": rng.randrange(keys), "n": rng.randrange(100), "time": time, "what": None}
        for time in times
    ]


def draw(rng: random.Random, text: bool = False) -> Flow:
    """A flow; its source is called s0. `text`: its sinks get items as text."""
    while True:
        flow = _drawn(rng, text)
        with suppress(FlowError):  # keyed streams united of which one leads to the other
            flow.plan()
            return flow


def _drawn(rng: random.Random, text: bool) -> Flow:
    flow = Flow("drawn", dead_letters=Collect())
    streams: list[Stream[Any]] = [flow.source(Items([]), name="s0", time=lambda row: row["time"])]

    def end(stream: Stream[Any], number: int) -> None:
        (stream.map(repr) if text else stream).sink(Collect(), name=f"out{number}")

    sinks = 0
    # What timers and the end of several keys bring has no order among them, in a live run either.
    loose: set[str] = set()
    for _ in range(rng.randint(1, 6)):
        stream = streams.pop(rng.randrange(len(streams)))
        kind = rng.choice(
            ["map", "filter", "flat_map", "branch", "union", "key", "key", "key", "fail"]
        )
        if kind == "map":
            streams.append(stream.map(lambda row: {**row, "n": row["n"] + 1}))
        elif kind == "filter":
            streams.append(stream.filter(lambda row: row["n"] % 5))
        elif kind == "fail":
            streams.append(
                stream.map(
                    lambda row: {**row, "n": row["n"] // (row["n"] % 11)}, on_error="dead_letter"
                )
            )
        elif kind == "flat_map":
            streams.append(stream.flat_map(spread))
        elif kind == "branch":
            streams += stream.branch(lambda row: row["n"] % 2)
            if stream.step.name in loose:
                loose |= {way.step.name for way in streams[-2:]}
        elif kind == "union" and streams:
            other = streams.pop(rng.randrange(len(streams)))
            united = stream.union(other)
            if isinstance(united, KeyedStream):  # two ports of one stage
                kind_of = Bag() if {stream.step.name, other.step.name} & loose else Last()
                united = united.stateful(kind_of)
                loose.add(united.step.name)
            streams.append(united)
        else:
            streams.append(_keyed(rng, stream, loose))
        if any(before.name in loose for before in streams[-1].step.inputs):
            loose.add(streams[-1].step.name)
        if rng.random() < 0.2:
            end(streams[-1], sinks)
            sinks += 1
    for number, stream in enumerate(streams, sinks):
        end(stream, number)
    return flow


def _keyed(rng: random.Random, stream: Stream[Any], loose: set[str]) -> KeyedStream[Any, Any]:
    if rng.random() < 0.3:
        keyed = stream.key_by(lambda row: f"k{row['n'] % 5}")
    else:
        keyed = stream.key_by(lambda row: row["key"])
    if stream.step.name in loose:
        bag = keyed.stateful(Bag())
        loose.add(bag.step.name)
        return bag
    for _ in range(rng.randint(1, 2)):
        if rng.random() < 0.2:  # ways that part, and meet again
            odd, even = keyed.branch(lambda row: row["n"] % 2)
            before = keyed.step.name in loose
            keyed = odd.map(lambda row: {**row, "n": row["n"] + 2}).union(even)
            loose |= {keyed.step.name} if before else set()
        step = rng.choice(["running", "reduce", "last", "windows"])
        if step == "running":
            keyed = keyed.stateful_map(running, initial=list)
        elif step == "reduce":
            keyed = keyed.reduce(joined)
        elif step == "last":
            keyed = keyed.stateful(Last())
        else:
            keyed = keyed.stateful(Windows())
        if step in ("last", "windows") or keyed.step.inputs[0].name in loose:
            loose.add(keyed.step.name)
        if rng.random() < 0.3:
            before = keyed.step.name in loose
            keyed = keyed.filter(lambda row: row["n"] != 13)
            loose |= {keyed.step.name} if before else set()
    return keyed
