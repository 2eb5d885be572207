"""Dead letters are redriven once, to the group that gave them up."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from tests.broker.running import DEADLINE, die, node, nothing, process, refused, run, take
from tests.broker.streams.administering import again, bury, settled

from railgun.client.client import connect

NONE = {"redriven": 0, "already": 0, "left": 0, "refused": []}


def test_dead_letters_are_redriven_once_to_the_group_that_gave_them_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            assert await client.redrive("orders") == NONE
            await client.delete("orders")
            await bury(client, "orders", 3, colour="red")
            others = await client.subscribe("orders", group="others")
            others.ack_all(await take(others, 3))
            reader = await client.subscribe("orders")
            await take(reader, 3)
            assert await client.redrive("orders") == NONE | {"redriven": 3}
            sub = await client.subscribe("orders", group="g")
            found = await take(sub, 3)
            assert [m.payload for m in found] == [b"0", b"1", b"2"]
            assert [m.offset for m in found] == [0, 1, 2], "the messages themselves"
            assert [m.id for m in found] == [b"id0", b"id1", b"id2"]
            assert found[1].headers == {"colour": "red"}
            sub.ack_all(found)
            await sub.flush()
            await nothing(others)
            await nothing(reader)
            await others.close()
            for _ in range(2):
                assert await client.redrive("orders") == NONE
                client = await again(running)
            assert (await client.describe("orders"))["end"] == 3

    run(main())


def test_what_was_redriven_is_known_after_a_kill(tmp_path: Path) -> None:
    async def main() -> None:
        async with process(tmp_path) as running:
            where = f"127.0.0.1:{running.port}"
            client = await connect(where, data=tmp_path, timeout=DEADLINE)
            await bury(client, "orders", 4)
            assert (await client.redrive("orders", most=3))["left"] == 1
            await running.kill()
            die(client)
            await running.start()
            client = await connect(where, data=tmp_path, timeout=DEADLINE)
            assert await client.redrive("orders") == NONE | {"redriven": 1}
            sub = await client.subscribe("orders", group="g")
            assert [m.payload for m in await take(sub, 4)] == [b"0", b"1", b"2", b"3"]
            await client.close()

    run(main())


def test_a_crash_between_redrive_and_ack_doubles_no_letter(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await bury(client, "orders", 3)
            await client.redrive("orders", most=2)
            async with await client.subscribe("orders", group="g") as sub:
                (await sub.next(DEADLINE)).ack()  # one is done, the other is not
                await sub.flush()
            await running.stop()
            shutil.rmtree(tmp_path / "streams" / "orders.dlq" / "groups")  # the acks are lost
            await running.start()
            client = await running.client()
            told = await client.redrive("orders")
            assert told == {"redriven": 1, "already": 2, "left": 0, "refused": []}
            async with await client.subscribe("orders", group="g") as sub:
                assert [m.offset for m in await take(sub, 2)] == [1, 2]
                await nothing(sub)

    run(main())


def test_some_letters_are_redriven_and_those_that_die_again_later(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await bury(client, "orders", 5)
            told = await client.redrive("orders", offsets=[3, 1, 1])
            assert told == NONE | {"redriven": 2, "left": 3}
            async with await client.subscribe("orders", group="g") as sub:
                for message in await take(sub, 2):
                    message.nack(reason="still not")
                await sub.flush()
                await settled(client, "orders", "g")
            assert (await client.describe("orders.dlq"))["end"] == 7, "letters of their own"
            letters = await take(await client.subscribe("orders.dlq", start=5), 2)
            assert [one.headers["redrives"] for one in letters] == ["1", "1"]
            assert await client.redrive("orders", most=1) == NONE | {"redriven": 1, "left": 4}
            assert await client.redrive("orders") == NONE | {"redriven": 4}
            sub = await client.subscribe("orders", group="g")
            assert [m.offset for m in await take(sub, 5)] == [0, 1, 2, 3, 4]

    run(main())


def test_what_is_redriven_does_not_die_of_the_distance_it_had(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", dead_distance=2)
            await client.publish_many("orders", [b"%d" % n for n in range(10)])
            sub = await client.subscribe("orders", group="g", exclusive=True)
            found = await take(sub, 10)
            sub.ack_all(found[1:9])
            await sub.flush()
            found[0].nack(reason="no")
            (last,) = await take(sub, 1)  # what was above was recalled
            assert last.offset == 9
            async with asyncio.timeout(DEADLINE):
                while not (told := await client.redrive("orders"))["redriven"]:
                    await asyncio.sleep(0.01)
            assert told == NONE | {"redriven": 1}
            assert [m.offset for m in await take(sub, 2)] == [0, 9], "in order"

    run(main())


def test_a_redrive_says_what_it_cannot_do(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await bury(client, "orders", 4)
            sub = await client.subscribe("orders.dlq", group="redrive", prefetch=1)
            await sub.next(DEADLINE)
            await refused("GROUP_BUSY", client.redrive("orders"))
            await sub.close()
            await client.publish("orders.dlq", b"by hand", headers={"a": "b"})
            await client.publish("orders.dlq", b"bare")
            await client.purge("orders", 1)
            await client.reset_group("orders", "g", 3)
            told = await client.redrive("orders", most=3)
            codes = [(one["offset"], one["code"]) for one in told["refused"]]
            assert codes == [
                (0, "MESSAGE_GONE"),
                (3, "GROUP_BUSY"),
                (4, "NOT_A_LETTER"),
                (5, "NOT_A_LETTER"),
            ]
            assert (told["redriven"], told["left"]) == (2, 4), "and they stay where they are"
            await client.delete_group("orders", "g")
            told = await client.redrive("orders", offsets=[3])
            assert told["refused"][0]["code"] == "NO_GROUP"
            await client.delete("orders")
            await refused("NO_STREAM", client.redrive("orders"))
            await client.ensure("orders")
            told = await client.redrive("orders")
            texts = {one["offset"]: one["text"] for one in told["refused"]}
            assert "ends before message 0 (at 0): it was deleted and made anew" in texts[0]
            await client.publish_many("orders", [b"other", b"0", b"1", b"2"])
            told = await client.redrive("orders")
            assert {one["code"] for one in told["refused"]} == {"MESSAGE_GONE", "NOT_A_LETTER"}
            texts = {one["offset"]: one["text"] for one in told["refused"]}
            assert "has another message 0: it was deleted and made anew" in texts[0]
            await client.purge("orders", 2)
            told = await client.redrive("orders", offsets=[0])
            assert "does not have message 0 any more (it begins at 2)" in told["refused"][0]["text"]

    run(main())


def test_letters_that_are_not_there_or_were_redriven_are_refused_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()

            async def codes(*offsets: int) -> list[tuple[int, str]]:
                told = await client.redrive("orders", offsets=offsets)
                return [(one["offset"], one["code"]) for one in told["refused"]]

            await client.ensure("orders")
            assert await codes(4, 2) == [(2, "NO_LETTER"), (4, "NO_LETTER")], "no letters at all"
            await client.delete("orders")
            await bury(client, "orders", 5)
            assert await codes(0, 3, 77) == [(77, "NO_LETTER")]
            assert await codes(0, 1, 3) == [(0, "REDRIVEN"), (3, "REDRIVEN")], "and 1 is redriven"
            assert (await client.group("orders.dlq", "redrive"))["ready"] == 2
            client = await again(running)
            assert await codes(1) == [(1, "REDRIVEN")]
            async with await client.subscribe("orders.dlq", group="redrive", prefetch=1) as sub:
                (await sub.next(DEADLINE)).nack(delay=3600)
                await sub.flush()
            assert await codes(2) == [(2, "GROUP_BUSY")]
            await client.purge("orders.dlq", 3)
            assert await codes(0, 2, 4) == [(0, "NO_LETTER"), (2, "NO_LETTER")]

    run(main())
