"""Streams read by Spark: every message once, in ranges and in micro-batches, as bytes, JSON and Arrow."""

from __future__ import annotations

import contextlib
import datetime as dt
import doctest
import json
import pickle
import re
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSource
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType, _parse_datatype_string

import pyspark_railgun
from railgun.client.payloads import to_arrow, to_json
from railgun.client.sync import SyncClient, connect_sync
from railgun.spark.session import SparkSession
from railgun.spark.streams import columns, encode, options, reader, staging
from railgun.spark.streams.errors import (
    BadColumnError,
    BadOptionError,
    MissingMessagesError,
    StreamSourceError,
)
from railgun.spark.streams.options import Options
from railgun.spark.streams.source import StreamSource
from railgun.testing.node import Served, served

pytestmark = pytest.mark.spark
PATIENCE = 240  # seconds: a busy machine starts few micro-batches in a minute


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture(scope="module")
def client(node: Served) -> Iterator[SyncClient]:
    with connect_sync(data=node.data) as made:
        yield made


class Reading:
    """Reads streams of the node with Spark."""

    def __init__(self, spark: SparkSession, node: Served) -> None:
        self.spark = spark
        self.data = str(node.data)

    def __call__(self, stream: str, schema: str | None = None, **options: Any) -> DataFrame:
        reader = self.spark.read.format("railgun").option("data", self.data).options(**options)
        return (reader if schema is None else reader.schema(schema)).load(stream)

    def here(self, stream: str, schema: str | None = None, **options: Any) -> list[Any]:
        """The same without a job of Spark's: in this process, by what Spark calls. Arrow batches."""
        texts = {name: str(value) for name, value in {"data": self.data, **options}.items()}
        source = StreamSource({**texts, "stream": stream})
        asked = source.schema() if schema is None else schema
        columns = _parse_datatype_string(asked) if isinstance(asked, str) else asked
        assert isinstance(columns, StructType)
        reader = source.reader(columns)
        return [rows for part in reader.partitions() for rows in reader.read(part)]

    def streaming(self, stream: str, schema: str | None = None, **options: Any) -> DataFrame:
        reader = self.spark.readStream.format("railgun").option("data", self.data)
        reader = reader.options(stream=stream, **options)
        return (reader if schema is None else reader.schema(schema)).load()


@pytest.fixture
def reading(spark: SparkSession, node: Served) -> Reading:
    return Reading(spark, node)


def numbers(first: int, end: int) -> list[str]:
    return [f"message {n}" for n in range(first, end)]


def texts(found: DataFrame) -> list[str]:
    rows = sorted((row.offset, bytes(row.payload).decode()) for row in found.collect())
    assert len({offset for offset, _ in rows}) == len(rows)
    return [text for _, text in rows]


def told(error: pytest.ExceptionInfo[PySparkException]) -> str:
    """What our error said, somewhere in Spark's."""
    found = re.findall(r"railgun\.spark\.streams\.errors\.\w+: .*", str(error.value))
    assert found, str(error.value)
    return str(found[-1])


# ---------------------------------------------------------------- batch


def test_a_stream_is_read_by_its_name_without_any_registration(
    reading: Reading, client: SyncClient
) -> None:
    client.ensure("orders")
    client.publish("orders", "tea", id="order-1", headers={"lang": "en"})
    client.publish_many("orders", numbers(1, 300))
    found = reading("orders", partitions=3)
    assert found.dtypes == [
        ("offset", "bigint"), ("time", "timestamp"), ("id", "binary"), ("headers", "binary"), ("payload", "binary"),
    ]  # fmt: skip
    assert texts(found) == ["tea", *numbers(1, 300)]
    first, second = sorted(found.where("offset < 2").collect())
    assert (bytes(first.id), json.loads(first.headers)) == (b"order-1", {"lang": "en"})
    assert (second.id, second.headers) == (None, None)
    assert abs(first.time.timestamp() - dt.datetime.now().timestamp()) < PATIENCE
    assert len(set(found.selectExpr("spark_partition_id()").collect())) == 3


