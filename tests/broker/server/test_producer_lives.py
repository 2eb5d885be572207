"""Producers that are forgotten, sequences that are dropped, puts that are cancelled, and what stays staged for long."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.broker.clustered import DEADLINE as PATIENCE
from tests.broker.clustered import clustered, until
from tests.broker.running import Running, node, run
from tests.broker.server.test_producers import STREAM, everything, refusal, staged

from railgun.broker.log.log import LogConfig
from railgun.broker.settings import PRODUCER
from railgun.broker.streams import node as nodes
from railgun.broker.streams import producing
from railgun.broker.streams.groups import ProducerNote
from railgun.broker.streams.persistent import Persistent
from railgun.client.client import Client
from railgun.client.errors import StreamsError
from railgun.client.producer import TRANSACTION_S


def stream_of(running: Running, name: str = STREAM) -> Persistent:
    assert running.server is not None
    return running.server.node.get_persistent(name)


async def forget_idle_producers(running: Running) -> None:
    """Let all producers with a lifetime be forgotten."""
    running.ahead += 2 * TRANSACTION_S
    await stream_of(running).retain()


# ---------------------------------------------------------------- producers that are forgotten


@pytest.mark.parametrize("restarts", [False, True])
def test_a_transaction_whose_producer_was_forgotten_fails(tmp_path: Path, restarts: bool) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)

            async def too_long() -> None:
                async with client.transaction(STREAM) as late:
                    await late.put_all([b"lost 1", b"lost 2"])
                    await forget_idle_producers(running)
                    assert await client.admin("producers", name=STREAM) == []
                    if restarts:
                        await running.again()
                    async with client.transaction(STREAM) as other:
                        await other.put(b"kept")

            assert await refusal(too_long()) == "LOST_OUTPUT"
            assert await everything(client) == [b"kept"]

    run(main())


def test_a_transaction_does_not_touch_what_its_client_has_staged_since(tmp_path: Path) -> None:
    """Its producer is forgotten, and begun anew by another transaction, which is under way."""

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            opened, ended = asyncio.Event(), asyncio.Event()

            async def other() -> None:
                async with client.transaction(STREAM) as transaction:
                    await transaction.put(b"kept")
                    opened.set()
                    await ended.wait()

            async def too_long() -> None:
                async with client.transaction(STREAM) as late:
                    await late.put(b"lost")
                    await forget_idle_producers(running)
                    going_on.append(asyncio.create_task(other()))
                    await opened.wait()
                    assert await refusal(late.put(b"more")) == "NO_PRODUCER"
                    raise ZeroDivisionError  # so that it is dropped

            going_on: list[asyncio.Task[None]] = []
            with pytest.raises(ZeroDivisionError):
                await too_long()
            ended.set()
            await going_on[0]
            assert await everything(client) == [b"kept"]

    run(main())


def test_a_sequence_is_not_given_again_to_a_producer_that_begins_anew(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            given: set[int] = set()
            for turn in range(4):
                producer = await client.producer(STREAM, "flow", 1)
                done, open_ = await staged(producer, b"a"), await staged(producer, b"b")
                assert not given & {done.sequence, open_.sequence}
                for sequence in given:
                    assert await refusal(producer.commit({sequence: 1})) == "LOST_OUTPUT"
                given |= {done.sequence, open_.sequence}
                assert await producer.commit([done]) == 1
                await client.admin("forget_producer", name=STREAM, producer="flow")
                if turn % 2:
                    await running.again()
            assert await everything(client) == [b"a"] * 4

    run(main())


def test_notes_of_an_older_version_are_loaded(tmp_path: Path) -> None:
    """They do not say which sequences the stream has given."""

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            gone = await client.producer(STREAM, "gone", 1)
            lost, other = await staged(gone, b"lost"), await client.producer(STREAM, "flow", 1)
            done, waiting = await staged(other, b"done"), await staged(other, b"waiting")
            await other.commit([done])
            await client.admin("forget_producer", name=STREAM, producer="gone")
            stream = stream_of(running)
            kept = await stream.perform(stream.group_log, stream.group_log.load)
            older: dict[str, Any] = {}
            for name in (PRODUCER, PRODUCER + "flow"):
                note = kept[name]
                assert isinstance(note, ProducerNote)
                older[name] = dict(note.told)
            del older[PRODUCER]["sequences"]
            for name in ("first", "finished"):
                del older[PRODUCER + "flow"][name]
            written = asyncio.get_running_loop().create_future()
            stream.keep(
                [(n, ProducerNote(one).pack()) for n, one in older.items()], written.set_result
            )
            await written
            await running.again()
            again = await client.producer(STREAM, "gone", 1)
            assert await refusal(again.commit([lost])) == "LOST_OUTPUT"
            assert await again.commit([await staged(again, b"new")]) == 1
            assert await other.commit([done, waiting]) == 1
            assert await everything(client) == [b"done", b"new", b"waiting"]

    run(main())


def test_a_cluster_gives_no_sequence_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, master = await cluster.serving(STREAM)
            old = await client.producer(STREAM, "flow", 1)
            stage = await staged(old, b"lost")
            await client.admin("forget_producer", name=STREAM, producer="flow")
            await cluster.kill(master)
            new = await client.producer(STREAM, "flow", 1)
            assert await new.commit([await staged(new, b"kept")], timeout=PATIENCE) == 1
            assert await refusal(new.commit([stage])) == "LOST_OUTPUT"
            assert await everything(client) == [b"kept"]

    run(main(), deadline=4 * PATIENCE)


# ---------------------------------------------------------------- what is dropped


async def abort(client: Client, payload: bytes) -> None:
    """Begin a transaction, and drop it."""
    with contextlib.suppress(ZeroDivisionError):
        async with client.transaction(STREAM) as transaction:
            await transaction.put(payload)
            raise ZeroDivisionError


async def bytes_staged(client: Client) -> int:
    return sum(one["staged_bytes"] for one in await client.admin("producers", name=STREAM))


def test_dropped_transactions_do_not_come_back_with_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM, max_staged=100_000)
            pinned = await staged(await client.producer(STREAM, "flow", 1), b"pinned")
            for turn in range(12):
                await abort(client, bytes(20_000))
                if turn % 3:
                    await client.publish_many(STREAM, [b"between"], atomic=True)
                if turn % 2:
                    await running.again()
            assert await bytes_staged(client) < 1_000
            told = {one["name"]: one for one in await client.admin("producers", name=STREAM)}
            assert told["flow"]["staged"] == {str(pinned.sequence): 1}
            assert await client.publish_many(STREAM, [bytes(50_000)], atomic=True) == [8]

    run(main())


def test_what_could_not_be_dropped_is_dropped_with_the_next_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            asked = client.admin

            async def lost(call: str, *more: Any, **arguments: Any) -> Any:
                if call == "drop_sequences":
                    raise StreamsError("CONNECTION_LOST", "it is gone")
                return await asked(call, *more, **arguments)

            monkeypatch.setattr(client, "admin", lost)
            await abort(client, bytes(20_000))
            assert await bytes_staged(client) > 20_000
            await client.publish_many(STREAM, [b"a"], atomic=True)
            monkeypatch.undo()
            await client.publish_many(STREAM, [b"b"], atomic=True)
            assert await bytes_staged(client) == 0
            assert await everything(client) == [b"a", b"b"]

    run(main())


def test_a_transaction_is_dropped_while_another_one_commits(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            for _ in range(20):
                commits = [client.publish_many(STREAM, [b"a"], atomic=True) for _ in range(3)]
                await asyncio.gather(*commits, abort(client, b"never"))
            assert await bytes_staged(client) == 0
            assert await everything(client) == [b"a"] * 60

    run(main())


def test_nothing_is_put_after_a_drop(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            stage = await staged(producer, b"a", b"b")
            await producer.drop([stage])
            for _ in range(2):
                async with asyncio.timeout(2.0):
                    assert await refusal(stage.put([b"c"])) == "SEQUENCE_OVER"
                stage.dropped = False  # of another process, which does not know: the node does
                await running.again()
            assert await refusal(producer.commit({stage.sequence: 2})) == "LOST_OUTPUT"

    run(main())


# ---------------------------------------------------------------- puts that are cancelled or refused


def test_a_cancelled_put_is_sent_and_those_behind_it_are_stored(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            stage = await producer.open()
            puts = [asyncio.create_task(stage.put([b"%d" % n])) for n in range(40)]
            await asyncio.sleep(0)
            for cancelled in puts[5:30:5]:
                cancelled.cancel()
            outcomes = await asyncio.gather(*puts, return_exceptions=True)
            errors = [one for one in outcomes if one is not None]
            assert len(errors) == 5
            assert all(isinstance(one, asyncio.CancelledError) for one in errors)
            await stage.put([b"last"])
            assert await producer.commit([stage]) == 41
            assert await everything(client) == [*(b"%d" % n for n in range(40)), b"last"]

    run(main(), deadline=10.0)


def test_a_put_that_was_cancelled_last_is_a_part_of_the_commit(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            stage = await producer.open()
            await staged(producer, b"x")
            log = stream_of(running, f"{STREAM}.staged")
            slow = asyncio.create_task(
                log.perform(log.log, partial(asyncio.run, asyncio.sleep(0.3)))
            )
            await asyncio.sleep(0.05)
            for n in range(10):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(stage.put([b"%d" % n]), 0.001)
            assert await producer.commit([stage]) == 10
            await slow

    run(main(), deadline=10.0)


def test_tasks_of_a_transaction_that_are_cancelled_do_not_harm_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            for turn in range(20):

                async def put(many: int) -> None:
                    for n in range(20):
                        await transaction.put(b"%d.%d" % (many, n))

                async with client.transaction(STREAM) as transaction:
                    tasks = [asyncio.create_task(put(many)) for many in range(5)]
                    await asyncio.sleep(0.001 * turn)
                    for task in tasks[:3]:
                        task.cancel()
                    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
                    assert outcomes[3:] == [None, None]
                    await transaction.put(b"last")
                assert len(transaction.offsets) >= 41

    run(main(), deadline=30.0)


def test_a_put_that_is_too_large_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            monkeypatch.setattr("railgun.client.publisher.MAX_PUBLISH_BYTES", 500_000)
            async with client.transaction(STREAM) as transaction:
                await transaction.put(b"a")
                puts = [
                    transaction.put(b"b"),
                    transaction.put(bytes(600_000)),
                    transaction.put(b"c"),
                ]
                outcomes = await asyncio.gather(*puts, return_exceptions=True)
                assert [getattr(one, "code", one) for one in outcomes] == [None, "TOO_LARGE", None]
                too_large = transaction.put_all([bytes(300_000), bytes(600_000)])
                assert await refusal(too_large) == "TOO_LARGE"
            assert await everything(client) == [b"a", b"b", b"c"]
            producer = await client.producer(STREAM, "flow", 1)
            stage = await producer.open()
            for wrong, code in (
                ([bytes(600_000)], "TOO_LARGE"),
                ([1], "BAD_REQUEST"),
                ([], "BAD_REQUEST"),
            ):
                assert await refusal(stage.put(wrong)) == code  # type: ignore[arg-type]
            assert stage.count == 0

    run(main(), deadline=10.0)


def test_puts_that_are_refused_do_not_count_nor_do_those_behind_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM, max_staged=10_000)
            producer = await client.producer(STREAM, "flow", 1)
            stage = await producer.open()
            await stage.put([b"a"])
            puts = [stage.put([bytes(size)]) for size in (20_000, 10, 10)]
            outcomes = await asyncio.gather(*puts, return_exceptions=True)
            assert [getattr(one, "code", one) for one in outcomes] == ["STAGING_FULL"] * 3
            assert stage.count == 1
            await stage.put([b"b"])
            assert await producer.commit([stage]) == 2
            assert await everything(client) == [b"a", b"b"]

    run(main(), deadline=10.0)


# ---------------------------------------------------------------- what stays staged for long


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the staging log be tidied after some hundred kilobytes."""
    monkeypatch.setattr(producing, "PURGE_BYTES", 200_000)
    monkeypatch.setattr(producing, "MOVED_BYTES", 50_000)
    monkeypatch.setattr(nodes, "STAGING_LOG", LogConfig(segment_bytes=100_000))


