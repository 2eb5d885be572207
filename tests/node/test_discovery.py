"""Where other nodes are: each way is found right, wrong, down, talking nonsense, and forgetful."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import dns.asyncresolver
import pytest
import uvloop
from tests.node.registries import (
    EtcdServer,
    FakeConsul,
    NameServer,
    etcd,
    free_port,
    http,
    in_base64,
    listening,
    name_server,
    saying,
    until,
)
from tests.node.running import run

from railgun.node.cluster.discovery import (
    Address,
    BadDiscoveryError,
    Discovery,
    DiscoveryError,
    Place,
    discovery_of,
    schemes,
)
from railgun.node.cluster.discovery.asking import LONGEST
from railgun.node.cluster.discovery.keeping import Kept

ONE, TWO, THREE = ("127.0.0.1", 7173), ("127.0.0.2", 7173), ("::1", 7174)


@contextlib.asynccontextmanager
async def opened(text: str) -> AsyncIterator[Discovery]:
    made = discovery_of(text)
    try:
        yield made
    finally:
        await made.close()


async def failed(call: Awaitable[object]) -> str:
    """It is an error with its code; what it says."""
    with pytest.raises(DiscoveryError) as caught:
        await call
    assert caught.value.code == "DISCOVERY"
    return str(caught.value)


async def found(discovery: Discovery, *addresses: Address) -> bool:
    return set(await discovery.find()) == set(addresses)


def die(discovery: Discovery) -> None:
    """As if its process had ended: nothing is kept alive, nothing withdrawn."""
    assert isinstance(discovery, Kept)
    assert discovery._keeping is not None
    discovery._keeping.cancel()
    discovery._keeping = discovery._told = None


# ---------------------------------------------------------------- texts


def test_a_list_is_found_as_it_stands() -> None:
    async def main() -> None:
        text = "static://127.0.0.1:7173,127.0.0.2:7173,[::1]:7174,127.0.0.1:7173"
        async with opened(text) as discovery:
            await discovery.announce(TWO, "b")
            assert await discovery.find() == [ONE, TWO, THREE]
        made = discovery_of({"discovery": "STATIC://node-a:7173", "port": 7173})
        assert await made.find() == [("node-a", 7173)]

    run(main())


BAD = {
    "": "there are static://, dns://",
    "127.0.0.1:7173": "begins with a scheme",
    "://a:1": "begins with a scheme",
    "zookeeper://a:1": "there is no zookeeper://; there are static://, dns://, dns+srv://, consul://, etcd://",
    "static://": "a host is missing",
    "static://a:1,,b:1": "a host is missing",
    "static://a": "a has no port",
    "static://a:0": "ports are 1 to 65535",
    "static://a:65536": "ports are 1 to 65535",
    "static://a:" + "9" * 5000: "ports are 1 to 65535",
    "static://a:x": "is no host",
    "static://::1:7173": "is no host",
    "static://a b:1": "is no host",
    "static://a:1/path": "has no path",
    "static://a:1?ttl=3": "it has none",
    "static://ann:hidden@a:1": "are options",
    "dns://nodes.example": "has no port",
    "dns://a.example:1,b.example:1": "one name",
    "dns://10.0.0.1:7173": "use static://",
    "dns://a..b:7173": "cannot be a host",
    f"dns://{'a' * 64}.b:7173": "cannot be a host",
    "static://a..b:7173": "cannot be a host",
    "static://[::1::2]:7173": "cannot be a host",
    f"dns://{'a.' * 126}a.b:7173": "cannot be a host",
    "dns://nodes.example:7173?server=ns.example": "server is an address",
    "dns://nodes.example:7173?sever=127.0.0.1": "there are server, timeout",
    "dns+srv://_railgun._tcp.example:7173": "ports of their own",
    "dns+srv://": "one name",
    "consul://127.0.0.1:8500": "name of a service",
    "consul://127.0.0.1:8500/a/b": "name of a service",
    "consul://a:8500,b:8500/railgun": "one agent",
    "consul://a:8500/railgun?tls=yes": "true or false",
    "consul://a:8500/railgun?ca=/nothing": "goes with tls=true",
    "consul://a:8500/railgun?tls=true&ca=/nothing": "cannot be used",
    "consul://a:8500/railgun?token": "name=value",
    "consul://a:8500/railgun?token=hidden&token=hidden": "twice",
    "etcd://a:2379": "beginning of keys",
    "etcd://a:2379/": "beginning of keys",
    "etcd://a:2379/nodes?user=ann": "belong together",
    "etcd://a:2379/nodes?user=ann&password=hidden&ttl=0": "ttl is a number of seconds",
    "etcd://a:2379/nodes?timeout=soon": "timeout is a number of seconds",
    "etcd://a:2379/nodes?timeout=nan": "timeout is a number of seconds",
}


@pytest.mark.parametrize(("text", "why"), BAD.items(), ids=[text[:50] for text in BAD])
def test_a_wrong_text_is_refused_and_says_why(text: str, why: str) -> None:
    with pytest.raises(BadDiscoveryError) as caught:
        discovery_of(text)
    assert caught.value.code == "BAD_DISCOVERY"
    assert why in str(caught.value)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("section", [{}, {"discovery": 7}, {"discovery": ["static://a:1"]}])
def test_a_section_without_a_text_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(BadDiscoveryError, match="discovery is a text"):
        discovery_of(section)


def test_secrets_are_not_shown() -> None:
    place = Place.read("consul://127.0.0.1:8500/railgun?token=hidden%2b+")
    assert place.options["token"] == "hidden++"
    assert "hidden" not in f"{place} {place!r}"


# ---------------------------------------------------------------- what others add

_PLUGIN = """
class Sharks:
    def __init__(self, place):
        self.place = place
    async def find(self):
        return self.place.addresses()
    async def announce(self, address, node):
        pass
    async def close(self):
        pass
