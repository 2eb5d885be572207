"""Saved rows: what a snapshot has of a step, read by many tasks, each of which reads its share and no more.

The state of a step is in several files: those of a full snapshot, and of the increments since. Rows are not sorted.
Rules:

1. For a key the row of the newest snapshot that has one counts. If it says that the key is deleted, there is no such
   key; unless, within that snapshot, another worker's file has it alive: then it lives. Keys are told apart by hashes.
2. A task has some rows, of one file or of several. To know which of them count it reads of the files of newer snapshots
   the hashes, and nothing else. So everything but hashes is read once, by one task, and no task holds more than the
   hashes of its rows and a few thousand whole ones.
3. Whoever reads the first row of a file compares the file's checksum; others go by those of its pages.
4. A snapshot is chosen once, by its number: what is committed while a table is read does not get into it.
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

ROWS: Final = 1 << 18
"""Rows of a task, about: files are read by their groups of rows."""

FILES: Final = 64
"""Files of a task, at most: so many are open at once."""

BATCH: Final = 1 << 14
BYTES: Final = 64 << 20
"""Rows that are read at once, and about how many bytes of them: whichever is less."""

_BLOCK: Final = 8 << 20
_COLUMNS: Final = ["key", "key_pickle", "state", "state_pickle", "timers", "ended", "version"]
NEVER: Final = -1

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of one step in one snapshot."""

    url: str
    """The directory of all flows."""
    flow: str
    snapshot: int
    step: str
    is_source: bool
    parts: tuple[Part, ...]
    times: dict[int, int | None]
    """When each snapshot that has written some of it was committed (µs)."""

    @staticmethod
    def find(url: str, snapshot: int | None, flow: str | None, step: str) -> Saved:
        """The state of a step in a snapshot, or in the latest; typed errors tell what there is instead."""
        home, store = find_store(url, flow)
        if snapshot is None:
            manifest = store.latest(thorough=False)
            if manifest is None:
                raise NoSnapshotsError(f"nothing was ever committed in {store.where()}")
        else:
            manifest = store.get(snapshot)
            store.check(manifest, thorough=False)
        SavedState(store, manifest, step)  # knows what to say if there is no such step
        parts = tuple(part for part in manifest.parts if part.step == step and part.rows)
        kinds = {info.name: info.kind for info in manifest.steps}
        times: dict[int, int | None] = {}
        for number in {part.snapshot for part in parts}:
            at = manifest.committed if number == manifest.snapshot else store.committed_at(number)
            times[number] = None if at is None else round(at * 1e6)
        is_source = kinds.get(step) == "source"
        return Saved(home, store.flow, manifest.snapshot, step, is_source, parts, times)

    @property
    def rows(self) -> int:
        """Rows of all files; a key may have several."""
        return sum(part.rows for part in self.parts)

    def store(self) -> SnapshotStore:
        """Where it is."""
        return SnapshotStore(self.url, self.flow)


@dataclass(frozen=True, slots=True)
class Slice:
    """Some rows of a file: those of all groups that begin in `first` … `last`."""

    part: Part
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class States:
    """A column of states as they are saved: JSON, a pickle, or neither if there is none."""

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
    """What needs no more than to be shown."""
    timers: pa.Array | None = None


# ------------------------------------------------------------ one snapshot


