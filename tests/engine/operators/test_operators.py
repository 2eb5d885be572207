"""What steps do with batches, and what happens when a user's function raises."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from tests.flows.harness import Harness, Keys, through

from railgun import FORGET, Collect, DeadLetter, Flow, Items, Stream
from railgun.engine.operators.keyed import LeavingKeys
from railgun.engine.protocol.rescale.order import Order
from railgun.errors import KeyTypeError, ProtocolError
from railgun.flows.errors import SinkError, SourceError, StepError
from railgun.flows.sink import Place, Sink, Writer
from railgun.flows.source import Reader, Source
from railgun.hashing import Hashes

DEAD = {"on_error": "dead_letter", "dead_letters": Collect()}


def add(a: int, b: int) -> int:
    return a + b


# ---------------------------------------------------------------- without state

PLAIN: dict[str, tuple[Callable[[Any], Stream[Any]], list[Any], list[Any]]] = {
    "map": (lambda s: s.map(lambda x: x * 2), [1, 2], [2, 4]),
    "filter": (lambda s: s.filter(lambda x: x % 2), [1, 2, 3], [1, 3]),
    "filter by anything true": (lambda s: s.filter(str.strip), ["a", " ", ""], ["a"]),
    "filter all": (lambda s: s.filter(lambda x: False), [1, 2], []),
    "filter none": (lambda s: s.filter(lambda x: True), [1, 2], [1, 2]),
    "flat_map": (lambda s: s.flat_map(str.split), ["a b", "", "c"], ["a", "b", "c"]),
    "flat_map of a generator": (lambda s: s.flat_map(lambda n: (n for _ in range(n))), [2, 0], [2, 2]),
    "flat_map of tuples": (lambda s: s.flat_map(lambda n: (n, n)), [1, 2], [1, 1, 2, 2]),
    "flat_map to nothing": (lambda s: s.flat_map(lambda n: ()), [1, 2], []),
    "map_batches": (lambda s: s.map_batches(lambda xs: [x + 1 for x in xs]), [1, 2], [2, 3]),
    "map_batches of another size": (lambda s: s.map_batches(lambda xs: [sum(xs)]), [1, 2], [3]),
    "inspect": (lambda s: s.inspect(lambda x: None), [1, 2], [1, 2]),
    "key_by": (lambda s: s.key_by(lambda x: x % 2).map(lambda x: x + 1), [1, 2], [2, 3]),
    "key_by with value": (lambda s: s.key_by(lambda x: x[0], lambda x: x[1]), [(1, "a")], ["a"]),
    "with_key": (lambda s: s.key_by(str).with_key(), [1, 2], [("1", 1), ("2", 2)]),
    "keyed flat_map": (lambda s: s.key_by(str).flat_map(lambda n: [n] * n).with_key(), [2], [("2", 2)] * 2),
    "keyed map_batches": (lambda s: s.key_by(str).map_batches(reversed), [1, 2], [2, 1]),
}  # fmt: skip


@pytest.mark.parametrize(("add", "items", "out"), PLAIN.values(), ids=PLAIN.keys())
def test_steps_without_state(add: Any, items: list[Any], out: list[Any]) -> None:
    assert through(items, add).out.get("out", []) == out


def test_nothing_in_nothing_out() -> None:
    assert through([], lambda s: s.map(int).key_by(str).reduce(add)).out == {}


def test_a_function_of_batches_may_do_what_it_likes_with_its_list() -> None:
    def grab(items: list[int]) -> list[int]:
        taken = items[:]
        items.clear()
        return [len(taken)]

    flow = Flow("test")
    source = flow.source(Items([1, 2, 3]))
    source.map_batches(grab).sink(Collect(), name="a")
    source.sink(Collect(), name="b")
    assert Harness(flow).run().out == {"a": [3], "b": [1, 2, 3]}


def test_a_function_may_fill_the_same_list_again() -> None:
    buffer: list[int] = []

    def fill(n: int) -> list[int]:
        buffer[:] = range(n)
        return buffer

    assert through([2, 3], lambda s: s.flat_map(fill)).out["out"] == [0, 1, 0, 1, 2]


def test_a_stateful_operator_may_return_its_state() -> None:
    class All(Keys):
        def on_item(self, item: Any, context: Any) -> Any:
            context.state.append(item)
            return context.state

    out = through("ab", lambda s: s.key_by(lambda x: 0).stateful(All())).out["out"]
    assert out == ["a", "a", "b"]


# ---------------------------------------------------------------- functions that raise


def odd(n: int) -> int:
    if n % 2 == 0:
        raise ValueError(f"{n} is even")
    return n


def odd_items(n: int) -> Iterator[int]:
    yield -n
    yield odd(n)


class Odd(Keys):
    def on_item(self, item: Any, context: Any) -> Any:
        context.state = [odd(item)]
        return context.state


class HalfWay(Keys):
    def on_item(self, item: Any, context: Any) -> Iterator[Any]:
        yield -item
        yield odd(item)


def odd_state(state: int, n: int) -> tuple[int, int]:
    return odd(n), n


def both(ways: tuple[Stream[Any], Stream[Any]]) -> Stream[Any]:
    return ways[0].union(ways[1])


def keyed(s: Any) -> Any:
    return s.key_by(lambda n: n % 3)


RAISING: dict[str, tuple[Callable[[Any], Stream[Any]], list[int], str]] = {
    "map": (lambda s: s.map(odd, name="step"), [1, 3, 5], "odd"),
    "filter": (lambda s: s.filter(odd, name="step"), [1, 3, 5], "odd"),
    "flat_map": (lambda s: s.flat_map(lambda n: [odd(n)], name="step"), [1, 3, 5], "<lambda>"),
    "flat_map half-way": (lambda s: s.flat_map(odd_items, name="step"), [-1, 1, -3, 3, -5, 5], "odd_items"),
    "inspect": (lambda s: s.inspect(odd, name="step"), [1, 3, 5], "odd"),
    "branch": (lambda s: both(s.branch(odd, name="step")), [1, 3, 5], "odd"),
    "key_by": (lambda s: s.key_by(odd, name="step"), [1, 3, 5], "odd"),
    "value of key_by": (lambda s: s.key_by(str, odd, name="step"), [1, 3, 5], "odd"),
    "keyed map": (lambda s: keyed(s).map(odd, name="step"), [1, 3, 5], "odd"),
    "keyed flat_map": (lambda s: keyed(s).flat_map(odd_items, name="step"), [-1, 1, -3, 3, -5, 5], "odd_items"),
    "stateful_map": (lambda s: keyed(s).stateful_map(odd_state, int, name="step"), [1, 3, 5], "odd_state"),
    "stateful": (lambda s: keyed(s).stateful(Odd(), name="step"), [1, 3, 5], "Odd.on_item"),
    "stateful half-way": (lambda s: keyed(s).stateful(HalfWay(), name="step"), [-1, 1, -3, 3, -5, 5], "on_item"),
}  # fmt: skip


@pytest.mark.parametrize(("add", "out", "blamed"), RAISING.values(), ids=RAISING.keys())
def test_records_a_function_raises_for_become_dead_letters(
    add: Any, out: list[Any], blamed: str
) -> None:
    ran = through([0, 1, 2, 3, 4, 5, 6, 6], add, **DEAD)
    assert ran.out["out"] == out
    assert [letter.record for letter in ran.dead] == [0, 2, 4, 6, 6]
    assert {letter.step for letter in ran.dead} == {"step"}
    assert ran.dead[1].error == "ValueError('2 is even')"
    assert "in odd" in ran.dead[1].traceback
    assert ran.errors() == {"step": 5}


@pytest.mark.parametrize(("add", "out", "blamed"), RAISING.values(), ids=RAISING.keys())
def test_or_stop_the_flow(add: Any, out: list[Any], blamed: str) -> None:
    with pytest.raises(StepError, match="2 is even") as caught:
        through([1, 2, 3], add)
    error = caught.value
    assert (error.step, error.record) == ("step", "2")
    assert error.function.endswith(blamed)
    assert "To go on without such records give the step on_error='dead_letter'." in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error.__cause__, ValueError)


def test_a_batch_of_which_every_record_fails() -> None:
    for add in [entry[0] for entry in RAISING.values()]:
        ran = through([2, 4, 6], add, **DEAD)
        assert ran.out == {}
        assert [letter.record for letter in ran.dead] == [2, 4, 6]


def test_a_dead_letter_tells_key_and_time() -> None:
    flow = Flow("test", **DEAD)  # type: ignore[arg-type]
    source = flow.source(Items([10, 20]), time=lambda n: n * 100, name="source")
    source.key_by(str).map(odd, name="step").sink(Collect())
    dead = Harness(flow).run().dead
    assert [(d.key, d.record, d.time) for d in dead] == [("10", 10, 1000), ("20", 20, 2000)]


def test_a_reduction_that_fails_keeps_what_it_had() -> None:
    def small(a: int, b: int) -> int:
        if b > 9:
            raise ValueError("too large")
        return a + b

    ran = through([1, 10, 2], lambda s: s.key_by(lambda n: 0).reduce(small, name="step"), **DEAD)
    assert ran.out["out"] == [1, 3]
    assert [letter.record for letter in ran.dead] == [10]


def test_a_batch_a_function_of_batches_raises_for_is_one_dead_letter() -> None:
    ran = through(
        [1, 2], lambda s: s.map_batches(lambda xs: list(map(odd, xs)), name="step"), **DEAD
    )
    assert [letter.record for letter in ran.dead] == [[1, 2]]


def test_a_function_of_batches_keeps_the_number_of_keyed_items() -> None:
    with pytest.raises(StepError, match="2 keyed items went in, 1 came out"):
        through([1, 2], lambda s: s.key_by(str).map_batches(lambda xs: xs[:1]))


STOPPING: dict[str, Callable[[Any], Any]] = {
    "map": lambda s: s.map(lambda x: next(iter(x)), name="step"),
    "filter": lambda s: s.filter(lambda x: next(iter(x)), name="step"),
    "flat_map": lambda s: s.flat_map(lambda x: [next(iter(x))], name="step"),
    "key_by": lambda s: s.key_by(lambda x: next(iter(x)), name="step"),
    "stateful_map": lambda s: s.key_by(len).stateful_map(lambda n, x: (n, next(iter(x))), int, name="step"),
}  # fmt: skip


@pytest.mark.parametrize("add", STOPPING.values(), ids=STOPPING.keys())
def test_the_end_of_an_iterator_is_not_the_end_of_the_batch(add: Any) -> None:
    """`next` raises what a loop takes for its end: no record after it may be lost."""
    ran = through(["ab", "", "cd", "", "", "ef"], add, **DEAD)
    assert len(ran.out["out"]) == 3
    assert [letter.record for letter in ran.dead] == ["", "", ""]
    with pytest.raises(StepError, match="StopIteration"):
        through(["ab", "", "cd"], add)


class Text(str):
    """A text whose first letter is asked for by an attribute."""

    @property
    def first(self) -> str:
        return next(iter(self))


@pytest.mark.parametrize("step", ["map", "filter", "key_by"])
def test_nor_is_it_where_a_function_of_c_is_called(step: str) -> None:
    def add(s: Any) -> Any:
        return getattr(s, step)(attrgetter("first"), name="step")

    ran = through([Text(one) for one in ("ab", "", "cd", "", "", "ef")], add, **DEAD)
    assert len(ran.out["out"]) == 3
    assert [letter.record for letter in ran.dead] == ["", "", ""]
    with pytest.raises(StepError, match=r"StopIteration"):
        through([Text("ab"), Text(""), Text("cd")], add)


class NoTruth:
    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")


@pytest.mark.parametrize("step", ["filter", "branch"])
def test_an_answer_that_is_neither_yes_nor_no(step: str) -> None:
    def answer(n: int) -> Any:
        return NoTruth() if n == 2 else np.array([0, 1]) if n == 3 else True

    def add(s: Any) -> Any:
        made = getattr(s, step)(answer, name="step")
        return made[0].union(made[1]) if step == "branch" else made

    ran = through([1, 2, 3, 4], add, **DEAD)
    assert ran.out["out"] == [1, 4]
    assert [letter.record for letter in ran.dead] == [2, 3]
    with pytest.raises(StepError, match="neither true nor false") as caught:
        through([1, 2], add)
    assert caught.value.function.endswith("answer")


class Unstable:
    """A key of which nobody knows which are equal."""


class Failing:
    def __stable_key__(self) -> str:
        raise RuntimeError("no key today")


def test_an_item_whose_key_cannot_be_one_is_blamed() -> None:
    keys = {1: "a", 2: ["list"], 3: Unstable(), 4: Failing(), 5: 5}
    ran = through(list(keys), lambda s: s.key_by(keys.__getitem__, name="k").with_key(), **DEAD)
    assert ran.out["out"] == [("a", 1), (5, 5)]
    assert [(d.record, d.error.split("(")[0]) for d in ran.dead] == [
        (2, "KeyTypeError"),
        (3, "KeyTypeError"),
        (4, "RuntimeError"),
    ]
    with pytest.raises(StepError, match="a list cannot be a key") as caught:
        through([1, 2], lambda s: s.key_by(keys.__getitem__, name="k"))
    assert isinstance(caught.value.__cause__, KeyTypeError)


def test_a_record_that_cannot_be_shown_is_blamed_all_the_same() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(StepError, match="<Shy that has no repr>"):
        through([Shy()], lambda s: s.map(lambda x: 1 / 0))
    with pytest.raises(StepError) as caught:
        through(["x" * 10_000], lambda s: s.map(lambda x: 1 / 0))
    assert len(caught.value.record) < 600


# ---------------------------------------------------------------- state


def test_a_state_is_begun_kept_and_forgotten() -> None:
    def until_three(seen: int, item: str) -> tuple[Any, tuple[str, int]]:
        seen += 1
        return (FORGET if seen == 3 else seen), (item, seen)

    items = list("abaaa")
    ran = through(items, lambda s: s.key_by(str).stateful_map(until_three, int, name="s"))
    assert ran.out["out"] == [("a", 1), ("b", 1), ("a", 2), ("a", 3), ("a", 1)]
    assert ran.keyed("s").states == {"a": 1, "b": 1}


def test_forget_is_the_same_after_a_journey() -> None:
    assert pickle.loads(pickle.dumps(FORGET)) is FORGET
    assert repr(FORGET) == "FORGET"


def test_a_reduction_begins_with_the_first_item() -> None:
    ran = through([1, 2, 3, 4], lambda s: s.key_by(lambda n: n % 2).reduce(add, name="r"))
    assert ran.out["out"] == [1, 2, 4, 6]
    assert ran.keyed("r").states == {1: 4, 0: 6}


def test_equal_keys_share_their_state_whatever_their_type() -> None:
    ran = through([1, 1.0, True, "1"], lambda s: s.key_by(lambda k: k).reduce(lambda a, b: a))
    assert ran.out["out"] == [1, 1, 1, "1"]


# ---------------------------------------------------------------- timers and the end


class Story(Keys):
    """Writes down what happens; an item is a list of things to do."""

    def on_item(self, item: Any, context: Any) -> Iterable[Any]:
        return self.do(item, context, "item")

    def on_timer(self, context: Any) -> Iterable[Any]:
        todo = next((t for at, t in context.state if at == context.time), ())
        return self.do(todo, context, "timer")

    def on_end(self, context: Any) -> Iterable[Any]:
        yield "end", context.key, context.time

    def do(self, todo: Any, context: Any, why: str) -> Iterable[Any]:
        yield why, context.key, context.time
        for what, at, *then in todo:
            if what == "set":
                context.set_timer(at)
                if then:
                    context.state.append((at, then[0]))
            elif what == "cancel":
                context.cancel_timer(at)
            elif what == "forget":
                context.forget()
            elif what == "raise":
                raise ValueError("told to")


def story(items: list[Any], frontiers: Iterable[int] = (), **options: Any) -> Harness:
    flow = Flow("test", **options)
    source = flow.source(Items(items), time=lambda item: 0)
    keyed = source.key_by(lambda item: item[0], lambda item: item[1:])
    keyed.stateful(Story(), name="s").sink(Collect(), name="out")
    ran = Harness(flow)
    ran.read()
    for frontier in frontiers:
        ran.keyed("s").advance(frontier)
    return ran


def told(ran: Harness) -> list[Any]:
    return [line for line in ran.out["out"] if line[0] != "item"]


def test_timers_fire_in_order_of_time_when_time_has_come_to_them() -> None:
    ran = story([("a", ("set", 30), ("set", 10)), ("b", ("set", 20), ("set", 10))], [9])
    assert told(ran) == []
    ran.keyed("s").advance(20)
    assert told(ran) == [("timer", "a", 10), ("timer", "b", 10), ("timer", "b", 20)]
    ran.keyed("s").advance(29)
    ran.keyed("s").advance(30)
    assert told(ran)[3:] == [("timer", "a", 30)]


def test_results_of_timers_have_the_timers_times() -> None:
    flow = Flow("test")
    keyed = flow.source(Items([("a", ("set", 30), ("set", 10))]), time=lambda item: 0).key_by(
        lambda item: item[0], lambda item: item[1:]
    )

    class Times(Keys):
        def on_item(self, item: Any, context: Any) -> Any:
            return [(item[0], context.time)]

    keyed.stateful(Story(), name="s").stateful(Times()).sink(Collect(), name="out")
    ran = Harness(flow)
    ran.read()
    ran.keyed("s").advance(100)
    assert ran.out["out"] == [("item", 0), ("timer", 10), ("timer", 30)]


def test_a_timer_that_is_set_twice_fires_once() -> None:
    ran = story([("a", ("set", 10), ("set", 10)), ("a", ("set", 10))], [10, 20])
    assert told(ran) == [("timer", "a", 10)]


def test_a_timer_that_was_cancelled_does_not_fire() -> None:
    ran = story([("a", ("set", 10), ("set", 20), ("cancel", 10), ("cancel", 99))], [50])
    assert told(ran) == [("timer", "a", 20)]


def test_a_timer_that_was_cancelled_and_set_again_fires_once() -> None:
    ran = story([("a", ("set", 10), ("cancel", 10), ("set", 10))], [50])
    assert told(ran) == [("timer", "a", 10)]


def test_a_timer_may_set_and_cancel_others() -> None:
    ran = story([("a", ("set", 10, [("set", 15), ("cancel", 20)]), ("set", 20))], [50])
    assert told(ran) == [("timer", "a", 10), ("timer", "a", 15)]


def test_a_key_that_is_forgotten_has_no_timers() -> None:
    ran = story([("a", ("set", 10), ("set", 20)), ("b", ("set", 20)), ("a", ("forget", 0))], [50])
    assert told(ran) == [("timer", "b", 20)]
    assert list(ran.keyed("s").states) == ["b"]
    assert len(ran.keyed("s").timers) == 0


def test_a_timer_may_forget_its_key() -> None:
    ran = story([("a", ("set", 10, [("forget", 0)]), ("set", 20))], [50])
    assert told(ran) == [("timer", "a", 10)]
    assert ran.keyed("s").states == {}


def test_a_timer_that_is_no_time_is_refused() -> None:
    for at in (1.5, "soon", 1 << 63, -(1 << 63)):
        with pytest.raises(
            StepError, match=r"the time of a timer is (a whole number of microseconds|between)"
        ):
            story([("a", ("set", at))])
    assert told(story([("a", ("set", np.int64(10)))], [50])) == [("timer", "a", 10)]


def test_the_end_fires_what_is_left_and_ends_each_key_once() -> None:
    ran = story([("a", ("set", 30), ("set", 10)), ("b", ("set", 20))], [15])
    ran.end()
    ran.end()
    assert told(ran) == [
        ("timer", "a", 10),
        ("timer", "b", 20),
        ("timer", "a", 30),
        ("end", "a", 15),
        ("end", "b", 15),
    ]


def test_at_the_end_timers_can_still_be_cancelled() -> None:
    ran = story([("a", ("set", 10, [("cancel", 20)]), ("set", 20))])
    ran.end()
    assert [line[:2] for line in told(ran)] == [("timer", "a"), ("end", "a")]


def test_a_timer_that_sets_itself_again_comes_to_an_end() -> None:
    class Tick(Keys):
        def on_item(self, item: Any, context: Any) -> Any:
            context.set_timer(10)

        def on_timer(self, context: Any) -> Any:
            context.set_timer(context.time + 10)
            return [context.time]

    flow = Flow("test")
    source = flow.source(Items(["a"]), time=lambda item: 0)
    source.key_by(str).stateful(Tick(), name="t").sink(Collect(), name="out")
    ran = Harness(flow)
    ran.read()
    ran.keyed("t").advance(35)
    ran.keyed("t").advance((1 << 63) - 2)  # the last moment before the end says nothing of time
    ran.end()
    assert ran.out["out"] == [10, 20, 30, 40]
    assert len(ran.keyed("t").timers) == 0


def test_an_error_in_a_timer_blames_the_timer() -> None:
    items = [("a", ("set", 10, [("raise", 0)])), ("b", ("set", 10))]
    with pytest.raises(StepError, match="told to") as caught:
        story(items, [10])
    assert (caught.value.function, caught.value.key) == ("Story.on_timer", "'a'")
    ran = story(items, [10], **DEAD)
    assert told(ran) == [("timer", "b", 10)]
    assert [(d.key, d.record, d.time) for d in ran.dead] == [("a", None, 10)]


def test_a_new_key_whose_first_item_fails_leaves_no_timer_behind() -> None:
    ran = story([("a", ("set", 10), ("raise", 0)), ("a",)], [10], **DEAD)
    assert told(ran) == []
    assert len(ran.keyed("s").timers) == 0


def test_timers_that_are_moved_all_the_time_do_not_pile_up() -> None:
    items = [("a", ("cancel", at), ("set", at + 1)) for at in range(10_000)]
    ran = story(items)
    timers = ran.keyed("s").timers
    assert len(timers) == 1
    assert len(timers._heap) < 200
    ran.keyed("s").advance(10_000)
    assert told(ran) == [("timer", "a", 10_000)]


def test_results_of_many_timers_come_in_bounded_batches() -> None:
    ran = story([(n, ("set", n % 7 + 1)) for n in range(10_000)], [10])
    times = [line[2] for line in told(ran)]
    assert len(times) == 10_000
    assert times == sorted(times)


# ---------------------------------------------------------------- keys that move


class Twin:
    """Keys that are not equal but share their hash."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Twin) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __stable_key__(self) -> str:
        return "twin"

    def __repr__(self) -> str:
        return f"Twin({self.name!r})"


