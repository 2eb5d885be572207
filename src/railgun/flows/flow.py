"""Define flows: `Flow` and `Stream`, with which users write a pipeline.

>>> from railgun.sinks.collect import Collect
>>> from railgun.sources.items import Items
>>> flow = Flow("words")
>>> lines = flow.source(Items(["to be or", "not to be"]), name="lines")
>>> words = lines.flat_map(str.split).key_by(str)
>>> words.stateful_map(lambda n, word: (n + 1, (word, n + 1)), initial=int).sink(Collect())
>>> [stage.name for stage in flow.plan().stages]
['lines', 'key_by']

Rules, checked where the flow is defined, with the line in the error:

1. Keying *is* distributing: `key_by` opens a stage; the steps that follow run where the key lives.
2. A step with state needs keyed items. State belongs to the step's name, so names are unique; a step without a name
   gets one from its kind and function, with a number if it is taken.
3. Every stream leads to a sink.
4. The union of keyed streams is one stage with several ports: equal keys of all of them live together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Self, TypeVar, overload

from railgun.engine.operators.functions import check_methods, reason_to_refuse
from railgun.engine.operators.operator import DeadLetter, name_of
from railgun.engine.operators.reading import SECOND_US, Clock
from railgun.engine.operators.stateful import Reduce, Stateful, StatefulMap, StatefulSteps
from railgun.engine.operators.stateless import (
    Branch,
    Filter,
    FlatMap,
    Inspect,
    Map,
    MapBatches,
    WithKey,
)  # fmt: skip
from railgun.engine.state.disk import OnDisk
from railgun.flows.errors import FlowError
from railgun.flows.sink import Sink
from railgun.flows.source import Source
from railgun.flows.step import ErrorPolicy, Make, Step, caller

if TYPE_CHECKING:
    from railgun.flows.plan import Plan

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")
S = TypeVar("S")

GENERATES = ("flat_map", "map_batches")  # whose functions may be generator functions
NEEDS_KEY = ("stateful_map", "stateful", "reduce", "with_key")


def _check_function(function: Any, where: str, kind: str, name: str | None = None) -> None:
    """Raise `FlowError` unless the function can be called for a result; `kind` is its step or argument."""
    if not callable(function):
        raise FlowError(f"{where}: {kind} needs a function, not {function!r}")
    why = reason_to_refuse(function, generates=kind in GENERATES)
    if why:
        raise FlowError(f"{where}: {kind}{_named(name)}: {why}")


def _named(name: str | None) -> str:
    return "" if name is None else f" {name!r}"


class Flow:
    """A pipeline: sources, steps, sinks. `on_error` is the policy of steps that set none.

    `state` is kept in memory, or on disk where it may outgrow it: "disk", or `OnDisk` with settings.
    """

    def __init__(
        self,
        name: str,
        *,
        on_error: ErrorPolicy = "stop",
        dead_letters: Sink[DeadLetter] | None = None,
        state: OnDisk | Literal["memory", "disk"] = "memory",
    ) -> None:
        where = caller()
        plain = isinstance(name, str) and all(c.isalnum() or c in "-_." for c in name)
        if not plain or not name or name[0] in "-.":
            raise FlowError(
                f"{where}: a flow's name is made of letters, digits, '-', '_' and '.', not {name!r}"
            )
        if dead_letters is not None and not isinstance(dead_letters, Sink):
            raise FlowError(f"{where}: dead letters go to a Sink, which {dead_letters!r} is not")
        if state not in ("memory", "disk") and not isinstance(state, OnDisk):
            raise FlowError(
                f"{where}: state must be 'memory', 'disk' or an OnDisk(…), not {state!r}"
            )
        self.name = name
        self.state = state if isinstance(state, OnDisk) else OnDisk() if state == "disk" else None
        self.dead_letters = dead_letters
        self.on_error = self.policy(on_error, where)
        self.steps: dict[str, Step] = {}

    def __repr__(self) -> str:
        return f"Flow({self.name!r}, {len(self.steps)} steps)"

    def source(
        self,
        source: Source[T],
        *,
        name: str | None = None,
        time: Callable[[T], int] | None = None,
        lateness: float = 0.0,
        idle_after: float = 10.0,
        on_error: ErrorPolicy | None = None,
    ) -> Stream[T]:
        """Add a source and return its stream.

        A record's time is what `time` returns for it (µs since 1970, at most `lateness` seconds behind the latest one),
        or, without `time`, the time it is read. A part that brings nothing for `idle_after` seconds does not hold time
        back.
        """
        where = caller()
        if not isinstance(source, Source):
            raise FlowError(
                f"{where}: {source!r} is not a Source; an iterable can be one: Items({source!r:.40})"
            )
        if why := check_methods(source, ["open", "layout", "as_of_now"], ["partitions"]):
            raise FlowError(f"{where}: source{_named(name)}: {why}")
        if time is not None and not callable(time):
            raise FlowError(f"{where}: time is a function of an item, which {time!r} is not")
        if time is not None:
            _check_function(time, where, "time", name)
        if not lateness >= 0 or not idle_after > 0:
            raise FlowError(
                f"{where}: lateness and idle_after are seconds, not {lateness!r} and {idle_after!r}"
            )
        clock = Clock(time, int(lateness * SECOND_US), int(idle_after * SECOND_US))
        step = self.add(
            "source", type(source).__name__, name, (), where, on_error, source=source, clock=clock
        )
        return Stream(self, step)

    def plan(self) -> Plan:
        """Compile the flow to stages; raise `FlowError` if it is not complete."""
        from railgun.flows.plan import compile_flow

        return compile_flow(self)

    def draw(self, form: str = "mermaid") -> str:
        """Return a picture: `"mermaid"` for text that many tools draw, `"svg"` for the picture itself."""
        from railgun.flows.draw import draw

        return draw(self.plan(), form)

    # ------------------------------------------------------------ adding steps

    def add(
        self,
        kind: str,
        label: str,
        name: str | None,
        inputs: tuple[Step, ...],
        where: str,
        on_error: ErrorPolicy | None = None,
        *,
        make: Make | None = None,
        keyed: bool = False,
        **options: Any,
    ) -> Step:
        """Add a step under its name; raise `FlowError` if the name is invalid or taken."""
        if name is None:
            name = self._derived(label)
        elif not isinstance(name, str) or not name or any(c in name for c in "\n\r\0/"):
            raise FlowError(f"{where}: {name!r} cannot be the name of a step")
        elif name in self.steps:
            raise FlowError(
                f"{where}: there is a step {name!r} already, made at {self.steps[name].where}: "
                "state belongs to a name, so names differ"
            )
        policy = self.on_error if on_error is None else self.policy(on_error, where)
        step = Step(name, kind, inputs, where, keyed, make, policy, options)
        self.steps[name] = step
        return step

    def _derived(self, label: str) -> str:
        if label not in self.steps:
            return label
        count = 2
        while f"{label}-{count}" in self.steps:
            count += 1
        return f"{label}-{count}"

    def policy(self, on_error: str, where: str) -> ErrorPolicy:
        """Return the error policy if it is valid for this flow; raise `FlowError` otherwise."""
        if on_error not in ("stop", "dead_letter"):
            raise FlowError(f"{where}: on_error is 'stop' or 'dead_letter', not {on_error!r}")
        if on_error == "dead_letter" and self.dead_letters is None:
            raise FlowError(
                f"{where}: there is no place for dead letters; give the flow one: "
                f"Flow({self.name!r}, dead_letters=Files('dead'))"
            )
        return "stop" if on_error == "stop" else "dead_letter"


class Stream(Generic[T]):
    """A stream of items. Every method adds a step and returns the stream that comes out of it."""

    def __init__(self, flow: Flow, step: Step) -> None:
        self.flow = flow
        self.step = step

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.step.name!r})"

    # ------------------------------------------------------------ steps without state

    def map(
        self,
        function: Callable[[T], R],
        *,
        name: str | None = None,
        on_error: ErrorPolicy | None = None,
    ) -> Stream[R]:
        """Map each item to one item."""
        stream: Stream[R] = self._then("map", Map, function, name, on_error)
        return stream

    def filter(
        self,
        function: Callable[[T], object],
        *,
        name: str | None = None,
        on_error: ErrorPolicy | None = None,
    ) -> Stream[T]:
        """Keep the items for which the function returns a true value."""
        stream: Stream[T] = self._then("filter", Filter, function, name, on_error)
        return stream

    def flat_map(
        self,
        function: Callable[[T], Iterable[R]],
        *,
        name: str | None = None,
        on_error: ErrorPolicy | None = None,
    ) -> Stream[R]:
        """Map each item to any number of items."""
        stream: Stream[R] = self._then("flat_map", FlatMap, function, name, on_error)
        return stream

    def map_batches(
        self,
        function: Callable[[list[T]], Iterable[R]],
        *,
        name: str | None = None,
        on_error: ErrorPolicy | None = None,
    ) -> Stream[R]:
        """Map lists of items to lists: for functions that are faster on many. Sizes of lists are not promised."""
        operator = partial(MapBatches, keyed=self.step.keyed)
        stream: Stream[R] = self._then("map_batches", operator, function, name, on_error)
        return stream

    def inspect(
        self,
        function: Callable[[T], object],
        *,
        name: str | None = None,
        on_error: ErrorPolicy | None = None,
    ) -> Stream[T]:
        """Call a function for every item, and pass the item on."""
        stream: Stream[T] = self._then("inspect", Inspect, function, name, on_error)
        return stream

    def branch(
        self,
        function: Callable[[T], object],
        *,
        name: str | None = None,
        on_error: ErrorPolicy | None = None,
    ) -> tuple[Stream[T], Stream[T]]:
        """Split the stream: into the items for which the function returns a true value, and the others."""
        split = self._then("branch", Branch, function, name, on_error)
        return split._way("yes"), split._way("no")

    def union(self, *others: Stream[R], name: str | None = None) -> Stream[T | R]:
        """Merge these streams. If all of them are keyed, equal keys come together."""
        where = caller()
        for other in others:
            if not isinstance(other, Stream) or other.flow is not self.flow:
                raise FlowError(f"{where}: union with {other!r}, which is no stream of this flow")
        inputs = (self.step, *(other.step for other in others))
        keyed = all(step.keyed for step in inputs)
        united: Stream[T | R] = self._stream(
            self.flow.add("union", "union", name, inputs, where, keyed=keyed)
        )
        return united

    @overload
    def key_by(
        self,
        key: Callable[[T], K],
        value: None = None,
        *,
        name: str | None = None,
        on_error: ErrorPolicy | None = None,
    ) -> KeyedStream[K, T]: ...

    @overload
    def key_by(
        self,
        key: Callable[[T], K],
        value: Callable[[T], R],
        *,
        name: str | None = None,
        on_error: ErrorPolicy | None = None,
    ) -> KeyedStream[K, R]: ...

    def key_by(
        self,
        key: Callable[[T], K],
        value: Callable[[T], Any] | None = None,
        *,
        name: str | None = None,
        on_error: ErrorPolicy | None = None,
    ) -> KeyedStream[K, Any]:
        """Bring items to the worker that owns their key.

        `value` returns the part of the item that is needed there (default: the whole item).
        """
        where = caller()
        _check_function(key, where, "key_by", name)
        if value is not None:
            _check_function(value, where, "key_by", name)
        step = self.flow.add(
            "key_by",
            "key_by",
            name,
            (self.step,),
            where,
            on_error,
            keyed=True,
            key=key,
            value=value,
        )
        return KeyedStream(self.flow, step)

    def sink(self, sink: Sink[T], *, name: str | None = None) -> None:
        """End the stream in a sink."""
        where = caller()
        if not isinstance(sink, Sink):
            raise FlowError(f"{where}: {sink!r} is not a Sink")
        if why := check_methods(sink, ["open", "commit", "recover"]):
            raise FlowError(f"{where}: sink{_named(name)}: {why}")
        self.flow.add("sink", type(sink).__name__, name, (self.step,), where, sink=sink)

    # ------------------------------------------------------------ inside

    def _then(
        self,
        kind: str,
        operator: Callable[..., Any],
        function: Any,
        name: str | None,
        on_error: ErrorPolicy | None,
        **arguments: Any,
    ) -> Any:
        where = caller()
        _check_function(function, where, kind, name)
        called = name_of(function).rsplit(".", 1)[-1]
        label = kind if called.startswith("<") else f"{kind}:{called}"
        make = partial(operator, function=function, **arguments)
        step = self.flow.add(
            kind, label, name, (self.step,), where, on_error, make=make, keyed=self.step.keyed
        )
        return self._stream(step)

    def _way(self, way: str) -> Any:
        name = f"{self.step.name}.{way}"
        keyed = self.step.keyed
        return self._stream(
            self.flow.add("way", name, None, (self.step,), self.step.where, keyed=keyed, way=way)
        )

    def _stream(self, step: Step) -> Any:
        return KeyedStream(self.flow, step) if step.keyed else Stream(self.flow, step)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in NEEDS_KEY:
                raise FlowError(f"{caller()}: {name} needs keyed items: call key_by before it")
            raise AttributeError(f"{type(self).__name__} has no step {name!r}")


class KeyedStream(Stream[T], Generic[K, T]):
    """A stream of items that have a key, at the worker that owns the key. Steps keep the key."""

    def stateful_map(
        self,
        function: Callable[[S, T], tuple[S, R]],
        initial: Callable[[], S],
        *,
        name: str | None = None,
        on_error: ErrorPolicy | None = None,
        upgrades: Sequence[Callable[[Any], Any]] = (),
    ) -> KeyedStream[K, R]:
        """Call `function(state, item) -> (state, result)` per item.

        A key begins with `initial()`; the state `FORGET` drops the key. When the form of the state changes, add a
        function to `upgrades` that turns the old form into the new one: saved state goes through the upgrades it has
        not gone through yet.
        """
        _check_function(initial, caller(), "stateful_map, for its initial state,")
        stream: KeyedStream[K, R] = self._then(
            "stateful_map", StatefulMap, function, name, on_error, initial=initial
        )
        return stream._upgraded(upgrades)

    def reduce(
        self,
        function: Callable[[T, T], T],
        *,
        name: str | None = None,
        on_error: ErrorPolicy | None = None,
        upgrades: Sequence[Callable[[Any], Any]] = (),
    ) -> KeyedStream[K, T]:
        """Call `function(so_far, item) -> so_far` and emit it after each item. `upgrades`: see `stateful_map`."""
        stream: KeyedStream[K, T] = self._then("reduce", Reduce, function, name, on_error)
        return stream._upgraded(upgrades)

    def stateful(
        self,
        logic: Stateful[K, T, S, R],
        *,
        name: str | None = None,
        on_error: ErrorPolicy | None = None,
        upgrades: Sequence[Callable[[Any], Any]] = (),
    ) -> KeyedStream[K, R]:
        """Run a stateful operator written as a class: timers, the end of the stream. `upgrades`: see `stateful_map`."""
        where = caller()
        if not isinstance(logic, Stateful):
            raise FlowError(f"{where}: stateful needs an instance of Stateful, not {logic!r}")
        why = check_methods(logic, ["initial"], ["on_item", "on_timer", "on_end"])
        if why:
            raise FlowError(f"{where}: stateful{_named(name)}: {why}")
        label = f"stateful:{type(logic).__name__}"
        step = self.flow.add(
            "stateful", label, name, (self.step,), where, on_error,
            make=partial(StatefulSteps, logic=logic), keyed=True,
        )  # fmt: skip
        stream: KeyedStream[K, R] = KeyedStream(self.flow, step)
        return stream._upgraded(upgrades)

    def _upgraded(self, upgrades: Sequence[Callable[[Any], Any]]) -> Self:
        for upgrade in upgrades:
            _check_function(upgrade, self.step.where, "each of upgrades")
        self.step.options["upgrades"] = tuple(upgrades)
        return self

    def with_key(self, *, name: str | None = None) -> KeyedStream[K, tuple[K, T]]:
        """Turn items into (key, item)."""
        step = self.flow.add(
            "with_key", "with_key", name, (self.step,), caller(), make=WithKey, keyed=True
        )
        return KeyedStream(self.flow, step)

    if TYPE_CHECKING:
        # The same steps as in `Stream`; keys stay.
        def map(
            self,
            function: Callable[[T], R],
            *,
            name: str | None = None,
            on_error: ErrorPolicy | None = None,
        ) -> KeyedStream[K, R]: ...
        def filter(
            self,
            function: Callable[[T], object],
            *,
            name: str | None = None,
            on_error: ErrorPolicy | None = None,
        ) -> KeyedStream[K, T]: ...
        def flat_map(
            self,
            function: Callable[[T], Iterable[R]],
            *,
            name: str | None = None,
            on_error: ErrorPolicy | None = None,
        ) -> KeyedStream[K, R]: ...
        def map_batches(
            self,
            function: Callable[[list[T]], Iterable[R]],
            *,
            name: str | None = None,
            on_error: ErrorPolicy | None = None,
        ) -> KeyedStream[K, R]: ...
        def inspect(
            self,
            function: Callable[[T], object],
            *,
            name: str | None = None,
            on_error: ErrorPolicy | None = None,
        ) -> KeyedStream[K, T]: ...
        def branch(
            self,
            function: Callable[[T], object],
            *,
            name: str | None = None,
            on_error: ErrorPolicy | None = None,
        ) -> tuple[KeyedStream[K, T], KeyedStream[K, T]]: ...
        @overload
        def union(
            self, *others: KeyedStream[K, R], name: str | None = None
        ) -> KeyedStream[K, T | R]: ...
        @overload
        def union(self, *others: Stream[R], name: str | None = None) -> Stream[T | R]: ...
        def union(self, *others: Stream[Any], name: str | None = None) -> Any: ...
