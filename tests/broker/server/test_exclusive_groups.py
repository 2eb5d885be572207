"""Exclusive groups have one active member, whoever dies, is cut off or acks too late."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path

import pytest
from tests.broker.running import QUIET, Proxy, Raw, die, node, nothing, run, take, until
from tests.broker.server.hard_times import Cutter, code_of

from railgun.transport.commands import encode
from railgun.transport.proto import streams_pb2 as p


@pytest.mark.parametrize(("seed", "racers"), [(1, 2), (3, 5)])
def test_an_exclusive_group_has_one_active_member_whoever_dies(
    tmp_path: Path, seed: int, racers: int
) -> None:
    async def main() -> None:
        draw = random.Random(seed)
        count = 400
        async with node(tmp_path) as running:
            publisher = await running.client()
            await publisher.ensure("orders")
            got: list[tuple[int, int, int]] = []  # epoch, who, offset, as they came
            safe: set[int] = set()
            lives = 0

            async def live() -> None:
                nonlocal lives
                lives += 1
                who = lives
                client = await running.client()
                prefetch = draw.randint(1, 60)
                sub = await client.subscribe("orders", group="g", exclusive=True, prefetch=prefetch)
                for _ in range(draw.randint(1, 8)):
                    try:
                        found = await sub.batch(draw.randint(1, 20), QUIET)
                    except TimeoutError:
                        break
                    for message in found:
                        assert message.offset not in safe
                        got.append((message.epoch, who, message.offset))
                    some = found[: draw.randint(0, len(found))]
                    sub.ack_all(some)
                    await sub.flush()
                    safe.update(message.offset for message in some)
                    if len(some) < len(found) and draw.random() < 0.5:
                        found[len(some)].nack(delay=draw.choice([0, 0, 0.01]))
                if draw.random() < 0.5:
                    die(client)
                else:
                    await client.close()

            async def over_and_over() -> None:
                while len(safe) < count:
                    await live()

            async def publish() -> None:
                for first in range(0, count, 50):
                    payloads = [b"%d" % n for n in range(first, first + 50)]
                    await publisher.publish_many("orders", payloads)

            await asyncio.gather(publish(), *(over_and_over() for _ in range(racers)))
            assert safe == {offset for _, _, offset in got} == set(range(count))
            assert lives > racers
            assert [epoch for epoch, _, _ in got] == sorted(epoch for epoch, _, _ in got)
            holders: dict[int, int] = {}
            last: dict[int, int] = {}
            for epoch, who, offset in got:
                assert holders.setdefault(epoch, who) == who, "two members of one epoch"
                assert offset > last.get(epoch, -1), "not in order"
                last[epoch] = offset
            assert len(set(holders.values())) > 1
            told = await publisher.group("orders", "g")
            assert (told["floor"], told["in_flight"]) == (count, 0)

    run(main())


def test_members_of_an_exclusive_group_come_back_and_none_is_active_beside_another(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        draw = random.Random(1)
        count = 600
        async with node(tmp_path) as running, contextlib.AsyncExitStack() as stack:
            publisher = await running.client()
            await publisher.ensure("orders")
            got: list[tuple[int, tuple[int, int], int]] = []  # epoch, who in which life, offset
            safe: set[int] = set()
            cutters: list[Cutter] = []

            async def member(who: int) -> None:
                cutter = Cutter(running.port, who, cuts=15, least=60, most=10_000)
                proxy = await stack.enter_async_context(cutter)
                client = await running.client(proxy.port)
                sub = await client.subscribe("orders", group="g", exclusive=True, prefetch=40)
                cutters.append(cutter)
                cutter.begin()
                while (await publisher.group("orders", "g"))["floor"] < count:
                    try:
                        found = await sub.batch(draw.randint(1, 30), QUIET)
                    except TimeoutError:
                        continue
                    for message in found:
                        assert message.offset not in safe
                        got.append((message.epoch, (who, sub._life), message.offset))
                    some = found[: draw.randint(0, len(found))]
                    sub.ack_all(some)
                    code = await code_of(sub.flush())
                    assert code in ("", "ACK_STALE", "CONNECTION_LOST")
                    if not code:
                        safe.update(message.offset for message in some)
                    if len(some) < len(found):  # what is neither acked nor nacked stays with it
                        found[len(some)].nack()

            publish = publisher.publish_many("orders", [b"%d" % n for n in range(count)])
            await (await publisher.subscribe("orders", group="g", exclusive=True)).close()
            await asyncio.gather(publish, *map(member, range(3)))
            assert sum(cutter.cuts for cutter in cutters) >= 5
            assert {offset for _, _, offset in got} == set(range(count))
            holders: dict[int, tuple[int, int]] = {}
            last: dict[int, int] = {}
            for epoch, who, offset in got:
                assert holders.setdefault(epoch, who) == who, "two members of one epoch"
                assert offset > last.get(epoch, -1), "not in order"
                last[epoch] = offset

    run(main())


def test_a_member_of_an_exclusive_group_that_was_cut_off_acks_in_vain(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running, Proxy(running.port) as proxy:
            one, two = await running.client(proxy.port), await running.client()
            await one.ensure("orders")
            await one.publish_many("orders", [b"%d" % n for n in range(6)])
            first = await one.subscribe("orders", group="g", exclusive=True)
            second = await two.subscribe("orders", group="g", exclusive=True)
            former = await take(first, 6)
            proxy.cut()
            found = await take(second, 6)
            assert [(m.offset, m.delivery) for m in found] == [(n, 2) for n in range(6)]
            assert found[0].epoch > former[0].epoch
            await until(lambda: first._life == 2)  # it stands by
            first.ack_all(former)
            assert await code_of(first.flush()) == "ACK_STALE"
            former[0].nack()
            assert (await two.group("orders", "g"))["floor"] == 0
            second.ack_all(found[:3])
            await second.flush()
            await nothing(first)
            die(two)
            again = await take(first, 3)
            assert [(m.offset, m.delivery) for m in again] == [(n, 3) for n in range(3, 6)]
            first.ack_all(again)
            assert await code_of(first.flush()) in ("", "ACK_STALE")  # of the nack
            await first.flush()
            assert (await one.group("orders", "g"))["floor"] == 6

    run(main())


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_nack_of_what_was_acked_changes_nothing(tmp_path: Path, exclusive: bool) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(20)])
            sub = await client.subscribe("orders", group="g", exclusive=exclusive, prefetch=5)
            for n in range(0, 20, 2):
                found = await take(sub, 2)
                assert [(m.offset, m.delivery) for m in found] == [(n, 1), (n + 1, 1)]
                found[0].ack()
                found[0].nack()
                sub.ack_all(found[1:])
                found[1].nack(delay=600)
            assert await code_of(sub.flush()) == "ACK_STALE"
            await sub.flush()
            assert (await client.group("orders", "g"))["code"] == "AT_END"

    run(main())


def test_a_request_is_answered_once_also_if_a_part_of_it_is_stale(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish_many("orders", [b"%d" % n for n in range(6)])
            raw = await Raw.dial(running)
            subscribe = p.Subscribe(request=1, stream="orders", group="g", credit=10)
            raw.connection.send(b"".join(encode(subscribe, (), 3)))
            await until(lambda: any(isinstance(f.command, p.Deliver) for f in raw.frames))
            raw.frames.clear()
            ranges = [
                p.Range(first=first, count=1, delivery=delivery)
                for first, delivery in ((0, 1), (1, 7), (2, 1), (3, 8), (99, 1))
            ]
            raw.connection.send(b"".join(encode(p.Ack(request=5, ranges=ranges), (), 3)))
            raw.connection.send(
                b"".join(encode(p.Ack(request=6, ranges=ranges[2:3]), (), 3))
                + b"".join(encode(p.Ack(request=7), (), 3))
            )
            await until(lambda: any(getattr(f.command, "request", 0) == 7 for f in raw.frames))
            told = Counter(f.command.request for f in raw.frames if f.command.request)
            assert told == {5: 1, 6: 1, 7: 1}
            codes = {f.command.request: getattr(f.command, "code", "") for f in raw.frames}
            assert (codes[5], codes[6], codes[7]) == ("ACK_STALE", "ACK_STALE", "")
            told_group = await client.group("orders", "g")
            assert (told_group["floor"], told_group["in_flight"]) == (1, 4)
            raw.connection.close()

    run(main())
