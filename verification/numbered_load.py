"""A numbered load and its oracle: any loss, doubling or reordering is noticed.

The load is open-loop: every record is due at a fixed time, whether or not the flow keeps up, so a pause shows as
latency and not as fewer records. The key and number of the i-th record of a part follow from i alone::

    i < keys                       key i, number 1: every key once, as fast as possible
    then j = i - keys, y = j // 2
        j even                     a hot key:  y % hot,               number 2 + y // hot
        j odd                      the others: hot + y % (keys-hot),  number 2 + y // (keys-hot)

So the oracle needs no memory of the run. It computes i from each logged (key, number), and checks that every i that was
read arrived exactly once; the readers report how many they read when they close. Order is checked where it is visible:
the state of a key remembers the last number, and a record that does not follow it is marked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from railgun.flows.flow import Flow
from railgun.flows.sink import Place, Sink, Writer
from railgun.flows.source import Reader, Source

Record = tuple[int, int, int]  # key, number within the key, when it is due (µs; 0: at once)
Rows = NDArray[np.int64]
PARTS: Final = 8
HOT: Final = 1_000
NOT_IN_ORDER: Final = -1


@dataclass(frozen=True, slots=True)
class Load(Source[Record]):
    """Numbered records: `keys` in all, `rate` a second in all; logs go to `directory`."""

    keys: int
    rate: float
    directory: str

    @property
    def keys_of_part(self) -> int:
        """Return how many keys each part has."""
        return self.keys // PARTS

    @property
    def hot(self) -> int:
        """Return how many keys of a part get half of its records."""
        return min(HOT, self.keys_of_part // 2)

    def partitions(self) -> Sequence[int]:
        """Return the numbers of the parts; each part has keys of its own."""
        return range(PARTS)

    def open(self, partition: Any, position: Any) -> Reader[Record]:
        """Return a reader of one part."""
        return _Reader(self, partition, position)


class _Reader(Reader[Record]):
    def __init__(self, load: Load, part: int, position: tuple[int, int] | None) -> None:
        self.load = load
        self.part = part
        self.i, self.began = position or (0, 0)

    @property
    def position(self) -> tuple[int, int]:
        return self.i, self.began

    def read(self, most: int, now: int) -> list[Record]:
        load, i = self.load, self.i
        keys, base = load.keys_of_part, self.part * load.keys_of_part
        if i < keys:
            self.i = min(keys, i + most)
            return [(base + k, 1, 0) for k in range(i, self.i)]
        if not self.began:
            self.began = now
        j = i - keys
        rate = load.rate / PARTS
        due = min(int((now - self.began) * rate / 1e6) + 1, j + most)
        if due <= j:
            return []
        self.i = keys + due
        hot, others, began, each = load.hot, keys - load.hot, self.began, 1e6 / rate
        return [
            (base + hot + (x >> 1) % others, 2 + (x >> 1) // others, began + int(x * each))
            if x & 1
            else (base + (x >> 1) % hot, 2 + (x >> 1) // hot, began + int(x * each))
            for x in range(j, due)
        ]

    def close(self) -> None:
        file = Path(self.load.directory) / f"read-{self.part}-{self.i}"
        file.touch()


@dataclass(frozen=True, slots=True)
class Log(Sink[Record]):
    """Keeps every record with the time it arrived, and writes them to a file when the worker ends.

    With `at_once` records are written as they come, so that the log of a killed worker is complete.
    """

    directory: str
    at_once: bool = False

    def open(self, place: Place) -> Writer[Record]:
        """Open a file for each worker's process and generation; its name has the opening time in µs."""
        now = time.time_ns() // 1000
        name = f"log-{place.generation}-{place.worker}-{os.getpid()}-{now}"
        return _LogWriter(Path(self.directory) / name, self.at_once)


class _LogWriter(Writer[Record]):
    def __init__(self, path: Path, at_once: bool) -> None:
        self.file = path.open("wb", buffering=0)
        self.at_once = at_once
        self.rows: list[Rows] = []

    def write(self, items: Sequence[Record]) -> None:
        now = time.time_ns() // 1000
        rows = np.empty((len(items), 4), dtype=np.int64)
        rows[:, :3] = items
        rows[:, 3] = now
        if self.at_once:
            self.file.write(rows.data)
        else:
            self.rows.append(rows)

    def close(self) -> None:
        with self.file:
            for rows in self.rows:
                self.file.write(rows.data)


