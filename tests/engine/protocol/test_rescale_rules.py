"""One test per rule of docs/design/rescale.md, on a single machine: what it is told, what it answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verification.playbook import Playbook
from verification.rescale.rows import Item, Rows

from railgun.engine.protocol.frontier import LAST, MAX, MIN
from railgun.engine.protocol.placement import Placement
from railgun.engine.protocol.rescale import Distributor
from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.order import Order
from railgun.engine.protocol.rescale.phase import TRANSITIONS
from railgun.errors import ProtocolError

K1, K2, K3 = 1, 2, 3
F = Placement.of([0, 1], keys={K1: 0, K2: 1, K3: 0})
"""Before: k1 and k3 at 0, k2 at 1."""
G = Placement.of([0, 1, 2], keys={K1: 2, K2: 1, K3: 0})
"""After: k1 moves to 2, the others stay."""


def rows(*items: tuple[int, int, int]) -> Rows:
    return Rows(Item(key, origin, seq) for key, origin, seq in items)


def hashes(*keys: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(keys, dtype=np.uint64)


def interrogated(*keys: int) -> m.Interrogated:
    """The operators name these keys, in this order."""
    return m.Interrogated(Order.of([hashes(*keys)]))


def worker(number: int, downstream: int = 0) -> Playbook:
    """A worker of a cluster of three that is not in motion."""
    return Playbook(Distributor(number, F, [0, 1, 2], stage="s", downstream=downstream))


def home() -> Playbook:
    """Worker 0, home of k1, asking its operators."""
    return worker(0).on(m.Rescale(1, G), "→1 Heard", "report started 1", "interrogate")


def collecting() -> Playbook:
    """Worker 0 with k1 in its whitelist, ready to move it."""
    play = home().on(interrogated(K1))
    return play.gets(1, m.Heard(1, MIN)).gets(2, m.Heard(1, MIN))


def settling() -> Playbook:
    """Worker 0 after it has given k1 away."""
    play = collecting().on(m.Move(), "collect {k1} for 2")
    return play.on(
        m.Collected(({K1: ({0: 1}, False, 0)},)),
        "→2 Acquire chunk 1 {k1} [k1=1@0]",
        "drop {k1}",
        "→1 Done",
        "→2 Done",
        "→1 Flushed(0)",
        "→2 Flushed(0)",
    )


def new_owner() -> Playbook:
    """Worker 2, new owner of k1."""
    return worker(2).on(m.Rescale(1, G), "→0 Heard", "→1 Heard", "report started 1")


# ---------------------------------------------------------------- rule 1


def test_rule_1_a_sender_routes_to_the_home_until_it_has_switched() -> None:
    play = worker(2)
    play.on(m.Local(rows((K1, 2, 1))), "→0 Data/0 k1#1@2")
    play.on(m.Rescale(1, G), "→0 Heard", "→1 Heard", "report started 1")
    play.on(m.Local(rows((K1, 2, 2), (K2, 2, 1))), "→0 Data/0 k1#2@2", "→1 Data/0 k2#1@2")
    play.gets(0, m.Done(1), "→0 Flush")
    # Switched for home 0, not for home 1; k1 is its own now, but waits for Flushed.
    play.on(
        m.Local(rows((K1, 2, 3), (K2, 2, 2), (K3, 2, 1))), "→1 Data/0 k2#2@2", "→0 Data/1 k3#1@2"
    )


def test_rule_1_rows_keep_their_order_within_an_owner() -> None:
    play = worker(2)
    play.on(
        m.Local(rows((K1, 2, 1), (K2, 2, 1), (K1, 2, 2), (K3, 2, 1), (K1, 2, 3))),
        "→0 Data/0 k1#1@2 k1#2@2 k3#1@2 k1#3@2",
        "→1 Data/0 k2#1@2",
    )


def test_rule_1_keys_that_stay_are_never_held() -> None:
    collecting().gets(1, m.Data(0, rows((K3, 1, 1))), "process k3#1@1")
    settling().gets(1, m.Data(0, rows((K3, 1, 1))), "process k3#1@1")


# ---------------------------------------------------------------- rules 2 and 3


def test_rule_2_normal_processes() -> None:
    worker(0).gets(1, m.Data(0, rows((K1, 1, 1))), "process k1#1@1")


def test_rule_2_interrogate_records_and_processes() -> None:
    play = home()
    play.gets(1, m.Data(0, rows((K1, 1, 1))), "process k1#1@1")
    play.on(interrogated()).gets(1, m.Heard(1, MIN)).gets(2, m.Heard(1, MIN))
    play.on(m.Move(), "collect {k1} for 2")


def test_rule_2_collect_processes_whitelisted_keys() -> None:
    collecting().gets(1, m.Data(0, rows((K1, 1, 1))), "process k1#1@1")


def test_rule_2_collect_buffers_held_keys_and_forwards_them_behind_the_state() -> None:
    play = collecting().on(m.Move(), "collect {k1} for 2")
    play.gets(1, m.Data(0, rows((K1, 1, 1))))
    play.on(
        m.Collected(({},)),
        "→2 Acquire chunk 1 {k1}",
        "→2 FWD k1#1@1",
        "drop {k1}",
        "→1 Done",
        "→2 Done",
        "→1 Flushed(0)",
        "→2 Flushed(0)",
    )


def test_rule_2_what_is_neither_is_forwarded() -> None:
    settling().gets(1, m.Data(0, rows((K1, 1, 1), (K3, 1, 1))), "process k3#1@1", "→2 FWD k1#1@1")


def test_rule_3_interrogate_records_only_what_has_to_move() -> None:
    play = home().gets(1, m.Data(0, rows((K3, 1, 1))), "process k3#1@1")
    play.on(interrogated())
    play.gets(1, m.Heard(1, MIN))
    play.gets(2, m.Heard(1, MIN), "→1 Done", "→2 Done", "→1 Flushed(0)", "→2 Flushed(0)")


def test_rule_3_state_and_forwarded_records_are_accepted_while_the_new_owner_asks_its_operators() -> (
    None
):
    there = Placement.of([0, 1], keys={K1: 1, K2: 0})
    play = Playbook(Distributor(1, Placement.of([0, 1], keys={K1: 0, K2: 1})))
    play.on(m.Rescale(1, there), "→0 Heard", "report started 1", "interrogate")
    play.gets(0, m.Acquire(1, 1, hashes(K1), {K1: ({}, False, 0)}), "take {k1} [k1=]")
    play.gets(0, m.Forward(1, rows((K1, 0, 1))), "process k1#1@0")


# ---------------------------------------------------------------- rules 4 to 9


def test_rule_4_keys_move_in_chunks_to_each_new_owner() -> None:
    keys = range(1, 6)
    old = Placement.of([0], keys=dict.fromkeys(keys, 0))
    new = Placement.of([0, 1, 2], keys={k: 1 + k % 2 for k in keys})
    play = Playbook(Distributor(0, old, [0, 1, 2]))
    play.on(m.Rescale(1, new), "report started 1", "interrogate")
    play.on(interrogated(*keys)).gets(1, m.Heard(1, MIN)).gets(2, m.Heard(1, MIN))
    play.on(m.Move(3), "collect {k2} for 1, {k1 k3} for 2")
    play.on(
        m.Collected(({}, {})),
        "→1 Acquire chunk 1 {k2}",
        "→2 Acquire chunk 1 {k1 k3}",
        "drop {k1 k2 k3}",
    )
    play.gets(1, m.Data(0, rows((2, 1, 1), (4, 1, 1))), "process k4#1@1", "→1 FWD k2#1@1")
    play.on(m.Move(3), "collect {k4} for 1, {k5} for 2")


def test_rule_4_keys_leave_in_the_order_in_which_they_are_named() -> None:
    old = Placement.of([0], keys=dict.fromkeys(range(1, 6), 0))
    new = Placement.of([1], keys=dict.fromkeys(range(1, 6), 1))
    play = Playbook(Distributor(0, old, [0, 1]))
    play.on(m.Rescale(1, new), "report started 1", "interrogate")
    play.on(m.Local(rows((5, 0, 1), (2, 0, 1))), "process k5#1@0 k2#1@0")
    play.on(interrogated(3, 1, 4, 3, 2)).gets(1, m.Heard(1, MIN))
    play.on(m.Move(2), "collect {k3 k1} for 1")
    # k1 and k3 are on hold; k2, between them, is in the whitelist, and so is k5, which was not named.
    play.on(m.Local(rows((1, 0, 1), (2, 0, 2), (3, 0, 1), (5, 0, 2))), "process k2#2@0 k5#2@0")
    play.on(
        m.Collected(({},)),
        "→1 Acquire chunk 1 {k3 k1}",
        "→1 FWD k1#1@0 k3#1@0",
        "drop {k3 k1}",
    )
    play.on(m.Local(rows((1, 0, 2), (4, 0, 1))), "process k4#1@0", "→1 FWD k1#2@0")
    play.on(m.Move(2), "collect {k4 k2} for 1").on(
        m.Collected(({},)), "→1 Acquire chunk 2 {k4 k2}", "drop {k4 k2}"
    )
    play.on(m.Local(rows((4, 0, 2), (5, 0, 3))), "process k5#3@0", "→1 FWD k4#2@0")
    play.on(m.Move(2), "collect {k5} for 1")


def test_rule_4_the_driver_is_told_the_turns_of_what_leaves() -> None:
    old = Placement.of([0], keys=dict.fromkeys(range(1, 7), 0))
    new = Placement.of([0, 1, 2], keys={key: key % 3 for key in range(1, 7)})
    worker = Distributor(0, old, [0, 1, 2])
    worker.handle(m.Rescale(1, new))
    worker.handle(interrogated(5, 1, 4, 5, 2))  # k3 stays, k5 is named twice
    for peer in (1, 2):
        worker.handle(m.Received(peer, m.Heard(1, MIN)))
    told = []
    while worker.movable:
        (collect,) = worker.handle(m.Move(3))
        assert isinstance(collect, m.Collect)
        for (to, keys), turns in zip(collect.parts, collect.turns, strict=True):
            told.append((to, keys.tolist(), turns.tolist()))
        worker.handle(m.Collected(tuple({} for _ in collect.parts)))
    assert told == [(1, [1, 4], [1, 2]), (2, [5], [0]), (2, [2], [3])]


@given(st.lists(st.lists(st.integers(0, 20)), max_size=5), st.lists(st.integers(0, 25)))
def test_the_first_time_a_key_is_named_counts(named: list[list[int]], asked: list[int]) -> None:
    order = Order.of([hashes(*keys) for keys in named])
    order.validate()
    wanted = list(dict.fromkeys(key for keys in named for key in keys))
    assert order.hashes.tolist() == wanted
    turns = [wanted.index(key) if key in wanted else -1 for key in asked]
    assert order.find(hashes(*asked)).tolist() == turns
    late = order.then([hashes(*asked[:3]), hashes(*asked[3:])])
    late.validate()
    assert late.hashes.tolist() == list(dict.fromkeys([*wanted, *asked]))


def test_rule_4_one_chunk_at_a_time() -> None:
    play = collecting().on(m.Move(), "collect {k1} for 2")
    assert not play.machine.movable
    play.on(m.Move())


def test_rule_5_done_is_told_when_nothing_is_left() -> None:
    settling()


def test_rule_6_a_sender_flushes_then_switches() -> None:
    play = new_owner().gets(0, m.Done(1), "→0 Flush")
    play.on(m.Local(rows((K3, 2, 1))), "→0 Data/1 k3#1@2")


def test_rule_7_a_home_tells_the_new_owners_who_has_flushed() -> None:
    play = settling().gets(2, m.Flush(1), "→1 Flushed(2)", "→2 Flushed(2)")
    play.gets(1, m.Flush(1), "→1 Flushed(1)", "→2 Flushed(1)")


def test_rule_8_a_new_record_waits_for_flushed_of_its_sender() -> None:
    play = new_owner().gets(1, m.Data(1, rows((K1, 1, 2))))
    play.gets(0, m.Flushed(1, 2))
    play.gets(0, m.Forward(1, rows((K1, 1, 1))), "process k1#1@1")
    play.gets(0, m.Flushed(1, 1), "process k1#2@1")
    play.gets(1, m.Data(1, rows((K1, 1, 3))), "process k1#3@1")


def test_rule_9_complete_when_switched_flushed_and_settled() -> None:
    play = settling()
    play.gets(2, m.Flush(1), "→1 Flushed(2)", "→2 Flushed(2)")
    play.gets(1, m.Flush(1), "→1 Flushed(1)", "→2 Flushed(1)")
    play.gets(1, m.Done(1), "→1 Flush")
    play.gets(1, m.Flushed(1, 1)).gets(1, m.Flushed(1, 2))
    play.gets(1, m.Flushed(1, 0), "report completed 1")
    assert play.machine.placement == G
    assert play.machine.epoch == 1


def test_rule_9_the_next_rescale_starts_only_after_this_one() -> None:
    with pytest.raises(ProtocolError, match="cannot begin a rescale"):
        collecting().machine.handle(m.Rescale(2, F))


# ---------------------------------------------------------------- rule 10


def test_rule_10_one_layer_when_nothing_is_in_motion() -> None:
    play = worker(0).on(m.StartSnapshot(1), "→1 BAR2(1)", "→2 BAR2(1)")
    play.on(m.Local(rows((K1, 0, 1))))  # behind the cut
    play.gets(1, m.Bar2(1))
    play.gets(1, m.Data(0, rows((K1, 1, 1))))  # behind the cut too
    play.gets(2, m.Data(0, rows((K1, 2, 1))), "process k1#1@2")
    play.gets(2, m.Bar2(1), "take snapshot 1", "process k1#1@1", "process k1#1@0")


def test_rule_10_two_layers_during_a_migration() -> None:
    play = settling().on(m.StartSnapshot(1), "→1 BAR1(1)", "→2 BAR1(1)")
    play.gets(2, m.Bar1(1))
    play.gets(1, m.Data(0, rows((K1, 1, 1))), "→2 FWD k1#1@1")
    play.gets(1, m.Bar1(1), "→1 BAR2(1)", "→2 BAR2(1)")
    play.gets(1, m.Bar2(1))
    play.gets(2, m.Bar2(1), "take snapshot 1")


def test_rule_10_no_bar2_while_a_key_is_on_hold() -> None:
    play = collecting().on(m.Move(), "collect {k1} for 2")
    play.on(m.StartSnapshot(1), "→1 BAR1(1)", "→2 BAR1(1)")
    play.gets(1, m.Bar1(1)).gets(2, m.Bar1(1))
    play.on(
        m.Collected(({},)),
        "→2 Acquire chunk 1 {k1}",
        "drop {k1}",
        "→1 Done",
        "→2 Done",
        "→1 BAR2(1)",
        "→2 BAR2(1)",
    )


def test_rule_10_no_new_chunk_from_bar1_of_all_until_the_snapshot() -> None:
    play = collecting().on(m.StartSnapshot(1), "→1 BAR1(1)", "→2 BAR1(1)")
    assert play.machine.movable
    play.gets(1, m.Bar1(1)).gets(2, m.Bar1(1), "→1 BAR2(1)", "→2 BAR2(1)")
    assert not play.machine.movable
    play.on(m.Move())
    play.gets(1, m.Bar2(1)).gets(2, m.Bar2(1), "take snapshot 1")
    assert play.machine.movable


def test_rule_10_no_switch_between_barrier_and_snapshot() -> None:
    play = new_owner().on(m.StartSnapshot(1), "→0 BAR2(1)", "→1 BAR2(1)")
    play.gets(0, m.Bar1(1)).gets(0, m.Done(1)).gets(0, m.Bar2(1))
    play.gets(1, m.Bar2(1), "take snapshot 1", "→0 Flush")


def test_rule_10_the_snapshot_waits_for_records_that_wait() -> None:
    play = new_owner().gets(1, m.Data(1, rows((K1, 1, 1))))
    play.on(m.StartSnapshot(1), "→0 BAR2(1)", "→1 BAR2(1)")
    play.gets(1, m.Bar2(1)).gets(0, m.Bar1(1))
    play.gets(0, m.Flushed(1, 1), "process k1#1@1")
    play.gets(0, m.Bar2(1), "take snapshot 1")


def test_rule_10_a_rescale_does_not_begin_inside_a_snapshot() -> None:
    play = worker(0).on(m.StartSnapshot(1), "→1 BAR2(1)", "→2 BAR2(1)")
    with pytest.raises(ProtocolError, match="while a snapshot was on its way"):
        play.machine.handle(m.Rescale(1, G))


# ---------------------------------------------------------------- rule 11


def test_rule_11_the_frontier_is_the_minimum_over_senders() -> None:
    play = worker(0).on(m.Advanced(7), "→1 Frontier(7)", "→2 Frontier(7)")
    play.gets(1, m.Frontier(0, 5)).gets(2, m.Frontier(0, 9), "advance 5")
    play.gets(1, m.Frontier(0, 20), "advance 7")


def test_rule_11_homes_count_while_they_may_forward() -> None:
    play = new_owner().on(m.Advanced(9), "→0 Frontier(9)", "→1 Frontier(9)")
    play.gets(0, m.Frontier(1, 9)).gets(1, m.Frontier(1, 9))
    play.gets(0, m.Relay(1, 4)).gets(1, m.Relay(1, 6), "advance 4")
    for origin in range(2):
        play.gets(0, m.Flushed(1, origin))
    play.gets(0, m.Flushed(1, 2), "advance 6")


def test_rule_11_a_home_relays_what_its_senders_allow() -> None:
    play = collecting().on(m.Advanced(9), "→1 Frontier(9)", "→2 Frontier(9)")
    play.gets(1, m.Frontier(1, 5))
    play.gets(2, m.Frontier(1, 7), "→1 Relay(5)", "→2 Relay(5)")


def test_rule_11_a_waiting_record_is_not_overtaken() -> None:
    play = new_owner().on(m.Advanced(9), "→0 Frontier(9)", "→1 Frontier(9)")
    for home_ in (0, 1):
        play.gets(home_, m.Frontier(1, 3)).gets(
            home_, m.Relay(1, 9), *(["advance 3"] if home_ else [])
        )
    play.gets(1, m.Data(1, rows((K1, 1, 1))))
    play.gets(0, m.Frontier(1, 9)).gets(1, m.Frontier(1, 9))
    play.gets(0, m.Flushed(1, 1), "process k1#1@1", "advance 9")


def test_rule_11_a_frontier_told_by_one_who_knows_more_waits() -> None:
    play = worker(2).on(m.Advanced(9), "→0 Frontier(9)", "→1 Frontier(9)")
    play.gets(0, m.Frontier(0, 9)).gets(1, m.Frontier(1, 9))
    play.on(m.Rescale(1, G), "→0 Heard", "→1 Heard", "report started 1")
    play.gets(0, m.Relay(1, 5)).gets(1, m.Relay(1, 5), "advance 5")


def test_rule_11_a_home_with_keys_to_give_does_not_end() -> None:
    play = collecting().on(m.Advanced(MAX), "→1 Frontier(MAX)", "→2 Frontier(MAX)")
    play.gets(1, m.Frontier(1, MAX))
    play.gets(2, m.Frontier(1, MAX), "→1 Relay(LAST)", "→2 Relay(LAST)")
    play.gets(1, m.Relay(1, MAX), "advance LAST")
    [collect] = play.machine.handle(m.Move())
    assert isinstance(collect, m.Collect)
    assert collect.frontier == LAST


def test_rule_11_a_key_leaves_home_as_late_as_any_worker_had_come() -> None:
    play = home().on(interrogated(K1)).gets(1, m.Heard(1, MIN)).gets(2, m.Heard(1, 10))
    [collect] = play.machine.handle(m.Move())
    assert isinstance(collect, m.Collect)
    assert collect.frontier == 10


def test_rule_11_a_key_ends_at_home_if_its_new_owner_had_ended() -> None:
    play = home().on(interrogated(K1)).gets(1, m.Heard(1, MIN)).gets(2, m.Heard(1, MAX))
    [collect] = play.machine.handle(m.Move())
    assert isinstance(collect, m.Collect)
    assert collect.frontier == MAX


def test_rule_11_a_stage_of_readers_has_one_frontier_that_stands_while_it_moves() -> None:
    here = Placement.of([0, 1], keys={K1: 0})
    there = Placement.of([0, 1], keys={K1: 1})
    play = Playbook(Distributor(1, here, emits=True))
    play.on(m.Advanced(LAST), "→0 Frontier(LAST)")
    play.gets(0, m.Frontier(0, LAST))  # nothing is known of the readers yet
    play.on(m.Bound(MAX), "→0 Emission(LAST)")
    play.gets(0, m.Emission(0, 4), "advance 4")
    play.on(m.Rescale(1, there), "→0 Heard", "report started 1", "interrogate")
    play.gets(0, m.Emission(0, 6))  # stands still
    play.on(interrogated()).gets(0, m.Heard(1, MIN), "→0 Done", "→0 Flushed(1)", "→0 Relay(LAST)")
    play.gets(0, m.Relay(1, LAST))
    play.gets(0, m.Acquire(1, 1, hashes(K1), {K1: ({}, False, 0)}), "take {k1} [k1=]")
    play.on(m.Bound(6))  # k1 is to be read from time 6 on
    play.gets(0, m.Done(1), "→0 Flush").gets(0, m.Flush(1), "→0 Flushed(0)")
    play.gets(0, m.Flushed(1, 0))
    play.gets(0, m.Flushed(1, 1), "report completed 1", "→0 Emission(6)")
    play.gets(0, m.Emission(1, LAST), "advance 6")


def test_rule_11_idle_readers_hold_nobody_back_and_tell_when_they_wake() -> None:
    play = Playbook(Distributor(1, Placement.of([0, 1]), emits=True))
    play.on(m.Advanced(LAST), "→0 Frontier(LAST)").gets(0, m.Frontier(0, LAST))
    play.on(m.Bound(3), "→0 Emission(3)")
    play.gets(0, m.Emission(0, 5), "advance 3")
    play.on(m.Bound(LAST), "→0 Emission(LAST)", "advance 5")
    play.gets(0, m.Emission(0, LAST))  # all are idle: it stands still
    play.on(m.Bound(8), "→0 Emission(8)", "advance 8")
    play.on(m.Bound(MAX), "→0 Emission(LAST)")  # the lister has not ended: readers may come yet
    play.gets(0, m.Emission(0, MAX))
    play.gets(0, m.Frontier(0, MAX))
    play.on(m.Advanced(MAX), "→0 Frontier(MAX)", "→0 Emission(MAX)", "advance MAX")


# ---------------------------------------------------------------- rule 12


def test_rule_12_state_and_records_wait_until_all_have_confirmed_the_fence() -> None:
    play = worker(2, downstream=1).on(m.Rescale(1, G), "→0 Heard", "→1 Heard", "report started 1")
    play.gets(0, m.Acquire(1, 1, hashes(K1), {K1: ({}, False, 0)}))
    play.gets(0, m.Forward(1, rows((K1, 0, 1))))
    for chunk in (0, 1):
        for confirms in (0, 1):
            play.gets(confirms, m.Fenced(1, 0, chunk))
        last = ["take {k1} [k1=]", "process k1#1@0"] if chunk else []
        play.gets(2, m.Fenced(1, 0, chunk), *last)


def test_rule_12_a_fence_travels_behind_the_records_and_is_confirmed_to_the_new_owners() -> None:
    fence = m.Fence("before", 1, 0, 1, (2,))
    play = worker(0).on(m.Local(rows((K2, 0, 1))), "→1 Data/0 k2#1@0")
    told = "Fence before of 0 chunk 1 for {2}"
    play.on(m.PassFence(fence), f"→1 {told}", f"→2 {told}", "→2 stage before Fenced of 0 chunk 1")
    worker(1).gets(0, fence, "→2 stage before Fenced of 0 chunk 1")


def test_rule_12_no_fences_where_no_stage_follows() -> None:
    assert not any(isinstance(c, m.RaiseFence) for c in collecting().machine.handle(m.Move()))


# ---------------------------------------------------------------- joining, leaving, and what is refused


def test_a_new_worker_is_told_the_frontier() -> None:
    play = Playbook(Distributor(0, F)).on(m.Advanced(5), "→1 Frontier(5)")
    play.on(m.Join((2,)), "→2 Frontier(5)")
    play.on(m.Advanced(6), "→1 Frontier(6)", "→2 Frontier(6)")


def test_a_departing_worker_leaves_when_it_has_no_keys_and_its_upstream_has_ended() -> None:
    play = Playbook(Distributor(2, F, [0, 1, 2])).on(m.Depart())
    play.on(m.Advanced(MAX), "→0 Frontier(MAX)", "→1 Frontier(MAX)", "→0 Leave", "→1 Leave",
            "advance MAX", "report left 2")  # fmt: skip
    play.on(m.StartSnapshot(3), "take snapshot 3")


def test_a_worker_that_left_is_waited_for_no_more() -> None:
    play = worker(0).on(m.StartSnapshot(1), "→1 BAR2(1)", "→2 BAR2(1)").gets(1, m.Bar2(1))
    play.gets(2, m.Leave(), "report left 2", "take snapshot 1")


@pytest.mark.parametrize(
    "message",
    [
        m.Data(2, rows((K1, 1, 1))),
        m.Forward(1, rows((K1, 1, 1))),
        m.Acquire(1, 1, hashes(K1), {}),
        m.Done(1),
        m.Flush(1),
        m.Flushed(1, 0),
        m.Relay(1, 4),
        m.Fenced(1, 0, 1),
        m.Heard(2, MIN),
        m.Leave(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_of_another_configuration_is_refused_loudly(message: m.Message) -> None:
    play = worker(0)
    with pytest.raises(ProtocolError):
        play.machine.handle(m.Received(1, message))
    play.machine.validate()  # and nothing of it was taken
    play.on(m.Local(rows((K1, 0, 1))), "process k1#1@0")


@pytest.mark.parametrize(
    "message",
    [
        m.Acquire(1, 1, hashes(K2), {}),
        m.Forward(1, rows((K2, 1, 1))),
        m.Done(1),
        m.Flushed(1, 0),
        m.Relay(1, 4),
        m.Frontier(2, 4),
        m.Fenced(1, 2, 1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_only_a_home_may_say_is_refused_from_others(message: m.Message) -> None:
    play = home()
    with pytest.raises(ProtocolError):
        play.machine.handle(m.Received(2, message))
    play.machine.validate()


def test_done_twice_is_refused_also_inside_a_snapshot() -> None:
    play = new_owner().on(m.StartSnapshot(1), "→0 BAR2(1)", "→1 BAR2(1)").gets(0, m.Done(1))
    with pytest.raises(ProtocolError, match="twice"):
        play.machine.handle(m.Received(0, m.Done(1)))


def test_a_barrier_of_a_snapshot_that_was_taken_is_refused() -> None:
    play = worker(0).on(m.StartSnapshot(1), "→1 BAR2(1)", "→2 BAR2(1)")
    play.gets(1, m.Bar2(1)).gets(2, m.Bar2(1), "take snapshot 1")
    with pytest.raises(ProtocolError, match="was taken"):
        play.machine.handle(m.Received(1, m.Bar2(1)))


def test_a_confirmation_counts_from_one_who_left_this_stage_but_not_the_next() -> None:
    play = worker(2, downstream=1).on(m.Rescale(1, G), "→0 Heard", "→1 Heard", "report started 1")
    play.machine._set_members({0, 2})
    play.gets(1, m.Fenced(1, 0, 0))


def test_one_who_has_left_says_nothing_more() -> None:
    play = Playbook(Distributor(2, F, [0, 1, 2], emits=True)).on(m.Depart())
    play.on(m.Advanced(MAX), "→0 Frontier(MAX)", "→1 Frontier(MAX)", "→0 Leave", "→1 Leave",
            "advance MAX", "report left 2")  # fmt: skip
    play.on(m.Bound(MAX)).on(m.Advanced(MAX)).gets(0, m.Frontier(0, 5))
    with pytest.raises(ProtocolError, match="had ended"):
        play.machine.handle(m.Local(rows((K1, 2, 1))))
    with pytest.raises(ProtocolError, match="after leaving"):
        play.machine.handle(m.Received(0, m.Data(0, rows((K1, 0, 1)))))


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not an event"):
        worker(0).machine.handle("rescale")  # type: ignore[arg-type]


def test_a_message_from_a_stranger_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not a peer"):
        worker(0).machine.handle(m.Received(9, m.Data(0, rows((K1, 9, 1)))))


def test_every_phase_is_reached_and_left_by_the_table() -> None:
    phases = set(Distributor.phases)
    assert {before for before, _ in TRANSITIONS} == phases
    assert set(TRANSITIONS.values()) == phases
    with pytest.raises(ProtocolError, match="no phase follows"):
        worker(0).machine.enter_phase("no key left, Done is sent")
