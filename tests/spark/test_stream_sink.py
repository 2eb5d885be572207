"""Streams written by Spark: every row once, whatever fails and is repeated."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from railgun.client.errors import StreamsError
from railgun.client.sync import SyncClient, connect_sync
from railgun.node import persistent
from railgun.node.clock import steady_us, time_of_day
from railgun.spark.session import SparkSession
from railgun.spark.streams import commit
from railgun.spark.streams.commit import Target, journal_name
from railgun.spark.streams.errors import InDoubtError, StreamSourceError
from railgun.spark.streams.source import StreamSource
from railgun.spark.streams.staging import Line, Written, stage, staged_name
from railgun.testing.served import Served, served

needs_spark = pytest.mark.spark
PATIENCE = 60
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


def left_behind(client: SyncClient) -> list[str]:
    """By micro-batches."""
    return [one["name"] for one in client.admin("list") if one["name"].startswith("_staged.spark-")]


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
    assert left_behind(client) == []
    failing = writing.rows(0, 3_000, 3, size=400).selectExpr(
        "if(payload LIKE '002999%', raise_error('no'), payload) AS payload"
    )
    with pytest.raises(PySparkException):
        writing.write(failing, "half")
    assert stored(client, "half") == []  # and what killed tasks still stage goes later


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
        ({"value": "string"}, {"stream": "scattered"}, "it is ephemeral and keeps nothing"),
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
        (["1 AS d", "2 AS d"], {"format": "json"}, "column 'd': there are two of this name"),
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
    assert left_behind(client) == []


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
    assert left_behind(client) == []
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
    assert left_behind(client) == []


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


class Report:
    """Reports of tasks of one micro-batch, made by hand."""

    def __init__(self, client: SyncClient, stream: str, batch: int = 0) -> None:
        self.client, self.stream, self.batch = client, stream, batch

    def little(self, partition: int, payloads: Sequence[bytes], attempt: int = 0) -> Written:
        return Written("q", self.batch, partition, attempt, "run", list(payloads), None)

    def much(self, partition: int, payloads: Sequence[bytes], attempt: int = 0) -> Written:
        name = staged_name("q", self.stream, self.batch)
        made = stage(self.client, name, [list(payloads)])
        return Written("q", self.batch, partition, attempt, "run", [], made)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ends the next commit after so many pieces, or at its very end."""

    def make(pieces: int | None) -> None:
        monkeypatch.undo()
        if pieces is None:
            return

        class Short(Line):
            def add(self, payloads: list[bytes], id: str) -> None:
                nonlocal pieces
                assert pieces is not None
                if not pieces:
                    self.wait()
                    raise Cut
                pieces -= 1
                super().add(payloads, id)

        def done(self: Any, batch: int) -> None:
            raise Cut

        monkeypatch.setattr(commit, "Line", Short)
        monkeypatch.setattr(commit._Journal, "done", done)

    return make


@pytest.mark.parametrize("pieces", [0, 1, 3, 99])
@pytest.mark.parametrize("ahead", [0, 3_600])
def test_a_commit_that_was_interrupted_is_finished_with_what_it_was(
    client: SyncClient, clock: Clock, cut: Any, pieces: int, ahead: int
) -> None:
    stream = f"cut-{pieces}-{ahead}"
    report, target = Report(client, stream), Target(client, stream, PATIENCE)
    first = [
        report.little(0, texts(0, 5)),
        report.much(1, texts(5, 20, 100_000)),
        report.little(2, texts(20, 25)),
        report.much(3, texts(25, 40, 100_000)),
    ]
    wanted = texts(0, 5) + texts(5, 20, 100_000) + texts(20, 25) + texts(25, 40, 100_000)
    cut(pieces)
    with pytest.raises(Cut):
        target.commit_batch("q", 0, first)
    target.abort_batch("q", 0, first)  # as Spark does
    client.publish(stream, "of another")
    clock.ahead += ahead * SECOND
    cut(None)
    # The repetition has shared out the rows otherwise, in another order.
    again = [report.much(0, list(reversed(wanted)), attempt=1), report.much(1, [b"more"])]
    target.commit_batch("q", 0, again)
    found = stored(client, stream)
    found.remove(b"of another")
    assert found == wanted
    assert left_behind(client) == []
    target.commit_batch("q", 0, [report.much(0, texts(0, 3))])
    target.commit_batch("q", 1, [Report(client, stream, 1).little(0, [b"next"])])
    assert len(stored(client, stream)) == len(wanted) + 2
    assert left_behind(client) == []


@pytest.mark.parametrize("pieces", [0, 1])
@pytest.mark.parametrize("ahead", [0, 3_600])
def test_a_little_micro_batch_is_published_wholly_or_not_at_all(
    client: SyncClient, clock: Clock, cut: Any, pieces: int, ahead: int
) -> None:
    stream = f"little-{pieces}-{ahead}"
    report, target = Report(client, stream), Target(client, stream, PATIENCE)
    cut(pieces)
    with pytest.raises(Cut):
        target.commit_batch("q", 0, [report.little(0, texts(0, 5)), report.little(1, texts(5, 9))])
    assert len(stored(client, stream)) == (9 if pieces else 0)
    clock.ahead += ahead * SECOND
    cut(None)
    # Once more, by one task: it has become too much to be brought along.
    target.commit_batch("q", 0, [report.much(0, texts(0, 9))])
    assert stored(client, stream) == texts(0, 9)
    assert left_behind(client) == []


