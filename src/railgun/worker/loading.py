"""Loading: a generation begins with what a snapshot holds.

Every worker reads all files of the snapshot, and keeps the keys that its placement gives it: so any number of workers
can go on from any other's. For a key the row of the newest snapshot counts. Within one snapshot a key may be saved as
deleted by a worker it had left, and as alive by another: then it lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
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
from railgun.snapshots.table import Rows, read_rows

if TYPE_CHECKING:
    from railgun.worker.runtime import Runtime


async def load_parts(
    runtime: Runtime,
    store: SnapshotStore,
    parts: Sequence[Part],
    names: Mapping[str, str],
    placement: Placement,
    threads: Executor,
) -> None:
    """Read these files, and put what belongs here into the runtime; files are read by another thread."""
    loop = asyncio.get_running_loop()
    for group in by_snapshot(parts, names):
        alive = []
        for part in group:
            rows = await loop.run_in_executor(threads, read_mine, runtime, store, part, placement)
            alive.append((names[part.step], take_out(runtime, names[part.step], rows)))
        for step, rows in alive:
            runtime.load(step, rows)
            await asyncio.sleep(0)
    runtime.loaded()


def load_at_once(
    runtime: Runtime,
    store: SnapshotStore,
    parts: Sequence[Part],
    names: Mapping[str, str],
    placement: Placement,
) -> None:
    """The same, here and now."""
    for group in by_snapshot(parts, names):
        read = [(part, read_mine(runtime, store, part, placement)) for part in group]
        steps = [names[part.step] for part, _ in read]  # its file has the name it had
        alive = [take_out(runtime, step, rows) for step, (_, rows) in zip(steps, read, strict=True)]
        for step, rows in zip(steps, alive, strict=True):
            runtime.load(step, rows)
    runtime.loaded()


def by_snapshot(parts: Sequence[Part], names: Mapping[str, str]) -> Iterator[list[Part]]:
    """The files to read, of one snapshot after the other; those of steps that are no more are left out."""
    wanted = sorted((part for part in parts if part.step in names), key=attrgetter("snapshot"))
    return (list(group) for _, group in groupby(wanted, key=attrgetter("snapshot")))


def take_out(runtime: Runtime, step: str, rows: Rows) -> Rows:
    """Take the keys out that these rows say are deleted; the other rows, which are to be put in afterwards."""
    if not any(rows.deleted):
        return rows
    runtime.unload(step, list(compress(rows.keys, rows.deleted)))
    alive = list(map(not_, rows.deleted))
    keys, states = list(compress(rows.keys, alive)), list(compress(rows.states, alive))
    timers, ended = list(compress(rows.timers, alive)), list(compress(rows.ended, alive))
    hashes = rows.hashes[np.array(alive)]
    return Rows(rows.step, rows.version, hashes, keys, states, timers, ended, [False] * len(keys))


def read_mine(runtime: Runtime, store: SnapshotStore, part: Part, placement: Placement) -> Rows:
    """The rows of a file that belong to this worker."""

    def mine(hashes: Hashes) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = placement.owners(hashes) == runtime.worker
        return there

    return read_rows(store.read_part(part), mine)
