"""A flow with a hook of user code at every place that calls any, one of which raises what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from railgun import Collect, Flow, Place, Reader, Source, Stateful, TwoPhaseSink, TwoPhaseWriter


class UnspeakableError(Exception):
    """An exception that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "SystemExit": lambda: SystemExit(3),
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "BaseExceptionGroup": lambda: BaseExceptionGroup("several", [asyncio.CancelledError()]),
    "BaseException": lambda: BaseException("anything"),
    "LookupError": lambda: LookupError("ordinary"),
    "UnspeakableError": UnspeakableError,
}
OnError = Literal["stop", "dead_letter"]
ROWS = 60
BAD = 41  # the record the hooks of records raise for

RECORD_HOOKS = {  # the hook, and the step that is to blame
    "map": "mapped", "filter": "filtered", "truth": "filtered", "flat_map": "several", "iterate": "several",
    "inspect": "seen", "branch": "parted", "key": "keyed", "stable_key": "keyed", "value": "keyed", "time": "numbers",
    "stateful_map": "counted", "initial": "counted", "reduce": "summed", "on_item": "logic", "logic_initial": "logic",
    "on_item_iterate": "logic",
}  # fmt: skip
"""Hooks that are called for a record."""
OTHER_HOOKS = {
    "map_batches": "many", "on_timer": "logic", "on_end": "logic", "partitions": "numbers", "open": "numbers",
    "read": "numbers", "position": "numbers", "reader_close": "numbers", "sink_open": "out", "write": "out",
    "flush": "out", "sink_close": "out",
}  # fmt: skip
SAVING_HOOKS = {"cut": "out", "prepare": "out", "commit": "out", "recover": "out"}
"""Hooks that are called only if snapshots are taken."""
TRAVELLING_HOOKS = ("reduce_ex", "setstate")
"""Hooks of values that go from worker to worker."""


@dataclass(frozen=True)
class Trip:
    """Raises an exception where it is to be raised."""

    hook: str
    exception: str

    def at(self, hook: str, record: object = BAD) -> None:
        if hook == self.hook and record == BAD:
            raise EXCEPTIONS[self.exception]()


class Key:
    """A key that says itself which of them are equal."""

    def __init__(self, trip: Trip, number: int) -> None:
        self.trip, self.number = trip, number

    def __stable_key__(self) -> int:
        self.trip.at("stable_key", self.number)
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


class Value:
    """A value that is in the way of pickle."""

    def __init__(self, trip: Trip, number: int) -> None:
        self.trip, self.number = trip, number

    def __getstate__(self) -> Any:
        self.trip.at("reduce_ex")
        return self.trip, self.number

    def __setstate__(self, state: Any) -> None:
        self.trip, self.number = state
        self.trip.at("setstate")


class Answer:
    """The answer of a filter, which has no truth."""

    def __init__(self, trip: Trip, number: int) -> None:
        self.trip, self.number = trip, number

    def __bool__(self) -> bool:
        self.trip.at("truth", self.number)
        return True


class Numbers(Source[int]):
    """0, 1, … in two parts."""

    def __init__(self, trip: Trip) -> None:
        self.trip = trip

    def partitions(self) -> Sequence[int]:
        self.trip.at("partitions")
        return [0, 1]

    def open(self, partition: int, position: Any) -> Reader[int]:
        self.trip.at("open")
        return NumbersReader(self.trip, partition if position is None else position)


class NumbersReader(Reader[int]):
    def __init__(self, trip: Trip, at: int) -> None:
        self.trip, self.next = trip, at

    @property
    def position(self) -> int:
        self.trip.at("position")
        return self.next

    def read(self, most: int, now: int) -> list[int] | None:
        if self.next >= ROWS:
            return None
        self.trip.at("read")
        self.next += 2
        return [self.next - 2]

    def close(self) -> None:
        self.trip.at("reader_close")


