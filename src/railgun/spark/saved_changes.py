"""Find the keys of a step that differ between two snapshots. Rules:

1. A task has a range of hashes, because it needs both sides of a key.
2. Files that belong to both snapshots say the same in both: only keys in other files can differ, and only those are
   read.
3. A key is changed if its state is different, not if it was merely saved again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from railgun.engine.snapshots.manifest import Part
from railgun.engine.snapshots.store import SnapshotStore
from railgun.engine.snapshots.table import reading
from railgun.hashing import Hashes
from railgun.spark.kinds import same
from railgun.spark.saved_rows import (
    BATCH_ROWS,
    MISSING,
    ROWS_PER_TASK,
    TIME,
    Block,
    Numbers,
    SavedStep,
    States,
    batches_of,
    hashes_in,
    matches_in,
    newest_of,
    open_part,
    repeated,
)

_STATE: Final = ["key", "key_pickle", "state", "state_pickle"]


@dataclass(frozen=True, slots=True)
class Range:
    """Hashes from `first` to `last`, both included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class StepChanges:
    """The keys of a step that differ between two snapshots."""

    before: SavedStep
    after: SavedStep

    def __len__(self) -> int:
        return sum(part.rows for part in self._parts_of_one_side())

    def _parts_of_one_side(self) -> list[Part]:
        """Return the files that only one of the two snapshots has."""
        same_store = (self.before.url, self.before.flow) == (self.after.url, self.after.flow)
        common = self._common() if same_store else set()
        both = (*self.before.parts, *self.after.parts)
        return [part for part in both if part.path not in common]

    def _common(self) -> set[str]:
        """Return the paths of files that both have: a path is written once, and both manifests have its checksum."""
        before = {(part.path, part.checksum) for part in self.before.parts}
        after = {(part.path, part.checksum) for part in self.after.parts}
        return {path for path, _ in before & after}

    def shares(self, rows: int = ROWS_PER_TASK) -> list[Range]:
        """Return the ranges that tasks compare, one each."""
        number = -(-len(self) // rows)
        edges = [(n << 64) // number for n in range(number + 1)] if number else []
        return [Range(a, b - 1) for a, b in pairwise(edges)]

    def blocks(self, share: Range) -> Iterator[Block]:
        """Yield the keys of a range that differ, of all keys in files that only one of the snapshots has."""
        before, after = self.before.store(), self.after.store()
        wanted = self._wanted(before, after, share)
        old = _side(before, self.before, wanted)
        new = _side(after, self.after, wanted)
        here, there = old.rows >= 0, new.rows >= 0
        yield from self._blocks_of("added", ~here & there, old, new)
        yield from self._blocks_of("removed", here & ~there, old, new)
        yield from self._blocks_of("changed", here & there, old, new)

    def _wanted(self, before: SnapshotStore, after: SnapshotStore, share: Range) -> Hashes:
        unlike_paths = {part.path for part in self._parts_of_one_side()}
        hash_arrays: list[Hashes] = [np.empty(0, dtype=np.uint64)]
        for store, saved in ((before, self.before), (after, self.after)):
            for part in saved.parts:
                if part.path not in unlike_paths:
                    continue
                for _, hashes in hashes_in(store, part, open_part(store, part)):
                    in_range = (hashes >= np.uint64(share.first)) & (
                        hashes <= np.uint64(share.last)
                    )
                    hash_arrays.append(hashes[in_range])
        return np.unique(np.concatenate(hash_arrays))

    def _blocks_of(
        self, change: str, mask: NDArray[np.bool_], old: _Side, new: _Side
    ) -> Iterator[Block]:
        places = np.flatnonzero(mask)
        for start in range(0, len(places), BATCH_ROWS):
            chosen = places[start : start + BATCH_ROWS]
            was, now = old.take(chosen), new.take(chosen)
            if change == "changed":
                differing = _differ(was, now)
                chosen = chosen[differing]
                was, now = (side.filter(pa.array(differing)) for side in (was, now))
            if not len(chosen):
                continue
            shown = was if change == "removed" else now
            times = [self.after.times.get(number) for number in new.newest[chosen].tolist()]
            yield Block(
                shown["key"],
                shown["key_pickle"],
                {
                    "before": States(was["state"], was["state_pickle"]),
                    "after": States(now["state"], now["state_pickle"]),
                },
                {
                    "change": repeated(change, pa.string(), len(chosen)),
                    "changed_at": pa.array(times, TIME),
                },
            )


@dataclass(frozen=True, slots=True)
class _Side:
    """The rows of one snapshot for the wanted hashes."""

    table: pa.Table
    rows: Numbers
    """For each hash, its row in the table, or -1."""
    newest: Numbers
    """For each hash, the newest snapshot that has a row of it, or -1."""

    def take(self, places: Numbers) -> pa.RecordBatch:
        rows = self.rows[places]
        taken = self.table.take(pa.array(rows, mask=rows < 0)).combine_chunks()
        batches = taken.to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], self.table.schema)


