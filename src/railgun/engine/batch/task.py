"""Tasks: what runs on one partition of a batch run.

A flow is run level by level: a *level* is all stages that have as many shuffles before them. A task of a level takes
the rows of its partition, does the work of the level's stages, and yields rows for the next level's; what is meant for
a later level passes through. What a task yields is, until the last level, of one form (`WIRE`): a piece of records for
a stage, a batch of a table for a sink, or a word for whoever runs the batch.
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
from railgun.engine.batch.outputs import BATCH, Captured, Table
from railgun.engine.batch.pieces import Merge, decode, one_batch
from railgun.engine.batch.sorting import Row, Sorter
from railgun.engine.batch.stages import (
    BatchStage,
    Feed,
    KeyedStage,
    Reached,
    Save,
    SourceStage,
    Surroundings,
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
TOLD: Final = -1
"""The target of words for whoever runs the batch; sinks have the numbers below."""
ENOUGH: Final = 20_000  # records that are worked on at once
SELDOM: Final = 100_000  # objects made before Python looks for garbage among them
_END: Final = b"\xff" * 8  # stands behind all places
_WORD: Final = b"e"
_BYTES: Final = 16 << 20  # of rows that are yielded together


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch run, as its tasks know it."""

    plan: bytes
    parts: int
    now: int
    feeds: Mapping[str, Feed]
    sinks: Mapping[str, pa.Schema | None]
    """The sinks whose items are wanted, and their columns; None: the items themselves, pickled."""
    timing: Mapping[str, int | None] | None = None
    """By port, as `timing_of` says of the whole plan, if this is a part of it."""
    ends: bool = True
    save: Save | None = None
    own: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The sources that are read themselves, and their parts."""
    own_sinks: bool = False
    """Whether the other sinks of the flow are written to; if not, what goes there goes nowhere."""

    def target(self, sink: str) -> int:
        """The number of a sink."""
        return TOLD - 1 - list(self.sinks).index(sink)


_PLANS: dict[bytes, Plan] = {}  # the last one: a process often has many tasks of one run


def plan_of(shipped: bytes) -> Plan:
    """The plan that was shipped."""
    if shipped not in _PLANS:
        made: Plan = pickle.loads(shipped)
        adopt_classes()
        _PLANS.clear()
        _PLANS[shipped] = made
    return _PLANS[shipped]


@dataclass(slots=True)
class _Output:
    """What a sink has got, and not given away yet."""

    sink: str
    table: Table | None
    items: list[Any] = field(default_factory=list)

    def drained(self, least: int) -> list[Any]:
        """Batches of the items; fewer than `least` stay."""
        if len(self.items) < max(1, least):
            return []
        items, self.items = self.items, []
        if self.table is None:
            return [items]
        pieces = (items[at : at + BATCH] for at in range(0, len(items), BATCH))
        return list(map(self.table.encode, pieces))


class Task:
    """One task of one level."""

    def __init__(
        self, batch: Batch, stages: Sequence[int], partition: int, only: str | None = None
    ) -> None:
        if batch.save is not None and batch.save.done:
            # Somebody uses a table of a run that is over, and nothing is kept of it: that saves and writes nothing.
            batch = replace(batch, save=None, own_sinks=False)
        self.batch = batch
        self.partition = partition
        self.only = only
        """If it is the last level, and one sink alone is of interest: this one's tables are yielded themselves."""
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
        self.around = Surroundings(
            plan, partition, batch.now, self.sorters, batch.feeds, timing, batch.save
        )
        self.stages = {index: self._stage(index) for index in stages}
        self._rows: list[Row] = []
        self._size = 0

    def _stage(self, index: int) -> BatchStage:
        stage = self.plan.stages[index]
        kind = SourceStage if stage.is_source else KeyedStage
        return kind(self.around, stage)

    # ------------------------------------------------------------ what comes in

    def run(self, tables: Iterable[Any]) -> Iterator[Any]:
        """From the rows of the task's partition to those for the next level, or to the tables of a sink."""
        feeds = any(isinstance(stage, SourceStage) for stage in self.stages.values())
        try:
            with _seldom_tidied():
                yield from (self._feed if feeds else self._work_all)(tables)
        finally:
            self.close()

    def _feed(self, tables: Iterable[Any]) -> Iterator[Any]:
        """The first level: the input of one source, as tables or lists of items; or the numbers of its parts."""
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
            self.around.told.append({"reached": stage.reached})
        self._tell_reached(stage, stage.reached)
        yield from self._drained(everything=True)

    def _work_all(self, tables: Iterable[pa.RecordBatch]) -> Iterator[Any]:
        """A later level: rows of the level before, by target and in order."""
        left = list(self.stages)
        present, merge, reached, enough = -1, Merge(), Reached(), ENOUGH
        for row in rows_of(tables):
            if row.target not in self.stages:
                self._pass(row)
                yield from self._drained()
                continue
            if row.target != present:
                if present >= 0:
                    yield from self._end(left, present, merge, reached)
                present, merge, reached, enough = row.target, Merge(), Reached(), ENOUGH
            if row.blob[:1] == _WORD:
                for source, time in json.loads(row.blob[1:]).items():
                    reached[source] = max(time, reached.get(source, time))
                continue
            if merge.rows >= enough:
                yield from self._work(present, merge, o.from_bytes(row.first))
                # What is left is looked at again, not too often.
                enough = max(ENOUGH, 2 * merge.rows)
            merge.add(decode(memoryview(row.blob)))
        if present >= 0:
            yield from self._end(left, present, merge, reached)
        for index in list(left):
            yield from self._end(left, index, Merge(), Reached())
        yield from self._drained(everything=True)

    def _work(self, index: int, merge: Merge, bound: o.Path | None) -> Iterator[Any]:
        stage = self.stages[index]
        assert isinstance(stage, KeyedStage)
        records = merge.release(bound)
        if records is not None:
            stage.process(records)
            yield from self._drained()

    def _end(self, left: list[int], index: int, merge: Merge, reached: Reached) -> Iterator[Any]:
        yield from self._work(index, merge, None)
        stage = self.stages[index]
        stage.finish(reached, self.batch.ends)
        self._tell_reached(stage, reached)
        left.remove(index)
        yield from self._drained()

    def _tell_reached(self, stage: BatchStage, reached: Reached) -> None:
        """Every task behind the shuffle has to know how far time has come."""
        if not self.plan.timed or not reached:
            return
        word = _WORD + json.dumps(reached).encode()
        for after in stage.stage.after:
            if after in self.sorters:
                self._rows += [Row(part, after, _END, word) for part in range(self.batch.parts)]

    def _pass(self, row: Row) -> None:
        if self.only is None or row.target == self.batch.target(self.only):
            self._rows.append(row)
            self._size += len(row.blob)

    def close(self) -> None:
        """Let go of everything."""
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
            for made in output.drained(1 if everything else BATCH):
                if self.only is not None:
                    yield made
                    continue
                blob = to_arrow(made) if isinstance(made, pa.RecordBatch) else dumps(made)
                target = self.batch.target(output.sink)
                self._rows.append(Row(self.partition % self.batch.parts, target, b"", blob))
                self._size += len(blob)
        told, self.around.told = self.around.told, []
        part = self.partition % self.batch.parts
        self._rows += [Row(part, TOLD, b"", json.dumps(word).encode()) for word in told]
        if self._rows and (everything or self._size >= _BYTES):
            rows, self._rows, self._size = self._rows, [], 0
            if self.only is None:
                yield as_table(rows)
            else:
                target = self.batch.target(self.only)
                for row in rows:
                    if row.target == target:
                        yield one_batch(row.blob)


@contextmanager
def _seldom_tidied() -> Iterator[None]:
    """Records come and go by the thousand. Python would look through them for garbage again and again."""
    before = gc.get_threshold()
    gc.set_threshold(SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _take(output: _Output | None, items: Sequence[Any]) -> None:
    if output is not None:
        output.items += items


def as_table(rows: Sequence[Row]) -> pa.RecordBatch:
    """Rows as they travel."""
    columns = [
        pa.array([row.part for row in rows], pa.int32()),
        pa.array([row.target for row in rows], pa.int32()),
        pa.array([row.first for row in rows], pa.binary()),
        pa.array([row.blob for row in rows], pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=WIRE)


def rows_of(tables: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    """Such rows again."""
    for table in tables:
        yield from map(Row, *(column.to_pylist() for column in table.columns))
