"""Commits of the stream sink that are interrupted, fenced or too old: rows come once, or are in doubt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql.types import StructType
from tests.spark.stream_writing import (
    PATIENCE,
    SECOND,
    Batch,
    Clock,
    Cut,
    left_behind,
    stored,
    texts,
)

from railgun.broker.protocol.producers import registry as rules
from railgun.client.errors import StreamsError
from railgun.client.retrying_client import RetryingClient
from railgun.client.sync import SyncClient
from railgun.spark.streams.commit import Target
from railgun.spark.streams.errors import InDoubtError, StreamSourceError
from railgun.spark.streams.source import StreamSource
from railgun.spark.streams.writer import StreamWriter
from railgun.testing.node import Served


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
