"""Run the stages of one level on one partition of a batch run.

A flow runs level by level: a *level* is all stages that have the same number of shuffles before them. A task of a level
takes the rows of its partition, does the work of the level's stages, and yields rows for the next level; rows for a
later level pass through. Until the last level, tasks yield rows of one form (`WIRE`): a piece of records for a stage,
how far time has come (for a stage), a batch of a table for a sink, or a report for the driver.
"""

from __future__ import annotations

import gc
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa

from railgun.client.payloads import to_arrow
from railgun.engine.batch import order as o
from railgun.engine.batch.outputs import BATCH_ITEMS, Captured, Table
from railgun.engine.batch.pieces import Merge, decode, one_batch
from railgun.engine.batch.sorting import Row, Sorter
from railgun.engine.batch.stages import (
    BatchStage,
    Feed,
    KeyedStage,
    Reached,
    Save,
    SourceStage,
    StageContext,
    timing_of,
)
from railgun.flows.plan import Plan
from railgun.transport.pickling import adopt_classes, dumps

WIRE: Final = pa.schema(
    [
        pa.field("part", pa.int32(), nullable=False),
        pa.field("target", pa.int32(), nullable=False),
        pa.field("first", pa.binary(), nullable=False),
        pa.field("blob", pa.binary(), nullable=False),
    ]
)
REPORT: Final = -1
"""The target of reports for the driver; sinks have the numbers below."""
RELEASE_ROWS: Final = 20_000  # records that are collected before they are released to a stage
GC_THRESHOLD_OBJECTS: Final = 100_000  # objects created before Python's garbage collector runs
_AFTER_ALL: Final = b"\xff" * 8  # sorts behind all paths
_REACHED: Final = b"e"  # the first byte of a row that says how far time has come
_YIELD_BYTES: Final = 16 << 20  # of rows that are yielded together