def test_a_range_is_fixed_and_cut_wherever_batches_begin(
    reading: Reading, client: SyncClient
) -> None:
    client.ensure("ranged")
    for n in range(10):
        client.publish_many("ranged", numbers(10 * n, 10 * n + 10))
    found = reading("ranged", start=7, end=93, partitions=5, batchRows=8)
    client.publish_many("ranged", numbers(100, 110))
    assert texts(found) == numbers(7, 100)[:86]
    assert reading("ranged", start=4, end=4, partitions=7).count() == 0

    def here(**options: Any) -> list[str]:
        batches = reading.here("ranged", "payload STRING", **options)
        return [row for rows in batches for row in rows.column(0).to_pylist()]

    assert here(start=95) == numbers(95, 110)
    assert here(end=3, batchRows=2) == numbers(0, 3)
    assert here(start="end") == []
    assert here(start=1, end=109, partitions=200) == numbers(1, 109)


def test_columns_can_be_chosen_and_be_text(reading: Reading, client: SyncClient) -> None:
    client.ensure("text")
    client.publish("text", "grün", id="a")
    found = reading("text", "payload STRING, id STRING, offset BIGINT")
    assert found.collect() == [("grün", "a", 0)]
    client.publish("text", b"\xff")
    with pytest.raises(PySparkException) as error:
        reading("text", "payload STRING").collect()
    assert "stream 'text', offset 1, column 'payload': it is not text" in told(error)


def test_messages_that_were_deleted_are_an_error_or_passed_over(
    reading: Reading, client: SyncClient
) -> None:
    client.ensure("purged")
    client.publish_many("purged", numbers(0, 50))
    client.admin("purge", name="purged", before=20)
    assert texts(reading("purged")) == numbers(20, 50)
    with pytest.raises(MissingMessagesError, match="stream 'purged': messages 5 to 19 were"):
        reading.here("purged", start=5)
    assert texts(reading("purged", start=5, missing="skip")) == numbers(20, 50)


def test_messages_deleted_between_plan_and_task_are_an_error_or_passed_over(
    reading: Reading, client: SyncClient
) -> None:
    found: list[Any] = []
    for missing in ("error", "skip"):
        client.ensure("vanishing")
        client.publish_many("vanishing", numbers(0, 50))
        source = StreamSource(
            {"stream": "vanishing", "data": reading.data, "missing": missing, "partitions": "2"}
        )
        reader = source.reader(StructType().add("payload", "string"))
        parts = reader.partitions()
        client.admin("purge", name="vanishing", before=30)
        if missing == "error":
            with pytest.raises(MissingMessagesError, match="0 to 24 were deleted before they were"):
                list(reader.read(parts[0]))
            with pytest.raises(
                MissingMessagesError, match="25 to 29 were deleted before they were"
            ):
                list(reader.read(parts[1]))
        else:
            found = [rows for part in parts for rows in reader.read(part)]
        client.admin("delete", name="vanishing")
    assert [row for rows in found for row in rows.column(0).to_pylist()] == numbers(30, 50)
    client.ensure("vanishing")
    with pytest.raises(StreamSourceError, match="deleted and made anew since"):
        list(reader.read(parts[0]))
    client.publish_many("vanishing", ["x"] * 60)
    with pytest.raises(StreamSourceError, match="STREAM_REPLACED"):
        list(reader.read(parts[0]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "xml"}, "option format is 'bytes' or 'json' or 'arrow', not 'xml'"),
        ({"partitions": 0}, "option partitions is a number from 1 to 4611686018427387903, not '0'"),
        ({"start": "yesterday"}, "option start is 'start', 'end' or an offset, not 'yesterday'"),
        ({"start": 9}, "option start is 9, and the stream has 0 to 1"),
        ({"start": 1, "end": 0}, "option start is 1, behind end, which is 0"),
        ({"missing": "ignore"}, "option missing is 'error' or 'skip', not 'ignore'"),
        ({"fromat": "json"}, "there is no option 'fromat'; did you mean 'format'?"),
        ({"format": "json"}, "format json needs to know the columns"),
        ({"stream": "nowhere"}, "there is no stream 'nowhere'"),
        ({"stream": "fleeting"}, "the stream is ephemeral and stores nothing"),
        ({"node": "127.0.0.1:1", "timeout": 0.3}, "no node at 127.0.0.1:1"),
        ({"node": "here", "secret": "00"}, "'here' is no address"),
        ({"data": "/nowhere"}, "no node works in /nowhere"),
    ],
)
def test_what_cannot_be_is_told_with_the_option(
    reading: Reading, client: SyncClient, options: dict[str, Any], said: str
) -> None:
    client.ensure("known")
    if client.admin("describe", name="known")["end"] == 0:
        client.publish("known", "x")
        client.ensure("fleeting", kind="ephemeral")
    with pytest.raises(StreamSourceError, match=re.escape(said)):
        reading.here(**{"stream": "known", **options})


