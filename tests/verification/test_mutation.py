"""How tables of mutants are filled, and how a mutant is caught."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from verification.mutation import hunt_seeds, mutant_name, registrar, verdict_of
from verification.rescale.model import Violation


@dataclass
class Outcome:
    violation: Violation | None = None
    story: list[Any] = field(default_factory=list)


def test_a_mutant_is_registered_under_the_first_line_of_its_docstring() -> None:
    table: dict[str, tuple[type, int]] = {}

    @registrar(table, lambda kind: (kind, 7))
    class VotesTwice:
        """A node votes twice.

        More about that.
        """

    assert table == {"A node votes twice": (VotesTwice, 7)}
    assert mutant_name(VotesTwice) == "A node votes twice"


def test_a_mutant_needs_a_docstring_and_a_name_of_its_own() -> None:
    table: dict[str, type] = {"One rule": int}

    class Nameless:
        pass

    class Again:
        """One rule."""

    add = registrar(table, lambda kind: kind)
    with pytest.raises(AssertionError, match="needs a docstring"):
        add(Nameless)
    with pytest.raises(AssertionError, match="two mutants are called 'One rule'"):
        add(Again)
    assert table == {"One rule": int}


def test_seeds_are_simulated_in_order_until_one_shows_a_violation() -> None:
    simulated: list[int] = []

    def simulate(seed: int) -> Outcome:
        simulated.append(seed)
        return Outcome(Violation("lost", "a record") if seed == 3 else None)

    assert hunt_seeds("m", (5, 3, 4), simulate)[:2] == ("m", "seed 3")
    assert simulated == [5, 3]
    assert hunt_seeds("m", (1, 2), simulate) == ("m", "", "")


def test_an_exploration_catches_a_mutant_if_it_finds_a_violation() -> None:
    assert verdict_of("m", Outcome()) == ("m", "", "")
    name, how, text = verdict_of("m", Outcome(Violation("lost", "a record"), [1, 2]))
    assert (name, how) == ("m", "explorer, 2 steps")
    assert "a record" in text
