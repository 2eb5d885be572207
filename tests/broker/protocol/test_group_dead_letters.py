"""One group, rule by rule: which messages die, and how their letters are written (PS-11)."""

from __future__ import annotations

import pytest
from tests.broker.protocol.group_play import a_group, restarted, taken

from railgun.broker.protocol.groups import Bury, DeliveryError, GroupConfig, Receipt


def test_ps_11_distance_is_to_the_highest_acked_and_spares_what_is_in_flight() -> None:
    group = a_group(10, distance=5)
    group.take(0)
    group.nack("ann", [Receipt(2, 5, 1, 0)], 100, "no", 0)
    group.ack("ann", [Receipt(9, 10, 1, 0)], 1)
    assert group.letters(1) == [
        Bury(2, 1, "no", "dead_distance"),
        Bury(3, 1, "no", "dead_distance"),
    ], "4 is 5 behind; 0 and 1 are further, but ann has them"
    group.leave("ann", graceful=False, now=2)
    assert [bury.offset for bury in group.letters(2)] == [0, 1]


def test_ps_11_max_deliveries_counts_and_then_waits_for_a_failure() -> None:
    group = a_group(1, max_deliveries=2)
    group.take(0)
    group.leave("ann", graceful=True, now=0)  # does not count
    group.join("bob", 1)
    group.grant("bob", 1, 1)
    assert taken(group) == [("bob", 0, 1, 1)]
    group.nack("bob", [Receipt(0, 1, 1, 0)], 0, "once", 1)
    assert taken(group) == [("bob", 0, 1, 2)]
    assert group.letters(1) == [], "the second delivery may do"
    group.nack("bob", [Receipt(0, 1, 2, 0)], 1000, "twice", 1)
    assert taken(group) == []
    assert group.letters(1) == [Bury(0, 2, "twice", "dead_deliveries")]


def test_ps_11_a_message_that_is_nacked_at_once_again_and_again_dies_of_distance() -> None:
    group = a_group(10, distance=5)
    group.take(0)
    group.ack("ann", [Receipt(1, 6, 1, 0)], 0)
    for delivery in (1, 2, 3):
        group.nack("ann", [Receipt(0, 1, delivery, 0)], 0, "no", delivery)
        assert taken(group, delivery) == [("ann", 0, 1, delivery + 1)], "5 is 5 ahead, and not more"
    group.ack("ann", [Receipt(6, 7, 1, 0)], 4)
    assert taken(group, 4) == [], "what ann has is hers"
    assert group.letters(4) == []
    group.nack("ann", [Receipt(0, 1, 4, 0)], 0, "never", 5)
    assert taken(group, 5) == [], "death comes before delivery"
    assert group.letters(5) == [Bury(0, 4, "never", "dead_distance")]


@pytest.mark.parametrize("exclusive", [False, True])
def test_ps_11_a_message_that_holds_its_group_dies_after_more_deliveries_than_the_distance(
    exclusive: bool,
) -> None:
    group = a_group(10, credit=1, distance=3, exclusive=exclusive)
    for delivery in (1, 2, 3, 4):
        [deliver] = group.take(delivery)
        assert (deliver.first, deliver.end, deliver.delivery) == (0, 1, delivery)
        assert group.letters(delivery) == [], "nothing later was acknowledged"
        group.nack("ann", [deliver.receipt], 1000 * (delivery == 4), "poison", delivery)
    assert taken(group, 5) == ([] if exclusive else [("ann", 1, 2, 1)])
    assert group.letters(5) == [Bury(0, 4, "poison", "dead_distance")], "also while it is delayed"
    group.buried(0, 5)
    group.leave("ann", graceful=False, now=6)
    group.redrive([(0, 0)], 6)
    group.join("bob", 6)
    group.grant("bob", 1, 6)
    [deliver] = group.take(6)
    assert (deliver.first, deliver.delivery) == (0, 1), "a redriven message counts anew"


