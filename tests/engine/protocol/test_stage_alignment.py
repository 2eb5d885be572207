"""Barriers where several stages lead into one: what was sent before them, and what after."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise

import pytest

from railgun.engine.protocol.stage_alignment import Alignment
from railgun.errors import ProtocolError


class Stage:
    """What comes of the events of several stages before, each with its barriers; as `StageRunner` does it."""

    def __init__(self, before: range) -> None:
        self.alignment: Alignment[int] = Alignment(before)
        self.taken: list[tuple[int, int]] = []
        self.cuts: list[int] = []  # how much had been taken

    def event(self, origin: int, event: int) -> None:
        if self.alignment.waits(origin):
            self.alignment.wait(origin, event)
        else:
            self.taken.append((origin, event))

    def barrier(self, origin: int, snapshot: int) -> bool:
        if not self.alignment.barrier(origin, snapshot):
            return False
        self.cuts.append(len(self.taken))
        for waited, event in self.alignment.release():
            self.event(waited, event)
        return True


@pytest.mark.parametrize("block", range(4))
def test_what_is_before_the_barrier_is_before_the_cut_and_the_rest_after_it(block: int) -> None:
    for seed in range(block * 250, block * 250 + 250):
        chance = random.Random(seed)
        before = range(chance.randint(1, 5))
        snapshots = chance.randint(1, 4)
        # Of each stage: numbered events, and for each snapshot where its barrier is.
        sent = {
            origin: [[chance.random() for _ in range(chance.randint(0, 6))] for _ in range(snapshots + 1)]
            for origin in before
        }  # fmt: skip
        queues: dict[int, deque[int | None]] = {}
        expected: dict[int, list[list[int]]] = {}
        for origin, parts in sent.items():
            count = iter(range(1000))
            expected[origin] = [[next(count) for _ in part] for part in parts]
            queue: deque[int | None] = deque(expected[origin][0])
            for part in expected[origin][1:]:
                queue.append(None)
                queue.extend(part)
            queues[origin] = queue
        stage = Stage(before)
        number = dict.fromkeys(before, 0)
        while any(queues.values()):
            origin = chance.choice([o for o in before if queues[o]])
            if queues[origin][0] is not None:
                event = queues[origin].popleft()
                assert event is not None
                stage.event(origin, event)
            elif not stage.alignment.waits(origin):  # one snapshot at a time
                queues[origin].popleft()
                number[origin] += 1
                stage.barrier(origin, number[origin])
            elif all(o in stalled(stage, queues) for o in before if queues[o]):
                pytest.fail(f"seed {seed}: nobody can go on")
        assert len(stage.cuts) == snapshots, f"seed {seed}"
        bounds = [0, *stage.cuts, len(stage.taken)]
        for origin in before:
            parts = [
                [event for who, event in stage.taken[a:b] if who == origin]
                for a, b in pairwise(bounds)
            ]
            assert parts == expected[origin], f"seed {seed}, stage {origin}"


def stalled(stage: Stage, queues: dict[int, deque[int | None]]) -> list[int]:
    return [o for o, q in queues.items() if q and q[0] is None and stage.alignment.waits(o)]


def test_one_stage_before_never_waits() -> None:
    stage = Stage(range(1))
    stage.event(0, 1)
    assert stage.barrier(0, 1)
    stage.event(0, 2)
    assert stage.taken == [(0, 1), (0, 2)]
    assert stage.cuts == [1]


def test_a_stage_that_reads_has_its_barrier_from_the_controller() -> None:
    alignment: Alignment[str] = Alignment([])
    assert alignment.barrier(-1, 1)
    assert alignment.release() == []
    assert alignment.barrier(-1, 2)


def test_what_waited_keeps_the_order_in_which_it_came() -> None:
    alignment: Alignment[str] = Alignment([0, 1, 2])
    alignment.barrier(0, 1)
    alignment.wait(0, "a")
    alignment.barrier(2, 1)
    alignment.wait(2, "b")
    alignment.wait(0, "c")
    assert alignment.barrier(1, 1)
    assert alignment.release() == [(0, "a"), (2, "b"), (0, "c")]
    assert alignment.release() == []
    assert not alignment.waits(0)


def test_a_barrier_comes_once_from_a_stage() -> None:
    alignment: Alignment[str] = Alignment([0, 1])
    alignment.barrier(0, 1)
    with pytest.raises(ProtocolError, match="stage 0"):
        alignment.barrier(0, 1)


def test_two_snapshots_are_not_aligned_at_a_time() -> None:
    alignment: Alignment[str] = Alignment([0, 1])
    alignment.barrier(0, 1)
    with pytest.raises(ProtocolError, match="snapshot 2"):
        alignment.barrier(1, 2)
