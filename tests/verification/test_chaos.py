"""A short storm over a flow on real processes; the long ones are `./run bench chaos`."""

from __future__ import annotations

from pathlib import Path

from verification.chaos import Storm, storm_over


def test_what_a_storm_leaves_is_what_a_calm_run_writes(tmp_path: Path) -> None:
    outcome = storm_over(Storm(str(tmp_path), seconds=8, seed=11, rate=1_500, pause=0.8))
    assert outcome.finished
    assert (outcome.lost, outcome.extra) == (0, 0)
    assert outcome.same
    assert outcome.staged == 0
    assert outcome.blows.total() > 3
