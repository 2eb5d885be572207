"""The stream sink finishes what an older Railgun has begun, or says that it is in doubt."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.spark.stream_writing import (
    SECOND,
    Batch,
    Cut,
    Writing,
    finish,
    forget,
    left_behind,
    needs_spark,
    stored,
    texts,
)

from railgun.broker.clock import steady_us
from railgun.broker.streams import persistent
from railgun.client.retrying_client import RetryingClient
from railgun.client.sync import SyncClient
from railgun.sinks.old_staged_streams import delete_stream
from railgun.spark.streams import older as upgrade
from railgun.spark.streams.errors import InDoubtError
from railgun.spark.streams.older import digest, journal_name


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
