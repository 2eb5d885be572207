"""Snapshots while keys move and workers leave, on simulated workers: what is saved is of one moment, everywhere."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from railgun import FORGET, Flow, Items, Place, TwoPhaseSink, TwoPhaseWriter
from railgun.testing.flow_tester import FlowTester

KEYS = 60
LIVES = 3  # records after which a key is forgotten, and begins anew


class Shelf(TwoPhaseSink[Any]):
    """Output in memory, seen once it is committed."""

    def __init__(self) -> None:
        self.staged: dict[str, list[Any]] = {}
        self.seen: list[Any] = []
        self.known: set[str] = set()

    def open(self, place: Place) -> TwoPhaseWriter[Any]:
        return Shelver(self, place)

    def commit(self, token: Any) -> None:
        assert token in self.staged or token in self.known, "output of a whole snapshot is lost"
        self.known.add(token)
        self.seen += self.staged.pop(token, [])

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Any]) -> None:
        for token in tokens:
            self.commit(token)
        for token in list(self.staged):
            if int(token.split("/")[0]) < generation:
                del self.staged[token]


class Shelver(TwoPhaseWriter[Any]):
    def __init__(self, shelf: Shelf, place: Place) -> None:
        self.shelf, self.place = shelf, place
        self.items: list[Any] = []

    def write(self, items: Sequence[Any]) -> None:
        self.items += items

    def prepare(self, snapshot: int) -> Any:
        if not self.items:
            return None
        token = f"{self.place.generation}/{snapshot}/{uuid.uuid4()}"
        self.shelf.staged[token], self.items = self.items, []
        return token


def live(count: int, item: int) -> tuple[Any, tuple[int, int]]:
    count += 1
    return FORGET if count == LIVES else count, (item % KEYS, count)


def expected(items: Sequence[int]) -> Counter[tuple[int, int]]:
    """What comes out, and how often, if all goes well."""
    out: Counter[tuple[int, int]] = Counter()
    for key, times in Counter(item % KEYS for item in items).items():
        out.update((key, n % LIVES + 1) for n in range(times))
    return out


@pytest.mark.simulation
@pytest.mark.parametrize("seed", range(60))
def test_what_a_snapshot_holds_is_of_one_moment_though_keys_move_and_workers_leave(
    seed: int,
) -> None:
    chance = random.Random(seed)
    shelf = Shelf()
    flow = Flow("shelved")
    nothing: list[int] = []
    numbers = flow.source(Items(nothing), name="numbers")
    lives = numbers.key_by(lambda n: n % KEYS).stateful_map(live, initial=int, name="lives")
    lives.sink(shelf, name="shelf")
    tester = FlowTester(flow, chance.randint(1, 4), feed=["numbers"], seed=seed, snapshots=True)
    fed: list[int] = []

    def feed(settle: bool = False) -> None:
        items = [chance.randrange(KEYS) for _ in range(chance.randint(1, 80))]
        fed.extend(items)
        tester.feed("numbers", items, settle=settle)

    life = tester.world.life

    def until(condition: Callable[[], bool]) -> None:
        while not condition() and tester.run(1):
            if chance.random() < 0.3:
                feed()

    for _ in range(5):
        feed(settle=True)
        size = chance.choice([n for n in range(1, 5) if n != len(tester.workers)])
        tester.rescale(size, settle=False)
        until(lambda: life.coordinator is not None and life.coordinator.phase == "moving")
        tester.run(chance.randint(0, 10))
        before = life.saving.number
        tester.snapshot(settle=False)
        until(lambda before=before: (life.saving.committed or 0) > before)  # type: ignore[misc]
        if chance.random() < 0.5:  # whatever is only in what comes after it must be there, too
            tester.run(chance.randint(0, 30))
            feed()
            tester.snapshot()
        tester.crash(chance.choice(tester.workers))
    tester.finish()
    assert Counter(shelf.seen) == expected(fed)


class Roll(Shelf):
    """Output in memory, committed for all workers at once, in the order of rescales."""

    commits_together = True

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[int] = []

    def open(self, place: Place) -> TwoPhaseWriter[Any]:
        return Scribe(self, place)

    def commit_all(self, tokens: Sequence[Any]) -> None:
        self.commits.append(len(tokens))
        for _, _, part in sorted(part for token in tokens for part in token):
            self.commit(part)

    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Any]) -> None:
        if tokens:
            self.commit_all(tokens)
        super().recover(flow, step, generation, [])


class Scribe(Shelver):
    def __init__(self, roll: Roll, place: Place) -> None:
        super().__init__(roll, place)
        self.rescale = 0
        self.parts: list[list[Any]] = []

    def keys_arrive(self, rescale: int) -> None:
        self.end_part(0)
        self.rescale = rescale

    def end_part(self, snapshot: int) -> None:
        number, part = len(self.parts), super().prepare(snapshot)
        if part is not None:
            self.parts.append([self.rescale, number, part])

    def prepare(self, snapshot: int) -> Any:
        self.end_part(snapshot)
        parts, self.parts = self.parts, []
        return parts or None


def count(state: int, item: int) -> tuple[int, tuple[int, int]]:
    return state + 1, (item % KEYS, state + 1)


@pytest.mark.simulation
@pytest.mark.parametrize("seed", range(60))
def test_results_of_a_key_stay_in_order_though_it_moves_within_a_snapshot(seed: int) -> None:
    chance = random.Random(f"order {seed}")
    roll = Roll()
    flow = Flow("rolled")
    nothing: list[int] = []
    numbers = flow.source(Items(nothing), name="numbers")
    counts = numbers.key_by(lambda n: n % KEYS).stateful_map(count, initial=int, name="counts")
    counts.sink(roll, name="roll")
    tester = FlowTester(flow, chance.randint(1, 4), feed=["numbers"], seed=seed, snapshots=True)
    fed: Counter[int] = Counter()

    def feed() -> None:
        items = [chance.randrange(KEYS) for _ in range(chance.randint(1, 200))]
        fed.update(items)
        tester.feed("numbers", items, settle=False)
        tester.run(chance.randint(0, 30))

    crashes = 4  # a flow that fails more often in a short time ends
    for _ in range(4):
        for _ in range(chance.randint(1, 4)):
            feed()
            others = [n for n in range(1, 5) if n != len(tester.workers)]
            tester.rescale(chance.choice(others), settle=False)
            feed()
            tester.settle()
            if crashes and chance.random() < 0.2:
                crashes -= 1
                tester.crash(chance.choice(tester.workers))
        tester.snapshot(settle=chance.random() < 0.7)
        feed()
    tester.finish()
    for key in range(KEYS):
        assert [n for k, n in roll.seen if k == key] == [*range(1, fed[key] + 1)], key
    assert max(roll.commits) > 1  # the tokens of several workers