def hashes_of(keys: list[Any]) -> Any:
    from railgun.hashing import hash_keys

    return hash_keys(keys)


def counting(keys: list[Any]) -> Harness:
    def count(n: int, item: Any) -> tuple[int, Any]:
        return n + 1, (item, n + 1)

    return through(keys, lambda s: s.key_by(lambda k: k).stateful_map(count, int, name="s"))


def leaving_of(*blocks: list[Any]) -> LeavingKeys:
    """These keys, found block by block; all of them leave."""
    leaving = LeavingKeys()
    for block in blocks:
        leaving.note(hashes_of(block), block)
    return leaving


def name(leaving: LeavingKeys) -> Hashes:
    """All are found: name their hashes."""
    order = Order.of(leaving.found_hashes)
    leaving.name(order)
    return order.hashes


def pop(leaving: LeavingKeys, named: Any, *keys: Any) -> list[Any]:
    """What leaves with the hashes of these keys, when these hashes were named; those that were not come last."""
    names = named.tolist()
    numbers = dict.fromkeys(hashes_of(list(keys)).tolist())
    turns = {n: names.index(n) if n in names else len(names) + at for at, n in enumerate(numbers)}
    order = sorted(turns, key=lambda number: turns[number])
    some = np.array([turns[number] for number in order], dtype=np.intp)
    return leaving.pop(np.array(order, dtype=np.uint64), some)


