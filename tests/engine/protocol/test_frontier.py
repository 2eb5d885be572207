"""Frontiers of one worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railgun.engine.protocol.frontier import LAST, MAX, MIN, Emissions, Frontiers
from railgun.errors import ProtocolError


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=40))
def test_never_ahead_of_any_sender_and_never_back(told: list[tuple[int, int]]) -> None:
    frontiers = Frontiers(range(4))
    reached = dict.fromkeys(range(4), MIN)
    last = MIN
    for sender, value in told:
        reached[sender] = max(value, reached[sender])
        frontiers.sender(sender, reached[sender])
        now = frontiers.advance(MAX, may_end=True)
        if now is not None:
            assert now > last
            last = now
        assert last == min(reached.values())


def test_a_sender_whose_frontier_goes_back_is_refused() -> None:
    frontiers = Frontiers([0])
    frontiers.sender(0, 5)
    with pytest.raises(ProtocolError, match="went back"):
        frontiers.sender(0, 4)


def test_a_worker_that_joins_holds_it_and_one_that_leaves_lets_it_go() -> None:
    frontiers = Frontiers([0])
    frontiers.join(1)
    frontiers.sender(0, 5)
    assert frontiers.advance(MAX, may_end=True) is None
    frontiers.leave(1)
    assert frontiers.advance(MAX, may_end=True) == 5


def test_it_stays_below_the_end_while_keys_are_to_be_given() -> None:
    frontiers = Frontiers([0])
    frontiers.sender(0, MAX)
    assert frontiers.advance(MAX, may_end=False) == LAST
    assert frontiers.advance(MAX, may_end=True) == MAX


def test_emissions_of_an_earlier_epoch_are_void() -> None:
    emissions = Emissions(0)
    emissions.report(0, 0, 5)
    emissions.report(1, 0, 7)
    assert emissions.advance([0, 1]) == 5
    emissions.report(1, 1, 6)  # worker 1 is through before us
    emissions.begin(1)
    emissions.report(0, 0, 50)
    assert emissions.advance([0, 1]) is None
    emissions.report(0, 1, 9)
    assert emissions.advance([0, 1]) == 6


def test_an_idle_worker_holds_nobody_back_and_counts_again_when_it_wakes() -> None:
    emissions = Emissions(0)
    emissions.report(0, 0, 5)
    emissions.report(1, 0, LAST)
    assert emissions.advance([0, 1]) == 5
    emissions.report(1, 0, 6)  # it wakes: lower than LAST, and believed
    emissions.report(0, 0, 9)
    assert emissions.advance([0, 1]) == 6
    emissions.report(1, 0, 4)  # from one who was not idle it is not
    assert emissions.of(1) == 6


def test_the_frontier_stands_where_it_is_while_all_are_idle_and_ends_with_all() -> None:
    emissions = Emissions(0)
    emissions.report(0, 0, 5)
    emissions.report(1, 0, 7)
    assert emissions.advance([0, 1]) == 5
    for worker in (0, 1):
        emissions.report(worker, 0, LAST)
    assert emissions.advance([0, 1]) is None
    emissions.report(0, 0, 8)
    assert emissions.advance([0, 1]) == 8
    for worker in (0, 1):
        emissions.report(worker, 0, MAX)
    assert emissions.advance([0, 1]) == MAX


def test_one_who_is_idle_and_one_who_has_ended_are_not_the_end() -> None:
    emissions = Emissions(0)
    emissions.report(0, 0, LAST)
    emissions.report(1, 0, MAX)
    assert emissions.advance([0, 1]) is None
