"""The rules of groups as users see them: delays, exclusive groups that stay so, redrive, tracked consumers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest
from tests.broker.clustered import clustered, retried
from tests.broker.running import DEADLINE, Proxy, node, nothing, refused, run, take, until

from railgun.broker.protocol.groups import (
    LONGEST_DELAY,
    Change,
    Kind,
    Paused,
    Redriven,
    Saved,
    Settled,
    Sought,
    Standing,
    Stands,
    Unsettled,
)
from railgun.broker.streams.groups import fold, pack
from railgun.client.errors import StreamsError, SubscriptionLostError
from railgun.client.sync import connect_sync
from railgun.testing.node import served
from railgun.transport.proto import streams_pb2 as p

HOUR = 3600.0
DAY = 24 * HOUR
PATIENCE = 240.0


# ---------------------------------------------------------------- delays


def test_a_delay_holds_back_its_message_and_a_block_the_whole_group(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1", b"2"])
            one = await client.subscribe("orders", group="g", prefetch=1)
            (await one.next(DEADLINE)).nack(delay=HOUR, reason="later")
            message = await one.next(DEADLINE)
            assert message.payload == b"1", "a delay holds back nothing else"
            message.nack(delay=HOUR, reason="nobody there", block=True)
            await one.flush()
            two = await client.subscribe("orders", group="g")
            await nothing(two)
            assert (await client.admin("group", name="orders", group="g"))["code"] == "BLOCKED"
            other = await client.subscribe("orders", group="h")
            assert len(await take(other, 3)) == 3, "another group is not blocked"
            await client.close()
            await running.again()
            two = await (await running.client()).subscribe("orders", group="g")
            await nothing(two)
            running.ahead = 1.5 * HOUR
            assert sorted(m.payload for m in await take(two, 3)) == [b"0", b"1", b"2"]

    run(main())


def test_who_blocks_is_given_nothing_that_had_come_before(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(20)])
            for how in ({"group": "g"}, {}):  # a group, and a consumer without one
                sub = await client.subscribe("orders", **how)  # type: ignore[arg-type]
                first = await sub.next(DEADLINE)
                with pytest.raises(StreamsError, match="for how long"):
                    first.nack(block=True)
                first.nack(delay=0.3, block=True)
                with pytest.raises(TimeoutError):
                    await sub.next(0.01)
                assert await sub.next(DEADLINE)
                await sub.close()

    run(main())


def test_who_blocks_without_an_event_loop_is_given_nothing(tmp_path: Path) -> None:
    with served(tmp_path), connect_sync(data=tmp_path, timeout=DEADLINE) as client:
        client.ensure("orders")
        client.publish_many("orders", [b"%d" % n for n in range(20)])
        with client.subscribe("orders", group="g") as sub:
            sub.next(DEADLINE).nack(delay=0.5, block=True)
            with pytest.raises(TimeoutError):
                sub.next(0.01)
            assert sub.next(DEADLINE)


@pytest.mark.parametrize("how", [{}, {"exclusive": True}, {"block": True}])
def test_a_delay_may_be_as_long_as_366_days(tmp_path: Path, how: dict[str, bool]) -> None:
    block, exclusive = how.get("block", False), how.get("exclusive", False)

    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1", b"2"])
            sub = await client.subscribe("orders", group="g", exclusive=exclusive)
            (await sub.next(DEADLINE)).nack(delay=366 * DAY, block=block)
            await sub.flush()
            if how:
                await nothing(sub)
            else:
                assert [m.payload for m in await take(sub, 2)] == [b"1", b"2"]
            await client.close()
            await running.again()
            running.ahead = 365 * DAY
            sub = await (await running.client()).subscribe("orders", group="g", exclusive=exclusive)
            came = [] if how else [m.payload for m in await take(sub, 2)]
            await nothing(sub)
            running.ahead = 367 * DAY
            came += [m.payload for m in await take(sub, 3 - len(came))]
            assert sorted(came) == [b"0", b"1", b"2"]

    run(main())


@pytest.mark.parametrize("exclusive", [False, True])
def test_flush_hears_of_a_nack_that_the_node_refused_and_the_subscription_goes_on(
    tmp_path: Path, exclusive: bool
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1", b"2"])
            sub = await client.subscribe("orders", group="g", exclusive=exclusive)
            message = await sub.next(DEADLINE)
            ranges = [p.Range(first=message.offset, count=1, delivery=message.delivery)]
            told = p.Nack(ranges=ranges, epoch=message.epoch, delay=LONGEST_DELAY + 1)
            client.send(told, (), sub.channel)  # a client of another version may think it right
            await refused("BAD_DELAY", sub.flush())
            if exclusive:  # which begins anew, in order
                messages = await take(sub, 3)
            else:  # it is still this consumer's
                messages = [message, *await take(sub, 2)]
            assert [m.payload for m in messages] == [b"0", b"1", b"2"]
            for one in messages:
                one.ack()
            await sub.flush()
            assert (await client.admin("group", name="orders", group="g"))["code"] == "AT_END"

    run(main())


def test_flush_tells_of_a_nack_that_was_lost_with_the_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"0")
            sub = await client.subscribe("orders", group="g")
            message = await sub.next(DEADLINE)
            await running.stop()
            await until(lambda: not client.connected)
            message.nack(delay=HOUR)
            await running.start()
            await refused("CONNECTION_LOST", sub.flush())
            again = await sub.next(DEADLINE)
            again.ack()
            await sub.flush()

    run(main())


def test_a_delay_in_an_exclusive_group_always_blocks(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"0", b"1", b"2"])
            sub = await client.subscribe("orders", group="g", exclusive=True)
            (await sub.next(DEADLINE)).nack(delay=HOUR)
            await nothing(sub)
            running.ahead = 1.5 * HOUR
            assert [m.payload for m in await take(sub, 3)] == [b"0", b"1", b"2"]

    run(main())


# ---------------------------------------------------------------- exclusive groups


def test_an_exclusive_group_stays_exclusive_while_it_is_empty(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            for group, exclusive in (("one", True), ("all", False)):
                sub = await client.subscribe("orders", group=group, exclusive=exclusive)
                await sub.close()
            for _ in range(2):
                error = await refused("GROUP_KIND", client.subscribe("orders", group="one"))
                assert "'one' of 'orders' is exclusive" in str(error)
                other = client.subscribe("orders", group="all", exclusive=True)
                assert "is shared" in str(await refused("GROUP_KIND", other))
                assert (await client.admin("group", name="orders", group="one"))["exclusive"]
                await running.again()
                client = await running.client()
            await client.delete_group("orders", "one")
            await (await client.subscribe("orders", group="one")).close()

    run(main())


def test_an_exclusive_group_stays_exclusive_with_another_master(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(5)])
            sub = await client.subscribe("orders", group="one", exclusive=True)
            assert len(await take(sub, 5)) == 5
            await sub.close()
            await cluster.kill(await cluster.ready("orders"))
            await retried(lambda: client.admin("group", name="orders", group="one"))
            await refused("GROUP_KIND", retried_subscribe(client))

    async def retried_subscribe(client: object) -> object:
        while True:
            try:
                return await client.subscribe("orders", group="one")  # type: ignore[attr-defined]
            except StreamsError as error:
                if error.code == "GROUP_KIND":
                    raise
                await asyncio.sleep(0.1)

    run(main(), PATIENCE)


# ---------------------------------------------------------------- redrive


def test_a_redrive_in_a_cluster_is_the_masters_and_survives_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders", dead_deliveries=1)
            await client.publish_many("orders", [b"0", b"1", b"2"])
            other = await client.subscribe("orders", group="other")
            other.ack_all(await take(other, 3))
            await other.flush()
            async with await client.subscribe("orders", group="g") as sub:
                for message in await take(sub, 3):
                    message.nack(reason="no")
                await sub.flush()
                while (await client.group("orders", "g"))["lag"]:
                    await asyncio.sleep(0.05)
            master = await cluster.ready("orders")
            elsewhere = next(name for name in ("n1", "n2", "n3") if name != master)
            through = await cluster.client(elsewhere)
            assert (await through.redrive("orders"))["redriven"] == 3
            await cluster.kill(master)
            sub = await retried(lambda: through.subscribe("orders", group="g"))
            found: list[int] = []
            while len(found) < 3:
                message = await sub.next(DEADLINE)
                found.append(message.offset)
                message.ack()
            assert sorted(found) == [0, 1, 2]
            await retried(sub.flush)
            assert (await retried(lambda: through.redrive("orders")))["redriven"] == 0
            assert (await retried(lambda: through.describe("orders")))["end"] == 3

    run(main(), PATIENCE)


# ---------------------------------------------------------------- tracked consumers


def test_a_consumer_with_an_id_goes_on_where_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(6)])
            async with await client.subscribe("orders", consumer="audit-1") as sub:
                assert (sub.why, sub.consumer) == ("start", "audit-1")
                sub.ack_all(await take(sub, 3))
                await sub.flush()
            other = await client.subscribe("orders", consumer="audit-2", start="end")
            await nothing(other)
            group = await client.subscribe("orders", group="audit-1")
            assert len(await take(group, 6)) == 6, "a group of that name is another one"
            await running.again()
            client = await running.client()
            async with await client.subscribe("orders", consumer="audit-1", start="end") as sub:
                assert (sub.why, sub.offset) == ("position", 3), "where to start is ignored"
                assert [m.offset for m in await take(sub, 3)] == [3, 4, 5]
            names = [one["name"] for one in (await client.describe("orders"))["groups"]]
            assert sorted(names) == ["@audit-1", "@audit-2", "audit-1"]
            await refused("BAD_REQUEST", client.subscribe("orders", consumer="a", group="b"))
            await refused("BAD_SETTINGS", client.subscribe("orders", consumer="a b"))
            await client.ensure("air", kind="ephemeral")
            await refused("NOT_PERSISTENT", client.subscribe("air", consumer="a"))

    run(main())


def test_the_last_subscription_with_an_id_takes_over_and_the_other_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            one, two = await running.client(), await running.client()
            await one.ensure("orders")
            await one.publish_many("orders", [b"%d" % n for n in range(6)])
            old = await one.subscribe("orders", consumer="audit")
            first, *_ = await take(old, 3)
            first.ack()
            await old.flush()
            new = await two.subscribe("orders", consumer="audit")
            assert [m.offset for m in await take(new, 2)] == [1, 2]
            with pytest.raises(StreamsError) as told:
                await old.next(DEADLINE)
            assert told.value.code == "CONSUMER_TAKEN"
            await running.again()  # both connect again: the one that was ended takes nothing back
            while (await retried(lambda: two.group("orders", "@audit")))["lag"]:
                with contextlib.suppress(TimeoutError):
                    (await new.next(0.1)).ack()
            with pytest.raises(StreamsError):
                await old.next(DEADLINE)
            assert (await two.group("orders", "@audit"))["members"] == 1

    run(main())


def test_who_was_away_does_not_take_a_consumer_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            one, two = await running.client(proxy.port), await running.client()
            await one.ensure("orders")
            await one.publish("orders", b"0")
            old = await one.subscribe("orders", consumer="audit")
            await old.next(DEADLINE)
            proxy.cut()  # its own connection is none of others: it has the consumer again
            assert (await old.next(DEADLINE)).payload == b"0"
            proxy.muted = True  # what it is told is lost
            new = await two.subscribe("orders", consumer="audit")
            assert (await new.next(DEADLINE)).payload == b"0"
            proxy.cut()
            proxy.muted = False
            with pytest.raises(StreamsError) as told:
                await old.next(DEADLINE)
            assert told.value.code == "CONSUMER_TAKEN"
            assert (await two.group("orders", "@audit"))["in_flight"] == 1
            with pytest.raises(TimeoutError):
                await new.next(0.1)

    run(main())


def test_a_consumer_that_was_taken_over_gives_nothing_it_had_prefetched(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            one, two = await running.client(), await running.client()
            await one.ensure("orders")
            await one.publish_many("orders", [b"%d" % n for n in range(6)])
            old = await one.subscribe("orders", consumer="audit")
            first = await old.next(DEADLINE)
            new = await two.subscribe("orders", consumer="audit")
            assert (await new.next(DEADLINE)).offset == 0
            await until(lambda: old.over)
            for ask in (old.next, old.batch):
                with pytest.raises(SubscriptionLostError, match="taken over") as told:
                    await ask(timeout=DEADLINE)
                assert told.value.code == "CONSUMER_TAKEN"
            first.ack()
            with pytest.raises(SubscriptionLostError, match="taken over"):
                await old.flush()

    run(main())


@pytest.mark.parametrize(("kind", "how"), [
    ("persistent", {}), ("persistent", {"group": "g"}), ("ephemeral", {"group": "g"}),
])  # fmt: skip
def test_a_subscription_of_a_deleted_stream_gives_nothing_it_had_prefetched(
    tmp_path: Path, kind: str, how: dict[str, str]
) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client, other = await running.client(), await running.client()
            await client.ensure("orders", kind=kind)
            sub = await other.subscribe("orders", **how)  # type: ignore[arg-type]
            await client.publish_many("orders", [b"%d" % n for n in range(6)])
            await sub.next(DEADLINE)
            await client.delete("orders")
            await until(lambda: sub.over)
            with pytest.raises(SubscriptionLostError, match="'orders' was deleted") as told:
                await sub.next(DEADLINE)
            assert told.value.code == "NO_STREAM"
            if kind == "persistent":
                with pytest.raises(SubscriptionLostError, match="was deleted"):
                    await sub.flush()

    run(main())


def test_without_an_event_loop_a_lost_subscription_gives_nothing_it_had_prefetched(
    tmp_path: Path,
) -> None:
    with served(tmp_path), connect_sync(data=tmp_path, timeout=DEADLINE) as client:
        client.ensure("orders")
        client.publish_many("orders", [b"%d" % n for n in range(6)])
        with client.subscribe("orders", group="g") as sub:
            assert sub.next(DEADLINE).offset == 0
            client.admin("delete", name="orders", dead_letters=False)
            deadline = time.monotonic() + DEADLINE
            while not sub.inner.over and time.monotonic() < deadline:
                time.sleep(0.01)
            for ask in (sub.next, sub.batch):
                with pytest.raises(SubscriptionLostError, match="was deleted"):
                    ask(timeout=DEADLINE)


def test_a_tracked_consumer_goes_on_with_another_master(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            sub = await client.subscribe("orders", consumer="audit", prefetch=2)
            seen = []
            for _ in range(4):
                message = await sub.next(DEADLINE)
                seen.append(message.offset)
                message.ack()
            await sub.flush()
            await cluster.kill(await cluster.ready("orders"))
            while len(seen) < 10:
                message = await sub.next(DEADLINE)
                seen.append(message.offset)
                message.ack()
            assert seen == list(range(10))

    run(main(), PATIENCE)


def test_a_tracked_consumer_without_an_event_loop(tmp_path: Path) -> None:
    with served(tmp_path), connect_sync(data=tmp_path, timeout=DEADLINE) as client:
        client.ensure("orders")
        client.publish_many("orders", [b"0", b"1"])
        for n in range(2):
            with client.subscribe("orders", consumer="audit") as sub:
                message = sub.next(DEADLINE)
                assert message.offset == n
                message.ack()
                sub.flush(DEADLINE)


# ---------------------------------------------------------------- older logs


def test_a_group_log_of_an_older_node_is_read() -> None:
    changes = b'[["s",3,1],["t",2,8],["d",5,9],["o",3,4,[2,"no",70,60]],["u",[[0,3]]]]'
    saved = fold.apply(None, changes)
    assert isinstance(saved, Saved)
    assert (saved.floor, saved.epoch, saved.highest, saved.exclusive) == (3, 2, 8, None)
    assert list(saved.open) == [(3, 4, Standing(2, "no", 70, 60))]
    whole = (
        b'{"floor":3,"epoch":2,"highest":8,"standings":[[2,"no",70,60]],"columns":[1,1,1,1,1,1,1]}\n'
        + b"".join(n.to_bytes(8, "little") for n in (5, 9, 0, 3, 3, 4, 0))
    )
    assert fold.load(whole) == saved
    assert fold.load(fold.dump(saved)) == saved


def test_all_that_a_group_must_not_forget_is_in_its_log() -> None:
    changes: list[Change] = [Sought(3, 1), Stands(2, 8), Settled(3, 9), Kind(True), Paused(70, 60)]
    changes += [Unsettled(12, 13, Standing(2, "no", since=7)), Redriven(3, 4, 2, 8, again=True)]
    saved = fold.apply(None, pack(changes))
    assert isinstance(saved, Saved)
    assert (saved.exclusive, saved.pause, saved.floor) == (True, (70, 60), 3)
    assert list(saved.redriven) == [(3, 4, (2, 8))]
    assert [one.since for _, _, one in saved.open] == [7]
    assert fold.load(fold.dump(saved)) == saved
    assert fold.apply(None, pack(saved.changes())) == saved
