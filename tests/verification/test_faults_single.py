"""A whole fault run over one real node: kills, a bad disk and a wrong clock; and a node that is wrong is found out."""

from __future__ import annotations

import asyncio
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from tests.broker.running import run
from verification.faults.blows import ProbingAdmin, RealStriker
from verification.faults.checker import check
from verification.faults.history import Fault, LastRead, Publish, read
from verification.faults.nemesis import Blow
from verification.faults.nodes import NodeDiedError, Nodes
from verification.faults.run import HISTORY, Outcome, Run, perform
from verification.faults.workload import Load
from verification.report import Report

LOAD = Load(publishers=1, pause=0.01, members=2, requesters=1, responders=1)


def test_a_node_lives_through_kills_a_bad_disk_and_a_wrong_clock(tmp_path: Path) -> None:
    done = Run(tmp_path / "run", seed=18, nodes=1, seconds=7.0, load=LOAD, drain=30.0)
    outcome = perform(done)
    assert outcome.sound, [*outcome.failures, *outcome.findings.found, outcome.logs]
    assert sum(outcome.done.values()) >= 2
    assert outcome.acknowledged > 50
    assert not done.directory.exists()
    report = Report("one")
    outcome.check(report)
    assert report.passed


def test_a_node_whose_log_is_cut_is_found_out_and_all_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one node has lost, nobody can bring back: the checker has to see it."""
    blow = Blow(1.0, 0.2, "cut_tail", ("n1",))
    monkeypatch.setattr("verification.faults.run.plan", lambda *told: [blow])
    done = Run(tmp_path / "run", nodes=1, seconds=2.0, load=LOAD, drain=5.0)
    outcome = perform(done)
    assert not outcome.sound
    assert {"lost", "two_values"} & set(outcome.findings.counts)
    again = read(done.directory / HISTORY)
    assert check(again).counts == outcome.findings.counts
    assert any(isinstance(one, LastRead) for one in again)
    assert any("are cut off" in one.text for one in again if isinstance(one, Fault))
    assert sum(one.outcome == "ok" for one in again if isinstance(one, Publish)) > 10
    report = Report("one")
    outcome.check(report)
    assert not report.passed
    told: list[str] = []
    outcome.tell(told.append)
    assert any("lost" in line or "two_values" in line for line in told)


def test_three_nodes_that_know_nothing_of_each_other_are_no_cluster(tmp_path: Path) -> None:
    """Everything that is done to a cluster is done, and what clients see of it cannot pass."""
    done = Run(
        *(tmp_path / "run", 1, 3, 4.0),
        kinds=["isolate", "halves", "one_way", "bridge", "slow_links", "clients_cut", "kill"],
        load=replace(LOAD, publishers=3),
        settle=10.0,
        drain=2.0,
        clustered=False,
    )
    outcome = perform(done)
    assert not outcome.failures, [*outcome.failures, outcome.logs]
    assert outcome.done
    assert {"diverged", "two_values"} <= set(outcome.findings.counts)
    finals = [one for one in read(done.directory / HISTORY) if isinstance(one, LastRead)]
    assert sorted({one.node for one in finals}) == ["n1", "n2", "n3"]


def test_the_configuration_of_a_cluster_says_where_the_others_are(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    told = [tomllib.loads(nodes[name].config.read_text()) for name in nodes.names]
    assert [one["node"]["name"] for one in told] == ["n1", "n2", "n3"]
    assert [one["node"]["data"] for one in told] == ["n1", "n2", "n3"]
    assert len({one["node"]["host"] for one in told}) == 3
    ways = [one["node"]["advertise"] for one in told]
    assert ways == [f"127.0.1.{11 + n}:{nodes[f'n{n + 1}'].cluster_port}" for n in range(3)]
    for one in told:
        assert one["cluster"]["discovery"] == f"static://{','.join(ways)}"
        assert one["cluster"]["bootstrap_expect"] == 3
        assert len((tmp_path / one["cluster"]["secret_file"]).read_text()) == 64
    assert "cluster" not in tomllib.loads(Nodes(tmp_path / "one", 1)["n1"].config.read_text())


def test_blows_are_done_to_a_real_node(tmp_path: Path) -> None:
    async def main() -> None:
        nodes = Nodes(tmp_path / "run", 1)
        node = nodes["n1"]
        await nodes.start()
        try:
            admin = ProbingAdmin(nodes)
            striker = RealStriker(nodes, admin, nodes.links.chance)
            async with asyncio.timeout(10):
                while not await admin.settled(["n1"]):
                    await asyncio.sleep(0.05)
            for blow in (
                Blow(0, 1, "kill", ("n1",)),
                Blow(0, 1, "torn_kill", ("n1",)),
                Blow(0, 1, "pause", ("n1",)),
                Blow(0, 1, "failed_sync", ("n1",)),
                Blow(0, 1, "full_disk", ("n1",)),
                Blow(0, 1, "rolling", (), ("n1",)),
            ):
                await striker.begin(blow)
                if blow.kind in ("kill", "torn_kill"):
                    assert not await admin.settled(["n1"])
                assert not nodes.died
                await striker.finish(blow)
                async with asyncio.timeout(10):
                    while not await admin.settled(["n1"]):
                        await asyncio.sleep(0.05)
            assert node.starts == 5
            for kind in ("slow_disk", "clock", "slow_links", "clients_cut"):
                blow = Blow(0, 1, kind, (), ("n1",), "", 0.01)
                await striker.begin(blow)
                await striker.finish(blow)
            assert "start 5" in nodes.log_ends()
            await node.kill()
            assert not nodes.died  # it was asked for
            await striker.heal()
            assert node.up
            await node.stop()
            node.config.write_text("[node]\nnonsense = 1\n")
            with pytest.raises(NodeDiedError, match="ended at its start"):
                await node.start()
            assert nodes.died == ["n1"]
        finally:
            await nodes.stop()

    run(main(), 60.0)


def test_a_run_that_cannot_begin_fails(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "n1").write_text("no directory")
    outcome = perform(Run(tmp_path / "run", nodes=1, seconds=1.0))
    assert not outcome.sound
    assert any("ended at its start" in one for one in outcome.failures)
    assert isinstance(outcome, Outcome)
