"""Functions that return their state as the result, or a part of it, and change it with the next record."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from railgun import FORGET, Collect, Flow, Items, Stateful, StepError
from railgun.engine.operators.sharing import SharedStateError
from railgun.flows.flow import KeyedStream
from railgun.testing import FlowTester

Steps = Callable[[KeyedStream[int, Any]], Any]


class _State:
    def __init__(self) -> None:
        self.count = 0
        self.items: list[int] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class _Slots:
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[int] = []


def grow(state: list[int], n: int) -> tuple[list[int], list[int]]:
    state.append(n)
    return state, state


def grow_in_pair(state: list[int], n: int) -> tuple[list[int], tuple[str, list[int]]]:
    state.append(n)
    return state, ("seen", state)


def grow_part(state: dict[str, list[int]], n: int) -> tuple[dict[str, list[int]], dict[str, Any]]:
    state.setdefault("items", []).append(n)
    return state, {"n": n, "items": state["items"]}


def grow_object(state: _State, n: int) -> tuple[_State, _State]:
    state.count += 1
    state.items.append(n)
    return state, state


def add_to(total: dict[str, int], item: dict[str, int]) -> dict[str, int]:
    total["n"] += item["n"]
    return total


class Growing(Stateful[int, int, list[int], list[int]]):
    def initial(self) -> list[int]:
        return []

    def on_item(self, item: int, context: Any) -> Iterable[list[int]]:
        context.state.append(item)
        return [context.state]


class OnTimer(Stateful[int, int, list[int], list[int]]):
    def initial(self) -> list[int]:
        return []

    def on_item(self, item: int, context: Any) -> Iterable[list[int]]:
        context.set_timer(context.time + 1 + item)
        return ()

    def on_timer(self, context: Any) -> Iterator[list[int]]:
        context.state.append(len(context.state))
        yield context.state


def grow_array(state: Any, n: int) -> tuple[Any, Any]:
    state[n % 7] += n
    return state, state[1:].reshape(1, -1)


def grow_bytes(state: bytearray, n: int) -> tuple[bytearray, list[Any]]:
    state[n % 7] = n
    return state, [np.frombuffer(state, dtype=np.uint8)]


def grow_deep(state: dict[str, Any], n: int) -> tuple[dict[str, Any], Any]:
    seen = state.setdefault("a", {}).setdefault("b", {}).setdefault("c", {}).setdefault("d", [])
    seen.append(n)
    return state, {"u": {"v": {"w": {"x": {"y": {"z": seen}}}}}}


def grow_wide(state: list[list[int]], n: int) -> tuple[list[list[int]], Any]:
    state[300].append(n)
    return state, state[300:]


def grow_slots(state: _Slots, n: int) -> tuple[_Slots, list[int]]:
    state.items.append(n)
    return state, state.items


class Twice(Stateful[int, int, list[int], list[int]]):
    """Emits its state twice for each item, and changes it meanwhile."""

    def initial(self) -> list[int]:
        return []

    def on_item(self, item: int, context: Any) -> Iterator[list[int]]:
        context.state.append(item)
        yield context.state
        context.state.append(-item)
        yield context.state


class TwiceOnTimer(Twice):
    def on_item(self, item: int, context: Any) -> Any:
        context.set_timer(context.time + 1 + item)
        context.state.append(item)

    def on_timer(self, context: Any) -> Iterator[list[int]]:
        yield context.state
        context.state.append(-1)
        yield context.state


FUNCTIONS: dict[str, tuple[Callable[[Any, int], tuple[Any, Any]], Callable[[], Any]]] = {
    "a view of an array": (grow_array, lambda: np.zeros(8, dtype=int)),
    "a view of bytes": (grow_bytes, lambda: bytearray(8)),
    "deep inside": (grow_deep, dict),
    "far behind": (grow_wide, lambda: [[] for _ in range(301)]),
    "in slots": (grow_slots, lambda: _Slots()),
}


def step_of(function: Callable[[Any, int], tuple[Any, Any]], initial: Callable[[], Any]) -> Steps:
    return lambda keyed: keyed.stateful_map(function, initial=initial, name="step")


MISTAKES: dict[str, Steps] = {
    **{name: step_of(*made) for name, made in FUNCTIONS.items()},
    "twice": lambda keyed: keyed.stateful(Twice(), name="step"),
    "the state": lambda keyed: keyed.stateful_map(grow, initial=list, name="step"),
    "in a tuple": lambda keyed: keyed.stateful_map(grow_in_pair, initial=list, name="step"),
    "a part": lambda keyed: keyed.stateful_map(grow_part, initial=dict, name="step"),
    "an object": lambda keyed: keyed.stateful_map(grow_object, initial=_State, name="step"),
    "on_item": lambda keyed: keyed.stateful(Growing(), name="step"),
    "reduce": lambda keyed: keyed.map(lambda n: {"n": n}).reduce(add_to, name="step"),
}


def one_worker(steps: Steps, *, strict: bool) -> FlowTester:
    """One worker that has all records of two keys; not strict, it does what workers do live."""
    flow = Flow("sharing")
    numbers: Any = flow.source(Items([]), name="numbers")
    steps(numbers.key_by(lambda n: n % 2)).sink(Collect(), name="out")
    tester = FlowTester(flow, workers=1, feed=["numbers"])
    tester.world.strict = strict
    for runtime in tester.runtimes.values():
        for operator in runtime.keyed():
            operator.sharing.strict = strict
    return tester


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_tester_finds_results_that_change_later(mistake: str) -> None:
    tester = one_worker(MISTAKES[mistake], strict=True)
    with pytest.raises(SharedStateError, match=r"'step'.* key [01],.*copy") as found:
        tester.feed("numbers", range(6))
    assert found.value.step == "step"


@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name != "twice"])
def test_the_tester_finds_results_that_change_with_a_later_batch(mistake: str) -> None:
    tester = one_worker(MISTAKES[mistake], strict=True)
    tester.feed("numbers", [0, 1])
    with pytest.raises(SharedStateError):
        tester.feed("numbers", [2])


def expected(mistake: str, records: int) -> list[Any]:
    """What each call returned, at the moment it did."""
    made: list[Any] = []
    if mistake in FUNCTIONS:
        function, initial = FUNCTIONS[mistake]
        states = {0: initial(), 1: initial()}
        for n in range(records):
            states[n % 2], result = function(states[n % 2], n)
            made.append(copy.deepcopy(result))
        return made
    if mistake == "twice":
        for key in (0, 1):
            twice: list[int] = []
            for n in range(key, records, 2):
                made += [[*twice, n], [*twice, n, -n]]
                twice += [n, -n]
        return made
    for key in (0, 1):
        seen: list[int] = []
        for n in range(key, records, 2):
            seen = [*seen, n]
            state = _State()
            state.count, state.items = len(seen), seen
            made.append({
                "the state": seen, "in a tuple": ("seen", seen), "a part": {"n": n, "items": seen},
                "an object": state, "on_item": seen, "reduce": {"n": sum(seen)},
            }[mistake])  # fmt: skip
    return made


def ordered(results: Iterable[Any]) -> list[str]:
    return sorted(repr(vars(r) if isinstance(r, _State) else r) for r in results)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_live_each_result_is_what_the_function_returned(mistake: str) -> None:
    tester = one_worker(MISTAKES[mistake], strict=False)
    tester.feed("numbers", range(40))
    tester.feed("numbers", range(40, 60))
    assert ordered(tester.collected("out")) == ordered(expected(mistake, 60))


def test_live_results_of_timers_are_what_was_returned() -> None:
    tester = one_worker(lambda keyed: keyed.stateful(OnTimer(), name="step"), strict=False)
    tester.feed("numbers", range(0, 8, 2))
    tester.advance(10.0)
    tester.finish()
    assert ordered(tester.collected("out")) == ordered([list(range(n)) for n in range(1, 5)])


def test_live_a_reduce_does_not_change_the_items_that_others_got() -> None:
    flow = Flow("two-ways")
    numbers: Any = flow.source(Items([]), name="numbers")
    keyed = numbers.map(lambda n: {"n": n}).key_by(lambda item: 0)
    keyed.reduce(add_to, name="step").sink(Collect(), name="totals")
    keyed.map(lambda item: item["n"]).sink(Collect(), name="items")
    tester = FlowTester(flow, workers=1, feed=["numbers"])
    for operator in tester.runtimes[0].keyed():
        operator.sharing.strict = False
    tester.feed("numbers", [1, 2, 3])
    assert tester.collected("items") == [1, 2, 3]
    assert tester.collected("totals") == [{"n": 1}, {"n": 3}, {"n": 6}]


def test_live_a_generator_of_timers_may_change_what_it_has_yielded() -> None:
    tester = one_worker(lambda keyed: keyed.stateful(TwiceOnTimer(), name="step"), strict=False)
    tester.feed("numbers", [0, 2])
    tester.advance(10.0)
    assert ordered(tester.collected("out")) == ordered(
        [[0, 2], [0, 2, -1], [0, 2, -1], [0, 2, -1, -1]]
    )


@pytest.mark.parametrize("logic", [OnTimer(), TwiceOnTimer()])
def test_the_tester_finds_results_of_timers_that_change_later(logic: Any) -> None:
    tester = one_worker(lambda keyed: keyed.stateful(logic, name="step"), strict=True)
    tester.feed("numbers", range(0, 8, 2))
    with pytest.raises(SharedStateError, match=r"'step'.*on_timer.* key 0,"):
        tester.advance(10.0)


class Hidden:
    """Holds what nobody finds who looks for objects in it; as objects of other languages do."""

    def __init__(self) -> None:
        items: list[int] = []
        self._get: Any = items.copy

    def __reduce__(self) -> Any:
        return rebuilt, (self.items(),)

    def items(self) -> list[int]:
        return list(self._get.__self__)

    def append(self, n: int) -> None:
        self._get.__self__.append(n)


def rebuilt(items: list[int]) -> Hidden:
    made = Hidden()
    for n in items:
        made.append(n)
    return made


class View:
    def __init__(self, hidden: Any) -> None:
        self.look = hidden._get.__self__.copy

    def __reduce__(self) -> Any:
        return list, (self.look(),)


def grow_hidden(state: Hidden, n: int) -> tuple[Hidden, View]:
    state.append(n)
    return state, View(state)


def test_live_results_that_share_what_cannot_be_seen_are_what_was_returned() -> None:
    tester = one_worker(
        lambda keyed: keyed.stateful_map(grow_hidden, initial=Hidden, name="step"), strict=False
    )
    tester.feed("numbers", [0, 2, 4, 6])
    assert tester.collected("out") == [[0], [0, 2], [0, 2, 4], [0, 2, 4, 6]]


# ---------------------------------------------------------------- what is no mistake


def anew(state: dict[str, int], n: int) -> tuple[dict[str, int], dict[str, int]]:
    state = {**state, "n": state.get("n", 0) + n}
    return state, state


def as_copy(state: list[int], n: int) -> tuple[list[int], list[int]]:
    state.append(n)
    return state, copy.deepcopy(state)


def at_last(state: list[int], n: int) -> tuple[Any, Any]:
    state.append(n)
    return (FORGET, state) if len(state) == 2 else (state, None)


def change(result: dict[str, int]) -> dict[str, int]:
    result["n"] = 0
    return result


RIGHT: dict[str, Steps] = {
    "a result that the next step changes": lambda keyed: keyed.stateful_map(
        lambda s, n: (s + 1, {"n": n + 1}), initial=int
    ).map(change),
    "a new state each time": lambda keyed: keyed.stateful_map(anew, initial=dict),
    "a copy": lambda keyed: keyed.stateful_map(as_copy, initial=list),
    "a state that is forgotten": lambda keyed: keyed.stateful_map(at_last, initial=list),
    "numbers": lambda keyed: keyed.stateful_map(lambda s, n: (s + n, s + n), initial=int),
    "the larger one": lambda keyed: keyed.map(lambda n: {"n": n}).reduce(
        lambda a, b: a if a["n"] > b["n"] else b
    ),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("right", RIGHT)
def test_what_does_not_change_later_is_no_mistake(right: str, strict: bool) -> None:
    tester = one_worker(RIGHT[right], strict=strict)
    tester.feed("numbers", range(20))
    for n in range(20, 26):
        tester.feed("numbers", [n])
    assert len(tester.collected("out")) == 26


# ---------------------------------------------------------------- what begins late, or is rare


LATE = 1_500
"""Records of a key after which a function begins to do something else."""


def rarely(state: list[int], n: int) -> tuple[list[int], Any]:
    """Emits its state with one of many records, as a session does, and else nothing."""
    state.append(n)
    return state, ((n, state) if len(state) % 601 == 0 else None)


def late(state: list[int], n: int) -> tuple[list[int], list[int]]:
    state.append(n)
    del state[:-3]
    return state, (state if n > LATE else state.copy())


def late_and_empty(state: list[int], n: int) -> tuple[list[int], Any]:
    """Empties its state again and again: an empty list looks like nothing."""
    state.append(n)
    if n // 2 % 4 == 3:
        state.clear()
    return state, (n, state if n > LATE else state.copy())


def late_array(state: Any, n: int) -> tuple[Any, Any]:
    state[:-1] = state[1:]
    state[-1] = n
    return state, (n, state[2:] if n > LATE else state[2:].copy())


def late_hidden(state: Hidden, n: int) -> tuple[Hidden, Any]:
    if n % 20 == 0:
        state.append(n)
    return state, (View(state) if n > LATE else None)


def late_buffer(state: int, n: int) -> tuple[int, Any]:
    """Emits a list that is not the state, and fills it again."""
    BUFFER[:] = [n, state]
    return state + 1, (BUFFER if n > LATE else list(BUFFER))


BUFFER: list[int] = []
BEGIN_LATE: dict[str, tuple[Callable[[Any, int], tuple[Any, Any]], Callable[[], Any]]] = {
    "rarely": (rarely, list),
    "late": (late, list),
    "late and empty": (late_and_empty, list),
    "late arrays": (late_array, lambda: np.zeros(5, dtype=int)),
    "late and hidden": (late_hidden, lambda: Hidden()),
    "late buffer": (late_buffer, int),
}


@pytest.mark.parametrize("name", BEGIN_LATE)
def test_results_are_what_was_returned_however_late_they_begin_to_share(name: str) -> None:
    function, initial = BEGIN_LATE[name]
    tester = one_worker(step_of(function, initial), strict=False)
    for start in range(0, 3 * LATE, 100):  # in batches of 100
        tester.feed("numbers", range(start, start + 100))
    states = {0: initial(), 1: initial()}
    made = []
    for n in range(3 * LATE):
        states[n % 2], result = function(states[n % 2], n)
        made.append(copy.deepcopy(result))
    assert ordered(tester.collected("out")) == ordered(made)


def add_late(total: dict[str, int], item: dict[str, int]) -> dict[str, int]:
    """Makes a new total each time, and later changes the one it is given."""
    if item["n"] <= LATE:
        return {"n": total["n"] + item["n"]}
    return add_to(total, item)


def test_a_reduce_may_begin_late_to_change_what_it_is_given() -> None:
    tester = one_worker(
        lambda keyed: keyed.map(lambda n: {"n": n}).reduce(add_late, name="step"), strict=False
    )
    for start in range(0, 3 * LATE, 100):  # in batches of 100
        tester.feed("numbers", range(start, start + 100))
    totals = [sum(range(n % 2, n + 1, 2)) for n in range(3 * LATE)]
    assert sorted(result["n"] for result in tester.collected("out")) == sorted(totals)


class LateTwice(Twice):
    """Begins late to yield its state twice."""

    def on_item(self, item: int, context: Any) -> Any:
        if item > LATE:
            return super().on_item(item, context)
        return [0]


def test_a_generator_may_begin_late_to_yield_its_state_twice() -> None:
    tester = one_worker(lambda keyed: keyed.stateful(LateTwice(), name="step"), strict=False)
    tester.feed("numbers", range(LATE + 1))
    tester.feed("numbers", range(LATE + 2, LATE + 8, 2))
    first = [LATE + 2, -LATE - 2, LATE + 4, -LATE - 4, LATE + 6, -LATE - 6]
    assert tester.collected("out")[LATE + 1 :] == [first[:n] for n in range(1, 7)]


# ---------------------------------------------------------------- what cannot be copied


def with_lock(state: dict[str, Any], n: int) -> tuple[dict[str, Any], Any]:
    return state, (state["lock"] if n == 5 else threading.Lock())


def test_a_result_that_cannot_be_copied_passes_if_it_shares_nothing_with_the_state() -> None:
    def initial() -> dict[str, Any]:
        return {}

    tester = one_worker(
        lambda keyed: keyed.stateful_map(with_lock, initial=initial, name="step").map(bool),
        strict=False,
    )
    tester.feed("numbers", [1, 2, 3])
    assert tester.collected("out") == [True] * 3


class Stuck:
    """An object that cannot be copied, and that a snapshot could save."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("there is only one of me")


def test_one_that_shares_an_object_with_the_state_is_told_with_its_record() -> None:
    tester = one_worker(
        lambda keyed: keyed.stateful_map(lambda s, n: (s, [s]), initial=Stuck, name="step"),
        strict=False,
    )
    with pytest.raises(StepError, match=r"(?s)'step'.*record 3 of key 1.*cannot be copied.*of me"):
        tester.feed("numbers", [3])
