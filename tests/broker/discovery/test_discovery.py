"""Where other nodes are: texts that say how, what packages add, lists and DNS."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import dns.asyncresolver
import pytest
import uvloop
from tests.broker.discovery.registries import (
    ONE,
    THREE,
    TWO,
    NameServer,
    failed,
    found,
    name_server,
    opened,
)
from tests.broker.running import run
from verification.ports import free_port

from railgun.broker.discovery import BadDiscoveryError, Place, discovery_of, schemes

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
    "": "the schemes are static://, dns://",
    "127.0.0.1:7173": "has to begin with a scheme",
    "://a:1": "has to begin with a scheme",
    "zookeeper://a:1": "there is no scheme zookeeper://; the schemes are static://, dns://, dns+srv://, consul://, etcd://",
    "static://": "a host is missing",
    "static://a:1,,b:1": "a host is missing",
    "static://a": "a has no port",
    "static://a:0": "ports are 1 to 65535",
    "static://a:65536": "ports are 1 to 65535",
    "static://a:" + "9" * 5000: "ports are 1 to 65535",
    "static://a:x": "is not a host",
    "static://::1:7173": "is not a host",
    "static://a b:1": "is not a host",
    "static://a:1/path": "has no path",
    "static://a:1?ttl=3": "it has none",
    "static://ann:hidden@a:1": "given as options",
    "dns://nodes.example": "the port is missing",
    "dns://a.example:1,b.example:1": "one name",
    "dns://10.0.0.1:7173": "use static://",
    "dns://a..b:7173": "is not a valid host",
    f"dns://{'a' * 64}.b:7173": "is not a valid host",
    "static://a..b:7173": "is not a valid host",
    "static://[::1::2]:7173": "is not a valid host",
    f"dns://{'a.' * 126}a.b:7173": "is not a valid host",
    "dns://nodes.example:7173?server=ns.example": "server has to be an address",
    "dns://nodes.example:7173?sever=127.0.0.1": "its options are server, timeout",
    "dns+srv://_railgun._tcp.example:7173": "ports of their own",
    "dns+srv://": "one name",
    "consul://127.0.0.1:8500": "name of a service",
    "consul://127.0.0.1:8500/a/b": "name of a service",
    "consul://a:8500,b:8500/railgun": "one agent",
    "consul://a:8500/railgun?tls=yes": "true or false",
    "consul://a:8500/railgun?ca=/nothing": "needs tls=true",
    "consul://a:8500/railgun?tls=true&ca=/nothing": "cannot be used",
    "consul://a:8500/railgun?token": "name=value",
    "consul://a:8500/railgun?token=hidden&token=hidden": "twice",
    "etcd://a:2379": "prefix of the keys",
    "etcd://a:2379/": "prefix of the keys",
    "etcd://a:2379/nodes?user=ann": "belong together",
    "etcd://a:2379/nodes?user=ann&password=hidden&ttl=0": "ttl has to be a number of seconds",
    "etcd://a:2379/nodes?timeout=soon": "timeout has to be a number of seconds",
    "etcd://a:2379/nodes?timeout=nan": "timeout has to be a number of seconds",
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
    with pytest.raises(BadDiscoveryError, match=r"the schemes are static://.*, sharks://"):
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
