"""Read the state of a step from a snapshot, by many tasks; each reads its share and no more.

The state of a step is in several files: those of a full snapshot, and of the increments since. Rows are not sorted.
Rules:

1. For each key, the row of the newest snapshot that has a row of it counts. If that row says that the key is deleted,
   there is no such key, unless another worker's file of the same snapshot has the key alive: then it lives. Keys are
   identified by their hashes.
2. A task has some rows, of one file or of several. To know which of them count it reads the hashes, and nothing else,
   of the files of newer snapshots. So everything but hashes is read once, by one task, and a task holds only the hashes
   of its rows and a few thousand whole rows.
3. The task that reads the first row of a file verifies the file's checksum; other tasks rely on those of its pages.
4. A snapshot is chosen once, by its number: later snapshots do not get into a table while it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from railgun.engine.controller.snapshot_directory import NoSnapshotsError, SavedState, find_store
from railgun.engine.snapshots.arrays import hashes_of
from railgun.engine.snapshots.errors import DamagedError
from railgun.engine.snapshots.manifest import Part, damaged
from railgun.engine.snapshots.store import SnapshotStore, encode_name
from railgun.engine.snapshots.table import open_table, reading
from railgun.hashing import Hashes
from railgun.storage.errors import MissingError
from railgun.storage.object_store import ArrowDisk, LocalDisk, disk_error

ROWS_PER_TASK: Final = 1 << 18
"""Rows per task, about: files are read by row groups."""

FILES_PER_TASK: Final = 64
"""The most files that a task opens at once."""

BATCH_ROWS: Final = 1 << 14
BATCH_BYTES: Final = 64 << 20
"""A task reads so many rows at once, or about so many bytes, whichever is less."""

_READ_BYTES: Final = 8 << 20
_COLUMNS: Final = ["key", "key_pickle", "state", "state_pickle", "timers", "ended", "version"]
MISSING: Final = -1

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SavedStep:
    """The state of one step in one snapshot."""

    url: str
    """The directory of all flows."""
    flow: str
    snapshot: int
    step: str
    is_source: bool
    parts: tuple[Part, ...]
    times: dict[int, int | None]
    """When each snapshot that wrote some of these rows was committed (µs)."""

    @staticmethod
    def find(url: str, snapshot: int | None, flow: str | None, step: str) -> SavedStep:
        """Return the state of a step in a snapshot, by default the latest; errors say what exists instead."""
        home, store = find_store(url, flow)
        if snapshot is None:
            manifest = store.latest(thorough=False)
            if manifest is None:
                raise NoSnapshotsError(f"nothing was ever committed in {store.where()}")
        else:
            manifest = store.get(snapshot)
            store.check(manifest, thorough=False)
        SavedState(store, manifest, step)  # raises if the snapshot has no such step
        parts = tuple(part for part in manifest.parts if part.step == step and part.rows)
        kinds = {info.name: info.kind for info in manifest.steps}
        times: dict[int, int | None] = {}
        for number in {part.snapshot for part in parts}:
            at = manifest.committed if number == manifest.snapshot else store.committed_at(number)
            times[number] = None if at is None else round(at * 1e6)
        is_source = kinds.get(step) == "source"
        return SavedStep(home, store.flow, manifest.snapshot, step, is_source, parts, times)

    @property
    def rows(self) -> int:
        """Return the number of rows in all files; a key may have several."""
        return sum(part.rows for part in self.parts)

    def store(self) -> SnapshotStore:
        """Return the store that has the snapshot."""
        return SnapshotStore(self.url, self.flow)


@dataclass(frozen=True, slots=True)
class Slice:
    """Some rows of a file: those of all row groups that begin in `first` … `last`."""

    part: Part
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class States:
    """A column of states as they are saved: JSON, a pickle, or neither if a key has no state."""

    texts: pa.Array
    pickles: pa.Array


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows that count."""

    keys: pa.Array
    key_pickles: pa.Array
    states: dict[str, States]
    """By the name of their column."""
    columns: dict[str, pa.Array]
    """Columns that are shown as they are."""
    timers: pa.Array | None = None