def is_small(staging: Persistent) -> bool:
    return staging.log.size < 800_000


@pytest.mark.usefixtures("small")
def test_what_stays_staged_does_not_hold_back_the_staging_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM, max_bytes=1_000_000)
            idle = [await client.producer(STREAM, f"idle {n}", 1) for n in range(3)]
            kept = [
                await staged(one, *(b"%d" % n * 900 for n in range(50)), pieces=5) for one in idle
            ]
            flow, wanted = (
                await client.producer(STREAM, "flow", 1),
                [b"%d" % n * 900 for n in range(50)],
            )
            for turn in range(30):
                await flow.commit([await staged(flow, bytes(90_000))])
                if turn == 15:
                    await running.again()
                if turn % 10 == 5:
                    await kept[0].put([b"+%d" % turn])
            staging = stream_of(running, f"{STREAM}.staged")
            await until(partial(is_small, staging), f"{staging.log.size} bytes are staged")
            await client.admin("purge", name=STREAM)
            await running.again()
            for one, stage in zip(idle, kept, strict=True):
                assert await one.commit([stage]) == stage.count
            found = await everything(client)
            assert found == [*wanted, b"+5", b"+15", b"+25", *wanted, *wanted]

    run(main())


@pytest.mark.usefixtures("small")
def test_a_node_that_ends_while_it_moves_what_is_staged_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is there, and what it is a copy of, too."""

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            idle, flow = [await client.producer(STREAM, name, 1) for name in ("idle", "flow")]
            kept = await staged(idle, b"a", b"b", pieces=2)

            async def nothing(*_: object) -> None:
                """Purge nothing."""

            with monkeypatch.context() as patch:
                patch.setattr(producing.Producing, "_purge", nothing)
                for _ in range(10):
                    await flow.commit([await staged(flow, bytes(90_000))])
                staging = stream_of(running, f"{STREAM}.staged")
                own = stream_of(running).producing._producers
                assert own is not None
                first = own.by_name["idle"].staged
                await until(lambda: first[kept.sequence].first > 2, "it was not moved")
                assert staging.log.first == 0
                await running.again()
                await kept.put([b"c"])
                assert (await client.producer(STREAM, "idle", 1)).staged == {kept.sequence: 3}
            assert await idle.commit([kept]) == 3
            assert (await everything(client))[-3:] == [b"a", b"b", b"c"]

    run(main())


@pytest.mark.usefixtures("small")
def test_a_cluster_moves_what_stays_staged(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, master = await cluster.serving(STREAM)
            idle, flow = [await client.producer(STREAM, name, 1) for name in ("idle", "flow")]
            payloads = [b"%d" % n * 900 for n in range(50)]
            kept = await staged(idle, *payloads, pieces=5)
            for turn in range(16):
                await flow.commit([await staged(flow, bytes(90_000))], timeout=PATIENCE)
                if turn == 8:
                    await cluster.kill(master)
            master_now = await cluster.ready(STREAM)
            staging = cluster.servers[master_now].node.get_persistent(f"{STREAM}.staged")
            await until(partial(is_small, staging), f"{staging.log.size} bytes are staged")
            assert await idle.commit([kept], timeout=PATIENCE) == 50
            assert (await everything(client))[-50:] == payloads
            await cluster.start(master)
            await cluster.in_step(STREAM)

    run(main(), deadline=6 * PATIENCE)


# ---------------------------------------------------------------- nothing at all


def test_a_commit_of_nothing_is_done(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            empty, full = await producer.open(), await staged(producer, b"a")
            assert await producer.commit([empty]) == 0
            assert await producer.commit([empty], label=3) == 0
            again = await client.producer(STREAM, "flow", 1)
            assert again.labels == [(3, 3)]
            assert await producer.commit([empty, full]) == 1
            assert await producer.commit([empty, full]) == 0

    run(main())


def test_an_empty_transaction_needs_a_stream(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("events", kind="ephemeral")
            for stream, code in (("nope", "NO_STREAM"), ("events", "NOT_PERSISTENT")):
                with pytest.raises(StreamsError) as caught:
                    async with client.transaction(stream):
                        pass
                assert caught.value.code == code

    run(main())


def test_bad_counts_and_long_names_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            for counts in ({"1": 1, "01": 2}, {"01": 1}, {"+1": 1}, {"١": 1}):
                asked: dict[str, Any] = {"producer": "flow", "epoch": 1, "counts": counts}
                with pytest.raises(StreamsError, match="counts is an object") as caught:
                    await client.admin("commit_sequences", name=STREAM, **asked)
                assert caught.value.code == "BAD_REQUEST"
            long = "n" * 300
            unknown: dict[str, Any] = {long: 1}
            for call in (
                client.admin("begin_producer", name=STREAM, producer=long, epoch=1),
                client.admin("describe", None, name=STREAM, **unknown),
                client.admin(long),
            ):
                with pytest.raises(StreamsError, match=r"'n+\.\.\.'") as caught:
                    await call
                assert caught.value.code == "BAD_REQUEST"
            assert producer.epoch == 1

    run(main())
