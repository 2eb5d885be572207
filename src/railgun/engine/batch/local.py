"""Run a batch in this process, with the same tasks as on Spark: for samples, and for tests without Spark."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from railgun.engine.batch.pieces import one_batch
from railgun.engine.batch.sorting import Row
from railgun.engine.batch.task import REPORT, Batch, Task, as_table, plan_of, rows_of


def run_local(
    batch: Batch, inputs: Mapping[str, Sequence[Sequence[Any]]]
) -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
    """Run a batch over `inputs`: the partitions of each source, each partition as tables or as lists of items.

    Return what each sink gets (its tables, or lists of items without a schema), and the reports of the tasks.
    """
    plan = plan_of(batch.plan)
    levels = plan.levels
    rows: list[Row] = []
    for name, stage in plan.sources.items():
        for partition, tables in enumerate(inputs[name]):
            rows += rows_of(Task(batch, [stage.index], partition).run(tables))
    for level in range(1, max(levels) + 1):
        mine = [index for index, at in enumerate(levels) if at == level]
        after: list[Row] = []
        for part in range(batch.parts):
            partition_rows = [row for row in rows if row.part == part]
            partition_rows.sort(key=lambda row: (row.target, row.first))
            after += rows_of(Task(batch, mine, part).run([as_table(partition_rows)]))
        rows = after
    outputs: dict[str, list[Any]] = {sink: [] for sink in batch.sinks}
    for sink, schema in batch.sinks.items():
        blobs = [row.blob for row in rows if row.target == batch.target(sink)]
        if schema is None:
            outputs[sink] = [item for blob in blobs for item in pickle.loads(blob)]
        else:
            outputs[sink] = list(map(one_batch, blobs))
    return outputs, [json.loads(row.blob) for row in rows if row.target == REPORT]
