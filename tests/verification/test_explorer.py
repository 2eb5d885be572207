"""The explorer: that it sees everything, that it finds what is wrong, and what it finds in our rules (nothing)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from verification.explorer import Explorer
from verification.prove import DEFAULT, EXHAUSTIVE, QUICK, families
from verification.rescale.model import Violation
from verification.rescale.mutants import MUTANTS, NoHoldAtNewOwner
from verification.rescale.scenarios import Scenario, configurations
from verification.rescale.seed_rules import HOLES, story_of
from verification.rescale.story import story


class Adder:
    """A node that sends one number to its peer and adds up what it gets, twice what comes in between."""

    __slots__ = ("me", "sent", "total")

    def __init__(self, me: int) -> None:
        self.me, self.sent, self.total = me, 0, 0

    def events(self) -> Sequence[str]:
        return ["send"] if self.sent < 2 else []

    def step(self, event: str) -> list[tuple[int, Any]]:
        self.sent += 1
        self.total *= 2
        return [(1 - self.me, self.sent)]

    def deliver(self, sender: int, message: Any) -> list[tuple[int, Any]]:
        self.total += message
        return []

    def holdings(self) -> int:
        return 0

    def flags(self) -> int:
        return 0

    def may_send(self) -> int:
        return 0 if self.sent == 2 else 1 << (1 - self.me)


@pytest.mark.parametrize("reduce", [False, True])
def test_every_order_of_events_is_seen(reduce: bool) -> None:
    """Two sends and two arrivals at each node: the totals tell the orders apart."""
    ends: set[tuple[int, ...]] = set()

    def judge(nodes: Sequence[Any]) -> Violation | None:
        ends.add(tuple(node.total for node in nodes))
        return None

    result = Explorer([Adder(0), Adder(1)], judge, reduce=reduce).run()
    # Worked out by hand: arrivals of 1 then 2 among two doublings, for both nodes, as far as both
    # can be had together: no node can get a 2 before the other has sent twice.
    alone = {12, 8, 5, 10, 6, 4, 3}
    assert {total for end in ends for total in end} <= alone | {7, 9}
    assert (3, 3) in ends
    assert result.complete
    assert len(ends) == len(_brute_force())
    assert ends == _brute_force()


def _brute_force() -> set[tuple[int, ...]]:
    """All end totals, by trying every order without any cleverness."""
    ends = set()

    def go(totals: list[int], sent: list[int], got: list[int]) -> None:
        moved = False
        for me in (0, 1):
            if sent[me] < 2:
                moved = True
                next_totals, next_sent = list(totals), list(sent)
                next_totals[me] *= 2
                next_sent[me] += 1
                go(next_totals, next_sent, got)
            if got[me] < sent[1 - me]:
                moved = True
                next_totals, next_got = list(totals), list(got)
                next_got[me] += 1
                next_totals[me] += next_got[me]
                go(next_totals, sent, next_got)
        if not moved:
            ends.add(tuple(totals))

    go([0, 0], [0, 0], [0, 0])
    return ends


@pytest.mark.parametrize("kind", [{}, {"snapshot": True}, {"times": True}, {"prompt": False}])
def test_the_reduction_leaves_no_local_state_out(kind: dict[str, bool]) -> None:
    """Persistent sets skip states of the whole, never a situation of one worker."""
    scenarios = [*configurations(2, 1, 2), *configurations(2, 2, 2)][::9]
    scenarios += [Scenario((0,), (1,), (0,), (1,), ((1,), (), (1,)))] if not kind else []
    for scenario in scenarios:
        scenario = replace(scenario, **kind)  # type: ignore[arg-type]
        whole, reduced = scenario.explorer(), scenario.explorer(reduce=True)
        seen, less = whole.run(), reduced.run()
        assert seen.violation is None
        assert less.violation is None
        assert less.states <= seen.states
        assert set(whole.node_ids) == set(reduced.node_ids)


def test_configurations_are_different_up_to_renaming_and_of_every_kind() -> None:
    seen = list(configurations(2, 1, 2))
    assert len(set(seen)) == len(seen) == 12
    moves = {(len(s.old), len(s.new)) for s in seen}
    assert moves == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_the_exhaustive_run_leaves_nothing_out_and_the_default_run_looks_at_every_family() -> None:
    for family in families():
        assert family.chosen(EXHAUSTIVE) == family.scenarios
        assert set(family.chosen(QUICK)) <= set(family.scenarios)
        assert family.chosen(DEFAULT)
        assert len(family.chosen(QUICK)) <= len(family.chosen(DEFAULT))


def test_time_goes_on_at_new_owners_while_a_home_keeps_its_keys() -> None:
    for scenario in configurations(2, 1, 2):
        stuck = replace(scenario, times=True, stuck=True)
        result = stuck.explorer(reduce=True).run()
        assert result.violation is None, "\n".join([str(stuck), *story(result.story)])


@pytest.mark.parametrize("name", HOLES)
def test_hole_in_the_original_rules(name: str) -> None:
    """Each breaks the original rules, by a short story, and not ours."""
    hole = HOLES[name]
    found = hole.find()
    assert found.violation is not None
    assert found.violation.kind in hole.kinds
    assert 0 < len(story_of(found.story)) <= 16
    assert hole.scenario.explorer(reduce=True).run().violation is None


def test_a_violation_comes_with_its_shortest_story() -> None:
    scenario = next(configurations(2, 1, 2))
    found = scenario.explorer(NoHoldAtNewOwner).run()
    assert found.violation is not None
    told = story(found.story)
    assert len(told) == len(found.story) == 6
    assert "Data/1 k1#2@1" in told[-1] or "send" in told[-1]


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 10
