"""Run one stage of a batch run in one task, from its first record to its end.

The operators are those of a live flow (`flows.plan.build`); they get records in order. Rules:

1. Records of one key are worked on in their order; between keys there is none.
2. Timers. If the input has an order column, time goes by as the records do: before a record of a key is worked on, the
   key's timers fire that are due by then, that is by the latest time of the key's records so far, less the lateness
   allowed. Without an order column it is not known which records are late, so timers wait for the end of the input.
3. The end: the timers that are left fire in order of time, then `on_end` is called for every key, step by step as in a
   live flow. If the flow is to go on live there is no end: timers that are due by the latest time of the input fire,
   and the others go into the snapshot with the state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from railgun.engine.batch import order as o
from railgun.engine.batch.columns import VALUE, as_items, as_order, column_of, hashes_of
from railgun.engine.batch.errors import BatchError
from railgun.engine.batch.pieces import KEY, Released
from railgun.engine.batch.sorting import Sorter
from railgun.engine.operators.calls import ValueCalls
from railgun.engine.operators.changes import Changes
from railgun.engine.operators.keyed import Keyed
from railgun.engine.operators.operator import DeadLetter, Setting
from railgun.engine.operators.reading import BATCH, Part
from railgun.engine.operators.stateful import StatefulSteps
from railgun.engine.operators.stateless import KeyBy
from railgun.engine.operators.writing import Writing
from railgun.engine.protocol.frontier import LAST, MIN, late_by
from railgun.engine.snapshots.store import SnapshotStore
from railgun.engine.state.disk import Disk
from railgun.errors import KeyTypeError, pass_interrupt
from railgun.flows.plan import DEAD, Plan, Stage, build
from railgun.flows.sink import Place
from railgun.hashing import hash_keys
from railgun.transport.rows import RowBatch, Times

READ_PAUSE_S: Final = 0.005  # before a source that returned nothing is read again
BOUND: Final = "__railgun_bound"
"""The column that says how far time had come before a row of an ordered table, if that is known."""
Reached = dict[str, int]
"""How far time has come in each source, by its name; sources without records are left out."""
_ROW_BITS: Final = 33  # of a record's place in an input; the partition is above them,
_SOURCE_BITS: Final = 55  # and above that the source


@dataclass(frozen=True, slots=True)
class Feed:
    """How the rows of a table become records of a source."""

    item: Callable[[dict[str, Any]], Any] | None = None
    order: str | None = None
    """The column whose values come first in the paths of records."""
    ordered: bool = False
    """Whether the user named an order for the rows, so that time goes by as they come."""


@dataclass(frozen=True, slots=True)
class Save:
    """The snapshot that a batch run ends in."""

    url: str
    flow: str
    snapshot: int
    generation: int
    store: str = ""
    """The identity of the snapshot directory."""

    @property
    def done(self) -> bool:
        """Return whether the snapshot is committed."""
        return SnapshotStore(self.url, self.flow).has(self.snapshot)


@dataclass(slots=True)
class StageContext:
    """What a stage needs from its task."""

    plan: Plan
    partition: int
    now: int
    sorters: Mapping[int, Sorter]
    """By stage; stages whose records are not needed have no sorter."""
    feeds: Mapping[str, Feed]
    timing: Mapping[str, int | None]
    save: Save | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    """Reports for the driver: files of state, tokens of sinks, frontiers of steps."""


class BatchStage:
    """One stage in one task."""

    def __init__(self, context: StageContext, stage: Stage) -> None:
        self.context = context
        self.stage = stage
        plan, save = context.plan, context.save
        self._disk = None if plan.state is None else Disk(plan.state)
        keep = None if self._disk is None else self._disk.store
        generation = 0 if save is None else save.generation
        place = Place(plan.flow, DEAD, context.partition, generation)
        if save is not None:
            place = replace(place, transactional=True, store=save.store)
        self._dead: Writing | None = None
        if plan.dead_letters is not None:
            self._dead = Writing(Setting(DEAD), plan.dead_letters, place)
        self.operators = build(
            plan, stage, place, self._deliver, context.now, self._write_dead_letter, keep
        )
        if self._dead is not None:
            self.operators.writing += (self._dead,)
        self._emitted = 0
        self._paths: o.Paths = ()  # of the records being worked on
        self._timer_row: int | None = None  # the row before which timers fire, while they do
        self._phase = 0  # of the end: two for each keyed operator

    def _write_dead_letter(self, letter: DeadLetter) -> None:
        assert self._dead is not None
        self._dead.write([letter])

    def _deliver(self, target: int, batch: RowBatch) -> None:
        sorter = self.context.sorters.get(target)
        if sorter is None:
            return
        if batch.origin is not None and batch.origin[0][0] >= 0:
            paths = tuple(column[batch.origin[0]] for column in self._paths)
        elif self._timer_row is not None:
            row = self._timer_row
            paths = tuple(np.repeat(column[row : row + 1], len(batch)) for column in self._paths)
        else:
            times = batch.times
            if isinstance(times, int):
                times = np.full(len(batch), times)
            hashes = batch.hashes.view(np.int64)
            paths = o.at_the_end(self.stage.index, self._phase, times, hashes, self._emitted)
            self._emitted += len(batch)
            sorter.add(paths, batch)
            return
        sorter.add(o.onwards(paths, self.stage.index, self._emitted), batch)
        self._emitted += len(batch)

    def flush(self) -> None:
        """Hand on what waits between steps and stages."""
        for outlet in self.operators.outlets:
            outlet.flush()

    # ------------------------------------------------------------ the end

    def finish(self, reached: Reached, ends: bool) -> None:
        """End the stage, when all records have come. `ends`: the flow ends too; if not, it goes on live elsewhere."""
        frontier = min(reached.values(), default=MIN)
        for at, operator in enumerate(self.operators.keyed):
            self._phase = 2 * at
            operator.restore(frontier)
            if ends:
                operator.fire_left()
                self.flush()
                self._phase += 1
                operator.end_keys(frontier)
            elif MIN < frontier < LAST:
                operator.advance(frontier)
            self.flush()
        for writing in self.operators.writing:
            writing.flush()
        if self.context.save is not None:
            self._save(self.context.save)

    def _save(self, save: Save) -> None:
        store = SnapshotStore(save.url, save.flow)
        for operator in self.operators.keyed:
            if operator.reached() > MIN:
                self.context.reports.append({"frontier": operator.step, "at": operator.reached()})
            if len(operator.store):
                part = self._save_state(store, save, operator)
                if part is not None:
                    self.context.reports.append({"part": part})
        for writing in self.operators.writing:
            token = writing.prepare(save.snapshot)
            if token is not None:
                self.context.reports.append({"sink": writing.step, "token": token})

    def _save_state(
        self, store: SnapshotStore, save: Save, operator: Keyed
    ) -> dict[str, Any] | None:
        from railgun.engine.snapshots.table import TableWriter

        table = TableWriter(operator.step, operator.setting.version)
        changes = Changes(operator)
        changes.cut(table, full=True)
        while changes.saving:
            changes.step()
        if not table.rows:
            return None
        where = save.snapshot, save.generation, self.stage.name, operator.step
        return asdict(store.write_part(*where, self.context.partition, table.finish(), table.rows))

    def close(self) -> None:
        """Close files; throw away what sinks have not prepared."""
        for writing in self.operators.writing:
            writing.close()
        if self._disk is not None:
            self._disk.close()


class KeyedStage(BatchStage):
    """A stage behind a shuffle."""

    def __init__(self, context: StageContext, stage: Stage) -> None:
        super().__init__(context, stage)
        steps = [op for op in self.operators.keyed if isinstance(op, StatefulSteps)]
        lateness = context.timing[stage.ports[0].name]
        self._timed_steps: list[StatefulSteps] = [] if lateness is None else steps
        self._lateness = lateness or 0
        # The latest time of each key's records, if timers depend on it
        self._reached: dict[Any, int] = {}
        for operator in self._timed_steps:
            # A key's own records tell its time: those of other keys may be in another task.
            operator.floors = self._reached

    def process(self, records: Released) -> None:
        """Work on records, which are in order and come after all earlier ones."""
        self._paths = records.paths
        for rows in self._rounds(records):
            self._push(records, rows)
        self.flush()

    def _push(self, records: Released, rows: NDArray[np.intp] | None) -> None:
        port: int
        if rows is None:
            everything = np.arange(len(records))
            assert isinstance(records.ports, int)
            port = records.ports
            selected, rows = records, everything
        else:
            if self._timed_steps:
                self._fire(records, rows)
            selected = records.take(rows)
            port = selected.ports if isinstance(selected.ports, int) else int(selected.ports[0])
        # Only the merging of equal keys needs hashes here: these records are on their partition already.
        hashes = np.zeros(len(selected), dtype=np.uint64)
        if self.operators.unites:
            hashes = hash_keys(selected.keys)
        batch = RowBatch(
            selected.values, selected.times, selected.keys, hashes, port, (rows,), selected.late
        )
        self.operators.heads[port].push(batch)
        self.flush()

    def _rounds(self, records: Released) -> Iterator[NDArray[np.intp] | None]:
        """Yield rounds of rows so that the records of each key stay in order; a round has one port (None: all records).

        If timers may fire between two records of a key, a round has at most one record of each key. If records of
        several ports come together, it has those of a key until the key changes its port.
        """
        ports = records.ports
        single = bool(self._timed_steps)
        if not single and isinstance(ports, int):
            yield None
            return
        # By key: its last round, and the port of that round
        places: dict[Any, tuple[int, int]] = {}
        rounds: dict[tuple[int, int], list[int]] = {}
        each = [ports] * len(records) if isinstance(ports, int) else ports.tolist()
        for row, (key, port) in enumerate(zip(records.keys, each, strict=True)):
            at, before = places.get(key, (-1, -1))
            if single or port != before:
                at += 1
                places[key] = at, port
            rounds.setdefault((at, port), []).append(row)
        for place in sorted(rounds):
            yield np.array(rounds[place], dtype=np.intp)

    def _fire(self, records: Released, rows: NDArray[np.intp]) -> None:
        """Fire the timers that are due before these records."""
        times, keys, reached = records.times, records.keys, self._reached
        for row in rows.tolist():
            at = times if isinstance(times, int) else int(times[row])
            key = keys[row]
            at = max(at - self._lateness, reached.get(key, MIN))
            reached[key] = at
            for operator in self._timed_steps:
                if operator.timers.earliest(key) <= at:
                    self._timer_row = row
                    operator.advance_keys([key], at)
                    self.flush()
        self._timer_row = None


def timing_of(plan: Plan, feeds: Mapping[str, Feed]) -> dict[str, int | None]:
    """Return, for each port of a stage, the lateness allowed if time goes by as its records come, else None."""
    lateness_of: dict[str, int | None] = {}
    for stage in plan.stages:
        sources = _sources_of(plan, stage)
        clocks = [step.options["clock"] for step in sources]
        timed = all(feeds[step.name].ordered for step in sources)
        timed = timed and all(clock.time is not None for clock in clocks)
        lateness = max((clock.lateness for clock in clocks), default=0)
        lateness_of |= {port.name: lateness if timed else None for port in stage.ports}
    return lateness_of


def _sources_of(plan: Plan, stage: Stage) -> list[Any]:
    """Return the sources whose records lead to a stage."""
    sources: dict[str, Any] = {}
    pending, seen = [stage.index], set()
    while pending:
        index = pending.pop()
        if index in seen:
            continue
        seen.add(index)
        current = plan.stages[index]
        if current.is_source:
            sources[current.ports[0].name] = current.ports[0]
        pending += current.before
    return list(sources.values())


class SourceStage(BatchStage):
    """A stage that begins a flow; its input is a part of a source's."""

    def __init__(self, context: StageContext, stage: Stage) -> None:
        super().__init__(context, stage)
        reading = self.operators.reading
        assert reading is not None
        self.reading = reading
        self.feed = context.feeds[reading.step]
        # Two sources may both have a partition of this number.
        self._row = (stage.index << _SOURCE_BITS) + (context.partition << _ROW_BITS)
        self._latest = MIN
        self._direct = self._direct_outlets()

    @property
    def reached(self) -> Reached:
        """Return how far time has come in this source."""
        return {} if self._latest == MIN else {self.reading.step: self._latest}

    def _direct_outlets(self) -> list[KeyBy] | None:
        """Return the outlets if records are only keyed by a column, so that whole tables pass; else None."""
        outlets = list(self.operators.outlets)
        if self.feed.item is not None or len(self.reading.outs) != len(outlets):
            return None
        if any(out not in outlets for out in self.reading.outs):
            return None
        columns = all(
            column_of(outlet.key) is not None
            and (outlet.value is None or column_of(outlet.value) is not None)
            for outlet in outlets
        )
        timed = self.reading.clock.time is None or column_of(self.reading.clock.time) is not None
        return outlets if columns and timed else None

    def process(self, table: pa.RecordBatch) -> None:
        """Work on rows of the input."""
        rows = table.num_rows
        if not rows:
            return
        bounds = None
        if BOUND in table.schema.names:
            bounds = table.column(BOUND).to_numpy(zero_copy_only=False)
            table = table.drop_columns([BOUND])
        places = self._places(rows)
        first = np.zeros(rows, dtype=np.int64)
        if self.feed.order is not None:
            values = as_order(table.column(self.feed.order))
            if values is not None:
                first = np.minimum(values, o.MAX_ORDER_VALUE)
        self._paths = (first, places)
        if self._direct is None or not self._process_table(table, self._direct, bounds):
            items = as_items(table.schema.names, table.columns, table.num_rows)
            if self.feed.item is not None:
                items = self._items_of_rows(items, self.feed.item)
            self._process_items(items, bounds=bounds)
        self.flush()

    def read(self, part: Any) -> Iterator[None]:
        """Read a part of the source itself to its end; yield after each batch, when it has been worked on."""
        reading, now = self.reading, self.context.now
        position, reached = None, MIN
        with reading.calling("open", part):
            reader = reading.source.open(part, None)
        try:
            while True:
                with reading.calling("read", part, position):
                    items = reader.read(BATCH, now)
                    batch = None if items is None else list(items)
                    position = reader.position
                if batch is None:
                    break
                if batch:
                    reached = self.take(batch, reached)
                    yield
                else:
                    time.sleep(READ_PAUSE_S)  # more is on its way
        finally:
            with reading.calling("close", part, position):
                reader.close()
        reading.states[part] = Part(None, position, reached=reached)

    def take(self, items: list[Any], reached: int | None = None) -> int:
        """Work on items; if they are the next of a part that has `reached` this bound, return its new bound."""
        self._paths = (np.zeros(len(items), dtype=np.int64), self._places(len(items)))
        reached = self._process_items(items, reached)
        self.flush()
        return reached

    def _places(self, rows: int) -> o.Numbers:
        places = np.arange(self._row, self._row + rows)
        self._row += rows
        return places

    def _process_items(
        self, items: list[Any], reached: int | None = None, bounds: Times | None = None
    ) -> int:
        batch = RowBatch(items, self.context.now, origin=(np.arange(len(items)),))
        batch = self.reading.timed(batch)
        self.reading.records += len(batch)
        if len(batch):
            self._note_latest_time(batch.times)
            if reached is not None and self.reading.clock.time is not None:
                reached = self.reading.judge(batch, reached)
            if bounds is not None and batch.origin is not None:
                batch.late = late_by(batch.times, bounds[batch.origin[0]])
            self.reading.emit(batch)
        return MIN if reached is None else reached

    def _items_of_rows(self, rows: list[Any], item: Callable[[Any], Any]) -> list[Any]:
        items: list[Any] = []
        with ValueCalls(self.reading.step, item, "row", rows, items.__len__):
            try:
                for row in rows:
                    items.append(item(row))
            except BaseException as error:
                pass_interrupt(error)
                raise BatchError(
                    f"source {self.reading.step!r}: the function that makes items of rows raised "
                    f"{type(error).__name__}: {error} for {rows[len(items)]!r:.300}"
                ) from error
        return items

    def _note_latest_time(self, times: Times | int) -> None:
        latest = times if isinstance(times, int) else int(times.max())
        self._latest = max(self._latest, latest - self.reading.clock.lateness)

    def _process_table(
        self, table: pa.RecordBatch, outlets: Sequence[KeyBy], bounds: Times | None
    ) -> bool:
        """Key whole columns; return False if items have to be keyed one by one."""
        if table.schema.names == [VALUE]:
            return False  # items are plain values, not dictionaries of columns
        times: Times | int = self.context.now
        timing = column_of(self.reading.clock.time)
        if timing is not None:
            column = table.column(timing)
            if not pa.types.is_int64(column.type) or column.null_count:
                return False
            numbers = column.to_numpy(zero_copy_only=False)
            if len(numbers) and not (numbers.min() > MIN and numbers.max() < LAST):
                return False
            times = numbers
        keyed = []
        for outlet in outlets:
            key, value = column_of(outlet.key), column_of(outlet.value)
            assert key is not None
            try:
                hashes = hashes_of(table.column(key))
            except (KeyTypeError, ValueError):
                return False
            names = table.schema.names if value is None else [VALUE]
            columns = table.columns if value is None else [table.column(value)]
            whole = pa.RecordBatch.from_arrays([table.column(key), *columns], [KEY, *names])
            keyed.append((outlet, whole, hashes))
        self._note_latest_time(times)
        self.reading.records += table.num_rows
        late = None if bounds is None else late_by(times, bounds)
        for outlet, whole, hashes in keyed:
            self._send(outlet, whole, times, hashes, late)
        return True

    def _send(
        self,
        outlet: KeyBy,
        table: pa.RecordBatch,
        times: Times | int,
        hashes: Any,
        late: Times | None,
    ) -> None:
        target = self.context.plan.stage_of[outlet.step]
        sorter = self.context.sorters.get(target)
        if sorter is None:
            return
        paths = self._paths
        if len(self.reading.outs) > 1:  # one row may reach the same target by several ways
            paths = o.onwards(paths, self.stage.index, self._emitted)
            self._emitted += table.num_rows
        sorter.add_table(table, paths, times, hashes, outlet.port, late)
