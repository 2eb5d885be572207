"""Run a flow over DataFrames on Spark, with the operators of the live flow; its outputs are DataFrames.

>>> import railgun
>>> result = railgun.run_batch(flow, spark, inputs={"orders": orders})  # doctest: +SKIP
>>> result["totals"].write.parquet("totals")  # doctest: +SKIP

A flow becomes a Spark plan: `mapInArrow` for the sources' stages, then for each level of stages one `repartitionById`,
a sort of its few rows (each is a piece of many records), and `mapInArrow` again. `railgun.engine.batch` has the work of
the tasks. Rules:

1. Nothing is computed until a DataFrame is used, as usual in Spark; then only the steps that lead to its sink run. A
   DataFrame that is used twice is computed twice, unless it is persisted.
2. The session is the caller's. It is not stopped, and no setting of it is changed.
3. Errors in inputs and outputs are raised before anything runs, and name the step and the column.
3. What can be wrong with inputs and outputs is told before anything runs, with the step and the column.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from types import ModuleType
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type, to_arrow_schema
from pyspark.sql.types import StructType

from railgun.engine.batch.columns import VALUE
from railgun.engine.batch.errors import BatchError
from railgun.engine.batch.local import run_local
from railgun.engine.batch.outputs import DEAD_LETTER_SCHEMA, infer
from railgun.engine.batch.pieces import one_batch
from railgun.engine.batch.stages import READ_PAUSE_S, timing_of
from railgun.engine.batch.task import REPORT, Batch, Task
from railgun.flows.flow import Flow
from railgun.flows.plan import DEAD, Plan
from railgun.flows.shipping import ship
from railgun.sinks.collect import Collect
from railgun.sinks.parquet import Parquet
from railgun.spark.handover import HANG_AFTER_S, HandOver, task_errors
from railgun.spark.inputs import (
    Input,
    bounded,
    check,
    feed_of,
    in_order,
    input_of,
    listed,
    partition,
    partitions_for,
)
from railgun.spark.lateness import can_have_late_rows, with_bounds

SAMPLE_ROWS: Final = 1_000  # of each input, from which the columns of a sink are inferred
WIRE: Final = "part int, target int, first binary, blob binary"

Schema: TypeAlias = str | StructType | Any
"""A schema in Spark's words (DDL text or types), or a `pyarrow.Schema`."""


class BatchResult(dict[str, DataFrame]):
    """The DataFrame that each sink gets, by the name of its step.

    If the run ended in a snapshot, `snapshot` is its number. The outputs are then kept on the disks of the executors
    until `unpersist`, so that they are those of the very run that made the snapshot.
    """

    snapshot: int | None = None
    kept: DataFrame | None = None

    def unpersist(self) -> None:
        """Free what is kept; a DataFrame that is used after this is computed anew."""
        if self.kept is not None:
            self.kept.unpersist()
            self.kept = None