def test_a_node_that_worked_in_the_directory_is_waited_for(tmp_path: Path) -> None:
    with served(tmp_path) as own:
        found = Options.of({"stream": "known", "data": str(tmp_path)})
        address = found.address()
        own.stop()
        hasty = Options.of({"stream": "known", "data": str(tmp_path), "timeout": "0.3"})
        with pytest.raises(StreamSourceError, match="no node works in"):
            hasty.address()
        with ThreadPoolExecutor(1) as other:
            again = other.submit(found.address)
            time.sleep(0.5)
            assert not again.done()
            own.start()
            assert again.result(PATIENCE) == address


def test_a_wrong_secret_is_refused_and_no_secret_is_ever_shown(
    spark: SparkSession, node: Served, client: SyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.ensure("guarded")
    right = (node.data / "secret").read_text().strip()
    reader = spark.read.format("railgun").option("node", f"127.0.0.1:{node.port}")
    found = reader.options(stream="guarded", secret=right, timeout=5).load()
    assert found.count() == 0
    found.explain(True)
    assert right not in capsys.readouterr().out
    wrong = "ab" * 32
    with pytest.raises(PySparkException) as error:
        reader.options(stream="guarded", secret=wrong, timeout=5).load().count()
    assert "stream 'guarded': no node at 127.0.0.1" in told(error)
    assert wrong not in str(error.value)
    assert right not in str(error.value)
    assert right not in repr(Options.of({"stream": "guarded", "secret": right}))
    (node.data / "copy").write_text(right)
    reader = spark.read.format("railgun").option("node", f"127.0.0.1:{node.port}")
    assert reader.options(stream="guarded", secretFile=str(node.data / "copy")).load().count() == 0


def test_options_are_checked_without_spark() -> None:
    assert Options.of({"path": "orders", "MAXMESSAGES": "5", "owner": "root"}).max_messages == 5
    with pytest.raises(BadOptionError, match="which stream"):
        Options.of({"format": "json"})
    there = {"stream": "orders", "node": "127.0.0.1:1"}
    for given in ({"secretFile": "/nowhere"}, {"secret": "00", "certificate": "/nowhere"}):
        with pytest.raises(BadOptionError, match=r"secretFile or certificate: .*/nowhere"):
            Options.of({**there, **given}).address()


@pytest.mark.parametrize("module", [columns, encode, options, reader, staging])
def test_the_examples_run(module: ModuleType) -> None:
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    results = doctest.testmod(module, optionflags=flags)
    assert results.attempted
    assert not results.failed


def test_spark_and_its_wheel_find_the_source() -> None:
    assert issubclass(pyspark_railgun.DefaultSource, DataSource)
    assert pyspark_railgun.DefaultSource.name() == StreamSource.name() == "railgun"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "src/pyspark_railgun.py" in wheel["packages"]


def test_a_range_is_read_on_when_the_node_was_away(tmp_path: Path) -> None:
    with served(tmp_path / "node") as node:
        with connect_sync(data=node.data) as client:
            client.ensure("long")
            for n in range(100):
                client.publish_many("long", numbers(1_000 * n, 1_000 * n + 1_000))
        schema = StructType().add("payload", "string")
        asked = {"stream": "long", "data": str(node.data), "batchRows": "1000", "partitions": "1"}
        reader = StreamSource(asked).reader(schema)
        coming = iter(reader.read(reader.partitions()[0]))
        batches: list[Any] = [next(coming)]
        node.stop()
        node.start()
        batches += coming
        assert [row for rows in batches for row in rows.column(0).to_pylist()] == numbers(
            0, 100_000
        )


# ---------------------------------------------------------------- JSON and Arrow


JSON = (
    "customer STRING, amount BIGINT, price DECIMAL(8,2), day DATE, at TIMESTAMP, tags ARRAY<STRING>, "
    "place STRUCT<city: STRING, floor: INT>, raw BINARY, _offset BIGINT, _id STRING"
)


def test_json_becomes_columns(reading: Reading, client: SyncClient) -> None:
    client.ensure("json")
    full = {
        "customer": "ada", "amount": 7, "price": 12.5, "day": "2026-02-03", "at": "2026-02-03T04:05:06.789Z",
        "tags": ["a", "b"], "place": {"city": "Ulm", "street": "?", "floor": 3}, "raw": "AP8=", "more": [{}],
    }  # fmt: skip
    client.publish("json", json.dumps(full, indent=2) + "\n", id="one")
    client.publish("json", to_json({"amount": None, "other": True}))
    client.publish("json", b"{}")
    rows = reading("json", JSON, format="json").collect()
    first, second, third = sorted(rows, key=lambda row: int(row._offset))
    assert first.customer == "ada"
    assert (first.amount, str(first.price), first.day) == (7, "12.50", dt.date(2026, 2, 3))
    moment = dt.datetime(2026, 2, 3, 4, 5, 6, 789000, dt.UTC)
    assert first["at"].timestamp() == moment.timestamp()
    assert (first.tags, first.place.asDict()) == (["a", "b"], {"city": "Ulm", "floor": 3})
    assert (bytes(first.raw), first._offset, first._id) == (b"\0\xff", 0, "one")
    assert set(second[:8]) == set(third[:8]) == {None}
    by_option = reading("json", format="json", schema="customer STRING")
    assert [row.customer for row in by_option.collect()] == ["ada", None, None]


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b'{"amount": "seven"}', "offset 3, column 'amount': b'\"seven\"' does not fit into int64"),
        (b'{"amount": 1.5}', "offset 3, column 'amount': b'1.5' does not fit into int64"),
        (b'{"day": "soon"}', "offset 3, column 'day': 'soon' does not fit into date32"),
        (b'{"raw": "?"}', "offset 3, column 'raw': '?' does not fit into binary"),
        (b'{"amount": 1', "offset 3: b'{\"amount\": 1' is not JSON"),
        (b'{"amount": 1}{"amount": 2}', 'offset 3: b\'{"amount": 1}{"amount": 2}\' is not JSON'),
        (b"[1]", "offset 3: b'[1]' is not a JSON object"),
        (b"", "offset 3: b'' is not JSON"),
        (b'{"customer": "\xff"}', 'offset 3: b\'{"customer": "\\xff"}\' is not JSON'),
    ],
)
def test_json_that_does_not_fit_is_told_with_offset_and_column(
    reading: Reading, client: SyncClient, payload: bytes, said: str
) -> None:
    client.ensure("unfit")
    client.publish_many("unfit", [b'{"amount": 1}'] * 3 + [payload] + [b'{"amount": 2}'] * 3)
    with pytest.raises(BadColumnError, match=re.escape(f"stream 'unfit', {said}")):
        reading.here("unfit", JSON, format="json")
    client.admin("delete", name="unfit")


