"""Batch runs on Spark: DataFrames in, DataFrames out, by the operators of the live flow.

>>> import railgun
>>> result = railgun.run_batch(flow, spark, inputs={"orders": orders})  # doctest: +SKIP
>>> result["totals"].write.parquet("totals")  # doctest: +SKIP

A flow becomes a Spark plan: `mapInArrow` for the sources' stages, then for each level of stages one `repartitionById`,
a sort of the few rows there are then (each is a piece of many records), and `mapInArrow` again. What happens inside is
told in `railgun.engine.batch`. Rules:

1. Nothing is computed until a DataFrame is used, as with any other; and then only what leads to its sink. What is used
   twice is computed twice, unless it is persisted.
2. The session is the caller's. It is not stopped, and no setting of it is changed.
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
from railgun.engine.batch.outputs import LETTERS, infer
from railgun.engine.batch.pieces import one_batch
from railgun.engine.batch.stages import PAUSE, timing_of
from railgun.engine.batch.task import TOLD, Batch, Task
from railgun.flows.flow import Flow
from railgun.flows.plan import DEAD, Plan
from railgun.flows.shipping import ship
from railgun.sinks.collect import Collect
from railgun.sinks.parquet import Parquet
from railgun.spark.handover import HANG_AFTER_S, HandOver, told_by_tasks
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
from railgun.spark.lateness import is_judged, with_bounds

SAMPLE: Final = 1_000  # rows of each input that tell what columns a sink has, if nobody says
WIRE: Final = "part int, target int, first binary, blob binary"

Schema: TypeAlias = str | StructType | Any
"""As Spark writes it, as text or types; or a `pyarrow.Schema`."""


class BatchResult(dict[str, DataFrame]):
    """What each sink gets, by the name of its step.

    If the run has ended in a snapshot, `snapshot` is its number, and what the sinks got is kept on the disks of the
    executors until `unpersist`, so that it is of the very run that the snapshot is of.
    """

    snapshot: int | None = None
    kept: DataFrame | None = None

    def unpersist(self) -> None:
        """Let go of what is kept; a DataFrame that is used after this is computed anew."""
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
    """Run a flow over DataFrames, one for each source; what each sink would get, by the name of its step.

    `inputs`: a DataFrame for each source, an `Input` with more to say about it, or "source" for what the source itself
    has now. `schemas`: the columns of sinks, as Spark or Arrow write them; of a sink that is not named here they are
    those of its `Parquet(schema=...)`, or else what the first rows of the inputs lead to. If the flow has a place for
    dead letters, they are in `dead_letters`. `partitions`: into how many parts the keys are divided.

    `snapshot_to`: the run happens at once, and ends in a snapshot in this directory (or URL), from which
    `railgun.run(flow, snapshots=...)` goes on live (under the same `name`, if it has one). Then the inputs are no
    end: keys do not end, and timers that are not due stay set. Sinks named in `into_sinks` are written to themselves,
    with the snapshot, exactly once if they know how to. A call of such a sink in this program that has not returned
    for `hang_after` seconds is taken for a hang, and ends the run with an error.
    """
    prepared = Prepared.of(flow, spark, inputs, partitions, by_value)
    into = prepared.checked_into(into_sinks)
    if snapshot_to is not None:
        return prepared.save(schemas or {}, snapshot_to, into, job=name, hang_after_s=hang_after)
    if into:
        raise BatchError(
            f"sink {into[0]!r} is written to with a snapshot, or else what a task that fails had written would be "
            "there twice: say snapshot_to=..., or use the DataFrame"
        )
    return BatchResult(prepared.outputs(schemas or {}))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A flow and its inputs, looked at and found fit."""

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
        """Refuse what cannot be."""
        if not isinstance(flow, Flow):
            raise BatchError(f"run_batch needs a Flow, not {flow!r}")
        plan = flow.plan()
        given = {name: input_of(name, one) for name, one in inputs.items()}
        sources = list(plan.sources)
        for name in given:
            if name not in sources:
                raise BatchError(
                    f"there is an input for {name!r}, and flow {flow.name!r} has no such source: it has "
                    f"{listed(sources)}"
                )
        for name in sources:
            if name not in given:
                raise BatchError(
                    f"source {name!r} has no input: give it a DataFrame, inputs={{{name!r}: df}}"
                )
            check(flow, flow.steps[name], given[name])
        if partitions is None:
            frames = [given[name].frame for name in sources if not given[name].own]
            partitions = partitions_for(spark, frames)
        elif isinstance(partitions, bool) or not isinstance(partitions, int) or partitions < 1:
            raise BatchError(f"keys are divided into at least one partition, not {partitions!r}")
        own = {
            name: bounded(name, flow.steps[name].options["source"])
            for name in sources
            if given[name].own
        }
        now = time.time_ns() // 1000
        by_value = tuple(by_value)
        return Prepared(flow, plan.with_sources(own), spark, given, partitions, by_value, now)

    def checked_into(self, sinks: Iterable[str]) -> list[str]:
        """The sinks that are to be written to."""
        into = [sinks] if isinstance(sinks, str) else list(sinks)
        for sink in into:
            if sink not in self.sinks:
                raise BatchError(
                    f"flow {self.flow.name!r} has no sink {sink!r}: it has {listed(self.sinks)}"
                )
            if into.count(sink) > 1:
                raise BatchError(f"sink {sink!r} is given twice")
            made = self.plan.dead_letters if sink == DEAD else self.flow.steps[sink].options["sink"]
            if isinstance(made, Collect):
                raise BatchError(
                    f"sink {sink!r} is Collect, which hands items to the program that runs a live flow: leave it "
                    "out of into_sinks, and use its DataFrame"
                )
        return into

    # ------------------------------------------------------------ outputs

    @property
    def sinks(self) -> list[str]:
        """The sinks of the flow, that for dead letters among them."""
        found = [step.name for step in self.flow.steps.values() if step.kind == "sink"]
        return found + ([] if self.plan.dead_letters is None else [DEAD])

    def outputs(self, schemas: Mapping[str, Schema]) -> dict[str, DataFrame]:
        """A DataFrame for each sink."""
        known = self.schemas(schemas)
        return {sink: self.output(sink, known[sink]) for sink in self.sinks}

    def schemas(
        self, given: Mapping[str, Schema], without: Collection[str] = ()
    ) -> dict[str, pa.Schema]:
        """The columns of each sink, but for some."""
        for name in given:
            if name not in self.sinks:
                raise BatchError(
                    f"there is a schema for {name!r}, and flow {self.flow.name!r} has no such sink: it has "
                    f"{listed(self.sinks)}"
                )
        known: dict[str, pa.Schema] = {}
        zone = self.spark.conf.get("spark.sql.session.timeZone") or "UTC"
        for sink in self.sinks:
            own = None if sink == DEAD else self.flow.steps[sink].options["sink"]
            if sink in given:
                known[sink] = _arrow(sink, given[sink], zone)
            elif sink == DEAD:
                known[sink] = LETTERS
            elif isinstance(own, Parquet) and own.schema is not None:
                known[sink] = own.schema
            if sink in known:
                known[sink] = _for_spark(sink, known[sink])
        unknown = [sink for sink in self.sinks if sink not in known and sink not in without]
        if unknown:
            known |= self._inferred(unknown)
        return known

    def _inferred(self, sinks: Sequence[str]) -> dict[str, pa.Schema]:
        """What the first rows lead to."""
        plan = self.plan.leading_to(sinks)
        batch = self.batch(plan, dict.fromkeys(sinks))
        rows = {name: [self._sample(name)] for name in plan.sources}
        found, _ = run_local(replace(batch, parts=1, own={}), rows)
        for sink in sinks:
            if not found[sink]:
                raise BatchError(
                    f"sink {sink!r} gets nothing of the first {SAMPLE:,} rows, so its columns are not known: "
                    f"name them, schemas={{{sink!r}: 'name string, total long'}}"
                )
        return {sink: infer(sink, found[sink][:SAMPLE]) for sink in sinks}

    def _sample(self, name: str) -> list[Any]:
        if not self.inputs[name].own:
            return list(self.inputs[name].frame.limit(SAMPLE).toArrow().to_batches())
        source = self.plan.sources[name].ports[0].options["source"]
        items: list[Any] = []
        for part in source.partitions():
            reader = source.open(part, None)
            try:
                while len(items) < SAMPLE:
                    read = reader.read(SAMPLE - len(items), self.now)
                    if read is None:
                        break
                    items += read
                    if not read:
                        time.sleep(PAUSE)
            finally:
                reader.close()
        return [items] if items else []

    def batch(self, plan: Plan, sinks: Mapping[str, pa.Schema | None]) -> Batch:
        """What tasks are told."""
        feeds = {name: feed_of(one) for name, one in self.inputs.items()}
        own = {
            name: list(stage.ports[0].options["source"].partitions())
            for name, stage in plan.sources.items()
            if self.inputs[name].own
        }
        shipped = ship(self.flow, plan, self.by_value)
        timing = timing_of(self.plan, feeds)
        return Batch(shipped, self.partitions, self.now, feeds, dict(sinks), timing, own=own)

    def output(self, sink: str, schema: pa.Schema) -> DataFrame:
        """What one sink gets."""
        plan = self.plan.leading_to([sink])
        batch = self.batch(plan, {sink: schema})
        return self.frame(plan, batch, sink, from_arrow_schema(schema))

    def frame(
        self, plan: Plan, batch: Batch, only: str | None, schema: StructType | str
    ) -> DataFrame:
        """The plan on Spark: what its last level yields."""
        levels = plan.levels
        last = max(levels)
        begun = []
        for name, stage in plan.sources.items():
            final = last == 0
            run = partial(_feed_task, batch, stage.index, only if final else None)
            begun.append(self._begun(name, batch).mapInArrow(run, schema if final else WIRE))
        df = reduce(DataFrame.unionAll, begun)
        for level in range(1, last + 1):
            mine = [index for index, at in enumerate(levels) if at == level]
            final = level == last
            run = partial(_work_task, batch, mine, only if final else None)
            shuffled = df.repartitionById(batch.parts, "part")
            ordered = shuffled.sortWithinPartitions("target", "first")
            df = ordered.mapInArrow(run, schema if final else WIRE)
        return df

    def _begun(self, source: str, batch: Batch) -> DataFrame:
        """What the tasks of a source get: rows, or the numbers of its parts, a task each."""
        if source not in batch.own:
            clock = self.flow.steps[source].options["clock"]
            if self.plan.timed and is_judged(batch.feeds[source], clock):
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
        """Run, at once, and save what the flow goes on from; `before` is called when all but the snapshot is there."""
        known = {
            sink: schema for sink, schema in self.schemas(schemas, into).items() if sink not in into
        }
        job = job or self.flow.name
        begun = HandOver.begin(self.flow, self.plan, self.inputs, url, job, into, hang_after_s)
        with begun as handing:
            batch = self.batch(self.plan, known)
            batch = replace(batch, ends=False, save=handing.save, own_sinks=bool(into))
            df = self.frame(self.plan, batch, None, WIRE)
            result = BatchResult()
            if known:
                df = df.persist(StorageLevel.DISK_ONLY)
                result.kept = df
            for sink, schema in known.items():
                mine = df.where(f"target = {batch.target(sink)}").select("blob")
                result[sink] = mine.mapInArrow(_tables, from_arrow_schema(schema))
            try:
                with told_by_tasks():
                    told = df.where(f"target = {TOLD}").select("blob").collect()
                before(result)
                handing.commit([json.loads(row["blob"]) for row in told])
            except BaseException:
                result.unpersist()
                raise
        result.snapshot = handing.save.snapshot
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
    """The schema with times as Spark has them; refuses types that it has not."""
    fields = []
    for field in schema:
        if pa.types.is_timestamp(field.type):
            field = field.with_type(pa.timestamp("us", field.type.tz))
        try:
            from_arrow_type(field.type)
        except Exception as error:
            raise BatchError(
                f"sink {sink!r}: Spark has no type for column {field.name!r}, which is {field.type}: say another, "
                f"schemas={{{sink!r}: 'name string, total long'}}"
            ) from error
        fields.append(field)
    return pa.schema(fields)


def _arrow(sink: str, schema: Schema, zone: str) -> pa.Schema:
    """A schema as Arrow has it."""
    try:
        if isinstance(schema, pa.Schema):
            return schema
        if isinstance(schema, str):
            made = StructType.fromDDL(schema)
            if not isinstance(made, StructType):
                made = StructType().add(VALUE, made)
            return to_arrow_schema(made, timezone=zone)
        return to_arrow_schema(schema, timezone=zone)
    except Exception as error:
        raise BatchError(
            f"the schema of sink {sink!r}, {schema!r}, is none: {error}. One is 'name string, total long', a "
            "StructType or a pyarrow.Schema"
        ) from error