# ------------------------------------------------------------ one snapshot


@dataclass(frozen=True, slots=True)
class StepRows:
    """All keys of a step in one snapshot."""

    saved: SavedStep

    def __len__(self) -> int:
        return self.saved.rows

    def shares(self, rows: int = ROWS_PER_TASK) -> list[list[Slice]]:
        """Return what each task reads: a piece of a large file, or several small files."""
        shares: list[list[Slice]] = []
        rows_left = 0
        for part in sorted(self.saved.parts, key=lambda part: (-part.snapshot, part.path)):
            for first in range(0, part.rows, rows):
                count = min(rows, part.rows - first)
                if count > rows_left or len(shares[-1]) == FILES_PER_TASK:
                    shares.append([])
                    rows_left = rows
                shares[-1].append(Slice(part, first, first + count))
                rows_left -= count
        return shares

    def blocks(self, share: Sequence[Slice]) -> Iterator[Block]:
        """Yield the rows of a share that count."""
        store = self.saved.store()
        slices = [(slice_, *_groups(store, slice_)) for slice_ in share]
        slices = [(slice_, file, groups) for slice_, file, groups in slices if groups]
        hashes, snapshots, alive_rows = [], [], []
        for slice_, file, groups in slices:
            with reading(store.where(slice_.part.path)):
                table = file.read_row_groups(groups, ["hash", "deleted"], use_threads=False)
            hashes.append(hashes_of(table["hash"]))
            snapshots.append(np.full(len(table), slice_.part.snapshot))
            alive_rows.append(~np.asarray(table["deleted"].to_numpy(), dtype=np.bool_))
        if not slices:
            return
        wanted, places = np.unique(np.concatenate(hashes), return_inverse=True)
        oldest = min(slice_.part.snapshot for slice_, *_ in slices)
        newer = [part for part in self.saved.parts if part.snapshot > oldest]
        newest = newest_of(store, newer, wanted)[places]
        start = 0
        for (slice_, file, groups), written, alive in zip(
            slices, snapshots, alive_rows, strict=True
        ):
            end = start + len(alive)
            alive &= newest[start:end] <= written
            start = end
            yield from self._blocks(store, slice_.part, file, groups, alive)

    def _blocks(
        self,
        store: SnapshotStore,
        part: Part,
        file: pq.ParquetFile,
        groups: list[int],
        alive: NDArray[np.bool_],
    ) -> Iterator[Block]:
        at = self.saved.times[part.snapshot]
        for batch in batches_of(store, part, file, groups, _COLUMNS, alive):
            count = len(batch)
            yield Block(
                batch["key"],
                batch["key_pickle"],
                {"state": States(batch["state"], batch["state_pickle"])},
                {
                    "worker": repeated(part.worker, pa.int32(), count),
                    "saved": repeated(part.snapshot, pa.int64(), count),
                    "changed_at": repeated(at, TIME, count),
                    "ended": batch["ended"],
                    "version": batch["version"],
                },
                batch["timers"],
            )


