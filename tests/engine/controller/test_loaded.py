"""What workers tell the controller of connectors: ports that are taken, and snapshots that are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from railgun import Collect, Flow, Items
from railgun.engine.controller import controller as module
from railgun.engine.controller.controller import Controller
from railgun.engine.controller.launcher import Ended
from railgun.engine.worker import control_messages as control
from railgun.engine.worker.spec import WorkerSpec
from railgun.flows.plan import compile_flow

TAKEN = control.Loaded("it cannot listen on 127.0.0.1:7300: Address already in use", passing=True)


class Nowhere:
    """Launches nothing."""

    def __init__(self) -> None:
        self.launched: list[WorkerSpec] = []
        self.cancelled: list[WorkerSpec] = []
        self.waiting = False

    def refuse(self, workers: int) -> None: ...

    def launch(self, spec: WorkerSpec, ended: Ended) -> None:
        self.launched.append(spec)

    def cancel(self, spec: WorkerSpec) -> None:
        self.cancelled.append(spec)

    def pending(self, spec: WorkerSpec) -> bool:
        return self.waiting

    def close(self) -> None: ...


@pytest.fixture
def controller() -> Iterator[Controller]:
    flow = Flow("loaded")
    flow.source(Items([1])).sink(Collect(), name="out")
    made = Controller(compile_flow(flow), b"", Nowhere(), 1)
    made._obey(made.lifecycle.start(0))
    yield made
    made._loop.close()


def last(controller: Controller) -> module.WorkerProcess:
    launcher: Any = controller._launcher
    spec = launcher.launched[-1]
    return controller._processes[spec.worker, spec.incarnation]


def test_who_starts_a_flow_hears_which_port_is_taken(controller: Controller) -> None:
    controller._loaded(0, last(controller), TAKEN)
    assert controller.lifecycle.state == "failed"
    assert any("127.0.0.1:7300" in event.text for event in controller._events)


def test_when_a_flow_starts_again_a_port_that_is_taken_is_no_end(controller: Controller) -> None:
    first = last(controller)
    controller._down(0, first.spec.incarnation, "killed")
    second = last(controller)
    assert second is not first
    controller._loaded(0, second, TAKEN)
    assert controller.lifecycle.state == "starting"
    assert controller.launcher.cancelled == [second.spec]  # type: ignore[attr-defined]
    for hour in range(1, 10):
        controller._processes.pop((0, second.spec.incarnation), None)
        controller._obey(controller.lifecycle.tick(module._now() + hour * 60 * 10**6))
        if controller.lifecycle.over:
            break
        second = last(controller)
        controller._loaded(0, second, TAKEN)
    assert controller.lifecycle.over  # after so many times
    assert "127.0.0.1:7300" in str(controller.lifecycle.cause)


def test_what_cannot_pass_is_the_end_at_once(controller: Controller) -> None:
    controller._down(0, last(controller).spec.incarnation, "killed")
    controller._loaded(0, last(controller), control.Loaded("the flow needs the module 'x'"))
    assert controller.lifecycle.state == "failed"


def test_snapshots_that_are_wanted_do_not_follow_each_other_at_once(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_GAP_S", 0.0)
    taken: list[int] = []

    def snapshot(now: int) -> list[Any]:
        taken.append(now)
        return []

    saving = SimpleNamespace(on=True, requests=0)
    life = SimpleNamespace(saving=saving, over=False, gone=False, snapshot=snapshot)
    monkeypatch.setattr(controller, "lifecycle", life)

    async def ask(times: int) -> None:
        for _ in range(times):
            controller._hasten()
            controller._hasten()
            await asyncio.sleep(0.001)

    controller._loop.run_until_complete(ask(3))
    assert 1 < len(taken) <= 3
    taken.clear()
    monkeypatch.setattr(module, "SNAPSHOT_GAP_S", 3600.0)
    controller._loop.run_until_complete(ask(10))
    assert not taken
    assert controller._hastening is not None  # it will be, later


def test_workers_that_wait_for_slots_of_the_cluster_are_an_event_told_once(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOTS_WITHIN_S", 0.0)
    launcher: Any = controller._launcher
    controller._check_slots()
    assert not any(event.kind == "waiting-for-slots" for event in controller._events)
    launcher.waiting = True
    controller._check_slots()
    controller._check_slots()
    told = [event.text for event in controller._events if event.kind == "waiting-for-slots"]
    assert len(told) == 1
    assert "worker 0 waits for a slot" in told[0]
