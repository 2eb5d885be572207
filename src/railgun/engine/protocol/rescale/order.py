"""Keep the order in which the keys of a home leave: the order in which the operators name them.

Operators name keys in memory order, and the keys leave in that order. Taking a key out of a large table costs several
times as much in an order unrelated to the table, such as that of the hashes (docs/design/rescale.md, "The order in
which keys leave"). To look up a key's turn, `Order` keeps the hashes sorted, with the turn beside each:

>>> order = Order.of([np.array([7, 3, 7], dtype=np.uint64), np.array([5, 3], dtype=np.uint64)])
>>> order.hashes.tolist()
[7, 3, 5]
>>> order.find(np.array([3, 4, 7], dtype=np.uint64)).tolist()
[1, -1, 0]
>>> order.then([np.array([5, 4, 9], dtype=np.uint64)]).hashes.tolist()
[7, 3, 5, 4, 9]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from railgun.hashing import Hashes

Turns = NDArray[np.intp]
"""Places in the order in which keys leave, from 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Keys in the order in which they leave, each once; `turns[i]` is the turn of `sorted[i]`."""

    hashes: Hashes
    sorted: Hashes
    turns: Turns

    @classmethod
    def of(cls, named: Sequence[Hashes]) -> Order:
        """Return the order in which the keys were named; if a key was named twice, the first time counts."""
        hashes = np.concatenate([np.empty(0, dtype=np.uint64), *named])
        positions = np.argsort(hashes)  # a stable sort would take five times as long
        keys = hashes[positions]
        first = np.concatenate(([True], keys[1:] != keys[:-1]))[: len(keys)]
        if bool(first.all()):
            return cls(hashes, keys, positions)
        starts = np.flatnonzero(first)
        positions = np.minimum.reduceat(positions, starts)
        counts = np.zeros(len(hashes), dtype=bool)
        counts[positions] = True
        return cls(hashes[counts], keys[starts], (np.cumsum(counts) - 1)[positions])

    def then(self, late: Sequence[Hashes]) -> Order:
        """Return this order followed by those keys of `late` that it lacks."""
        order = Order.of(late)
        new = order.hashes[self.find(order.hashes) < 0]
        if len(new) == 0:
            return self
        positions = np.argsort(new)
        places = np.searchsorted(self.sorted, new[positions])
        return Order(
            np.concatenate((self.hashes, new)),
            np.insert(self.sorted, places, new[positions]),
            np.insert(self.turns, places, len(self.hashes) + positions),
        )

    def __len__(self) -> int:
        return len(self.hashes)

    def find(self, hashes: Hashes) -> Turns:
        """Return the turn of each of these keys, or -1 for a key that is not in the order."""
        if len(self.sorted) == 0:
            return np.full(len(hashes), -1, dtype=np.intp)
        positions = np.minimum(np.searchsorted(self.sorted, hashes), len(self.sorted) - 1)
        return np.where(self.sorted[positions] == hashes, self.turns[positions], -1)

    def validate(self) -> None:
        """Check that each key is present once and has its turn."""
        assert bool((self.sorted[1:] > self.sorted[:-1]).all()), "sorted, each key once"
        assert sorted(self.turns.tolist()) == list(range(len(self.hashes))), "each turn once"
        assert bool((self.hashes[self.turns] == self.sorted).all()), "to each key its turn"
