"""The group log: states come back as they were synced, whatever happens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from verification.log_disk import LogDisk

from railgun.broker.errors import ClosedError, LogFailedError, NoSpaceError
from railgun.broker.log.committer import Committer
from railgun.broker.log.disk import NodeDisk
from railgun.broker.log.group_log import DamagedGroupLogError, Fold, GroupLog
from railgun.broker.protocol.groups import (
    Change,
    Cut,
    Saved,
    Settled,
    Sought,
    Standing,
    Stands,
    Unreported,
    Unsettled,
)
from railgun.broker.streams.groups import Kept, pack
from railgun.broker.streams.groups import fold as groups
from railgun.testing.disks import Crash

State = list[int]
PATH = "orders/groups"


def apply(state: State | None, change: bytes) -> State:
    """The last three numbers: order matters, and each counts once."""
    return [*(state or []), int(change)][-3:]


FOLD: Fold[State] = Fold(apply, lambda state: json.dumps(state).encode(), json.loads)


def opened(disk: LogDisk, rewrite: int = 500) -> tuple[GroupLog[State], dict[str, State]]:
    return GroupLog.open(disk, "orders", FOLD, rewrite)


def test_ps_10_what_groups_have_done_is_there_after_a_restart(tmp_path: Path) -> None:
    disk = NodeDisk(tmp_path)
    log, states = GroupLog.open(disk, "orders", FOLD)
    assert states == {}
    log.append([("billing", b"1"), ("mäil", b"7"), ("billing", b"2")])
    log.append([])
    log.sync()
    log.append([("billing", b"3")])
    log.sync()
    assert log.load() == {"billing": [1, 2, 3], "mäil": [7]}
    log.append([("billing", None)])
    log.append([("billing", b"9")])
    log.close()
    log, states = GroupLog.open(disk, "orders", FOLD)
    assert states == {"billing": [9], "mäil": [7]}
    assert log.cut_bytes == 0
    log.close()
    log.close()
    with pytest.raises(ClosedError):
        log.append([("billing", b"1")])


@pytest.mark.parametrize("seed", range(20))
def test_a_group_comes_back_from_its_changes_and_from_the_whole(seed: int) -> None:
    chance, saved, parts = random.Random(seed), Saved(), []
    for _ in range(chance.choice([3, 30, 2000])):
        first = chance.randint(0, 5000)
        end = first + chance.randint(1, 9)
        kinds: list[Change] = [
            Settled(first, end),
            Unsettled(first, end, Standing(chance.randint(0, 3), chance.choice(["", "«é»"]))),
            Stands(chance.randint(0, 9), first),
            Unreported(((first, end),)),
            Unreported(()),
            Cut(first + 3000),
            Sought(first, chance.randint(0, 9)),
        ]
        (change,) = chance.choices(kinds, [60, 30, 3, 3, 1, 2, 0.1])
        saved.apply(change)
        parts.append(pack([change]))
    told: Kept | None = None
    for part in parts:
        told = groups.apply(told, part)
    assert told == saved
    assert groups.load(groups.dump(saved)) == saved
    assert groups.apply(None, pack(saved.changes())) == saved
    twin = groups.load(groups.dump(saved))
    assert isinstance(twin, Saved)
    for one in (saved, twin):
        one.apply(Settled(100, 4000))
        one.apply(Unsettled(4500, 4600, Standing(1)))
    assert (twin, twin.done.total) == (saved, saved.done.total)


def test_it_is_written_anew_when_it_has_grown() -> None:
    disk = LogDisk()
    log, _ = opened(disk)
    sizes = []
    for n in range(300):
        log.append([(f"group{n % 3}", b"%d" % n)])
        log.sync()
        sizes.append(log.size)
    assert max(sizes) < 700
    assert min(sizes[10:]) < 150
    disk.lose_power()
    _, states = opened(disk)
    assert states == {f"group{n}": [291 + n, 294 + n, 297 + n] for n in range(3)}


def test_large_states_are_not_written_anew_all_the_time() -> None:
    disk = LogDisk()
    log, _ = opened(disk, rewrite=100)
    for n in range(200):
        log.append([(f"group{n}", b"1")])
    log.sync()
    renames = []
    disk.hook = lambda step, path: renames.append(path) if step == "rename" else None
    for n in range(100):
        log.append([(f"group{n}", b"2")])
        log.sync()
    assert len(renames) <= 1


def test_a_torn_tail_is_cut_off() -> None:
    disk = LogDisk()
    log, _ = opened(disk)
    log.append([("a", b"1")])
    log.sync()
    size = log.size
    log.append([("a", b"2"), ("a", b"3")])
    whole = disk.content(PATH)
    for end in range(size, len(whole)):
        for filling in (b"", bytes(50), b"\xff" * 50):
            disk.replace(PATH, whole[:end] + filling)
            log, states = opened(disk)
            assert states in ({"a": [1]}, {"a": [1, 2]})
            assert log.cut_bytes or not filling
            log.append([("a", b"4")])
            log.sync()
            assert opened(disk)[1]["a"][-1] == 4


def test_no_bit_in_the_middle_flips_unseen_and_nothing_is_truncated() -> None:
    disk = LogDisk()
    log, _ = opened(disk)
    for n in range(3):
        log.append([("a", b"%d" % n)])
        log.sync()
    log.close()
    whole = disk.content(PATH)
    for bit in range(8 * (len(whole) - 24)):
        disk.replace(PATH, whole)
        disk.flip(PATH, bit)
        flipped = disk.content(PATH)
        with pytest.raises(DamagedGroupLogError, match="Nothing was changed") as error:
            opened(disk)
        assert disk.content(PATH) == flipped
        before = error.value.offset
        assert error.value.states == ({"a": [*range(before)]} if before else {})


def test_a_full_disk_and_a_failed_sync() -> None:
    disk = LogDisk()
    log, _ = opened(disk)
    log.append([("a", b"1")])
    log.sync()
    disk.room = disk.used() + 50
    with pytest.raises(NoSpaceError):
        log.append([("a", b"2"), ("a", b"3")])
    assert log.load() == {"a": [1]}
    disk.room = None
    log.append([("a", b"4")])
    log.sync()
    disk.fail_syncs = 1
    log.append([("a", b"5")])
    with pytest.raises(LogFailedError):
        log.sync()
    with pytest.raises(LogFailedError):
        log.append([("a", b"6")])
    disk.lose_power()
    assert opened(disk)[1] == {"a": [1, 4]}


def test_a_rewrite_without_room_is_put_off() -> None:
    disk = LogDisk()
    log, _ = opened(disk, rewrite=10_000)
    for n in range(300):
        log.append([("a", b"%d" % n)])
    disk.room = disk.used() + 40
    log.append([("a", b"300")])
    log.sync()
    assert disk.list("orders") == ["groups"]
    disk.room = None
    for n in range(301, 1000):
        log.append([("a", b"%d" % n)])
        log.sync()
    assert log.size < 10_100
    assert log.load() == {"a": [997, 998, 999]}


def test_it_can_be_committed_to() -> None:
    log, _ = opened(LogDisk())
    committer = Committer()
    told: list[object] = []
    for n in range(100):
        committer.submit(log, [("a", b"%d" % n)], told.append)
    committer.close()
    assert told == [None] * 100
    assert log.load() == {"a": [97, 98, 99]}


@pytest.mark.parametrize("block", range(4))
def test_ps_1_nothing_synced_is_lost_by_power_cuts(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        chance = random.Random(seed)
        disk = LogDisk(seed)
        history: list[tuple[str, int]] = []
        synced = number = 0
        for _ in range(4):
            log, states = opened(disk)
            fitting = [
                end for end in range(synced, len(history) + 1) if fold(history[:end]) == states
            ]
            assert fitting, (seed, states)
            del history[fitting[0] :]
            synced = len(history)
            disk.crash_at(chance.randrange(chance.choice((5, 120))))
            try:
                while True:
                    changes = []
                    for _ in range(chance.randint(1, 3)):
                        number += 1
                        changes.append((chance.choice("abc"), number))
                    history += changes
                    log.append([(group, b"%d" % n) for group, n in changes])
                    if chance.random() < 0.6:
                        ends = len(history)
                        log.sync()
                        synced = ends
            except Crash:
                pass
            if chance.random() < 0.8:
                disk.lose_power()


def fold(history: list[tuple[str, int]]) -> dict[str, State]:
    states: dict[str, State] = {}
    for group, n in history:
        states[group] = apply(states.get(group), b"%d" % n)
    return states
