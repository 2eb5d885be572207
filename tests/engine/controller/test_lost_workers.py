"""What is told of a worker that ends without a word: the step, the function and the record it was at."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.engine.controller import flows
from tests.engine.controller.flows import started

from railgun import (
    Collect,
    Flow,
    FlowFailedError,
    Generate,
    Items,
    Settings,
    Stateful,
    TwoPhaseSink,
    TwoPhaseWriter,
)
from railgun.engine.operators.calls import Call
from railgun.engine.worker.breadcrumb import Breadcrumb, left_behind
from railgun.engine.worker.spec import WorkerSpec
from railgun.job import FinishedError

HERE = sys.modules[__name__]


def exits_late(n: int) -> int:
    """Exit after a call that takes so long that the worker tells where it is."""
    if n == 7:
        time.sleep(2.0)
        os._exit(3)
    return n


def exits(n: int) -> int:
    if n == 7:
        os._exit(3)
    return n


def leaves(n: int) -> int:
    if n == 7:
        sys.exit(3)
    return n


def crashes(n: int) -> int:
    if n == 7:
        ctypes.string_at(0)
    return n


def hangs(n: int) -> int:
    while n == 7:
        time.sleep(0.1)
    return n


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (exits, ["batch of 20 records that begins with 0"]),
        (exits_late, ["batch of 20 records that begins with 0"]),
        (leaves, ["record 7", "SystemExit"]),
        (crashes, ["batch of 20 records that begins with 0", "Segmentation fault", "in crashes"]),
        (hangs, ["no sign of life", "for the record 7", "in hangs", "time.sleep"]),
    ],
    ids=["os._exit", "os._exit after a long call", "sys.exit", "segfault", "hang"],
)
def test_a_worker_that_ends_in_user_code_names_step_function_and_record(
    function: Any, words: list[str]
) -> None:
    flow = Flow("lost")
    numbers = flow.source(Items(range(20)), name="numbers")
    numbers.map(function, name="poison").sink(Collect(), name="out")
    settings = Settings(restarts=0, hang_after=4.0)
    with (
        started(flow, 1, settings=settings, by_value=[flows, HERE]) as job,
        pytest.raises(FlowFailedError) as told,
    ):
        job.wait(flows.DEADLINE)
    for word in ["step 'poison'", function.__name__, *words]:
        assert word in str(told.value)


class Ends(TwoPhaseSink[int]):
    """A sink whose worker ends in one of the methods that are called in another thread."""

    def __init__(self, method: str, function: Callable[[int], int]) -> None:
        self.method, self.function = method, function

    def open(self, place: Any) -> TwoPhaseWriter[int]:
        return EndsWriter(self)

    def commit(self, token: Any) -> None:
        self.called("commit")

    def recover(self, flow: str, step: str, generation: int, tokens: Any) -> None:
        self.called("recover")

    def called(self, method: str) -> None:
        if method == self.method:
            self.function(7)


class EndsWriter(TwoPhaseWriter[int]):
    def __init__(self, sink: Ends) -> None:
        self.sink = sink

    def write(self, items: Any) -> None:
        pass

    def prepare(self, snapshot: int) -> str:
        self.sink.called("prepare")
        return f"parcel {snapshot}"


@pytest.mark.parametrize("method", ["prepare", "commit", "recover"])
@pytest.mark.parametrize("function", [exits, crashes, hangs])
def test_a_worker_that_ends_while_a_sink_makes_output_visible_names_step_method_and_token(
    method: str, function: Any, tmp_path: Path
) -> None:
    flow = Flow("lost-committing")
    flow.source(Items(range(20)), name="numbers").sink(Ends(method, function), name="poison")
    settings = Settings(restarts=0, hang_after=2.0)
    options: dict[str, Any] = {"settings": settings, "snapshots": str(tmp_path)}
    with (
        started(flow, 1, by_value=[flows, HERE], **options) as job,
        pytest.raises(FlowFailedError) as told,
    ):
        assert job.wait(flows.DEADLINE)
    words = ["step 'poison'", f"Ends.{method}"]
    words += ["the token 'parcel 1'"] * (method == "commit")
    words += [] if function is exits else [f"in {function.__name__}"]
    for word in words:
        assert word in str(told.value)


class Parcel:
    """A state that ends the worker that loads it, where there is a file of this name."""

    def __init__(self, path: str, function: Callable[[int], int]) -> None:
        self.path, self.function = path, function

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.path.exists(self.path):
            self.function(7)


@pytest.mark.parametrize("function", [exits, hangs])
def test_a_worker_that_ends_while_it_loads_state_names_step_and_key(
    function: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "there")
    flow = Flow("lost-loading")
    numbers = flow.source(Generate(lambda n, chance: n, rate=1000), name="numbers")
    keyed = numbers.key_by(lambda n: "only", name="keys")
    keyed.stateful_map(
        lambda state, n: (state, n), initial=lambda: Parcel(path, function), name="poison"
    ).sink(Collect(), name="out")
    settings = Settings(restarts=1, hang_after=2.0)
    options: dict[str, Any] = {"settings": settings, "snapshots": str(tmp_path / "saved")}
    with started(flow, 1, by_value=[flows, HERE], **options) as job:
        flows.running(job)
        job.snapshot(timeout=flows.DEADLINE)
        Path(path).touch()
        os.kill(flows.pids(job)[0], signal.SIGKILL)
        with pytest.raises(FlowFailedError) as told:
            job.wait(flows.DEADLINE)
    for word in ("step 'poison'", "unpickle of state", "for the key 'only'"):
        assert word in str(told.value)


def hangs_while(path: str, n: int) -> int:
    while os.path.exists(path):
        time.sleep(0.1)
    return n


def raises_while(path: str, n: int) -> int:
    if os.path.exists(path):
        raise ValueError("a parcel too many")
    return n


@pytest.mark.parametrize("function", [hangs_while, raises_while])
def test_output_of_the_end_that_the_program_itself_cannot_make_visible_is_named(
    function: Callable[[str, int], int], tmp_path: Path
) -> None:
    path = tmp_path / "there"
    flow = Flow("ended")
    sink = Ends("recover", partial(function, str(path)))
    flow.source(Items(range(20)), name="numbers").sink(sink, name="poison")
    options: dict[str, Any] = {"snapshots": str(tmp_path / "saved"), "by_value": [flows, HERE]}
    with started(flow, 1, **options) as job:
        assert job.wait(flows.DEADLINE)
    path.touch()
    try:
        with (
            pytest.raises(FinishedError) as told,
            started(flow, 1, settings=Settings(hang_after=1.0), **options),
        ):
            pass
    finally:
        path.unlink()
    for word in ("poison", "Ends.recover", "the token 'parcel 1'", f"in {function.__name__}"):
        assert word in str(told.value)


def test_both_threads_that_were_in_user_code_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = WorkerSpec("job", 3, 7, "127.0.0.1", 1, b"secret")
    notes = Breadcrumb(spec)
    found: list[str] = []

    def look() -> None:
        (tmp_path / Path(notes.path).name.replace("-3-7-", "-4-8-")).write_bytes(
            Path(notes.path).read_bytes()
        )
        found.extend(text for _, _, text in left_behind(spec))

    def commit() -> None:
        with Call("sink", crashes):
            look()

    with Call("step", exits):
        for _ in range(2):  # two threads, one after the other
            thread = Thread(target=commit)
            thread.start()
            thread.join()
        look()
    notes.remove()
    working, committing = "step 'step', function exits", "step 'sink', function crashes"
    both = f"it was in {working}, and at the same time in {committing}"
    assert found == [both, both, f"it was in {working}"]


class Exits(Stateful[int, int, int, int]):
    """Exits in one of its methods."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def initial(self) -> int:
        return 0

    def on_item(self, item: int, context: Any) -> list[int]:
        context.set_timer(context.time + 1)
        return [exits(item)] if self.hook == "on_item" else []

    def on_timer(self, context: Any) -> list[int]:
        return [exits(context.key)]