@pytest.mark.parametrize(
    ("format", "schema", "said"),
    [
        ("json", "m MAP<STRING, INT>", "column 'm': map<string, int32> cannot be read"),
        ("json", "_offset STRING", "column '_offset': it is int64, not string"),
        ("json", "amount BIGINT NOT NULL", "offset 1, column 'amount': it is null"),
        ("bytes", "amount BIGINT", "column 'amount': messages as bytes have offset, time"),
        ("bytes", "payload INT", "column 'payload': it is binary or string, not int32"),
    ],
)
def test_a_schema_that_cannot_be_is_told_with_the_column(
    reading: Reading, client: SyncClient, format: str, schema: str, said: str
) -> None:
    client.ensure("columns")
    if client.admin("describe", name="columns")["end"] == 0:
        client.publish_many("columns", ['{"amount": 1}', "{}"])
    with pytest.raises(BadColumnError, match=re.escape(said)):
        reading.here("columns", schema, format=format)


def test_arrow_batches_become_rows(reading: Reading, client: SyncClient) -> None:
    client.ensure("arrow")
    client.publish("arrow", to_arrow(pa.table({"n": [1, 2], "s": ["a", None]})))
    client.publish(
        "arrow", to_arrow(pa.table({"n": pa.array([], pa.int64()), "s": pa.array([], pa.string())}))
    )
    client.publish("arrow", to_arrow(pa.table({"s": ["c"], "n": pa.array([3], pa.int16())})))
    found = reading("arrow", format="arrow")
    assert found.dtypes == [("n", "bigint"), ("s", "string")]
    assert sorted(found.collect()) == [(1, "a"), (2, None), (3, "c")]
    chosen = reading("arrow", "_offset BIGINT, n INT", format="arrow").collect()
    assert sorted(chosen) == [(0, 1), (0, 2), (2, 3)]
    with pytest.raises(BadColumnError, match="offset 0, column 'x': the batch has n, s"):
        reading.here("arrow", "x INT", format="arrow")
    client.publish("arrow", to_arrow(pa.table({"n": [1 << 40], "s": ["d"]})))
    with pytest.raises(BadColumnError, match="offset 3, column 'n': int64 does not fit into int32"):
        reading.here("arrow", "n INT", format="arrow")
    client.publish("arrow", "no arrow")
    with pytest.raises(BadColumnError, match="offset 4: the payload b'no arrow' is no Arrow"):
        reading.here("arrow", "s STRING", format="arrow")


