"""Loading: a generation begins with what a snapshot holds.

Every worker reads all files of the snapshot, and keeps the keys that its placement gives it: so any number of workers
can go on from any other's. For a key the row of the newest snapshot counts. Within one snapshot a key may be saved as
deleted by a worker it had left, and as alive by another: then it lives.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from itertools import compress, groupby
from operator import attrgetter, not_
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from railgun.core.hashing import Hashes
from railgun.core.placement import Placement
from railgun.snapshots.manifest import Part
from railgun.snapshots.store import SnapshotStore

if TYPE_CHECKING:
    from railgun.snapshots.table import Rows
    from railgun.worker.runtime import Runtime


async def load_parts(
    runtime: Runtime,
    store: SnapshotStore,
    parts: Sequence[Part],
    placement: Placement,
    threads: Executor,
) -> None:
    """Read these files, and put what belongs here into the runtime; files are read by another thread."""
    loop = asyncio.get_running_loop()
    from railgun.snapshots.table import no_collection  # Arrow: only who loads waits for it

    with no_collection():
        for group in by_snapshot(parts):
            alive = []
            for part in group:
                rows = await loop.run_in_executor(
                    threads, read_mine, runtime, store, part, placement
                )
                alive.append((part.step, take_out(runtime, part.step, rows)))
            for step, rows in alive:
                runtime.load(step, rows)
                await asyncio.sleep(0)
        runtime.loaded()
        gc.freeze()  # state is here to stay: the collector need not look through it


def load_at_once(
    runtime: Runtime, store: SnapshotStore, parts: Sequence[Part], placement: Placement
) -> None:
    """The same, here and now."""
    for group in by_snapshot(parts):
        read = [(part.step, read_mine(runtime, store, part, placement)) for part in group]
        for step, rows in [(step, take_out(runtime, step, rows)) for step, rows in read]:
            runtime.load(step, rows)
    runtime.loaded()


def by_snapshot(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """The files to read, of one snapshot after the other."""
    ordered = sorted(parts, key=attrgetter("snapshot"))
    return (list(group) for _, group in groupby(ordered, key=attrgetter("snapshot")))


def take_out(runtime: Runtime, step: str, rows: Rows) -> Rows:
    """Take the keys out that these rows say are deleted; the other rows, which are to be put in afterwards."""
    if not any(rows.deleted):
        return rows
    runtime.unload(step, list(compress(rows.keys, rows.deleted)))
    alive = list(map(not_, rows.deleted))
    keys, states = list(compress(rows.keys, alive)), list(compress(rows.states, alive))
    timers, ended = list(compress(rows.timers, alive)), list(compress(rows.ended, alive))
    hashes = rows.hashes[np.array(alive)]
    return type(rows)(
        rows.step, rows.version, hashes, keys, states, timers, ended, [False] * len(keys)
    )


def read_mine(runtime: Runtime, store: SnapshotStore, part: Part, placement: Placement) -> Rows:
    """The rows of a file that belong to this worker."""
    from railgun.snapshots.table import read_rows  # Arrow: only who loads waits for it

    def mine(hashes: Hashes) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = placement.owners(hashes) == runtime.worker
        return there

    return read_rows(store.read_part(part), mine, part.path, checked=True)
