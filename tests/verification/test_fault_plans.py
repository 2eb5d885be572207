"""Plans of faults: bounded, seeded, never too much at once; and who does them keeps to that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.running import run
from verification.faults.history import Blown, Fault, History
from verification.faults.nemesis import (
    ALONE,
    CALM_S,
    EXCLUSIVE,
    FREEZE_S,
    HARMLESS,
    WEIGHTS,
    Blow,
    Nemesis,
    blocked,
    longest_hold,
    minority,
    plan,
)
from verification.faults.nodes import NodeProcess
from verification.ports import HIGHEST_PORT, LOWEST_PORT

NAMES = ["n1", "n2", "n3", "n4", "n5"]


def test_no_connection_of_others_can_take_the_ports_of_nodes(tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        node = NodeProcess(tmp_path, name, number)
        assert node.port != node.cluster_port
        assert all(
            LOWEST_PORT <= port < HIGHEST_PORT <= 32768 for port in (node.port, node.cluster_port)
        )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 3, 5]), st.floats(0.0, 120.0))
def test_a_plan_keeps_to_the_rules(seed: int, count: int, seconds: float) -> None:
    names = NAMES[:count]
    blows = plan(seed, names, seconds)
    assert blows == plan(seed, names, seconds)
    assert blows == sorted(blows, key=lambda one: one.at)
    assert all(one.at >= 0.5 and one.end <= seconds + 1e-9 for one in blows)
    for moment in [one.at for one in blows]:
        now = [one for one in blows if one.at <= moment < one.end]
        failing = [name for one in now for name in one.victims]
        assert len(failing) == len(set(failing)) <= minority(count)
        harmful = [one for one in now if one.kind not in HARMLESS]
        assert len(harmful) <= 1 or not any(one.kind in EXCLUSIVE for one in harmful)
    for one in blows:
        assert set(one.victims) | set(one.others) <= set(names)
        assert not set(one.victims) & set(one.others)
        assert count > 1 or one.kind in ALONE
        assert one.kind != "freeze" or one.seconds >= FREEZE_S[0]
        if one.kind in HARMLESS or one.kind == "rolling":
            assert not one.victims
        else:
            assert one.victims


def test_there_is_calm_between_rounds_and_every_kind_comes_up() -> None:
    kinds = set()
    for seed in range(60):
        blows = plan(seed, NAMES, 60.0)
        kinds |= {one.kind for one in blows}
        edges = sorted({one.end for one in blows})
        calm = [
            after.at - max(b.end for b in blows if b.at < after.at)
            for after in blows[1:]
            if all(b.end <= after.at for b in blows if b.at < after.at)
        ]
        assert calm, edges
        assert min(calm) >= CALM_S[0] - 1e-9
    assert kinds == set(WEIGHTS)
    assert {one.kind for one in plan(1, NAMES, 60.0, {"kill", "pause"})} == {"kill", "pause"}
    assert plan(1, NAMES, 60.0, set()) == []


def test_partitions_close_what_they_say() -> None:
    halves = Blow(0, 1, "halves", ("n1", "n2"))
    closed = set(blocked(halves, NAMES))
    assert len(closed) == 2 * 2 * 3
    assert ("n1", "n2") not in closed
    assert ("n3", "n1") in closed
    bridge = set(blocked(Blow(0, 1, "bridge", ("n1", "n2"), ("n3",)), NAMES))
    assert closed - bridge == {("n1", "n3"), ("n3", "n1"), ("n2", "n3"), ("n3", "n2")}
    assert list(blocked(Blow(0, 1, "kill", ("n1",)), NAMES)) == []
    held = [Blow(0, 3, "isolate", ("n1",), (), "hold"), Blow(0, 9, "isolate", ("n1",), (), "drop")]
    assert longest_hold(held) == 3
    assert longest_hold([Blow(1.0, 7.0, "minority", ("n2",), style="cut")]) == 0
    assert longest_hold([]) == 0


class World:
    """Notes what is done to it. Nodes catch up when they are told to."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.down: set[str] = set()
        self.most = 0
        self.slow: set[str] = set()

    async def begin(self, blow: Blow) -> str:
        self.down |= set(blow.victims)
        self.most = max(self.most, len(self.down))
        self.log.append(f"begin {blow.kind} {','.join(blow.victims)}")
        return ""

    async def finish(self, blow: Blow) -> str:
        self.log.append(f"end {blow.kind} {','.join(blow.victims)}")
        return ""

    async def heal(self) -> None:
        self.log.append("heal")

    async def remove(self, node: str) -> None: ...

    async def join(self, node: str) -> None: ...

    async def lead(self, node: str) -> None: ...

    async def settled(self, nodes: Sequence[str]) -> bool:
        if set(nodes) & self.slow:
            return False
        self.down -= set(nodes)
        return True