# ---------------------------------------------------------------- micro-batches


def run(found: DataFrame, checkpoint: Path, out: Path, **trigger: Any) -> StreamingQuery:
    """Write what comes to files, from where the checkpoint stands."""
    writer = found.writeStream.format("json").option("checkpointLocation", str(checkpoint))
    trigger = trigger or {"availableNow": True}
    return writer.trigger(**trigger).start(str(out))


def written(out: Path) -> list[str]:
    """What Spark says is in these files: it passes over those of micro-batches that came to nothing."""
    log = [p for p in (out / "_spark_metadata").iterdir() if p.name.isdecimal()]
    lines = [line for path in log for line in path.read_text().splitlines()[1:]]
    files = [Path(json.loads(line)["path"].removeprefix("file:")) for line in lines]
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return [row["payload"] for row in sorted(rows, key=lambda row: int(row["offset"]))]


def test_a_query_goes_on_from_its_checkpoint_and_reads_every_message_once(
    spark: SparkSession, reading: Reading, client: SyncClient, tmp_path: Path
) -> None:
    client.ensure("endless")
    client.publish_many("endless", numbers(0, 100))
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    found = reading.streaming(
        "endless", "offset BIGINT, payload STRING", maxMessages=30, partitions=2
    )
    query = run(found, checkpoint, out, processingTime="0 seconds")
    query.processAllAvailable()
    client.publish_many("endless", numbers(100, 170))
    query.processAllAvailable()
    assert [p.numInputRows for p in query.recentProgress if p.numInputRows] == [30] * 3 + [
        10,
        30,
        30,
        10,
    ]
    assert query.lastProgress is not None
    assert json.loads(query.lastProgress.sources[0].endOffset or "")["endless"] == 170
    query.stop()
    client.publish_many("endless", numbers(170, 200))
    query = run(found, checkpoint, out)
    assert query.awaitTermination(PATIENCE)
    assert written(out) == numbers(0, 200)


