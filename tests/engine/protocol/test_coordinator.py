"""The coordinator: the order of whole rescales and snapshots over workers and stages."""

from __future__ import annotations

import pytest

from railgun.engine.protocol.placement import Placement
from railgun.engine.protocol.rescale import Coordinator
from railgun.engine.protocol.rescale import coordinator as c
from railgun.engine.protocol.rescale import messages as m
from railgun.errors import ProtocolError


def told(orders: list[c.Order], kind: type) -> list[c.Order]:
    return [order for order in orders if isinstance(order, kind)]


def rescales(orders: list[c.Order]) -> list[tuple[int, int]]:
    """(worker, stage) of the rescales among some orders."""
    return [
        (order.worker, order.stage)
        for order in orders
        if isinstance(order, c.Tell) and isinstance(order.event, m.Rescale)
    ]


def report_all(coordinator: Coordinator, stage: int, report: m.Command) -> list[c.Order]:
    orders: list[c.Order] = []
    for worker in coordinator.members:
        orders += coordinator.reported(worker, stage, report)
    return orders


def join_all(coordinator: Coordinator) -> list[c.Order]:
    orders: list[c.Order] = []
    for worker in coordinator.members:
        orders += coordinator.joined(worker)
    return orders


ONE, TWO, THREE = (Placement.of(range(n)) for n in (1, 2, 3))


def test_new_workers_join_before_anything_moves() -> None:
    coordinator = Coordinator(TWO, stages=2)
    orders = coordinator.rescale(THREE)
    assert told(orders, c.Launch) == [c.Launch((2,), (0, 1, 2))]
    assert rescales(orders) == []
    assert coordinator.joined(0) == coordinator.joined(1) == []
    orders = coordinator.joined(2)
    assert orders[0] == c.Begin(2)
    assert rescales(orders) == [(0, 0), (1, 0), (2, 0)]


def test_stages_move_top_down_one_after_another() -> None:
    coordinator = Coordinator(TWO, stages=2)
    coordinator.rescale(THREE)
    join_all(coordinator)
    assert report_all(coordinator, 0, m.Started(1)) == []
    assert rescales(report_all(coordinator, 0, m.Completed(1))) == [(0, 1), (1, 1), (2, 1)]
    report_all(coordinator, 1, m.Started(1))
    assert report_all(coordinator, 1, m.Completed(1)) == [c.Rescaled(THREE)]
    assert coordinator.idle


def test_departing_workers_are_let_go_when_all_have_their_last_word() -> None:
    coordinator = Coordinator(TWO, stages=1)
    orders = coordinator.rescale(ONE)
    assert c.EndSources(1) in orders
    assert c.Tell(1, 0, m.Depart()) in orders
    report_all(coordinator, 0, m.Started(1))
    assert report_all(coordinator, 0, m.Completed(1)) == []
    assert coordinator.reported(1, 0, m.Left(1)) == []
    assert coordinator.reported(0, 0, m.Left(1)) == [c.Stop(1), c.Rescaled(ONE)]
    assert coordinator.members == (0,)


def test_rule_9_a_request_meanwhile_waits_and_the_last_one_wins() -> None:
    coordinator = Coordinator(ONE, stages=1)
    coordinator.rescale(TWO)
    assert coordinator.rescale(Placement.of(range(5))) == []
    assert coordinator.rescale(THREE) == []
    join_all(coordinator)
    report_all(coordinator, 0, m.Started(1))
    orders = report_all(coordinator, 0, m.Completed(1))
    assert orders[:2] == [c.Rescaled(TWO), c.Launch((2,), (0, 1, 2))]


def test_the_placement_it_has_already_is_no_work() -> None:
    assert Coordinator(TWO, stages=2).rescale(TWO) == [c.Rescaled(TWO)]


def test_a_snapshot_waits_until_all_have_heard_of_the_rescale() -> None:
    coordinator = Coordinator(TWO, stages=1)
    coordinator.rescale(ONE)
    assert coordinator.want_snapshot() == []
    assert coordinator.reported(0, 0, m.Started(1)) == []
    orders = coordinator.reported(1, 0, m.Started(1))
    assert orders == [c.TakeSnapshot(0, 1), c.TakeSnapshot(1, 1)]
    assert coordinator.reported(0, 0, m.Snapshot(1)) == []
    assert coordinator.reported(1, 0, m.Snapshot(1)) == [c.Commit(1)]


def test_nothing_begins_to_move_during_a_snapshot_and_the_move_goes_first_after_it() -> None:
    coordinator = Coordinator(TWO, stages=1)
    assert len(coordinator.want_snapshot()) == 2
    assert coordinator.rescale(ONE) == []
    assert coordinator.want_snapshot() == []
    coordinator.reported(0, 0, m.Snapshot(1))
    orders = coordinator.reported(1, 0, m.Snapshot(1))
    assert orders[0] == c.Commit(1)
    assert rescales(orders) == [(0, 0), (1, 0)]
    assert told(orders, c.TakeSnapshot) == []


def test_who_took_part_in_a_snapshot_leaves_when_it_is_settled() -> None:
    coordinator = Coordinator(TWO, stages=1)
    coordinator.rescale(ONE)
    coordinator.want_snapshot(5, settles=True)
    report_all(coordinator, 0, m.Started(1))
    report_all(coordinator, 0, m.Completed(1))
    assert coordinator.reported(0, 0, m.Left(1)) == []
    assert report_all(coordinator, 0, m.Snapshot(5)) == [c.Commit(5)]
    assert coordinator.phase == "leaving"
    assert coordinator.settled() == [c.Stop(1), c.Rescaled(ONE)]
    assert coordinator.idle


def test_a_snapshot_that_has_not_begun_keeps_nobody() -> None:
    coordinator = Coordinator(TWO, stages=1)
    coordinator.rescale(ONE)
    report_all(coordinator, 0, m.Started(1))
    report_all(coordinator, 0, m.Completed(1))
    assert coordinator.reported(0, 0, m.Left(1)) == [c.Stop(1), c.Rescaled(ONE)]
    assert coordinator.want_snapshot(5, settles=True) == [c.TakeSnapshot(0, 5)]


def test_a_snapshot_that_is_wanted_while_workers_join_is_taken_in_the_move() -> None:
    coordinator = Coordinator(ONE, stages=1)
    coordinator.rescale(TWO)
    assert coordinator.want_snapshot(5, settles=True) == []
    assert told(join_all(coordinator), c.TakeSnapshot) == []
    orders = report_all(coordinator, 0, m.Started(1))
    assert orders == [c.TakeSnapshot(0, 5), c.TakeSnapshot(1, 5)]
    report_all(coordinator, 0, m.Completed(1))
    # Nobody leaves, so the rescale is over before it is known whether the snapshot counts.
    assert report_all(coordinator, 0, m.Snapshot(5)) == [c.Commit(5), c.Rescaled(TWO)]


def test_snapshot_numbers_are_never_used_again() -> None:
    coordinator = Coordinator(ONE, stages=1, snapshot=7)
    assert coordinator.want_snapshot() == [c.TakeSnapshot(0, 8)]


def test_a_pin_alone_is_a_rescale_too() -> None:
    coordinator = Coordinator(TWO, stages=1)
    assert rescales(coordinator.rescale(Placement.of([0, 1], keys={7: 1}))) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("report", [m.Started(1), m.Completed(1), m.Snapshot(1)])
def test_reports_out_of_turn_are_refused(report: m.Command) -> None:
    with pytest.raises(ProtocolError):
        Coordinator(ONE, stages=1).reported(0, 0, report)
