"""User code may raise anything, anywhere: the flow fails and names it, or makes a dead letter. Nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
from tests.flows.raising import (
    BAD,
    EXCEPTIONS,
    OTHER_HOOKS,
    RECORD_HOOKS,
    ROWS,
    SAVING_HOOKS,
    TRAVELLING_HOOKS,
    OnError,
    Trip,
    flow_of,
)

from railgun import Collect, Flow, FlowError, Items, Stateful, StepError
from railgun.engine.operators.calls import Call, RecordCalls, attempt, running
from railgun.errors import RailgunError
from railgun.testing.flow_tester import FlowTester

HOOKS = RECORD_HOOKS | OTHER_HOOKS | SAVING_HOOKS


def tried(hook: str, exception: str, on_error: OnError = "stop") -> FlowTester:
    """Run the flow to its end, with a snapshot on the way."""
    flow = flow_of(Trip(hook, exception), on_error)
    tester = FlowTester(flow, workers=2, snapshots=True, seed=len(hook) + len(exception))
    tester.run(20)
    tester.snapshot()
    tester.finish()
    return tester


@pytest.mark.parametrize("exception", EXCEPTIONS)
@pytest.mark.parametrize("hook", HOOKS)
def test_whatever_a_hook_raises_fails_the_flow_by_name(hook: str, exception: str) -> None:
    with pytest.raises(StepError) as caught:
        tried(hook, exception)
    assert caught.value.step == HOOKS[hook]
    assert exception in str(caught.value)
    assert running() == []


@pytest.mark.parametrize("exception", EXCEPTIONS)
@pytest.mark.parametrize("hook", TRAVELLING_HOOKS)
def test_whatever_pickling_raises_fails_the_flow(hook: str, exception: str) -> None:
    with pytest.raises(RailgunError, match=r"cannot be sent|cannot be read|cannot be saved"):
        tried(hook, exception)
    assert running() == []


@pytest.mark.parametrize("exception", EXCEPTIONS)
@pytest.mark.parametrize("hook", sorted(RECORD_HOOKS.keys() - {"initial", "reduce"}))
def test_whatever_a_function_raises_for_a_record_is_a_dead_letter(
    hook: str, exception: str
) -> None:
    tester = tried(hook, exception, on_error="dead_letter")
    [letter] = tester.dead_letters
    assert letter.step == RECORD_HOOKS[hook]
    assert exception in letter.error
    assert sorted(tester.collected("out")) == [n for n in range(ROWS) if n != BAD]


def test_an_interrupt_from_the_terminal_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXCEPTIONS, "KeyboardInterrupt", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        tried("map", "KeyboardInterrupt", on_error="dead_letter")
    assert running() == []


def test_what_runs_is_known_while_it_runs() -> None:
    seen: list[tuple[str, str, str]] = []
    trip = Trip("", "")
    flow = flow_of(trip)

    def look(item: int) -> int:
        call = running()[-1]
        assert isinstance(call, RecordCalls)
        seen.append((call.step, call.name.rpartition(".")[2], call.which()))
        return item

    step = flow.steps["mapped"]
    made = step.make
    assert made is not None

    def make(setting: Any) -> Any:
        operator: Any = made(setting)
        operator.function = look
        return operator

    object.__setattr__(step, "make", make)
    FlowTester(flow).finish()
    assert sorted(seen) == sorted(
        ("mapped", "look", f"for the record {number}") for number in range(ROWS)
    )


def test_calls_nest_and_what_is_no_exception_is_named() -> None:
    def work() -> None:
        with Call("outer", "dump"):
            assert [call.step for call in running()] == ["outer"]
            with Call("inner", "load"):
                assert [call.step for call in running()] == ["outer", "inner"]
            raise GeneratorExit

    with pytest.raises(StepError, match="step 'outer': dump raised"):
        work()
    assert running() == []


@pytest.mark.parametrize("exception", sorted(EXCEPTIONS.keys() - {"UnspeakableError"}))
def test_work_of_another_thread_gives_its_error_as_an_exception(exception: str) -> None:
    def work() -> None:
        raise EXCEPTIONS[exception]()

    result, error = attempt(work)
    assert result is None
    assert isinstance(error, Exception)
    assert not isinstance(error, StopIteration)
    assert exception in repr(error)
    assert not isinstance(error, FlowError)


def no_beginning() -> int:
    raise ValueError("no beginning")


class NoBeginning(Stateful[int, int, int, int]):
    def initial(self) -> int:
        return no_beginning()

    def on_item(self, item: int, context: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize("kind", ["stateful_map", "stateful"])
@pytest.mark.parametrize("on_error", ["stop", "dead_letter"])
def test_what_initial_raises_is_told_as_such(kind: str, on_error: OnError) -> None:
    flow = Flow("beginning", on_error=on_error, dead_letters=Collect())
    keyed = flow.source(Items([7]), name="numbers").key_by(lambda n: n)
    if kind == "stateful":
        keyed.stateful(NoBeginning(), name="step").sink(Collect(), name="out")
    else:
        keyed.stateful_map(lambda s, n: (s, n), initial=no_beginning, name="step").sink(
            Collect(), name="out"
        )
    tester = FlowTester(flow)
    if on_error == "dead_letter":
        tester.settle()
        assert [letter.record for letter in tester.dead_letters] == [7]
        return
    with pytest.raises(StepError) as caught:
        tester.settle()
    assert caught.value.function == (
        "NoBeginning.initial" if kind == "stateful" else "no_beginning"
    )
    assert "of key 7" in str(caught.value)


def test_what_the_function_raises_is_not_told_as_of_initial() -> None:
    flow = Flow("beginning")
    keyed = flow.source(Items([7]), name="numbers").key_by(lambda n: n)
    keyed.stateful_map(lambda s, n: (1 // 0, n), initial=int, name="step").sink(
        Collect(), name="out"
    )
    with pytest.raises(StepError) as caught:
        FlowTester(flow).settle()
    assert "<lambda>" in caught.value.function
