"""What the exploration of connectors finds in rules that are wrong, told so that people can read it."""

from __future__ import annotations

import itertools

import pytest

from railgun.testing.fed_world import DEEDS, simulate
from railgun.testing.feeding import explore, told
from railgun.testing.feeding_mutants import MUTANTS

NAMED = {
    "A stream is released at close, with what was acknowledged last": "holds [0]",
    "A stream is released at close, with what was seen last": "holds []",
    "The registry takes what is of an older generation": "no way leads to",
    "A grant that comes after its session died is not given back": "no way leads to",
}


@pytest.mark.simulation
@pytest.mark.parametrize("name", NAMED)
def test_the_faults_of_the_original_protocol_are_found_with_a_story(name: str) -> None:
    rules, case = MUTANTS[name]
    found = explore(case, rules)
    story = "\n".join(told(found))
    assert NAMED[name] in story.splitlines()[-1]
    assert "connector 1 → worker" in story
    assert len(found.story) < 25


@pytest.mark.simulation
@pytest.mark.parametrize("first", DEEDS)
def test_all_pairs_of_deeds_on_simulated_workers(first: str) -> None:
    """Grow 1 and 4, shrink 1 and 4, crash 1 and 2, lose the controller: each after each."""
    for seed, second in itertools.product(range(2), DEEDS):
        workers = 9 if "shrink 4" in (first, second) else 3
        simulate(seed, [first, second], workers=workers)


@pytest.mark.simulation
def test_many_deeds_in_a_row() -> None:
    for seed in range(3):
        simulate(seed, DEEDS, workers=6, streams=3, connectors=3, messages=60, closes=4)
