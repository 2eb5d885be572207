"""One group, rule by rule: exclusive groups, credit, and why it receives nothing (PS-12, PS-13)."""

from __future__ import annotations

import doctest
import importlib

import pytest
from tests.broker.protocol.group_play import a_group, taken

from railgun.broker.protocol.groups import (
    Deliver,
    DeliveryError,
    Group,
    GroupConfig,
    HandedOver,
    Joined,
    Recalled,
    Receipt,
    Saved,
    Stale,
)
from railgun.broker.protocol.groups.messages import DAY


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


# --- PS-12: exclusive groups ----------------------------------------------------------------------


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
