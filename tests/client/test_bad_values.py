"""Values that cannot be meant, given to every call of the clients, every command and the HTTP API.

Each is refused with a typed error that has a code and a sentence; nothing is stored, the connection goes on, the node
lives. What is not sensible on a kind of stream is refused by name.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.broker.running import DEADLINE, Raw, node, refused, run, take, until
from tests.broker.server.test_http import code, serving

from railgun.broker.streams.admin import CALLS
from railgun.cli.errors import DONE
from railgun.cli.main import main as command
from railgun.client.client import Client, connect
from railgun.client.errors import StreamsError
from railgun.client.sync import connect_sync
from railgun.testing.node import served
from railgun.transport.commands import encode
from railgun.transport.proto import streams_pb2 as p
from railgun.transport.records import build

LONE = "\ud800"  # a text that UTF-8 cannot say
YEARS = 30 * 365 * 86400.0
LONG_ID = "x" * 256
BAD_NAMES: list[Any] = ["", "a/b", "../x", ".a", "x" * 201, LONE, 5, None, b"orders", "a b", "\x00"]
BAD_TIMES: list[Any] = [-1, -0.001, math.nan, math.inf, -math.inf, "1", True, [], 1e300]
Call = Callable[[Client], Awaitable[object]]


def calls() -> list[tuple[str, Call]]:
    """Every call of the client, with every value that it cannot have."""
    found: list[tuple[str, Call]] = []
    value: Any

    def bad(what: str, value: Any, call: Call) -> None:
        found.append((f"{what}={value!r:.40}", call))

    for name in BAD_NAMES:
        bad("publish stream", name, lambda c, v=name: c.publish(v, b"x"))  # type: ignore[misc]
        bad("many stream", name, lambda c, v=name: c.publish_many(v, [b"x"]))  # type: ignore[misc]
        bad("request stream", name, lambda c, v=name: c.request(v, b"x"))  # type: ignore[misc]
        bad("subscribe stream", name, lambda c, v=name: c.subscribe(v))  # type: ignore[misc]
        bad("ensure stream", name, lambda c, v=name: c.ensure(v))  # type: ignore[misc]
        bad("describe", name, lambda c, v=name: c.describe(v))  # type: ignore[misc]
        bad("delete", name, lambda c, v=name: c.delete(v))  # type: ignore[misc]
        bad("purge", name, lambda c, v=name: c.purge(v))  # type: ignore[misc]
        bad("redrive", name, lambda c, v=name: c.redrive(v))  # type: ignore[misc]
        bad("groups", name, lambda c, v=name: c.groups(v))  # type: ignore[misc]
        bad("group", name, lambda c, v=name: c.group("orders", v))  # type: ignore[misc]
        bad("reset", name, lambda c, v=name: c.reset_group("orders", v, "start"))  # type: ignore[misc]
        bad("delete group", name, lambda c, v=name: c.delete_group("orders", v))  # type: ignore[misc]
        bad("group", name, lambda c, v=name: c.subscribe("orders", group=v))  # type: ignore[misc]
        bad("consumer", name, lambda c, v=name: c.subscribe("orders", consumer=v))  # type: ignore[misc]
    for value in [5, None, [b"x"], 1.5, LONE, {}]:
        bad("payload", value, lambda c, v=value: c.publish("orders", v))  # type: ignore[misc]
        bad("payloads", value, lambda c, v=value: c.publish_many("orders", [b"x", v]))  # type: ignore[misc]
        bad("question", value, lambda c, v=value: c.request("news", v))  # type: ignore[misc]
        bad("answer", value, lambda c, v=value: c.respond("r1", v))  # type: ignore[misc]
    for value in [5, None, b"xyz", "xyz", 1.5]:
        bad("payloads", value, lambda c, v=value: c.publish_many("orders", v))  # type: ignore[misc]
    for value in ["", b"", LONG_ID, "ü" * 128, b"x" * 256, 7, [], LONE]:
        bad("id", value, lambda c, v=value: c.publish("orders", b"x", id=v))  # type: ignore[misc]
        bad("one id", value, lambda c, v=value: c.publish_many("orders", [b"x"], id=v))  # type: ignore[misc]
        bad("ids", value, lambda c, v=value: c.publish_many("orders", [b"x", b"y"], ids=["a", v]))  # type: ignore[misc]
    for value in ["ab", 5, ["a"], ["a", "b", "c"]]:
        bad("ids", value, lambda c, v=value: c.publish_many("orders", [b"x", b"y"], ids=v))  # type: ignore[misc]
    for value in [5, "a", [1], {"a": 1}, {1: "a"}, {"a": None}, {"a": LONE}, {"a": b"x"}]:
        bad("headers", value, lambda c, v=value: c.publish("orders", b"x", headers=v))  # type: ignore[misc]
    for value in [one for one in BAD_TIMES if one not in (math.inf, 1e300)]:  # which is for ever
        bad("timeout", value, lambda c, v=value: c.publish("orders", b"x", timeout=v))  # type: ignore[misc]
        bad("many timeout", value, lambda c, v=value: c.publish_many("orders", [b"x"], timeout=v))  # type: ignore[misc]
        bad("subscribe timeout", value, lambda c, v=value: c.subscribe("orders", timeout=v))  # type: ignore[misc]
        bad("redrive timeout", value, lambda c, v=value: c.redrive("orders", timeout=v))  # type: ignore[misc]
    for value in BAD_TIMES:
        bad("request timeout", value, lambda c, v=value: c.request("news", b"x", timeout=v))  # type: ignore[misc]
        bad("ack_wait", value, lambda c, v=value: c.subscribe("orders", group="g", ack_wait=v))  # type: ignore[misc]
        for setting in ("id_box", "max_age", "dead_age"):
            bad(setting, value, lambda c, s=setting, v=value: c.ensure("other", **{s: v}))  # type: ignore[misc]
    bad("request timeout", 0, lambda c: c.request("news", b"x", timeout=0))
    bad("request timeout", 90000, lambda c: c.request("news", b"x", timeout=90000))
    bad("ack_wait", YEARS, lambda c: c.subscribe("orders", group="g", ack_wait=YEARS))
    for value in [-1, 1.5, "middle", None, True, 1 << 64, [], b"start", ""]:
        bad("start", value, lambda c, v=value: c.subscribe("orders", start=v))  # type: ignore[misc]
        bad("reset to", value, lambda c, v=value: c.reset_group("orders", "g", v))  # type: ignore[misc]
    for value in [0, -1, 1.5, "5", None, 1 << 40, True]:
        bad("prefetch", value, lambda c, v=value: c.subscribe("orders", prefetch=v))  # type: ignore[misc]
    for value in [5, "..", "a*", "#.a.#.a.#", "x" * 300, LONE, b"#"]:
        bad("matcher", value, lambda c, v=value: c.subscribe("news", matcher=v))  # type: ignore[misc]
    for value in [5, "a..b", "a.*", "x" * 300, LONE, None]:
        bad("topic", value, lambda c, v=value: c.publish("news", b"x", topic=v))  # type: ignore[misc]
        bad("topics", value, lambda c, v=value: c.publish_many("news", [b"x"], topic=v))  # type: ignore[misc]
        bad("request topic", value, lambda c, v=value: c.request("news", b"x", topic=v))  # type: ignore[misc]
    for value in ["some", 0, None, [], "ALL"]:
        bad("acks", value, lambda c, v=value: c.publish("orders", b"x", acks=v))  # type: ignore[misc]
    for value in [0, -1, 1.5, "5", True, 1 << 64, []]:
        for setting in ("max_ids", "max_bytes", "dead_deliveries"):
            bad(setting, value, lambda c, s=setting, v=value: c.ensure("other", **{s: v}))  # type: ignore[misc]
    for value in [-1, 1.5, "5", True, 1 << 64, []]:
        bad("dead_distance", value, lambda c, v=value: c.ensure("other", dead_distance=v))  # type: ignore[misc]
        bad("purge before", value, lambda c, v=value: c.purge("orders", v))  # type: ignore[misc]
        bad("redrive most", value, lambda c, v=value: c.redrive("orders", most=v))  # type: ignore[misc]
        bad("redrive offsets", value, lambda c, v=value: c.redrive("orders", [v]))  # type: ignore[misc]
    for value in [5, "12", {1: 2}.keys, [object()]]:
        bad("redrive offsets", value, lambda c, v=value: c.redrive("orders", v))  # type: ignore[misc]
    for value in ["table", 5, None, [], {}]:
        bad("kind", value, lambda c, v=value: c.ensure("other", kind=v))  # type: ignore[misc]
        bad("duplicates", value, lambda c, v=value: c.ensure("other", duplicates=v))  # type: ignore[misc]
    for value in ["loud", 5, [], ""]:
        bad("mode", value, lambda c, v=value: c.ensure("other", mode=v))  # type: ignore[misc]
    bad("setting", "colour", lambda c: c.ensure("other", colour="red"))
    bad("setting", object, lambda c: c.ensure("other", max_age=object()))
    bad("call", 5, lambda c: c.admin(5))  # type: ignore[arg-type]
    bad("call", "nothing", lambda c: c.admin("nothing"))
    bad("arguments", set, lambda c: c.admin("describe", name={1}))
    bad("exclusive", "yes", lambda c: c.subscribe("orders", group="g", exclusive="yes"))  # type: ignore[arg-type]
    bad("exclusive", "alone", lambda c: c.subscribe("orders", exclusive=True))
    bad("response", 5, lambda c: c.respond(5, b"x"))  # type: ignore[arg-type]
    # What is not sensible on a kind of stream.
    bad("ephemeral id", "a", lambda c: c.publish("news", b"x", id="a"))
    bad("ephemeral one id", "a", lambda c: c.publish_many("news", [b"x", b"y"], id="a"))
    bad("ephemeral ids", "a", lambda c: c.publish_many("news", [b"x"], ids=["a"]))
    bad("ephemeral acks", "all", lambda c: c.publish("news", b"x", acks="all"))
    bad("ephemeral exclusive", True, lambda c: c.subscribe("news", group="g", exclusive=True))
    bad("ephemeral start", 5, lambda c: c.subscribe("news", start=5))
    bad("ephemeral ack_wait", 5, lambda c: c.subscribe("news", group="g", ack_wait=5))
    bad("ephemeral max_age", 500, lambda c: c.ensure("other", kind="ephemeral", max_age=500))
    bad("ephemeral purge", "", lambda c: c.purge("news"))
    bad("persistent topic", "a", lambda c: c.publish("orders", b"x", topic="a"))
    bad("persistent matcher", "a", lambda c: c.subscribe("orders", matcher="a"))
    bad("persistent request", "", lambda c: c.request("orders", b"x"))
    return found


def test_no_value_gives_a_raw_error_stores_something_or_ends_the_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.ensure("news", kind="ephemeral")
            await client.publish("orders", b"first")
            async with await client.subscribe("orders", group="g"):
                pass
            connection, wrong = client._connection, []
            for what, call in calls():
                try:
                    async with asyncio.timeout(DEADLINE):
                        await call(client)
                except StreamsError as error:
                    if not error.code or not error.text or error.code in ("INTERNAL", "DEADLINE"):
                        wrong.append(f"{what}: {error!r}")
                except BaseException as error:
                    wrong.append(f"{what}: {error!r}")
                else:
                    wrong.append(f"{what}: was taken")
            assert wrong == []
            assert client._connection is connection, "the connection was lost"
            assert sorted(one["name"] for one in await client.streams()) == ["news", "orders"]
            assert (await client.describe("orders"))["end"] == 1
            assert await client.publish("orders", b"second") == 1

    run(main(), deadline=120.0)


@pytest.mark.parametrize(
    ("delay", "reason"),
    [(-1, ""), (YEARS, ""), (math.nan, ""), (math.inf, ""), ("1", ""), (0, 5), (0, LONE), (None, "")],
)  # fmt: skip
def test_a_nack_that_cannot_be_meant_is_refused(tmp_path: Path, delay: Any, reason: Any) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"x")
            sub = await client.subscribe("orders", group="g")
            (message,) = await take(sub, 1)
            with pytest.raises(StreamsError) as caught:
                message.nack(delay, reason)
            assert caught.value.code == "BAD_REQUEST"
            for wrong in (-1, math.nan, "1", True):
                with pytest.raises(StreamsError):
                    await sub.next(wrong)  # type: ignore[arg-type]
                with pytest.raises(StreamsError):
                    await sub.flush(wrong)  # type: ignore[arg-type]
            with pytest.raises(StreamsError):
                await sub.batch(0)
            message.ack()
            await sub.flush()

    run(main())


def test_a_node_refuses_what_makes_no_sense_whoever_sends_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders")
            await client.publish("orders", b"x")
            raw = await Raw.dial(running)
            asked = p.Subscribe(request=1, stream="orders", group="g", credit=1)
            raw.connection.send(b"".join(encode(asked, (), 1)))
            await until(lambda: any(isinstance(f.command, p.Deliver) for f in raw.frames))
            [told] = [f.command for f in raw.frames if isinstance(f.command, p.Deliver)]
            years = int(YEARS * 1e6)
            raw.connection.send(
                b"".join(
                    encode(
                        p.Nack(request=2, ranges=told.ranges, epoch=told.epoch, delay=years), (), 1
                    )
                )
            )
            asked = p.Subscribe(request=3, stream="orders", group="h", ack_wait=years)
            raw.connection.send(b"".join(encode(asked, (), 2)))
            batch = build([b"x"], [b"id"])
            await client.ensure("news", kind="ephemeral")
            raw.connection.send(b"".join(encode(p.Publish(request=4, stream="news"), [batch])))
            await until(lambda: len(raw.codes()) == 3)
            assert raw.codes() == ["BAD_DELAY", "BAD_REQUEST", "NOT_PERSISTENT"]
            for channel, asked in enumerate(
                (
                    p.Subscribe(request=5, stream="orders", group="h"),
                    p.Subscribe(request=6, stream="news"),
                    p.Subscribe(request=7, stream="orders", exclusive=True, credit=1),
                ),
                start=5,
            ):
                raw.connection.send(b"".join(encode(asked, (), channel)))
            await until(lambda: len(raw.codes()) == 6)
            texts = [f.command.text for f in raw.frames if isinstance(f.command, p.Failed)][3:]
            assert raw.codes()[3:] == ["BAD_REQUEST"] * 3
            assert ["credit" in texts[0], "credit" in texts[1], "exclusive" in texts[2]] == [
                True
            ] * 3
            raw.connection.close()

    run(main())


@pytest.mark.parametrize(
    "given",
    [
        {"where": "nonsense"}, {"where": "a:b"}, {"where": "127.0.0.1:99999"}, {"where": 5}, {"where": ""},
        {"secret": "no hex"}, {"secret": 5}, {"timeout": -1}, {"timeout": "1"}, {"timeout": math.nan},
        {"name": 5}, {"name": LONE}, {"where": []}, {"where": [5]}, {"where": "127.0.0.1:-1"},
    ],
    ids=str,
)  # fmt: skip
def test_an_address_that_cannot_be_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            where = f"127.0.0.1:{running.port}"
            told: dict[str, Any] = {
                "where": where,
                "secret": "00" * 32,
                "data": tmp_path,
                "timeout": 1.0,
            } | given
            with pytest.raises((StreamsError, ValueError)) as caught:
                await connect(**told)
            assert str(caught.value)
            assert not isinstance(caught.value, UnicodeError)

    run(main())


def test_the_client_without_an_event_loop_refuses_the_same(tmp_path: Path) -> None:
    with served(tmp_path), connect_sync(data=tmp_path) as client:
        client.ensure("orders")
        client.ensure("news", kind="ephemeral")
        client.publish("orders", b"x")
        for call in (
            lambda: client.publish("orders", 5),  # type: ignore[arg-type]
            lambda: client.publish("orders", b"x", id=LONG_ID),
            lambda: client.publish("orders", b"x", timeout=-1),
            lambda: client.publish("news", b"x", id="a"),
            lambda: client.publish_many("orders", "abc"),
            lambda: client.publish_soon("orders", "abc").result(DEADLINE),
            lambda: client.subscribe("orders", start=-1),
            lambda: client.request("news", b"x", timeout=-1),
            lambda: client.respond(5, b"x"),  # type: ignore[arg-type]
            lambda: client.admin("nothing"),
        ):
            with pytest.raises(StreamsError):
                call()
        with client.subscribe("orders", group="g") as orders:
            message = orders.next(DEADLINE)
            for delay in (-1, YEARS, "1"):
                with pytest.raises(StreamsError):
                    message.nack(delay)  # type: ignore[arg-type]
            with pytest.raises(StreamsError):
                orders.next(-1)
            message.ack()
            orders.flush()
        with client.subscribe("news") as news:
            client.publish("news", b"x")
            heard = news.next(DEADLINE)
            with pytest.raises(StreamsError, match="NO_ACKS"):
                heard.ack()
            with pytest.raises(StreamsError, match="NO_ACKS"):
                heard.nack()


@pytest.mark.parametrize(
    "typed",
    [
        ["pub", "news", "x", "--id", "a"], ["pub", "orders", "x", "--id", LONG_ID],
        ["pub", "orders", "x", "--id", ""], ["pub", "orders", "x", "--topic", "a"],
        ["pub", "orders", "x", "--acks", "some"], ["pub", "a/b", "x"], ["pub", "", "x"],
        ["sub", "orders", "--start", "-1"], ["sub", "orders", "--start", "middle"],
        ["sub", "orders", "--start", "9" * 18], ["sub", "orders", "--matcher", "a"],
        ["sub", "news", "--matcher", "a*"], ["sub", "news", "--start", "5"], ["sub", "orders", "--count", "0"],
        ["sub", "orders", "--group", "a/b"], ["sub", "news", "--group", "g", "--exclusive"],
        ["req", "news", "x", "--timeout", "-1"], ["req", "news", "x", "--timeout", "100000"],
        ["req", "orders", "x"], ["req", "news", "x", "--topic", "a.*"],
        ["stream", "ensure", "a b"], ["stream", "ensure", "o", "--max-age", "-1"],
        ["stream", "ensure", "o", "--max-bytes", "0"], ["stream", "ensure", "o", "--max-ids", "0"],
        ["stream", "ensure", "o", "--ephemeral", "--max-age", "500"], ["stream", "ensure", "o", "--max-age", "nan"],
        ["stream", "info", "nothing"], ["stream", "purge", "orders", "--before", "7", "--yes"],
        ["stream", "purge", "news", "--yes"], ["stream", "retime", "--latest", "soon", "--yes"],
        ["group", "reset", "orders", "nothing", "start", "--yes"], ["group", "explain", "orders", "a/b"],
        ["dlq", "redrive", "nothing"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_commands_say_what_is_wrong_and_store_nothing(
    node_of_commands: Path, capsys: pytest.CaptureFixture[str], typed: list[str]
) -> None:
    code = command([*typed, "--data", str(node_of_commands), "--json"])
    told = capsys.readouterr()
    assert code != DONE
    assert "Traceback" not in told.out + told.err
    assert '"error"' in told.out + told.err
    assert command(["stream", "ls", "--data", str(node_of_commands), "--json"]) == DONE
    listed = capsys.readouterr().out
    assert '"end": 1' in listed
    assert '"name": "o"' not in listed


@pytest.fixture(scope="module")
def node_of_commands(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of a node with two streams."""
    data = tmp_path_factory.mktemp("node")
    with served(data), connect_sync(data=data) as client:
        client.ensure("orders")
        client.ensure("news", kind="ephemeral")
        client.publish("orders", b"x")
        yield data