def test_one_whose_messages_were_deleted_since_is_in_doubt(
    client: SyncClient, clock: Clock, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, target = Report(client, "doubt"), Target(client, "doubt", PATIENCE)
    cut(1)
    with pytest.raises(Cut):
        target.commit_batch("q", 0, [report.little(0, texts(0, 5))])
    cut(None)
    client.admin("purge", name="doubt")
    clock.ahead += 3_600 * SECOND
    # An hour passes: IDs are remembered by the steady clock.
    monkeypatch.setattr(persistent, "steady_us", lambda: steady_us() + 3_600 * SECOND)
    with pytest.raises(InDoubtError, match="was begun and not finished"):
        target.commit_batch("q", 0, [report.little(0, texts(0, 5))])
    client.admin("delete", name=journal_name("q", "doubt"))
    target.commit_batch("q", 0, [report.little(0, texts(0, 5))])
    assert stored(client, "doubt") == texts(0, 5)


def test_one_that_has_become_larger_is_refused(client: SyncClient, cut: Any) -> None:
    report, target = Report(client, "grown"), Target(client, "grown", PATIENCE)
    cut(0)
    with pytest.raises(Cut):
        target.commit_batch("q", 0, [report.little(0, texts(0, 5))])
    cut(None)
    larger = report.much(0, texts(0, 100, 100_000))
    with pytest.raises(StreamSourceError, match="has become larger when it was repeated"):
        target.commit_batch("q", 0, [larger])
    target.discard([larger])


def test_what_attempts_have_left_behind_goes_with_a_later_commit(client: SyncClient) -> None:
    report, target = Report(client, "swept"), Target(client, "swept", PATIENCE)
    lost = report.much(0, texts(0, 5))
    other = stage(client, staged_name("other", "swept", 0), [texts(0, 2)])
    target.commit_batch("q", 0, [report.little(0, texts(0, 5), attempt=1)])
    assert lost.staged is not None
    assert left_behind(client) == [other[0]]
    client.admin("delete", name=other[0])


def test_writes_with_numbers_in_any_order_leave_each_other_alone(client: SyncClient) -> None:
    target = Target(client, "numbered", PATIENCE, sequential=False)
    early = Report(client, "numbered", 3).much(0, texts(0, 5))
    target.commit_batch("q", 7, [Report(client, "numbered", 7).little(0, texts(5, 9), attempt=1)])
    target.commit_batch("q", 3, [early])
    target.commit_batch("q", 7, [Report(client, "numbered", 7).little(0, texts(5, 9))])
    assert stored(client, "numbered") == texts(5, 9) + texts(0, 5)
    assert left_behind(client) == []


def test_what_killed_tasks_of_a_write_left_behind_goes_a_day_later(client: SyncClient) -> None:
    names = [f"_staged.once-{when}-{'0' * 32}.0.1f" for when in (1_700_000_000, 9_999_999_999)]
    for name in names:
        client.ensure(name)
    Target(client, "daily", PATIENCE).sweep_old()
    left = [one["name"] for one in client.admin("list") if one["name"] in names]
    assert left == names[1:]
    client.admin("delete", name=names[1])


def test_a_journal_stays_short_and_tells_what_it_does_not_know(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "KEPT", 6)
    target = Target(client, "long", PATIENCE)
    for batch in range(20):
        target.commit_batch(
            "q", batch, [Report(client, "long", batch).little(0, texts(batch, batch + 1))]
        )
    assert stored(client, "long") == texts(0, 20)
    kept = client.admin("describe", name=journal_name("q", "long"))
    assert kept["end"] - kept["first"] <= 14
    target.commit_batch("q", 19, [Report(client, "long", 19).little(0, texts(19, 20))])
    assert stored(client, "long") == texts(0, 20)
    with pytest.raises(InDoubtError, match="micro-batch 2 is to be published, but 19 was already"):
        target.commit_batch("q", 2, [Report(client, "long", 2).little(0, texts(2, 3))])


def test_of_two_that_begin_at_once_one_counts(
    client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, target = Report(client, "twins"), Target(client, "twins", PATIENCE)
    slow = report.much(0, texts(0, 5))
    original = commit._Journal.begin

    def begin(self: Any, *given: Any) -> Any:
        monkeypatch.undo()
        target.commit_batch("q", 0, [report.much(0, texts(0, 7))])  # the other one is faster
        return original(self, *given)

    monkeypatch.setattr(commit._Journal, "begin", begin)
    target.commit_batch("q", 0, [slow])
    assert stored(client, "twins") == texts(0, 7)
    assert left_behind(client) == []


def test_what_fails_while_it_is_staged_is_gone(client: SyncClient) -> None:
    def payloads() -> Iterator[list[bytes]]:
        yield texts(0, 10, 100_000)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        stage(client, staged_name("q", "gone", 0), payloads())
    with pytest.raises(StreamsError, match="TOO_LARGE"):
        stage(client, staged_name("q", "gone", 0), [[bytes(9 << 20)]])
    assert left_behind(client) == []
