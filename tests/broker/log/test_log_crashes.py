"""A log after a crash between any two steps, and lives of a log by chance against a naive model."""

from __future__ import annotations

import itertools
import random

import pytest
from tests.broker.log.replica_log import (
    SMALL,
    S,
    Stored,
    filled,
    kept,
    names,
    opened,
    runs_of,
    stored,
)
from verification.log_disk import LogDisk

from railgun.broker.errors import DamagedLogError
from railgun.broker.log.log import StreamLog
from railgun.testing.disks import Crash
from railgun.transport.records import build, head, split


def rotten(disk: LogDisk, segment: int, bit: int) -> None:
    """A closed log of several segments with a bad bit."""
    log = opened(disk)
    filled(log)
    log.close()
    disk.flip(f"{S}/{names(disk, '.log')[segment]}", bit)


# ------------------------------------------------------------ crashes


@pytest.mark.parametrize("power", [True, False])
@pytest.mark.parametrize(
    "act", ["cut 0", "cut 6", "cut 30", "reset 0", "reset 12", "reset 77", "repair"]
)
def test_a_crash_between_any_two_steps_leaves_the_log_as_it_was_or_all_done(
    act: str, power: bool
) -> None:
    verb, _, number = act.partition(" ")
    for step, seed in itertools.product(range(100), range(6)):
        disk = LogDisk(seed)
        if verb == "repair":
            rotten(disk, 2, 8 * 200)
            log = opened(disk)
            with pytest.raises(DamagedLogError):
                stored(log)
            assert log.damage is not None
            done: tuple[int, int] = (0, log.damage.offset)
        else:
            log = opened(disk)
            filled(log)
            done = (0, int(number)) if verb == "cut" else (int(number), int(number))
        whole = {name: disk.content(f"{S}/{name}") for name in names(disk, ".log")}
        disk.crash_at(step)
        finished = False
        try:
            if verb == "cut":
                log.cut(int(number))
            elif verb == "reset":
                log.reset(int(number))
            else:
                log.repair()
            finished = True
            disk.crash()
        except Crash:
            pass
        if power:
            disk.lose_power()
        log, found = StreamLog.open(disk, S, SMALL)
        assert found.damage is None or verb == "repair"
        assert not [*names(disk, ".reset"), *names(disk, ".tmp"), *names(disk, "0.repair")]
        now = (log.first, log.end)
        if finished:
            assert (*now, log.damage) == (*done, None)
        if now == done and log.damage is None:
            if verb == "cut":
                (side,) = names(disk, "cut-")
                cut = split(disk.content(f"{S}/{side}"))
                assert [head(one).base for one in cut] == [*range(int(number), 40, 2)]
            if verb == "repair":
                sides = names(disk, "damaged-")
                assert sum(len(disk.content(f"{S}/{one}")) for one in sides) > 1000
        else:
            assert not finished
            if log.damage is None:
                assert now == (0, 40)
                if verb == "repair":
                    with pytest.raises(DamagedLogError):
                        stored(log)
            assert {name: disk.content(f"{S}/{name}") for name in whole} == whole, "as it was"
        log.repair()
        assert log.damage is None
        begin, end, was = log.first, log.end, stored(log)
        for n in range(12):  # others, of the same sizes
            kept(log, b"MESSAGE %03d" % n, bytes(20 + n), epoch=9, now=1000)
        disk.lose_power()
        log, found = StreamLog.open(disk, S, SMALL)
        assert found.damage is None
        assert (log.first, log.end) == (begin, end + 24)
        assert stored(log)[: len(was)] == was
        assert log.runs == runs_of(stored(log), log.first)
        assert all(log.read(offset, 1) for offset in range(log.first, log.end)), "indexes are right"
        if finished and seed == 5:
            return
    pytest.fail("it never ended")


