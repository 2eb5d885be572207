"""One group, rule by rule: acks, nacks, and members that go (PS-6 to PS-8)."""

from __future__ import annotations

import pytest
from tests.broker.protocol.group_play import a_group, restarted, taken

from railgun.broker.protocol.groups import DeliveryError, Group, Receipt, Stale
from railgun.broker.protocol.groups.messages import DAY, LONGEST_DELAY

# --- PS-6: acks -----------------------------------------------------------------------------------


def test_ps_6_what_was_acked_is_settled_and_the_floor_follows() -> None:
    group = a_group(10)
    [deliver] = group.take(0)
    assert group.ack("ann", [Receipt(4, 10, 1, 0)], 1) == []
    assert (group.floor, group.highest) == (0, 9)
    assert group.ack("ann", [Receipt(0, 4, 1, 0)], 2) == []
    assert group.floor == 10
    assert group.ack("ann", [deliver.receipt], 3) == [Stale(0, 10, 1, 0)]


def test_ps_6_a_stale_delivery_number_changes_nothing() -> None:
    group = a_group(3)
    group.take(0)
    group.nack("ann", [Receipt(1, 2, 1, 0)], 0, "", 1)
    assert taken(group) == [("ann", 1, 2, 2)]
    before = group.save()
    told = group.ack("ann", [Receipt(1, 2, 1, 0)], 2)
    assert told == [Stale(1, 2, 1, 0)]
    assert Stale.code == "ACK_STALE"
    assert group.save() == before
    assert group.nack("ann", [Receipt(1, 2, 1, 0)], 0, "", 2) == [Stale(1, 2, 1, 0)]
    assert group.in_progress("ann", [Receipt(1, 2, 3, 0)], 2) == [Stale(1, 2, 3, 0)]
    assert group.save() == before


def test_ps_6_each_message_of_a_request_counts_on_its_own() -> None:
    group = a_group(10)
    group.take(0)
    group.ack("ann", [Receipt(3, 5, 1, 0)], 1)
    told = group.ack("ann", [Receipt(0, 12, 1, 0), Receipt(0, 1, 1, 0)], 1)
    assert told == [Stale(3, 5, 1, 0), Stale(10, 12, 1, 0), Stale(0, 1, 1, 0)]
    assert group.floor == 10


def test_ps_6_who_does_not_have_a_message_cannot_ack_it() -> None:
    group = a_group(4, members=["ann", "bob"])
    assert taken(group) == [("ann", 0, 2, 1), ("bob", 2, 4, 1)]
    assert group.ack("bob", [Receipt(0, 4, 1, 0)], 1) == [Stale(0, 2, 1, 0)]
    with pytest.raises(DeliveryError) as caught:
        group.ack("eve", [Receipt(0, 4, 1, 0)], 1)
    assert caught.value.code == "NOT_MEMBER"


# --- PS-7: nacks ----------------------------------------------------------------------------------


def test_ps_7_a_nack_comes_again_at_once_with_the_next_number_lowest_first() -> None:
    group = a_group(5, credit=5)
    group.take(0)
    group.appended(8, 1)
    group.nack("ann", [Receipt(3, 4, 1, 0), Receipt(1, 2, 1, 0)], 0, "", 1)
    assert taken(group) == [("ann", 1, 2, 2), ("ann", 3, 4, 2)]
    group.ack("ann", [Receipt(0, 1, 1, 0)], 2)
    assert taken(group) == [("ann", 5, 6, 1)]


def test_ps_7_a_nack_goes_to_any_member() -> None:
    group = a_group(1, members=["ann", "bob"])
    assert taken(group) == [("ann", 0, 1, 1)]
    group.nack("ann", [Receipt(0, 1, 1, 0)], 0, "", 1)
    assert taken(group) == [("bob", 0, 1, 2)]


def test_ps_7_a_delay_is_kept_and_survives_a_restart() -> None:
    group = a_group(2)
    group.take(0)
    group.nack("ann", [Receipt(0, 1, 1, 0)], 50, "later", 10)
    assert group.deadline() == 60
    group.tick(59)
    assert taken(group, 59) == []
    group = restarted(group)
    group.join("bob", 59)
    group.grant("bob", 1, 59)
    assert group.deadline() == 60
    group.tick(59)
    assert taken(group, 59) == [("bob", 1, 2, 2)]
    group.ack("bob", [Receipt(1, 2, 2, 0)], 59)
    group.tick(60)
    assert taken(group, 60) == [("bob", 0, 1, 2)]


@pytest.mark.parametrize("delay", [-1, LONGEST_DELAY + 1])
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("block", [False, True])
def test_ps_7_a_delay_is_at_most_366_days(delay: int, exclusive: bool, block: bool) -> None:
    group = a_group(exclusive=exclusive)
    group.take(0)
    [epoch] = {flight.epoch for _, _, flight in group.members["ann"].flights}
    receipt = Receipt(0, 1, 1, epoch)
    with pytest.raises(DeliveryError) as caught:
        group.nack("ann", [receipt], delay, "", 0, block=block)
    assert caught.value.code == "BAD_DELAY"
    assert LONGEST_DELAY == 366 * DAY
    group.nack("ann", [receipt], LONGEST_DELAY, "", 0, block=block)
    assert group.deadline() == LONGEST_DELAY
    again = Group(group.config, group.save(), 0, group.first, group.end)
    again.tick(1)
    assert again.deadline() == LONGEST_DELAY


