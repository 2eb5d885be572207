"""Thousands of random histories of one group beside a naive model, and mutants that the histories must notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from verification.groups.model import STORIES, play
from verification.groups.mutants import HISTORIES, MUTANTS, hunt


@pytest.mark.simulation
@pytest.mark.parametrize("part", range(4))
def test_histories_are_as_the_model_says(part: int) -> None:
    for seed in range(part, HISTORIES, 4):
        play(seed)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: str(story.__name__))
def test_a_story_that_chance_does_not_find(story: Callable[[], None]) -> None:
    story()


@pytest.mark.simulation
@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_that_is_changed_is_noticed(name: str) -> None:
    _, how, _ = hunt(name)
    assert how, f"{HISTORIES} histories do not notice: {name}"
