"""A cluster of real nodes: what is published, and what groups know, survives whatever happens to a minority."""

from __future__ import annotations

import asyncio
import logging
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.broker.clustered import DEADLINE, Clustered, clustered, retried, until
from tests.broker.running import run, take

from railgun.broker.cluster.joining import JoinError
from railgun.broker.streams.copies import Acks
from railgun.client.client import Client
from railgun.client.errors import DuplicateIdError, StreamsError
from railgun.transport.commands import Blob
from railgun.transport.proto import cluster_pb2 as n
from railgun.transport.records import Records, build

PATIENCE = 90.0  # seconds that a test may take, on a busy machine


async def payloads(client: Client, stream: str, count: int) -> list[bytes]:
    async with await client.subscribe(stream) as sub:
        return [message.payload for message in await take(sub, count)]


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [f"m{n}".encode() for n in range(start, start + count)]


def test_any_node_takes_any_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            first = await cluster.client("n1")
            assert (await first.ensure("orders"))["result"] == "CREATED"
            await cluster.ready("orders")
            for n, name in enumerate(cluster.servers):
                client = await cluster.client(name)
                assert (await client.ensure("orders"))["result"] == "UNCHANGED"
                assert await client.publish("orders", f"m{n}") == n
                async with await client.subscribe("orders", group=f"g{n}") as sub:
                    for message in await take(sub, n + 1):
                        message.ack()
                    await sub.flush()
                assert (await client.describe("orders"))["end"] == n + 1
                assert (await client.group("orders", f"g{n}"))["floor"] == n + 1
            for name in cluster.servers:
                assert await payloads(await cluster.client(name), "orders", 3) == numbered(3)
            await cluster.in_step("orders")

    run(main(), PATIENCE)


