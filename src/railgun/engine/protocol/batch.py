"""Interface of a batch of records, as the state machines see it: its size, key hashes, and a way to take rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from railgun.engine.protocol.placement import Owners, Worker
from railgun.hashing import Hashes


class Batch(Protocol):
    """A batch of keyed records. Rows keep their order; the state machines never look at the content."""

    @property
    def hashes(self) -> Hashes:
        """Return the key hash of each row."""
        ...

    def __len__(self) -> int: ...

    def take(self, rows: NDArray[np.intp]) -> Self:
        """Return a batch of these rows, in this order."""
        ...


B = TypeVar("B", bound=Batch)


def select(batch: B, mask: NDArray[np.bool_]) -> B | None:
    """Return the rows where `mask` holds, in order; None if there are none, the batch itself if it holds everywhere."""
    rows = np.flatnonzero(mask)
    if len(rows) == 0:
        return None
    return batch if len(rows) == len(batch) else batch.take(rows)


def split(batch: B, owners: Owners) -> Iterator[tuple[Worker, B]]:
    """Yield the batch's rows by owner: owners in order of their numbers, rows in their own order.

    One stable sort for any number of owners: numpy sorts one- or two-byte numbers in time linear in the rows.
    """
    if len(owners) == 0:
        return
    lowest, highest = int(owners.min()), int(owners.max())
    if lowest == highest:
        yield lowest, batch
        return
    numbers: NDArray[Any] = owners - lowest
    if highest - lowest < 1 << 16:
        numbers = numbers.astype(np.uint8 if highest - lowest < 1 << 8 else np.uint16)
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    ends = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
    start = 0
    for end in (*ends.tolist(), len(owners)):
        yield lowest + int(numbers[start]), batch.take(order[start:end])
        start = end
