"""Producers on real nodes: what is staged is unseen, what is committed is there once, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.broker.clustered import DEADLINE as PATIENCE
from tests.broker.clustered import Clustered, clustered, until
from tests.broker.refusing import shimmed
from tests.broker.running import Process, node, run
from verification.faults.shim import Orders

from railgun.broker.errors import NoMasterError, NoSpaceError
from railgun.broker.log.log import StreamLog
from railgun.client.checks import BadValueError
from railgun.client.client import Client, connect
from railgun.client.errors import StreamsError
from railgun.client.producer import TRANSACTION_S, Producer, Stage
from railgun.transport.records import CONTINUES, head

STREAM = "totals"


async def staged(producer: Producer, *payloads: bytes, pieces: int = 1) -> Stage:
    """Stage messages, each piece in a batch of its own."""
    stage = await producer.open()
    each = max(1, len(payloads) // pieces)
    for at in range(0, len(payloads), each):
        await stage.put(payloads[at : at + each])
    return stage


async def end_of(client: Client, stream: str = STREAM) -> int:
    return int((await client.admin("describe", name=stream))["end"])


async def everything(client: Client, stream: str = STREAM) -> list[bytes]:
    """All messages of a stream."""
    told = await client.admin("describe", name=stream)
    found: list[bytes] = []
    if told["first"] < told["end"]:
        async with await client.subscribe(stream, start=told["first"]) as reader:
            while len(found) < told["end"] - told["first"]:
                found.append((await reader.next()).payload)
    return found


async def refusal(call: object) -> str:
    """The code that a call is refused with."""
    with pytest.raises(StreamsError) as caught:
        await call  # type: ignore[misc]
    return caught.value.code


def test_what_is_staged_is_seen_when_it_is_committed(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            await client.publish(STREAM, b"before")
            producer = await client.producer(STREAM, "flow", 1)
            one = await staged(producer, b"a", b"b", b"c", pieces=3)
            two = await staged(producer, b"d")
            assert await end_of(client) == 1
            await client.publish(STREAM, b"between")
            assert await producer.commit([one, two]) == 4
            assert await producer.commit([one, two]) == 0
            assert await everything(client) == [b"before", b"between", b"a", b"b", b"c", b"d"]
            [told] = await client.admin("producers", name=STREAM)
            assert (told["name"], told["epoch"], told["staged"]) == ("flow", 1, {})

    run(main())


def test_messages_come_in_the_order_in_which_sequences_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer, other = [await client.producer(STREAM, name, 1) for name in ("flow", "other")]
            stages = [await producer.open() for _ in range(3)]
            elsewhere = await other.open()
            for n in range(4):  # pieces of all of them lie between one another
                for at, stage in enumerate(stages):
                    await stage.put([b"%d.%d" % (at, n), b"%d.%d+" % (at, n)])
                await elsewhere.put([b"other %d" % n])
            await producer.commit([stages[2], stages[0], stages[1]])
            await other.commit([elsewhere])
            wanted = [
                b"%d.%d%s" % (at, n, more)
                for at in (2, 0, 1)
                for n in range(4)
                for more in (b"", b"+")
            ]
            assert await everything(client) == [*wanted, *(b"other %d" % n for n in range(4))]

    run(main())


def test_a_commit_is_one_unit_in_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            stage = await staged(producer, b"a", b"b", b"c", pieces=3)
            await producer.commit([stage])
            assert running.server is not None
            log = running.server.node.get_persistent(STREAM).log
            heads = [head(batch) for batch in log.read(0)]
            assert [bool(one.flags & CONTINUES) for one in heads] == [True, True, False]
            assert (heads[-1].producer, heads[-1].number) == (producer.number, 1)

    run(main())


def test_nobody_sees_where_it_is_staged(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            await staged(producer, b"a")
            hidden = f"{STREAM}.staged"
            assert [one["name"] for one in await client.admin("list")] == [STREAM]
            for call in (
                client.publish(hidden, b"x"),
                client.subscribe(hidden),
                client.ensure(hidden),
                client.admin("describe", name=hidden),
                client.admin("delete", name=hidden),
            ):
                assert await refusal(call) == "NO_STREAM"
            await client.admin("delete", name=STREAM)
            assert running.server is not None
            assert not running.server.node.streams

    run(main())


def test_restarts_forget_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            done, waiting = await staged(producer, b"a"), await staged(producer, b"b", b"c")
            await producer.commit([done])
            await running.again()
            assert await producer.commit([done]) == 0
            later = await producer.open()
            assert later.sequence > waiting.sequence
            assert await producer.commit([waiting]) == 2
            assert await refusal(client.producer(STREAM, "flow", 0)) == "FENCED"
            await client.admin("purge", name=STREAM)
            await running.again()
            assert await producer.commit([done, waiting]) == 0
            assert (await everything(client), await end_of(client)) == ([], 3)

    run(main())


def test_the_next_epoch_fences_commits_and_drops(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            old = await client.producer(STREAM, "flow", 1)
            kept, dropped = await staged(old, b"a"), await staged(old, b"b")
            new = await client.producer(STREAM, "flow", 2, keep=[kept.sequence])
            assert new.staged == {kept.sequence: 1}
            assert await refusal(old.open()) == "FENCED"
            assert await refusal(old.commit([kept])) == "FENCED"
            assert await refusal(kept.put([b"more"])) == "FENCED"
            assert await new.commit({kept.sequence: 1}) == 1
            for _ in range(2):
                assert await refusal(new.commit({dropped.sequence: 1})) == "LOST_OUTPUT"
                await running.again()
            assert await everything(client) == [b"a"]

    run(main())


def test_a_transaction_is_seen_all_together_or_not_at_all(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure(STREAM)
            async with client.transaction(STREAM) as transaction:
                await transaction.put(b"a")
                await transaction.put_all([b"b", "c"])
                assert await end_of(other) == 0
            assert list(transaction.offsets) == [0, 1, 2]
            with contextlib.suppress(ZeroDivisionError):
                async with client.transaction(STREAM) as transaction:
                    await transaction.put(b"never")
                    raise ZeroDivisionError
            [told] = await client.admin("producers", name=STREAM)
            assert told["staged"] == {}
            async with client.transaction(STREAM):
                pass
            many = [b"%d" % n * 50_000 for n in range(20)]
            assert await client.publish_many(STREAM, many, atomic=True) == list(range(3, 23))
            assert await client.publish_many(STREAM, [], atomic=True) == []
            code = await refusal(client.publish_many(STREAM, ["x"], ids=["i"], atomic=True))
            assert code == "BAD_REQUEST"
            assert await everything(client) == [b"a", b"b", b"c", *many]

    run(main())


def test_several_tasks_put_into_one_transaction(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            async with client.transaction(STREAM) as together:
                await asyncio.gather(*(together.put(b"%d" % n) for n in range(50)))
                left = asyncio.create_task(together.put_all(b"%d" % n for n in range(50, 60)))
                await asyncio.sleep(0)  # it has begun, and nobody waits for it
            assert list(together.offsets) == list(range(60))
            await left
            assert await everything(client) == [b"%d" % n for n in range(60)]
            for late in (together.put(b"late"), together.put_all([b"late"])):
                with pytest.raises(BadValueError, match="has ended"):
                    await late
            assert await end_of(client) == 60

    run(main())


def test_a_transaction_into_a_stream_that_was_made_anew_or_after_a_long_rest(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            for turn in range(3):
                await client.ensure(STREAM)
                assert await client.publish_many(STREAM, [b"a", b"b"], atomic=True) == [0, 1]
                async with client.transaction(STREAM) as together:
                    await together.put(b"%d" % turn)
                await client.delete(STREAM)
            await client.ensure(STREAM)
            await client.publish_many(STREAM, [b"a"], atomic=True)
            running.ahead = 2 * TRANSACTION_S
            assert running.server is not None
            await running.server.node.get_persistent(STREAM).retain()
            assert await client.admin("producers", name=STREAM) == []
            assert await client.publish_many(STREAM, [b"b"], atomic=True) == [1]

    run(main())


def test_a_producer_of_a_stream_that_was_deleted_writes_nothing_into_the_next_one(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            old = await client.producer(STREAM, "flow", 1)
            stage = await staged(old, b"old 1", b"old 2")
            await client.delete(STREAM)
            await client.ensure(STREAM)
            new = await client.producer(STREAM, "flow", 1)
            again = await staged(new, b"new 1", b"new 2")
            assert (new.number, again.sequence) == (old.number, stage.sequence)
            for call in (old.commit([stage]), old.open(), stage.put([b"old 3"]), old.drop([stage])):
                assert await refusal(call) == "STREAM_REPLACED"
            assert await new.commit([again]) == 2
            assert await everything(client) == [b"new 1", b"new 2"]

    run(main())


def test_a_client_that_went_away_is_forgotten_with_what_it_has_staged(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            gone = await client.producer(STREAM, "client", 0, lifetime=60.0)
            flow = await client.producer(STREAM, "flow", 1)
            lost, kept = await staged(gone, b"lost"), await staged(flow, b"kept")
            running.ahead = 120.0
            assert running.server is not None
            await running.server.node.get_persistent(STREAM).retain()
            assert await refusal(gone.commit([lost])) == "NO_PRODUCER"
            assert await flow.commit([kept]) == 1
            again = await client.producer(STREAM, "client", 0, lifetime=60.0)
            assert again.number > gone.number
            assert again.staged == {}

    run(main())


def test_what_is_on_its_way_is_found_when_all_is_read_anew(tmp_path: Path) -> None:
    """A piece waits for the disk while the notes are read anew, for another producer's sake."""

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            stage = await staged(producer, b"a")
            assert running.server is not None
            producing = running.server.node.get_persistent(STREAM).producing
            log = producing._staging
            assert log is not None
            slow = asyncio.create_task(log.perform(log.log, lambda: time.sleep(0.5)))
            await asyncio.sleep(0.05)
            put = asyncio.create_task(stage.put([b"b"]))
            await asyncio.sleep(0.1)
            producing.stop(NoMasterError("read anew"))
            again = await client.producer(STREAM, "flow", 1)
            await put
            await slow
            assert again.staged == {stage.sequence: 2}
            assert await producer.commit([stage]) == 2
            assert await everything(client) == [b"a", b"b"]

    run(main())