def test_ps_11_max_age_counts_from_the_first_delivery_that_counts() -> None:
    group = a_group(1000, credit=3, max_age=100)
    assert taken(group, 1000) == [("ann", 0, 3, 1)], "however long ago they were stored"
    assert group.deadline() is None, "what a member has is not looked at"
    group.nack("ann", [Receipt(0, 1, 1, 0)], 0, "no", 1050)
    assert taken(group, 1050) == [("ann", 0, 1, 2)]
    group.nack("ann", [Receipt(0, 1, 2, 0)], 500, "still not", 1090)
    assert group.deadline() == 1100
    assert group.letters(1099) == []
    assert group.letters(1100) == [Bury(0, 2, "still not", "dead_age")]
    group.leave("ann", graceful=True, now=1200)
    group.join("bob", 1200)
    group.grant("bob", 1, 1200)
    assert taken(group, 1200) == [("bob", 1, 2, 1)], "an uncounted delivery was not the first"


def test_ps_11_the_age_of_a_message_survives_a_restart_and_old_messages_are_not_delivered() -> None:
    group = a_group(3, credit=2, max_age=100)
    group.take(1000)
    group.nack("ann", [Receipt(0, 2, 1, 0)], 0, "no", 1010)
    again = restarted(group)
    again.join("bob", 1050)
    again.grant("bob", 3, 1050)
    assert taken(again, 1099) == [("bob", 0, 2, 2), ("bob", 2, 3, 1)]
    again = restarted(again)
    again.join("eve", 1100)
    again.grant("eve", 3, 1100)
    assert taken(again, 1100) == [("eve", 2, 3, 2)]
    assert again.letters(1100) == [Bury(0, 2, "no", "dead_age"), Bury(1, 2, "no", "dead_age")]


