"""Jobs that are saved and crash, seeded: a bounded set here; `./run prove` runs more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from verification.rewriting import StaleMutantError, rewritten
from verification.snapshots import driver_mutants as snapshot_mutants
from verification.snapshots.crashes import Job, simulate
from verification.snapshots.mutants import MUTANTS

KEPT = [
    int(line.split()[0])
    for line in (Path(__file__).parent / "crashes.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.simulation
@pytest.mark.parametrize("seed", KEPT)
def test_a_seed_that_once_failed(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.violation is None, outcome.story()


@pytest.mark.simulation
@pytest.mark.parametrize("start", range(100, 500, 25))  # the first hundred: by the quick proof
def test_jobs_that_crash_come_to_their_end_and_nothing_is_lost_or_done_twice(start: int) -> None:
    for seed in range(start, start + 25):
        outcome = simulate(seed)
        assert outcome.violation is None, outcome.story()


@pytest.mark.slow
def test_the_simulation_does_what_it_is_for() -> None:
    totals: Counter[str] = Counter()
    for seed in range(60):
        totals += simulate(seed).tally()
    names = {"runs", "full", "increments", "rescales", "strays", "finished", "failed"}
    names |= {"workers lost", "drivers lost", "power lost"}
    assert names <= set(totals), totals
    assert totals["snapshots"] > 2 * totals["jobs"]
    assert {Job(seed).parquet for seed in range(60)} == {True, False}


def test_a_failure_is_told_as_a_story_with_its_seed() -> None:
    mutant = MUTANTS["Timers are not saved"]
    found = next(o for seed in range(20) if (o := mutant.simulate(seed)).violation is not None)
    told = found.story(lines=20)
    assert told.startswith(f"seed {found.seed}: state: ")
    assert len(told.splitlines()) <= 22


@pytest.mark.slow
def test_same_seed_same_story_under_any_hash_seed() -> None:
    program = (
        "from verification.snapshots.crashes import simulate;"
        "print([len(simulate(seed).trace) for seed in range(8)], simulate(3).story())"
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


def test_every_mutant_of_the_drivers_around_snapshots_still_applies() -> None:
    assert all(mutant.changes for mutant in snapshot_mutants.MUTANTS.values())


def test_a_mutant_whose_text_is_gone_says_so() -> None:
    with pytest.raises(StaleMutantError, match="has 0 times the text 'no such text'"):
        rewritten(Job, "run", ("no such text", ""))
