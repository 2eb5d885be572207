"""Decide which worker owns a key: hash → one of 4,096 slots → worker, with overrides for slots and keys.

`Placement` is the function F of the rescale protocol. Its rules:

1. **Deterministic.** Equal workers and overrides give equal owners, in every process and on every machine.
2. **Minimal.** The slot table is made by rendezvous hashing: each slot goes to the worker with the highest
   score for it. Adding a worker to n moves about 1/(n+1) of the slots, all of them to the new worker;
   removing one moves only its own slots.
3. **Overridable.** A slot, or a single key by its hash, can be assigned to a worker: a hot key gets a worker of its
   own. A key's override takes precedence over its slot's.

Looking up the owners of a batch is one shift and one gather, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from railgun.errors import PlacementError
from railgun.hashing import P1, Hashes, finish, hash_ints

SLOTS: Final = 4096
_SHIFT: Final = np.uint64(64 - 12)

Worker = int
"""A worker's name: a small number, never used for two live workers of a job."""

Owners = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Placement:
    """The owners of all keys, over a set of workers.

    >>> Placement.of([0, 1]).owner(1234)
    1
    >>> Placement.of([0, 1], keys={1234: 0}).owner(1234)
    0
    """

    workers: tuple[Worker, ...]
    slots: tuple[tuple[int, Worker], ...] = ()
    keys: tuple[tuple[int, Worker], ...] = ()
    _table: Owners = field(init=False, repr=False, compare=False)
    _pinned: Hashes = field(init=False, repr=False, compare=False)
    _pinned_to: Owners = field(init=False, repr=False, compare=False)

    @staticmethod
    def of(
        workers: Iterable[Worker],
        *,
        slots: Mapping[int, Worker] | None = None,
        keys: Mapping[int, Worker] | None = None,
    ) -> Placement:
        """Return a placement over these workers; `slots` and `keys` (by hash) override the table."""
        return Placement(
            tuple(sorted(set(workers))),
            tuple(sorted((slots or {}).items())),
            tuple(sorted((keys or {}).items())),
        )

    def __post_init__(self) -> None:
        if not self.workers:
            raise PlacementError("a placement needs at least one worker")
        if min(self.workers) < 0 or max(self.workers) > np.iinfo(np.int32).max:
            raise PlacementError(f"workers are numbered from 0 up, not {self.workers}")
        if self.workers != tuple(sorted(set(self.workers))):
            raise PlacementError(f"workers must be sorted and different, not {self.workers}")
        for kind, overrides in (("slot", self.slots), ("key", self.keys)):
            names = [name for name, _ in overrides]
            if names != sorted(set(names)):
                raise PlacementError(
                    f"{kind} overrides must be sorted and different: use Placement.of"
                )
            for name, worker in overrides:
                if worker not in self.workers:
                    raise PlacementError(
                        f"{kind} {name} is to go to worker {worker}, which is not one of {self.workers}"
                    )
        for slot, _ in self.slots:
            if not 0 <= slot < SLOTS:
                raise PlacementError(f"there is no slot {slot}: slots go from 0 to {SLOTS - 1}")
        for key, _ in self.keys:
            if not 0 <= key < 1 << 64:
                raise PlacementError(
                    f"{key} is not a key's hash: hashes are unsigned 64-bit numbers"
                )
        table = _rendezvous(self.workers)
        if self.slots:
            table = table.copy()
            table[[slot for slot, _ in self.slots]] = [worker for _, worker in self.slots]
            table.flags.writeable = False
        object.__setattr__(self, "_table", table)
        object.__setattr__(self, "_pinned", np.array([k for k, _ in self.keys], dtype=np.uint64))
        object.__setattr__(self, "_pinned_to", np.array([w for _, w in self.keys], dtype=np.int32))

    def owners(self, hashes: Hashes) -> Owners:
        """Return the owner of each key of a batch, given the keys' hashes."""
        owners: Owners = self._table[hashes >> _SHIFT]
        if len(self._pinned):
            at = np.searchsorted(self._pinned, hashes)
            at[at == len(self._pinned)] = 0
            pinned = self._pinned[at] == hashes
            owners[pinned] = self._pinned_to[at[pinned]]
        return owners

    def owner(self, key_hash: int) -> Worker:
        """Return the owner of one key, given its hash."""
        return int(self.owners(np.array([key_hash], dtype=np.uint64))[0])

    def table(self) -> Owners:
        """Return a copy of the slot table: the owner of each slot."""
        return self._table.copy()

    def takes(self, worker: Worker, old: Placement) -> bool:
        """Return whether `worker` owns keys here that belong to others in `old`."""
        if ((self._table == worker) & (old._table != worker)).any():
            return True
        pinned = np.concatenate([self._pinned, old._pinned])
        return bool(((self.owners(pinned) == worker) & (old.owners(pinned) != worker)).any())

    def resized(self, workers: Iterable[Worker]) -> Placement:
        """Return a placement over other workers with the same overrides, less those to workers that leave."""
        remaining = tuple(sorted(set(workers)))
        return Placement(
            remaining,
            tuple((slot, worker) for slot, worker in self.slots if worker in remaining),
            tuple((key, worker) for key, worker in self.keys if worker in remaining),
        )


@lru_cache(maxsize=64)
def _rendezvous(workers: tuple[Worker, ...]) -> Owners:
    """Return, for every slot, the worker with the highest score; two scores are equal with chance 2**-64."""
    slots = np.arange(SLOTS, dtype=np.uint64) * np.uint64(P1)
    names = hash_ints(np.array(workers, dtype=np.int64))
    scores = finish(names[:, None] ^ slots[None, :])
    table: Owners = np.array(workers, dtype=np.int32)[scores.argmax(axis=0)]
    table.flags.writeable = False
    return table