def test_state_leaves_with_its_keys_and_arrives_whole() -> None:
    here, there = counting(["a", "b", "a", "c"]).keyed("s"), counting([]).keyed("s")
    noted = leaving_of(*here.census())
    leaving = pop(noted, name(noted), "a", "c")
    assert leaving == ["a", "c"]
    assert there.take(memoryview(here.collect(leaving))) == ["a", "c"]
    assert (here.states, there.states) == ({"b": 1}, {"a": 2, "c": 1})


def test_keys_leave_in_the_order_they_were_found_in_and_only_in_that() -> None:
    noted = leaving_of(["d", "b"], ["a", "c"])
    named = name(noted)
    assert named.tolist() == hashes_of(["d", "b", "a", "c"]).tolist()
    assert pop(noted, named, "a", "d") == ["d", "a"]  # one part of a chunk
    assert pop(noted, named, "b") == ["b"]  # the other
    with pytest.raises(ProtocolError, match="not named in"):
        noted.pop(hashes_of(["a"]), np.array([3]))
    assert noted.pop(hashes_of(["c"]), np.array([3])) == ["c"]


def test_keys_that_share_a_hash_move_together() -> None:
    twins = [Twin(name) for name in "xyz"]
    here, there = counting([*twins, twins[0], "other"]).keyed("s"), counting([]).keyed("s")
    noted = leaving_of(*here.census())
    noted.note_late(hashes_of(twins), twins)  # told of twice, as keys are that come meanwhile
    named = name(noted)
    assert named.tolist() == hashes_of([twins[0], "other"]).tolist()
    leaving = pop(noted, named, Twin("any"))
    assert sorted(t.name for t in leaving) == ["x", "y", "z"]
    there.take(memoryview(here.collect(leaving)))
    assert there.states == {twins[0]: 2, twins[1]: 1, twins[2]: 1}
    assert here.states == {"other": 1}
    assert pop(noted, named, "other") == ["other"]


