"""Streams written by Spark: every row once, whatever fails and is repeated."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from railgun.broker.clock import steady_us, time_of_day
from railgun.broker.errors import NoMasterError
from railgun.broker.protocol.producers import registry as rules
from railgun.broker.streams import persistent
from railgun.broker.streams.producing import Producing
from railgun.client.errors import StreamsError
from railgun.client.retrying_client import RetryingClient
from railgun.client.sync import SyncClient, connect_sync
from railgun.sinks.old_staged_streams import delete_stream
from railgun.spark.session import SparkSession
from railgun.spark.streams import older as upgrade
from railgun.spark.streams.commit import Target
from railgun.spark.streams.errors import InDoubtError, StreamSourceError
from railgun.spark.streams.older import digest, journal_name
from railgun.spark.streams.source import StreamSource
from railgun.spark.streams.staging import TaskReport, pieces
from railgun.spark.streams.writer import StreamWriter
from railgun.testing.node import Served, served

needs_spark = pytest.mark.spark
PATIENCE = 240  # seconds: a busy machine starts few micro-batches in a minute
SECOND = 1_000_000


class Clock:
    """The time of a node, which may be set ahead."""

    ahead = 0

    def __call__(self) -> int:
        return time_of_day() + self.ahead


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("node"), clock) as made:
        yield made


@pytest.fixture(scope="module")
def client(node: Served) -> Iterator[SyncClient]:
    with connect_sync(data=node.data) as made:
        yield made


def stored(client: SyncClient, stream: str) -> list[bytes]:
    """All payloads of a stream."""
    told = client.admin("describe", name=stream)
    found: list[bytes] = []
    at = told["first"]
    if at < told["end"]:
        with client.subscribe(stream, start=at) as reader:
            while at < told["end"]:
                records = reader.records(PATIENCE)
                at = records.end
                found += records.payloads()
    return found


def left_behind(client: SyncClient, stream: str) -> dict[str, int]:
    """Messages that are staged for a stream, by producers and sequences."""
    return {
        f"{one['name']}/{sequence}": count
        for one in client.admin("producers", name=stream)
        for sequence, count in one["staged"].items()
    }


def texts(first: int, end: int, size: int = 0) -> list[bytes]:
    return [f"{n:06}".encode() + b"." * size for n in range(first, end)]


def told(error: pytest.ExceptionInfo[PySparkException]) -> str:
    found = re.findall(r"railgun\.spark\.streams\.errors\.\w+: .*", str(error.value))
    assert found, str(error.value)
    return str(found[-1])


class Writing:
    """Writes to streams of the node with Spark."""

    def __init__(self, spark: SparkSession, node: Served) -> None:
        self.spark = spark
        self.data = str(node.data)

    def rows(self, first: int, end: int, parts: int = 3, size: int = 0) -> DataFrame:
        made = f"concat(format_string('%06d', id), repeat('.', {size})) AS payload"
        return self.spark.range(first, end, 1, parts).selectExpr(made)

    def write(self, given: DataFrame, stream: str, mode: str = "append", **options: Any) -> None:
        writer = given.write.format("railgun").mode(mode).option("data", self.data)
        writer.options(stream=stream, **options).save()

    def copy(
        self, source: str, stream: str, checkpoint: Path, change: str = "payload", most: int = 100
    ) -> StreamingQuery:
        """From one stream to another, as far as there is something."""
        reader = self.spark.readStream.format("railgun").option("data", self.data)
        rows = reader.options(stream=source, partitions=2, maxMessages=most).load()
        writer = rows.selectExpr(change).writeStream.format("railgun").option("data", self.data)
        writer = writer.options(stream=stream, checkpointLocation=str(checkpoint))
        return writer.trigger(availableNow=True).start()


@pytest.fixture
def writing(spark: SparkSession, node: Served) -> Writing:
    return Writing(spark, node)


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


def finish(query: StreamingQuery) -> None:
    assert query.awaitTermination(PATIENCE)


def forget(checkpoint: Path) -> None:
    """As if Spark had died right before it noted that the last micro-batch is done."""
    last = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink()


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


# ---------------------------------------------------------------- commits that are interrupted


class Cut(Exception):  # noqa: N818
    """The process of a commit ends here."""


class Batch:
    """A micro-batch of one run of a query, its tasks done by hand."""

    def __init__(
        self, client: SyncClient, stream: str, label: int = 0, run: str | None = "run-1"
    ) -> None:
        self.target = Target(client, stream, PATIENCE, "q", run, label)

    def task(self, partition: int, payloads: Sequence[bytes]) -> TaskReport:
        return self.target.stage(partition, pieces([list(payloads)]))

    def write(self, *parts: Sequence[bytes]) -> int:
        return self.target.commit([self.task(n, part) for n, part in enumerate(parts)])


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Ends the next commit before the node is asked, or before its answer comes."""
    original = RetryingClient.commit

    def make(when: str) -> None:
        def commit(self: RetryingClient, *given: Any, **more: Any) -> int:
            monkeypatch.setattr(RetryingClient, "commit", original)
            if when == "after":
                original(self, *given, **more)
            raise Cut

        monkeypatch.setattr(RetryingClient, "commit", commit)

    return make


