"""One group of a persistent stream, rule by rule. The names are those of the rows of the design page."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Sequence

import pytest

from railgun.broker.protocol.groups import (
    Bury,
    Cut,
    Deliver,
    DeliveryError,
    Group,
    GroupConfig,
    HandedOver,
    Joined,
    Kind,
    Missed,
    Recalled,
    Receipt,
    Saved,
    Settled,
    Sought,
    Stale,
    Standing,
    Stands,
    Unsettled,
)
from railgun.broker.protocol.groups.messages import DAY, LONGEST_DELAY


def a_group(
    end: int = 10, credit: int = 100, members: Sequence[str] = ("ann",), **config: object
) -> Group:
    """A group at offset 0 of a stream of so many messages, with members that have credit."""
    group = Group(GroupConfig(**config), None, 0, 0, end)  # type: ignore[arg-type]
    for member in members:
        group.join(member, 0)
        group.grant(member, credit, 0)
    return group


def taken(group: Group, now: int = 0) -> list[tuple[str, int, int, int]]:
    """Who gets which, by what delivery number."""
    told = [(d.member, d.first, d.end, d.delivery) for d in group.take(now)]
    group.validate()
    return told


def restarted(group: Group, first: int | None = None, end: int | None = None) -> Group:
    """The group after its node was gone and came back."""
    first = group.first if first is None else first
    return Group(group.config, group.save(), 0, first, group.end if end is None else end)


@pytest.mark.parametrize(
    "module",
    ["ranges", "messages", "shares", "persisted", "dead_letters", "state", "group", "explain"],
)
def test_examples_run(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"railgun.broker.protocol.groups.{module}"))
    assert results.failed == 0


def test_the_transcript_is_as_recorded() -> None:
    results = doctest.testfile("test_groups_transcript.txt", encoding="utf-8")
    assert results.attempted > 15
    assert results.failed == 0


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


def test_ps_12_an_exclusive_group_stays_exclusive_while_it_is_empty() -> None:
    group = Group(GroupConfig(exclusive=True), None, 0, 0, 10)
    log = Saved()
    for change in group.changes():
        log.apply(change)
    assert log == group.save()
    again = Group(GroupConfig(), log, 0, 0, 10)
    assert again.config.exclusive
    with pytest.raises(DeliveryError) as caught:
        again.configure(GroupConfig(), 0)
    assert caught.value.code == "GROUP_KIND"
    log.exclusive = None  # as it was written by an older node
    old = Group(GroupConfig(), log, 0, 0, 10)
    assert old.kind is None
    old.configure(GroupConfig(exclusive=True), 0)
    assert old.kind


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


# --- PS-10: positions -----------------------------------------------------------------------------


def test_ps_10_the_position_is_the_groups_and_not_a_members() -> None:
    group = a_group(6)
    group.take(0)
    group.ack("ann", [Receipt(0, 3, 1, 0)], 1)
    group.leave("ann", graceful=True, now=1)
    assert group.join("bob", 2) == [Joined("bob", 3, "start", True)]
    group = restarted(group)
    assert group.join("eve", 3) == [Joined("eve", 3, "tracked", True)]


def test_ps_10_a_restart_counts_what_was_in_flight() -> None:
    group = a_group(6)
    group.take(0)
    group.ack("ann", [Receipt(2, 4, 1, 0)], 1)
    group = restarted(group)
    group.join("bob", 2)
    group.grant("bob", 9, 2)
    assert taken(group) == [("bob", 0, 2, 2), ("bob", 4, 6, 2)]


def test_ps_10_changes_say_how_things_stand_and_not_what_happened() -> None:
    group = a_group(1000, credit=1000)
    assert group.changes() == [Sought(0, 0), Kind(False)]
    group.take(0)
    assert group.changes() == [Unsettled(0, 1000, Standing(1, spared=1))]
    for first in range(0, 900, 100):
        group.ack("ann", [Receipt(first, first + 100, 1, 0)], 1)
    assert group.changes() == [Stands(0, 899), Settled(0, 900)]
    assert group.changes() == []


def test_ps_10_a_group_that_was_further_than_the_stream_does_not_skip_what_comes_there() -> None:
    group = a_group(10)
    group.take(0)
    group.ack("ann", [Receipt(0, 10, 1, 0)], 0)
    log = Saved()
    for change in group.changes():
        log.apply(change)
    group = restarted(group, end=6)
    assert group.changes() == [Cut(6)]
    log.apply(Cut(6))
    assert log == group.save()
    group.join("bob", 1)
    group.grant("bob", 9, 1)
    group.appended(8, 1)
    assert taken(group) == [("bob", 6, 8, 1)]


# --- Damage: what cannot be read ------------------------------------------------------------------


@pytest.mark.parametrize("exclusive", [False, True])
def test_nothing_from_the_damage_on_is_delivered_and_what_was_not_sent_does_not_count(
    exclusive: bool,
) -> None:
    group = a_group(10, credit=8, exclusive=exclusive, max_deliveries=1)
    [deliver] = group.take(0)
    assert (deliver.first, deliver.end) == (0, 8)
    group.unreadable(5)
    assert group.unsent("ann", [Receipt(5, 8, 1, deliver.epoch)], 0) == []
    group.validate()
    assert group.letters(0) == [], "no delivery counted"
    assert taken(group) == [], "5 to 9 cannot be read"
    assert group.at_damage()
    assert group.explain(0).code == "DAMAGED"
    group.nack("ann", [Receipt(4, 5, 1, deliver.epoch)], 0, "no", 0)
    assert [bury.offset for bury in group.letters(0)] == [4]
    assert group.ack("ann", [Receipt(0, 4, 1, deliver.epoch)], 0) == []


def test_what_was_trimmed_meanwhile_is_missed_when_it_comes_back_unsent() -> None:
    group = a_group(10, credit=8)
    [deliver] = group.take(0)
    assert group.trimmed(3, 0) == [], "ann has them"
    assert group.unsent("ann", [Receipt(0, 8, 1, deliver.epoch)], 0) == [Missed(0, 3)]
    assert group.floor == 3


def test_an_exclusive_group_takes_back_what_lies_above_what_was_not_sent() -> None:
    group = a_group(10, credit=8, exclusive=True)
    [deliver] = group.take(0)
    told = group.unsent("ann", [Receipt(2, 5, 1, deliver.epoch)], 0)
    assert told == [Recalled("ann", 5, 8)]
    group.validate()
    assert [(one.first, one.end) for one in group.take(0)] == [(2, 8)]


def test_texts_for_people_tell_times_in_seconds() -> None:
    group = a_group(2, credit=1)
    group.take(0)
    group.nack("ann", [Receipt(0, 1, 1, 0)], 2_500_000, "no", 0)
    group.take(0)
    group.ack("ann", [Receipt(1, 2, 1, 0)], 0)
    assert group.explain(0).text.endswith("the first for 2.5 s")
    with pytest.raises(DeliveryError, match="a delay of -1 s"):
        group.nack("ann", [Receipt(0, 1, 1, 0)], -1_000_000, "no", 0)


def test_what_can_be_read_before_the_damage_is_delivered_first() -> None:
    group = a_group(10, credit=2)
    group.unreadable(3)
    assert taken(group) == [("ann", 0, 2, 1)]
    assert not group.at_damage(), "2 is to come"
    group.nack("ann", [Receipt(0, 1, 1, 0)], 50, "later", 0)
    assert taken(group) == [("ann", 2, 3, 1)]
    assert not group.at_damage(), "0 is delayed"
    group.ack("ann", [Receipt(1, 3, 1, 0)], 1)
    group.tick(50)
    assert not group.at_damage(), "0 waits"
    assert taken(group, 50) == [("ann", 0, 1, 2)]
    assert group.at_damage()
    assert not a_group(10).at_damage(), "nothing is damaged"


# --- PS-11: dead letters --------------------------------------------------------------------------


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
    with pytest.raises(DeliveryError, match="the rules stay"):
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


# --- PS-12: exclusive groups ----------------------------------------------------------------------


def test_ps_12_one_member_receives_and_the_next_after_it_has_left() -> None:
    group = Group(GroupConfig(exclusive=True), None, 0, 0, 10)
    assert group.join("ann", 0) == [Joined("ann", 0, "start", True), HandedOver("ann", 1)]
    assert group.join("bob", 0) == [Joined("bob", 0, "start", False)]
    group.grant("ann", 4, 0)
    group.grant("bob", 4, 0)
    assert group.take(0) == [Deliver("ann", 0, 4, 1, 1)]
    group.ack("ann", [Receipt(0, 1, 1, 1), Receipt(2, 3, 1, 1)], 0)
    assert group.leave("ann", graceful=False, now=1) == [HandedOver("bob", 2)]
    assert group.take(1) == [
        Deliver("bob", 1, 2, 2, 2),
        Deliver("bob", 3, 4, 2, 2),
        Deliver("bob", 4, 6, 1, 2),
    ]
    assert group.ack("bob", [Receipt(1, 2, 2, 1)], 2) == [Stale(1, 2, 2, 1)], "the epoch before"


def test_ps_12_a_nack_recalls_what_is_above_and_all_come_in_order() -> None:
    group = a_group(10, credit=5, exclusive=True)
    group.take(0)
    told = group.nack("ann", [Receipt(2, 3, 1, 1)], 0, "", 1)
    assert told == [Recalled("ann", 3, 5)]
    assert group.ack("ann", [Receipt(1, 2, 1, 1)], 2) == [], "what is below it still has"
    assert group.ack("ann", [Receipt(3, 4, 1, 1)], 2) == [Stale(3, 4, 1, 1)]
    assert group.take(2) == [Deliver("ann", 2, 3, 2, 2), Deliver("ann", 3, 6, 1, 2)]
    assert group.ack("ann", [Receipt(3, 4, 1, 1)], 2) == [Stale(3, 4, 1, 1)], "not this delivery"


def test_ps_12_a_delay_pauses_the_group() -> None:
    group = a_group(10, credit=5, exclusive=True)
    group.take(0)
    group.nack("ann", [Receipt(2, 3, 1, 1)], 50, "", 0)
    assert taken(group, 49) == []
    assert group.explain(10).code == "PAUSED"
    assert "from offset 2 on" in str(group.explain(10))
    group.tick(50)
    assert taken(group, 50) == [("ann", 2, 3, 2), ("ann", 3, 5, 1)]


def test_ps_12_a_letter_that_is_being_written_pauses_the_group() -> None:
    group = a_group(10, credit=2, exclusive=True, max_deliveries=1)
    group.take(0)
    group.nack("ann", [Receipt(0, 1, 1, 1)], 0, "", 0)
    assert taken(group) == []
    [bury] = group.letters(0)
    assert taken(group) == []
    group.buried(bury.offset, 1)
    assert taken(group) == [("ann", 1, 3, 1)]


def test_ps_12_an_ack_wait_that_is_over_recalls_too() -> None:
    group = a_group(3, exclusive=True, ack_wait=10)
    group.take(0)
    group.in_progress("ann", [Receipt(2, 3, 1, 1)], 5)
    assert group.tick(10) == [Recalled("ann", 2, 3)]
    assert taken(group) == [("ann", 0, 2, 2), ("ann", 2, 3, 1)]


# --- PS-13: credit --------------------------------------------------------------------------------


def test_ps_13_shares_level_the_free_credit() -> None:
    group = a_group(0, members=["ann", "bob", "eve"])
    group.grant("ann", 10, 0)
    group.grant("bob", 6, 0)
    group.grant("eve", 2, 0)
    group.appended(8, 0)
    assert taken(group) == [("ann", 0, 6, 1), ("bob", 6, 8, 1)]
    group.appended(100, 0)
    assert taken(group) == [("ann", 8, 12, 1), ("bob", 12, 16, 1), ("eve", 16, 18, 1)]
    assert taken(group) == []
    assert group.explain(0).code == "NO_CREDIT"


def test_ps_13_equals_are_served_in_turn() -> None:
    group = a_group(0, members=["ann", "bob", "eve"])
    served = []
    for offset in range(6):
        group.appended(offset + 1, offset)
        [deliver] = group.take(offset)
        served.append(deliver.member)
        group.ack(deliver.member, [deliver.receipt], offset)
    assert served == ["ann", "bob", "eve"] * 2


def test_ps_13_nobody_loses_a_message_when_another_joins() -> None:
    group = a_group(6, credit=6)
    taken(group)
    group.join("bob", 1)
    group.grant("bob", 6, 1)
    assert taken(group) == []
    assert group.ack("ann", [Receipt(0, 6, 1, 0)], 2) == []


def test_ps_13_delayed_messages_use_no_credit() -> None:
    group = a_group(4, credit=2)
    assert taken(group) == [("ann", 0, 2, 1)]
    group.nack("ann", [Receipt(0, 2, 1, 0)], 100, "", 0)
    assert taken(group) == [("ann", 2, 4, 1)]


def test_ps_13_a_lower_credit_takes_nothing_back() -> None:
    group = a_group(10, credit=5)
    taken(group)
    group.grant("ann", 2, 0)
    group.ack("ann", [Receipt(0, 3, 1, 0)], 0)
    assert taken(group) == []
    group.ack("ann", [Receipt(3, 4, 1, 0)], 0)
    assert taken(group) == [("ann", 5, 6, 1)]


# --- PS-15/16: where a group begins ---------------------------------------------------------------


@pytest.mark.parametrize("start", [3, 7, 10])
def test_ps_15_a_new_group_begins_where_it_is_told(start: int) -> None:
    group = Group(GroupConfig(), None, start, 3, 10)
    assert group.join("ann", 0) == [Joined("ann", start, "start", True)]
    assert group.changes() == [Sought(start, 0), Kind(False)], "even if nothing is ever acked"


def test_ps_15_a_tracked_position_wins_over_the_start() -> None:
    group = Group(GroupConfig(), Saved(floor=5), 0, 0, 10)
    assert group.join("ann", 0) == [Joined("ann", 5, "tracked", True)]


def test_ps_16_a_seek_begins_anew_and_what_was_in_flight_is_stale() -> None:
    group = a_group(10, distance=3)
    group.take(0)
    group.ack("ann", [Receipt(5, 10, 1, 0)], 0)
    assert group.seek(2, 1, "ann") == [Recalled("ann", 0, 5)]
    assert group.letters(1) == [], "nothing was acked since"
    assert group.take(1) == [Deliver("ann", 2, 10, 1, 1)]
    assert group.ack("ann", [Receipt(2, 5, 1, 0)], 1) == [Stale(2, 5, 1, 0)]
    assert restarted(group).floor == 2


def test_ps_16_a_seek_is_refused_while_others_are_live() -> None:
    group = a_group(10, members=["ann", "bob"])
    with pytest.raises(DeliveryError) as caught:
        group.seek(0, 0, "ann")
    assert caught.value.code == "GROUP_BUSY"
    group.leave("bob", graceful=True, now=0)
    group.seek(0, 0, "ann")
    with pytest.raises(DeliveryError) as caught:
        group.seek(11, 0, "ann")
    assert caught.value.code == "OFFSET_OUT_OF_RANGE"


# --- PS-18: what the stream loses -----------------------------------------------------------------


def test_ps_18_a_group_below_the_first_offset_is_told() -> None:
    group = a_group(10, credit=3)
    taken(group)
    group.nack("ann", [Receipt(1, 2, 1, 0)], 100, "", 0)
    assert group.trimmed(6, 1) == [Missed(1, 2), Missed(3, 6)]
    assert taken(group) == [("ann", 6, 7, 1)]


def test_ps_18_what_a_member_has_it_may_ack_and_if_it_comes_back_it_is_missed() -> None:
    group = a_group(10, credit=4)
    taken(group)
    assert group.trimmed(4, 1) == []
    assert group.ack("ann", [Receipt(0, 2, 1, 0)], 1) == []
    assert group.nack("ann", [Receipt(2, 3, 1, 0)], 0, "", 1) == [Missed(2, 3)]
    assert group.leave("ann", graceful=True, now=2) == [Missed(3, 4)]
    assert group.floor == 4
    assert group.join("bob", 3)[1:] == [Missed(3, 4)], "nobody was there to be told"
    assert group.join("eve", 4)[1:] == []


def test_ps_18_what_was_missed_with_nobody_there_is_told_after_a_restart() -> None:
    group = restarted(a_group(10), first=4)
    log = Saved()
    for change in [*a_group(10).changes(), *group.changes()]:
        log.apply(change)
    group = Group(group.config, log, 0, 4, 10)
    told = group.join("ann", 0)
    assert told == [Joined("ann", 4, "tracked", True), Missed(0, 4)]
    for change in group.changes():
        log.apply(change)
    assert not log.untold


# --- Why a group receives nothing -----------------------------------------------------------------


def test_a_group_explains_itself() -> None:
    group = a_group(2, members=[], max_deliveries=2)
    codes = [group.explain(0).code]
    group.join("ann", 0)
    codes.append(group.explain(0).code)
    group.grant("ann", 2, 0)
    codes.append(group.explain(0).code)
    group.take(0)
    codes.append(group.explain(0).code)
    group.nack("ann", [Receipt(0, 1, 1, 0)], 10, "", 0)
    group.ack("ann", [Receipt(1, 2, 1, 0)], 0)
    codes.append(group.explain(0).code)
    group.tick(10)
    group.take(10)
    group.nack("ann", [Receipt(0, 1, 2, 0)], 10, "", 10)
    codes.append(group.explain(10).code)
    group.letters(10)
    group.buried(0, 10)
    codes.append(group.explain(10).code)
    expected = "NO_MEMBERS NO_CREDIT READY WAITING_FOR_ACKS DELAYED LETTERS AT_END"
    assert codes == expected.split()


def test_a_thousand_messages_are_one_range_in_every_place() -> None:
    group = a_group(1000, credit=1000)
    [deliver] = group.take(0)
    assert len(group.members["ann"].flights) == 1
    group.nack("ann", [deliver.receipt], 5, "", 0)
    assert len(group.delayed) == 1
    group.tick(5)
    assert len(group.waiting) == 1
    [deliver] = group.take(5)
    group.ack("ann", [deliver.receipt], 5)
    assert len(group.changes()) == 4
    assert group.save() == Saved(floor=1000, highest=999, exclusive=False)


def test_timers_that_are_for_nothing_do_not_pile_up() -> None:
    group = a_group(0, ack_wait=64)
    for now in range(5000):
        group.appended(now + 1, now)
        [deliver] = group.take(now)
        group.nack("ann", [deliver.receipt], DAY, "", now)
        [_] = group.trimmed(now + 1, now)
    assert len(group.timers) <= 1100
    assert group.deadline() is None


def test_a_name_that_is_used_again_does_not_inherit_timers() -> None:
    group = a_group(2, ack_wait=10)
    group.take(0)
    group.leave("ann", graceful=True, now=1)
    group.join("ann", 2)
    group.grant("ann", 2, 2)
    assert taken(group, 2) == [("ann", 0, 2, 1)]
    group.tick(10)
    group.validate()
    assert group.deadline() == 12
