"""A flow whose state and output show exactly what it has read, and a naive computation of what they must be.

Two stages behind a source: `first` has timers, deletes keys and ends them; `second` gathers what several keys of the
first emit. `sums` stands beside it in the same stage; what `first` emits and what comes from the source directly may be
united before it. State and output follow from how far each part was read, which timers have fired and which keys have
ended, in whatever order that happened: what several parts or keys bring to one key is kept apart in *lanes*. Keys are
numbers, as their order in a set is the same in every process.
"""

from __future__ import annotations

import random
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from railgun.engine.operators.stateful import FORGET, Context, Stateful
from railgun.engine.protocol.frontier import MAX, MIN
from railgun.flows.flow import Flow
from railgun.flows.sink import Sink
from railgun.flows.source import Reader, Source
from railgun.sinks.collect import Collect

BEGIN: Final = 1_700_000_000_000_000
PLAIN, DELETING, TIMING, DIRECT = 1000, 2000, 3000, 4000  # kinds of keys
TIMER, END = -1, -2  # lanes that are not those of a part
GONE: Final = -1


@dataclass(frozen=True, slots=True)
class Item:
    """A record: the `number`-th of a part."""

    part: int
    number: int
    key: int
    what: str  # add, delete, timer, close
    time: int
    at: int = 0
    """The time for which the timer is set."""


Value = tuple[int, int, int, int, int]  # key, lane, number, count, roll: what `first` emits


def mix(roll: int, number: int) -> int:
    """Mix a number into a hash that shows which numbers came, in which order."""
    return (roll * 31 + number + 1) % 1_000_003


def gathered(key: int) -> int:
    """Return the key of the second stage."""
    return key // 1000 * 1000 + key % 3


def make_items(chance: random.Random) -> list[list[Item]]:
    """Return the parts of the source."""
    parts = []
    for part in range(chance.randint(1, 3)):
        items: list[Item] = []
        session, used = 0, set[int]()
        for number in range(chance.randint(3, 22)):
            time = BEGIN + 10 * number + part
            kind = chance.choice((PLAIN, DELETING, DELETING, TIMING))
            if kind == TIMING:
                key, what = TIMING + 100 * part + session, chance.choice(("timer", "close"))
                at = time + chance.randint(1, 90)
                while at in used:
                    at += 1
                used.add(at)
                items.append(Item(part, number, key, what, time, at))
                session += what == "close"
            else:
                key = kind + chance.randrange(5 if kind == PLAIN else 3)
                deleting = kind == DELETING and chance.random() < 0.5
                items.append(Item(part, number, key, "delete" if deleting else "add", time))
        parts.append(items)
    return parts


class Parts(Source[Item]):
    """A source of parts; a read returns as many records as chance chooses among `pace`."""

    def __init__(
        self, parts: Sequence[Sequence[Item]], chance: random.Random, pace: Sequence[int]
    ) -> None:
        self.parts = parts
        self.chance = chance
        self.pace = pace

    def partitions(self) -> Sequence[int]:
        """Return the numbers of the parts."""
        return range(len(self.parts))

    def open(self, partition: Any, position: Any) -> Reader[Item]:
        """Return a reader of one part, from `position` on."""
        return _PartReader(self, partition, position or 0)


class _PartReader(Reader[Item]):
    def __init__(self, source: Parts, part: int, position: int) -> None:
        self.source = source
        self.items = source.parts[part]
        self.position: int = position

    def read(self, most: int, now: int) -> Sequence[Item] | None:
        count = min(most, self.source.chance.choice(self.source.pace))
        if count and self.position >= len(self.items):
            return None
        read = self.items[self.position : self.position + count]
        self.position += len(read)
        return list(read)


class Seen:
    """The last frontier of a key. How far that is depends on chance: any value is as good as another."""

    def __init__(self) -> None:
        self.frontier = MIN

    def see(self, frontier: int) -> None:
        """Record a frontier, which never goes back, wherever the key goes and whatever is loaded."""
        assert frontier >= self.frontier, f"time goes back from {self.frontier} to {frontier}"
        self.frontier = frontier

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seen)

    __hash__ = None  # type: ignore[assignment]


class First(Stateful[int, Item, dict[str, Any], Value]):
    """Lanes by part, with timers; a key is forgotten when nothing is left of it."""

    def initial(self) -> dict[str, Any]:
        """Return the state of a new key."""
        return {"lanes": {}, "pending": [], "closing": False, "ended": False, "seen": Seen()}

    def on_item(self, item: Item, context: Context[int, dict[str, Any]]) -> Iterable[Value]:
        """Count the item in its lane, or drop the lane."""
        state = context.state
        state["seen"].see(context.frontier)
        lanes = state["lanes"]
        if item.what == "delete":
            lanes.pop(item.part, None)
            if not lanes:
                context.forget()
            return [(item.key, item.part, item.number, GONE, 0)]
        count, roll = lanes.get(item.part, (0, 0))
        lanes[item.part] = (count + 1, mix(roll, item.number))
        if item.what != "add":
            insort(state["pending"], item.at)
            context.set_timer(item.at)
            state["closing"] = state["closing"] or item.what == "close"
        return [(item.key, item.part, item.number, *lanes[item.part])]

    def on_timer(self, context: Context[int, dict[str, Any]]) -> Iterable[Value]:
        """Count down the pending timers; the last timer of a key that is closing ends the key."""
        state = context.state
        assert context.frontier >= context.time, f"{context.time} has not come: {context.frontier}"
        state["pending"].remove(context.time)
        if state["closing"] and not state["pending"]:
            context.forget()
        return [(context.key, TIMER, context.time, 0, 0)]

    def on_end(self, context: Context[int, dict[str, Any]]) -> Iterable[Value]:
        """Emit the end of a key; raises if that happens twice."""
        assert not context.state["ended"], f"key {context.key} ends a second time"
        context.state["ended"] = True
        return [(context.key, END, 0, 0, 0)]