def test_what_was_acknowledged_survives_the_master(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            sent = 0
            for _ in range(3):
                master = await cluster.ready("orders")
                await client.publish_many("orders", numbered(100, sent))
                sent += 100
                await cluster.kill(master)
                assert await client.publish("orders", f"m{sent}") == sent
                sent += 1
                await cluster.start(master)
                await cluster.in_step("orders")
            for name in cluster.servers:
                assert await payloads(await cluster.client(name), "orders", sent) == numbered(sent)

    run(main(), PATIENCE)


@pytest.mark.slow
def test_groups_ids_delays_and_dead_letters_survive_the_master(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders", dead_deliveries=2)
            await client.publish_many("orders", numbered(10))
            await client.publish("orders", b"once", id="the-one")
            async with await client.subscribe("orders", group="billing") as sub:
                messages = await take(sub, 11)
                for message in messages[:4]:
                    message.ack()
                messages[5].nack(delay=8.0)
                messages[6].nack(delay=3600.0)
                await sub.flush()
            await cluster.kill(await cluster.ready("orders"))
            await cluster.ready("orders")
            with pytest.raises(DuplicateIdError) as told:
                await client.publish("orders", b"twice", id="the-one")
            assert told.value.offset == 10
            assert (await client.group("orders", "billing"))["floor"] == 4
            async with await client.subscribe("orders", group="billing") as sub:
                came = await take(sub, 6)
                assert [m.offset for m in came] == [4, 7, 8, 9, 10, 5]
                assert [m.delivery for m in came][-1] == 2
                came[-1].nack(reason="no use")
                await sub.flush()
                await until(lambda: "orders.dlq" in cluster.member(cluster.master()).node.streams)
            letters = await client.subscribe("orders.dlq")
            assert (await letters.next(DEADLINE)).payload == b"m5"

    run(main(), PATIENCE)


def test_an_exclusive_group_goes_on_with_another_master(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", numbered(20))
            sub = await client.subscribe("orders", group="one", exclusive=True, prefetch=5)
            seen: list[tuple[int, int]] = []  # epoch and offset

            async def take_one() -> None:
                message = await sub.next(DEADLINE)
                seen.append((message.epoch, message.offset))
                message.ack()

            for _ in range(5):
                await take_one()
            await sub.flush()
            killing = asyncio.create_task(cluster.kill(await cluster.ready("orders")))
            while len({offset for _, offset in seen}) < 20:  # also while it is lost
                await take_one()
            await killing
            # An ack that was on its way when the master was lost may be lost with it: then its message comes
            # again, in a later epoch. Nothing else comes twice, and nothing is skipped.
            assert list(dict.fromkeys(offset for _, offset in seen)) == list(range(20))
            for (epoch, offset), (later, following) in pairwise(seen):
                again = later > epoch and 5 <= following <= offset
                assert following == offset + 1 or again, seen
            await retried(sub.flush)

    run(main(), PATIENCE)


def test_a_node_that_joins_gets_everything_and_votes(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", numbered(1000))
            async with await client.subscribe("orders", group="g") as sub:
                (await sub.next(DEADLINE)).ack()
                await sub.flush()
            await cluster.start("n4", bootstrap_expect=0)
            me = cluster.member("n4").me

            def votes() -> bool:
                metadata = cluster.member("n1").metadata
                consensus = cluster.member("n4").consensus
                return (
                    me in metadata.regions["global"].voting
                    and consensus is not None
                    and me in consensus.members.voters
                )

            await until(votes, "the new node does not vote")
            await cluster.in_step("orders")
            joined = await cluster.client("n4")
            assert await payloads(joined, "orders", 1000) == numbered(1000)
            assert await joined.publish("orders", b"more") == 1000
            # Two of four may be gone one after the other, if the set follows: here it may not lose the data.
            await cluster.kill(await cluster.ready("orders"))
            assert await client.publish("orders", b"and more") == 1001

    run(main(), PATIENCE)


def test_a_minority_stops_writing_and_goes_on_reading(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", numbered(5))
            await cluster.in_step("orders")
            last = next(name for name in cluster.servers if name != cluster.master())
            for name in [name for name in cluster.servers if name != last]:
                await cluster.kill(name)
            lonely = await cluster.client(last, timeout=1.0)
            with pytest.raises(StreamsError):
                await lonely.publish("orders", b"nobody hears it", timeout=1.0)
            assert await payloads(lonely, "orders", 5) == numbered(5)
            for name in ("n1", "n2", "n3"):
                if name not in cluster.servers:
                    await cluster.start(name)
            await cluster.ready("orders")
            back = await cluster.client()
            # Nobody knew what would become of that one: it may have waited for a master.
            assert await back.publish("orders", b"m5") in (5, 6)

    run(main(), PATIENCE)


def test_all_nodes_start_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.ensure("news", kind="ephemeral")
            await client.publish_many("orders", numbered(50))
            cluster_id = cluster.member("n1").metadata.cluster
            for kill in (False, True):
                for name in list(cluster.servers):
                    await (cluster.kill(name) if kill else cluster.stop(name))
                for name in ("n1", "n2", "n3"):
                    await cluster.start(name)
                await cluster.ready("orders")
                assert cluster.member("n1").metadata.cluster == cluster_id
            again = await cluster.client()
            assert await payloads(again, "orders", 50) == numbered(50)
            assert await again.publish("orders", b"m50") == 50
            assert {one["name"] for one in await again.streams()} == {"orders", "news"}

    run(main(), PATIENCE)


def test_a_deleted_stream_is_gone_everywhere_also_for_who_was_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish("orders", b"old")
            await cluster.in_step("orders")
            away = next(name for name in cluster.servers if name != cluster.master())
            await cluster.kill(away)
            await client.delete("orders")
            await client.ensure("orders")
            assert await client.publish("orders", b"new") == 0
            await cluster.start(away)
            await cluster.in_step("orders")
            assert await payloads(await cluster.client(away), "orders", 1) == [b"new"]

    run(main(), PATIENCE)


def test_a_damaged_copy_is_fetched_anew_and_does_not_lead(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            for n in range(20):
                await client.publish_many("orders", numbered(10, 10 * n))
            await cluster.in_step("orders")
            hurt = next(name for name in cluster.servers if name != cluster.master())
            await cluster.kill(hurt)
            (file,) = (tmp_path / hurt / "streams" / "orders" / "log").glob("*.log")
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 0x40
            file.write_bytes(data)
            await cluster.start(hurt)
            await cluster.in_step("orders")
            reader = await cluster.client(hurt)
            assert await payloads(reader, "orders", 200) == numbered(200)
            assert list((tmp_path / hurt / "streams" / "orders" / "log").glob("*damaged*"))

    run(main(), PATIENCE)


def test_a_copy_that_is_shorter_than_it_was_does_not_count_until_it_is_fetched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            for n in range(20):
                await client.publish("orders", b"m%d" % n)
            async with await client.subscribe("orders", group="g") as subscription:
                (await subscription.next(timeout=DEADLINE)).ack()
                await subscription.flush()
            await cluster.in_step("orders")
            hurt = next(name for name in cluster.servers if name != cluster.master())
            await cluster.kill(hurt)
            (file,) = (tmp_path / hurt / "streams" / "orders" / "log").glob("*.log")
            with file.open("r+b") as opened:
                opened.truncate(file.stat().st_size // 2)
            with caplog.at_level(logging.ERROR):
                await cluster.start(hurt)
                await cluster.in_step("orders")
            assert "stream 'orders': it ends at offset 10, though " in caplog.text
            assert not cluster.copy(hurt, "orders").lost
            assert await payloads(await cluster.client(hurt), "orders", 20) == numbered(20)

    run(main())


def test_a_copy_that_has_vanished_is_fetched(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", numbered(10))
            await cluster.in_step("orders")
            hurt = next(name for name in cluster.servers if name != cluster.master())
            await cluster.kill(hurt)
            shutil.rmtree(tmp_path / hurt / "streams" / "orders")
            await cluster.start(hurt)
            await cluster.in_step("orders")
            assert await payloads(await cluster.client(hurt), "orders", 10) == numbered(10)

    run(main(), PATIENCE)


def test_a_copy_that_cannot_be_read_holds_up_no_other_and_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("bills")
            await client.ensure("orders")
            await client.publish_many("orders", numbered(10))
            await cluster.in_step("orders")
            await cluster.in_step("bills")
            master = await cluster.ready("orders")
            hurt = next(name for name in cluster.servers if name != master)
            await cluster.kill(hurt)
            (tmp_path / hurt / "streams" / "bills" / "stream.json").write_text("{")
            await cluster.start(hurt)
            await client.publish_many("orders", numbered(10, 10))
            await cluster.in_step("orders")
            member = cluster.member(hurt)
            await until(lambda: "move" in member.trouble, "nobody is told")
            for name in cluster.servers:  # by the leader, also if it is too busy to answer

                def told(name: str = name) -> bool:
                    alarms = cluster.member(name).status()["alarms"]
                    return "NODE_TROUBLE" in [one["code"] for one in alarms]

                await until(told, f"{name} does not know")
            found = await client.admin("cluster")
            assert not found["settled"]
            assert "NODE_TROUBLE" in [one["code"] for one in found["alarms"]]
            master = await cluster.ready("orders")
            assert cluster.member(master).regions.get("global").caught_up() != sorted(
                cluster.member(name).me for name in cluster.servers if name != master
            )
            await cluster.stop(hurt)
            shutil.move(tmp_path / hurt / "streams" / "bills", tmp_path / "away")
            await cluster.start(hurt)
            await cluster.in_step("bills")
            await until(lambda: not cluster.member(hurt).trouble)

    run(main(), deadline=4 * DEADLINE)


def test_a_tail_that_nobody_else_has_is_cut_and_kept_aside(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", numbered(5))
            await cluster.in_step("orders")
            master = cluster.master()
            # It reaches nobody any more, and does not know yet: what it stores now is on its disk only.
            links = cluster.member(master).links
            stored: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            links.know({})
            links.know = lambda addresses: None  # type: ignore[method-assign]
            stream = cluster.copy(master, "orders").stream
            stream.publish([build([b"lonely"])], stored.set_result, acks=Acks.MASTER)
            assert (await stored).base == 5
            await cluster.kill(master)
            assert await client.publish("orders", b"m5", id="m5") == 5
            await cluster.start(master)
            await cluster.in_step("orders")
            assert await payloads(await cluster.client(master), "orders", 6) == numbered(6)
            (kept,) = (tmp_path / master / "streams" / "orders" / "log").glob("cut-*")
            assert Records(kept.read_bytes()).payloads() == [b"lonely"]

    run(main(), PATIENCE)


def test_acks_of_all_wait_for_all(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            await (await cluster.client()).ensure("orders")
            master = await cluster.ready("orders")
            client = await cluster.client(master)
            assert await client.publish("orders", b"m0", acks="all") == 0
            for name in cluster.servers:
                assert cluster.copy(name, "orders").copy.durable == 1
            assert await client.publish("orders", b"m1", acks="none") == -1
            away = next(name for name in cluster.servers if name != master)
            await cluster.kill(away)
            waiting = asyncio.create_task(client.publish("orders", b"m2", acks="all", timeout=15))
            await until(lambda: cluster.copy(master, "orders").copy.end == 3)
            assert await client.publish("orders", b"m3") == 3
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await cluster.start(away)
            assert await waiting == 2

    run(main(), PATIENCE)


def test_a_node_of_another_cluster_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with clustered(tmp_path / "a", 1) as one, clustered(tmp_path / "b", 1) as other:
            await other.stop("n1")
            seed = one.config("n1").cluster
            assert seed is not None
            with caplog.at_level(logging.WARNING):
                await other.start("n1", discovery=f"static://127.0.0.1:{seed.port}")
                member = other.member("n1")
                with pytest.raises(Exception, match="is a node of the cluster"):
                    await member.links.ask(("127.0.0.1", seed.port), "whoami", {})
            me = one.member("n1").me
            with pytest.raises(JoinError):
                await one.member("n1").joining.called(
                    "form", {"cluster": "x", "voters": [me], "nodes": [], "election": 1}
                )

    run(main(), PATIENCE)


def test_who_is_not_let_in_says_what_it_was_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path / "a", 1) as one:
            seed = one.config("n1").cluster
            assert seed is not None
            where = f"static://127.0.0.1:{seed.port}"
            other = Clustered(tmp_path / "b", 1)
            await other.start("n1", discovery=where, bootstrap_expect=0, secret=bytes(32))
            joining = other.member("n1").joining
            try:
                await until(lambda: "the secret is wrong" in joining.status)
                assert joining.status.startswith("no cluster has let this node in yet (127.0.0.1:")
            finally:
                await other.stop("n1")

    run(main())


def test_a_node_comes_back_with_another_address(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish("orders", b"m0")
            await cluster.kill("n3")
            await cluster.start("n3", port=cluster.ports[-1])
            me, port = cluster.member("n3").me, cluster.ports[-1]
            await until(
                lambda: cluster.member("n1").metadata.nodes[me].cluster_port == port,
                "its address is not known",
            )
            await cluster.in_step("orders")
            assert len(cluster.member("n1").metadata.nodes) == 3

    run(main(), PATIENCE)


def test_ephemeral_streams_and_requests_cross_nodes(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            clients = [await cluster.client(name) for name in cluster.servers]
            await clients[0].ensure("news", kind="ephemeral")
            subs = [
                await retried(lambda c=c: c.subscribe("news", matcher="a.*"))  # type: ignore[misc]
                for c in clients
            ]

            async def heard() -> bool:
                return await clients[0].publish("news", b"x", topic="a.b") == 3

            end = asyncio.get_running_loop().time() + DEADLINE
            while not await heard():
                assert asyncio.get_running_loop().time() < end
                await asyncio.sleep(0.02)
            for sub in subs:
                assert (await sub.next(DEADLINE)).payload == b"x"

            async def answer() -> None:
                message = await subs[2].next(DEADLINE)
                while message.payload != b"question":
                    message = await subs[2].next(DEADLINE)
                await message.respond(b"answer")

            answering = asyncio.create_task(answer())
            reply = await clients[1].request("news", b"question", topic="a.c")
            assert reply == b"answer"
            await answering

    run(main(), PATIENCE)


async def _form(cluster: Clustered) -> None:
    await asyncio.gather(*(cluster.start(f"n{n}") for n in (1, 2, 3)))


def test_nodes_that_start_at_the_same_moment_form_one_cluster(tmp_path: Path) -> None:
    async def main() -> None:
        for turn in range(3):
            cluster = Clustered(tmp_path / str(turn), 3)
            try:
                await _form(cluster)
                await until(
                    lambda c=cluster: all(c.member(n).metadata.cluster for n in c.servers),  # type: ignore[misc]
                    "no cluster",
                )
                ids = {cluster.member(name).metadata.cluster for name in cluster.servers}
                assert len(ids) == 1
            finally:
                await cluster.close()

    run(main(), PATIENCE)


def test_a_replica_that_was_heard_no_more_for_a_moment_is_fed_again(tmp_path: Path) -> None:
    """What it said is lost with its own connection, though that of the master to it is as it was."""

    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, master = await cluster.serving("orders")
            me = cluster.member(master).me
            for turn in range(3):
                for name in cluster.servers:
                    if name != master:
                        peer = cluster.member(name).links._peers[me]
                        peer.lines["data"].connection.abort()
                assert await client.publish("orders", f"m{turn}") == turn
                await cluster.in_step("orders")

    run(main(), PATIENCE)


def test_what_is_purged_stays_away_whoever_is_master(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", numbered(10))
            away = next(name for name in cluster.servers if name != cluster.master())
            await cluster.in_step("orders")
            await cluster.kill(away)
            assert (await client.purge("orders", before=6))["first"] == 6
            await cluster.start(away)
            await cluster.in_step("orders")
            await cluster.kill(await cluster.ready("orders"))
            await cluster.ready("orders")
            told = await client.describe("orders")
            assert (told["first"], told["end"]) == (6, 10)
            for name in cluster.servers:
                reader = await cluster.client(name)
                assert await payloads(reader, "orders", 4) == numbered(4, 6)

    run(main(), PATIENCE)


def test_a_node_that_is_a_replica_only_is_never_master(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            eu = {"global": "replica", "eu": "master"}
            await cluster.start("n4", bootstrap_expect=0, regions=eu)
            me = cluster.member("n4").me
            await until(
                lambda: (
                    me in cluster.member("n1").metadata.regions["global"].voting
                    and cluster.member("n1").metadata.regions.get("eu") is not None
                    and cluster.member("n1").metadata.regions["eu"].master == me
                ),
                "it does not take part",
            )
            client = await cluster.client()
            with pytest.raises(StreamsError) as told:
                await client.admin("ensure", name="far", asked={"region": "us"})
            assert told.value.code == "NO_REGION"
            await client.admin("ensure", name="local", asked={"region": "eu"})
            await client.ensure("orders")
            assert await client.publish("local", b"m0") == 0
            assert "local" not in cluster.member("n1").node.streams
            assert await payloads(await cluster.client("n1"), "local", 1) == numbered(1)
            for _ in range(2):
                master = await cluster.ready("orders")
                assert master != "n4"
                await cluster.kill(master)
                assert await retried(lambda: client.publish("orders", b"x")) >= 0
                await cluster.start(master)
                await cluster.in_step_of("orders", ["n1", "n2", "n3", "n4"])
            assert await payloads(await cluster.client("n4"), "orders", 2) == [b"x", b"x"]

    run(main(), PATIENCE)


def test_old_messages_go_everywhere(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders", max_bytes=1)
            for n in range(3):
                await client.publish_many("orders", numbered(10, 10 * n))
                master = await cluster.ready("orders")
                copy = cluster.copy(master, "orders")
                await copy.stream.perform(copy.stream.log, copy.stream.log.roll)
            await copy.stream.retain()
            assert copy.copy.first == 30
            await cluster.in_step("orders")

    run(main(), PATIENCE)


def test_a_node_that_was_removed_knows_it_and_comes_back_as_a_new_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.publish_many("orders", numbered(10))
            master = await cluster.ready("orders")
            gone = next(name for name in cluster.servers if name != master)
            other = next(name for name in cluster.servers if name != gone)
            boss = await cluster.client(other)
            await boss.admin("remove_node", 20.0, node=gone, wait=15)
            for _ in range(2):  # also when it is started again with what it had
                await until(
                    lambda: getattr(cluster.member(gone).failed, "code", "") == "REMOVED",
                    "it does not know that it was removed",
                )
                told = cluster.member(gone).overview.status()
                assert [one["code"] for one in told["alarms"]] == ["REMOVED"]
                assert list(cluster.member(gone).overview.reasons()) == ["REMOVED"]
                assert cluster.member(gone).me not in cluster.member(other).metadata.nodes
                await cluster.stop(gone)
                await cluster.start(gone)
            await cluster.stop(gone)
            shutil.rmtree(tmp_path / gone)
            await cluster.start(gone)
            await until(
                lambda: (
                    cluster.member(gone).me
                    in cluster.member(other).metadata.regions["global"].voting
                )
            )
            await cluster.in_step("orders")
            assert await payloads(await cluster.client(gone), "orders", 10) == numbered(10)

    run(main(), PATIENCE)


def test_dead_members_are_pruned_as_long_as_the_rest_keeps_its_quorum(tmp_path: Path) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client = await cluster.client()
            await client.ensure("orders")
            await client.admin("cluster_settings", change={"prune_after": 1.0})
            await client.publish("orders", b"m0")
            first = next(name for name in cluster.servers if name != cluster.master())
            gone = cluster.member(first).me
            await cluster.kill(first)

            def pruned() -> bool:
                return all(
                    gone not in cluster.member(name).metadata.nodes
                    and gone not in cluster.member(name).metadata.regions["global"].voting
                    for name in cluster.servers
                )

            await until(pruned, "it was not pruned")
            assert await client.publish("orders", b"m1") == 1
            second = next(name for name in cluster.servers if name != cluster.master())
            left = cluster.master()
            kept = cluster.member(second).me
            await cluster.kill(second)
            await asyncio.sleep(2.5)  # long enough: nothing is to happen
            assert kept in cluster.member(left).metadata.nodes
            assert kept in cluster.member(left).metadata.regions["global"].voting
            await cluster.start(second)
            assert await retried(lambda: client.publish("orders", b"m2", timeout=2.0)) >= 2

    run(main(), PATIENCE)


@pytest.mark.parametrize("wrong", ["a byte", "all"])
def test_what_came_wrong_is_sent_again(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with clustered(tmp_path) as cluster:
            client, master = await cluster.serving("orders")
            replica = next(name for name in cluster.servers if name != master)
            copy, spoilt = cluster.copy(replica, "orders"), 0
            hear = copy.received

            def received(sender: str, command: Any, blob: Blob) -> None:
                nonlocal spoilt
                if isinstance(command, n.Push) and len(blob) and spoilt < 2:
                    spoilt += 1
                    blob = bytearray(blob) if wrong == "a byte" else bytearray(len(blob))
                    blob[-1] ^= 1
                hear(sender, command, blob)

            monkeypatch.setattr(copy, "received", received)
            for number in range(20):
                await client.publish("orders", b"%d" % number)
            await cluster.in_step("orders")
            assert spoilt == 2
            assert copy.copy.end == 20

    run(main())