def test_ps_7_a_delay_holds_back_that_message_and_a_block_the_whole_group() -> None:
    group = a_group(10, credit=2)
    group.take(0)
    group.nack("ann", [Receipt(0, 1, 1, 0)], 100, "later", 0)
    assert taken(group) == [("ann", 2, 3, 1)], "others go on"
    group.nack("ann", [Receipt(1, 2, 1, 0)], 50, "nobody there", 10, block=True)
    assert taken(group, 10) == []
    assert group.explain(10).code == "BLOCKED"
    assert group.ack("ann", [Receipt(2, 3, 1, 0)], 20) == [], "what a member has it may ack"
    assert taken(group, 59) == []
    assert group.deadline() == 60
    again = restarted(group)
    again.join("bob", 59)
    again.grant("bob", 1, 59)
    assert taken(again, 59) == [], "a restart does not end it"
    group.tick(60)
    assert taken(group, 60) == [("ann", 1, 2, 2), ("ann", 3, 4, 1)]


def test_ps_7_of_two_blocks_the_longer_counts_and_a_stale_one_does_not() -> None:
    group = a_group(10, credit=3)
    group.take(0)
    group.nack("ann", [Receipt(0, 1, 1, 0)], 100, "", 0, block=True)
    group.nack("ann", [Receipt(1, 2, 1, 0)], 10, "", 0, block=True)
    group.nack("ann", [Receipt(1, 2, 1, 0)], 1000, "", 0, block=True)
    assert group.pause == (100, 100)
    with pytest.raises(DeliveryError, match="for how long"):
        group.nack("ann", [Receipt(2, 3, 1, 0)], 0, "", 0, block=True)


def test_ps_7_a_clock_that_goes_back_does_not_make_a_delay_longer_than_it_is() -> None:
    group = a_group(1)
    group.take(1_000_000)
    group.nack("ann", [Receipt(0, 1, 1, 0)], 50, "", 1_000_000)
    group.appended(1, 2_000)  # the clock has gone back
    assert group.deadline() == 2_050
    group.tick(2_050)
    assert taken(group, 2_050) == [("ann", 0, 1, 2)]


def test_ps_7_the_clock_of_another_node_does_not_make_a_delay_longer_than_it_is() -> None:
    group = a_group(1)
    group.take(1_000_000)
    group.nack("ann", [Receipt(0, 1, 1, 0)], 50, "", 1_000_000)
    group = restarted(group)
    group.join("ann", 70)
    assert group.deadline() == 120


# --- PS-8: members that go ------------------------------------------------------------------------


def test_ps_8_the_messages_of_a_dead_member_come_again_at_once() -> None:
    group = a_group(4, members=["ann", "bob"])
    taken(group)
    assert group.leave("ann", graceful=False, now=1) == []
    assert taken(group) == [("bob", 0, 2, 2)]


def test_ps_8_a_graceful_leave_does_not_count() -> None:
    group = a_group(4, members=["ann", "bob"])
    taken(group)
    group.leave("ann", graceful=True, now=1)
    assert taken(group) == [("bob", 0, 2, 1)]


def test_ps_8_what_was_released_and_what_is_new_is_one_delivery_if_the_number_is() -> None:
    group = a_group(4)
    taken(group)
    group.leave("ann", graceful=True, now=1)
    group.appended(6, 1)
    group.join("bob", 1)
    group.grant("bob", 10, 1)
    assert taken(group) == [("bob", 0, 6, 1)]


def test_ps_8_without_ack_wait_a_member_may_take_its_time() -> None:
    group = a_group(4)
    group.take(0)
    assert group.deadline() is None
    assert group.tick(DAY * 400) == []
    assert group.ack("ann", [Receipt(0, 4, 1, 0)], DAY * 400) == []


def test_ps_8_ack_wait_takes_messages_back_unless_they_are_in_progress() -> None:
    group = a_group(4, ack_wait=10)
    group.take(0)
    assert group.deadline() == 10
    group.in_progress("ann", [Receipt(1, 2, 1, 0)], 9)
    group.tick(10)
    assert group.deadline() == 19
    assert taken(group, 11) == [("ann", 0, 1, 2), ("ann", 2, 4, 2)]
    assert group.ack("ann", [Receipt(0, 2, 1, 0)], 12) == [Stale(0, 1, 1, 0)]
    assert group.deadline() == 21


def test_ps_8_a_long_ack_wait_ends_in_time_or_a_64th_later() -> None:
    group = a_group(2, credit=1, ack_wait=30_000_000)
    group.take(7)
    group.grant("ann", 2, 8)
    group.take(9)
    deadline = group.deadline()
    assert deadline is not None
    assert 30_000_009 <= deadline <= 30_000_009 + 30_000_000 // 64
    group.tick(deadline)
    assert taken(group, deadline) == [("ann", 0, 2, 2)], "they have one timer"


def test_ps_8_an_ack_that_comes_late_but_before_the_message_is_taken_back_counts() -> None:
    group = a_group(1, ack_wait=10)
    group.take(0)
    assert group.ack("ann", [Receipt(0, 1, 1, 0)], 11) == []
    assert group.deadline() is None
