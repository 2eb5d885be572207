"""Parts of a snapshot are a table for Spark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from railgun.engine.snapshots.store import SnapshotStore
from railgun.engine.snapshots.table import TableWriter
from railgun.hashing import hash_keys
from railgun.spark.session import SparkSession


@pytest.mark.spark
def test_spark_reads_a_directory_of_parts_as_a_table(spark: SparkSession, tmp_path: Path) -> None:
    store = SnapshotStore(str(tmp_path), "demo")
    for worker in range(3):
        keys = [f"key {worker} {n}" for n in range(100)]
        writer = TableWriter("count", 1)
        writer.add(hash_keys(keys), keys, [{"n": n, "worker": worker} for n in range(100)])
        writer.add(hash_keys([worker]), [worker], [(1, 2)], timers=[[5]])
        store.write_part(7, 1, "stage", "count by name", worker, writer.finish(), writer.rows)
    frame = spark.read.option("recursiveFileLookup", "true").parquet(store.where("data"))
    assert dict(frame.dtypes) == {
        "hash": "bigint",
        "key": "string",
        "key_pickle": "binary",
        "state": "string",
        "state_pickle": "binary",
        "timers": "binary",
        "ended": "boolean",
        "deleted": "boolean",
        "version": "int",
    }
    frame.createOrReplaceTempView("counts")
    totals = spark.sql(
        "select get_json_object(state, '$.worker') as worker, sum(get_json_object(state, '$.n')) as n "
        "from counts where state is not null and not deleted group by 1 order by 1"
    ).collect()
    assert [(row.worker, row.n) for row in totals] == [("0", 4950), ("1", 4950), ("2", 4950)]
    assert frame.where("state is null").count() == 3
    row = frame.where("key = 'key 1 7'").collect()[0]
    assert np.int64(row.hash).view(np.uint64) == hash_keys(["key 1 7"])[0]