def batches_of(
    store: SnapshotStore,
    part: Part,
    file: pq.ParquetFile,
    groups: list[int],
    columns: list[str],
    chosen: NDArray[np.bool_],
) -> Iterator[pa.RecordBatch]:
    """Yield the chosen rows of these row groups of a file."""
    start = 0
    for group in groups:
        row_group = file.metadata.row_group(group)
        count = row_group.num_rows
        batch_rows = max(
            1, min(BATCH_ROWS, BATCH_BYTES * count // max(1, row_group.total_byte_size))
        )
        chosen_here = chosen[start : start + count]
        start += count
        if not chosen_here.any():
            continue
        at = 0
        batches = file.iter_batches(batch_rows, [group], columns, use_threads=False)
        while True:
            with reading(store.where(part.path)):
                batch = next(batches, None)
            if batch is None:
                break
            mask = chosen_here[at : at + len(batch)]
            at += len(batch)
            if mask.any():
                yield batch if mask.all() else batch.filter(pa.array(mask))


def newest_of(store: SnapshotStore, parts: Sequence[Part], wanted: Hashes) -> Numbers:
    """Return for each wanted hash (ascending) the newest snapshot of which these files have a row of it, or -1."""
    newest = np.full(len(wanted), MISSING, dtype=np.int64)
    for part in parts:
        file = open_part(store, part)
        for _, hashes in hashes_in(store, part, file):
            places = matches_in(wanted, hashes)[0]
            newest[places] = np.maximum(newest[places], part.snapshot)
    return newest


def matches_in(wanted: Hashes, hashes: Hashes) -> tuple[Numbers, Numbers]:
    """Return the indices in `wanted` of the hashes that are in both, and their indices in `hashes`."""
    if not len(wanted):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    places = np.searchsorted(wanted, hashes)
    places[places == len(wanted)] = 0
    rows = np.flatnonzero(wanted[places] == hashes)
    return places[rows], rows


# ------------------------------------------------------------ files


def open_part(store: SnapshotStore, part: Part, whole: bool = False) -> pq.ParquetFile:
    """Open a file to read parts of it; if `whole`, verify its checksum first. Raise `DamagedError`."""
    name = store.where(part.path)
    source = _source(store, part)
    if source.size() != part.size:
        raise damaged(name, f"it has {source.size()} bytes, and {part.size} were written")
    if whole:
        checksum = hashlib.sha256()
        while block := source.read(_READ_BYTES):
            checksum.update(block)
        if f"sha256:{checksum.hexdigest()}" != part.checksum:
            raise damaged(name, "its checksum does not fit its content")
        source.seek(0)
    return open_table(source, name, checked=whole)[2]


def _source(store: SnapshotStore, part: Part) -> pa.NativeFile:
    name = store.where(part.path)
    try:
        if isinstance(store.disk, LocalDisk):
            return pa.OSFile(name)
        if isinstance(store.disk, ArrowDisk):
            path = f"{store.disk.root}/{encode_name(store.flow)}/{part.path}"
            return store.disk.filesystem.open_input_file(path)
        return pa.BufferReader(store.disk.read(f"{encode_name(store.flow)}/{part.path}"))
    except (FileNotFoundError, MissingError) as error:
        raise DamagedError(
            f"{name} is gone, which snapshot {part.snapshot} wrote for step {part.step!r}. Bring it back from a copy, "
            "or read another snapshot: a job that goes on deletes those that are older than it keeps."
        ) from error
    except OSError as error:
        raise disk_error("read", name, error) from error


def _groups(store: SnapshotStore, slice_: Slice) -> tuple[pq.ParquetFile, list[int]]:
    """Return the file of a slice, and the row groups that begin in the slice."""
    file = open_part(store, slice_.part, whole=slice_.first == 0)
    chosen, start = [], 0
    for group in range(file.num_row_groups):
        if slice_.first <= start < slice_.last:
            chosen.append(group)
        start += file.metadata.row_group(group).num_rows
    return file, chosen


def hashes_in(
    store: SnapshotStore, part: Part, file: pq.ParquetFile
) -> Iterator[tuple[int, Hashes]]:
    """Yield the hashes of a file, row group by row group."""
    for group in range(file.num_row_groups):
        with reading(store.where(part.path)):
            column = file.read_row_group(group, ["hash"], use_threads=False)["hash"]
        yield group, hashes_of(column)


TIME: Final = pa.timestamp("us", tz="UTC")


def repeated(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    """Return an array of one value, `count` times; None is null."""
    return pa.nulls(count, kind) if value is None else pa.repeat(pa.scalar(value, kind), count)