def test_a_micro_batch_that_was_not_committed_is_read_again_with_the_same_messages(
    spark: SparkSession, reading: Reading, client: SyncClient, tmp_path: Path
) -> None:
    client.ensure("again")
    client.publish_many("again", numbers(0, 40))
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    found = reading.streaming("again", "offset BIGINT, payload STRING")
    assert run(found, checkpoint, out).awaitTermination(PATIENCE)
    last = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink()
    client.publish_many("again", numbers(40, 60))
    assert run(found, checkpoint, out).awaitTermination(PATIENCE)
    assert written(out) == numbers(0, 60)


class Planner:
    """What Spark asks a query's reader for, without a query."""

    def __init__(self, reading: Reading, stream: str, **options: str) -> None:
        self.stream = stream
        source = StreamSource({"stream": stream, "data": reading.data, **options})
        self.reader = source.streamReader(StructType().add("payload", "string"))

    def latest(self, start: int, limit: ReadLimit | None = None) -> int:
        chosen = self.reader.getDefaultReadLimit() if limit is None else limit
        return int(self.reader.latestOffset({self.stream: start}, chosen)[self.stream])

    def rows(self, start: int, end: int) -> list[str]:
        parts = self.reader.partitions({self.stream: start}, {self.stream: end})
        sent = pickle.loads(pickle.dumps(self.reader))  # as it comes to a task
        batches: list[Any] = [rows for part in parts for rows in sent.read(part)]
        return [row for rows in batches for row in rows.column(0).to_pylist()]


def test_a_query_begins_where_it_is_told_and_takes_no_end(
    reading: Reading, client: SyncClient
) -> None:
    client.ensure("begun")
    client.publish_many("begun", numbers(0, 10))
    for start, offset in (("start", 0), ("end", 10), ("8", 8)):
        planner = Planner(reading, "begun", start=start)
        assert dict(planner.reader.initialOffset())["begun"] == offset
        planner.reader.stop()
    with pytest.raises(BadOptionError, match="a query has no end, but option end is 9"):
        Planner(reading, "begun", end="9")


def test_a_micro_batch_takes_what_it_may(reading: Reading, client: SyncClient) -> None:
    client.ensure("limited")
    client.publish_many("limited", numbers(0, 10))
    planner = Planner(reading, "limited", maxMessages="4", partitions="3")
    assert [planner.latest(at) for at in (0, 4, 8, 10)] == [4, 8, 10, 10]
    assert planner.latest(0, ReadAllAvailable()) == 10
    assert planner.latest(0, ReadMaxRows(7)) == 7
    assert dict(planner.reader.reportLatestOffset() or {})["limited"] == 10
    assert planner.rows(2, 9) == numbers(2, 9)
    assert planner.rows(9, 9) == []
    assert isinstance(planner.reader, SupportsTriggerAvailableNow)
    planner.reader.prepareForTriggerAvailableNow()
    client.publish_many("limited", numbers(10, 20))
    assert [planner.latest(at) for at in (7, 10)] == [10, 10]
    assert planner.latest(0, ReadAllAvailable()) == 10
    planner.reader.stop()


