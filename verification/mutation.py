"""Register mutants by name and hunt them: what all tables of mutants have in common.

A mutant is production code with one rule changed. Its name is the first line of the docstring that states the change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Protocol, TypeVar

from verification.rescale.model import Violation

Entry = TypeVar("Entry")
Subject = TypeVar("Subject")

Verdict = tuple[str, str, str]
"""The name of a mutant, how it was caught (empty if it was not), and the violation."""


class Judged(Protocol):
    """The outcome of a simulation."""

    @property
    def violation(self) -> Violation | None:
        """Return the first violation, or None."""
        ...


class Explored(Judged, Protocol):
    """The outcome of an exploration."""

    @property
    def story(self) -> list[Any]:
        """Return the steps that lead to the violation."""
        ...


def mutant_name(subject: object) -> str:
    """Return the first line of the docstring of `subject`, without its full stop.

    >>> class VotesTwice:
    ...     '''A node votes for whoever asks.'''
    >>> mutant_name(VotesTwice)
    'A node votes for whoever asks'
    """
    assert subject.__doc__ is not None, f"{subject} needs a docstring that states the change"
    return subject.__doc__.splitlines()[0].rstrip(".")


def registrar(
    table: MutableMapping[str, Entry], entry: Callable[[Any], Entry]
) -> Callable[[Subject], Subject]:
    """Return a decorator that adds `entry(subject)` to `table` under the name of the mutant.

    Raises `AssertionError` if the table has a mutant of this name.
    """

    def register(subject: Subject) -> Subject:
        name = mutant_name(subject)
        assert name not in table, f"two mutants are called {name!r}"
        table[name] = entry(subject)
        return subject

    return register


def verdict_of(name: str, exploration: Explored) -> Verdict:
    """Return the verdict of an exploration with the mutant called `name`."""
    if exploration.violation is None:
        return name, "", ""
    return name, f"explorer, {len(exploration.story)} steps", str(exploration.violation)


def hunt_seeds(
    name: str, seeds: Iterable[int], simulate: Callable[[int], Judged], label: str = "seed"
) -> Verdict:
    """Simulate the mutant called `name` with each of `seeds` until one shows a violation."""
    for seed in seeds:
        violation = simulate(seed).violation
        if violation is not None:
            return name, f"{label} {seed}", str(violation)
    return name, "", ""
