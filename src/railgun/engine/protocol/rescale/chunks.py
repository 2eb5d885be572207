"""Look up the chunk a key came with, while the fence of that chunk is shut.

Thousands of chunks come and go, and each batch of records that arrives meanwhile is looked up. So adding or removing a
chunk does no work. A lookup first sorts the new chunks into a *run*: hashes, and beside each its chunk number. A new
run absorbs the earlier runs that are not larger, so there are few runs, each at least twice as large as the next, and
a key is sorted again only when its run has doubled. Keys of removed chunks stay in their runs and are ignored, until
they outnumber the keys that wait: then all runs are sorted again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from railgun.engine.protocol.placement import Worker
from railgun.errors import ProtocolError
from railgun.hashing import Hashes

Numbers = NDArray[np.int32]


class Run(NamedTuple):
    """The sorted keys of several chunks; `numbers[i]` is the chunk of `hashes[i]`."""

    hashes: Hashes
    numbers: Numbers
    chunks: tuple[int, ...]


class Chunks:
    """The chunks of one home that wait for their fences."""

    __slots__ = ("fresh", "home", "keys", "runs", "waiting")

    def __init__(self, home: Worker) -> None:
        self.home = home
        self.waiting: dict[int, Hashes] = {}
        self.keys = 0  # number of keys in all waiting chunks
        self.fresh: list[int] = []  # chunks that are in no run yet
        self.runs: list[Run] = []

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, chunk: int, hashes: Hashes) -> None:
        """Add a chunk of these keys that waits for its fence; raise `ProtocolError` if it came twice or is empty."""
        if chunk in self.waiting or len(hashes) == 0:
            raise ProtocolError(f"chunk {chunk} of worker {self.home} came twice, or without keys")
        self.waiting[chunk] = hashes
        self.keys += len(hashes)
        self.fresh.append(chunk)

    def remove(self, chunk: int) -> None:
        """Remove a chunk: its fence has opened."""
        self.keys -= len(self.waiting.pop(chunk))

    def of(self, hashes: Hashes) -> Numbers:
        """Return the chunk each of these keys came with, or 0 where no waiting chunk has the key."""
        self.gather()
        numbers = np.zeros(len(hashes), dtype=np.int32)
        for run in self.runs:
            positions = np.minimum(np.searchsorted(run.hashes, hashes), len(run.hashes) - 1)
            numbers = np.where(run.hashes[positions] == hashes, run.numbers[positions], numbers)
        if self.stale_keys:
            shut = np.zeros(max(int(numbers.max(initial=0)), *self.waiting, 0) + 1, dtype=bool)
            shut[list(self.waiting)] = True
            numbers *= shut[numbers]
        return numbers

    @property
    def stale_keys(self) -> int:
        """Return how many keys in the runs belong to removed chunks."""
        new = sum(len(self.waiting.get(chunk, ())) for chunk in self.fresh)
        return sum(len(run.hashes) for run in self.runs) + new - self.keys

    def gather(self) -> None:
        """Sort the new chunks into a run."""
        if self.stale_keys > self.keys:
            self.runs, self.fresh = [], list(self.waiting)
        chunks = [chunk for chunk in self.fresh if chunk in self.waiting]
        self.fresh = []
        if not chunks:
            return
        keys = sum(len(self.waiting[chunk]) for chunk in chunks)
        while self.runs and len(self.runs[-1].hashes) < 2 * keys:
            older = [chunk for chunk in self.runs.pop().chunks if chunk in self.waiting]
            keys += sum(len(self.waiting[chunk]) for chunk in older)
            chunks = older + chunks
        self.runs.append(self._sort(tuple(chunks)))

    def _sort(self, chunks: tuple[int, ...]) -> Run:
        parts = [self.waiting[chunk] for chunk in chunks]
        hashes = np.concatenate(parts)
        order = np.argsort(hashes)
        hashes = hashes[order]
        if bool((hashes[1:] == hashes[:-1]).any()):
            raise ProtocolError(
                f"a key came twice from worker {self.home}, with chunks of {chunks}"
            )
        numbers = np.repeat(np.array(chunks, dtype=np.int32), [len(part) for part in parts])
        return Run(hashes, numbers[order], chunks)

    def validate(self) -> None:
        """Check that every waiting chunk is in one place, each key is there once, and runs halve in size."""
        placed = [*self.fresh, *(chunk for run in self.runs for chunk in run.chunks)]
        assert len(placed) == len(set(placed)), "each chunk in one place"
        assert set(placed) >= self.waiting.keys(), "no chunk forgotten"
        assert self.keys == sum(map(len, self.waiting.values()))
        every = [key for hashes in self.waiting.values() for key in hashes.tolist()]
        assert len(every) == len(set(every)), "each key came once"
        for run, following in zip(self.runs, self.runs[1:], strict=False):
            assert len(run.hashes) >= 2 * len(following.hashes)
