"""What a flow has written, Spark reads: what is committed, all of it, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from railgun import Files, Parquet, Place, TwoPhaseWriter
from railgun.sinks.staging import StagedSink
from railgun.spark.session import SparkSession

pytestmark = pytest.mark.spark


def written(sink: StagedSink) -> list[TwoPhaseWriter[Any]]:
    """Two workers and three snapshots, of which two are committed; a fourth is under way."""
    writers = []
    for worker in range(2):
        writer = sink.open(Place("a flow", "totals: all", worker, 3, transactional=True))
        assert isinstance(writer, TwoPhaseWriter)
        for snapshot in range(1, 5):
            items: list[Any] = [
                {"user": f"ü{n}", "n": n, "tags": ["a"], "snapshot": snapshot, "worker": worker}
                for n in range(100)
            ]
            writer.write(items)
            writer.flush()
            if snapshot < 4:
                token = writer.prepare(snapshot)
            if snapshot < 3:
                sink.commit(token)
        writers.append(writer)
    return writers


def test_spark_reads_what_is_committed(spark: SparkSession, tmp_path: Path) -> None:
    writers = [*written(Parquet(tmp_path / "table")), *written(Files(tmp_path / "lines"))]
    table = spark.read.parquet(str(tmp_path / "table"))
    lines = spark.read.json(str(tmp_path / "lines"))
    for found in (table, lines):
        assert found.count() == 400
        assert found.select("snapshot", "worker", "n").distinct().count() == 400
        assert found.agg({"snapshot": "max"}).collect()[0][0] == 2
    assert dict(table.dtypes) == {
        "user": "string",
        "n": "bigint",
        "tags": "array<string>",
        "snapshot": "bigint",
        "worker": "bigint",
    }
    assert table.where("user = 'ü7'").count() == 4
    for writer in writers:
        writer.close()