def test_keys_that_come_late_leave_with_their_hash() -> None:
    noted = leaving_of(["a"])
    noted.note_late(hashes_of(["late"]), ["late"])  # while keys are counted: its hash is recorded
    named = name(noted)
    twins = [Twin("x"), Twin("y")]
    noted.note_late(hashes_of(twins), twins)  # and when they leave: of a hash that waits
    assert pop(noted, named, "a", "late") == ["a", "late"]
    assert pop(noted, named, twins[0], "no key of this hash") == twins
    assert pop(noted, named, twins[0]) == []


def test_a_key_that_was_forgotten_after_it_was_counted_does_not_move() -> None:
    here = counting(["a", "b"]).keyed("s")
    noted = leaving_of(["a", "b", "never"])
    del here.states["a"]
    there = counting([]).keyed("s")
    leaving = pop(noted, name(noted), "a", "b", "never")
    there.take(memoryview(here.collect(leaving)))
    assert there.states == {"b": 1}


def test_a_census_is_taken_in_blocks_of_all_keys() -> None:
    here = counting(list(range(40_000))).keyed("s")
    blocks = list(here.census())
    assert [key for block in blocks for key in block] == list(range(40_000))
    assert max(map(len, blocks)) < 5_000


def test_timers_and_ends_move_with_their_keys() -> None:
    here = story([("a", ("set", 30), ("set", 10)), ("b", ("set", 20))], [10])
    there = story([("c", ("set", 25))])
    data = here.keyed("s").collect(["a"])
    there.keyed("s").take(memoryview(data))
    here.keyed("s").advance(50)
    there.keyed("s").advance(50)
    assert told(here) == [("timer", "a", 10), ("timer", "b", 20)]
    assert told(there) == [("timer", "c", 25), ("timer", "a", 30)]
    there.end()
    here.keyed("s").take(memoryview(there.keyed("s").collect(["a", "c"])))
    here.end()
    assert [line[:2] for line in told(here) if line[0] == "end"] == [("end", "b")]


