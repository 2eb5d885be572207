"""Records of the models: small, comparable, and enough to show any loss, doubling or reordering."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from railgun.hashing import Hashes


class Item(NamedTuple):
    """The `seq`-th record (from 1) that `origin` sent for `key`."""

    key: int
    origin: int
    seq: int
    time: int = 0


class Rows:
    """A batch of items; the key is its own hash."""

    __slots__ = ("hashes", "items")

    def __init__(self, items: Iterable[Item], hashes: Hashes | None = None) -> None:
        self.items = tuple(items)
        if hashes is None:
            hashes = np.array([item.key for item in self.items], dtype=np.uint64)
        self.hashes: Hashes = hashes

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"Rows({', '.join(map(repr, self.items))})"

    def take(self, rows: NDArray[np.intp]) -> Rows:
        """Return a batch of the given rows, in this order."""
        return Rows((self.items[row] for row in rows.tolist()), self.hashes[rows])
