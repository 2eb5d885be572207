"""A store on disk is a dict that happens not to be all in memory: it is compared with one, step by step."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railgun.engine.state import Disk, DiskStore, KeyStore, MemoryStore, OnDisk, StateError

pytest.importorskip("rocksdict")


class Twin:
    """Keys that are not equal but share their stable hash."""

    def __init__(self, name: int) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Twin) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Twin({self.name})"

    def __stable_key__(self) -> str:
        return "twin"


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk(OnDisk(memory=1))  # room for the keys of the present batch only
    yield disk
    disk.close()


def filled(disk: Disk, keys: list[Any]) -> DiskStore:
    """A store whose keys are all cold."""
    store = disk.store("step")
    store.put(keys, [[key] for key in keys])
    for other in ("other", "another"):  # the first one is weighed
        store.fetch([other])
    assert not store.states
    return store


# ---------------------------------------------------------------- against a dict


class Pair:
    """A store, and the dict it has to be like."""

    def __init__(self, store: KeyStore, chance: random.Random) -> None:
        self.store, self.chance = store, chance
        self.model: dict[Any, list[int]] = {}
        self.count = 0

    def batch(self, keys: list[Any]) -> None:
        """What a step does: look, change in place, put another in its place, forget."""
        states, model = self.store.states, self.model
        self.store.fetch(keys)
        for key in keys:
            assert states.get(key) == model.get(key)
            self.count += 1
            act = self.chance.random()
            if act < 0.25:
                states.pop(key, None)
                model.pop(key, None)
            elif act < 0.5 and key in states:
                states[key].append(self.count)
                model[key] = [*model[key], self.count]
            else:
                states[key] = [self.count]
                model[key] = [self.count]

    def check_all(self, size: int) -> None:
        assert len(self.store) == len(self.model)
        found = [key for block in self.store.census(size) for key in block]
        assert len(found) == len(set(found))
        assert set(found) == set(self.model)
        assert self.store.items() == self.model


def move(here: Pair, there: Pair, keys: list[Any]) -> None:
    """As `collect` and `take` do."""
    keys = [key for key in dict.fromkeys(keys) if key in here.model]
    here.store.fetch(keys)
    there.store.put(keys, [here.store.states.pop(key) for key in keys])
    there.model.update({key: here.model.pop(key) for key in keys})


KEYS = [
    *(0, 1, 2, True, 1.0, 2.0, "a", "b", "", b"a", None, (1, "a"), (1.0, "a"), (), 0.5, frozenset({1})),
    *map(Twin, range(4)),
    *(f"key {n}" for n in range(40)),
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([1, 3_000, 20_000, 1 << 20]),
    st.lists(st.tuples(st.sampled_from("bbbbmmcpv"), st.lists(st.sampled_from(KEYS), max_size=30)), max_size=30),
)  # fmt: skip
def test_it_does_what_a_dict_does(
    seed: int, memory: int, steps: list[tuple[str, list[Any]]]
) -> None:
    disk, chance = Disk(OnDisk(memory)), random.Random(seed)
    try:
        pairs = [Pair(disk.store(name), chance) for name in ("one", "two")]
        views: list[tuple[dict[Any, Any], dict[Any, Any], Iterator[Any]]] = []
        for kind, keys in steps:
            chance.shuffle(pairs)
            one, two = pairs
            if kind == "b":
                one.batch(keys)
            elif kind == "m":
                move(one, two, [key for key in keys if key not in two.model])
            elif kind == "c":
                one.check_all(chance.choice([1, 3, 1_000]))
            elif kind == "p":
                fresh = [key for key in dict.fromkeys(keys) if key not in one.model]
                one.store.put(fresh, [[key] for key in fresh])
                one.model.update({key: [key] for key in fresh})
            else:
                cut = one.store.cut(chance.choice([1, 3, 1_000]))
                hot = {key: list(one.store.states[key]) for key in cut.hot}
                views.append(({k: list(v) for k, v in one.model.items()}, hot, cut.cold))
        for then, seen, cold in views:  # whatever happened since
            for names, states in cold:
                assert not seen.keys() & set(names)
                seen.update(zip(names, states, strict=True))
            assert seen == then
        for pair in pairs:
            pair.check_all(7)
    finally:
        disk.close()


def test_a_long_run_with_room_for_some_of_the_keys() -> None:
    disk = Disk(OnDisk(memory=100_000))
    pair = Pair(disk.store("step"), random.Random(1))
    for _ in range(400):
        middle = pair.chance.randrange(5_000)
        pair.batch([int(pair.chance.gauss(middle, 50)) for _ in range(pair.chance.randint(1, 200))])
    assert isinstance(pair.store, DiskStore)
    assert 0 < len(pair.store.states) < 800 < len(pair.store)
    pair.check_all(100)
    disk.close()


# ---------------------------------------------------------------- one by one


def test_nothing_is_written_while_everything_fits() -> None:
    disk = Disk(OnDisk(memory=1 << 20))
    store = disk.store("step")
    for n in range(500):
        store.fetch([n])
        store.states[n] = n
    assert not store.spilled
    assert disk._rocks is None
    disk.close()


def test_a_store_that_nobody_closed_leaves_nothing(tmp_path: Path) -> None:
    for number in range(10):
        store = Disk(OnDisk(1, str(tmp_path))).store("step")
        for n in range(5):
            store.put([number, n + 10], ["x" * 1_000_000] * 2)
        assert store.spilled
        del store
        gc.collect()
        assert list(tmp_path.iterdir()) == []


def test_the_coldest_keys_leave_first() -> None:
    disk = Disk(OnDisk(memory=1 << 20))
    store = disk.store("step")
    for n in range(20_000):
        keys = ["often", n, n - 100 if n >= 100 else 0]
        store.fetch(keys)
        for key in keys:
            store.states.setdefault(key, "x" * 500)
    assert store.spilled
    assert "often" in store.states
    cold = [key for keys, _ in store.cut().cold for key in keys]
    assert max(cold) < 20_000 - 100, "what was touched lately is in memory"
    disk.close()


def test_memory_that_one_step_does_not_need_is_anothers() -> None:
    disk = Disk(OnDisk(memory=1 << 20))
    busy, idle = disk.store("busy"), disk.store("idle")
    alone = Disk(OnDisk(memory=1 << 20)).store("alone")
    for store in (busy, alone):
        store.fetch([1])
        store.states[1] = "x"
        store.fetch([1])
    assert busy.room == alone.room
    idle.put(list(range(2_000)), ["x" * 1_000] * 2_000)
    idle.fetch([1])
    assert busy.room == pytest.approx(alone.room / 2, rel=0.01), "at least its part"


def test_a_forgotten_key_does_not_come_back(disk: Disk) -> None:
    store = filled(disk, ["a", "b"])
    store.fetch(["a"])
    del store.states["a"]
    assert len(store) == 1
    store.fetch(["b"])
    store.fetch(["a"])
    assert "a" not in store.states
    assert [*store.census()] == [["b"]]


def test_equal_keys_are_one_key_whatever_their_type(disk: Disk) -> None:
    store = filled(disk, [1, (2, 3)])
    store.fetch([1.0])
    assert store.states == {True: [1]}
    assert type(next(iter(store.states))) is int, "the key is the one that came first"
    store.fetch([(2.0, 3)])
    assert store.states == {(2, 3): [(2, 3)]}


def test_keys_that_share_a_hash_keep_their_own_state(disk: Disk) -> None:
    twins = [Twin(n) for n in range(5)]
    store = filled(disk, twins[:3])
    store.fetch([twins[3]])
    assert not store.states
    store.states[twins[3]] = "new"
    store.fetch([twins[1]])
    assert store.states == {twins[1]: [twins[1]]}
    del store.states[twins[1]]
    store.fetch(["other"])
    assert store.items() == {twins[0]: [twins[0]], twins[2]: [twins[2]], twins[3]: "new"}
    assert len(store) == 3


def test_keys_that_are_not_equal_to_themselves_stay_in_memory(disk: Disk) -> None:
    keys = [math.nan, (1, math.nan), "a"]
    store = disk.store("step")
    store.put(keys, [1, 2, 3])
    for _ in range(3):
        store.fetch(["other"])
    assert len(store.states) == 2
    store.fetch(keys)
    assert store.states == dict(zip(keys, [1, 2, 3], strict=True))
    assert len(store) == 3


def test_state_that_cannot_be_pickled_is_named(disk: Disk) -> None:
    store = disk.store("sums")
    store.put(["ada"], [(n for n in range(3))])
    store.fetch(["ada"])
    with pytest.raises(
        StateError, match="step 'sums': the state of key 'ada' cannot be kept on disk"
    ):
        store.fetch(["other"])


def test_a_view_that_ends_too_early_is_noticed(disk: Disk) -> None:
    store = filled(disk, ["a", "b", "c"])
    store._on_disk += 1
    with pytest.raises(StateError, match="1 keys cannot be read"):
        list(store.census())


def test_an_error_of_the_database_is_typed(disk: Disk) -> None:
    store = filled(disk, ["a"])
    db, disk.rocks._db = disk.rocks._db, None
    with pytest.raises(StateError, match="could not be read"):
        store.fetch(["a"])
    disk.rocks._db = db


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(StateError, match="pip install"):
        _ = Disk().rocks


@pytest.mark.parametrize("memory", [0, -1, "1 GB", 0.5])
def test_memory_is_a_number_of_bytes(memory: Any) -> None:
    with pytest.raises(StateError, match="number of bytes"):
        OnDisk(memory)


def test_in_memory_it_is_the_dict_itself() -> None:
    pair = Pair(MemoryStore(), random.Random(0))
    for _ in range(20):
        pair.batch(pair.chance.choices(KEYS, k=10))
        pair.check_all(3)
