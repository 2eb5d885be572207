"""Sorting out: what a task has made for another stage, into pieces, one for each task behind the shuffle."""

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

PER_PIECE: Final = 512  # rows at least, so that a piece is worth its head
FEWEST: Final = 32_768
MOST: Final = 262_144  # rows that wait to be sorted out
BYTES: Final = 64 << 20  # of tables that do
LONGEST: Final = 4_096  # rows of a piece: who merges many holds one of each task


@dataclass(frozen=True, slots=True)
class Row:
    """What travels through a shuffle: a piece, or a word for the stage behind it or for whoever runs the batch."""

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
    """Takes what a task makes for one stage. To be flushed between records only, never between those of one record."""

    def __init__(self, target: int, parts: int) -> None:
        self.target = target
        self.parts = parts
        self.rows = 0
        self._size = 0
        self._enough = min(MOST, max(FEWEST, PER_PIECE * parts))
        self._pieces: dict[int, list[tuple[Piece, Hashes]]] = {}
        self._tables: dict[int, list[_Table]] = {}

    @property
    def full(self) -> bool:
        """Whether so much has come that it should be flushed."""
        return self.rows >= self._enough or self._size >= BYTES

    def add(self, paths: o.Paths, batch: RowBatch) -> None:
        """Records with their places."""
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
        """Records that are a table, keys first."""
        self._tables.setdefault(port, []).append(_Table(table, paths, times, hashes, late))
        self.rows += table.num_rows
        self._size += table.nbytes

    def flush(self) -> list[Row]:
        """All that has come, as pieces."""
        rows: list[Row] = []
        for pieces in self._pieces.values():
            rows += self._flush_pieces(pieces)
        for port, tables in self._tables.items():
            rows += self._flush_tables(tables, port)
        self._pieces, self._tables, self.rows, self._size = {}, {}, 0, 0
        return rows

    def _flush_pieces(self, pieces: list[tuple[Piece, Hashes]]) -> list[Row]:
        whole = Released.of([piece for piece, _ in pieces])
        hashes = np.concatenate([some for _, some in pieces])
        order, ends = self._split(whole.paths, hashes)
        whole = whole.take(order)
        rows = []
        for part, start, end in ends:
            [piece] = whole.cut(start, end).pieces()
            rows.append(Row(part, self.target, o.as_bytes(o.first(piece.paths)), piece.encode()))
        return rows

    def _flush_tables(self, tables: list[_Table], port: int) -> list[Row]:
        merged = pa.Table.from_batches([one.table for one in tables]).combine_chunks()
        whole = merged.to_batches()[0]
        times = joined_times([(one.times, one.table.num_rows) for one in tables])
        late = joined_late([(one.late, one.table.num_rows) for one in tables])
        paths = o.joined([one.paths for one in tables])
        order, ends = self._split(paths, np.concatenate([one.hashes for one in tables]))
        whole = whole.take(pa.array(order))
        rows = []
        for part, start, end in ends:
            some = order[start:end]
            own = tuple(column[some] for column in paths)
            when = times if isinstance(times, int) else times[some]
            late_ones = None if late is None else late[some]
            blob = encode_table(whole.slice(start, end - start), own, when, port, late_ones)
            rows.append(Row(part, self.target, o.as_bytes(o.first(own)), blob))
        return rows

    def _split(
        self, paths: o.Paths, hashes: Hashes
    ) -> tuple[NDArray[np.intp], list[tuple[int, int, int]]]:
        """The rows part by part, in order within each; and for each part that has some, where its rows are."""
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
            (int(sorted_parts[start]), at, min(at + LONGEST, end))
            for start, end in zip(starts, ends, strict=True)
            for at in range(start, end, LONGEST)
        ]


def _by_part(parts: NDArray[np.uint32], count: int) -> NDArray[np.intp]:
    """A stable sort; of one byte or two, numpy sorts in time linear in the rows."""
    kind = np.uint8 if count <= 1 << 8 else np.uint16 if count <= 1 << 16 else np.uint32
    return np.argsort(parts.astype(kind), kind="stable")


def _ascend(paths: o.Paths) -> bool:
    """Whether these paths are in order; mostly the last column alone tells."""
    undecided = np.ones(max(0, len(paths[0]) - 1), dtype=bool)
    for column in paths:
        step = np.diff(column)
        if (undecided & (step < 0)).any():
            return False
        undecided &= step == 0
        if not undecided.any():
            return True
    return True
