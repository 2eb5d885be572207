"""What the core knows of a batch of records: how many, their key hashes, and how to take some of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from railgun.engine.protocol.placement import Owners, Worker
from railgun.hashing import Hashes


class Batch(Protocol):
    """A batch of keyed records. Rows keep their order; the content is nobody's business here."""

    @property
    def hashes(self) -> Hashes:
        """The key hash of each row."""
        ...

    def __len__(self) -> int: ...

    def take(self, rows: NDArray[np.intp]) -> Self:
        """A batch of these rows, in this order."""
        ...


B = TypeVar("B", bound=Batch)


def select(batch: B, mask: NDArray[np.bool_]) -> B | None:
    """The rows where `mask` holds, in order; None if there are none, the batch itself if all do."""
    rows = np.flatnonzero(mask)
    if len(rows) == 0:
        return None
    return batch if len(rows) == len(batch) else batch.take(rows)


def split(batch: B, owners: Owners) -> Iterator[tuple[Worker, B]]:
    """The batch by owner, in the order of the owners' numbers, the rows of each in their own order.

    One stable sort for any number of owners: of one byte or two, numpy sorts in time linear in the rows.
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