@pytest.mark.parametrize("run", ["run-1", "run-2"])
@pytest.mark.parametrize("purged", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_micro_batch_whose_commit_was_interrupted_is_there_once(
    client: SyncClient, clock: Clock, cut: Any, when: str, purged: bool, run: str
) -> None:
    stream = f"cut-{when}-{purged}-{run}"
    first, large = texts(0, 5), texts(5, 20, 100_000)
    batch = Batch(client, stream)
    reports = [batch.task(0, first), batch.task(1, large)]
    cut(when)
    with pytest.raises(Cut):
        batch.target.commit(reports)
    batch.target.drop(reports)  # as Spark does
    assert stored(client, stream) == ([*first, *large] if when == "after" else [])
    if purged:
        client.admin("purge", name=stream)
    clock.ahead += 3_600 * SECOND
    # The repetition has shared out the rows otherwise, in another order.
    again = Batch(client, stream, 0, run)
    assert again.write(large[::-1], first) == (20 if when == "before" else 0)
    there = [] if purged else [*first, *large]
    assert stored(client, stream) == (there if when == "after" else [*large[::-1], *first])
    assert left_behind(client, stream) == {}
    assert again.write(texts(0, 3), [b"more"]) == 0
    assert Batch(client, stream, 1, run).write([b"next"]) == 1
    assert stored(client, stream)[-1] == b"next"
    assert client.admin("describe", name=stream)["end"] == 21
    assert left_behind(client, stream) == {}


def test_what_other_attempts_have_staged_goes_with_the_commit(client: SyncClient) -> None:
    batch = Batch(client, "attempts")
    batch.task(0, texts(0, 5))  # it failed after this, or was slower
    batch.task(1, texts(90, 95))
    assert batch.write(texts(0, 5), [], texts(5, 9)) == 9
    late = batch.task(0, texts(0, 5))
    assert (late.done, late.sequence) == (True, None)
    assert stored(client, "attempts") == texts(0, 9)
    assert left_behind(client, "attempts") == {}


def test_partitions_come_in_their_order_whichever_is_done_first(
    client: SyncClient, node: Served
) -> None:
    batch = Batch(client, "ordered")
    reports = {n: batch.task(n, texts(10 * n, 10 * n + 10, 50_000)) for n in (2, 0, 3, 1)}
    schema = StructType().add("value", "string")
    source = StreamSource({"stream": "ordered", "data": str(node.data)})
    writer = source.streamWriter(schema, overwrite=False)
    assert isinstance(writer, StreamWriter)
    writer.commit([None, *reports.values()], 0)
    assert stored(client, "ordered") == texts(0, 40, 50_000)


def test_an_earlier_run_of_a_query_is_fenced(client: SyncClient) -> None:
    zombie, late = Batch(client, "zombie"), Batch(client, "zombie", 1)
    reports = [zombie.task(0, [b"lost"])]
    assert Batch(client, "zombie", 0, "run-2").write(texts(0, 5)) == 5
    for attempt in (
        lambda: late.task(0, [b"late"]),
        lambda: zombie.target.commit(reports),
        lambda: late.target.commit([]),
    ):
        with pytest.raises(StreamSourceError, match="another run of query q has begun since"):
            attempt()
    assert Batch(client, "zombie", 1, "run-2").write(texts(5, 9)) == 4
    assert stored(client, "zombie") == texts(0, 9)
    assert left_behind(client, "zombie") == {}


def test_a_node_that_restarts_between_stage_and_commit_is_waited_for(
    client: SyncClient, node: Served
) -> None:
    batch = Batch(client, "restarted")
    reports = [batch.task(n, texts(10 * n, 10 * n + 10, 50_000)) for n in range(3)]
    node.stop()
    back = threading.Timer(0.5, node.start)
    back.start()
    try:
        assert batch.target.commit(reports[::-1]) == 30
    finally:
        back.join()
    assert batch.write([b"again"]) == 0
    assert stored(client, "restarted") == [
        row for n in (2, 1, 0) for row in texts(10 * n, 10 * n + 10, 50_000)
    ]


def test_an_empty_micro_batch_is_done_as_others_are(client: SyncClient) -> None:
    assert Batch(client, "empty", 0).write([], []) == 0
    assert Batch(client, "empty", 1).write([], [b"a"]) == 1
    assert Batch(client, "empty", 0).write([b"now"]) == 0
    [told] = client.admin("producers", name="empty")
    assert (told["labels"], told["staged"]) == ([[0, 1]], {})
    assert stored(client, "empty") == [b"a"]


def test_what_was_staged_for_a_stream_that_was_made_anew_is_refused(client: SyncClient) -> None:
    batch = Batch(client, "anew")
    assert batch.write([b"a"]) == 1
    reports = batch.task(0, [b"a"]), Batch(client, "anew", 1).task(0, [b"b"])
    client.admin("delete", name="anew")
    client.ensure("anew")
    # The new stream gives the same sequences, to something else.
    other = Target(client, "anew", PATIENCE, "q", "run-1", 7)
    [other.stage(n, iter([[b"x"]])) for n in range(3)]
    for label, report in enumerate(reports):
        with pytest.raises(StreamSourceError, match="made anew while it was written to"):
            Batch(client, "anew", label).target.commit([report])
    assert stored(client, "anew") == []
    assert Batch(client, "anew", 1, "run-2").write([b"b"]) == 1
    assert stored(client, "anew") == [b"b"]


def test_a_query_whose_producer_was_forgotten_meanwhile_is_in_doubt(client: SyncClient) -> None:
    batch = Batch(client, "forgotten")
    assert batch.write([b"a"]) == 1
    done = batch.task(0, [b"a"])
    client.admin("forget_producer", name="forgotten", producer="spark/q")
    with pytest.raises(InDoubtError, match="its producer was forgotten"):
        batch.target.commit([done])
    assert stored(client, "forgotten") == [b"a"]


def test_a_checkpoint_that_is_too_old_is_in_doubt(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "MAX_RANGES", 3)
    for label in range(0, 12, 2):  # one range each
        assert Batch(client, "long", label).write(texts(label, label + 1)) == 1
    assert Batch(client, "long", 8, "run-2").write(texts(8, 9)) == 0
    with pytest.raises(InDoubtError, match="whether micro-batch 2 of query q was published"):
        Batch(client, "long", 2, "run-2").write(texts(2, 3))
    assert stored(client, "long") == [texts(n, n + 1)[0] for n in range(0, 12, 2)]


def test_writes_with_numbers_leave_each_other_alone(client: SyncClient) -> None:
    early, late = (Batch(client, "numbered", label, None) for label in (3, 7))
    report = early.task(0, texts(0, 5, 100_000))
    assert late.write(texts(5, 9)) == 4
    assert early.target.commit([report]) == 5
    assert late.write(texts(5, 9)) == 0
    # Their query goes on as a stream of micro-batches, and comes back.
    assert Batch(client, "numbered", 7, "run-1").write(texts(5, 9)) == 0
    assert Batch(client, "numbered", 8, "run-1").write([b"next"]) == 1
    assert Batch(client, "numbered", 8, None).write([b"next"]) == 0
    report = Batch(client, "numbered", 9, None).task(0, [b"staged"])
    assert Batch(client, "numbered", 10, "run-2").write([b"last"]) == 1
    with pytest.raises(StreamSourceError, match="another run of query q has begun since"):
        Batch(client, "numbered", 9, None).target.commit([report])
    found = [*texts(5, 9), *texts(0, 5, 100_000), b"next", b"last"]
    assert stored(client, "numbered") == found
    assert left_behind(client, "numbered") == {}


def test_a_write_that_fails_leaves_nothing(client: SyncClient) -> None:
    def failing() -> Iterator[list[bytes]]:
        yield texts(0, 10, 100_000)
        raise ValueError("no more")

    write = Target(client, "gone", PATIENCE, "w", "w")
    with pytest.raises(ValueError, match="no more"):
        write.stage(0, failing())
    with pytest.raises(StreamsError, match="TOO_LARGE"):
        write.stage(1, iter([[bytes(9 << 20)]]))
    report = write.stage(2, iter([texts(0, 5)]))
    Target(client, "gone", PATIENCE, "w", "w").give_up()
    assert left_behind(client, "gone") == {}
    for attempt in (lambda: write.stage(0, iter([[b"a"]])), lambda: write.commit([report])):
        with pytest.raises(StreamSourceError, match="and this one is over"):
            attempt()
    assert stored(client, "gone") == []


def test_a_write_that_is_left_alone_is_forgotten_and_a_query_is_not(
    client: SyncClient, node: Served, clock: Clock
) -> None:
    Target(client, "aged", PATIENCE, "w", "w").stage(0, iter([[b"a"]]))
    assert Batch(client, "aged").write([b"a"]) == 1
    Batch(client, "aged", 1).task(0, [b"lost"])
    for days, left in ((2, 1), (10, 0)):
        clock.ahead += days * 86_400 * SECOND
        retain = node.server.node.get_persistent("aged").retain()
        asyncio.run_coroutine_threadsafe(retain, node.loop).result(PATIENCE)
        [told] = client.admin("producers", name="aged")
        assert (told["name"], len(told["staged"])) == ("spark/q", left)
    assert Batch(client, "aged", 0, "run-2").write([b"a"]) == 0


# ---------------------------------------------------------------- what an older Railgun has begun


class Older:
    """The journal and the staged streams of a query, as the sink before producers wrote them."""

    def __init__(self, client: SyncClient, stream: str) -> None:
        self.client, self.stream = client, stream
        self.journal = journal_name("q", stream)
        client.ensure(stream)
        client.ensure(self.journal)

    def stage(self, batch: int, parts: Sequence[Sequence[bytes]]) -> list[Any]:
        name = f"_staged.spark-{digest('q', self.stream)}.{batch}.{uuid.uuid4().hex}"
        self.client.ensure(name)
        for number, part in enumerate(parts):
            self.client.publish_many(name, list(part), id=str(number))
        return [name, sum(map(len, parts))]

    def begin(self, batch: int, staged: list[Any] | None) -> None:
        since = self.client.admin("describe", name=self.stream)["end"]
        entry = {"batch": batch, "since": since, "staged": staged}
        self.client.publish(self.journal, json.dumps(entry), id=f"{batch}")

    def done(self, batch: int) -> None:
        entry = json.dumps({"batch": batch, "done": True})
        self.client.publish(self.journal, entry, id=f"{batch}/done")

    def left(self) -> list[str]:
        names = [one["name"] for one in self.client.admin("list")]
        return [n for n in names if n == self.journal or digest("q", self.stream) in n]


def test_names_of_the_older_sink_are_as_they_were() -> None:
    assert journal_name("q", "s" * 101) == f"_spark.{'s' * 100}.{digest('q', 's' * 101)}"
    assert digest("q", "orders") == hashlib.sha256(b"q\0orders").hexdigest()[:24]


@pytest.mark.parametrize("published", range(5))
@pytest.mark.parametrize("ahead", [False, True])
def test_a_micro_batch_that_an_older_one_has_begun_is_finished_as_it_was(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch, published: int, ahead: bool
) -> None:
    stream = f"older-{published}-{ahead}"
    older = Older(client, stream)
    older.begin(3, None)
    client.publish_many(stream, texts(0, 2), id="q/3")
    older.done(3)
    parts = [[texts(2, 4), texts(4, 6)], [texts(6, 8), texts(8, 10)]]
    older.stage(4, [[b"of a failed attempt"]])
    older.begin(4, [older.stage(4, part) for part in parts])
    for number in range(published):
        task, at = divmod(number, 2)
        client.publish_many(stream, parts[task][at], id=f"q/4/{task}/{at}")
    client.publish(stream, "of another")
    if ahead:  # no ID is remembered any more
        monkeypatch.setattr(persistent, "steady_us", lambda: steady_us() + 3_600 * SECOND)
    assert Batch(client, stream, 4).write(texts(5, 10), texts(2, 5)) == 0
    found = stored(client, stream)
    found.remove(b"of another")
    assert found == texts(0, 10)
    assert older.left() == []
    [told] = client.admin("producers", name=stream)
    assert (told["labels"], told["staged"]) == ([[0, 4]], {})
    assert Batch(client, stream, 3, "run-2").write(texts(0, 2)) == 0
    assert Batch(client, stream, 5, "run-2").write(texts(10, 12)) == 2


@pytest.mark.parametrize("published", [False, True])
def test_a_little_micro_batch_that_an_older_one_has_begun_is_there_once(
    client: SyncClient, published: bool
) -> None:
    stream = f"older-little-{published}"
    older = Older(client, stream)
    older.begin(12, None)
    if published:
        client.publish_many(stream, texts(0, 5), id="q/12")
    client.publish(stream, "of another", id="q/120")
    assert Batch(client, stream, 12).write(texts(0, 5)) == (0 if published else 5)
    assert sorted(stored(client, stream)) == [*texts(0, 5), b"of another"]
    assert older.left() == []


@pytest.mark.parametrize("large", [False, True])
def test_what_an_older_one_has_begun_and_may_have_been_deleted_is_in_doubt(
    client: SyncClient, large: bool
) -> None:
    stream = f"doubt-{large}"
    older = Older(client, stream)
    older.begin(0, [older.stage(0, [texts(0, 5)])] if large else None)
    client.publish_many(stream, texts(0, 5), id="q/0/0/0" if large else "q/0")
    client.admin("purge", name=stream)
    for _ in range(2):
        with pytest.raises(InDoubtError, match="was begun by an older Railgun and not finished"):
            Batch(client, stream).write(texts(0, 5))
    client.admin("delete", name=older.journal)
    assert Batch(client, stream).write(texts(0, 5)) == 5
    assert stored(client, stream) == texts(0, 5)


@pytest.mark.parametrize("when", ["finished", "passed over", "swept"])
def test_an_upgrade_that_is_interrupted_is_done_again(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    stream = f"older-cut-{when.replace(' ', '-')}"
    older = Older(client, stream)
    older.begin(0, [older.stage(0, [texts(0, 3), texts(3, 5)])])

    def interrupted(*args: Any) -> Any:
        raise Cut

    original = RetryingClient.commit
    with monkeypatch.context() as patch:
        if when == "finished":
            patch.setattr(RetryingClient, "commit", lambda *args, **more: interrupted())
        elif when == "passed over":
            patch.setattr(upgrade, "delete_stream", interrupted)
        else:
            patch.setattr(
                upgrade,
                "delete_stream",
                lambda node, name: (
                    interrupted() if name == older.journal else delete_stream(node, name)
                ),
            )
        with pytest.raises(Cut):
            Batch(client, stream).write(texts(0, 5))
    assert RetryingClient.commit is original
    assert Batch(client, stream, 0, "run-2").write(texts(0, 5)) == 0
    assert stored(client, stream) == texts(0, 5)
    assert older.left() == []


def test_numbers_that_an_older_journal_has_forgotten_are_in_doubt(client: SyncClient) -> None:
    older = Older(client, "older-numbers")
    for batch in (5, 9, 7):
        older.begin(batch, None)
        client.publish(older.stream, f"{batch}", id=f"q/{batch}")
        older.done(batch)
    client.admin("purge", name=older.journal, before=2)
    for _ in range(2):
        with pytest.raises(InDoubtError, match="whether it published 5 is not known any more"):
            Batch(client, older.stream, 5, None).write([b"5"])
        assert Batch(client, older.stream, 7, None).write([b"7"]) == 0
    assert Batch(client, older.stream, 10, None).write([b"10"]) == 1
    assert stored(client, older.stream) == [b"5", b"9", b"7", b"10"]
    assert older.left() == [older.journal]


@needs_spark
def test_a_query_of_an_older_railgun_goes_on(
    writing: Writing, client: SyncClient, tmp_path: Path
) -> None:
    client.ensure("past")
    client.publish_many("past", texts(0, 150))
    finish(writing.copy("past", "present", tmp_path, most=50))
    # As the older sink would have left it, in the middle of its last micro-batch.
    name = json.loads((tmp_path / "metadata").read_text())["id"]
    client.admin("delete", name="present")
    journal = journal_name(name, "present")
    for one in ("present", journal):
        client.ensure(one)
    for batch, done in ((0, True), (1, True), (2, False)):
        entry = {"batch": batch, "since": 50 * batch, "staged": None}
        client.publish(journal, json.dumps(entry))
        client.publish_many("present", texts(50 * batch, 50 * batch + 50), id=f"{name}/{batch}")
        if done:
            client.publish(journal, json.dumps({"batch": batch, "done": True}))
    forget(tmp_path)
    client.publish_many("past", texts(150, 220))
    finish(writing.copy("past", "present", tmp_path, most=50))
    assert stored(client, "present") == texts(0, 220)
    assert journal not in [one["name"] for one in client.admin("list")]
    assert left_behind(client, "present") == {}


# ---------------------------------------------------------------- other drivers

DRIVER = """
import sys
from railgun.spark.session import session

data, source, target, checkpoint = sys.argv[1:]
spark = session("another driver", "local[2]", quick=True)
rows = spark.readStream.format("railgun").option("data", data)
rows = rows.options(stream=source, partitions=2, maxMessages=100).load()
rows = rows.selectExpr("concat(CAST(payload AS STRING), repeat('.', 9000)) AS payload")
writer = rows.writeStream.format("railgun").option("data", data)
writer = writer.options(stream=target, checkpointLocation=checkpoint)
writer.trigger(availableNow=True).start().awaitTermination()
"""


class Driver:
    """Spark in a process of its own, which copies a stream as far as there is something."""

    def __init__(self, node: Served, source: str, target: str, checkpoint: Path) -> None:
        command = [sys.executable, "-c", DRIVER, str(node.data), source, target, str(checkpoint)]
        with checkpoint.with_name(f"{uuid.uuid4().hex}.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, start_new_session=True, stdout=log, stderr=subprocess.STDOUT
            )
        self.log = Path(log.name)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait(self) -> int:
        return self.process.wait(2 * PATIENCE)


@pytest.fixture
def at_commits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Does something just before the node makes the n-th commit, or just after it, before its answer."""

    def make(n: int, when: str, act: Callable[[], None]) -> None:
        monkeypatch.undo()
        original, seen = Producing._commit, [0]

        async def commit(self: Producing, *given: Any) -> Any:
            seen[0] += 1
            if seen[0] == n and when == "before":
                act()
                raise NoMasterError("killed")
            made = await original(self, *given)
            if seen[0] == n:
                act()
            return made

        monkeypatch.setattr(Producing, "_commit", commit)

    return make


@pytest.mark.slow
@needs_spark
def test_a_driver_that_is_killed_anywhere_goes_on_from_its_checkpoint(
    client: SyncClient, node: Served, at_commits: Any, tmp_path: Path
) -> None:
    chance = random.Random(5)
    client.ensure("killed-in")
    client.publish_many("killed-in", texts(0, 2_000))
    client.ensure("killed-out")
    checkpoint = tmp_path / "checkpoint"

    def driver() -> Driver:
        return Driver(node, "killed-in", "killed-out", checkpoint)

    for n, when in ((2, "before"), (1, "after"), (2, "after")):
        found = driver()
        at_commits(n, when, partial(found.signal, signal.SIGKILL))
        found.wait()
        there = stored(client, "killed-out")
        assert there == texts(0, len(there), 9_000)
    at_commits(0, "", lambda: None)
    for _ in range(2):
        before = len(stored(client, "killed-out"))
        found = driver()
        while found.process.poll() is None and len(stored(client, "killed-out")) == before:
            time.sleep(0.02)
        time.sleep(chance.random() * 0.3)
        found.signal(signal.SIGKILL)
        found.wait()
    found = driver()
    assert found.wait() == 0, found.log.read_text()
    assert stored(client, "killed-out") == texts(0, 2_000, 9_000)
    assert left_behind(client, "killed-out") == {}


@pytest.mark.slow
@needs_spark
def test_a_driver_that_wakes_up_after_its_successor_is_fenced(
    client: SyncClient, node: Served, at_commits: Any, tmp_path: Path
) -> None:
    client.ensure("frozen-in")
    client.publish_many("frozen-in", texts(0, 300))
    client.ensure("frozen-out")
    checkpoint = tmp_path / "checkpoint"
    zombie = Driver(node, "frozen-in", "frozen-out", checkpoint)
    frozen = threading.Event()

    def freeze() -> None:
        zombie.signal(signal.SIGSTOP)
        frozen.set()

    at_commits(2, "before", freeze)
    try:
        assert frozen.wait(PATIENCE)
        successor = Driver(node, "frozen-in", "frozen-out", checkpoint)
        assert successor.wait() == 0, successor.log.read_text()
    finally:
        zombie.signal(signal.SIGCONT)
    zombie.wait()
    assert stored(client, "frozen-out") == texts(0, 300, 9_000)
    assert left_behind(client, "frozen-out") == {}
