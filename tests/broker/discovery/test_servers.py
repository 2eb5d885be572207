"""Where other nodes are, by servers that keep it: right, wrong, down, talking nonsense, and forgetful."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.broker.discovery.registries import (
    ONE,
    THREE,
    TWO,
    EtcdServer,
    FakeConsul,
    etcd,
    failed,
    found,
    http,
    in_base64,
    listening,
    opened,
    saying,
    until,
)
from tests.broker.running import run
from verification.ports import free_port

from railgun.broker.discovery import Address, Discovery, DiscoveryError, discovery_of
from railgun.broker.discovery.asking import MAX_ANSWER_BYTES
from railgun.broker.discovery.keeping import KeptDiscovery


def die(discovery: Discovery) -> None:
    """As if its process had ended: nothing is kept alive, nothing withdrawn."""
    assert isinstance(discovery, KeptDiscovery)
    assert discovery._keeping is not None
    discovery._keeping.cancel()
    discovery._keeping = discovery._announced = None


# ---------------------------------------------------------------- who answers by HTTP, or does not

REMOTE = ["etcd://127.0.0.1:{}/railgun/nodes", "consul://127.0.0.1:{}/railgun"]
remote = pytest.mark.parametrize("text", REMOTE, ids=["etcd", "consul"])


@remote
def test_a_server_that_is_down_is_an_error(text: str) -> None:
    async def main() -> None:
        made = discovery_of(text.format(free_port()))
        assert "no server answers" in await failed(made.find())
        assert "no server answers" in await failed(made.announce(ONE, "a"))
        await made.close()  # what cannot be withdrawn is no error
        assert "closed" in await failed(made.announce(ONE, "a"))

    run(main())


@remote
def test_a_server_that_is_silent_is_an_error(text: str) -> None:
    async def main() -> None:
        async with saying(b"") as port, opened(f"{text.format(port)}?timeout=0.3") as made:
            assert "no answer within 0.3 s" in await failed(made.find())
            assert "no answer within 0.3 s" in await failed(made.announce(ONE, "a"))

    run(main())


NAMELESS = in_base64(json.dumps({"host": "a" * 64, "port": 1}))
PORTLESS = in_base64('{"host": "a", "port": 0}')
DEEP = in_base64("[" * 100_000)
GARBAGE = {
    "no HTTP": b"\x00\xff hello\r\n\r\n",
    "half an answer": http("[]")[:-1],
    "no JSON": http("<h1>hello</h1>"),
    "nothing": http(""),
    "a number": http("7"),
    "null": http("null"),
    "another list": http("[7, null, [], {}]"),
    "another object": http('{"hello": "you"}'),
    "keys that are none": http('{"header": {}, "kvs": 7}'),
    "keys without addresses": http(
        '{"header": {}, "kvs": [{}, {"value": 7}, {"value": "?"}, '
        f'{{"value": "{NAMELESS}"}}, {{"value": "{PORTLESS}"}}, {{"value": "{DEEP}"}}]}}'
    ),
    "services without addresses": http(
        '[{"Service": {"Address": "a", "Port": true}}, {"Service": {"Address": "", "Port": 1}}, '
        '{"Service": {"Address": 7, "Port": 1}, "Node": {}}, {"Service": {"Address": "a..b", "Port": 1}}, '
        '{"Service": {"Address": "a", "Port": 1e99}}]'
    ),
    "a deep answer": http("[" * 200_000),
    "a long answer": http(" " * MAX_ANSWER_BYTES + '{"header": {}}'),
    "an error": http("out of order", "500 Oops"),
    "not here": http("<h1>not here</h1>", "404 Not Found"),
    "elsewhere": http("", "302 Found", "Location: http://127.0.0.1:9/"),
}


@remote
@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_nonsense_is_an_error(text: str, data: bytes) -> None:
    async def main() -> None:
        async with saying(data) as port, opened(text.format(port)) as made:
            assert text.format(port) in await failed(made.find())

    run(main())


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_node_is_not_announced_to_nonsense(data: bytes) -> None:
    async def main() -> None:
        async with saying(data) as port, opened(REMOTE[0].format(port)) as made:
            await failed(made.announce(ONE, "a"))

    run(main())


@remote
def test_nobody_is_led_elsewhere(text: str) -> None:
    async def main() -> None:
        answer = http('{"header": {}}' if text == REMOTE[0] else "[]")
        async with saying(answer) as good:
            lead = http("", "307 Elsewhere", f"Location: http://127.0.0.1:{good}/v3/kv/range")
            async with saying(lead) as port, opened(text.format(port)) as made:
                assert "307" in await failed(made.find())
            async with opened(text.format(good)) as made:
                assert await made.find() == []

    run(main())


def test_an_entry_that_cannot_be_read_does_not_hide_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = '{"Service": {"Address": "127.0.0.1", "Port": 7173}}'
    near = '{"Service": {"Address": "", "Port": 7173}, "Node": {"Address": "127.0.0.2"}}'

    async def main() -> None:
        answer = http(f"[7, {good}, {near}]")
        async with saying(answer) as port, opened(REMOTE[1].format(port)) as made:
            assert await made.find() == [ONE, TWO]

    with caplog.at_level(logging.WARNING):
        run(main())
    assert "no address and port" in caplog.text


# ---------------------------------------------------------------- etcd


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd(tmp_path_factory.mktemp("etcd")) as made:
        yield made


def keys(server: EtcdServer, name: str, options: str = "ttl=15") -> str:
    return f"etcd://{server.address}/{name}?{options}"


def test_etcd_nobody_yet_then_announced_then_withdrawn(server: EtcdServer) -> None:
    async def main() -> None:
        async with opened(keys(server, "life/nodes")) as one, opened(keys(server, "life")) as above:
            assert await one.find() == []
            async with opened(keys(server, "life/nodes")) as two:
                await one.announce(ONE, "a")
                await two.announce(TWO, "b")
                await two.announce(TWO, "b")  # as often as one likes
                assert await found(one, ONE, TWO)
                assert await found(two, ONE, TWO)
                await two.announce(THREE, "b")  # it has moved
                assert await found(one, ONE, THREE)
            assert await found(one, ONE)
            assert await found(above, ONE)  # /life/ is the beginning of /life/nodes/
            async with opened(keys(server, "life/nod")) as beside:
                assert await beside.find() == []

    run(main())


def test_etcd_forgets_the_dead_and_keeps_the_living(server: EtcdServer) -> None:
    async def main() -> None:
        text = keys(server, "death", "ttl=3")
        async with opened(text) as one, opened(text) as two:
            await one.announce(ONE, "a")
            await two.announce(TWO, "b")
            die(two)
            before = await server.call("kv/range", {"key": in_base64("/death/a")})
            assert await found(one, ONE, TWO)
            await until(lambda: found(one, ONE))  # the older one is still there,
            after = await server.call("kv/range", {"key": in_base64("/death/a")})
            assert after["kvs"] == before["kvs"]  # and was all the time

    run(main())


def test_etcd_is_told_again_what_it_forgot(server: EtcdServer) -> None:
    async def main() -> None:
        async with opened(keys(server, "again", "ttl=1")) as one:
            await one.announce(ONE, "a")
            assert await server.forget() >= 1
            await until(lambda: found(one, ONE))
            await server.call("kv/deleterange", {"key": in_base64("/again/a")})
            await until(lambda: found(one, ONE))
            await server.put("/again/a", b"something else")
            await until_found(one, ONE)
        assert await discovery_of(keys(server, "again")).find() == []

    run(main())


async def until_found(discovery: Discovery, *addresses: Address) -> None:
    """Wait until these are found; that it cannot be known is to be waited for, too."""

    async def holds() -> bool:
        with contextlib.suppress(DiscoveryError):
            return await found(discovery, *addresses)
        return False

    await until(holds)


def test_etcd_comes_back_with_and_without_what_it_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(server: EtcdServer) -> None:
        async with opened(keys(server, "nodes", "ttl=1")) as one:
            await one.announce(ONE, "a")
            for empty in (False, True):
                server.stop()
                await failed(one.find())
                await until(lambda: _told(caplog, "cannot be announced"))
                caplog.clear()
                server.start(empty=empty)
                await until_found(one, ONE)
                await until(lambda: _told(caplog, "is announced again"))

    with caplog.at_level(logging.INFO, "railgun"), etcd(tmp_path) as server:
        run(main(server), 60)


async def _told(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return text in caplog.text


def test_etcd_that_was_down_at_first_is_told_later(tmp_path: Path) -> None:
    async def main() -> None:
        server = EtcdServer(tmp_path)
        try:
            async with opened(keys(server, "nodes", "ttl=1")) as one:
                await failed(one.announce(ONE, "a"))
                server.start()
                await until_found(one, ONE)
        finally:
            server.stop()

    run(main())


def test_etcd_has_members_that_are_dead_or_silent(server: EtcdServer) -> None:
    async def main() -> None:
        async with saying(b"") as silent, saying(GARBAGE["no JSON"]) as mad:
            hosts = f"127.0.0.1:{free_port()},127.0.0.1:{silent},127.0.0.1:{mad},{server.address}"
            async with opened(f"etcd://{hosts}/members?timeout=4") as one:
                assert await one.find() == []
                await one.announce(ONE, "a")
                assert await one.find() == [ONE]
            assert await discovery_of(keys(server, "members")).find() == []

    run(main())


def test_etcd_with_a_key_that_is_not_ours(server: EtcdServer) -> None:
    async def main() -> None:
        async with opened(keys(server, "mixed")) as one:
            await server.put("/mixed/x", b"\xff")
            assert "Are they ours?" in await failed(one.find())
            await one.announce(ONE, "a")
            assert await one.find() == [ONE]

    run(main())


@pytest.mark.parametrize("signed", [False, True])
def test_etcd_with_passwords(tmp_path: Path, signed: bool) -> None:
    options = ["--bcrypt-cost", "4"]
    if signed:
        key = _certificate(tmp_path)[0]
        options += ["--auth-token", f"jwt,priv-key={key},sign-method=RS256,ttl=10m"]

    async def main(server: EtcdServer) -> None:
        for user, role in (("root", "root"), ("ann", "nodes")):
            await server.call("auth/role/add", {"name": role})
            await server.call("auth/user/add", {"name": user, "password": "s&t"})
            await server.call("auth/user/grant", {"user": user, "role": role})
        keys_of = {"key": in_base64("/nodes/"), "range_end": in_base64("/nodes0")}
        may = {"name": "nodes", "perm": {"permType": "READWRITE", **keys_of}}
        await server.call("auth/role/grant", may)
        await server.call("auth/enable", {})
        ann = "ttl=1&user=ann&password="
        async with (
            opened(keys(server, "nodes", "")) as nobody,
            opened(keys(server, "nodes", f"{ann}wrong")) as wrong,
            opened(keys(server, "others", f"{ann}s%26t")) as elsewhere,
            opened(keys(server, "nodes", f"{ann}s%26t")) as right,
        ):
            for refused in (nobody, wrong, elsewhere):
                assert "etcd refuses" in await failed(refused.find())
                told = await failed(refused.announce(TWO, "b"))
                assert "etcd refuses" in told
                assert "wrong" not in told
            await right.announce(ONE, "a")
            assert await right.find() == [ONE]
            root = await server.call("auth/authenticate", {"name": "root", "password": "s&t"})
            if signed:  # whoever changes rights makes them old
                await server.call("auth/role/add", {"name": "more"}, root["token"])
            else:  # this forgets them
                await server.call("auth/disable", {}, root["token"])
                await server.call("auth/enable", {})
            assert await right.find() == [ONE]
        async with opened(keys(server, "nodes", f"{ann}s%26t")) as right:
            assert await right.find() == []

    with etcd(tmp_path, *options) as server:
        run(main(server))


def _certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A key, and its certificate."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate


def test_etcd_with_tls(tmp_path: Path) -> None:
    key, certificate = _certificate(tmp_path)

    async def main(server: EtcdServer) -> None:
        async with opened(keys(server, "nodes", f"tls=true&ca={certificate}")) as one:
            await one.announce(ONE, "a")
            assert await one.find() == [ONE]
        for options in ("tls=true", "tls=false"):
            async with opened(keys(server, "nodes", options)) as one:
                await failed(one.find())

    with etcd(tmp_path, f"--cert-file={certificate}", f"--key-file={key}", tls=True) as server:
        run(main(server))


# ---------------------------------------------------------------- Consul (a fake)


def agent(url: str, options: str = "ttl=15") -> str:
    return f"consul://{url.removeprefix('http://')}/railgun?{options}"


def test_consul_nobody_yet_then_announced_then_withdrawn() -> None:
    async def main() -> None:
        fake = FakeConsul()
        async with listening(fake.app()) as port, opened(agent(port.url)) as one:
            assert await one.find() == []
            async with opened(agent(port.url)) as two:
                await one.announce(ONE, "a")
                await two.announce(TWO, "b")
                await two.announce(TWO, "b")
                assert await found(one, ONE, TWO)
                assert set(fake.services) == {"railgun-a", "railgun-b"}
                await two.announce(THREE, "b")
                assert await found(one, ONE, THREE)
            assert await found(one, ONE)
            async with opened(agent(port.url).replace("railgun", "other")) as other:
                assert await other.find() == []

    run(main())


def test_consul_leaves_out_the_dead_and_keeps_the_living() -> None:
    async def main() -> None:
        fake = FakeConsul()
        async with (
            listening(fake.app()) as port,
            opened(agent(port.url, "ttl=2")) as one,
            opened(agent(port.url, "ttl=2")) as two,
        ):
            await one.announce(ONE, "a")
            await two.announce(TWO, "b")
            die(two)
            assert await found(one, ONE, TWO)
            await until(lambda: found(one, ONE))  # the older one is still there
            assert fake.passes > 0

    run(main())


@pytest.mark.parametrize("old", [False, True])
def test_consul_is_told_again_what_it_forgot(old: bool) -> None:
    async def main() -> None:
        fake = FakeConsul(old=old)
        async with listening(fake.app()) as port, opened(agent(port.url, "ttl=1")) as one:
            await one.announce(ONE, "a")
            fake.forget()
            assert await one.find() == []
            await until(lambda: found(one, ONE))
            fake.forget()
        assert not fake.services  # that it was withdrawn from who had forgotten it is no error

    run(main())


def test_consul_that_goes_away_and_comes_back_empty() -> None:
    async def main() -> None:
        async with listening(FakeConsul().app()) as port:
            one = discovery_of(agent(port.url, "ttl=1"))
            await one.announce(ONE, "a")
        await failed(one.find())
        async with listening(FakeConsul().app(), port.port):
            await until_found(one, ONE)
            await one.close()
            assert await one.find() == []

    run(main())


def test_consul_wants_a_token() -> None:
    async def main() -> None:
        fake = FakeConsul("hidden")
        async with (
            listening(fake.app()) as port,
            opened(agent(port.url, "token=hidden")) as right,
            opened(agent(port.url, "token=guessed")) as wrong,
            opened(agent(port.url, "token=weak")) as weak,
            opened(agent(port.url, "")) as without,
        ):
            assert await right.find() == []  # nobody yet
            await right.announce(ONE, "a")
            assert await right.find() == [ONE]
            assert "ACL not found" in await failed(wrong.find())
            for blind in (weak, without):
                assert "may be seen" in await failed(blind.find())  # and not: nobody
            for refused in (wrong, weak, without):
                told = await failed(refused.announce(TWO, "b"))
                assert "service:write" in told
                assert "guessed" not in told
            assert await right.find() == [ONE]

    run(main())