@dataclass(frozen=True, slots=True)
class Batch:
    """The settings of a batch run, which are sent to all its tasks."""

    plan: bytes
    parts: int
    now: int
    feeds: Mapping[str, Feed]
    sinks: Mapping[str, pa.Schema | None]
    """The sinks whose items are wanted, and their columns; None: yield the items themselves, pickled."""
    timing: Mapping[str, int | None] | None = None
    """By port: the result of `timing_of` for the whole plan, if this plan is a part of it."""
    ends: bool = True
    save: Save | None = None
    own: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The parts of the sources that tasks read themselves."""
    own_sinks: bool = False
    """Whether tasks write to the sinks that are not in `sinks`; if not, what those sinks get is dropped."""

    def target(self, sink: str) -> int:
        """Return the target number of a sink."""
        return REPORT - 1 - list(self.sinks).index(sink)


_PLANS: dict[bytes, Plan] = {}  # the last plan only: a process often has many tasks of one run


def plan_of(shipped: bytes) -> Plan:
    """Return the plan of these bytes; unpickle it only if the last task had another plan."""
    if shipped not in _PLANS:
        plan: Plan = pickle.loads(shipped)
        adopt_classes()
        _PLANS.clear()
        _PLANS[shipped] = plan
    return _PLANS[shipped]


@dataclass(slots=True)
class _Output:
    """The items of a sink that are not yielded yet."""

    sink: str
    table: Table | None
    items: list[Any] = field(default_factory=list)

    def drained(self, least: int) -> list[Any]:
        """Return the items as batches, and forget them; with fewer than `least` items, return nothing."""
        if len(self.items) < max(1, least):
            return []
        items, self.items = self.items, []
        if self.table is None:
            return [items]
        pieces = (items[at : at + BATCH_ITEMS] for at in range(0, len(items), BATCH_ITEMS))
        return list(map(self.table.encode, pieces))


class Task:
    """One task of one level."""

    def __init__(
        self, batch: Batch, stages: Sequence[int], partition: int, only: str | None = None
    ) -> None:
        if batch.save is not None and batch.save.done:
            # The run is over, and a table of it that was not kept is computed again: this must save and write nothing.
            batch = replace(batch, save=None, own_sinks=False)
        self.batch = batch
        self.partition = partition
        self.only = only
        """On the last level: the one sink that is wanted. Its tables are yielded directly, not as rows of `WIRE`."""
        plan = plan_of(batch.plan)
        self.outputs = {
            sink: _Output(sink, None if schema is None else Table(sink, schema))
            for sink, schema in batch.sinks.items()
        }
        captured = {
            name: Captured(partial(_take, self.outputs.get(name)))
            for name in plan.sinks
            if name in batch.sinks or not batch.own_sinks
        }
        plan = plan.with_sinks(captured)
        self.plan = plan
        targets = {after for index in stages for after in plan.stages[index].after}
        self.sorters = {target: Sorter(target, batch.parts) for target in sorted(targets)}
        timing = timing_of(plan, batch.feeds) if batch.timing is None else batch.timing
        self.context = StageContext(
            plan, partition, batch.now, self.sorters, batch.feeds, timing, batch.save
        )
        self.stages = {index: self._stage(index) for index in stages}
        self._rows: list[Row] = []
        self._size = 0

    def _stage(self, index: int) -> BatchStage:
        stage = self.plan.stages[index]
        kind = SourceStage if stage.is_source else KeyedStage
        return kind(self.context, stage)

    # ------------------------------------------------------------ what comes in

    def run(self, tables: Iterable[Any]) -> Iterator[Any]:
        """Turn the rows of the task's partition into rows for the next level, or into tables of the sink `only`."""
        feeds = any(isinstance(stage, SourceStage) for stage in self.stages.values())
        try:
            with _rare_garbage_collection():
                yield from (self._feed if feeds else self._work_all)(tables)
        finally:
            self.close()

    def _feed(self, tables: Iterable[Any]) -> Iterator[Any]:
        """Run the first level: the input of one source, as tables or lists of items, or as numbers of its parts."""
        (stage,) = self.stages.values()
        assert isinstance(stage, SourceStage)
        own = self.batch.own.get(stage.reading.step)
        for table in tables:
            if own is not None:
                for number in table.column(0).to_pylist():
                    for _ in stage.read(own[number]):
                        yield from self._drained()
            elif isinstance(table, list):
                stage.take(table)
            else:
                stage.process(table)
            yield from self._drained()
        stage.finish({}, self.batch.ends)
        if self.batch.save is not None and stage.reached:
            self.context.reports.append({"reached": stage.reached})
        self._send_reached(stage, stage.reached)
        yield from self._drained(everything=True)

    def _work_all(self, tables: Iterable[pa.RecordBatch]) -> Iterator[Any]:
        """Run a later level: rows of the level before, ordered by target and path."""
        unfinished = list(self.stages)
        current, merge, reached, limit = -1, Merge(), Reached(), RELEASE_ROWS
        for row in rows_of(tables):
            if row.target not in self.stages:
                self._pass(row)
                yield from self._drained()
                continue
            if row.target != current:
                if current >= 0:
                    yield from self._end(unfinished, current, merge, reached)
                current, merge, reached, limit = row.target, Merge(), Reached(), RELEASE_ROWS
            if row.blob[:1] == _REACHED:
                for source, time in json.loads(row.blob[1:]).items():
                    reached[source] = max(time, reached.get(source, time))
                continue
            if merge.rows >= limit:
                yield from self._work(current, merge, o.from_bytes(row.first))
                # Check again only when the rest has doubled, or merging would be quadratic.
                limit = max(RELEASE_ROWS, 2 * merge.rows)
            merge.add(decode(memoryview(row.blob)))
        if current >= 0:
            yield from self._end(unfinished, current, merge, reached)
        for index in list(unfinished):
            yield from self._end(unfinished, index, Merge(), Reached())
        yield from self._drained(everything=True)

    def _work(self, index: int, merge: Merge, bound: o.Path | None) -> Iterator[Any]:
        stage = self.stages[index]
        assert isinstance(stage, KeyedStage)
        records = merge.release(bound)
        if records is not None:
            stage.process(records)
            yield from self._drained()

    def _end(
        self, unfinished: list[int], index: int, merge: Merge, reached: Reached
    ) -> Iterator[Any]:
        yield from self._work(index, merge, None)
        stage = self.stages[index]
        stage.finish(reached, self.batch.ends)
        self._send_reached(stage, reached)
        unfinished.remove(index)
        yield from self._drained()

    def _send_reached(self, stage: BatchStage, reached: Reached) -> None:
        """Send how far time has come to every task behind the shuffle."""
        if not self.plan.timed or not reached:
            return
        blob = _REACHED + json.dumps(reached).encode()
        for after in stage.stage.after:
            if after in self.sorters:
                self._rows += [
                    Row(part, after, _AFTER_ALL, blob) for part in range(self.batch.parts)
                ]

    def _pass(self, row: Row) -> None:
        if self.only is None or row.target == self.batch.target(self.only):
            self._rows.append(row)
            self._size += len(row.blob)

    def close(self) -> None:
        """Close the stages: release their files, and throw away what sinks have not prepared."""
        for stage in self.stages.values():
            stage.close()

    # ------------------------------------------------------------ what goes out

    def _drained(self, everything: bool = False) -> Iterator[Any]:
        for sorter in self.sorters.values():
            if sorter.rows and (everything or sorter.full):
                rows = sorter.flush()
                self._rows += rows
                self._size += sum(len(row.blob) for row in rows)
        for output in self.outputs.values():
            for batch in output.drained(1 if everything else BATCH_ITEMS):
                if self.only is not None:
                    yield batch
                    continue
                blob = to_arrow(batch) if isinstance(batch, pa.RecordBatch) else dumps(batch)
                target = self.batch.target(output.sink)
                self._rows.append(Row(self.partition % self.batch.parts, target, b"", blob))
                self._size += len(blob)
        reports, self.context.reports = self.context.reports, []
        part = self.partition % self.batch.parts
        self._rows += [Row(part, REPORT, b"", json.dumps(report).encode()) for report in reports]
        if self._rows and (everything or self._size >= _YIELD_BYTES):
            rows, self._rows, self._size = self._rows, [], 0
            if self.only is None:
                yield as_table(rows)
            else:
                target = self.batch.target(self.only)
                for row in rows:
                    if row.target == target:
                        yield one_batch(row.blob)


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Run the garbage collector less often: records come and go by the thousand, and it would scan them each time."""
    before = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _take(output: _Output | None, items: Sequence[Any]) -> None:
    if output is not None:
        output.items += items


def as_table(rows: Sequence[Row]) -> pa.RecordBatch:
    """Return rows of the shuffle as a table."""
    columns = [
        pa.array([row.part for row in rows], pa.int32()),
        pa.array([row.target for row in rows], pa.int32()),
        pa.array([row.first for row in rows], pa.binary()),
        pa.array([row.blob for row in rows], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=WIRE)


def rows_of(tables: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    """Return the rows of tables of the shuffle."""
    for table in tables:
        yield from map(Row, *(column.to_pylist() for column in table.columns))