@dataclass(frozen=True, slots=True)
class Whole:
    """All keys of a step."""

    saved: Saved

    def __len__(self) -> int:
        return self.saved.rows

    def shares(self, rows: int = ROWS) -> list[list[Slice]]:
        """What each task reads: a piece of a large file, or several small files."""
        shares: list[list[Slice]] = []
        room = 0
        for part in sorted(self.saved.parts, key=lambda part: (-part.snapshot, part.path)):
            for first in range(0, part.rows, rows):
                count = min(rows, part.rows - first)
                if count > room or len(shares[-1]) == FILES:
                    shares.append([])
                    room = rows
                shares[-1].append(Slice(part, first, first + count))
                room -= count
        return shares

    def blocks(self, share: Sequence[Slice]) -> Iterator[Block]:
        """The rows of a share that count."""
        store = self.saved.store()
        opened = [(slice_, *_groups(store, slice_)) for slice_ in share]
        opened = [(slice_, file, groups) for slice_, file, groups in opened if groups]
        hashes, snapshots, counts = [], [], []
        for slice_, file, groups in opened:
            with reading(store.where(slice_.part.path)):
                table = file.read_row_groups(groups, ["hash", "deleted"], use_threads=False)
            hashes.append(hashes_of(table["hash"]))
            snapshots.append(np.full(len(table), slice_.part.snapshot))
            counts.append(~np.asarray(table["deleted"].to_numpy(), dtype=np.bool_))
        if not opened:
            return
        wanted, places = np.unique(np.concatenate(hashes), return_inverse=True)
        oldest = min(slice_.part.snapshot for slice_, *_ in opened)
        newer = [part for part in self.saved.parts if part.snapshot > oldest]
        newest = newest_of(store, newer, wanted)[places]
        start = 0
        for (slice_, file, groups), written, alive in zip(opened, snapshots, counts, strict=True):
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
    """Those rows of these groups of a file that are chosen."""
    start = 0
    for group in groups:
        told = file.metadata.row_group(group)
        count = told.num_rows
        most = max(1, min(BATCH, BYTES * count // max(1, told.total_byte_size)))
        here = chosen[start : start + count]
        start += count
        if not here.any():
            continue
        at = 0
        batches = file.iter_batches(most, [group], columns, use_threads=False)
        while True:
            with reading(store.where(part.path)):
                batch = next(batches, None)
            if batch is None:
                break
            some = here[at : at + len(batch)]
            at += len(batch)
            if some.any():
                yield batch if some.all() else batch.filter(pa.array(some))


def newest_of(store: SnapshotStore, parts: Sequence[Part], wanted: Hashes) -> Numbers:
    """For each of these hashes, which ascend: the newest snapshot of these files that has a row of it, or -1."""
    newest = np.full(len(wanted), NEVER, dtype=np.int64)
    for part in parts:
        file = open_part(store, part)
        for _, hashes in hashes_in(store, part, file):
            places = found_in(wanted, hashes)[0]
            newest[places] = np.maximum(newest[places], part.snapshot)
    return newest


def found_in(wanted: Hashes, hashes: Hashes) -> tuple[Numbers, Numbers]:
    """Where those of the hashes are that are wanted: in `wanted`, and in `hashes`."""
    if not len(wanted):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    places = np.searchsorted(wanted, hashes)
    places[places == len(wanted)] = 0
    rows = np.flatnonzero(wanted[places] == hashes)
    return places[rows], rows


# ------------------------------------------------------------ files


def open_part(store: SnapshotStore, part: Part, whole: bool = False) -> pq.ParquetFile:
    """A file, to be read in part; if it is the `whole` of it that matters, its checksum is compared first."""
    name = store.where(part.path)
    source = _source(store, part)
    if source.size() != part.size:
        raise damaged(name, f"it has {source.size()} bytes, and {part.size} were written")
    if whole:
        told = hashlib.sha256()
        while block := source.read(_BLOCK):
            told.update(block)
        if f"sha256:{told.hexdigest()}" != part.checksum:
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
    """The file of a slice, and its groups of rows that begin in there."""
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
    """The hashes of a file, group by group."""
    for group in range(file.num_row_groups):
        with reading(store.where(part.path)):
            column = file.read_row_group(group, ["hash"], use_threads=False)["hash"]
        yield group, hashes_of(column)


TIME: Final = pa.timestamp("us", tz="UTC")


def repeated(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    """One value, so many times; None is null."""
    return pa.nulls(count, kind) if value is None else pa.repeat(pa.scalar(value, kind), count)