def test_every_argument_of_the_http_api_is_checked(tmp_path: Path) -> None:
    values: list[Any] = [
        -1,
        1.5,
        1 << 80,
        True,
        "",
        "x" * 300,
        "a/b",
        [],
        [-1],
        ["a"],
        {},
        {"a": []},
        "\x00",
    ]

    async def main() -> None:
        async with serving(tmp_path) as (running, web):
            await web("PUT", "/streams/s")
            client = await running.client()
            await client.publish("s", b"x")
            async with await client.subscribe("s", group="g"):
                pass
            for call in CALLS.values():
                path = call.path.replace("{name}", "s").replace("{group}", "g")
                for argument in call.arguments:
                    if "{" + argument.name + "}" in call.path or call.name == "delete":
                        continue  # what is in the path is a text; and it would delete the stream
                    for value in values:
                        asked: tuple[Any, ...] = (call.method, path, {argument.name: value})
                        if call.method in ("GET", "DELETE"):
                            said = quote(value if isinstance(value, str) else json.dumps(value))
                            asked = (call.method, f"{path}?{argument.name}={said}")
                        status, told = await web(*asked)
                        assert status < 500 or told["error"]["code"] == "NO_CLUSTER", (asked, told)
                        assert status == 200 or code((status, told))[1] != "INTERNAL", asked
            assert (await client.describe("s"))["end"] == 1
            assert [one["name"] for one in await client.streams()] == ["s"]
            assert await client.publish("s", b"y") == 1

    run(main(), deadline=60.0)


