"""Random flows on simulated workers, with random schedules: they do what a naive evaluation does."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
from tests.engine.worker.random_flows import BEGIN, Item, Maker, Plan, Reference, make_flow, plain

from railgun import Collect, Flow, Items, OnDisk, Stateful
from railgun.engine.operators import changes, keyed, stateful, stateless
from railgun.engine.protocol.frontier import LAST
from railgun.engine.protocol.placement import Placement
from railgun.engine.worker import stage
from railgun.flows.errors import FlowError
from railgun.hashing import key_hash
from railgun.testing.flow_tester import FlowTester


class Trial:
    """One flow, one schedule; `saving`: with snapshots, which it goes back to after a crash."""

    def __init__(self, seed: int, saving: bool = False, **options: Any) -> None:
        self.seed = seed
        self.saving = saving
        self.options = options
        self.since: list[tuple[str, list[Item]]] = []  # what was fed since the last snapshot
        self.random = random.Random(seed)
        self.plan = self._plan()
        self.steps: list[str] = []
        self.counts: dict[str, int] = {}

    def _plan(self) -> Plan:
        for attempt in range(100):
            plan = Maker(self.seed + attempt * 1_000_003).make()
            try:
                make_flow(plan).plan()
            except FlowError as error:
                if "flow backwards" not in str(error):
                    raise
            else:
                return plan
        raise AssertionError("no flow")

    def run(self) -> None:
        chance, plan = self.random, self.plan
        names = [node.name for node in plan.sources]
        self.tester = FlowTester(
            make_flow(plan, **self.options),
            chance.randint(1, 4),
            feed=names,
            seed=self.seed,
            now=BEGIN,
            snapshots=self.saving,
        )
        self.reference = Reference(plan, BEGIN)
        self.saved: Reference | None = None
        for _ in range(chance.randint(2, 14)):
            self.step()
        if plan.calm or plan.chain or chance.random() < 0.5:
            self.tester.settle()
            self.check_places()
        if chance.random() < 0.6:
            self.rescale()
            self.tester.run(chance.randint(0, 120))
        self.tester.finish()
        self.reference.end()
        self.check()

    def step(self) -> None:
        chance, tester, calm = self.random, self.tester, self.plan.calm
        kinds = ["feed"] * 4 + ["rescale", "rescale", "rescale", "time", "crash", "run"]
        if self.saving:
            kinds += ["snapshot"] * 3 + ["crash"]
        kind = chance.choice(kinds)
        self.steps.append(kind)
        if kind == "feed":
            node = chance.choice(self.plan.sources)
            items = self.items(node.name, chance.choice([1, 5, 30, 60]))
            self.reference.feed(node.name, items)
            self.since.append((node.name, items))
            tester.feed(node.name, items, settle=calm)
            if not calm:
                tester.run(chance.randint(0, 80))
        elif kind == "rescale":
            self.rescale()
            tester.run(chance.randint(0, 80))
        elif kind == "time":
            seconds = chance.choice([0.000_05, 0.01, 1, 30])
            self.reference.now += int(seconds * 1_000_000)
            if calm:
                tester.advance(seconds)
                self.reference.advance()
            else:
                tester.now += int(seconds * 1_000_000)
                tester.run(chance.randint(0, 40))
        elif kind == "crash" and chance.random() < 0.4:
            there = list(tester.world.processes)
            if there:
                tester.crash(chance.choice(there), settle=calm)
                self.go_back()
        elif kind == "snapshot" and calm:
            if tester.snapshot() is not None:
                self.saved, self.since = deepcopy(self.reference), []
        elif kind == "snapshot":
            tester.snapshot(settle=False)
            tester.run(chance.randint(0, 150))
        elif kind == "run":
            tester.run(chance.randint(0, 200))
        for runtime in tester.runtimes.values():
            for runner in runtime.stages:
                runner.distributor.validate()

    def go_back(self) -> None:
        """What is read again is read now; where that makes no difference, it is as if all were read again."""
        if self.saved is None:
            self.reference.restart()
            return
        now, self.reference = self.reference.now, deepcopy(self.saved)
        self.reference.now = now
        for name, items in self.since:
            self.reference.feed(name, items, advance=False)
        self.reference.advance()

    def rescale(self) -> None:
        chance = self.random
        workers = range(chance.choice([1, 2, 3, 4, 6]))
        if chance.random() < 0.3:
            pinned = {key_hash(n): chance.choice(workers) for n in (0, 1)}
            found = [k for name in self.plan.states for k in self.tester.where(name)]
            for key in chance.sample(found, min(3, len(found))):
                pinned[key_hash(key)] = chance.choice(workers)
            self.tester.place(Placement.of(workers, keys=pinned), settle=False)
        else:
            self.tester.rescale(len(workers), settle=False)

    def items(self, source: str, count: int) -> list[Item]:
        chance = self.random
        node = next(n for n in self.plan.sources if n.name == source)
        line = node.name.__len__() * 100 + int(source[-1])
        made: list[Item] = []
        for _ in range(count):
            n = self.counts[source] = self.counts.get(source, 0) + 1
            time = BEGIN + 10 * n - chance.randint(0, node.lateness) if node.timed else None
            made.append((line, (n,), chance.randrange(10_007), time))
        return made

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        tester, reference = self.tester, self.reference
        wrong = [
            x
            for x in tester.dead_letters
            if "BadRecord" not in x.error and "KeyType" not in x.error
        ]
        assert not wrong, wrong[0].error
        for name, states in reference.state.items():
            found = tester.state(name)
            assert found == states, f"{name}: {different(found, states)}"
        sinks = [node.name for node in self.plan.nodes if node.kind == "sink"]
        for name in sinks:
            there, wanted = Counter(tester.collected(name)), Counter(reference.out.get(name, []))
            assert there == wanted, f"{name}: extra {there - wanted}, missing {wanted - there}"
        letters = Counter((x.step, repr((plain(x.key), x.record))) for x in tester.dead_letters)
        wanted = Counter((step, repr((plain(key), value))) for step, key, value in reference.dead)
        assert letters == wanted, f"extra {letters - wanted}, missing {wanted - letters}"
        self.check_places()
        for runtime in tester.runtimes.values():
            assert runtime.ended
            for runner in runtime.stages:
                assert not runner.leaving
                for operator in runner.operators.keyed:
                    assert len(operator.timers) == 0

    def check_places(self) -> None:
        placement = self.tester.world.life.placement
        assert self.tester.workers == placement.workers
        for name in self.plan.states:
            for key, worker in self.tester.where(name).items():
                assert worker == placement.owner(key_hash(key)), f"{name}: {key!r}"


def different(found: dict[Any, Any], wanted: dict[Any, Any]) -> str:
    keys = [k for k in {**found, **wanted} if found.get(k) != wanted.get(k)]
    return f"{len(keys)} keys: {[(k, found.get(k), wanted.get(k)) for k in keys[:2]]}"


def try_out(seed: int, patch: pytest.MonkeyPatch, saving: bool = False, **options: Any) -> None:
    chance = random.Random(seed)
    patch.setattr(stage, "CHUNK_KEYS", chance.choice([10, 30, 1000]))
    patch.setattr(stage, "MIN_CHUNK_KEYS", chance.choice([1, 50]))
    patch.setattr(keyed, "BLOCK_KEYS", chance.choice([1, 5, 2048]))
    patch.setattr(stateless, "KEYED_BATCH_ROWS", chance.choice([1, 20, 1000]))
    patch.setattr(changes, "BLOCK_KEYS", chance.choice([1, 5, 500]))
    Trial(seed, saving, **options).run()


def seeds(first: int, end: int, *, quick: int) -> list[Any]:
    """Return the seeds from `first` to `end`; all but the first `quick` ones are slow."""
    return [
        pytest.param(seed, marks=[pytest.mark.slow] if seed >= first + quick else [])
        for seed in range(first, end)
    ]


@pytest.mark.parametrize("seed", seeds(0, 200, quick=60))
def test_random_flow(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    try_out(seed, monkeypatch)


@pytest.mark.parametrize("seed", seeds(0, 200, quick=60))
def test_random_flow_with_snapshots(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    try_out(seed, monkeypatch, saving=True)


@pytest.mark.parametrize("saving", [False, True])
@pytest.mark.parametrize("seed", seeds(1_000, 1_060, quick=20))
def test_random_flow_with_state_on_disk(
    seed: int, saving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rocksdict")
    monkeypatch.setattr(stateful, "TIMER_FETCH_KEYS", random.Random(seed).choice([1, 7, 1000]))
    memory = random.Random(seed).choice([1, 5_000, 30_000])  # for a few keys, or a few dozen
    try_out(seed, monkeypatch, saving, state=OnDisk(memory))


# ---------------------------------------------------------------- what was found, each once

FOUND = {
    "a timer that on_end sets fires when its key moves later": 0,
    "a key that moves as the sources end fires timers that the last ones set": 69,
    "a stream that is not united yet has a port other than 0": 161,
    "a new key that shares its hash with one that is about to leave stays behind": 87,
    "a worker that left is followed by one of its number, which gets its messages": 444,
    "a test that did something in the middle of a round settles too early": 506,
    "what on_end emits on a worker that was told no time is late": 830,
}


@pytest.mark.parametrize("what", FOUND)
def test_once_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try_out(FOUND[what], monkeypatch)


class Ticking(Stateful[int, int, int, int]):
    """Each timer sets the next one; one is set and cancelled with every item."""

    def initial(self) -> int:
        return 0

    def on_item(self, item: int, context: Any) -> None:
        context.set_timer(item + 10)
        context.set_timer(item + 20)
        context.cancel_timer(item + 20)

    def on_timer(self, context: Any) -> list[int]:
        context.set_timer(context.time + 10)
        return [context.time]


def ticking() -> Flow:
    flow = Flow("ticking")
    items = flow.source(Items[int]([]), name="items", time=lambda item: item)
    items.key_by(lambda item: item).stateful(Ticking(), name="ticks").sink(Collect(), name="out")
    return flow


def test_a_timer_that_is_set_by_a_last_one_does_not_fire_though_it_was_cancelled_before() -> None:
    tester = FlowTester(ticking(), workers=1, feed=["items"])
    tester.feed("items", [100])
    tester.finish()
    assert tester.collected("out") == [110]


@pytest.mark.parametrize("steps", range(0, 100, 4))
def test_timers_that_go_on_for_ever_end_also_while_keys_move(steps: int) -> None:
    tester = FlowTester(ticking(), workers=2, feed=["items"], seed=steps)
    items = list(range(100, 140))
    tester.feed("items", items)
    before = len(tester.collected("out"))
    tester.rescale(5, settle=False)
    tester.run(steps)
    tester.finish()
    fired = tester.collected("out")
    assert len(fired) == before + len(items), "what was due, and one more for each key"


def test_a_source_that_wakes_holds_time_back_at_once() -> None:
    tester = FlowTester(ticking(), workers=1, feed=["items"])
    tester.feed("items", [100])
    tester.advance(20)
    [runtime] = tester.runtimes.values()
    source = runtime.stages[0].distributor
    assert source.bound == LAST, "it is idle"
    tester._fed["items"].items.append(200)
    runtime.pump(tester.now + 5_000)
    assert source.bound == 200
