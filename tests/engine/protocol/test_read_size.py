"""How many records are read at once, over models of what a read costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import pytest

from railgun.engine.protocol.read_size import TARGET_US, ReadSize

LARGEST = 5_000
MS = 1_000

Cost = Callable[[int, int], float]
"""Microseconds that a read of so many rows takes, and the number of the read."""


class Run:
    """Reads by a `ReadSize`, of a source that never runs dry."""

    def __init__(self, cost: Cost, reads: int = 600, supply: int = LARGEST) -> None:
        self.size = ReadSize(LARGEST)
        self.reads: list[tuple[int, int]] = []  # rows, µs
        for number in range(reads):
            asked = self.size.next
            assert 1 <= asked <= LARGEST
            rows = min(asked, supply)
            took = int(cost(rows, number))
            self.size.record(rows, asked, took)
            self.reads.append((rows, took))

    @property
    def settled(self) -> list[tuple[int, int]]:
        return self.reads[len(self.reads) // 2 :]

    @property
    def rate(self) -> float:
        """Records a second, once settled."""
        return sum(rows for rows, _ in self.settled) * 1e6 / sum(took for _, took in self.settled)

    @property
    def usual_us(self) -> float:
        return median(took for _, took in self.settled)

    @property
    def longest_us(self) -> int:
        return max(took for _, took in self.settled)


@pytest.mark.parametrize("each", [1, 9, 10, 70, 100, 1_000, 7_000, 25_000])
def test_records_that_cost_time_are_read_for_about_50_ms(each: int) -> None:
    run = Run(lambda rows, _: each * rows)
    assert run.longest_us <= TARGET_US
    assert run.usual_us >= min(TARGET_US / 4, each * LARGEST)


@pytest.mark.parametrize("each", [40_000, 50_000, 300_000])
def test_records_that_take_longer_each_are_read_one_by_one(each: int) -> None:
    run = Run(lambda rows, _: each * rows)
    assert run.usual_us == each
    twice = [took for _, took in run.settled if took > each]
    assert len(twice) <= 6  # now and then two are read, to see whether it is the call
    assert max(twice) <= 2 * each


@pytest.mark.parametrize("wait", [10 * MS, 45 * MS, 51 * MS, 100 * MS, 1_000 * MS])
def test_a_step_that_waits_whatever_the_size_gets_as_many_records_as_there_are(wait: int) -> None:
    run = Run(lambda rows, _: wait)
    assert run.reads[-1][0] == LARGEST
    assert run.rate >= 0.95 * LARGEST * 1e6 / wait
    assert len([rows for rows, _ in run.reads if rows < LARGEST]) <= 60


@pytest.mark.parametrize("wait", [60 * MS, 100 * MS, 1_000 * MS])
@pytest.mark.parametrize("each", [10, 100, 10_000])
def test_where_both_count_a_read_takes_at_most_a_few_times_what_it_waits(
    wait: int, each: int
) -> None:
    run = Run(lambda rows, _: wait + each * rows)
    assert run.longest_us <= 4 * wait
    at_twice_the_wait = min(LARGEST, wait / each) * 1e6 / (wait + min(LARGEST * each, wait))
    assert run.rate >= 0.6 * at_twice_the_wait


@pytest.mark.parametrize("wait", [5 * MS, 10 * MS, 20 * MS])
@pytest.mark.parametrize("each", [100, 1_000])
def test_a_short_wait_leaves_50_ms_for_a_read(wait: int, each: int) -> None:
    run = Run(lambda rows, _: wait + each * rows)
    assert run.longest_us <= 1.1 * TARGET_US


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_noise_does_not_make_slow_records_pass_for_a_wait(seed: int, noise: float) -> None:
    chance = random.Random(seed)
    run = Run(lambda rows, _: 1_000 * rows * chance.uniform(1 - noise, 1 + noise))
    assert run.longest_us <= 2 * TARGET_US
    too_long = [took for _, took in run.settled if took > 1.2 * TARGET_US]
    assert len(too_long) <= 0.05 * len(run.settled)
    assert run.usual_us >= TARGET_US / 4


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.1, 0.3, 0.5])
def test_a_service_with_an_uneven_answer_time_keeps_most_of_its_throughput(
    seed: int, spread: float
) -> None:
    chance = random.Random(seed)
    run = Run(lambda rows, _: 100 * MS * chance.lognormvariate(0, spread), reads=2_000)
    took = sum(took for _, took in run.settled)
    assert run.rate >= 0.3 * LARGEST * len(run.settled) * 1e6 / took


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("wait", [40 * MS, 100 * MS])
def test_hiccups_do_not_wear_the_size_down(seed: int, wait: int) -> None:
    chance = random.Random(seed)
    run = Run(lambda rows, _: wait if chance.random() > 0.01 else 30 * wait, reads=3_000)
    assert median(rows for rows, _ in run.settled) == LARGEST


def test_a_flow_that_begins_to_wait_reads_more() -> None:
    run = Run(lambda rows, number: 10 * MS * rows if number < 200 else 100 * MS)
    assert run.reads[150][0] <= 5
    assert run.reads[-1][0] == LARGEST


def test_single_slow_records_that_become_a_wait_are_noticed() -> None:
    run = Run(lambda rows, number: 300 * MS * rows if number < 200 else 300 * MS)
    assert run.reads[150][0] == 1
    assert run.reads[-1][0] == LARGEST


def test_a_flow_that_waited_and_begins_to_compute_reads_less() -> None:
    run = Run(lambda rows, number: 100 * MS if number < 200 else 10 * MS * rows)
    assert run.reads[150][0] == LARGEST
    after = [took for _, took in run.reads[201:]]
    assert after[0] <= 4 * TARGET_US  # the read after the one that was slow
    assert max(after[20:]) <= TARGET_US


def test_a_wait_that_becomes_longer_is_followed() -> None:
    run = Run(lambda rows, number: (100 if number < 200 else 400) * MS)
    assert run.reads[-1][0] == LARGEST


def test_a_wait_that_becomes_shorter_gives_its_time_back() -> None:
    run = Run(lambda rows, number: (400 * MS if number < 200 else 0) + 1_000 * rows, reads=900)
    assert run.longest_us <= 1.1 * TARGET_US


@pytest.mark.parametrize("supply", [1, 10, 300])
def test_what_a_source_brings_is_read_whole_where_size_does_not_matter(supply: int) -> None:
    run = Run(lambda rows, _: 100 * MS, supply=supply)
    assert run.reads[-1][0] == supply


def test_reads_that_are_short_and_whole_are_left_alone() -> None:
    run = Run(lambda rows, _: 5 * rows)
    assert {rows for rows, _ in run.reads} == {LARGEST}


def test_a_clock_that_stands_still_or_goes_back_is_no_reason_to_read_less() -> None:
    size = ReadSize(LARGEST)
    for took in (0, -5, -(10**9), 0):
        size.record(size.next, size.next, took)
    assert size.next == LARGEST
    size.record(LARGEST, LARGEST, 10**9)
    for took in (0, -5, -(10**9), *[0] * 20):
        size.record(size.next, size.next, took)
    assert size.next == LARGEST


def test_while_it_grows_it_doubles() -> None:
    run = Run(lambda rows, number: 10 * MS * rows if number < 100 else 1, reads=160)
    grown = [rows for rows, _ in run.reads[101:]]
    assert max(b / a for a, b in pairwise(grown)) <= 4  # a halved read lies between two of them
    assert grown[-1] == LARGEST


@pytest.mark.parametrize("local", [{0}, {1}, {2}, {0, 1}, {0, 2}, {0, 1, 2}], ids=str)
def test_a_flow_that_waits_is_not_stuck_with_single_records_because_few_were_there_at_first(
    local: set[int],
) -> None:
    """Records of three keys come in turn, some keys are on this worker, and a batch of theirs takes 100 ms."""
    size = ReadSize(LARGEST)
    now_us, read = 250, 0
    while now_us < 60_000 * MS:
        there = now_us // 250 - read  # 4,000 a second
        if not there:
            now_us += MS
            continue
        asked = size.next
        rows = min(asked, there)
        stays = any(number % 3 in local for number in range(read, read + min(rows, 3)))
        took = 100 * MS if stays else MS // 10
        size.record(rows, asked, took)
        now_us, read = now_us + took, read + rows
    assert read > 0.9 * 4_000 * 60