def test_keys_about_to_leave_are_brought_up_to_the_time_first() -> None:
    ran = story([("a", ("set", 10), ("set", 20)), ("b", ("set", 10))])
    ran.keyed("s").advance_keys(["a"], 15)
    assert told(ran) == [("timer", "a", 10)]
    ran.keyed("s").advance_keys(["a"], (1 << 63) - 1)
    assert [line[:2] for line in told(ran)[1:]] == [("timer", "a"), ("end", "a")]


def test_an_empty_move_is_possible() -> None:
    here = counting([]).keyed("s")
    assert here.take(memoryview(here.collect([]))) == []


# ---------------------------------------------------------------- sources and sinks that fail


class Broken(Source[int], Sink[Any]):
    def __init__(self, what: str) -> None:
        self.what = what

    def partitions(self) -> Iterable[str]:
        return ["part"]

    def open(self, *where: Any) -> Any:
        if self.what == "open":
            raise OSError("cannot open")
        return BrokenReader(self.what) if len(where) == 2 else BrokenWriter(self.what)


class BrokenReader(Reader[int]):
    def __init__(self, what: str) -> None:
        self.what = what
        self.position = 0

    def read(self, most: int, now: int) -> list[int]:
        self.position += 1
        if self.position == 3:
            raise OSError("cannot read")
        return [self.position]


