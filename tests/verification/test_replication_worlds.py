"""Copies of a stream, simulated: worlds besides those of the proof (test_prove.py), which also explores them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from verification.replication.model import Case, explore, story_lines
from verification.replication.mutants import EQUAL, MUTANTS, ForgetsItsLoss
from verification.replication.node import Habits
from verification.replication.world import simulate

SEEDS = [
    int(line.split()[0])
    for line in Path(__file__).with_name("copies.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def test_a_violation_is_told_as_a_story() -> None:
    """The copy of b loses two messages that were safe, gets its label back too early, and c hears of one of them."""
    case = Case("abc", "c", warm=2, damages="010")
    found = explore(case, Habits(replica=ForgetsItsLoss))
    assert found.violation is not None
    assert "lost" in found.violation.kind
    story = story_lines(case, found.story)
    assert any("b: damage" in line for line in story)
    assert any("* → c: Appoint(epoch=2" in line for line in story)


@pytest.mark.simulation
@pytest.mark.parametrize("start", range(500_000, 500_300, 75))
def test_worlds_not_seen_by_the_prover(start: int) -> None:
    for seed in range(start, start + 75):
        outcome = simulate(seed)
        assert outcome.violation is None, outcome.story_end()


@pytest.mark.simulation
@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_that_once_failed(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.violation is None, outcome.story_end()


def test_the_simulation_does_what_it_is_for() -> None:
    totals: Counter[str] = Counter()
    for seed in range(40):
        totals += simulate(seed).tally
    for what in (
        *("epochs", "published", "changes", "members", "trims", "crashes", "strikes"),
        *("sessions over", "late", "full disks", "damages", "at rest"),
    ):
        assert totals[what] > 10, (what, totals)


def test_the_same_seed_is_the_same_run() -> None:
    assert simulate(7).story == simulate(7).story


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 30
    assert not set(EQUAL) & set(MUTANTS)
