"""Jobs that are saved and go on, with everything happening to them that can; and that what is wrong is noticed."""

from __future__ import annotations

import pytest

from railgun.testing.crashes import simulate

SEEDS = 200
PIECE = 25


@pytest.mark.parametrize("first", range(0, SEEDS, PIECE))
def test_state_and_output_are_those_of_what_was_committed(first: int) -> None:
    for seed in range(first, first + PIECE):
        outcome = simulate(seed)
        assert outcome.violation is None, outcome.story()
