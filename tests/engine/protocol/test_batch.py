"""Batches by owner."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from verification.rescale.rows import Item, Rows

from railgun.engine.protocol.batch import select, split

WORKERS = st.one_of(
    st.integers(0, 3), st.integers(0, 70), st.sampled_from([0, 255, 256, 65_535, 65_536, 2**31 - 1])
)


@given(st.lists(WORKERS, max_size=200))
def test_split_gives_owners_in_order_and_rows_in_theirs(workers: list[int]) -> None:
    batch = Rows(Item(key, 0, 1) for key in range(len(workers)))
    parts = list(split(batch, np.array(workers, dtype=np.int32)))
    assert [worker for worker, _ in parts] == sorted(set(workers))
    for worker, part in parts:
        assert [item.key for item in part.items] == [
            k for k, w in enumerate(workers) if w == worker
        ]


def test_a_batch_of_one_owner_is_passed_on_as_it_is() -> None:
    batch = Rows([Item(1, 0, 1), Item(2, 0, 1)])
    [(worker, part)] = split(batch, np.array([7, 7], dtype=np.int32))
    assert (worker, part) == (7, batch)
    assert select(batch, np.array([True, True])) is batch
    assert select(batch, np.array([False, False])) is None