def follow(state: list[Any] | None, record: Record) -> tuple[list[Any], Record]:
    """Return the number of the last record with about 100 bytes as state; mark a record that does not follow."""
    if state is None:
        state = [0, os.urandom(100)]
    key, number, _ = record
    if number != state[0] + 1:
        record = (key, number, NOT_IN_ORDER)
    state[0] = number
    return state, record


def nothing() -> None:
    """Return the state of a new key: none."""


def numbered_flow(name: str, load: Load, *, at_once: bool = False) -> Flow:
    """Return the flow: load → by key: follow → log (`at_once`: see `Log`)."""
    flow = Flow(name)
    records = flow.source(load, name="load")
    by_key = records.key_by(itemgetter(0), name="by key")
    followed = by_key.stateful_map(follow, initial=nothing, name="follow")
    followed.sink(Log(load.directory, at_once), name="log")
    return flow


@dataclass(frozen=True, slots=True)
class Verdict:
    """The findings of the oracle."""

    records: int
    lost: int
    doubled: int
    reordered: int

    @property
    def good(self) -> bool:
        """Return whether every record arrived once, and in order."""
        return self.records > 0 and not (self.lost or self.doubled or self.reordered)


@dataclass(frozen=True, slots=True)
class Logged:
    """The log of one worker's process in one generation."""

    generation: int
    worker: int
    process: int
    opened: int  # µs
    path: Path

    @staticmethod
    def of(path: Path) -> Logged:
        """Parse the name of a log file.

        >>> Logged.of(Path("log-2-0-4711-1700000000000000")).worker
        0
        """
        generation, worker, process, opened = map(int, path.name.split("-")[1:])
        return Logged(generation, worker, process, opened, path)

    def rows(self) -> Rows:
        """Return the records: key, number, due, arrived."""
        numbers = np.fromfile(self.path, dtype=np.int64)
        return numbers[: len(numbers) // 4 * 4].reshape(-1, 4)


def logs(directory: str) -> list[Logged]:
    """Return all logs of a directory."""
    return sorted(map(Logged.of, Path(directory).glob("log-*")), key=attrgetter("opened"))


def read_logs(directory: str) -> Rows:
    """Return all logged records: key, number, due, arrived."""
    rows = [log.rows() for log in logs(directory)]
    return np.concatenate(rows or [np.empty((0, 4), np.int64)])


def judge(load: Load, rows: Rows) -> Verdict:
    """Compare what arrived with what was read.

    >>> load = Load(keys=8000, rate=1.0, directory="")
    >>> records = [record for part in range(PARTS) for record in _Reader(load, part, None).read(500, 0)]
    >>> rows = np.array([(*record, 0) for record in records])
    >>> judge_counts(load, rows, dict.fromkeys(range(PARTS), 500))
    Verdict(records=4000, lost=0, doubled=0, reordered=0)
    >>> judge_counts(load, rows[[0, 0, *range(5, 4000)]], dict.fromkeys(range(PARTS), 500))
    Verdict(records=3997, lost=4, doubled=1, reordered=0)
    """
    read: dict[int, int] = {}
    for file in Path(load.directory).glob("read-*"):
        _, part, count = file.name.split("-")
        read[int(part)] = max(read.get(int(part), 0), int(count))
    return judge_counts(load, rows, read)


def judge_counts(load: Load, rows: Rows, read: dict[int, int]) -> Verdict:
    """Compare as `judge` does, with the number of records that were read of each part."""
    keys, hot = load.keys_of_part, load.hot
    part, k = rows[:, 0] // keys, rows[:, 0] % keys
    turn = rows[:, 1] - 2
    is_hot = k < hot
    j = np.where(is_hot, 2 * (turn * hot + k), 2 * (turn * (keys - hot) + k - hot) + 1)
    i = np.where(rows[:, 1] == 1, k, keys + j)
    lost = doubled = 0
    for number, count in read.items():
        seen = np.bincount(i[part == number], minlength=count)
        lost += int((seen[:count] == 0).sum())
        doubled += int((seen - 1)[seen > 1].sum() + seen[count:].astype(bool).sum())
    reordered = int((rows[:, 2] == NOT_IN_ORDER).sum())
    return Verdict(len(rows), lost, doubled, reordered)
