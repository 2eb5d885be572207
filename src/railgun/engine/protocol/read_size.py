"""Choose how many records to read from the sources at once, learned from how long reads take.

While a user's functions run, links and orders wait, so a read (the records and everything that is done with them before
control returns) should take about `TARGET_US`. The time of a read is modelled as `wait + each * records`:

- `each` is the time per record, which a smaller read saves. For a function that computes something for every record,
  all time is `each`.
- `wait` is the time that no size shortens: a call of a service, one query for a whole batch. Smaller reads do not make
  such a call shorter; they only make more calls.

Rules:

1. A read may take `TARGET_US`, or twice its `wait` if that is longer. So a flow of slow records keeps to about
   `TARGET_US`, and a flow that waits asks for as many records at a time as it can.
2. A read that takes longer shrinks the next one in proportion, counting only the time that falls with the size. Where
   most of the time is `wait`, which is noisy, the size shrinks only if the median of several reads is too long, or if
   one read takes `DRASTIC_RATIO` times too long. A read that found fewer than `FEW_RECORDS` records does not show how
   time grows with their number: it shrinks the next one to `FEW_RECORDS` at most.
3. A full read whose records take less than a quarter of the time they may take makes the next one larger, at most
   twice as large.
4. `wait` is estimated by comparing reads of two sizes of which one is at least twice the other. Where the larger one
   takes less than `FLAT_RATIO` times as long, all of it is `wait`. Estimating too much makes reads somewhat longer;
   estimating too little makes them smaller and smaller, so in doubt all time is `wait`. Where the larger read takes
   `STEEP_RATIO` times as long as its records account for, some records wait and others do not (those that go to another
   worker): then all of its time is `wait`, too.
5. While the size is below the largest, a read is halved from time to time, to be compared with the others (a single
   record is doubled): soon after a read was shrunk, and then less and less often. A halved read is never longer.

Times are noisy, so medians of a few reads are compared, and an estimate counts only in part. This module reads no
clock: the driver measures and calls `record`.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

TARGET_US: Final = 50_000
MEMORY_READS: Final = 64
"""Reads after which a measurement is forgotten; also the most reads between two halved ones."""
FIRST_PROBE_READS: Final = 2
"""Reads between a shrunk read and the next halved one; doubled each time."""
MEDIAN_READS: Final = 5
"""Reads of about one size that make up a median."""
FLAT_RATIO: Final = 1.5
STEEP_RATIO: Final = 4
FEW_RECORDS: Final = 8
"""A slow read of fewer records than this shrinks the next one to this size at the lowest."""
DRASTIC_RATIO: Final = 8
ESTIMATE_WEIGHT: Final = 0.4
"""Weight of a new estimate of `wait` against those before it."""


class _Read(NamedTuple):
    number: int
    rows: int
    took_us: int


class ReadSize:
    """The number of records to read at once; see the module's rules.

    >>> size = ReadSize(largest=5_000)
    >>> size.next
    5000
    >>> size.record(rows=5_000, requested=5_000, took_us=500_000)  # 100 µs a record
    >>> size.next
    500
    """

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.size = largest
        self.wait_us = 0.0
        """The part of a read's time that no size shortens."""
        self._reads: dict[int, deque[_Read]] = {}  # by the number of bits of their row count
        self._number = 0
        self._interval = FIRST_PROBE_READS  # reads between two halved ones
        self._next_probe = 0
        self._probing = False

    @property
    def next(self) -> int:
        """Return how many records to ask for in the next read."""
        if self._probing:
            return self.size // 2 if self.size > 1 else 2
        return self.size

    @property
    def limit_us(self) -> float:
        """Return how long a read may take, in µs."""
        return max(TARGET_US, 2 * self.wait_us)

    def record(self, rows: int, requested: int, took_us: int) -> None:
        """Learn from a read that asked for `asked` records, brought `rows` (at least one), and took `took_us`."""
        took_us = max(0, took_us)
        full = rows >= requested
        if took_us <= TARGET_US and (self.size == self.largest or not full):
            return  # as large and as short as a read should be: nothing to learn
        self._number += 1
        probed, self._probing = self._probing, False
        usual_us = self._compare(_Read(self._number, rows, took_us))
        varying_us = took_us - self.wait_us
        may_vary_us = self.limit_us - self.wait_us
        if took_us > self.limit_us:
            is_waiting = self.limit_us > TARGET_US
            is_noise = usual_us <= self.limit_us and took_us <= DRASTIC_RATIO * self.limit_us
            if not (is_waiting and is_noise):
                fewest = 1 if full or rows >= FEW_RECORDS else min(self.size, FEW_RECORDS)
                self._shrink(max(fewest, int(min(self.size, rows) * may_vary_us / varying_us)))
        elif full and not probed and varying_us < may_vary_us / 4:
            self._grow(took_us)
        if full and self._number >= self._next_probe and self.size < self.largest:
            self._probing = True
            self._interval = min(MEMORY_READS, 2 * self._interval)
            self._next_probe = self._number + self._interval

    def _grow(self, took_us: int) -> None:
        times = 2.0
        if self.limit_us == TARGET_US:
            # If all of the time was for records, the larger read must not take too long either.
            times = min(times, 0.8 * TARGET_US / max(1, took_us))
        self.size = min(self.largest, max(self.size + 1, int(times * self.size)))

    def _shrink(self, size: int) -> None:
        if 2 * size <= self.size:
            self._interval = FIRST_PROBE_READS
            self._next_probe = self._number + self._interval
        self.size = size

    def _compare(self, read: _Read) -> int:
        """Estimate `wait_us` from the reads of this size and the last ones of another size; return the usual time."""
        same = self._reads.setdefault(read.rows.bit_length(), deque(maxlen=MEDIAN_READS))
        same.append(read)
        median = self._median(same)
        others = [
            reads
            for reads in self._reads.values()
            if read.number - reads[-1].number <= MEMORY_READS
            and (reads[-1].rows >= 2 * read.rows or read.rows >= 2 * reads[-1].rows)
        ]
        if others:
            other_median = self._median(max(others, key=lambda reads: reads[-1].number))
            estimate = _wait_us(
                *sorted((median, other_median), key=lambda read_of_size: read_of_size.rows)
            )
        else:
            estimate = min(self.wait_us, median.took_us)
        self.wait_us += ESTIMATE_WEIGHT * (estimate - self.wait_us)
        return median.took_us

    def _median(self, reads: deque[_Read]) -> _Read:
        recent = [read for read in reads if self._number - read.number <= MEMORY_READS]
        recent.sort(key=lambda read: read.took_us)
        return recent[(len(recent) - 1) // 2]


def _wait_us(small: _Read, large: _Read) -> float:
    """Return the time of a read of no records, if time grows with the records as between these two reads."""
    if large.took_us < FLAT_RATIO * small.took_us or large.rows == small.rows:
        return min(small.took_us, large.took_us)
    if large.took_us * small.rows > STEEP_RATIO * small.took_us * large.rows:
        return large.took_us
    each_us = (large.took_us - small.took_us) / (large.rows - small.rows)
    return max(0.0, small.took_us - each_us * small.rows)