class Logic(Stateful[Any, Any, Any, Any]):
    def __init__(self, trip: Trip) -> None:
        self.trip = trip

    def initial(self) -> int:
        return 0

    def on_item(self, item: int, context: Any) -> Iterator[int]:
        self.trip.at("logic_initial", item)
        return self.made(item, context)

    def made(self, item: int, context: Any) -> Iterator[int]:
        self.trip.at("on_item", item)
        context.state += 1
        context.set_timer(context.time + 1)
        yield item
        self.trip.at("on_item_iterate", item)

    def on_timer(self, context: Any) -> None:
        self.trip.at("on_timer")

    def on_end(self, context: Any) -> None:
        self.trip.at("on_end")


class Out(TwoPhaseSink[Any]):
    """Brings items to the program, and raises where it is to."""

    def __init__(self, trip: Trip) -> None:
        self.trip, self.inner = trip, Collect()

    def open(self, place: Place) -> TwoPhaseWriter[Any]:
        self.trip.at("sink_open")
        return OutWriter(self.trip, self.inner.open(place))

    def commit(self, token: Any) -> None:
        self.trip.at("commit")

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Any]) -> None:
        self.trip.at("recover")


class OutWriter(TwoPhaseWriter[Any]):
    def __init__(self, trip: Trip, inner: Any) -> None:
        self.trip, self.inner = trip, inner

    def write(self, items: Sequence[Any]) -> None:
        self.trip.at("write")
        self.inner.write(items)

    def flush(self) -> None:
        self.trip.at("flush")

    def prepare(self, snapshot: int) -> Any:
        return self.cut(snapshot)()

    def cut(self, snapshot: int) -> Callable[[], Any]:
        self.trip.at("cut")

        def rest() -> Any:
            self.trip.at("prepare")
            return [snapshot, id(self)]

        return rest

    def close(self) -> None:
        self.trip.at("sink_close")


def flow_of(trip: Trip, on_error: OnError = "stop") -> Flow:
    """A flow that calls every hook."""
    at = trip.at

    def same(hook: str) -> Callable[[Any], Any]:
        def function(item: Any) -> Any:
            at(hook, item)
            return item

        return function

    def listed(item: int) -> Iterator[int]:
        yield item
        at("iterate", item)

    def several(item: int) -> Iterator[int]:
        at("flat_map", item)
        return listed(item)

    def answer(item: int) -> Answer:
        at("filter", item)
        return Answer(trip, item)

    def many(items: list[int]) -> list[int]:
        at("map_batches")
        return items

    def valued(item: int) -> Value:
        at("value", item)
        return Value(trip, item)

    def initial() -> int:
        at("initial")
        return 0

    def counted(state: int, item: Value) -> tuple[int, int]:
        at("stateful_map", item.number)
        return state + 1, item.number

    def summed(so_far: int, item: int) -> int:
        at("reduce")
        return item

    def key(item: int) -> Key:
        at("key", item)
        return Key(trip, item)

    def time(item: int) -> int:
        at("time", item)
        return 1_000_000 + item

    dead = Collect() if on_error == "dead_letter" else None
    flow = Flow("raising", dead_letters=dead, on_error=on_error)
    numbers = flow.source(Numbers(trip), name="numbers", time=time)
    mapped = numbers.map(same("map"), name="mapped").filter(answer, name="filtered")
    several_ = mapped.flat_map(several, name="several").inspect(same("inspect"), name="seen")
    yes, no = several_.map_batches(many, name="many").branch(
        lambda item: (at("branch", item), item % 2)[1], name="parted"
    )
    keyed = yes.union(no).key_by(key, valued, name="keyed")
    totals = keyed.stateful_map(counted, initial=initial, name="counted")
    again = totals.key_by(lambda item: item % 5, name="again").reduce(summed, name="summed")
    again.stateful(Logic(trip), name="logic").sink(Out(trip), name="out")
    return flow
