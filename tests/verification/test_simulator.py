"""Whole clusters, seeded: a bounded set of schedules here; `./run prove` runs more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from verification.rescale.mutants import NoDrop
from verification.rescale.simulator import Plan, Simulation, shrink, simulate

from railgun.engine.protocol.rescale import messages as m
from railgun.engine.protocol.rescale.distributor import ADDITIVE_EVENTS, Distributor

KEPT = [
    tuple(line.split()[:2])
    for line in (Path(__file__).parent / "seeds.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.simulation
@pytest.mark.parametrize(("seed", "size"), KEPT)
def test_a_seed_that_once_failed(seed: str, size: str) -> None:
    outcome = simulate(int(seed), float(size), keep_trace=True)
    assert outcome.violation is None, outcome.story()


@pytest.mark.simulation
@pytest.mark.parametrize("start", range(10_000, 10_040, 10))
def test_schedules_not_seen_by_the_prover(start: int) -> None:
    for seed in range(start, start + 10):
        outcome = simulate(seed, 0.3)
        assert outcome.violation is None, shrink(Plan.of(seed, 0.3)).story()


def test_the_simulation_does_what_it_is_for() -> None:
    totals: Counter[str] = Counter()
    for seed in range(30):
        totals += simulate(seed, 0.2).tally()
    names = {"rescales", "moved", "snapshots", "during", "crashes", "records", "abrupt"}
    assert names <= set(totals), totals


def test_same_seed_same_trace_under_any_hash_seed() -> None:
    program = (
        "from verification.rescale.simulator import simulate;"
        "print([simulate(seed, 0.2).digest for seed in (5, 6, 8)])"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert len(answers) == 1
    assert str([simulate(seed, 0.2).digest for seed in (5, 6, 8)]) in answers.pop()


def test_a_failure_is_told_as_a_short_story_with_its_seed() -> None:
    seed = next(seed for seed in range(50) if simulate(seed, 0.3, make=NoDrop).violation)
    plan = Plan.of(seed, 0.3)
    found = shrink(plan, make=NoDrop)
    assert found.violation is not None
    story = found.story(lines=20)
    assert story.startswith(f"seed {seed}: ")
    assert len(story.splitlines()) <= 23
    assert found.plan.records < plan.records  # it was made simpler
    assert Simulation(found.plan, NoDrop).run().violation is not None  # and still fails


class SettlesAgain(Distributor):
    """Looks after records and state, too, what has become possible."""

    __slots__ = ()

    def handle(self, event: m.Event) -> list[m.Command]:
        commands = super().handle(event)
        if isinstance(event.message if isinstance(event, m.Received) else event, ADDITIVE_EVENTS):
            self._make_progress()
            assert not self.out, f"{event} made {self.out} possible"
        return commands


def test_records_and_state_make_nothing_else_possible() -> None:
    for seed in range(15):
        outcome = simulate(seed, 0.2, make=SettlesAgain)
        assert outcome.violation is None, str(outcome.violation)