def test_blows_are_done_and_healed() -> None:
    async def main() -> None:
        world, history = World(), History()
        blows = [
            Blow(0.0, 0.05, "kill", ("n1",)),
            Blow(0.01, 0.2, "pause", ("n2",)),  # has to wait
            Blow(0.02, 0.05, "clock", (), ("n3",), "", 5.0),  # has not
        ]
        nemesis = Nemesis(blows, NAMES[:3], world, world, history)
        await nemesis.run()
        kinds = [line.rpartition(" ")[0] for line in world.log]
        assert kinds.index("begin clock") < kinds.index("end kill") < kinds.index("begin pause")
        assert world.log[-1] == "heal"
        assert (world.most, nemesis.failing, nemesis.left_out) == (1, [], [])
        told = [one.what for one in history.records if isinstance(one, Fault)]
        assert told.count("begin") == told.count("end") == 3
        blown = [one for one in history.records if isinstance(one, Blown)]
        assert len(blown) == 3
        assert all(one.begin <= one.struck <= one.end <= one.settled for one in blown)

    run(main())


def test_a_blow_is_recorded_with_the_clients_of_its_nodes() -> None:
    async def main() -> None:
        world, history = World(), History()
        blows = [
            Blow(0.0, 0.05, "freeze", ("n1",)),
            Blow(0.01, 0.3, "rolling", (), ("n3", "n2")),
        ]
        nemesis = Nemesis(
            *(blows, NAMES[:3], world, world, history),
            clients_at=lambda nodes: [f"client of {name}" for name in nodes],
        )
        await nemesis.run()
        freeze, rolling = (one for one in history.records if isinstance(one, Blown))
        assert (freeze.fault, freeze.nodes) == ("freeze", ["n1"])
        assert freeze.clients == ["client of n1"]
        assert freeze.end - freeze.struck >= 0.05
        assert (rolling.fault, rolling.nodes) == ("rolling", ["n3", "n2"])
        assert rolling.clients == ["client of n3", "client of n2"]
        assert freeze.settled <= rolling.begin  # each is alone

    run(main())


def test_who_has_not_caught_up_counts_as_failing_and_the_next_blow_is_left_out() -> None:
    async def main() -> None:
        world = World()
        world.slow = {"n1"}
        blows = [Blow(0.0, 0.02, "kill", ("n1",)), Blow(0.01, 0.1, "pause", ("n2",))]
        nemesis = Nemesis(blows, NAMES[:3], world, world, History())
        nemesis.settle = 0.5
        await nemesis.run()
        assert [one.kind for one in nemesis.left_out] == ["pause"]
        assert [one.kind for one in nemesis.unsettled] == ["kill"]
        assert nemesis.failing == ["n1"]

    run(main())


def test_exclusive_blows_are_alone_and_an_end_in_the_middle_heals() -> None:
    async def main() -> None:
        world = World()
        blows = [
            Blow(0.0, 0.05, "kill", ("n1",)),
            Blow(0.0, 0.3, "rolling", (), ("n3", "n2", "n1")),
            Blow(0.01, 0.3, "pause", ("n2",)),
        ]
        nemesis = Nemesis(blows, NAMES[:3], world, world, History())
        await nemesis.run()
        starts = [line for line in world.log if not line.startswith("end")]
        assert len(starts) == 4
        assert nemesis.failing == []

        world = World()
        nemesis = Nemesis([Blow(0.0, 60.0, "kill", ("n1",))], NAMES[:3], world, world, History())
        task = asyncio.create_task(nemesis.run())
        while not world.log:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.log == ["begin kill n1", "end kill n1", "heal"]

    run(main())