def test_refusals_say_what_happened_and_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        async with node(tmp_path) as running:
            client = await running.client()
            await client.ensure("orders", max_ids=1)
            await client.ensure("news", kind="ephemeral")
            await client.publish("orders", b"x", id="i1")
            full = await refused("ID_POOL_FULL", client.publish("orders", b"x", id="i2"))
            for words in ("'i2'", "'orders'", "max_ids", "not stored", "--max-ids"):
                assert words in full.text
            reserved = await refused("BAD_REQUEST", client.subscribe("orders", group="@x"))
            for words in ("'@x'", "reserved for tracked consumers", "--consumer"):
                assert words in reserved.text
            tracked = await refused("NOT_PERSISTENT", client.subscribe("news", consumer="x"))
            assert "no tracked consumers" in tracked.text
            sub = await client.subscribe("orders", group="g")
            (message,) = await take(sub, 1)
            with pytest.raises(StreamsError, match=r"delay is 0 to 31622400 seconds \(366 days\)"):
                message.nack(YEARS)
            await running.stop()
            await until(lambda: not client.connected)
            unsent = await refused("DEADLINE", client.admin("describe", 0.05, name="orders"))
            assert "nothing was sent" in unsent.text
            assert "no node at" in unsent.text
            in_doubt = await refused("DEADLINE", client.publish("orders", b"x", timeout=0.05))
            assert "may be stored or not" in in_doubt.text
            assert "With an ID" in in_doubt.text

    run(main())