number = 7
"""
_ENTRIES = """[railgun.discovery]
sharks = sharks_of_others:Sharks
etcd = sharks_of_others:Sharks
number = sharks_of_others:number
absent = sharks_that_swam_away:Sharks
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed, as pip does it."""
    (tmp_path / "sharks_of_others.py").write_text(_PLUGIN)
    about = tmp_path / "sharks-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sharks\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(_ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("plugin")
def test_a_package_adds_a_way() -> None:
    assert schemes()[:5] == ["static", "dns", "dns+srv", "consul", "etcd"]
    assert "sharks" in schemes()

    async def main() -> None:
        async with opened("sharks://127.0.0.1:7173") as discovery:
            assert await discovery.find() == [ONE]
            assert type(discovery).__name__ == "Sharks"

    run(main())
    with pytest.raises(BadDiscoveryError, match=r"there are static://.*, sharks://"):
        discovery_of("zookeeper://a:1")


@pytest.mark.usefixtures("plugin")
def test_a_package_cannot_replace_ours() -> None:
    assert type(discovery_of("etcd://127.0.0.1:2379/nodes")).__name__ == "Etcd"


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    ("scheme", "why"), [("absent", "cannot be imported"), ("number", "cannot be called")]
)
def test_a_package_that_is_broken_is_named(scheme: str, why: str) -> None:
    with pytest.raises(BadDiscoveryError, match=f"of sharks, and that {why}"):
        discovery_of(f"{scheme}://a:1")


# ---------------------------------------------------------------- DNS

ZONE = {
    ("nodes.test.", "A"): ["127.0.0.1", "127.0.0.2"],
    ("nodes.test.", "AAAA"): ["::1"],
    ("mail.test.", "MX"): ["10 post.test."],
    ("a.test.", "A"): ["127.0.0.1"],
    ("b.test.", "A"): ["127.0.0.2"],
    ("b.test.", "AAAA"): ["::1"],
    ("_railgun._tcp.test.", "SRV"): [
        "20 1 7003 a.test.",
        "10 1 7002 a.test.",
        "10 9 7001 b.test.",
        "10 9 0 b.test.",
        "30 1 7004 gone.test.",
    ],
    ("_none._tcp.test.", "SRV"): ["0 0 1 ."],
}


def at(server: NameServer, text: str, timeout: float = 5) -> str:
    return f"{text}?server=127.0.0.1:{server.port}&timeout={timeout}"


async def _addresses_of_a_name() -> None:
    async with name_server(ZONE) as server, opened(at(server, "dns://nodes.test:7173")) as nodes:
        assert await nodes.find() == [ONE, TWO, ("::1", 7173)]
        await nodes.announce(ONE, "a")
        server.records[("nodes.test.", "A")] = ["127.0.0.3"]
        assert await nodes.find() == [("127.0.0.3", 7173), ("::1", 7173)]


def test_addresses_of_a_name_are_asked_for_anew() -> None:
    run(_addresses_of_a_name())


def test_addresses_of_a_name_on_the_event_loop_of_a_node() -> None:
    uvloop.run(asyncio.wait_for(_addresses_of_a_name(), 20))


def test_service_records_come_by_priority_with_their_ports() -> None:
    async def main() -> None:
        async with name_server(ZONE) as server:
            async with opened(at(server, "dns+srv://_railgun._tcp.test")) as nodes:
                assert await nodes.find() == [
                    ("127.0.0.2", 7001),
                    ("::1", 7001),
                    ("127.0.0.1", 7002),
                    ("127.0.0.1", 7003),
                ]
            async with opened(at(server, "dns+srv://_none._tcp.test")) as none:
                assert await none.find() == []

    run(main())


@pytest.mark.parametrize(
    "text", ["dns://new.test:7173", "dns://mail.test:7173", "dns+srv://_railgun._tcp.new.test"]
)
def test_a_name_without_records_is_nobody_yet(text: str) -> None:
    async def main() -> None:
        async with name_server(ZONE) as server, opened(at(server, text)) as nodes:
            assert await nodes.find() == []

    run(main())


@pytest.mark.parametrize("behave", ["silent", "refuse", "garbage"])
@pytest.mark.parametrize("text", ["dns://nodes.test:7173", "dns+srv://_railgun._tcp.test"])
def test_a_name_server_without_an_answer_is_an_error(text: str, behave: str) -> None:
    async def main() -> None:
        async with name_server(ZONE) as server, opened(at(server, text, 0.5)) as nodes:
            server.behave = behave
            assert text in await failed(nodes.find())
            server.behave = "well"
            async with opened(at(server, text)) as nodes:
                assert len(await nodes.find()) >= 3

    run(main())


def test_no_name_server_at_all_is_an_error() -> None:
    async def main() -> None:
        text = f"dns://nodes.test:7173?server=127.0.0.1:{free_port()}&timeout=0.5"
        async with opened(text) as nodes:
            assert "nodes.test" in await failed(nodes.find())

    run(main())


def test_name_servers_and_search_domains_are_those_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "resolv.conf"
    port = 0

    class OfThisFile(dns.asyncresolver.Resolver):  # which cannot name a port
        def __init__(self, configure: bool) -> None:
            super().__init__(str(file), configure)
            self.port = port

    async def main() -> None:
        nonlocal port
        async with name_server(ZONE) as server, opened("dns://a:7173") as nodes:
            port = server.port
            assert "this machine has no name servers" in await failed(nodes.find())
            file.write_text("nameserver 127.0.0.1\nsearch elsewhere test\n")
            assert await nodes.find() == [ONE]
            file.write_text("nameserver 127.0.0.1\nsearch elsewhere\n")
            assert await nodes.find() == []

    monkeypatch.setattr(dns.asyncresolver, "Resolver", OfThisFile)
    run(main())


@pytest.mark.parametrize("behave", ["only A", "just A"])
def test_one_kind_of_address_is_enough(behave: str) -> None:
    async def main() -> None:
        async with name_server(ZONE) as server:
            server.behave = behave
            async with opened(at(server, "dns://a.test:7173", 1)) as nodes:
                assert await nodes.find() == [ONE]
            async with opened(at(server, "dns://gone.test:7173", 0.3)) as nodes:
                await failed(nodes.find())

    run(main())


def test_a_long_answer_comes_by_tcp() -> None:
    many = [f"10.0.{i}.{j}" for i in range(4) for j in range(1, 100)]

    async def main() -> None:
        async with name_server({("nodes.test.", "A"): many}) as server:
            server.behave = "truncate"
            async with opened(at(server, "dns://nodes.test:7173")) as nodes:
                assert await found(nodes, *((host, 7173) for host in many))
            assert any(asked.startswith("TCP A") for asked in server.asked)

    run(main())


# ---------------------------------------------------------------- who answers by HTTP, or does not

REMOTE = ["etcd://127.0.0.1:{}/railgun/nodes", "consul://127.0.0.1:{}/railgun"]
remote = pytest.mark.parametrize("text", REMOTE, ids=["etcd", "consul"])


@remote
def test_a_server_that_is_down_is_an_error(text: str) -> None:
    async def main() -> None:
        made = discovery_of(text.format(free_port()))
        assert "nobody answers" in await failed(made.find())
        assert "nobody answers" in await failed(made.announce(ONE, "a"))
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
    "a long answer": http(" " * LONGEST + '{"header": {}}'),
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
                await until(lambda: _told(caplog, "cannot be told"))
                caplog.clear()
                server.start(empty=empty)
                await until_found(one, ONE)
                await until(lambda: _told(caplog, "know again"))

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
            opened(agent(port.url, "")) as without,
        ):
            await right.announce(ONE, "a")
            assert await right.find() == [ONE]
            assert "ACL not found" in await failed(wrong.find())
            assert "may not see" in await failed(without.find())  # and not: nobody
            for refused in (wrong, without):
                told = await failed(refused.announce(TWO, "b"))
                assert "service:write" in told
                assert "guessed" not in told
            assert await right.find() == [ONE]

    run(main())
