"""`./run prove --quick`, as a user runs it: this is the whole proof in small, and it must pass."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.simulation
def test_the_quick_proof_passes_and_speaks_json() -> None:
    command = [sys.executable, "-m", "verification.prove", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    report = json.loads(done.stdout.splitlines()[-1])
    failed = [check for check in report["checks"] if not check["pass"]]
    assert not failed, done.stderr
    assert report["name"] == "prove"
    assert report["pass"] is True
    assert done.returncode == 0
    values = {check["name"]: check["value"] for check in report["checks"]}
    assert values["violations"] == 0
    assert values["holes found in the original rules"] == 5
    assert values["mutants caught"] >= 10
    assert values["simulated schedules"] >= 100
    assert values["mutants of saving caught"] >= 60
    assert values["jobs that crash"] >= 100
    assert values["violations of connectors"] == 0
    assert values["mutants of connectors caught"] >= 23
    assert values["violations of Raft"] == 0
    assert values["mutants of Raft caught"] >= 20
    assert values["violations of copies"] == 0
    assert values["mutants of copies caught"] >= 30
    assert values["violations of producers"] == 0
    assert values["mutants of producers caught"] >= 50