Second = dict[tuple[int, int], Any]  # by key and lane of the first stage


def gather(state: Second, value: Value) -> tuple[Any, tuple[int, ...]]:
    """Fold a value that the first stage emitted into the state of the second stage."""
    key, lane, number, count, roll = value
    own = 0
    if count == GONE:
        state.pop((key, lane), None)
    elif lane < 0:
        insort(state.setdefault((key, lane), []), number)
    else:
        before, rolled = state.get((key, lane), (0, 0))
        state[key, lane] = (before + 1, mix(rolled, roll))
        own = mix(rolled, roll)
    return state or FORGET, (key, lane, number, count, own)


def directly(item: Item) -> Value:
    """Return the value that goes past the first stage."""
    return (DIRECT + item.part, item.part, item.number, 1, item.number)


def weight(value: Value) -> int:
    """Return a number to add up."""
    return value[2] % 1000 + 7 * value[1] + 1


def make_flow(parts: Parts, sink: Sink[Any], *, united: bool, summed: bool) -> Flow:
    """Return the flow, with the united branch and the sums if wanted."""
    flow = Flow("saved")
    source = flow.source(parts, name="source", time=lambda item: item.time)
    first = source.key_by(lambda item: item.key, name="by key").stateful(First(), name="first")
    values = first.union(source.map(directly, name="direct")) if united else first
    keyed = values.key_by(lambda value: gathered(value[0]), name="by gathered")
    second = keyed.stateful_map(gather, dict, name="second")
    second.sink(Collect(), name="shown")
    second.sink(sink, name="kept")
    if summed:
        sums = keyed.map(weight, name="weight").reduce(lambda a, b: a + b, name="sums")
        sums.filter(lambda _: False, name="none").sink(Collect(), name="nothing")
    return flow


# ---------------------------------------------------------------- expected content


@dataclass(slots=True)
class Content:
    """The state of all steps."""

    source: dict[int, tuple[int, bool]]
    """Of each part: the position of its reader, and whether it has ended."""
    first: dict[int, dict[str, Any]]
    timers: dict[int, list[int]]
    ended: set[int]
    second: dict[int, Second]
    sums: dict[int, int]


def expected(
    parts: Sequence[Sequence[Item]], found: Content, *, united: bool, summed: bool
) -> tuple[Content, Counter[tuple[int, ...]]]:
    """Return the state and output that follow from the positions and pending timers of `found`."""
    first: dict[int, dict[str, Any]] = {}
    values: list[Value] = []
    logic = First()
    fired: set[tuple[int, int]] = set()
    for part, (position, _) in sorted(found.source.items()):
        for item in parts[part][:position]:
            context = _Told(item.key, item.time, first.get(item.key) or logic.initial())
            values += logic.on_item(item, context)  # type: ignore[arg-type]
            context.keep(first)
            if united:
                values.append(directly(item))
            if item.at and item.at not in found.first.get(item.key, _NOTHING)["pending"]:
                fired.add((item.key, item.at))
    for key, at in sorted(fired):
        context = _Told(key, at, first[key])
        values += logic.on_timer(context)  # type: ignore[arg-type]
        context.keep(first)
    ended = {key for key, state in found.first.items() if state["ended"] and key in first}
    for key in sorted(ended):
        values += logic.on_end(_Told(key, 0, first[key]))  # type: ignore[arg-type]
    second: dict[int, Second] = {}
    sums: dict[int, int] = {}
    out: Counter[tuple[int, ...]] = Counter()
    for value in values:
        key = gathered(value[0])
        state, result = gather(second.get(key, {}), value)
        if state is FORGET:
            second.pop(key, None)
        else:
            second[key] = state
        out[result] += 1
        if summed:
            sums[key] = sums.get(key, 0) + weight(value)
    timers = {key: list(state["pending"]) for key, state in first.items() if state["pending"]}
    return Content(found.source, first, timers, ended, second, sums), out


_NOTHING: Final[Mapping[str, Any]] = {"pending": ()}


class _Told:
    """Stands in for a context."""

    def __init__(self, key: int, time: int, state: dict[str, Any]) -> None:
        self.key, self.time, self.state = key, time, state
        self.frontier = MAX
        self.gone = False

    def set_timer(self, at: int) -> None:
        pass

    def forget(self) -> None:
        self.gone = True

    def keep(self, states: dict[int, dict[str, Any]]) -> None:
        if self.gone:
            states.pop(self.key, None)
        else:
            states[self.key] = self.state


def different(found: Content, wanted: Content) -> str:
    """Return the differences of two contents as text; empty if there are none."""
    for name in ("first", "timers", "ended", "second", "sums"):
        actual, expected_value = getattr(found, name), getattr(wanted, name)
        if actual != expected_value:
            if isinstance(actual, set):
                return f"{name}: {sorted(actual ^ expected_value)}"
            keys = sorted(
                k for k in {**actual, **expected_value} if actual.get(k) != expected_value.get(k)
            )
            key = keys[0]
            difference = (
                f"{actual.get(key, 'nothing')}, and must be {expected_value.get(key, 'nothing')}"
            )
            return f"{name}: {len(keys)} keys are wrong; {key} has {difference}"
    return ""
