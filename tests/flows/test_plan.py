"""From a flow to its stages."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tests.flows.harness import Harness, Keys

from railgun import Collect, Flow, FlowError, Items, Source, Stream
from railgun.flows.plan import Plan, Stage


def source(flow: Flow, name: str, items: Any = (1, 2, 3)) -> Stream[Any]:
    return flow.source(Items(items), name=name)


def stage(plan: Plan, name: str) -> Stage:
    [found] = [s for s in plan.stages if s.name == name]
    return found


def steps(of: Stage) -> list[str]:
    return [step.name for step in of.steps]


def add(a: int, b: int) -> int:
    return a + b


def test_a_source_is_a_stage_and_each_key_by_opens_one() -> None:
    flow = Flow("test")
    keyed = source(flow, "a").map(str).key_by(len, name="k1").reduce(max)
    keyed.key_by(str, name="k2").map(str, name="last").sink(Collect(), name="out")
    plan = flow.plan()
    assert [(s.index, s.name, s.before, s.after) for s in plan.stages] == [
        (0, "a", (), (1,)),
        (1, "k1", (0,), (2,)),
        (2, "k2", (1,), ()),
    ]
    assert [steps(s) for s in plan.stages] == [["map:str"], ["reduce:max"], ["last", "out"]]
    assert [s.is_source for s in plan.stages] == [True, False, False]
    assert plan.stage_of == {"a": 0, "k1": 1, "k2": 2}


def test_united_keyed_streams_are_one_stage_with_a_port_each() -> None:
    flow = Flow("test")
    left = source(flow, "a").key_by(lambda x: x % 2, name="ka")
    right = source(flow, "b").key_by(lambda x: x % 2, name="kb")
    left.map(str, name="m").union(right, name="u").stateful(Keys(), name="s").sink(
        Collect(), name="out"
    )
    plan = flow.plan()
    assert [s.name for s in plan.stages] == ["a", "b", "ka+kb"]
    both = stage(plan, "ka+kb")
    assert [port.name for port in both.ports] == ["ka", "kb"]
    assert (both.before, steps(both)) == ((0, 1), ["m", "u", "s", "out"])
    assert plan.stage_of["ka"] == plan.stage_of["kb"] == 2


def test_the_side_an_item_came_in_by_is_told() -> None:
    class Sides(Keys):
        def on_item(self, item: Any, context: Any) -> Any:
            return [(context.port, context.key, item)]

    flow = Flow("test")
    streams = [source(flow, n, [n]).key_by(lambda x: 0, name=f"k{n}") for n in "abc"]
    inner = streams[0].union(streams[1], streams[2])
    inner.stateful(Sides(), name="inner").sink(Collect(), name="in")
    inner.union(streams[0].map(str.upper), name="outer").stateful(Sides()).sink(
        Collect(), name="out"
    )
    out = Harness(flow).run().out
    assert sorted(out["in"]) == [(0, 0, "a"), (1, 0, "b"), (2, 0, "c")]
    assert sorted(out["out"]) == [(0, 0, "a"), (0, 0, "b"), (0, 0, "c"), (1, 0, "A")]


def test_unions_join_stages_that_others_joined_before() -> None:
    flow = Flow("test")
    a, b, c, d = (source(flow, n).key_by(str, name=f"k{n}") for n in "abcd")
    a.union(b).union(c.union(d)).reduce(max).sink(Collect())
    assert [s.name for s in flow.plan().stages] == ["a", "b", "c", "d", "ka+kb+kc+kd"]


def test_a_union_of_streams_without_keys_runs_in_every_stage_its_items_come_from() -> None:
    flow = Flow("test")
    a, b = source(flow, "a", [1, 2]), source(flow, "b", [3])
    keyed = b.key_by(str, name="k").reduce(add, name="r")
    united = a.union(b, keyed, name="u").map(lambda x: x * 10, name="m")
    united.sink(Collect(), name="out")
    united.key_by(lambda x: 0, name="all").reduce(add, name="sum").sink(Collect(), name="sum out")
    plan = flow.plan()
    assert [s.name for s in plan.stages if "m" in steps(s)] == ["a", "b", "k"]
    assert stage(plan, "all").before == tuple(plan.stage_of[n] for n in ("a", "b", "k"))
    assert not stage(plan, "all").is_source
    out = Harness(flow).run().out
    assert sorted(out["out"]) == [10, 20, 30, 30]
    assert out["sum out"][-1] == 90


def test_a_keyed_stream_united_with_one_that_is_not_has_no_keys() -> None:
    flow = Flow("test")
    a = source(flow, "a")
    united = a.key_by(str).union(a)
    assert not united.step.keyed
    with pytest.raises(FlowError, match="needs keyed items"):
        united.reduce(max)  # type: ignore[attr-defined]


def test_a_stream_united_with_itself_comes_twice() -> None:
    flow = Flow("test")
    a = source(flow, "a")
    a.union(a).sink(Collect(), name="plain")
    keyed = a.key_by(str)
    keyed.union(keyed).sink(Collect(), name="keyed")
    out = Harness(flow).run().out
    assert sorted(out["plain"]) == sorted(out["keyed"]) == [1, 1, 2, 2, 3, 3]


def test_branches_stay_in_their_stage_and_can_be_united_again() -> None:
    flow = Flow("test")
    keyed = source(flow, "a", range(6)).key_by(lambda x: x % 3, name="k")
    even, odd = keyed.branch(lambda x: x % 2 == 0, name="even?")
    even.union(odd.map(lambda x: -x)).reduce(add, name="sum").sink(Collect(), name="out")
    plan = flow.plan()
    assert [s.name for s in plan.stages] == ["a", "k"]
    ran = Harness(flow).run()
    assert ran.keyed("sum").states == {0: -3, 1: 3, 2: -3}


def test_both_ways_of_a_branch_lead_to_stages_of_their_own() -> None:
    flow = Flow("test")
    even, odd = source(flow, "a", range(6)).branch(lambda x: x % 2 == 0, name="even?")
    even.key_by(lambda x: 0, name="ke").reduce(add, name="e").sink(Collect(), name="evens")
    odd.key_by(lambda x: 0, name="ko").reduce(add, name="o").sink(Collect(), name="odds")
    ran = Harness(flow).run()
    assert (ran.out["evens"][-1], ran.out["odds"][-1]) == (6, 9)


def test_a_stream_goes_to_everything_that_takes_from_it() -> None:
    flow = Flow("test")
    a = source(flow, "a")
    for n in range(3):
        a.sink(Collect(), name=f"s{n}")
        a.key_by(str, name=f"k{n}").sink(Collect(), name=f"ks{n}")
    out = Harness(flow).run().out
    assert {n: sorted(v) for n, v in out.items()} == {
        f"{n}{i}": [1, 2, 3] for n in ("s", "ks") for i in range(3)
    }


def test_stages_are_numbered_along_the_stream() -> None:
    """Also where a later line of the program leads into a stage that was opened by an earlier one."""
    flow = Flow("test")
    early = source(flow, "a").key_by(str, name="early")
    late = source(flow, "b").key_by(str, name="first").map(str).key_by(str, name="second")
    early.union(late).reduce(max).sink(Collect())
    plan = flow.plan()
    assert [s.name for s in plan.stages] == ["a", "b", "first", "early+second"]
    assert all(before < s.index for s in plan.stages for before in s.before)
    assert all(after > s.index for s in plan.stages for after in s.after)


def test_a_union_that_would_make_items_flow_backwards_is_refused_at_its_line() -> None:
    flow = Flow("test")
    first = source(flow, "a").key_by(str, name="z")
    second = first.map(str).key_by(str, name="y")
    third = second.key_by(str, name="x").map(str)
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    first.union(third, name="back").key_by(str, name="a1").sink(Collect())
    second.sink(Collect())
    with pytest.raises(
        FlowError, match="'back' unites keyed streams of which one leads to the other"
    ) as e:
        flow.plan()
    assert str(e.value).startswith(f"{__file__}:{line}: ")


def test_every_stream_leads_to_a_sink() -> None:
    flow = Flow("test")
    yes, no = source(flow, "a").branch(bool, name="b")
    yes.sink(Collect())
    with pytest.raises(FlowError, match=r"the stream that comes out of 'b.no' leads nowhere"):
        flow.plan()
    no.sink(Collect())
    assert len(flow.plan().stages) == 1


def test_a_flow_needs_a_source() -> None:
    with pytest.raises(FlowError, match="flow 'test' has no source"):
        Flow("test").plan()


def test_a_plan_can_read_from_other_sources() -> None:
    flow = Flow("test")
    source(flow, "a").sink(Collect(), name="out")
    other: Source[int] = Items([7])
    plan = flow.plan().with_sources({"a": other})
    assert plan.stages[0].ports[0].options["source"] is other
    assert flow.plan().stages[0].ports[0].options["source"] is not other