ENDS = {
    "restart": restarted,
    "sent away": lambda group: (group.send_away("ann", 5), group)[1],
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("rule", [{"max_deliveries": 1}, {"distance": 0}, {"max_age": 0}])
def test_ps_11_what_a_member_had_when_its_node_left_it_has_not_failed(
    rule: dict[str, int], exclusive: bool, how: str
) -> None:
    group = a_group(100, exclusive=exclusive, **rule)  # type: ignore[arg-type]
    epoch = group.take(0)[0].epoch
    group.ack("ann", [Receipt(0, 1, 1, epoch), Receipt(90, 91, 1, epoch)], 1)
    again = ENDS[how](group)
    assert again.letters(9) == [], "also if others behind them are done"
    again.join("bob", 9)
    again.grant("bob", 100, 9)
    assert taken(again, 9) == [("bob", 1, 90, 2), ("bob", 91, 100, 2)], "but they were delivered"
    [first, *_] = [flight for _, _, flight in again.members["bob"].flights]
    again.nack("bob", [Receipt(1, 2, 2, first.epoch)], 0, "poison", 10)
    assert [(bury.offset, bury.deliveries) for bury in again.letters(10)] == [(1, 2)]


@pytest.mark.parametrize("how", ENDS)
def test_ps_11_failures_add_up_whatever_ends_with_a_node_in_between(how: str) -> None:
    group = a_group(1, max_deliveries=3)
    names = ["ann", "bob", "cid"]
    for failures, name in enumerate(names):
        if name not in group.members:
            group.join(name, 10 * failures)
            group.grant(name, 1, 10 * failures)
        group.take(10 * failures)
        group.leave(name, graceful=False, now=10 * failures)
        if name == names[-1]:
            break
        group.join("ann", 10 * failures)
        group.grant("ann", 1, 10 * failures)
        assert group.take(10 * failures + 1), "an end of the node is no failure"
        group = ENDS[how](group)
    told = Bury(0, 5, "consumer cid has gone", "dead_deliveries")
    assert group.letters(30) == [told], "three failures, and two ends of the node between them"
    assert restarted(group).letters(30) == [told]


def test_ps_11_who_leaves_in_order_does_not_make_dead_letters_of_what_others_passed() -> None:
    group = a_group(10, credit=5, members=("ann", "bob"), distance=2)
    group.take(0)
    group.ack("bob", [Receipt(5, 10, 1, 0)], 1)
    group.leave("ann", graceful=True, now=2)
    assert group.letters(2) == []
    assert taken(group, 2) == [("bob", 0, 5, 1)]
    group.nack("bob", [Receipt(0, 1, 1, 0)], 0, "no", 3)
    assert [bury.offset for bury in group.letters(3)] == [0]


def test_ps_11_messages_delivered_one_by_one_share_their_times() -> None:
    group = a_group(64_000, max_age=64_000)
    for now in range(0, 64_000, 10):
        group.grant("ann", now + 10, now)
        group.take(now)
    group.leave("ann", graceful=False, now=64_000)
    assert len(group.waiting) <= 65
    assert group.deadline() == 64_000


def test_ps_11_a_clock_that_goes_back_does_not_let_messages_live_longer() -> None:
    group = a_group(1, max_age=100)
    group.take(5000)
    group.nack("ann", [Receipt(0, 1, 1, 0)], 10_000, "no", 5000)
    group.tick(1000)
    assert group.deadline() == 1100
    assert group.letters(1100) == [Bury(0, 1, "no", "dead_age")]


def test_ps_11_other_rules_hold_for_what_was_delivered_before() -> None:
    group = a_group(3)
    group.take(0)
    group.nack("ann", [Receipt(0, 1, 1, 0)], 0, "no", 0)
    with pytest.raises(DeliveryError, match="settings change only without members"):
        group.configure(GroupConfig(max_deliveries=1), 0)
    group.leave("ann", graceful=True, now=0)
    group.configure(GroupConfig(max_deliveries=1), 0)
    group.join("bob", 0)
    group.grant("bob", 3, 0)
    assert taken(group) == [("bob", 1, 3, 1)]
    assert group.letters(0) == [Bury(0, 1, "no", "dead_deliveries")]


def test_ps_11_the_letter_is_written_before_the_group_moves_on() -> None:
    group = a_group(1, max_deliveries=1)
    group.take(0)
    group.nack("ann", [Receipt(0, 1, 1, 0)], 0, "no", 0)
    letter = [Bury(0, 1, "no", "dead_deliveries")]
    assert group.letters(1) == letter
    assert group.letters(1) == [], "once"
    assert group.floor == 0
    assert taken(group) == []
    assert group.kept(0, 2)
    assert group.letters(3) == letter, "again, after it failed"
    again = restarted(group)
    assert again.letters(4) == letter, "and after a restart"
    assert group.buried(0, 5)
    assert group.floor == 1
    assert group.highest == -1, "buried is not acked"
    assert not group.buried(0, 6)
    assert not group.kept(0, 6)


def test_ps_11_a_letter_that_is_kept_stands_as_before() -> None:
    group = a_group(10, distance=3)
    group.take(0)
    group.nack("ann", [Receipt(0, 2, 1, 0)], 50, "no", 0)
    group.ack("ann", [Receipt(9, 10, 1, 0)], 0)
    assert len(group.letters(0)) == 2
    assert group.deadline() is None
    group.kept(0, 10)
    assert group.deadline() == 50
    group.kept(1, 50)
    assert taken(group, 50) == [], "it is not delivered again because its letter failed"
    assert [bury.offset for bury in group.letters(50)] == [0, 1]


def test_ps_11_letters_come_by_so_many() -> None:
    group = a_group(100, max_deliveries=1)
    group.take(0)
    group.leave("ann", graceful=False, now=0)
    assert [bury.offset for bury in group.letters(0, most=3)] == [0, 1, 2]
    assert [bury.offset for bury in group.letters(0, most=3)] == [3, 4, 5]
    assert group.explain(0).letters == 100
