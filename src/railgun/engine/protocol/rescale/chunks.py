"""Which chunk of a home a key came with, while the fence of that chunk is shut.

Chunks come and go by the thousand, and each batch of records that arrives meanwhile asks. So nothing is done when one
comes or goes. When somebody asks, the chunks that are new are sorted into a *run*: hashes, and beside each its chunk. A
run takes along those before it that are not larger, so there are few of them, each at least twice as large as the next,
and a key is sorted again only when its run has doubled. Keys of chunks that have gone stay in their runs, unheeded,
until they are more than those that wait: then all is sorted anew.
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
    """Keys of some chunks, sorted; `numbers[i]` is the chunk of `hashes[i]`."""

    hashes: Hashes
    numbers: Numbers
    chunks: tuple[int, ...]


class Chunks:
    """The chunks of one home that wait for their fences."""

    __slots__ = ("fresh", "home", "keys", "runs", "waiting")

    def __init__(self, home: Worker) -> None:
        self.home = home
        self.waiting: dict[int, Hashes] = {}
        self.keys = 0  # of all that wait
        self.fresh: list[int] = []  # chunks that are in no run yet
        self.runs: list[Run] = []

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, chunk: int, hashes: Hashes) -> None:
        """A chunk of these keys has come, and waits."""
        if chunk in self.waiting or len(hashes) == 0:
            raise ProtocolError(f"chunk {chunk} of worker {self.home} came twice, or without keys")
        self.waiting[chunk] = hashes
        self.keys += len(hashes)
        self.fresh.append(chunk)

    def remove(self, chunk: int) -> None:
        """The fence of a chunk has opened."""
        self.keys -= len(self.waiting.pop(chunk))

    def of(self, hashes: Hashes) -> Numbers:
        """The chunk that each of these keys came with, if it waits; otherwise 0."""
        self.gather()
        numbers = np.zeros(len(hashes), dtype=np.int32)
        for run in self.runs:
            at = np.minimum(np.searchsorted(run.hashes, hashes), len(run.hashes) - 1)
            numbers = np.where(run.hashes[at] == hashes, run.numbers[at], numbers)
        if self.gone:
            shut = np.zeros(max(int(numbers.max(initial=0)), *self.waiting, 0) + 1, dtype=bool)
            shut[list(self.waiting)] = True
            numbers *= shut[numbers]
        return numbers

    @property
    def gone(self) -> int:
        """How many keys in the runs are of chunks that wait no more."""
        new = sum(len(self.waiting.get(chunk, ())) for chunk in self.fresh)
        return sum(len(run.hashes) for run in self.runs) + new - self.keys

    def gather(self) -> None:
        """Put the chunks that are new in a run."""
        if self.gone > self.keys:
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
        """Check that every chunk that waits is in one place, its keys are there once, and the runs are few."""
        placed = [*self.fresh, *(chunk for run in self.runs for chunk in run.chunks)]
        assert len(placed) == len(set(placed)), "each chunk in one place"
        assert set(placed) >= self.waiting.keys(), "no chunk forgotten"
        assert self.keys == sum(map(len, self.waiting.values()))
        every = [key for hashes in self.waiting.values() for key in hashes.tolist()]
        assert len(every) == len(set(every)), "each key came once"
        for run, following in zip(self.runs, self.runs[1:], strict=False):
            assert len(run.hashes) >= 2 * len(following.hashes)
