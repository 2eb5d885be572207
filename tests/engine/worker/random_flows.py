"""Random flows, and a naive evaluation of them to compare with.

A record is (line, seq, v, t). `line` names the way it took: every step with a function marks it, and so does every key
it had. Records of one line are in order wherever they come; records of different lines need not be. So a step either
keeps its state line by line, or its keys have one line each ("solo"), and then it may do whatever depends on order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from railgun import FORGET, Collect, Context, Flow, Items, Stateful

MIN = -(1 << 63)
BEGIN = 1_700_000_000_000_000
Item = tuple[int, tuple[int, ...], int, int | None]


class Twin:
    """Many keys, few hashes: keys that are not equal share one."""

    def __init__(self, bucket: int, number: int) -> None:
        self.bucket, self.number = bucket, number

    def __stable_key__(self) -> int:
        return self.bucket

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Twin) and (self.bucket, self.number) == (
            other.bucket,
            other.number,
        )

    def __hash__(self) -> int:
        return hash((self.bucket, self.number))

    def __repr__(self) -> str:
        return f"Twin({self.bucket}, {self.number})"


@dataclass(frozen=True)
class Place:
    street: str
    number: int


def some_key(n: int, which: int) -> Any:
    """A key of one of many types; equal `n` gives equal keys of a type, whatever `which` is."""
    match n % 9:
        case 0:
            return f"k{n}"
        case 1:
            return (1 if n == 1 else n, 1.0 if n == 1 else float(n), True if n == 1 else n)[
                which % 3
            ]
        case 2:
            return (n, ("a", None), "b" * (n % 4))
        case 3:
            return Twin(n % 2, n)
        case 4:
            return b"%d" % n
        case 5:
            return Place("main", n)
        case 6:
            return None
        case 7:
            return Twin(0, n)
        case _:
            return f"k\0{n}"


def mark(*what: Any) -> int:
    """A name for a way; the same for equal keys."""
    return crc32(repr(plain(what)).encode())


def plain(what: Any) -> Any:
    if isinstance(what, tuple):
        return tuple(map(plain, what))
    return int(what) if isinstance(what, bool | float) else what


@dataclass(eq=False)
class Node:
    kind: str
    name: str
    inputs: list[Node]
    keyed: bool = False
    solo: bool = False  # each key has one line
    way: int = 0
    function: Any = None
    value: Any = None
    initial: Any = None
    logic: Any = None
    dead: bool = False
    lateness: int = 0
    timed: bool = True  # a source whose records bring their time


@dataclass
class Plan:
    seed: int
    calm: bool = False  # all settles between feeds: steps may do what depends on order and time
    chain: bool = False
    nodes: list[Node] = field(default_factory=list)

    @property
    def sources(self) -> list[Node]:
        return [node for node in self.nodes if node.kind == "source"]

    @property
    def states(self) -> list[str]:
        kinds = ("stateful_map", "reduce", "stateful")
        return [node.name for node in self.nodes if node.kind in kinds]


# ---------------------------------------------------------------- users' functions


class BadRecordError(Exception):
    pass


def marking(name: str, change: int) -> Callable[[Item], Item]:
    def function(item: Item) -> Item:
        line, seq, v, t = item
        return mark(line, name), seq, (v * change + 1) % 10_007, t

    return function


def raising(name: str, every: int) -> Callable[[Item], Item]:
    def function(item: Item) -> Item:
        line, seq, v, t = item
        if v % every == 0:
            raise BadRecordError(name)
        return mark(line, name), seq, v, t

    return function


def chosen(of: int) -> Callable[[Item], bool]:
    return lambda item: item[2] % of != 0


def several(name: str, lazy: bool) -> Callable[[Item], Iterable[Item]]:
    def made(item: Item) -> Iterator[Item]:
        line, seq, v, t = item
        for i in range(v % 3):
            if v % 13 == 0 and i == 1:
                raise BadRecordError(name)
            yield mark(line, name), (*seq, i), (v + i) % 10_007, t

    return made if lazy else lambda item: list(made(item))


def batchwise(name: str) -> Callable[[list[Item]], list[Item]]:
    one = marking(name, 3)
    return lambda items: [one(item) for item in items]


def keying(solo: bool, of: int, bad: int) -> Callable[[Item], Any]:
    def key(item: Item) -> Any:
        line, seq, v, _ = item
        if bad and v % bad == 0:
            return [v]  # no key
        found = some_key(v % of, sum(seq))
        return (line, found) if solo else found

    return key


def keyed_value(name: str, key: Callable[[Item], Any]) -> Callable[[Item], Item]:
    def value(item: Item) -> Item:
        line, seq, v, t = item
        return mark(line, name, key(item)), seq, v, t

    return value


def unkeyed(name: str) -> Callable[[tuple[Any, Item]], Item]:
    def function(pair: tuple[Any, Item]) -> Item:
        key, (line, seq, v, t) = pair
        return mark(line, name, key), seq, v, t

    return function


def follow(name: str, bad: int) -> Any:
    def function(lines: dict[int, Any], item: Item) -> tuple[Any, Item]:
        line, seq, v, t = item
        last, total = lines.get(line, ((), 0))
        assert seq > last, f"{name}: {item} came after {last}"
        if bad and v % bad == 0:
            raise BadRecordError(name)
        total = (total * 31 + v) % 10_007
        return {**lines, line: (seq, total)}, (mark(line, name), seq, total, t)

    return function


def forgetting(name: str) -> Any:
    def function(state: tuple[Any, int], item: Item) -> tuple[Any, Item]:
        line, seq, v, t = item
        last, total = state
        assert seq > last, f"{name}: {item} came after {last}"
        made = (mark(line, name), seq, (total * 31 + v) % 10_007, t)
        return (FORGET if v % 5 == 0 else (seq, total + v)), made

    return function


def fold(so_far: Item, item: Item) -> Item:
    assert item[1] > so_far[1], f"{item} came after {so_far}"
    return item[0], item[1], (so_far[2] * 7 + item[2]) % 10_007, item[3]


class Logic(Stateful[Any, Item, dict[Any, Any], Item]):
    """Order, ports, times and timers, line by line; nothing that depends on how lines meet."""

    def __init__(self, name: str, chain: bool, bad: int) -> None:
        self.name, self.chain, self.bad = name, chain, bad

    def initial(self) -> dict[Any, Any]:
        return {"lines": {}, "fired": (), "ended": 0}

    def check(self, item: Item, context: Any) -> None:
        line, seq, _, t = item
        last = context.state["lines"].get(line, ((), 0))[0]
        assert seq > last, f"{self.name}: {item} came after {last}"
        assert t is None or context.time == t, f"{self.name}: {item} at {context.time}"
        assert context.time >= context.frontier, f"{self.name}: {item} is late"
        assert not context.state["ended"], f"{self.name}: {item} after the end"
        fired = context.state["fired"]
        assert t is None or not fired or t >= fired[-1], f"{self.name}: {item} after {fired}"

    def on_item(self, item: Item, context: Any) -> Iterable[Item] | None:
        line, seq, v, t = item
        self.check(item, context)
        if self.bad and v % self.bad == 0:
            raise BadRecordError(self.name)
        lines = {**context.state["lines"], line: (seq, context.port)}
        context.state = {**context.state, "lines": lines}
        if t is not None:
            context.set_timer((t // 4 + 1 + v % 50) * 4)
            if v % 3 == 0:  # one that is set in vain
                context.set_timer((t // 4 + 1 + v % 7) * 4 + 2)
                context.cancel_timer((t // 4 + 1 + v % 7) * 4 + 2)
        if v % 4 == 0:
            return None
        return ((mark(line, self.name), seq, v + context.port, t),)

    def on_timer(self, context: Any) -> Iterable[Item]:
        fired = context.state["fired"]
        at = context.time
        assert not fired or at > fired[-1], f"{self.name}: {at} fired after {fired[-1]}"
        assert not context.state["ended"], f"{self.name}: {at} fired after the end"
        context.state = {**context.state, "fired": (*fired, at)}
        if self.chain and at % 4 == 0 and at % 3 != 0:
            context.set_timer(at + 41)
        yield mark(self.name, "timer", context.key), (at,), at % 10_007, at

    def on_end(self, context: Any) -> Iterable[Item]:
        context.state = {**context.state, "ended": context.state["ended"] + 1}
        context.set_timer(BEGIN * 2)  # never fires
        yield mark(self.name, "end", context.key), (0,), len(context.state["lines"]), None


class Session(Logic):
    """Whatever depends on order and time: for one line a key, in a flow that settles."""

    def initial(self) -> dict[Any, Any]:
        return {"lines": {}, "fired": (), "ended": 0, "at": 0, "n": 0}

    def on_item(self, item: Item, context: Any) -> Iterable[Item]:
        line, seq, v, t = item
        self.check(item, context)
        state = context.state = dict(context.state)
        state["lines"] = {line: (seq, context.port)}
        state["n"] += 1
        if t is not None:
            if state["at"]:
                context.cancel_timer(state["at"])
            state["at"] = t + 1 + v % 300
            context.set_timer(state["at"])
            context.set_timer(state["at"] + 100)
        if v % 6 == 0:
            context.forget()
        yield mark(line, self.name), seq, state["n"], t

    def on_timer(self, context: Any) -> Iterable[Item]:
        fired, at = context.state["fired"], context.time
        context.state = {**context.state, "fired": (*fired, at)}
        yield mark(self.name, "timer", context.key), (at,), context.state["n"], at
        if at % 3 == 0:
            context.forget()
        elif at % 3 == 1:
            context.set_timer(at + 60 + at % 2)


# ---------------------------------------------------------------- a random flow


class Maker:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.plan = Plan(seed)
        self.plan.calm = self.random.random() < 0.4
        self.plan.chain = self.random.random() < 0.5
        self.open: list[Node] = []
        self.stages = 0

    def add(self, kind: str, inputs: list[Node], **options: Any) -> Node:
        name = options.pop("name", f"{kind} {len(self.plan.nodes)}")
        node = Node(kind, name, inputs, **options)
        self.plan.nodes.append(node)
        if kind not in ("branch", "sink"):
            self.open.append(node)
        return node

    def make(self) -> Plan:
        chance = self.random
        for number in range(chance.choice([1, 1, 1, 2, 3])):
            timed = chance.random() < 0.8
            late = chance.choice([0, 0, 20])
            self.add("source", [], name=f"source {number}", timed=timed, lateness=late)
        if len(self.open) > 1:  # they end one after the other, so how far time comes before is open
            self.plan.chain = self.plan.calm = False
        for _ in range(chance.randint(4, 13)):
            self.step()
        while not self.stages:
            self.key_by(self.pick())
        for node in list(self.open):
            if not any(node in other.inputs for other in self.plan.nodes):
                self.add("sink", [node])
        return self.plan

    def pick(self) -> Node:
        return self.random.choice(self.open[-4:] if self.random.random() < 0.8 else self.open)

    def named(self, kind: str) -> str:
        return f"{kind} {len(self.plan.nodes)}"

    def step(self) -> None:
        chance, node = self.random, self.pick()
        kinds = ["map", "filter", "flat_map", "map_batches", "inspect", "branch", "union"]
        if self.stages < 4:
            kinds += ["key_by"] * 4
        if node.keyed:
            kinds += ["with_key", "state", "state", "state", "state", "state"]
        kind = chance.choice(kinds)
        if kind == "key_by":
            self.key_by(node)
        elif kind == "state":
            self.state(node)
        elif kind == "union":
            self.union(node)
        elif kind == "with_key":
            pairs = self.add("with_key", [node], keyed=True, solo=node.solo)
            self.open.remove(pairs)
            name = self.named("map")
            self.add("map", [pairs], keyed=True, solo=node.solo, function=unkeyed(name))
        elif kind == "branch":
            split = self.add(
                "branch", [node], keyed=node.keyed, function=chosen(chance.choice([2, 3]))
            )
            for way in (0, 1):
                after = self.add("way", [split], keyed=node.keyed, solo=node.solo, way=way)
                if chance.random() < 0.5:
                    self.marked(after)
        else:
            name = self.named(kind)
            function: Any
            dead = False
            if kind == "map":
                dead = chance.random() < 0.4
                function = raising(name, 9) if dead else marking(name, 5)
            elif kind == "filter":
                function = chosen(chance.choice([4, 7]))
            elif kind == "flat_map":
                dead = True
                function = several(name, chance.random() < 0.5)
            elif kind == "map_batches":
                function = batchwise(name)
            else:
                dead = True
                function = raising(name, 10)
            self.add(kind, [node], keyed=node.keyed, solo=node.solo, function=function, dead=dead)

    def marked(self, node: Node) -> Node:
        self.open.remove(node)
        name = self.named("map")
        return self.add("map", [node], keyed=node.keyed, solo=node.solo, function=marking(name, 3))

    def key_by(self, node: Node) -> Node:
        chance = self.random
        self.stages += 1
        node = self.by_key(node)
        name = self.named("key_by")
        solo = chance.random() < 0.5
        key = keying(solo, chance.choice([1, 6, 40]), chance.choice([0, 0, 17]))
        if chance.random() < 0.7:
            value = keyed_value(name, key)
            return self.add(
                "key_by", [node], keyed=True, solo=solo, function=key, value=value, dead=True
            )
        made = self.add("key_by", [node], keyed=True, solo=solo, function=key, dead=True)
        if chance.random() < 0.5:
            return made
        self.open.remove(made)
        pairs = self.add("with_key", [made], keyed=True, solo=solo)
        self.open.remove(pairs)
        name = self.named("map")
        return self.add("map", [pairs], keyed=True, solo=solo, function=unkeyed(name))

    def by_key(self, node: Node) -> Node:
        """Let lines tell keys apart, if they do not yet."""
        if not self.unmarked(node):
            return node
        pairs = self.add("with_key", [node], keyed=True, solo=node.solo)
        name = self.named("map")
        marked = self.add("map", [pairs], keyed=True, solo=node.solo, function=unkeyed(name))
        self.open.remove(pairs)
        self.open.remove(marked)
        return marked

    def unmarked(self, node: Node) -> bool:
        if node.kind in ("with_key", "source"):
            return False
        if node.kind == "key_by":
            return node.value is None
        return any(map(self.unmarked, node.inputs))

    def state(self, node: Node) -> None:
        chance = self.random
        kind = chance.choice(["stateful_map", "stateful", "stateful"])
        if node.solo and chance.random() < 0.4:
            kind = chance.choice(["reduce", "forget", "session"])
        name = self.named(kind)
        options: dict[str, Any] = {"keyed": True, "solo": False, "name": name, "dead": True}
        bad = chance.choice([0, 12])
        if kind == "stateful_map":
            options |= {"function": follow(name, bad), "initial": dict}
        elif kind == "reduce":
            options |= {"function": fold}
        elif kind == "forget":
            kind = "stateful_map"
            options |= {"function": forgetting(name), "initial": lambda: ((), 0)}
        elif kind == "session" and self.plan.calm:
            kind = "stateful"
            options |= {"logic": Session(name, False, 0)}
        else:
            kind = "stateful"
            options |= {"logic": Logic(name, self.plan.chain, bad)}
        self.add(kind, [node], **options)

    def union(self, node: Node) -> None:
        chance = self.random
        keyed = chance.random() < 0.6
        others = [n for n in self.open if n.keyed == keyed] if keyed else self.open
        if not others or (keyed and not node.keyed):
            others = self.open
        inputs = [node, *chance.sample(others, min(len(others), chance.choice([1, 1, 2])))]
        ways = []
        for one in inputs:  # a way of its own for each
            one = self.by_key(one)
            name = self.named("map")
            way = self.add("map", [one], keyed=one.keyed, function=marking(name, 3))
            self.open.remove(way)
            ways.append(way)
        self.add("union", ways, keyed=all(n.keyed for n in ways))


def make_flow(plan: Plan, **options: Any) -> Flow:
    flow = Flow("random", dead_letters=Collect(), **options)
    made: dict[Node, Any] = {}
    for node in plan.nodes:
        policy: Any = "dead_letter" if node.dead else "stop"
        first: Any = made[node.inputs[0]] if node.inputs else None
        match node.kind:
            case "source":
                time: Any = (lambda item: item[3]) if node.timed else None
                made[node] = flow.source(
                    Items[Item]([]), name=node.name, time=time, lateness=node.lateness / 1e6, idle_after=1e6
                )  # fmt: skip
            case "map" | "filter" | "flat_map" | "map_batches" | "inspect":
                step = getattr(first, node.kind)
                made[node] = step(node.function, name=node.name, on_error=policy)
            case "branch":
                made[node] = first.branch(node.function, name=node.name)
            case "way":
                made[node] = first[node.way]
            case "with_key":
                made[node] = first.with_key(name=node.name)
            case "key_by":
                made[node] = first.key_by(
                    node.function, node.value, name=node.name, on_error=policy
                )
            case "union":
                made[node] = first.union(*(made[n] for n in node.inputs[1:]), name=node.name)
            case "stateful_map":
                made[node] = first.stateful_map(
                    node.function, node.initial, name=node.name, on_error=policy
                )
            case "reduce":
                made[node] = first.reduce(node.function, name=node.name, on_error=policy)
            case "stateful":
                made[node] = first.stateful(node.logic, name=node.name, on_error=policy)
            case "sink":
                first.sink(Collect(), name=node.name)
    return flow


# ---------------------------------------------------------------- the naive evaluation


@dataclass
class Rec:
    value: Any
    time: int
    key: Any = None
    port: int = 0


class RefContext:
    """What `Context` promises, in as few words as possible."""

    def __init__(self, timers: dict[Any, set[int]], key: Any, state: Any, frontier: int) -> None:
        self.timers, self.key, self.state, self.frontier = timers, key, state, frontier
        self.time = self.port = 0
        self.forgotten = False

    def set_timer(self, at: int) -> None:
        self.timers.setdefault(self.key, set()).add(at)

    def cancel_timer(self, at: int) -> None:
        self.timers.get(self.key, set()).discard(at)

    def forget(self) -> None:
        self.forgotten = True


class Reference:
    """One process, one record after the other."""

    def __init__(self, plan: Plan, now: int) -> None:
        self.plan = plan
        self.now = now
        self.fed: dict[str, list[Item]] = {node.name: [] for node in plan.sources}
        self.restart()

    def restart(self) -> None:
        self.frontier = MIN
        self.told = dict.fromkeys(self.plan.states, MIN)
        self.out: dict[str, list[Any]] = {}
        self.dead: list[tuple[str, Any, Any]] = []
        self.state: dict[str, dict[Any, Any]] = {name: {} for name in self.plan.states}
        self.timers: dict[str, dict[Any, set[int]]] = {name: {} for name in self.plan.states}
        self.fired: list[tuple[str, Any, int]] = []
        self.reached: dict[str, int] = {}
        again, self.fed = self.fed, {name: [] for name in self.fed}
        for name, items in again.items():
            self.feed(name, items, advance=False)
        self.advance()

    def feed(self, source: str, items: list[Item], advance: bool = True) -> None:
        node = next(n for n in self.plan.sources if n.name == source)
        self.fed[source] += items
        for item in items:
            time = item[3] if node.timed and item[3] is not None else self.now
            self.emit(node, Rec(item, time))
        if node.timed and items:
            latest = max(item[3] or 0 for item in self.fed[source])
            self.reached[source] = latest - node.lateness
        if advance:
            self.advance()

    def advance(self) -> None:
        times = [
            self.reached.get(node.name, MIN) if node.timed else self.now
            for node in self.plan.sources
        ]
        self.frontier = max(self.frontier, min(times))
        for node in self.plan.nodes:
            if node.kind == "stateful":
                self.told[node.name] = self.frontier
                while due := self.due(node, self.frontier):
                    self.fire(node, *due)

    def due(self, node: Node, upto: int) -> tuple[Any, int] | None:
        times = self.timers[node.name]
        found = [(at, key) for key, ats in times.items() for at in ats if at <= upto]
        if not found:
            return None
        at, key = min(found, key=lambda pair: pair[0])
        times[key].discard(at)
        return key, at

    def end(self) -> None:
        for node in self.plan.nodes:
            if node.kind != "stateful":
                continue
            timers = self.timers[node.name]
            left = sorted(
                ((at, key) for key, ats in timers.items() for at in ats), key=lambda p: p[0]
            )
            for at, key in left:
                if at in timers.get(key, ()):
                    timers[key].discard(at)
                    self.fire(node, key, at)
            for key in list(self.state[node.name]):
                self.call(node, node.logic.on_end, key, 0)
            timers.clear()

    def fire(self, node: Node, key: Any, at: int) -> None:
        if key in self.state[node.name]:
            self.fired.append((node.name, key, at))
            self.call(node, node.logic.on_timer, key, at)

    def call(self, node: Node, function: Any, key: Any, at: int) -> None:
        states = self.state[node.name]
        context = RefContext(self.timers[node.name], key, states[key], self.told[node.name])
        context.time = at
        made = list(function(context) or ())
        self.keep(node, context)
        for value in made:
            self.emit(node, Rec(value, max(at, self.frontier) if value[3] is None else at, key))

    def keep(self, node: Node, context: RefContext) -> None:
        if context.forgotten:
            self.state[node.name].pop(context.key, None)
            self.timers[node.name].pop(context.key, None)
        else:
            self.state[node.name][context.key] = context.state

    def emit(self, node: Node, rec: Rec) -> None:
        for after in self.plan.nodes:
            for side, before in enumerate(after.inputs):
                if before is node and after.kind != "way":
                    self.push(after, rec, side)

    def push(self, node: Node, rec: Rec, side: int) -> None:
        try:
            made = self.made(node, rec, side)
        except (BadRecordError, TypeError):
            assert node.dead
            self.dead.append((node.name, rec.key, rec.value))
            return
        if node.kind == "branch":
            way = 0 if made else 1
            for after in self.plan.nodes:
                if after.inputs == [node] and after.way == way:
                    self.emit(after, rec)
            return
        for one in made:
            self.emit(node, one)

    def made(self, node: Node, rec: Rec, side: int) -> Any:
        def also(value: Any) -> Rec:
            return Rec(value, rec.time, rec.key, rec.port)

        f = node.function
        match node.kind:
            case "map":
                return [also(f(rec.value))]
            case "filter":
                return [rec] if f(rec.value) else []
            case "flat_map":
                return [also(v) for v in list(f(rec.value))]
            case "map_batches":
                return [also(v) for v in f([rec.value])]
            case "inspect":
                f(rec.value)
                return [rec]
            case "branch":
                return f(rec.value)
            case "with_key":
                return [also((rec.key, rec.value))]
            case "key_by":
                key = f(rec.value)
                hash(key)
                return [Rec(node.value(rec.value) if node.value else rec.value, rec.time, key)]
            case "union":
                if node.keyed:
                    return [Rec(rec.value, rec.time, rec.key, side)]
                return [Rec(rec.value, rec.time, rec.key)]
            case "stateful_map":
                states = self.state[node.name]
                state, result = f(
                    states[rec.key] if rec.key in states else node.initial(), rec.value
                )
                if state is FORGET:
                    states.pop(rec.key, None)
                else:
                    states[rec.key] = state
                return [also(result)]
            case "reduce":
                states = self.state[node.name]
                if rec.key in states:
                    states[rec.key] = f(states[rec.key], rec.value)
                else:
                    states[rec.key] = rec.value
                return [also(states[rec.key])]
            case "stateful":
                states, timers = self.state[node.name], self.timers[node.name]
                state = states[rec.key] if rec.key in states else node.logic.initial()
                context = RefContext(timers, rec.key, state, self.told[node.name])
                context.time, context.port = rec.time, rec.port
                try:
                    made = list(node.logic.on_item(rec.value, context) or ())
                except BadRecordError:
                    if rec.key not in states:
                        timers.pop(rec.key, None)
                    raise
                self.keep(node, context)
                return [also(v) for v in made]
            case "sink":
                self.out.setdefault(node.name, []).append(rec.value)
                return []
        raise AssertionError(node.kind)


__all__ = ["Context", "Maker", "Reference", "make_flow"]
