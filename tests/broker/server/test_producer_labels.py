"""Commits with labels on real nodes: what has a label that was committed is done, whatever happened since."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tests.broker.clustered import DEADLINE as PATIENCE
from tests.broker.clustered import clustered
from tests.broker.running import Process, node, run
from tests.broker.server.test_producers import STREAM, end_of, everything, refusal, staged

from railgun.client.client import Client, connect
from railgun.client.errors import StreamsError
from railgun.client.producer import Producer, Stage


async def query(client: Client, session: str = "run-1", lifetime: float | None = None) -> Producer:
    return await client.producer(STREAM, "query", session=session, lifetime=lifetime)


def test_sequences_follow_one_another_as_they_are_committed(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await query(client)
            stages = [await producer.open() for _ in range(4)]
            for piece in range(3):  # all at the same time, as tasks do
                for n, stage in enumerate(stages):
                    await stage.put([b"%d.%d" % (n, piece)])
            order = [stages[n] for n in (2, 0, 3, 1)]
            assert await producer.commit(order, label=0) == 12
            wanted = [b"%d.%d" % (n, piece) for n in (2, 0, 3, 1) for piece in range(3)]
            assert await everything(client) == wanted

    run(main())


def test_a_label_is_committed_once_for_as_long_as_there_is_the_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await query(client, lifetime=60.0)
            first = await staged(producer, b"a", b"b")
            assert await producer.commit([first], label=4, label_since=0) == 2
            again = await staged(producer, b"b", b"a")
            assert await producer.commit([again], label=4, label_since=0) == 0
            await client.admin("purge", name=STREAM)
            await running.again()
            running.ahead = 7 * 86_400.0
            assert running.server is not None
            await running.server.node.get_persistent(STREAM).retain()
            for session in ("run-1", "run-2"):
                producer = await query(client, session)
                assert producer.labels == [(0, 4)]
                again = await staged(producer, b"a", b"b")
                assert await producer.commit([again], label=3) == 0
            [told] = await client.admin("producers", name=STREAM)
            assert (told["labels"], told["session"], told["staged"]) == ([[0, 4]], "run-2", {})
            assert (await everything(client), await end_of(client)) == ([], 2)

    run(main())


def test_what_else_was_staged_for_a_label_goes_with_its_commit(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await query(client)
            loser, winner, late = [await producer.open(label=0) for _ in range(3)]
            await loser.put([b"speculative"])
            await winner.put([b"a"])
            assert await producer.commit([winner], label=0) == 1
            [told] = await client.admin("producers", name=STREAM)
            assert told["staged"] == {}
            assert await refusal(late.put([b"late"])) == "SEQUENCE_OVER"
            assert await refusal(producer.open(label=0)) == "SEQUENCE_OVER"
            assert await everything(client) == [b"a"]

    run(main())


def test_a_session_that_has_a_successor_is_fenced_for_good(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            old = await query(client, "run-1")
            lost = await staged(old, b"lost")
            new = await query(client, "run-2")
            assert (await query(client, "run-2")).epoch == new.epoch > old.epoch
            for _ in range(2):
                assert await refusal(old.commit([lost], label=0)) == "FENCED"
                assert await refusal(old.open()) == "FENCED"
                assert await refusal(query(client, "run-1")) == "FENCED"
                [told] = await client.admin("producers", name=STREAM)
                assert told["staged"] == {}
                await running.again()
            mine = await staged(await query(client, "run-2"), b"a")
            assert await new.commit([mine], label=0) == 1
            assert await old.commit([lost], label=0) == 0  # by whomever: it is done
            assert await everything(client) == [b"a"]

    run(main())


def test_bad_requests_of_labels_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await query(client)
            stage = await staged(producer, b"a")
            for call in (
                client.producer(STREAM, "query"),
                client.producer(STREAM, "query", 1, session="s"),
                client.producer(STREAM, "query", session="s", keep=[]),
                client.producer(STREAM, "query", session=""),
                producer.commit([stage], label=-1),
                producer.commit([stage], label=2, label_since=3),
                producer.commit([stage], label_since=3),
                client.admin(
                    "commit_sequences", name=STREAM, producer="query", epoch=producer.epoch,
                    counts={str(stage.sequence): 1}, order=[],
                ),
            ):  # fmt: skip
                assert await refusal(call) == "BAD_REQUEST"
            assert await producer.commit([stage]) == 1
            assert await refusal(producer.commit([stage], label=0)) == "SEQUENCE_OVER"

    run(main())


def test_a_node_that_is_killed_at_any_time_commits_a_label_once(tmp_path: Path) -> None:
    """Each attempt stages the same rows for other sequences; of all attempts of a label one is there."""

    async def main() -> None:
        chance, process = random.Random(7), Process(tmp_path)
        await process.start()
        try:
            wanted: list[bytes] = []
            for label in range(5):
                client = await connect(f"127.0.0.1:{process.port}", data=tmp_path, timeout=30.0)
                await client.ensure(STREAM)
                rows = [b"%d.%d" % (label, n) for n in range(200)]
                producer = await query(client, f"run-{label}")
                stage = await staged(producer, *rows, pieces=10)
                commit = asyncio.create_task(producer.commit([stage], 0.05, label=label))
                await asyncio.sleep(chance.random() * 0.02)
                await process.kill()
                await process.start()
                await asyncio.gather(commit, return_exceptions=True)  # whatever it was told
                for attempt in range(2):
                    producer = await query(client, f"run-{label}-{attempt}")
                    stage = await staged(producer, *rows, pieces=3)
                    await producer.commit([stage], 60.0, label=label)
                wanted += rows
                assert await everything(client) == wanted
                await client.close()
        finally:
            await process.kill()

    run(main(), deadline=120.0)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_label_is_committed_once_in_a_cluster_whose_master_goes(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, master = await cluster.serving(STREAM)
            producer = await query(client)
            rows = [b"%04d" % n * 100 for n in range(1_000)]
            assert await producer.commit([await staged(producer, b"a")], label=0) == 1
            stage = await staged(producer, *rows, pieces=20)
            commit = asyncio.create_task(producer.commit([stage], PATIENCE, label=1))
            await asyncio.sleep(0.01)
            await getattr(cluster, how)(master)
            await commit
            producer = await until_begun(client, "run-2")
            for label, again in ((1, rows), (0, [b"a"])):
                stage = await staged(producer, *again, pieces=5)
                assert await producer.commit([stage], PATIENCE, label=label) == 0
            assert await producer.commit([await staged(producer, b"z")], label=2) == 1
            assert await everything(client) == [b"a", *rows, b"z"]

    run(main(), deadline=4 * PATIENCE)


async def until_begun(client: Client, session: str) -> Producer:
    """Begin a session; for as long as that fails for a reason that may pass, again."""
    while True:
        try:
            return await query(client, session)
        except StreamsError as error:
            if not error.may_pass:
                raise


# ---------------------------------------------------------------- the bound of what is staged


def test_no_more_is_staged_than_a_stream_allows(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM, max_staged=10_000)
            producer = await query(client)
            stage = await staged(producer, bytes(6_000))
            other = await client.producer(STREAM, "other", 1)
            with pytest.raises(StreamsError) as error:
                await Stage(other, (await other.open()).sequence).put([bytes(6_000)])
            assert error.value.code == "STAGING_FULL"
            for part in (
                "6,",
                "1 producer",
                "'query'",
                "10,000",
                "--max-staged",
                "forget_producer",
            ):
                assert part in error.value.text
            await client.ensure(STREAM, "overwrite", max_staged=20_000)
            more = await staged(other, bytes(6_000))
            assert await producer.commit([stage], label=0) + await other.commit([more]) == 2
            for bad in (0, -1, 1.5, None, "much", 10**15):
                assert await refusal(client.ensure("bad", max_staged=bad)) == "BAD_SETTINGS"

    run(main())