def test_a_producer_is_forgotten_behind_its_commit(tmp_path: Path) -> None:
    """Else the commit would be taken for the first one of the next producer of that name."""

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            stage = await staged(producer, b"a")
            assert running.server is not None
            stream = running.server.node.get_persistent(STREAM)
            slow = asyncio.create_task(stream.perform(stream.log, lambda: time.sleep(0.5)))
            await asyncio.sleep(0.05)
            commit = asyncio.create_task(producer.commit([stage]))
            await asyncio.sleep(0.1)
            forget = asyncio.create_task(
                client.admin("forget_producer", name=STREAM, producer="flow")
            )
            assert await commit == 1
            assert (await forget)["forgotten"]
            await slow
            assert await client.admin("producers", name=STREAM) == []
            again = await client.producer(STREAM, "flow", 1)
            assert await again.commit([await staged(again, b"b")]) == 1
            assert await everything(client) == [b"a", b"b"]
            assert not stream.producing._turns

    run(main())


def emptied(log: StreamLog) -> bool:
    return log.first == log.end


def test_what_is_dropped_leaves_the_disk_without_a_commit(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            for epoch in range(2, 5):
                stage = await staged(producer, b"a", b"b")
                assert running.server is not None
                log = running.server.node.get_persistent(f"{STREAM}.staged").log
                if epoch % 2:
                    await producer.drop([stage])
                else:
                    producer = await client.producer(STREAM, "flow", epoch, keep=[])
                await until(partial(emptied, log), "it is still there")

    run(main())


def test_producers_end_in_a_stream_that_keeps_everything(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            gone = await client.producer(STREAM, "client", 0, lifetime=60.0)
            await staged(gone, b"lost")
            running.ahead = 120.0
            assert running.server is not None
            await running.server.node._retain()
            assert await client.admin("producers", name=STREAM) == []

    run(main())


def test_two_producers_know_nothing_of_each_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            eu, us = [await client.producer(STREAM, name, 1) for name in ("eu", "us")]
            mine, theirs = await staged(eu, b"eu"), await staged(us, b"us")
            await client.producer(STREAM, "us", 2, keep=[])
            assert await eu.commit([mine]) == 1
            assert await refusal(us.commit([theirs])) == "FENCED"
            assert await everything(client) == [b"eu"]
            assert (await client.admin("forget_producer", name=STREAM, producer="us"))["forgotten"]
            assert await refusal(us.open()) == "NO_PRODUCER"

    run(main())


def test_bad_requests_of_producers_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            await client.ensure("events", kind="ephemeral")
            producer = await client.producer(STREAM, "flow", 1)
            stage = await staged(producer, b"a")
            assert await refusal(client.producer("events", "flow", 1)) == "NOT_PERSISTENT"
            assert await refusal(client.producer("none", "flow", 1)) == "NO_STREAM"
            assert await refusal(client.producer(STREAM, "", 1)) == "BAD_REQUEST"
            assert await refusal(client.producer(STREAM, "flow", -1)) == "BAD_REQUEST"
            assert await refusal(producer.commit({stage.sequence: 2})) == "LOST_OUTPUT"
            assert await refusal(producer.commit({99: 1})) == "LOST_OUTPUT"
            assert await refusal(Stage(producer, 99).put([b"x"])) == "NO_PRODUCER"
            assert await producer.commit([stage]) == 1
            assert await refusal(stage.put([b"late"])) == "SEQUENCE_OVER"
            for bad in (
                client.producer(STREAM, "flow", 2, lifetime="x"),  # type: ignore[arg-type]
                client.producer(STREAM, "flow", 2, lifetime=math.nan),
                client.producer(STREAM, "flow", 2, keep=5),  # type: ignore[arg-type]
                client.producer(STREAM, "flow", session="\ud800"),
                client.admin("begin_producer", name=STREAM, producer="flow", session="\ud800"),
                producer.commit(5),  # type: ignore[arg-type]
                producer.commit(["a"]),  # type: ignore[list-item]
                producer.drop("a"),  # type: ignore[arg-type]
                client.publish_many(STREAM, {"a": 1}, atomic=True),  # type: ignore[arg-type]
                client.publish_many(STREAM, {b"a", b"b"}),  # type: ignore[arg-type]
                client.publish_many(STREAM, [1], atomic=True),  # type: ignore[list-item]
                client.publish_many(STREAM, ["a"], atomic=True, acks="all"),
                client.publish_many(STREAM, ["a"], atomic=True, timeout=-1.0),
                client.publish_many(STREAM, ["a"], atomic=True, timeout="x"),  # type: ignore[arg-type]
            ):
                assert await refusal(bad) == "BAD_REQUEST"
            code = await refusal(client.publish_many(STREAM, ["a"], atomic=True, timeout=0.0))
            assert code == "DEADLINE"
            async with client.transaction(STREAM) as together:
                for one in ([1], None, b"abc"):
                    assert await refusal(together.put_all(one)) == "BAD_REQUEST"  # type: ignore[arg-type]
                await together.put_all(text for text in ("b", "c"))
            assert await everything(client) == [b"a", b"b", b"c"]

    run(main())


@pytest.mark.slow
def test_a_node_that_is_killed_at_any_time_commits_once(tmp_path: Path) -> None:
    """What was told to be staged can be committed, and a commit that was repeated until it is done is there once."""

    async def main() -> None:
        chance, process = random.Random(5), Process(tmp_path)
        await process.start()
        try:
            wanted: list[bytes] = []
            for epoch in range(1, 6):
                client = await connect(f"127.0.0.1:{process.port}", data=tmp_path, timeout=30.0)
                await client.ensure(STREAM)
                producer = await client.producer(STREAM, "flow", epoch, keep=[])
                payloads = [b"%d.%d" % (epoch, n) for n in range(300)]
                stage = await staged(producer, *payloads, pieces=20)
                commit = asyncio.create_task(producer.commit([stage], timeout=60.0))
                await asyncio.sleep(chance.random() * 0.02)
                await process.kill()
                await process.start()
                await commit
                wanted += payloads
                assert await producer.commit([stage]) == 0
                assert await everything(client) == wanted
                await client.close()
        finally:
            await process.kill()

    run(main(), deadline=120.0)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_cluster_goes_on_where_its_master_left(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, master = await cluster.serving(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            done = await staged(producer, b"a", b"b", pieces=2)
            assert await producer.commit([done]) == 2
            waiting = await staged(producer, *(b"%d" % n for n in range(50)), pieces=10)
            await getattr(cluster, how)(master)
            assert await producer.commit([done, waiting], timeout=PATIENCE) == 50
            assert await producer.commit([done, waiting], timeout=PATIENCE) == 0
            more = await staged(producer, b"z")
            assert await producer.commit([more]) == 1
            assert await everything(client) == [b"a", b"b", *(b"%d" % n for n in range(50)), b"z"]
            with contextlib.suppress(KeyError):
                assert [one["name"] for one in await client.admin("list")] == [STREAM]

    run(main(), deadline=4 * PATIENCE)


def test_a_commit_survives_its_master(tmp_path: Path) -> None:
    """The master is killed while it commits: the commit is done once, by whoever leads."""

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, master = await cluster.serving(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            payloads = [b"%05d" % n * 200 for n in range(2_000)]
            stage = await staged(producer, *payloads, pieces=40)
            commit = asyncio.create_task(producer.commit([stage], timeout=PATIENCE))
            await asyncio.sleep(0.01)
            await cluster.kill(master)
            await commit
            assert await producer.commit([stage], timeout=PATIENCE) == 0
            assert await everything(client) == payloads
            await cluster.start(master)
            await cluster.in_step(STREAM)

    run(main(), deadline=4 * PATIENCE)


def test_commits_and_publishes_of_others_go_on_side_by_side_in_a_cluster(tmp_path: Path) -> None:
    """Whoever publishes while a unit is written must not be told to the replicas before the unit."""

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, _ = await cluster.serving(STREAM)
            others = [await cluster.client() for _ in range(2)]
            working = True

            async def publish(name: str, publisher: Client) -> list[bytes]:
                sent: list[bytes] = []
                while working:
                    sent.append(b"%s %d" % (name.encode(), len(sent)))
                    await publisher.publish(STREAM, sent[-1])
                return sent

            publishing = [
                asyncio.create_task(publish(f"publisher {n}", other))
                for n, other in enumerate([*others, *others])
            ]
            committed: list[bytes] = []
            for n in range(100):
                some = [b"transaction %d.%d" % (n, k) for k in range(3)]
                async with client.transaction(STREAM) as together:
                    await together.put_all(some)
                committed += some
            working = False
            lists = [committed, *await asyncio.gather(*publishing)]
            there = await everything(client)
            for written in lists:
                mine = set(written)
                assert [one for one in there if one in mine] == written
            assert len(there) == sum(map(len, lists))
            for n in range(100):
                at = there.index(committed[3 * n])
                assert there[at : at + 3] == committed[3 * n : 3 * n + 3]
            await cluster.in_step(STREAM)

    run(main(), deadline=4 * PATIENCE)


def test_a_commit_that_is_not_safe_yet_is_not_repeated(tmp_path: Path) -> None:
    """The unit of a commit waits for replicas when the notes have to be read anew, for another producer's sake."""

    async def main() -> None:
        cluster = Clustered(tmp_path, 3)
        controls = shimmed(cluster, tmp_path)
        async with clustered(tmp_path, cluster=cluster):
            client, master = await cluster.serving(STREAM)
            first = await client.producer(STREAM, "first", 1)
            await client.producer(STREAM, "second", 1)
            stage = await staged(first, b"a", b"b", b"c")
            copy = cluster.copy(master, STREAM)
            write_unit = copy.write_unit
            others = [control for name, control in controls.items() if name != master]

            async def late(write: Any) -> tuple[int, int]:
                """Write the unit when the note of the commit is safe, and the replicas can write no more."""
                for control in others:
                    control._orders = Orders(refuse=errno.EFBIG, refuse_at=f"streams/{STREAM}/")
                return await write_unit(write)

            copy.write_unit = late  # type: ignore[method-assign]
            commit = asyncio.create_task(first.commit([stage], timeout=PATIENCE))
            await until(lambda: copy.stream.log.end == 3, "the unit is not written")
            copy.write_unit = write_unit  # type: ignore[method-assign]
            assert copy.safe == 0
            controls[master]._orders = Orders(
                refuse=errno.EFBIG, refuse_at=f"streams/{STREAM}/groups"
            )
            producing = copy.stream.producing
            assert await refusal(client.producer(STREAM, "second", 2)) == "NO_SPACE"
            assert producing._producers is None  # they have to be read anew
            controls[master]._orders = Orders()
            again = asyncio.create_task(client.producer(STREAM, "second", 2))
            await asyncio.sleep(0.5)  # they could be read meanwhile
            for control in others:
                control._orders = Orders()
            await again
            with contextlib.suppress(StreamsError):
                await commit
            await first.commit([stage], timeout=PATIENCE)
            assert await everything(client) == [b"a", b"b", b"c"]

    run(main(), deadline=4 * PATIENCE)


def test_pieces_behind_one_that_found_no_room_are_refused_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the second piece would lie before the first one, and nobody could tell after a restart."""
    append, full, tried = StreamLog.append, True, threading.Event()

    def hardly(self: StreamLog, batches: Sequence[Any], *more: Any) -> int:
        if full and any(len(batch) > 5_000 for batch in batches):
            tried.set()
            time.sleep(0.3)  # the other piece is lined up meanwhile
            raise NoSpaceError("no space left on device")
        return append(self, batches, *more)

    monkeypatch.setattr(StreamLog, "append", hardly)

    async def main() -> None:
        nonlocal full
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure(STREAM)
            producer = await client.producer(STREAM, "flow", 1)
            stage = await producer.open()
            first, second = bytes(10_000), b"second"
            refused = stage.put_soon([first])
            await until(tried.is_set)
            outcomes = await asyncio.gather(
                refused, stage.put_soon([second]), return_exceptions=True
            )
            assert [getattr(one, "code", one) for one in outcomes] == ["NO_SPACE"] * 2
            full = False
            await running.again()
            await stage.put_soon([first], 0)
            await stage.put_soon([second], 1)
            assert await producer.commit([stage]) == 2
            assert await everything(client) == [first, second]

    run(main())
