"""Clusters that agree by Raft, simulated: a bounded set of seeds here; `./run prove` explores, and runs more."""

from __future__ import annotations

from collections import Counter

import pytest
from verification.raft.model import Case, explore, story_lines
from verification.raft.world import Habits, simulate

KEPT = [26, 43, 108]
"""Seeds that once failed: storms of messages, and nobody could be elected."""


def test_a_violation_is_told_as_a_story() -> None:
    found = explore(Case("110", crashes="001"), habits=Habits(keeps_vote=False))
    story = "\n".join(story_lines(found.story))
    assert found.violation is not None
    assert "c: crash" in story
    assert story.count("→ c: AskVote(term=1") == 2  # and c has voted for both


@pytest.mark.simulation
@pytest.mark.parametrize("start", range(20_000, 20_100, 25))
def test_worlds_not_seen_by_the_prover(start: int) -> None:
    for seed in range(start, start + 25):
        outcome = simulate(seed)
        assert outcome.violation is None, outcome.story_end()


@pytest.mark.simulation
@pytest.mark.parametrize("seed", KEPT)
def test_a_world_that_once_failed(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.violation is None, outcome.story_end()


def test_the_simulation_does_what_it_is_for() -> None:
    totals: Counter[str] = Counter()
    for seed in range(40):
        totals += simulate(seed).tally
    for what in (
        *("crashes", "pauses", "partitions", "changes", "transfers", "snapshots", "compactions"),
        *("reads", "acknowledged", "terms"),
    ):
        assert totals[what] > 20, (what, totals)


def test_the_same_seed_is_the_same_run() -> None:
    assert simulate(7).story == simulate(7).story
