"""Streams written by Spark, in batches and micro-batches: every row once, whatever is repeated."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType
from tests.spark.stream_writing import (
    PATIENCE,
    SECOND,
    Clock,
    Writing,
    finish,
    forget,
    left_behind,
    needs_spark,
    stored,
    texts,
)

from railgun.client.sync import SyncClient
from railgun.spark.session import SparkSession
from railgun.spark.streams.errors import StreamSourceError
from railgun.spark.streams.source import StreamSource
from railgun.testing.node import Served


def told(error: pytest.ExceptionInfo[PySparkException]) -> str:
    found = re.findall(r"railgun\.spark\.streams\.errors\.\w+: .*", str(error.value))
    assert found, str(error.value)
    return str(found[-1])


# ---------------------------------------------------------------- batch


@needs_spark
def test_rows_become_messages_in_the_order_of_their_partitions(
    writing: Writing, client: SyncClient
) -> None:
    writing.write(writing.rows(0, 100), "plain")
    writing.write(writing.rows(100, 200).selectExpr("CAST(payload AS BINARY) AS value"), "plain")
    writing.write(writing.rows(0, 0), "plain")
    assert stored(client, "plain") == texts(0, 200)


@needs_spark
def test_much_is_staged_and_appears_when_all_of_it_is_there(
    writing: Writing, client: SyncClient
) -> None:
    # The first of four tasks writes next to nothing, and brings it along.
    rows = writing.rows(0, 2, 1).union(writing.rows(2, 3_000, 3, size=400))
    writing.write(rows, "much")
    assert stored(client, "much") == texts(0, 2) + texts(2, 3_000, 400)
    assert client.admin("producers", name="much") == []
    failing = writing.rows(0, 3_000, 3, size=400).selectExpr(
        "if(payload LIKE '002999%', raise_error('no'), payload) AS payload"
    )
    with pytest.raises(PySparkException):
        writing.write(failing, "half")
    assert stored(client, "half") == []
    assert left_behind(client, "half") == {}


@needs_spark
def test_all_columns_as_json_and_back(
    spark: SparkSession, writing: Writing, client: SyncClient
) -> None:
    moment = dt.datetime(2026, 2, 3, 4, 5, 6, 789000, dt.UTC)
    schema = (
        "s STRING, n BIGINT, d DOUBLE, b BOOLEAN, p DECIMAL(8,2), day DATE, at TIMESTAMP, raw BINARY, a ARRAY<INT>, "
        "o STRUCT<x: STRING>"
    )
    day = dt.date(2026, 2, 3)
    rows = [
        ('a "b"\\', 1, 0.5, True, Decimal("12.50"), day, moment, b"\0\xff", [1, 2], ("ü",)),
        ("line\nend", -5, 1e20, False, Decimal("-3.00"), day, moment, b"", [], ("",)),
        (None,) * 10,
    ]
    given = spark.createDataFrame(rows, schema)
    writing.write(given, "objects", format="json")
    first = json.loads(stored(client, "objects")[0])
    assert first["s"] == 'a "b"\\'
    assert first["at"] == "2026-02-03T04:05:06.789000Z"
    assert set(json.loads(stored(client, "objects")[2]).values()) == {None}
    reader = spark.read.format("railgun").option("data", writing.data).option("format", "json")
    assert reader.schema(schema).load("objects").collect() == given.collect()


@needs_spark
def test_all_columns_as_arrow_and_back(
    spark: SparkSession, writing: Writing, client: SyncClient
) -> None:
    given = spark.range(0, 2_500, 1, 2).selectExpr("id", "map('k', id) AS m", "current_date() AS d")
    writing.write(given, "batches", format="arrow", rowsPerMessage=1_000)
    assert [pa.ipc.open_stream(one).read_all().num_rows for one in stored(client, "batches")] == [
        1_000, 250, 1_000, 250,
    ]  # fmt: skip
    reader = spark.read.format("railgun").option("data", writing.data).option("format", "arrow")
    found = reader.load("batches")
    assert found.schema["id"].dataType == given.schema["id"].dataType
    assert sorted(found.select("id", "m.k").collect()) == [(n, n) for n in range(2_500)]


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ({"text": "string"}, {}, "no column 'payload' or 'value' among text"),
        (
            {"payload": "string", "n": "integer"},
            {},
            "of payload, n only 'payload' would be written",
        ),
        ({"payload": "integer"}, {}, "column 'payload': a payload is binary or string, not int"),
        ({}, {"format": "json"}, "there are no columns to write"),
        (
            {"value": "string"},
            {"stream": "scattered"},
            "the stream is ephemeral and stores nothing",
        ),
        ({"value": "string"}, {"delivery": "once"}, "option delivery is 'exactly-once' or 'at-"),
        ({"value": "string"}, {"query": "mine"}, "the options query and batch go together"),
        ({"value": "string"}, {"data": "/nowhere"}, "no node works in /nowhere"),
        ({"value": "string"}, {"stream": "not a name"}, "'not a name' cannot be a name"),
        ({"value": "string"}, {"stream": ""}, "which stream?"),
    ],
)
def test_what_cannot_be_written_is_told_when_spark_plans(
    node: Served, client: SyncClient, columns: dict[str, str], options: dict[str, str], said: str
) -> None:
    client.ensure("scattered", kind="ephemeral")
    schema = StructType()
    for name, kind in columns.items():
        schema.add(name, kind)
    source = StreamSource({"stream": "refused", "data": str(node.data), **options})
    with pytest.raises(StreamSourceError, match=re.escape(said)):
        source.writer(schema, overwrite=False)


@needs_spark
def test_what_cannot_be_written_is_told_through_spark(writing: Writing) -> None:
    for columns, options, said in (
        (
            ["payload"],
            {"mode": "overwrite"},
            "messages are added to a stream, and those in it stay",
        ),
        (["CAST(NULL AS STRING) AS value"], {}, "column 'value': a payload is null"),
        (["DOUBLE('NaN') AS d"], {"format": "json"}, "column 'd': NaN and infinity cannot be JSON"),
        (["1 AS d", "2 AS d"], {"format": "json"}, "column 'd': two columns have this name"),
        (["space(9000000) AS payload"], {}, "(TOO_LARGE)"),
    ):
        with pytest.raises(PySparkException) as error:
            writing.write(
                writing.rows(0, 3).selectExpr(*columns), **{"stream": "refused", **options}
            )
        assert said in told(error)


@needs_spark
def test_what_is_written_by_a_name_and_a_number_is_written_once(
    writing: Writing, client: SyncClient
) -> None:
    for _ in range(2):
        writing.write(writing.rows(0, 10), "each", query="mine", batch=0)
        writing.write(writing.rows(10, 2_000, 2, size=400), "each", query="mine", batch=1)
    assert stored(client, "each") == texts(0, 10) + texts(10, 2_000, 400)
    assert left_behind(client, "each") == {}


@needs_spark
def test_at_least_once_tasks_publish_as_they_go(writing: Writing, client: SyncClient) -> None:
    writing.write(writing.rows(0, 2_000, 2, size=400), "soon", delivery="at-least-once")
    assert sorted(stored(client, "soon")) == texts(0, 2_000, 400)


@needs_spark
def test_sql_inserts_into_a_view_and_does_not_overwrite(
    spark: SparkSession, writing: Writing, client: SyncClient
) -> None:
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW inbox (payload STRING) USING railgun "
        f"OPTIONS (stream 'inbox', data '{writing.data}')"
    )
    spark.sql("INSERT INTO inbox VALUES ('one'), ('two')")
    spark.sql("INSERT INTO inbox SELECT payload FROM inbox")
    assert sorted(stored(client, "inbox")) == [b"one", b"one", b"two", b"two"]
    with pytest.raises(PySparkException) as error:
        spark.sql("INSERT OVERWRITE inbox VALUES ('three')")
    assert "messages are added to a stream" in told(error)
    spark.sql("DROP VIEW inbox")
    asked = f"stream = 'inbox', data = '{writing.data}'"
    spark.sql("CREATE TABLE inbox_table (payload STRING) USING railgun")
    try:
        spark.sql(f"INSERT INTO inbox_table WITH ({asked}) VALUES ('last')")
    finally:
        spark.sql("DROP TABLE inbox_table")
        warehouse = spark.conf.get("spark.sql.warehouse.dir") or ""
        with contextlib.suppress(OSError):  # as long as it is empty
            Path(warehouse.removeprefix("file:")).rmdir()
    assert stored(client, "inbox")[4:] == [b"last"]


# ---------------------------------------------------------------- micro-batches


@needs_spark
def test_a_query_from_stream_to_stream_writes_every_message_once(
    writing: Writing, client: SyncClient, node: Served, clock: Clock, tmp_path: Path
) -> None:
    client.ensure("in")
    client.publish_many("in", texts(0, 120))
    finish(writing.copy("in", "out", tmp_path))
    assert stored(client, "out") == texts(0, 120)
    # The last micro-batch is repeated at once, and when no ID of it is remembered any more.
    for ahead in (0, 3_600):
        clock.ahead += ahead * SECOND
        forget(tmp_path)
        finish(writing.copy("in", "out", tmp_path))
        assert stored(client, "out") == texts(0, 120)
    client.publish_many("in", texts(120, 200))
    finish(writing.copy("in", "out", tmp_path))
    assert stored(client, "out") == texts(0, 200)
    assert left_behind(client, "out") == {}
    # A new checkpoint is a new query.
    finish(writing.copy("in", "out", tmp_path / "new"))
    assert stored(client, "out") == texts(0, 200) * 2


@needs_spark
def test_a_micro_batch_that_fails_in_one_partition_appears_once_when_it_is_repeated(
    writing: Writing, client: SyncClient, tmp_path: Path
) -> None:
    client.ensure("troubled")
    client.publish_many("troubled", texts(0, 100, 20_000))  # two tasks with half a megabyte each
    broken = "if(offset = 90, raise_error('no'), payload) AS payload"
    query = writing.copy("troubled", "calm", tmp_path, broken, most=50)
    with pytest.raises(PySparkException):
        query.awaitTermination(PATIENCE)
    assert stored(client, "calm") == texts(0, 50, 20_000)
    finish(writing.copy("troubled", "calm", tmp_path, most=50))
    assert stored(client, "calm") == texts(0, 100, 20_000)
    forget(tmp_path)
    finish(writing.copy("troubled", "calm", tmp_path, most=50))
    assert stored(client, "calm") == texts(0, 100, 20_000)
    assert left_behind(client, "calm") == {}


@needs_spark
def test_a_query_that_is_stopped_goes_on_where_it_was(
    spark: SparkSession, writing: Writing, client: SyncClient, tmp_path: Path
) -> None:
    client.ensure("source")
    client.publish_many("source", texts(0, 60))
    reader = spark.readStream.format("railgun").option("data", writing.data)
    rows = reader.options(stream="source", maxMessages=20).load().select("payload")

    def start() -> StreamingQuery:
        writer = rows.writeStream.format("railgun").option("data", writing.data)
        writer = writer.options(stream="sink", checkpointLocation=str(tmp_path))
        return writer.trigger(processingTime="0 seconds").start()

    query = start()
    query.processAllAvailable()
    client.publish_many("source", texts(60, 120))
    query.stop()  # wherever it is just now
    client.publish_many("source", texts(120, 150))
    query = start()
    query.processAllAvailable()
    query.stop()
    assert stored(client, "sink") == texts(0, 150)


@needs_spark
def test_the_state_of_a_query_keeps_up_with_micro_batches_that_were_committed_before(
    spark: SparkSession, writing: Writing, client: SyncClient, tmp_path: Path
) -> None:
    client.ensure("words")
    reader = spark.readStream.format("railgun").option("data", writing.data)
    distinct = reader.options(stream="words", partitions=2).load().dropDuplicates(["payload"])

    def count(*words: bytes) -> None:
        client.publish_many("words", words)
        writer = distinct.select("payload").writeStream.format("railgun")
        writer = writer.option("data", writing.data).option("checkpointLocation", str(tmp_path))
        finish(writer.option("stream", "distinct").trigger(availableNow=True).start())

    words = texts(0, 20_000, 40)
    count(*words)
    forget(tmp_path)
    count(*words[:10], b"b")
    count(*words[:20], b"b")
    assert sorted(stored(client, "distinct")) == [*words, b"b"]


@needs_spark
def test_complete_mode_is_refused(
    spark: SparkSession, writing: Writing, client: SyncClient, tmp_path: Path
) -> None:
    client.ensure("counted")
    client.publish("counted", "x")
    reader = spark.readStream.format("railgun").option("data", writing.data)
    counts = reader.load("counted").groupBy("payload").count().select("payload")
    writer = (
        counts.writeStream.format("railgun").option("data", writing.data).outputMode("complete")
    )
    query = writer.options(stream="counts", checkpointLocation=str(tmp_path)).start()
    with pytest.raises(PySparkException, match="messages are added to a stream"):
        query.awaitTermination(PATIENCE)
