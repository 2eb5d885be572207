"""Saved changes: which keys of a step differ between two snapshots. Rules:

1. A task has a range of hashes, for it needs both sides of a key.
2. Files that belong to both snapshots say the same in both: only keys that are in some other file can differ, and only
   those are read.
3. A key is changed if its state is another, not if it was merely saved again.
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
    BATCH,
    NEVER,
    ROWS,
    TIME,
    Block,
    Numbers,
    Saved,
    States,
    batches_of,
    found_in,
    hashes_in,
    newest_of,
    open_part,
    repeated,
)

_STATE: Final = ["key", "key_pickle", "state", "state_pickle"]


@dataclass(frozen=True, slots=True)
class Range:
    """Hashes from `first` to `last`, which is one of them."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Between:
    """The keys of a step that differ between two snapshots."""

    before: Saved
    after: Saved

    def __len__(self) -> int:
        return sum(part.rows for part in self._unlike())

    def _unlike(self) -> list[Part]:
        """Files that only one of the two has; as `Part`s of its store."""
        same = (self.before.url, self.before.flow) == (self.after.url, self.after.flow)
        common = self._common() if same else set()
        both = (*self.before.parts, *self.after.parts)
        return [part for part in both if part.path not in common]

    def _common(self) -> set[str]:
        """Files that both have. A path is written once, and its checksum is in both manifests."""
        before = {(part.path, part.checksum) for part in self.before.parts}
        after = {(part.path, part.checksum) for part in self.after.parts}
        return {path for path, _ in before & after}

    def shares(self, rows: int = ROWS) -> list[Range]:
        """What each task compares."""
        number = -(-len(self) // rows)
        edges = [(n << 64) // number for n in range(number + 1)] if number else []
        return [Range(a, b - 1) for a, b in pairwise(edges)]

    def blocks(self, share: Range) -> Iterator[Block]:
        """The keys of a range that differ; all that are in a file which only one of the two has are looked at."""
        before, after = self.before.store(), self.after.store()
        wanted = self._wanted(before, after, share)
        old = _side(before, self.before, wanted)
        new = _side(after, self.after, wanted)
        here, there = old.rows >= 0, new.rows >= 0
        yield from self._told("added", ~here & there, old, new)
        yield from self._told("removed", here & ~there, old, new)
        yield from self._told("changed", here & there, old, new)

    def _wanted(self, before: SnapshotStore, after: SnapshotStore, share: Range) -> Hashes:
        unlike = {part.path for part in self._unlike()}
        found: list[Hashes] = [np.empty(0, dtype=np.uint64)]
        for store, saved in ((before, self.before), (after, self.after)):
            for part in saved.parts:
                if part.path not in unlike:
                    continue
                for _, hashes in hashes_in(store, part, open_part(store, part)):
                    mine = (hashes >= np.uint64(share.first)) & (hashes <= np.uint64(share.last))
                    found.append(hashes[mine])
        return np.unique(np.concatenate(found))

    def _told(
        self, change: str, which: NDArray[np.bool_], old: _Side, new: _Side
    ) -> Iterator[Block]:
        places = np.flatnonzero(which)
        for start in range(0, len(places), BATCH):
            some = places[start : start + BATCH]
            was, now = old.take(some), new.take(some)
            if change == "changed":
                unlike = _differ(was, now)
                some = some[unlike]
                was, now = (side.filter(pa.array(unlike)) for side in (was, now))
            if not len(some):
                continue
            shown = was if change == "removed" else now
            times = [self.after.times.get(number) for number in new.newest[some].tolist()]
            yield Block(
                shown["key"],
                shown["key_pickle"],
                {
                    "before": States(was["state"], was["state_pickle"]),
                    "after": States(now["state"], now["state_pickle"]),
                },
                {
                    "change": repeated(change, pa.string(), len(some)),
                    "changed_at": pa.array(times, TIME),
                },
            )


@dataclass(frozen=True, slots=True)
class _Side:
    """What one snapshot has of the hashes that are wanted."""

    table: pa.Table
    rows: Numbers
    """For each hash its row in the table, or -1."""
    newest: Numbers
    """For each hash the newest snapshot that says something of it, or -1."""

    def take(self, places: Numbers) -> pa.RecordBatch:
        rows = self.rows[places]
        taken = self.table.take(pa.array(rows, mask=rows < 0)).combine_chunks()
        batches = taken.to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], self.table.schema)


def _side(store: SnapshotStore, saved: Saved, wanted: Hashes) -> _Side:
    newest = newest_of(store, saved.parts, wanted)
    rows = np.full(len(wanted), NEVER, dtype=np.int64)
    batches: list[pa.RecordBatch] = []
    count = 0
    for part in saved.parts:
        file = open_part(store, part)
        for group, hashes in hashes_in(store, part, file):
            places, found = found_in(wanted, hashes)
            latest = newest[places] == part.snapshot
            places, found = places[latest], found[latest]
            if not len(places):
                continue
            with reading(store.where(part.path)):
                deleted = file.read_row_group(group, ["deleted"], use_threads=False)["deleted"]
            alive = ~np.asarray(deleted.to_numpy(), dtype=np.bool_)[found]
            places, found = places[alive], found[alive]
            rows[places] = count + np.arange(len(places))
            count += len(places)
            chosen = np.zeros(len(hashes), dtype=np.bool_)
            chosen[found] = True
            batches += batches_of(store, part, file, [group], _STATE, chosen)
    schema = pa.schema(
        {"key": pa.string(), "key_pickle": pa.binary(), "state": pa.string()}
        | {"state_pickle": pa.binary()}
    )
    arrays = [[batch[name] for batch in batches] for name in schema.names]
    columns = [pa.chunked_array(a, k) for a, k in zip(arrays, schema.types, strict=True)]
    return _Side(pa.Table.from_arrays(columns, schema=schema), rows, newest)


def _differ(was: pa.RecordBatch, now: pa.RecordBatch) -> NDArray[np.bool_]:
    """Whether states differ. JSON of a dict may be in another order; a pickle may differ for no reason."""
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
    other_text = pc.and_(no_pickles, pc.invert(pc.and_(lengths, dicts)))
    for row in np.flatnonzero(differ & ~_flags(other_text)).tolist():
        one, other = (
            (side["state"][row].as_py(), side["state_pickle"][row].as_py()) for side in (was, now)
        )
        differ[row] = not same(one, other)
    return differ


def _flags(column: pa.Array) -> NDArray[np.bool_]:
    return np.array(column.to_numpy(zero_copy_only=False), dtype=np.bool_)
