"""The short form of `./run bench jepsen`: three real nodes, all kinds of faults, and nothing seen that must not be."""

from __future__ import annotations

from pathlib import Path

import pytest

from railgun.testing.jepsen.run import Run, perform
from railgun.testing.jepsen.workload import Load

LOAD = Load(publishers=2, pause=0.02, members=2, requesters=1, responders=1)


@pytest.mark.simulation
def test_three_nodes_live_through_faults(tmp_path: Path) -> None:
    done = Run(tmp_path / "run", seed=7, nodes=3, seconds=14.0, load=LOAD, drain=30.0)
    outcome = perform(done)
    assert outcome.sound, [*outcome.failures, *outcome.findings.found, outcome.logs]
    assert sum(outcome.done.values()) >= 2
    assert outcome.acknowledged > 50
