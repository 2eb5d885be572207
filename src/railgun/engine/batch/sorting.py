"""Sort the records a task made for another stage into pieces, one for each task behind the shuffle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from railgun.engine.batch import order as o
from railgun.engine.batch.pieces import Piece, Released, encode_table
from railgun.hashing import Hashes
from railgun.transport.rows import RowBatch, Times, joined_late, joined_times

ROWS_PER_PIECE: Final = 512  # wanted in a piece, so that its header does not weigh much
MIN_ROWS: Final = 32_768  # the least number of rows that are collected before a flush
MAX_ROWS: Final = 262_144  # the most
MAX_TABLE_BYTES: Final = 64 << 20  # of tables that are collected before a flush
MAX_PIECE_ROWS: Final = 4_096  # a task that merges holds one piece of each task before it


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the shuffle: a piece, how far time has come (for the stage behind), or a report for the driver."""

    part: int
    target: int
    first: bytes
    blob: bytes


@dataclass(slots=True)
class _Table:
    table: pa.RecordBatch
    paths: o.Paths
    times: Times | int
    hashes: Hashes
    late: Times | None


class Sorter:
    """Collects what a task makes for one stage. Flush only between records, never between the results of one record."""

    def __init__(self, target: int, parts: int) -> None:
        self.target = target
        self.parts = parts
        self.rows = 0
        self._size = 0
        self._flush_rows = min(MAX_ROWS, max(MIN_ROWS, ROWS_PER_PIECE * parts))
        self._pieces: dict[int, list[tuple[Piece, Hashes]]] = {}
        self._tables: dict[int, list[_Table]] = {}

    @property
    def full(self) -> bool:
        """Return whether so much is collected that it should be flushed."""
        return self.rows >= self._flush_rows or self._size >= MAX_TABLE_BYTES

    def add(self, paths: o.Paths, batch: RowBatch) -> None:
        """Add records with their paths."""
        assert batch.keys is not None
        piece = Piece(paths, batch.keys, batch.values, batch.times, batch.port, batch.late)
        self._pieces.setdefault(batch.port, []).append((piece, batch.hashes))
        self.rows += len(piece)

    def add_table(
        self,
        table: pa.RecordBatch,
        paths: o.Paths,
        times: Times | int,
        hashes: Hashes,
        port: int,
        late: Times | None = None,
    ) -> None:
        """Add records that are a table, with the keys in its first column."""
        self._tables.setdefault(port, []).append(_Table(table, paths, times, hashes, late))
        self.rows += table.num_rows
        self._size += table.nbytes

    def flush(self) -> list[Row]:
        """Return all that was added, as rows of the shuffle."""
        rows: list[Row] = []
        for pieces in self._pieces.values():
            rows += self._flush_pieces(pieces)
        for port, tables in self._tables.items():
            rows += self._flush_tables(tables, port)
        self._pieces, self._tables, self.rows, self._size = {}, {}, 0, 0
        return rows

    def _flush_pieces(self, pieces: list[tuple[Piece, Hashes]]) -> list[Row]:
        whole = Released.of([piece for piece, _ in pieces])
        hashes = np.concatenate([piece_hashes for _, piece_hashes in pieces])
        order, ends = self._split(whole.paths, hashes)
        whole = whole.take(order)
        rows = []
        for part, start, end in ends:
            [piece] = whole.cut(start, end).pieces()
            rows.append(Row(part, self.target, o.as_bytes(o.first(piece.paths)), piece.encode()))
        return rows

    def _flush_tables(self, tables: list[_Table], port: int) -> list[Row]:
        merged = pa.Table.from_batches([entry.table for entry in tables]).combine_chunks()
        whole = merged.to_batches()[0]
        times = joined_times([(entry.times, entry.table.num_rows) for entry in tables])
        late = joined_late([(entry.late, entry.table.num_rows) for entry in tables])
        paths = o.joined([entry.paths for entry in tables])
        order, ends = self._split(paths, np.concatenate([entry.hashes for entry in tables]))
        whole = whole.take(pa.array(order))
        rows = []
        for part, start, end in ends:
            rows_of_part = order[start:end]
            part_paths = tuple(column[rows_of_part] for column in paths)
            part_times = times if isinstance(times, int) else times[rows_of_part]
            part_late = None if late is None else late[rows_of_part]
            blob = encode_table(
                whole.slice(start, end - start), part_paths, part_times, port, part_late
            )
            rows.append(Row(part, self.target, o.as_bytes(o.first(part_paths)), blob))
        return rows

    def _split(
        self, paths: o.Paths, hashes: Hashes
    ) -> tuple[NDArray[np.intp], list[tuple[int, int, int]]]:
        """Return the rows by part, each part in order, and (part, start, end) of each piece."""
        parts = (hashes % np.uint64(self.parts)).astype(np.uint32)
        if not _ascend(paths):
            ranks = o.ranks(paths)
            order = ranks[_by_part(parts[ranks], self.parts)]
        else:
            order = _by_part(parts, self.parts)
        sorted_parts = parts[order]
        edges = np.flatnonzero(sorted_parts[1:] != sorted_parts[:-1]) + 1
        starts = [0, *edges.tolist()]
        ends = [*edges.tolist(), len(order)]
        return order, [
            (int(sorted_parts[start]), at, min(at + MAX_PIECE_ROWS, end))
            for start, end in zip(starts, ends, strict=True)
            for at in range(start, end, MAX_PIECE_ROWS)
        ]


def _by_part(parts: NDArray[np.uint32], count: int) -> NDArray[np.intp]:
    """Sort stably; numpy sorts numbers of one or two bytes in time linear in the rows."""
    kind = np.uint8 if count <= 1 << 8 else np.uint16 if count <= 1 << 16 else np.uint32
    return np.argsort(parts.astype(kind), kind="stable")


def _ascend(paths: o.Paths) -> bool:
    """Return whether the paths are in order; mostly the last column alone decides."""
    undecided = np.ones(max(0, len(paths[0]) - 1), dtype=bool)
    for column in paths:
        step = np.diff(column)
        if (undecided & (step < 0)).any():
            return False
        undecided &= step == 0
        if not undecided.any():
            return True
    return True