def _side(store: SnapshotStore, saved: SavedStep, wanted: Hashes) -> _Side:
    newest = newest_of(store, saved.parts, wanted)
    rows = np.full(len(wanted), MISSING, dtype=np.int64)
    batches: list[pa.RecordBatch] = []
    count = 0
    for part in saved.parts:
        file = open_part(store, part)
        for group, hashes in hashes_in(store, part, file):
            places, file_rows = matches_in(wanted, hashes)
            latest = newest[places] == part.snapshot
            places, file_rows = places[latest], file_rows[latest]
            if not len(places):
                continue
            with reading(store.where(part.path)):
                deleted = file.read_row_group(group, ["deleted"], use_threads=False)["deleted"]
            alive = ~np.asarray(deleted.to_numpy(), dtype=np.bool_)[file_rows]
            places, file_rows = places[alive], file_rows[alive]
            rows[places] = count + np.arange(len(places))
            count += len(places)
            chosen = np.zeros(len(hashes), dtype=np.bool_)
            chosen[file_rows] = True
            batches += batches_of(store, part, file, [group], _STATE, chosen)
    schema = pa.schema(
        {"key": pa.string(), "key_pickle": pa.binary(), "state": pa.string()}
        | {"state_pickle": pa.binary()}
    )
    arrays = [[batch[name] for batch in batches] for name in schema.names]
    columns = [pa.chunked_array(a, k) for a, k in zip(arrays, schema.types, strict=True)]
    return _Side(pa.Table.from_arrays(columns, schema=schema), rows, newest)


def _differ(was: pa.RecordBatch, now: pa.RecordBatch) -> NDArray[np.bool_]:
    """Return which states differ, as a mask. JSON of equal dicts may have another order, equal pickles other bytes."""
    equal = [
        pc.or_(
            pc.fill_null(pc.equal(was[name], now[name]), False),
            pc.and_(pc.is_null(was[name]), pc.is_null(now[name])),
        )
        for name in ("state", "state_pickle")
    ]
    differ: NDArray[np.bool_] = _flags(pc.invert(pc.and_(*equal)))
    texts = was["state"], now["state"]
    no_pickles = pc.and_(*(pc.is_valid(text) for text in texts))
    lengths = pc.fill_null(pc.equal(*map(pc.binary_length, texts)), False)
    dicts = pc.fill_null(pc.match_substring(texts[0], "{"), False)
    different_text = pc.and_(no_pickles, pc.invert(pc.and_(lengths, dicts)))
    for row in np.flatnonzero(differ & ~_flags(different_text)).tolist():
        old, new = (
            (side["state"][row].as_py(), side["state_pickle"][row].as_py()) for side in (was, now)
        )
        differ[row] = not same(old, new)
    return differ


def _flags(column: pa.Array) -> NDArray[np.bool_]:
    return np.array(column.to_numpy(zero_copy_only=False), dtype=np.bool_)