def run_batch(
    flow: Flow,
    spark: SparkSession,
    inputs: Mapping[str, DataFrame | Input | str],
    *,
    schemas: Mapping[str, Schema] | None = None,
    snapshot_to: str | None = None,
    name: str | None = None,
    into_sinks: Iterable[str] = (),
    partitions: int | None = None,
    by_value: Iterable[ModuleType] = (),
    hang_after: float = HANG_AFTER_S,
) -> BatchResult:
    """Run a flow over DataFrames, one for each source; return the DataFrame of each sink, by the name of its step.

    `inputs`: a DataFrame for each source, an `Input` with more settings, or "source" for what the source itself has
    now. `schemas`: the columns of sinks, as Spark or Arrow write them. A sink without a schema has that of its
    `Parquet(schema=...)`; otherwise its columns are inferred from the first rows of the inputs. If the flow has a sink
    for dead letters, its DataFrame is `dead_letters`. `partitions`: the number of parts into which the keys are
    divided.

    `snapshot_to`: run at once, and end in a snapshot in this directory (or URL), from which `railgun.run(flow,
    snapshots=...)` goes on live (under the same `name`, if it has one). Then the end of the inputs is not the end of
    the flow: `on_end` is not called, and timers that are not due stay set. Sinks named in `into_sinks` are written to
    themselves, with the snapshot, exactly once if they support it. If a call of such a sink in this program does not
    return for `hang_after` seconds, the run ends with an error.

    Raise `BatchError` if an input, a schema or a sink does not fit the flow.
    """
    prepared = Prepared.of(flow, spark, inputs, partitions, by_value)
    into = prepared.checked_into(into_sinks)
    if snapshot_to is not None:
        return prepared.save(schemas or {}, snapshot_to, into, job=name, hang_after_s=hang_after)
    if into:
        raise BatchError(
            f"sink {into[0]!r} can be written to only with a snapshot, because the output of a failed task would be "
            "written twice: set snapshot_to=..., or use the DataFrame"
        )
    return BatchResult(prepared.outputs(schemas or {}))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A flow and its inputs, after all checks."""

    flow: Flow
    plan: Plan
    spark: SparkSession
    inputs: dict[str, Input]
    partitions: int
    by_value: tuple[ModuleType, ...]
    now: int

    @staticmethod
    def of(
        flow: Flow,
        spark: SparkSession,
        inputs: Mapping[str, DataFrame | Input | str],
        partitions: int | None,
        by_value: Iterable[ModuleType],
    ) -> Prepared:
        """Check a flow and its inputs; raise `BatchError` if they do not fit."""
        if not isinstance(flow, Flow):
            raise BatchError(f"run_batch needs a Flow, not {flow!r}")
        plan = flow.plan()
        by_source = {name: input_of(name, value) for name, value in inputs.items()}
        sources = list(plan.sources)
        for name in by_source:
            if name not in sources:
                raise BatchError(
                    f"there is an input for {name!r}, and flow {flow.name!r} has no such source: it has "
                    f"{listed(sources)}"
                )
        for name in sources:
            if name not in by_source:
                raise BatchError(
                    f"source {name!r} has no input: give it a DataFrame, inputs={{{name!r}: df}}"
                )
            check(flow, flow.steps[name], by_source[name])
        if partitions is None:
            frames = [by_source[name].frame for name in sources if not by_source[name].own]
            partitions = partitions_for(spark, frames)
        elif isinstance(partitions, bool) or not isinstance(partitions, int) or partitions < 1:
            raise BatchError(f"keys are divided into at least one partition, not {partitions!r}")
        own = {
            name: bounded(name, flow.steps[name].options["source"])
            for name in sources
            if by_source[name].own
        }
        now = time.time_ns() // 1000
        by_value = tuple(by_value)
        return Prepared(flow, plan.with_sources(own), spark, by_source, partitions, by_value, now)

    def checked_into(self, sinks: Iterable[str]) -> list[str]:
        """Return the sinks that are to be written to; raise `BatchError` if one cannot be."""
        into = [sinks] if isinstance(sinks, str) else list(sinks)
        for sink in into:
            if sink not in self.sinks:
                raise BatchError(
                    f"flow {self.flow.name!r} has no sink {sink!r}: it has {listed(self.sinks)}"
                )
            if into.count(sink) > 1:
                raise BatchError(f"sink {sink!r} is given twice")
            target = (
                self.plan.dead_letters if sink == DEAD else self.flow.steps[sink].options["sink"]
            )
            if isinstance(target, Collect):
                raise BatchError(
                    f"sink {sink!r} is Collect, which hands items to the program that runs a live flow: leave it "
                    "out of into_sinks, and use its DataFrame"
                )
        return into

    # ------------------------------------------------------------ outputs

    @property
    def sinks(self) -> list[str]:
        """Return the names of the sinks of the flow, with that of dead letters."""
        names = [step.name for step in self.flow.steps.values() if step.kind == "sink"]
        return names + ([] if self.plan.dead_letters is None else [DEAD])

    def outputs(self, schemas: Mapping[str, Schema]) -> dict[str, DataFrame]:
        """Return a DataFrame for each sink."""
        by_sink = self.schemas(schemas)
        return {sink: self.output(sink, by_sink[sink]) for sink in self.sinks}

    def schemas(
        self, explicit: Mapping[str, Schema], without: Collection[str] = ()
    ) -> dict[str, pa.Schema]:
        """Return the columns of each sink, explicit or else inferred; do not infer those of the sinks in `without`."""
        for name in explicit:
            if name not in self.sinks:
                raise BatchError(
                    f"there is a schema for {name!r}, and flow {self.flow.name!r} has no such sink: it has "
                    f"{listed(self.sinks)}"
                )
        by_sink: dict[str, pa.Schema] = {}
        zone = self.spark.conf.get("spark.sql.session.timeZone") or "UTC"
        for sink in self.sinks:
            own = None if sink == DEAD else self.flow.steps[sink].options["sink"]
            if sink in explicit:
                by_sink[sink] = _arrow(sink, explicit[sink], zone)
            elif sink == DEAD:
                by_sink[sink] = DEAD_LETTER_SCHEMA
            elif isinstance(own, Parquet) and own.schema is not None:
                by_sink[sink] = own.schema
            if sink in by_sink:
                by_sink[sink] = _for_spark(sink, by_sink[sink])
        unknown = [sink for sink in self.sinks if sink not in by_sink and sink not in without]
        if unknown:
            by_sink |= self._inferred(unknown)
        return by_sink

    def _inferred(self, sinks: Sequence[str]) -> dict[str, pa.Schema]:
        """Infer the columns of sinks from what they get of the first rows."""
        plan = self.plan.leading_to(sinks)
        batch = self.batch(plan, dict.fromkeys(sinks))
        rows = {name: [self._sample(name)] for name in plan.sources}
        outputs, _ = run_local(replace(batch, parts=1, own={}), rows)
        for sink in sinks:
            if not outputs[sink]:
                raise BatchError(
                    f"sink {sink!r} gets nothing of the first {SAMPLE_ROWS:,} rows, so its columns are not known: "
                    f"name them, schemas={{{sink!r}: 'name string, total long'}}"
                )
        return {sink: infer(sink, outputs[sink][:SAMPLE_ROWS]) for sink in sinks}

    def _sample(self, name: str) -> list[Any]:
        if not self.inputs[name].own:
            return list(self.inputs[name].frame.limit(SAMPLE_ROWS).toArrow().to_batches())
        source = self.plan.sources[name].ports[0].options["source"]
        items: list[Any] = []
        for part in source.partitions():
            reader = source.open(part, None)
            try:
                while len(items) < SAMPLE_ROWS:
                    read = reader.read(SAMPLE_ROWS - len(items), self.now)
                    if read is None:
                        break
                    items += read
                    if not read:
                        time.sleep(READ_PAUSE_S)
            finally:
                reader.close()
        return [items] if items else []

    def batch(self, plan: Plan, sinks: Mapping[str, pa.Schema | None]) -> Batch:
        """Return the settings for the tasks of a run of `plan`."""
        feeds = {name: feed_of(value) for name, value in self.inputs.items()}
        own = {
            name: list(stage.ports[0].options["source"].partitions())
            for name, stage in plan.sources.items()
            if self.inputs[name].own
        }
        shipped = ship(self.flow, plan, self.by_value)
        timing = timing_of(self.plan, feeds)
        return Batch(shipped, self.partitions, self.now, feeds, dict(sinks), timing, own=own)

    def output(self, sink: str, schema: pa.Schema) -> DataFrame:
        """Return the DataFrame of one sink."""
        plan = self.plan.leading_to([sink])
        batch = self.batch(plan, {sink: schema})
        return self.frame(plan, batch, sink, from_arrow_schema(schema))

    def frame(
        self, plan: Plan, batch: Batch, only: str | None, schema: StructType | str
    ) -> DataFrame:
        """Return the DataFrame that the last level of the plan yields; `only`: the one sink that is wanted."""
        levels = plan.levels
        last = max(levels)
        inputs = []
        for name, stage in plan.sources.items():
            final = last == 0
            run = partial(_feed_task, batch, stage.index, only if final else None)
            inputs.append(self._source_rows(name, batch).mapInArrow(run, schema if final else WIRE))
        df = reduce(DataFrame.unionAll, inputs)
        for level in range(1, last + 1):
            own_stages = [index for index, at in enumerate(levels) if at == level]
            final = level == last
            run = partial(_work_task, batch, own_stages, only if final else None)
            shuffled = df.repartitionById(batch.parts, "part")
            ordered = shuffled.sortWithinPartitions("target", "first")
            df = ordered.mapInArrow(run, schema if final else WIRE)
        return df

    def _source_rows(self, source: str, batch: Batch) -> DataFrame:
        """Return the input of a source's tasks: rows, or the numbers of the source's parts, one per task."""
        if source not in batch.own:
            clock = self.flow.steps[source].options["clock"]
            if self.plan.timed and can_have_late_rows(batch.feeds[source], clock):
                judged = partial(with_bounds, batch=batch, source=source)
                return in_order(self.inputs[source], judged)
            return in_order(self.inputs[source])
        parts = len(batch.own[source])
        return self.spark.range(0, parts, 1, max(1, parts))

    # ------------------------------------------------------------ a run that ends in a snapshot

    def save(
        self,
        schemas: Mapping[str, Schema],
        url: str,
        into: Collection[str],
        *,
        job: str | None = None,
        before: Callable[[BatchResult], None] = lambda result: None,
        hang_after_s: float = HANG_AFTER_S,
    ) -> BatchResult:
        """Run at once, and save the snapshot from which the flow goes on; call `before` just before it is committed."""
        schemas_by_sink = {
            sink: schema for sink, schema in self.schemas(schemas, into).items() if sink not in into
        }
        job = job or self.flow.name
        starting = HandOver.begin(self.flow, self.plan, self.inputs, url, job, into, hang_after_s)
        with starting as handover:
            batch = self.batch(self.plan, schemas_by_sink)
            batch = replace(batch, ends=False, save=handover.save, own_sinks=bool(into))
            df = self.frame(self.plan, batch, None, WIRE)
            result = BatchResult()
            if schemas_by_sink:
                df = df.persist(StorageLevel.DISK_ONLY)
                result.kept = df
            for sink, schema in schemas_by_sink.items():
                own_rows = df.where(f"target = {batch.target(sink)}").select("blob")
                result[sink] = own_rows.mapInArrow(_tables, from_arrow_schema(schema))
            try:
                with task_errors():
                    rows = df.where(f"target = {REPORT}").select("blob").collect()
                before(result)
                handover.commit([json.loads(row["blob"]) for row in rows])
            except BaseException:
                result.unpersist()
                raise
        result.snapshot = handover.save.snapshot
        return result


# ---------------------------------------------------------------- on executors


def _feed_task(
    batch: Batch, stage: int, only: str | None, tables: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    yield from Task(batch, [stage], partition(), only).run(tables)


def _work_task(
    batch: Batch, stages: Sequence[int], only: str | None, tables: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    yield from Task(batch, stages, partition(), only).run(tables)


def _tables(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        for blob in batch.column(0).to_pylist():
            yield one_batch(blob)


# ---------------------------------------------------------------- schemas


def _for_spark(sink: str, schema: pa.Schema) -> pa.Schema:
    """Return the schema with timestamps in microseconds, as Spark has them; refuse types that Spark lacks."""
    fields = []
    for field in schema:
        if pa.types.is_timestamp(field.type):
            field = field.with_type(pa.timestamp("us", field.type.tz))
        try:
            from_arrow_type(field.type)
        except Exception as error:
            raise BatchError(
                f"sink {sink!r}: Spark has no type for column {field.name!r}, which is {field.type}: set another, "
                f"schemas={{{sink!r}: 'name string, total long'}}"
            ) from error
        fields.append(field)
    return pa.schema(fields)


def _arrow(sink: str, schema: Schema, zone: str) -> pa.Schema:
    """Return a schema as a `pyarrow.Schema`."""
    try:
        if isinstance(schema, pa.Schema):
            return schema
        if isinstance(schema, str):
            parsed = StructType.fromDDL(schema)
            if not isinstance(parsed, StructType):
                parsed = StructType().add(VALUE, parsed)
            return to_arrow_schema(parsed, timezone=zone)
        return to_arrow_schema(schema, timezone=zone)
    except Exception as error:
        raise BatchError(
            f"the schema of sink {sink!r}, {schema!r}, is not valid: {error}. Use 'name string, total long', a "
            "StructType or a pyarrow.Schema"
        ) from error
