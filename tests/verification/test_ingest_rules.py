"""What the exploration of connectors finds in rules that are wrong, told so that people can read it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from verification.explorer import State
from verification.ingest import mutants as feeding_mutants
from verification.ingest.exploration import Case, Rules, Tidy, explore, new_explorer, story_lines
from verification.ingest.mutants import MUTANTS
from verification.ingest.world import DEEDS, simulate
from verification.mutation import mutant_name
from verification.rescale.model import Violation

NAMED = {
    "A stream is released at close, with the last acknowledged position": "holds [0]",
    "A stream is released at close, with the last seen position": "holds []",
    "The registry accepts messages of an older generation": "no way leads to",
    "The registry accepts messages of an older generation: it checks the worker's name, not its process": (
        "up to -1, and holds [0]"
    ),
    "A grant that comes after its session died is not given back": "no way leads to",
}


@pytest.mark.simulation
@pytest.mark.parametrize("name", NAMED)
def test_the_faults_of_the_original_protocol_are_found_with_a_story(name: str) -> None:
    rules, case = MUTANTS[name]
    found = explore(case, rules)
    story = "\n".join(story_lines(found))
    assert NAMED[name] in story.splitlines()[-1]
    assert "connector 1 → worker" in story
    assert len(found.story) < 25


@pytest.mark.simulation
def test_messages_that_nobody_heeds_change_nothing() -> None:
    """What is left out of states: the same are reached if it is left out as one goes, or in the end."""
    case = Case(workers=1, messages=1, closes=1, crashes=1)
    explorer = new_explorer(case, Rules())
    tidy = Tidy(explorer, case)

    def reached(tidied: Callable[[State], State]) -> set[State]:
        seen, todo = {explorer.start}, [explorer.start]
        while todo:
            for _, following in explorer.successors(todo.pop()):
                assert not isinstance(following, Violation)
                state = tidied(following)
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
        return seen

    everything, less = reached(lambda state: state), reached(tidy)
    assert set(map(tidy, everything)) == less
    assert len(less) < len(everything)


SHRINKS: dict[str, Any] = {"messages": 250, "closes": 0, "every": 20.0}
"""Nobody asks for a snapshot, and it is not time for one: what a worker has that leaves, it hands over."""
LOSSES: dict[str, Any] = {"workers": 2, "closes": 6, "full": 0.4, "rivals": 2}
"""Connections are lost, and snapshots given up."""


@pytest.mark.simulation
@pytest.mark.parametrize("first", DEEDS)
def test_all_pairs_of_deeds_on_simulated_workers(first: str) -> None:
    """Grow 1 and 4, shrink 1 and 4, crash 1 and 2, lose the controller: each after each."""
    tally = Counter[str]()
    for at, (second, more) in enumerate(itertools.product(DEEDS, (SHRINKS, {"rivals": 2}))):
        workers = 9 if "shrink 4" in (first, second) else 3
        seed = 100 * DEEDS.index(first) + at
        tally += simulate(seed, [first, second], workers=workers, **more)
    assert tally["handed over"] > 0 or "shrink" not in first
    assert tally["given up"] > 0
    assert tally["late"] > 0


@pytest.mark.simulation
def test_many_deeds_in_a_row() -> None:
    many: dict[str, Any] = {"workers": 6, "rivals": 2, "messages": 150, "closes": 4}
    tally = sum((simulate(seed, DEEDS, **many) for seed in range(3)), Counter[str]())
    assert tally["farewells"] > 0


@pytest.mark.simulation
@pytest.mark.parametrize(("deeds", "workers"), [(("shrink 1",) * 2, 3), (("shrink 4",) * 2, 9)])
def test_workers_that_leave_hand_over_streams(deeds: tuple[str, ...], workers: int) -> None:
    tallies = [simulate(seed, deeds, workers=workers, **SHRINKS) for seed in range(6)]
    assert sum(tally["handed over"] > 0 for tally in tallies) >= 4
    assert sum(tally["handed over"] for tally in tallies) >= 9
    assert sum(tally["redirected"] for tally in tallies) > 0


@pytest.mark.simulation
def test_streams_end_and_connections_are_lost_while_a_snapshot_is_under_way() -> None:
    tallies = sum((simulate(seed, (), **LOSSES) for seed in range(6)), Counter[str]())
    for what in ("ended, then committed", "ended, then given up", "closed, then given up"):
        assert tallies[what] > 0, tallies


@pytest.mark.simulation
@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        (feeding_mutants.LeftIsFree, "not a prefix"),
        (feeding_mutants.LeftForEver, "stuck"),
        (feeding_mutants.LeftAtOnce, "lateness"),
        (feeding_mutants.LeaveWithFailedSnapshot, "untrue"),
        (feeding_mutants.AcknowledgeSeen, "untrue"),
    ],
)
def test_mutants_are_caught_on_simulated_workers_too(mutant: type[object], kind: str) -> None:
    rules, _ = MUTANTS[mutant_name(mutant)]
    plans: list[Any] = [(("shrink 1",) * 2, {"workers": 3, "long": 15_000} | SHRINKS), ((), LOSSES)]

    def hunt() -> None:
        for seed, (deeds, more) in itertools.product(range(6), plans):
            simulate(seed, deeds, rules, **more)

    with pytest.raises(Violation, match=kind):
        hunt()
