"""Which snapshots fit which flows."""

from __future__ import annotations

from typing import Any

import pytest

from railgun.engine.snapshots.errors import DoesNotFitError
from railgun.engine.snapshots.fit import fit
from railgun.engine.snapshots.manifest import Manifest, SinkPart, StepInfo


def snapshot(*steps: StepInfo, sinks: tuple[str, ...] = ()) -> Manifest:
    tokens = tuple(SinkPart(name, {}) for name in sinks)
    return Manifest(1, "demo", 7, 1, 2, True, False, 0.0, 1.0, (), tokens, steps)


A, B = StepInfo("a", "reduce", 1), StepInfo("b", "stateful", 2)


def test_steps_go_to_those_of_their_name_and_new_ones_begin_without_state() -> None:
    assert fit(snapshot(A, B), [B, A, StepInfo("new", "reduce", 1)], {}, []) == {"a": "a", "b": "b"}
    assert fit(snapshot(), [A], {}, []) == {}


def test_steps_can_be_renamed_and_dropped() -> None:
    assert fit(snapshot(A, B), [StepInfo("c", "reduce", 1)], {"a": "c"}, ["b"]) == {"a": "c"}
    two = [StepInfo("a", "reduce", 1), StepInfo("b", "reduce", 1)]
    assert fit(snapshot(*two), two, {"a": "b", "b": "a"}, []) == {"a": "b", "b": "a"}, "swapped"
    assert fit(snapshot(*two), [two[0]], {"b": "a"}, ["a"]) == {"b": "a"}


def refused(*args: Any, **named: Any) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        fit(*args, **named)
    return str(caught.value)


def test_every_step_without_a_place_is_told_and_what_to_do() -> None:
    told = refused(snapshot(A, B), [StepInfo("c", "reduce", 1)], {}, [])
    assert "step 'a' has state in the snapshot, and no place in the flow" in told
    assert "rename={'a': NAME}, or drop={'a'}" in told
    assert "rename={'b': NAME}, or drop={'b'}" in told
    assert "(steps of the flow without state in the snapshot: 'c')" in told


def test_prepared_output_has_a_place_or_is_dropped_by_name() -> None:
    prepared = snapshot(A, sinks=("out", "out"))
    assert "step 'out' has prepared output" in refused(prepared, [A], {}, [])
    assert fit(prepared, [A], {}, ["out"]) == {"a": "a"}
    out = StepInfo("out", "sink", 1)
    assert fit(prepared, [A, out], {}, []) == {"a": "a", "out": "out"}


def source(**layout: Any) -> StepInfo:
    return StepInfo("in", "source", 1, layout or None)


def test_positions_that_mean_something_else_now_are_refused() -> None:
    told = refused(snapshot(source(partitions=2, seed=0)), [source(partitions=4, seed=0)], {}, [])
    assert "source 'in'" in told
    assert "partitions was 2 and is 4" in told
    assert "seed" not in told
    assert "fresh=True" in told
    assert "drop={'in'}" in told
    told = refused(snapshot(source(partitions=2)), [source(items=7)], {}, [])
    assert "partitions was 2 and is not there any more" in told
    assert "partitions" in refused(snapshot(source(partitions=2)), [source()], {}, [])


def test_sources_that_say_nothing_of_their_positions_fit() -> None:
    same = source(partitions=2)
    assert fit(snapshot(same), [same], {}, []) == {"in": "in"}
    assert fit(snapshot(source()), [source(partitions=2)], {}, []) == {"in": "in"}, "older snapshot"
    more = source(partitions=2, count=7)
    assert fit(snapshot(same), [more], {}, []) == {"in": "in"}, "what was endless may have an end"
    assert "count was 7 and is not there" in refused(snapshot(more), [same], {}, [])
    assert fit(snapshot(same), [source(partitions=4)], {}, ["in"]) == {}


def test_another_flow_is_refused() -> None:
    told = refused(snapshot(A), [A], {}, [], flow="other")
    assert told.startswith("snapshot 7 is of flow 'demo', not of 'other'")
    assert fit(snapshot(A), [A], {}, [], flow="demo") == {"a": "a"}


def test_state_of_another_kind_is_refused() -> None:
    told = refused(snapshot(A), [StepInfo("a", "stateful", 1)], {}, [])
    assert "step 'a' was a reduce and is a stateful" in told


def test_a_newer_version_is_refused() -> None:
    told = refused(snapshot(B), [StepInfo("b", "stateful", 1)], {}, [])
    assert "has state of version 2 in the snapshot, and the flow knows up to 1" in told


def test_an_older_version_needs_an_upgrade() -> None:
    now = [StepInfo("c", "stateful", 4)]
    told = refused(snapshot(B), now, {"b": "c"}, [])
    assert "step 'b' → 'c' has state of version 2 in the snapshot and 4 in the flow" in told
    assert "upgrade(state, from_version)" in told
    assert fit(snapshot(B), now, {"b": "c"}, [], upgrades=["c"]) == {"b": "c"}


def test_slips_of_the_pen_are_refused() -> None:
    assert "the snapshot has no step 'x'; it has 'a'" in refused(snapshot(A), [A], {"x": "a"}, [])
    assert "the flow has no step 'x' with state; it has 'a'" in refused(
        snapshot(A), [A], {"a": "x"}, []
    )
    assert "drop={'x'}: the snapshot has no step 'x'" in refused(snapshot(A), [A], {}, ["x"])
    assert "both renamed and dropped" in refused(snapshot(A), [A], {"a": "a"}, ["a"])
    other = StepInfo("b", "reduce", 1)
    assert "steps 'a', 'b' would all go to step 'b'" in refused(
        snapshot(A, other), [other], {"a": "b"}, []
    )
