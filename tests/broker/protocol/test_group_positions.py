"""One group, rule by rule: positions, seeks, damage, and what the stream loses (PS-10, PS-15 to PS-18)."""

from __future__ import annotations

import pytest
from tests.broker.protocol.group_play import a_group, restarted, taken

from railgun.broker.protocol.groups import (
    Cut,
    Deliver,
    DeliveryError,
    Group,
    GroupConfig,
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
    assert not log.unreported
