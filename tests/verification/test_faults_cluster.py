"""The short form of `./run bench jepsen`: three real nodes, all kinds of faults, and nothing seen that must not be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from verification.faults import run as fault_run
from verification.faults.history import Blown, CutOff, History, Publish
from verification.faults.nemesis import Blow
from verification.faults.run import Outcome, Run, perform
from verification.faults.workload import Load

LOAD = Load(publishers=2, pause=0.02, members=2, requesters=1, responders=1)
PATIENT = replace(LOAD, patience_s=30.0)
"""Publishers keep their client through the fault, so that it is the client that goes on elsewhere."""


@pytest.mark.simulation
def test_three_nodes_live_through_faults(tmp_path: Path) -> None:
    done = Run(tmp_path / "run", seed=7, nodes=3, seconds=14.0, load=LOAD, drain=30.0)
    outcome = perform(done)
    assert outcome.sound, [*outcome.failures, *outcome.findings.found, outcome.logs]
    assert sum(outcome.done.values()) >= 2
    assert outcome.acknowledged > 50


def one_blow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blow: Blow, load: Load
) -> tuple[Outcome, History]:
    """Return the outcome and the history of a run of three nodes with only this blow."""
    histories: list[History] = []

    def kept(file: Path) -> History:
        histories.append(History(file))
        return histories[0]

    monkeypatch.setattr(fault_run, "plan", lambda *told: [blow])
    monkeypatch.setattr(fault_run, "History", kept)
    outcome = perform(Run(tmp_path / "run", nodes=3, seconds=blow.end, load=load, drain=60.0))
    return outcome, histories[0]


@pytest.mark.simulation
def test_clients_of_a_frozen_node_go_on_before_the_thaw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blow = Blow(4.0, 20.0, "freeze", ("n1",))
    outcome, history = one_blow(tmp_path, monkeypatch, blow, PATIENT)
    assert outcome.sound, [*outcome.failures, *outcome.findings.found, outcome.logs]
    (freeze,) = (one for one in history.records if isinstance(one, Blown))
    for role in ("-p", "-s", "-x", "-r-"):  # publishers, members, exclusive members, readers
        assert any(role in name for name in freeze.clients), freeze.clients
    assert freeze.end - freeze.struck >= 20.0


@pytest.mark.simulation
def test_publishers_see_no_error_of_a_rolling_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blow = Blow(2.0, 1.0, "rolling", (), ("n2", "n3", "n1"))
    outcome, history = one_blow(tmp_path, monkeypatch, blow, PATIENT)
    assert outcome.sound, [*outcome.failures, *outcome.findings.found, outcome.logs]
    (restart,) = (one for one in history.records if isinstance(one, Blown))
    during = [
        one
        for one in history.records
        if isinstance(one, Publish) and restart.begin <= one.begin and one.end <= restart.settled
    ]
    assert {one.id is None for one in during if one.outcome == "ok"} == {True, False}


@pytest.mark.simulation
def test_writes_go_on_when_the_master_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blow = Blow(2.0, 9.0, "unwritable_master", ("n1",), style="EDQUOT")
    outcome, history = one_blow(tmp_path, monkeypatch, blow, PATIENT)
    assert outcome.sound, [*outcome.failures, *outcome.findings.found, outcome.logs]
    (blown,) = (one for one in history.records if isinstance(one, Blown))
    assert (blown.fault, blown.nodes) == ("unwritable_master", ["n1"])


@pytest.mark.simulation
def test_a_node_that_is_cut_off_reads_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blow = Blow(2.0, 12.0, "minority", ("n2",), style="cut")
    outcome, history = one_blow(tmp_path, monkeypatch, blow, LOAD)
    assert outcome.sound, [*outcome.failures, *outcome.findings.found, outcome.logs]
    (told,) = (one for one in history.records if isinstance(one, CutOff))
    assert (told.node, told.read, told.code) == ("n2", True, "NO_MASTER")
    assert told.end > 0