class BrokenWriter(Writer[Any]):
    def __init__(self, what: str) -> None:
        self.what = what

    def write(self, items: Any) -> None:
        if self.what == "write":
            raise OSError("cannot write")

    def flush(self) -> None:
        raise OSError("cannot flush")


def test_an_error_of_a_source_names_part_and_position() -> None:
    flow = Flow("test")
    flow.source(Broken("read"), name="in").sink(Collect())
    with pytest.raises(SourceError, match="cannot read") as caught:
        Harness(flow).run()
    assert str(caught.value).startswith(
        "source 'in': Broken.read failed for part 'part' at position 2\n"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    flow = Flow("test")
    flow.source(Broken("open"), name="in").sink(Collect())
    with pytest.raises(SourceError, match=r"Broken.open failed for part 'part' at its beginning"):
        Harness(flow).run()


def test_an_error_of_a_sink_names_the_step() -> None:
    def write(what: str) -> Harness:
        flow = Flow("test")
        flow.source(Items([7])).sink(Broken(what), name="out")
        return Harness(flow).run()

    with pytest.raises(
        SinkError, match=r"sink 'out': Broken.write failed for items that begin with 7\n"
    ):
        write("write")
    with pytest.raises(SinkError, match=r"sink 'out': Broken.flush failed\n"):
        write("flush").stages[0].writing[0].flush()


def test_a_sink_knows_its_place() -> None:
    places: list[Place] = []

    class Where(Sink[Any]):
        def open(self, place: Place) -> Writer[Any]:
            places.append(place)
            return Collect().open(place)

    flow = Flow("test")
    flow.source(Items([1])).sink(Where(), name="here")
    Harness(flow).run()
    assert [(p.flow, p.step, p.worker, p.generation) for p in places] == [("test", "here", 0, 0)]
    with pytest.raises(RuntimeError, match="cannot send items to the program"):
        Collect().open(Place("f", "s", 0, 0)).write([1])


def test_a_function_of_time_that_raises_is_blamed() -> None:
    flow = Flow("test", **DEAD)  # type: ignore[arg-type]

    def when(item: Any) -> int:
        return item["at"]  # type: ignore[no-any-return]

    items: list[Any] = [{"at": 5}, {}, {"at": "x"}, {"at": 7}]
    flow.source(Items(items), name="in", time=when).sink(Collect(), name="out")
    ran = Harness(flow).run()
    assert ran.out["out"] == [{"at": 5}, {"at": 7}]
    assert [(d.step, d.record) for d in ran.dead] == [("in", {}), ("in", {"at": "x"})]


def test_a_dead_letter_is_made_of_plain_fields() -> None:
    letter = DeadLetter("step", "key", 1, 2, "error", "traceback")
    assert pickle.loads(pickle.dumps(letter)) == letter
