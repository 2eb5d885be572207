"""Streams and StreamSink against a real node: nothing lost, nothing doubled, whatever is interrupted."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from railgun import ConnectorError, Place, Streams, StreamSink
from railgun.client.sync import SyncClient, connect_sync
from railgun.flows.errors import LostOutputError, may_pass
from railgun.sinks import old_staged_streams as older
from railgun.sinks import streams as stream_sink
from railgun.sources import streams as stream_source
from railgun.testing.node import DEADLINE, Served, served


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "node") as made:
        yield made


@pytest.fixture
def client(node: Served) -> Iterator[SyncClient]:
    with connect_sync(data=node.data, timeout=DEADLINE) as made:
        yield made


def texts(client: SyncClient, stream: str) -> list[str]:
    """All messages of a stream."""
    count = client.admin("describe", name=stream)["end"]
    with client.subscribe(stream) as sub:
        return [sub.next(DEADLINE).text for _ in range(count)]


def read_some(reader: Any, most: int = 1000) -> Any:
    """The next items; waits until there are some."""
    end = time.monotonic() + DEADLINE
    while (items := reader.read(most, 0)) == []:
        assert time.monotonic() < end
        time.sleep(0.001)
    return items


def offset(reader: Any) -> int:
    """Where a reader stands: its position is an offset, with the identity of the stream where it is known."""
    position = reader.position
    return int(position["offset"]) if isinstance(position, dict) else int(position)


# ---------------------------------------------------------------- the source


def test_a_stream_is_read_whole_by_readers_that_move(node: Served, client: SyncClient) -> None:
    chance = Random(7)
    client.ensure("orders")
    for base in range(0, 5000, 500):
        client.publish_many("orders", [str(n) for n in range(base, base + 500)])
    source = Streams("orders", follow=False, data=node.data)
    assert source.bounded
    found: list[int] = []
    position = None
    while True:
        reader = source.open("orders", position)
        items = read_some(reader, chance.randrange(1, 900))
        position = json.loads(json.dumps(reader.position))
        reader.close()
        if items is None:
            break
        found += items
    assert found == list(range(5000))
    assert position["offset"] == 5000


def test_a_reader_follows_and_is_stopped_by_its_own_slowness(
    node: Served, client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_source, "READ_AHEAD_MESSAGES", 2000)
    monkeypatch.setattr(stream_source, "PREFETCH", 1000)
    client.ensure("orders")
    client.publish_many("orders", [str(n) for n in range(20_000)])
    reader = Streams("orders", data=node.data).open("orders", None)
    assert isinstance(reader, stream_source._Reader)
    found = list(read_some(reader))
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        assert reader._feed._queued <= 2000 + 1000
        time.sleep(0.01)
    while len(found) < 20_000:
        found += read_some(reader)
    assert reader.read(10, 0) == []
    client.publish("orders", "20000")
    found += read_some(reader)
    assert found == list(range(20_001))
    reader.close()


def test_a_node_that_is_gone_for_a_while_is_waited_for(node: Served, client: SyncClient) -> None:
    client.ensure("orders")
    client.publish_many("orders", ["0", "1"])
    reader = Streams("orders", data=node.data).open("orders", None)
    assert read_some(reader) == [0, 1]
    node.stop()
    assert reader.read(10, 0) == []
    node.start()
    client.publish("orders", "2", id="two")
    assert read_some(reader) == [2]
    assert offset(reader) == 3
    reader.close()


def test_formats(node: Served, client: SyncClient) -> None:
    client.ensure("orders")
    client.publish("orders", b'{"a":1}', id="one", headers={"h": "v"})

    def first(format: Any) -> Any:
        reader = Streams("orders", format=format, data=node.data).open("orders", None)
        try:
            [item] = read_some(reader)
        finally:
            reader.close()
        return item

    assert first("json") == {"a": 1}
    assert first("text") == '{"a":1}'
    assert first("bytes") == b'{"a":1}'
    message = first("message")
    assert (message.stream, message.offset, message.id) == ("orders", 0, b"one")
    assert (json.loads(message.headers), message.payload) == ({"h": "v"}, b'{"a":1}')
    with pytest.raises(ConnectorError, match=r"'orders'\), offset 0: .* is not msgpack"):
        first("msgpack")


def test_a_bad_message_is_named_by_its_offset(node: Served, client: SyncClient) -> None:
    client.ensure("orders")
    client.publish_many("orders", ["1", "2", "{"])
    reader = Streams("orders", data=node.data).open("orders", 1)
    with pytest.raises(ConnectorError, match="offset 2"):
        read_some(reader)
    assert offset(reader) == 1, "nothing was read"
    reader.close()


def test_what_was_deleted_before_it_was_read_is_an_error_or_skipped(
    node: Served, client: SyncClient
) -> None:
    client.ensure("orders")
    client.publish_many("orders", ["0", "1", "2"])
    client.admin("purge", name="orders")
    client.publish_many("orders", ["3", "4"])
    reader = Streams("orders", data=node.data).open("orders", 1)
    with pytest.raises(ConnectorError, match="messages 1 to 2 were deleted"):
        read_some(reader)
    reader.close()
    reader = Streams("orders", missing="skip", data=node.data).open("orders", 1)
    assert read_some(reader) == [3, 4]
    assert offset(reader) == 5
    reader.close()
    reader = Streams("orders", data=node.data).open("orders", None)
    assert read_some(reader) == [3, 4], "who begins at the start misses nothing"
    reader.close()


def test_patterns_and_the_end(node: Served, client: SyncClient) -> None:
    for name in ("orders.eu", "orders.us", "users", "_hidden.x"):
        client.ensure(name)
    client.ensure("orders.live", kind="ephemeral")
    source = Streams("orders.*", "users", data=node.data)
    assert not source.bounded
    assert set(source.partitions()) == {"users", "orders.eu", "orders.us"}
    assert set(Streams("*", follow=False, data=node.data).partitions()) == {
        *("orders.eu", "orders.us", "users")
    }
    client.publish("users", '"before"')
    reader = Streams("users", start="end", data=node.data).open("users", None)
    assert offset(reader) == 1
    client.publish("users", '"after"')
    assert read_some(reader) == ["after"]
    reader.close()


def test_a_stream_that_is_not_there(node: Served, client: SyncClient) -> None:
    reader = Streams("nothing", data=node.data).open("nothing", None)
    with pytest.raises(ConnectorError, match="NO_STREAM") as told:
        read_some(reader)
    assert not may_pass(told.value)
    reader.close()


def test_no_node_may_pass(tmp_path: Path) -> None:
    source = Streams("orders", data=tmp_path)
    with pytest.raises(ConnectorError, match="no node works") as told:
        source.open("orders", None)
    assert may_pass(told.value)


def test_ends_travel_with_the_address_of_the_node(node: Served, client: SyncClient) -> None:
    client.ensure("orders")
    client.publish("orders", "1")
    packed = cloudpickle.dumps((Streams("orders", data=node.data), StreamSink("o", data=node.data)))
    (node.data / "node.json").rename(node.data / "elsewhere.json")  # as on another machine
    source, sink = cloudpickle.loads(packed)
    reader = source.open("orders", None)
    assert read_some(reader) == [1]
    reader.close()
    writer = sink.open(Place("flow", "out", 0, 1))
    writer.write([1])
    writer.close()
    assert texts(client, "o") == ["1"]


# ---------------------------------------------------------------- the sink


@dataclass
class Point:
    x: int


def place(generation: int = 1, worker: int = 0, transactional: bool = True) -> Place:
    return Place("flow ü", "out/put", worker, generation, transactional=transactional)


def staged(client: SyncClient) -> list[str]:
    return [one["name"] for one in client.admin("list") if one["name"].startswith("_staged.")]


def test_at_least_once_publishes_as_items_come(node: Served, client: SyncClient) -> None:
    sink = StreamSink("totals", mode="at-least-once", data=node.data, max_age=3600.0)
    writer = sink.open(place())
    writer.write([{"a": 1}, Point(2)])
    writer.flush()
    assert texts(client, "totals") == ['{"a":1}', '{"x":2}']
    assert writer.prepare(1) is None  # type: ignore[attr-defined]
    writer.write(["rest"])
    writer.close()
    assert texts(client, "totals")[2:] == ['"rest"']
    assert client.admin("describe", name="totals")["settings"]["max_age"] == 3600.0
    assert staged(client) == []


def test_what_is_staged_is_seen_when_it_is_committed_and_once(
    node: Served, client: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_sink, "PIECE_BYTES", 1000)
    sink = StreamSink("totals", format="text", data=node.data)
    first, second = sink.open(place()), sink.open(place(worker=1))
    assert first.prepare(1) is None  # type: ignore[attr-defined]
    expected = [f"item {n} of the first" for n in range(500)]
    for at in range(0, 500, 100):
        first.write(expected[at : at + 100])
        first.flush()
    second.write(["of the second"])
    tokens = [json.loads(json.dumps(w.prepare(2))) for w in (first, second)]  # type: ignore[attr-defined]
    assert texts(client, "totals") == []
    first.write(["of the next snapshot"])
    for token in (*tokens, *tokens):
        sink.commit(token)
    assert texts(client, "totals") == [*expected, "of the second"]
    third = first.prepare(3)  # type: ignore[attr-defined]
    sink.commit(third)
    assert texts(client, "totals")[501:] == ["of the next snapshot"]
    second.write(["never prepared"])
    second.flush()
    for writer in (first, second):
        writer.close()
    assert staged(client) == []


class CrashError(Exception):
    pass


def staged_by_an_older_one(client: SyncClient, items: list[str]) -> dict[str, Any]:
    """The token of a snapshot of an older Railgun: what it holds lies in a stream of its own."""
    name = f"_staged.flow-out.0123456789ab.1.{uuid.uuid4().hex}"
    since = client.ensure("totals") and client.admin("describe", name="totals")["end"]
    client.ensure(name)
    for number, item in enumerate(items):
        client.publish_many(name, [item], id=f"/{number}")
    told = {"staged": name, "count": len(items), "target": "totals"}
    return {**told, "since": since, "time": time.time()}


@pytest.mark.parametrize("box", [60.0, 0.001])
@pytest.mark.parametrize("done", [0, 1, 3, 5])
def test_what_an_older_railgun_has_staged_is_recovered_once(
    node: Served, client: SyncClient, monkeypatch: pytest.MonkeyPatch, done: int, box: float
) -> None:
    sink = StreamSink("totals", format="text", data=node.data, id_box=box)
    client.ensure("totals", id_box=box)
    expected = [f"{n:0>50}" for n in range(5)]
    token = staged_by_an_older_one(client, expected)
    client.publish("totals", "by somebody else")
    publish, left = SyncClient.publish_soon, [done]

    def interrupted(self: SyncClient, *args: Any, **more: Any) -> Any:
        if not left[0]:
            raise CrashError
        left[0] -= 1
        return publish(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(SyncClient, "publish_soon", interrupted)
        if done == 5:
            patch.setattr(older, "delete_stream", lambda *args: (_ for _ in ()).throw(CrashError))
        with pytest.raises(CrashError):
            sink.commit(token)
    if box < 1:
        client.publish_many("totals", ["x"] * 3)  # time goes by, and the box forgets
    node.stop()
    node.start()
    sink.recover("flow ü", "out/put", 2, [token])
    assert [text for text in texts(client, "totals") if text.isdigit()] == expected
    assert staged(client) == []
    sink.commit(token)
    assert [text for text in texts(client, "totals") if text.isdigit()] == expected


def test_a_generation_begins_without_what_older_ones_have_staged(
    node: Served, client: SyncClient
) -> None:
    sink = StreamSink("totals", data=node.data)
    old, other = sink.open(place(1)), sink.open(Place("flow ü", "other", 0, 1, transactional=True))
    for writer in (old, other):
        writer.write([1])
    wanted, theirs = old.prepare(1), other.prepare(1)  # type: ignore[attr-defined]
    old.write([2])
    unwanted = old.prepare(2)  # type: ignore[attr-defined]
    sink.recover("flow ü", "out/put", 3, [wanted])
    assert texts(client, "totals") == ["1"]
    with pytest.raises(ConnectorError, match="epoch 1 is over"):
        sink.commit(unwanted)  # by a process that was given up for dead
    sink.commit(wanted)  # so is this, but there is nothing left to do
    old.write([3])
    with pytest.raises(ConnectorError, match="FENCED"):
        old.prepare(3)  # type: ignore[attr-defined]
    present = sink.open(place(3))
    present.write([4])
    sink.commit(present.prepare(4))  # type: ignore[attr-defined]
    sink.commit(theirs)
    assert texts(client, "totals") == ["1", "4", "1"]
    for writer in (old, present, other):
        writer.close()


def test_output_of_a_key_that_moved_comes_in_order_whoever_staged_first(
    node: Served, client: SyncClient
) -> None:
    """Sequences are committed in the order of rescales, which need not be the order in which they were given."""
    sink = StreamSink("totals", format="text", data=node.data)
    writers = [sink.open(place(worker=worker)) for worker in range(3)]
    for at in (2, 1, 0):  # the last owner of the key stages first
        if at:
            writers[at].keys_arrive(at)  # type: ignore[attr-defined]
        writers[at].write([f"{at} a", f"{at} b"])
        writers[at].flush()
    tokens = [writer.prepare(1) for writer in writers]  # type: ignore[attr-defined]
    sink.commit_all([tokens[1], tokens[2], tokens[0]])
    assert texts(client, "totals") == ["0 a", "0 b", "1 a", "1 b", "2 a", "2 b"]
    for writer in writers:
        writer.close()


def test_two_jobs_of_one_flow_do_not_touch_each_other(node: Served, client: SyncClient) -> None:
    """They have directories of their own for their snapshots: one restarts while the other is about to commit."""
    sink = StreamSink("totals", format="text", data=node.data)
    eu, us = (Place("flow", "out", 0, 1, transactional=True, store=store) for store in ("eu", "us"))
    writer = sink.open(eu)
    writer.write(["of eu"] * 1000)
    token = writer.prepare(1)  # type: ignore[attr-defined]
    sink.recover_at(replace(us, generation=7), [])
    sink.commit(token)
    assert texts(client, "totals") == ["of eu"] * 1000
    writer.close()


def test_going_back_to_an_older_snapshot_and_forth_loses_nothing_in_silence(
    node: Served, client: SyncClient
) -> None:
    sink = StreamSink("totals", format="text", data=node.data)
    writer = sink.open(place(1))
    writer.write(["first"])
    first = writer.prepare(1)  # type: ignore[attr-defined]
    sink.commit(first)
    writer.write(["second"])
    second = writer.prepare(2)  # type: ignore[attr-defined]
    writer.close()  # killed before it was committed
    sink.recover("flow ü", "out/put", 2, [first])  # from the older one
    assert texts(client, "totals") == ["first"]
    with pytest.raises(ConnectorError, match="LOST_OUTPUT"):
        sink.recover("flow ü", "out/put", 3, [second])
    sink.recover("flow ü", "out/put", 4, [first])
    assert texts(client, "totals") == ["first"]


@pytest.mark.parametrize("trouble", ["purge", "restart", "both"])
def test_a_commit_is_repeated_after_its_stream_was_emptied(
    node: Served, client: SyncClient, trouble: str
) -> None:
    sink = StreamSink("totals", format="text", data=node.data, id_box=0.001)
    writer = sink.open(place(1))
    writer.write([str(n) for n in range(2000)])
    token = writer.prepare(1)  # type: ignore[attr-defined]
    writer.close()
    sink.commit(token)
    if trouble != "restart":
        client.admin("purge", name="totals", before=1200)
    if trouble != "purge":
        node.stop()
        node.start()
    sink.commit(token)
    sink.recover("flow ü", "out/put", 2, [token])
    assert client.admin("describe", name="totals")["end"] == 2000


def test_the_node_restarts_while_messages_are_staged(node: Served, client: SyncClient) -> None:
    sink = StreamSink("totals", format="text", data=node.data)
    writer = sink.open(place())
    writer.write([str(n) for n in range(1000)])
    writer.flush()
    node.stop()
    writer.write([str(n) for n in range(1000, 2000)])
    writer.flush()
    node.start()
    token = writer.prepare(1)  # type: ignore[attr-defined]
    sink.commit(token)
    assert texts(client, "totals") == [str(n) for n in range(2000)]
    writer.close()


def test_what_cannot_be_published_is_refused(node: Served, client: SyncClient) -> None:
    with pytest.raises(ConnectorError, match="exactly-once"):
        StreamSink("totals", mode="perhaps")  # type: ignore[arg-type]
    with pytest.raises(ConnectorError, match="'json', 'text', 'bytes' or 'msgpack'"):
        StreamSink("totals", format="xml")  # type: ignore[arg-type]
    with pytest.raises(ConnectorError, match="BAD_SETTINGS"):
        StreamSink("totals", data=node.data, maximum=1).open(place())
    client.ensure("live", kind="ephemeral")
    with pytest.raises(ConnectorError, match="ephemeral"):
        StreamSink("live", data=node.data).open(place())
    writer = StreamSink("totals", format="bytes", data=node.data).open(place())
    with pytest.raises(ConnectorError, match=r"cannot publish the int 7 as bytes"):
        writer.write([b"good", 7])
    writer.close()
    assert texts(client, "totals") == []


def staged_by(sink: StreamSink, place: Place, snapshot: int, *items: Any) -> Any:
    writer = sink.open(place)
    writer.write(items)
    token = writer.prepare(snapshot)  # type: ignore[attr-defined]
    writer.close()
    return json.loads(json.dumps(token))


def test_a_snapshot_of_another_job_is_taken_though_that_one_has_gone_on(
    node: Served, client: SyncClient
) -> None:
    sink = StreamSink("out", data=node.data)
    one = Place("demo", "out", 0, 1, transactional=True, store="1111")
    other = Place("demo", "out", 0, 1, transactional=True, store="2222")
    token = staged_by(sink, one, 1, "a")
    sink.recover_at(replace(one, generation=2), [token])  # it goes on, in a later generation
    sink.recover_at(other, [token])  # --from the snapshot of the first
    assert texts(client, "out") == ['"a"']
    token = staged_by(sink, replace(one, generation=2), 2, "b")
    sink.recover_at(replace(one, generation=3), [])  # it went back, and has dropped that
    with pytest.raises(LostOutputError, match="LOST_OUTPUT") as lost:
        sink.recover_at(replace(other, generation=2), [token])
    assert not may_pass(lost.value)
    assert (
        "Begin with a later snapshot, or drop the output of this sink: --drop-state out (in"
        in str(lost.value)
    )
    older = {name: value for name, value in token.items() if name != "step"}
    with pytest.raises(LostOutputError, match="--drop-state STEP"):
        sink.recover_at(replace(other, generation=2), [older])
    assert texts(client, "out") == ['"a"']


def test_a_token_of_a_producer_that_was_forgotten_is_lost_output(
    node: Served, client: SyncClient
) -> None:
    sink = StreamSink("out", data=node.data)
    place = Place("demo", "out", 0, 1, transactional=True, store="1111")
    other = replace(place, store="2222")
    token = staged_by(sink, place, 1, "lost")
    client.admin("forget_producer", name="out", producer="1111/demo/out")
    attempts: list[Callable[[], None]] = [
        lambda: sink.commit(token),
        lambda: sink.recover_at(other, [token]),
        lambda: sink.recover_at(replace(place, generation=2), [token]),
    ]
    for attempt in attempts:
        with pytest.raises(LostOutputError, match="--drop-state out"):
            attempt()
    later = replace(place, generation=3)
    sink.recover_at(later, [])
    sink.commit(staged_by(sink, later, 2, "kept"))
    with pytest.raises(LostOutputError):
        sink.recover_at(replace(place, generation=4), [token])
    assert texts(client, "out") == ['"kept"']


def test_a_token_of_a_stream_that_was_made_anew_is_lost_output(
    node: Served, client: SyncClient
) -> None:
    """The new stream gives the same sequences again: by them alone, other output would be taken for this."""
    sink = StreamSink("out", data=node.data)
    place = Place("demo", "out", 0, 1, transactional=True, store="1111")
    token = staged_by(sink, place, 1, "a")
    client.admin("delete", name="out")
    client.ensure("out")
    new = staged_by(sink, place, 1, "b")
    assert new["parts"] == token["parts"]
    attempts: list[Callable[[], None]] = [
        lambda: sink.commit(token),
        lambda: sink.recover_at(replace(place, generation=2), [token]),
        lambda: sink.recover_at(replace(place, generation=2, store="2222"), [token]),
    ]
    for attempt in attempts:
        with pytest.raises(ConnectorError, match="was deleted and made anew") as lost:
            attempt()
        assert not may_pass(lost.value)
        assert "--drop-state out (in Python: drop={'out'})" in str(lost.value)
    sink.commit(new)
    assert texts(client, "out") == ['"b"']
