"""Snapshots in the life of a flow: what was found wrong, each once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from railgun.core import orders as o
from railgun.core.lifecycle import Lifecycle, LifecycleError
from railgun.core.placement import Placement
from railgun.core.rescale import messages as m
from railgun.core.saving import Saving

NEVER = 10**15


class Play:
    """A flow of one stage that runs, with snapshots."""

    def __init__(self, workers: int, restarts: int = 5) -> None:
        placement = Placement.of(range(workers))
        self.life = Lifecycle(1, placement, saving=Saving(NEVER), restarts=restarts)
        self.orders: list[o.Order] = []
        self.do(self.life.start(0))
        self.all_up()
        for worker in range(workers):
            self.tell(worker, o.Ready(self.life.generation))
        assert self.life.state == "running"

    def do(self, orders: Sequence[o.Order]) -> list[o.Order]:
        self.orders += orders
        return list(orders)

    def tell(self, worker: int, report: o.WorkerReport) -> list[o.Order]:
        return self.do(self.life.reported(worker, report, 0))

    def all_up(self) -> None:
        for worker, member in list(self.life.members.items()):
            if member.address is None:
                self.do(self.life.up(worker, member.incarnation, ("here", worker), 0))

    def down(self, worker: int) -> list[o.Order]:
        return self.do(self.life.down(worker, self.life.members[worker].incarnation, "killed", 0))

    def scale(self, workers: int) -> list[o.Order]:
        return self.do(self.life.scale(Placement.of(range(workers)), 0))

    def begin_snapshot(self) -> int:
        self.do(self.life.snapshot(0))
        self.do(self.life.recorded(self.life.saving.number, "", 0))
        assert self.life.saving.phase == "saving"
        return self.life.saving.number

    def to(self, worker: int) -> list[o.WorkerOrder]:
        return [
            order.order
            for order in self.orders
            if isinstance(order, o.To) and order.worker == worker
        ]


def test_a_rescale_does_not_begin_with_a_worker_that_was_lost_while_a_snapshot_was_saved() -> None:
    play = Play(1)
    number = play.begin_snapshot()
    play.scale(2)
    play.all_up()
    play.down(1)
    play.tell(0, o.Saved(1, number))
    assert 1 in play.life.members, "it is launched again"
    assert not [order for order in play.to(1) if isinstance(order, o.Start)]
    play.all_up()
    assert [order for order in play.to(1) if isinstance(order, o.Start)]


def test_a_worker_that_leaves_after_the_cut_hands_over_when_the_manifest_is_written() -> None:
    play = Play(2)
    play.scale(1)
    for worker in (0, 1):
        play.tell(worker, o.Report(1, 0, m.Started(1)))
    number = play.begin_snapshot()
    for worker in (0, 1):
        play.tell(worker, o.Report(1, 0, m.Completed(1)))
    play.tell(0, o.Report(1, 0, m.Left(1)))
    for worker in (0, 1):
        play.tell(worker, o.Saved(1, number))
    assert o.Write(number, False) in play.orders, "nobody has to be waited for"
    assert play.life.members[1].held
    assert not [order for order in play.to(1) if isinstance(order, o.Stop)]
    play.do(play.life.written(number, "", 0))
    assert play.to(1)[-2:] == [o.Settled(1, number, True), o.Stop(handing_over=True)]


def test_a_worker_that_waits_to_leave_is_let_go_by_a_failure() -> None:
    play = Play(2)
    play.scale(1)
    for worker in (0, 1):
        play.tell(worker, o.Report(1, 0, m.Started(1)))
    number = play.begin_snapshot()
    for worker in (0, 1):
        play.tell(worker, o.Report(1, 0, m.Completed(1)))
    play.tell(0, o.Report(1, 0, m.Left(1)))
    for worker in (0, 1):
        play.tell(worker, o.Saved(1, number))
    play.down(0)
    assert play.to(1)[-1] == o.Stop(handing_over=False)


def test_a_flow_that_drains_cannot_be_rescaled_while_it_starts_again() -> None:
    play = Play(2)
    play.do(play.life.stop(0, drain=True))
    play.down(1)
    assert play.life.state == "starting"
    with pytest.raises(LifecycleError, match="stopping"):
        play.scale(1)


@pytest.mark.parametrize("error", ["", "there is no room"])
def test_what_the_store_answers_after_a_failure_is_told_to_nobody(error: str) -> None:
    play = Play(2, restarts=0)
    play.do(play.life.snapshot(0))
    play.down(1)
    assert play.life.state == "failed"
    told = play.do(play.life.recorded(play.life.saving.number, error, 0))
    assert not [order for order in told if isinstance(order, o.To)]