def test_no_index_of_another_past_is_believed() -> None:
    """Segments of the same names and sizes, but other batches in them, whose indexes are lost with the power."""
    for seed in range(30):
        disk = LogDisk(seed)
        log = opened(disk)
        for n in range(20):
            kept(log, b"%03d" % n, bytes(57), epoch=1)
        before = {name: len(disk.content(f"{S}/{name}")) for name in names(disk, ".log")}
        log.close()
        log = opened(disk)
        log.cut(2)
        for n in range(1, 20):
            kept(log, b"%03d" % n, bytes(57), epoch=2 + n // 3, now=n)
        after = {name: len(disk.content(f"{S}/{name}")) for name in names(disk, ".log")}
        assert [*before][1:3] == [*after][1:3]
        expected = log.runs
        disk.lose_power()
        log = opened(disk)
        assert log.runs == expected == runs_of(stored(log), 0), seed


# ------------------------------------------------------------ by chance


class Model:
    """What a log should have, in the simplest way there is."""

    def __init__(self) -> None:
        self.batches: list[Stored] = []
        self.first = 0
        self.begin = 0  # of the log, when there is no batch

    @property
    def end(self) -> int:
        if not self.batches:
            return self.begin
        base, _, payloads = self.batches[-1]
        return base + len(payloads)

    def kept(self) -> list[Stored]:
        return [one for one in self.batches if one[0] + len(one[2]) > self.first]

    def cut(self, offset: int) -> None:
        self.batches = [one for one in self.batches if one[0] < offset]
        if not self.batches:
            self.begin = offset
        self.first = min(self.first, offset)

    def reset(self, base: int) -> None:
        self.batches, self.first, self.begin = [], base, base

    def copy(self) -> Model:
        made = Model()
        made.batches, made.first, made.begin = [*self.batches], self.first, self.begin
        return made

    def check(self, log: StreamLog, most: int) -> None:
        assert (log.first, log.end) == (self.first, self.end)
        if log.durable_end == log.end:
            assert stored(log, most) == self.kept()
        assert log.runs == runs_of(self.kept(), self.first)
        for base, epoch, payloads in self.kept():
            for offset in range(max(base, self.first), base + len(payloads)):
                assert log.epoch_at(offset) == epoch


class Life:
    """A log that many things happen to, and what becomes of its model."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = LogDisk(seed)
        self.log = opened(self.disk)
        self.model = Model()
        self.maybe: list[Model] = []  # what it may be after a crash, besides the model
        self.durable = 0
        self.lowest = 0  # the first offset may be this, after a crash
        self.epoch = 1
        self.counts: dict[str, int] = {}

    def act(self) -> None:
        names = ["append"] * 6 + ["sync"] * 3 + ["roll", "cut", "reset", "trim", "purge", "reopen"]
        name = self.chance.choice(names)
        self.counts[name] = self.counts.get(name, 0) + 1
        self.lowest = self.model.first
        getattr(self, name)()
        self.maybe = []
        self.model.check(self.log, self.chance.choice((1, 300, 5000)))
        assert self.log.durable_end >= self.durable

    def append(self) -> None:
        batches = []
        self.epoch += self.chance.random() < 0.3
        for _ in range(self.chance.randint(1, 3)):
            count = self.chance.randint(1, 4)
            payloads = [
                self.chance.randbytes(self.chance.choice((4, 4, 100))) for _ in range(count)
            ]
            batch = build(payloads)
            self.model.batches.append((self.model.end, self.epoch, payloads))
            batches.append(batch)
        self.log.stamp(batches, self.epoch, len(self.model.batches))
        self.log.append(batches)

    def sync(self) -> None:
        self.durable = self.log.sync()

    def roll(self) -> None:
        self.log.roll()
        self.durable = max(self.durable, self.log.durable_end)

    def cut(self) -> None:
        places = [base for base, _, _ in self.model.batches if base >= self.model.first]
        offset = self.chance.choice([*places, self.model.end])
        count = self.model.end - offset
        after = self.model.copy()
        after.cut(offset)
        self.maybe = [after]
        assert self.log.cut(offset) == count
        self.model, self.durable = after, offset if count else self.durable

    def reset(self) -> None:
        base = self.chance.choice((self.model.end + 5, self.model.first, 0, 3))
        after = Model()
        after.reset(base)
        self.maybe = [after]
        self.log.reset(base)
        self.model, self.durable = after, base

    def trim(self) -> None:
        self.model.first = 1 << 62  # for a crash: anything up to there
        try:
            first = self.log.trim(None, self.chance.choice((0, 700, 2000)), 0)
        finally:
            self.model.first = self.lowest
        self.model.first = first

    def purge(self) -> None:
        before = self.chance.randint(self.log.first, self.log.durable_end)
        assert self.log.purge(before) == before
        self.model.first = before

    def reopen(self) -> None:
        self.log.close()
        self.durable = self.model.end
        self.log = opened(self.disk)

    def decay(self) -> None:
        """A bit flips, somebody finds out, and it is repaired; perhaps with a crash on the way."""
        self.log.close()
        self.durable = self.model.end
        path = f"{S}/{self.chance.choice(names(self.disk, '.log'))}"
        good = self.disk.content(path)
        if not good:
            self.log = opened(self.disk)
            return
        self.disk.flip(path)
        if self.chance.random() < 0.5:
            for index in names(self.disk, ".idx"):
                self.disk.remove(f"{S}/{index}")
        end = self.found()
        if end is None:  # in what is not read any more, or the mark of the close: no loss
            self.disk.crash()
            self.disk.replace(path, good)
            self.log = opened(self.disk)
            return
        self.counts["repair"] = self.counts.get("repair", 0) + 1
        if self.chance.random() < 0.7:
            self.disk.crash_at(self.chance.randrange(25))
        try:
            self.log.repair()
        except Crash:
            if self.chance.random() < 0.8:
                self.disk.lose_power()
            again = self.found()
            assert again in (end, None)
            if again is None and self.log.end > end:
                # an index is back that was removed, and the bad bit is in what nobody reads: purged, or a mark
                assert stored(self.log) == self.model.kept()
                self.disk.crash()
                self.disk.replace(path, good)
                self.log = opened(self.disk)
                self.model.check(self.log, 500)
                return
            assert self.log.end == end
            self.log.repair()
        self.disk.hook = None
        self.model.cut(end)
        self.durable = end
        self.model.check(self.log, 500)

    def found(self) -> int | None:
        """Open the log, and read all of it: where it is damaged."""
        self.log = opened(self.disk)
        if self.log.damage is None:
            try:
                stored(self.log)
            except DamagedLogError:
                assert self.log.damage is not None
        return None if self.log.damage is None else self.log.damage.offset

    def survive(self) -> None:
        """The program is gone, perhaps with the power; whatever was going on has happened or not."""
        if self.chance.random() < 0.8:
            self.disk.lose_power()
        else:
            self.disk.crash()
        self.log, found = StreamLog.open(self.disk, S, SMALL)
        assert found.damage is None, str(found)
        for after in self.maybe:
            if (self.log.first, self.log.end) == (after.first, after.end) and (
                stored(self.log) == after.kept()
            ):
                self.model = after
        model = self.model
        if self.log.end < model.end:
            assert self.log.end >= self.durable, "what was synced is there"
            model.cut(self.log.end)
        assert self.log.first >= min(self.lowest, model.end)
        model.first = self.log.first
        self.maybe, self.durable = [], self.log.end
        model.check(self.log, 700)


@pytest.mark.parametrize("block", range(8))
def test_whatever_happens_to_a_log_it_is_what_a_naive_model_says(block: int) -> None:
    counts: dict[str, int] = {}
    for seed in range(block * 15, block * 15 + 15):
        life = Life(seed)
        for _ in range(6):
            life.disk.crash_at(life.chance.randrange(life.chance.choice((10, 100, 300))))
            try:
                for _ in range(40):
                    life.act()
                life.disk.hook = None
            except Crash:
                pass
            life.survive()
            if life.chance.random() < 0.7:
                life.decay()
        for name, count in life.counts.items():
            counts[name] = counts.get(name, 0) + count
    assert min(counts[name] for name in ("cut", "reset", "trim", "purge", "reopen", "repair")) > 5
