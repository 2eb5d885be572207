"""Stored time and IDs in worlds where every clock may be wrong, jump, and belong to another master a moment later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from railgun.broker.protocol.dedup import Duplicate, IdBox, Lookback
from railgun.broker.protocol.stored_time import (
    SLEW,
    PacedClock,
    StreamTime,
    max_advance,
    min_elapsed,
)

BOX = 10_000
YEAR = 365 * 24 * 3600 * 1_000_000


def test_paced_time_starts_with_the_time_of_day_and_never_leaps() -> None:
    clock = PacedClock()
    assert clock.read(5 * YEAR, 7) == 5 * YEAR
    assert clock.read(9 * YEAR, 1007) == 5 * YEAR + 1100
    assert clock.stepped == 4 * YEAR - 1100
    assert clock.read(0, 2007) == 5 * YEAR + 2000
    assert clock.read(0, 1000) == 5 * YEAR + 2000  # a steady clock that does not do as it should


def test_paced_time_meets_a_time_of_day_that_is_a_little_off() -> None:
    clock = PacedClock()
    clock.read(1000, 0)
    assert clock.read(2050, 1000) == 2050
    assert clock.read(3000, 2000) == 3000  # slower for a while
    assert clock.stepped == 0


def test_stored_time_that_is_ahead_moves_on_at_half_speed_until_paced_time_is_there() -> None:
    time = StreamTime()
    assert [time.at(t, 1000, t) for t in (0, 500, 900)] == [1000, 1250, 1450]
    assert time.at(2000, 1450, 1900) == 2000
    assert time.at(2000, 3000, 1900) == 3000  # ahead once more: counted anew


@dataclass
class Machine:
    """A node: its time of day is wrong by `off`."""

    off: int
    clock: PacedClock = field(default_factory=PacedClock)
    stream: StreamTime = field(default_factory=StreamTime)


Stored = tuple[int, int, bytes]  # epoch, stored time, ID


class World:
    """One stream, whose masters come and go; real time is known to nobody but the test."""

    def __init__(self, chance: Random, look: Callable[[int], Lookback] = Lookback) -> None:
        self.chance, self.look = chance, look
        self.real, self.boot = 1_000_000, 0
        self.log: list[Stored] = []
        self.epoch = 0
        self.accepted: dict[bytes, int] = {}
        self.early = 0
        self.take_over()

    def take_over(self) -> None:
        """Another node becomes the master, or the same one after a restart; any clock, any boot."""
        off = self.chance.choice([0, 0, 50, -50, 3 * BOX, -3 * BOX, YEAR, -YEAR])
        self.machine = Machine(off)
        self.boot = self.chance.randrange(0, 1_000_000)
        self.epoch += 1
        self.box = IdBox(BOX, 10**6)
        self.machine.clock.read(self.wall, self.steady)
        look, now = self.look(BOX), self.steady
        found: list[list[tuple[bytes, int, int]]] = []
        for epoch in sorted({entry[0] for entry in self.log}, reverse=True):
            run = [(n, e[1], e[2]) for n, e in enumerate(self.log) if e[0] == epoch]
            first, last = run[0][1], run[-1][1]
            inside = [one for one in run if one[1] >= look.oldest(last)]
            found.append([(i, n, look.time_of(time, last, now)) for n, time, i in inside])
            if not look.passed(first, last):
                break
        for one in reversed(found):
            for id, base, time in one:
                self.box.restore([id], base, time)
        self.box.validate()

    @property
    def wall(self) -> int:
        return self.real + self.machine.off

    @property
    def steady(self) -> int:
        return self.boot + self.real

    def publish(self) -> None:
        id = b"%d" % self.chance.randrange(12)
        (verdict,) = self.box.check([id], self.steady)
        if isinstance(verdict, Duplicate):
            return
        if id in self.accepted and self.real < self.accepted[id] + BOX:
            self.early += 1
        paced = self.machine.clock.read(self.wall, self.steady)
        last = self.log[-1][1] if self.log else -(10**18)
        time = max(last, self.machine.stream.at(paced, last, self.steady))
        self.box.begin([id], len(self.log))
        self.box.accepted(len(self.log), len(self.log), self.steady)
        self.log.append((self.epoch, time, id))
        self.accepted[id] = self.real

    def step(self) -> None:
        self.real += self.chance.choice([1, 10, 100, 700])
        what = self.chance.random()
        if what < 0.06:
            self.take_over()
        elif what < 0.12:  # the time of day jumps while the node runs
            self.machine.off = self.chance.choice([0, 3 * BOX, -3 * BOX, YEAR, -YEAR])
        else:
            self.publish()

    def live(self, steps: int) -> None:
        lives: dict[int, tuple[int, int]] = {}  # where each epoch began: real and stored time
        for _ in range(steps):
            before = len(self.log)
            self.step()
            if len(self.log) > before:
                real, stored = lives.setdefault(self.epoch, (self.real, self.log[-1][1]))
                passed = self.real - real
                assert self.log[-1][1] - stored <= passed + passed // SLEW + 1, "it has leapt"
        assert [time for _, time, _ in self.log] == sorted(time for _, time, _ in self.log)


def early(look: Callable[[int], Lookback] = Lookback, seeds: int = 150) -> int:
    """How many IDs were forgotten inside their box."""
    count = 0
    for seed in range(seeds):
        world = World(Random(seed), look)
        world.live(200)
        count += world.early
    return count


def test_no_clock_makes_an_id_forgotten_inside_its_box() -> None:
    assert early(seeds=400) == 0


def test_stored_time_that_is_ahead_is_not_pinned() -> None:
    """A batch was stored a year ahead; whoever is master then, stored time moves on."""
    for seed in range(20):
        world = World(Random(seed))
        world.log.append((world.epoch, world.real + YEAR, b"x"))
        world.machine.off = 0
        world.take_over()
        world.machine = Machine(0)
        before = world.log[-1][1]
        for n in range(10):
            world.real += 1000
            paced = world.machine.clock.read(world.wall, world.steady)
            time = world.machine.stream.at(paced, world.log[-1][1], world.steady)
            world.log.append((world.epoch, time, b"%d" % n))
        assert world.log[-1][1] >= before + 4 * 1000


class CountsEverything(Lookback):
    """What lies between two epochs counts as age: the clock of another master is believed."""

    def __init__(self, box: int) -> None:
        super().__init__(box)
        self._newest: int | None = None

    def oldest(self, last: int) -> int:
        self._newest = last if self._newest is None else self._newest
        return self._newest - max_advance(BOX)


class TooOld(Lookback):
    """Believes stored time to the letter, though it may have gained."""

    def time_of(self, stored: int, last: int, now: int) -> int:
        return now - (self._advance + last - stored) * (SLEW + 1) // SLEW


class StopsAtOnce(Lookback):
    """Looks at the last epoch only."""

    def passed(self, first: int, last: int) -> bool:
        return False


@pytest.mark.parametrize("mutant", [CountsEverything, TooOld, StopsAtOnce])
def test_mutants_forget_early(mutant: type[Lookback]) -> None:
    assert early(mutant) > 0


def test_the_bounds_of_stored_time_are_each_others_inverse() -> None:
    for passed in (0, 1, 9, 10, 11, 12345, 10**12):
        assert passed <= max_advance(passed) <= passed + passed // SLEW + 1
        assert min_elapsed(max_advance(passed)) <= passed + 1
        assert min_elapsed(passed + passed // SLEW) <= passed
