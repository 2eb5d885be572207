"""A batch run in this process: for samples, and for tests that need no Spark. The tasks are the real ones."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from railgun.engine.batch.pieces import one_batch
from railgun.engine.batch.sorting import Row
from railgun.engine.batch.task import TOLD, Batch, Task, as_table, plan_of, rows_of


def run_local(
    batch: Batch, inputs: Mapping[str, Sequence[Sequence[Any]]]
) -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
    """What each sink gets (tables of it, or lists of items), and what was told; `inputs`: partitions of each source.

    A partition is tables, or lists of items.
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
            some = [row for row in rows if row.part == part]
            some.sort(key=lambda row: (row.target, row.first))
            after += rows_of(Task(batch, mine, part).run([as_table(some)]))
        rows = after
    found: dict[str, list[Any]] = {sink: [] for sink in batch.sinks}
    for sink, schema in batch.sinks.items():
        blobs = [row.blob for row in rows if row.target == batch.target(sink)]
        if schema is None:
            found[sink] = [item for blob in blobs for item in pickle.loads(blob)]
        else:
            found[sink] = list(map(one_batch, blobs))
    return found, [json.loads(row.blob) for row in rows if row.target == TOLD]
