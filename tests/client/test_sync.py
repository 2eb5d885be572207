"""The client for programs without an event loop, and payloads that are not bytes: against a real node."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest

from railgun.client import payloads
from railgun.client.errors import DuplicateIdError, NoAnswerError, NoNodeError, StreamsError
from railgun.client.sync import SyncClient, connect_sync
from railgun.testing.node import DEADLINE, served


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SyncClient]:
    with served(tmp_path), connect_sync(data=tmp_path, timeout=DEADLINE) as made:
        yield made


def test_publish_and_consume(client: SyncClient) -> None:
    assert client.ensure("orders")["result"] == "CREATED"
    assert client.publish("orders", "first", id="a", headers={"from": "here"}) == 0
    assert client.publish_many("orders", [b"%d" % n for n in range(2500)]) == [*range(1, 2501)]
    assert client.publish_soon("orders", ["last"]).result(DEADLINE) == [2501]
    with pytest.raises(DuplicateIdError) as told:
        client.publish("orders", "again", id="a")
    assert told.value.offset == 0
    with client.subscribe("orders", group="g", prefetch=5000) as sub:
        first = sub.next(DEADLINE)
        assert (first.text, first.id, first.headers) == ("first", b"a", {"from": "here"})
        first.ack()
        found = [sub.next(DEADLINE) for _ in range(2501)]
        assert [m.offset for m in found] == [*range(1, 2502)]
        sub.ack_all(found[:-1])
        found[-1].nack(reason="not now")
        again = sub.next(DEADLINE)
        assert (again.offset, again.delivery) == (2501, 2)
        again.in_progress()
        again.ack()
        sub.flush(DEADLINE)
        with pytest.raises(TimeoutError):
            sub.next(0.05)
    assert client.admin("group", name="orders", group="g")["lag"] == 0


def test_messages_are_published_all_together_or_not_at_all(client: SyncClient) -> None:
    client.ensure("orders")
    assert client.publish_many("orders", ["a", "b"], atomic=True) == [0, 1]
    with client.transaction("orders") as together:
        together.put("c")
        together.put_all(["d", b"e"])
        assert client.admin("describe", name="orders")["end"] == 2
    assert list(together.offsets) == [2, 3, 4]
    with contextlib.suppress(ZeroDivisionError), client.transaction("orders") as together:
        together.put("never")
        raise ZeroDivisionError
    with pytest.raises(StreamsError, match="has ended"):
        together.put("late")
    with pytest.raises(StreamsError, match="NO_STREAM"), client.transaction("none") as together:
        together.put("x")
    assert client.admin("describe", name="orders")["end"] == 5


def test_records_are_read_from_where_one_wants_to(client: SyncClient) -> None:
    client.ensure("orders")
    client.publish_many("orders", [b"%d" % n for n in range(1000)])
    client.publish_many("orders", [b"%d" % n for n in range(1000, 1500)])
    reader = client.subscribe("orders", start=700)
    found: list[bytes] = []
    while len(found) < 800:
        records = reader.records(DEADLINE)
        assert records.base == 700 + len(found)
        found += records.payloads()
        assert reader.inner.position == 700 + len(found)
    assert found == [b"%d" % n for n in range(700, 1500)]
    grouped = client.subscribe("orders", group="g")
    with pytest.raises(StreamsError, match="NOT_A_READER"):
        grouped.records(DEADLINE)


def test_a_batch_that_is_taken_in_parts_gives_the_rest_as_records(client: SyncClient) -> None:
    client.ensure("orders")
    client.publish_many("orders", [b"%d" % n for n in range(10)], ids=[f"i{n}" for n in range(10)])
    reader = client.subscribe("orders")
    assert [m.offset for m in reader.batch(3, DEADLINE)] == [0, 1, 2]
    records = reader.records(DEADLINE)
    assert (records.base, records.count, records.id(0)) == (3, 7, b"i3")


def test_messages_of_an_exclusive_group_come_one_by_one(client: SyncClient) -> None:
    client.ensure("orders")
    client.publish_many("orders", ["a", "b", "c"])
    sub = client.subscribe("orders", group="g", exclusive=True)
    first = sub.next(DEADLINE)
    first.nack()
    found = [sub.next(DEADLINE) for _ in range(3)]
    assert found[0].delivery == 2
    assert [m.text for m in found] == ["a", "b", "c"]


def test_request_and_respond(client: SyncClient) -> None:
    client.ensure("ask", kind="ephemeral")
    with pytest.raises(NoAnswerError, match="NO_CONSUMERS"):
        client.request("ask", "anyone?", timeout=DEADLINE)
    sub = client.subscribe("ask")

    def answer() -> None:
        for message in sub:
            message.respond(message.text.upper())

    thread = threading.Thread(target=answer)
    thread.start()
    assert client.request("ask", "hello", timeout=DEADLINE) == b"HELLO"
    sub.close()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def test_many_threads_share_a_client(client: SyncClient) -> None:
    client.ensure("orders")
    offsets: list[int] = []

    def work() -> None:
        offsets.extend(client.publish("orders", "x") for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert sorted(offsets) == list(range(400))


def test_closed_twice_and_used_after_that(client: SyncClient) -> None:
    client.close()
    client.close()
    with pytest.raises(StreamsError):
        client.publish("orders", "x")


def test_no_node() -> None:
    before = set(threading.enumerate())
    with pytest.raises(NoNodeError):
        connect_sync("127.0.0.1:1", secret="00", timeout=0.2)
    assert not [one for one in set(threading.enumerate()) - before if one.name == "railgun-client"]


def test_payloads_of_all_kinds(client: SyncClient) -> None:
    client.ensure("orders")
    table = pyarrow.table({"key": ["a", "b"], "n": [1, 2]})
    client.publish("orders", payloads.to_json({"ä": [1, None]}))
    client.publish("orders", payloads.to_msgpack({"raw": b"\x00", "n": 1}))
    client.publish("orders", payloads.to_arrow(table))
    client.publish("orders", b"\xc1 neither")
    sub = client.subscribe("orders")
    json, msgpack, arrow, neither = (sub.next(DEADLINE) for _ in range(4))
    assert json.json() == {"ä": [1, None]}
    assert msgpack.msgpack() == {"raw": b"\x00", "n": 1}
    assert arrow.arrow().equals(table)
    for read in (neither.json, neither.msgpack, neither.arrow):
        with pytest.raises(payloads.PayloadError, match="neither"):
            read()


@pytest.mark.parametrize("make", [payloads.to_json, payloads.to_msgpack, payloads.to_arrow])
def test_what_cannot_be_a_payload_is_refused(make: object) -> None:
    with pytest.raises(payloads.PayloadError):
        make(object())  # type: ignore[operator]