def with_state(state: int, n: int) -> tuple[int, int]:
    return state, exits(n)


STEPS: dict[str, Callable[[Any], Any]] = {
    "map": lambda numbers: numbers.map(exits, name="poison"),
    "flat_map": lambda numbers: numbers.flat_map(lambda n: [exits(n)], name="poison"),
    "key_by": lambda numbers: numbers.key_by(exits, name="poison"),
    "stateful_map": lambda numbers: numbers.key_by(lambda n: 0).stateful_map(
        with_state, initial=int, name="poison"
    ),
    "reduce": lambda numbers: numbers.key_by(lambda n: 0).reduce(
        lambda a, b: exits(b), name="poison"
    ),
    "on_item": lambda numbers: numbers.key_by(lambda n: n).stateful(
        Exits("on_item"), name="poison"
    ),
    "on_timer": lambda numbers: numbers.key_by(lambda n: n).stateful(
        Exits("on_timer"), name="poison"
    ),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_worker_that_is_lost_again_names_the_very_record(kind: str) -> None:
    flow = Flow("lost-again")
    STEPS[kind](flow.source(Items(range(20)), name="numbers")).sink(Collect(), name="out")
    with (
        started(flow, 1, settings=Settings(restarts=1), by_value=[flows, HERE]) as job,
        pytest.raises(FlowFailedError) as told,
    ):
        job.wait(flows.DEADLINE)
    what = "for the key 7 at " if kind == "on_timer" else "for the record 7"
    for word in ["step 'poison'", what]:
        assert word in str(told.value)


def test_a_worker_on_another_machine_tells_where_the_one_before_it_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller cannot read files of another machine; the next worker there can."""
    monkeypatch.setattr(socket, "gethostname", lambda: "a-machine-without-workers")
    flow = Flow("elsewhere")
    numbers = flow.source(Items(range(20)), name="numbers")
    numbers.map(exits, name="poison").sink(Collect(), name="out")
    with started(flow, 1, settings=Settings(restarts=2), by_value=[flows, HERE]) as job:
        with pytest.raises(FlowFailedError) as told:
            job.wait(flows.DEADLINE)
        warned = [event.text for event in job.events() if event.kind == "warning"]
    assert len(warned) == 2
    assert "worker 0" in warned[0]
    assert "step 'poison', function exits, in a batch of 20 records" in warned[0]
    assert "for the record 7" in warned[1]
    assert "the previous time" in str(told.value)
    assert "step 'poison', function exits, for the record 7" in str(told.value)


def test_files_of_workers_that_live_and_of_other_jobs_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = WorkerSpec("job", 3, 7, "127.0.0.1", 1, b"secret")
    alive = Breadcrumb(spec)
    with Call("step", exits):
        assert left_behind(spec) == []
        (tmp_path / Path(alive.path).name.replace("-3-7-", "-4-8-")).write_bytes(
            Path(alive.path).read_bytes()
        )
        other = WorkerSpec("job", 3, 7, "127.0.0.1", 1, b"another run")
        assert left_behind(other) == []
        assert left_behind(spec) == [(4, 8, "it was in step 'step', function exits")]
        assert left_behind(spec) == [], "told once"
    alive.remove()
    assert list(tmp_path.iterdir()) == []
