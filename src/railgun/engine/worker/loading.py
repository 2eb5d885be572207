"""Loading: a generation begins with what a snapshot holds.

Every worker reads all files of the snapshot, and keeps the keys that its placement gives it: so any number of workers
can go on from any other's. For a key the row of the newest snapshot counts. Within one snapshot a key may be saved as
deleted by a worker it had left, and as alive by another: then it lives.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import compress, groupby
from operator import attrgetter, not_
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from railgun.engine.operators.calls import UNPICKLE, ValueCalls, attempt
from railgun.engine.protocol.placement import Placement
from railgun.engine.snapshots.manifest import Part
from railgun.engine.snapshots.store import SnapshotStore
from railgun.hashing import Hashes

if TYPE_CHECKING:
    from railgun.engine.snapshots.table import Rows
    from railgun.engine.worker.runtime import Runtime


Read = Callable[[], "Rows"]
"""Reads one file; a driver may call it in another thread."""
Steps = Generator[Read | None, "Rows | None", None]


async def load_parts(
    runtime: Runtime,
    store: SnapshotStore,
    parts: Sequence[Part],
    placement: Placement,
    threads: Executor,
) -> None:
    """Load `parts` into `runtime` while the event loop keeps running: `threads` reads the files."""
    loop = asyncio.get_running_loop()
    from railgun.engine.snapshots.table import no_collection  # Arrow: only who loads waits for it

    with no_collection():
        steps = loading_steps(runtime, store, parts, placement)
        rows: Rows | None = None
        while (read := _next(steps, rows)) is not False:
            rows = None
            if read is not None:
                rows, error = await loop.run_in_executor(threads, attempt, read)
                if error is not None:
                    raise error
            await asyncio.sleep(0)
        gc.freeze()  # state is here to stay: the collector need not look through it


def load_at_once(
    runtime: Runtime, store: SnapshotStore, parts: Sequence[Part], placement: Placement
) -> None:
    """Load `parts` into `runtime` in the calling thread, as simulations do."""
    steps = loading_steps(runtime, store, parts, placement)
    rows: Rows | None = None
    while (read := _next(steps, rows)) is not False:
        rows = None if read is None else read()


def _next(steps: Steps, rows: Rows | None) -> Read | Literal[False] | None:
    """Send rows to the steps of loading. Return the next file to read, None for a pause, False at the end."""
    try:
        return steps.send(rows)
    except StopIteration:  # never one of user code: a generator makes that a RuntimeError
        return False


def loading_steps(
    runtime: Runtime, store: SnapshotStore, parts: Sequence[Part], placement: Placement
) -> Steps:
    """Yield one file after the other to be read, and put the rows that are sent back into `runtime`.

    A yielded None asks for nothing: the driver may do other work before it goes on. This is the only place that says
    in which order rows are put in: workers and simulations both run it. All deletions of a snapshot come before all
    rows of the same snapshot, and older snapshots before newer ones.
    """
    for group in by_snapshot(parts):
        alive: list[tuple[str, Rows]] = []
        for part in group:
            rows = yield partial(read_mine, runtime, store, part, placement)
            assert rows is not None
            alive.append((part.step, take_out(runtime, part.step, rows)))
        for step, rows in alive:
            runtime.load(step, rows)
            yield None
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
    from railgun.engine.snapshots.table import read_rows  # Arrow: only who loads waits for it

    def mine(hashes: Hashes) -> NDArray[np.bool_]:
        there: NDArray[np.bool_] = placement.owners(hashes) == runtime.worker
        return there

    def calling(keys: Sequence[Any], done: Callable[[], int]) -> ValueCalls:
        return ValueCalls(part.step, UNPICKLE, "key", keys, done)

    data = store.read_part(part)
    return read_rows(data, mine, part.path, checked=True, calling=calling)