def test_a_query_tells_when_messages_are_gone_or_the_stream_is_another(
    reading: Reading, client: SyncClient
) -> None:
    client.ensure("lossy")
    client.publish_many("lossy", numbers(0, 20))
    client.admin("purge", name="lossy", before=15)
    strict = Planner(reading, "lossy")
    with pytest.raises(MissingMessagesError, match="messages 10 to 14 were deleted"):
        strict.rows(10, 20)
    lenient = Planner(reading, "lossy", missing="skip", maxMessages="2")
    assert lenient.latest(10) == 17  # those that are gone do not count
    assert lenient.rows(10, 17) == numbers(15, 17)
    assert lenient.rows(3, 10) == []
    with pytest.raises(StreamSourceError, match="the checkpoint is of other"):
        strict.reader.latestOffset({"other": 3}, ReadAllAvailable())
    before = dict(strict.reader.reportLatestOffset() or {})
    client.admin("delete", name="lossy")
    client.ensure("lossy")
    with pytest.raises(StreamSourceError, match="read up to 20, but the stream ends at 0"):
        strict.latest(20)
    with pytest.raises(StreamSourceError, match="there are messages up to 20, but the stream ends"):
        strict.rows(10, 20)
    client.publish_many("lossy", numbers(0, 60))
    with pytest.raises(StreamSourceError, match="STREAM_REPLACED"):
        strict.reader.latestOffset(before, ReadAllAvailable())
    with pytest.raises(StreamSourceError, match="STREAM_REPLACED"):
        strict.reader.partitions(before, {**before, "lossy": 30})
    strict.reader.stop()
    lenient.reader.stop()


def test_a_query_finds_a_node_again_that_was_started_anew_elsewhere(
    reading: Reading, tmp_path: Path
) -> None:
    with served(tmp_path) as node:
        with connect_sync(data=tmp_path) as client:
            client.ensure("moving")
            client.publish_many("moving", numbers(0, 5))
        planner = Planner(reading, "moving", data=str(tmp_path), timeout="1")
        assert planner.latest(0) == 5
        node.stop()
        node.port = 0
        node.start()
        assert planner.latest(0) == 5
        assert planner.rows(0, 5) == numbers(0, 5)
        planner.reader.stop()


# ---------------------------------------------------------------- SQL


def test_a_temporary_view_reads_a_stream_as_it_was_when_it_was_first_read(
    spark: SparkSession, node: Served, client: SyncClient
) -> None:
    client.ensure("viewed")
    client.publish_many("viewed", [to_json({"customer": "ada", "amount": n}) for n in range(4)])
    create = (
        "CREATE OR REPLACE TEMPORARY VIEW viewed (customer STRING, amount INT, _offset BIGINT) USING railgun "
        f"OPTIONS (stream 'viewed', data '{node.data}', format 'json')"
    )
    sums = "SELECT max(customer), sum(amount), max(_offset) FROM viewed"
    spark.sql(create)
    assert spark.sql(sums).collect() == [("ada", 6, 3)]
    client.publish("viewed", to_json({"customer": "ada", "amount": 10}))
    assert spark.sql(sums).collect() == [("ada", 6, 3)]
    spark.sql(create)
    assert spark.sql(sums).collect() == [("ada", 16, 4)]
    spark.sql("DROP VIEW viewed")


def test_a_table_does_not_keep_its_options_and_says_so(
    spark: SparkSession, node: Served, client: SyncClient
) -> None:
    client.ensure("tabled")
    client.publish("tabled", "x")
    asked = f"stream = 'tabled', data = '{node.data}'"
    spark.sql(f"CREATE TABLE tabled USING railgun OPTIONS ({asked})")
    try:
        with pytest.raises(PySparkException) as error:
            spark.sql("SELECT * FROM tabled").collect()
        assert "keeps no options of tables" in told(error)
        counted = f"SELECT count(*) FROM tabled WITH ({asked})"
        assert spark.sql(counted).collect() == [(1,)]
        client.publish("tabled", "y")
        assert spark.sql(counted).collect() == [(2,)]
    finally:
        spark.sql("DROP TABLE tabled")
        warehouse = spark.conf.get("spark.sql.warehouse.dir") or ""
        with contextlib.suppress(OSError):  # as long as it is empty
            Path(warehouse.removeprefix("file:")).rmdir()
