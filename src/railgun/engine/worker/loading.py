"""Load a snapshot into a worker at the start of a generation.

Every worker reads all files of the snapshot, and keeps the keys that its placement assigns to it, so a snapshot can be
loaded by any number of workers. For a key the row of the newest snapshot is valid. Within one snapshot a key may be
saved as deleted by its former worker and as alive by its present one: then it is alive.
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
"""Reads one file. A driver may call it in another thread."""
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
    from railgun.engine.snapshots.table import no_collection  # imports Arrow, which takes long

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
        gc.freeze()  # the state stays in memory, so the garbage collector need not scan it


def load_at_once(
    runtime: Runtime, store: SnapshotStore, parts: Sequence[Part], placement: Placement
) -> None:
    """Load `parts` into `runtime` in the calling thread, as simulations do."""
    steps = loading_steps(runtime, store, parts, placement)
    rows: Rows | None = None
    while (read := _next(steps, rows)) is not False:
        rows = None if read is None else read()


def _next(steps: Steps, rows: Rows | None) -> Read | Literal[False] | None:
    """Send rows to the loading steps. Return the next file to read, None for a pause, or False at the end."""
    try:
        return steps.send(rows)
    except StopIteration:  # never from user code: a generator turns that into a RuntimeError
        return False


def loading_steps(
    runtime: Runtime, store: SnapshotStore, parts: Sequence[Part], placement: Placement
) -> Steps:
    """Yield the files to read, one after the other, and load the rows that are sent back into `runtime`.

    A yielded None asks for nothing: the driver may do other work before it goes on. Only this function decides the
    order in which rows are loaded; workers and simulations both run it. All deletions of a snapshot come before all
    other rows of the same snapshot, and older snapshots before newer ones.
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
    """Return the files of each snapshot, oldest snapshot first."""
    ordered = sorted(parts, key=attrgetter("snapshot"))
    return (list(group) for _, group in groupby(ordered, key=attrgetter("snapshot")))


def take_out(runtime: Runtime, step: str, rows: Rows) -> Rows:
    """Delete the keys that `rows` say are deleted. Return the other rows, to be loaded afterwards."""
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
    """Return the rows of a file that belong to this worker."""
    from railgun.engine.snapshots.table import read_rows  # imports Arrow, which takes long

    def mine(hashes: Hashes) -> NDArray[np.bool_]:
        is_mine: NDArray[np.bool_] = placement.owners(hashes) == runtime.worker
        return is_mine

    def calling(keys: Sequence[Any], done: Callable[[], int]) -> ValueCalls:
        return ValueCalls(part.step, UNPICKLE, "key", keys, done)

    data = store.read_part(part)
    return read_rows(data, mine, part.path, checked=True, calling=calling)
