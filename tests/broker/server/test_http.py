"""The HTTP API of a node, over real sockets: the same calls as on the wire, and nothing that ends the node."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from tests.broker.running import DEADLINE, Running, node, run, take
from yarl import URL

from railgun.broker.errors import PortTakenError
from railgun.broker.server.openapi import document, in_path
from railgun.broker.server.server import Server, ServerConfig
from railgun.broker.streams import admin
from railgun.broker.streams.node import Node
from railgun.broker.streams.persistent import Persistent
from railgun.client.client import connect
from railgun.client.errors import StreamsError

Answer = tuple[int, Any]


class Web:
    """A client of the API."""

    def __init__(self, url: str, token: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session
        self.headers = {"Authorization": f"Bearer {token}"}

    async def __call__(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """Status, and what was answered."""
        data = json.dumps(body) if body is not None and not isinstance(body, bytes) else body
        asked = self.session.request(
            method,
            URL(self.url + path, encoded=True),
            data=data,
            headers=self.headers if headers is None else headers,
        )
        async with asked as answer:
            text = await answer.text()
            is_json = answer.content_type == "application/json"
            return answer.status, json.loads(text) if is_json else text


@asynccontextmanager
async def serving(data: Path) -> AsyncIterator[tuple[Running, Web]]:
    """A node with HTTP, and a client of it that knows the secret."""
    async with node(data, http_port=0) as running, aiohttp.ClientSession() as session:
        assert running.server is not None
        assert running.server.http is not None
        yield running, Web(running.server.http.url, running.server.secret.hex(), session)


def code(answer: Answer) -> tuple[int, str]:
    """Status and code of a refusal, which has both and a sentence."""
    status, told = answer
    assert set(told) == {"error"}
    assert set(told["error"]) == {"code", "message"}
    assert told["error"]["message"]
    return status, told["error"]["code"]


def test_streams_live_and_die_by_http(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (running, web):
            assert await web("GET", "/streams") == (200, [])
            made = await web("PUT", "/streams/orders", {"asked": {"dead_deliveries": 1}})
            assert made == (200, {"result": "CREATED", "differs": {}})
            assert (await web("PUT", "/streams/orders"))[1]["result"] == "UNCHANGED"
            differs = {"asked": {"dead_deliveries": 2}, "mode": "strict"}
            assert code(await web("PUT", "/streams/orders", differs)) == (409, "DIFFERS")
            client = await running.client()
            await client.publish_many("orders", [b"a", b"b", b"c"])
            sub = await client.subscribe("orders", group="g")
            found = await take(sub, 3)
            found[0].nack(reason="no")
            sub.ack_all(found[1:])
            await sub.flush()
            at = "/streams/orders/groups/g"
            assert code(await web("POST", f"{at}/reset", {"to": "start"})) == (409, "GROUP_BUSY")
            assert code(await web("DELETE", at)) == (409, "GROUP_BUSY")
            async with asyncio.timeout(DEADLINE):
                while (await web("GET", at))[1]["lag"]:
                    await asyncio.sleep(0.01)
            await sub.close()
            assert await web("POST", "/streams/orders/redrive", {"most": 5}) == (
                200, {"redriven": 1, "already": 0, "left": 0, "refused": []},
            )  # fmt: skip
            _, told = await web("POST", "/streams/orders/redrive", {"offsets": [0, 9]})
            assert [one["code"] for one in told["refused"]] == ["REDRIVEN", "NO_LETTER"]
            assert await web("POST", f"{at}/reset", {"to": 1}) == (200, {"position": 1})
            assert await web("POST", "/streams/orders/purge", {"before": 2}) == (
                200, {"first": 2, "end": 3, "purged": 2},
            )  # fmt: skip
            _, groups = await web("GET", "/streams/orders/groups")
            assert [one["floor"] for one in groups] == [2]
            assert await web("DELETE", at) == (200, {"deleted": "g"})
            assert code(await web("GET", at)) == (404, "NO_GROUP")
            _, told = await web("GET", "/streams/orders")
            assert (told["first"], told["end"], told["groups"]) == (2, 3, [])
            assert await web("DELETE", "/streams/orders?dead_letters=true") == (
                200, {"deleted": ["orders", "orders.dlq"]},
            )  # fmt: skip
            assert code(await web("GET", "/streams/orders")) == (404, "NO_STREAM")
            await running.again()
            assert await web("GET", "/streams") == (200, [])

    run(main())


def test_nobody_without_the_secret(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (running, web):
            assert running.server is not None
            secret = running.server.secret.hex()
            for wrong in (
                {},
                {"Authorization": ""},
                {"Authorization": "Bearer"},
                {"Authorization": "Bearer " + "0" * 64},
                {"Authorization": f"Bearer {secret[:-1]}"},
                {"Authorization": f"Basic {secret}"},
                {"Authorization": secret},
                {"Authorization": "Bearer \u00e9\u00fc"},
            ):
                for method, path in (
                    ("GET", "/streams"), ("PUT", "/streams/a"), ("GET", "/metrics"), ("GET", "/x"),
                ):  # fmt: skip
                    answer = await web(method, path, headers=wrong)
                    assert code(answer) == (401, "UNAUTHORIZED"), wrong
                for path in ("/health", "/openapi.json"):
                    assert (await web("GET", path, headers=wrong))[0] == 200
            assert await web("GET", "/streams") == (200, [])
            assert (await web("GET", "/streams", headers={"Authorization": f"bearer {secret}"}))[0]

    run(main())


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("PUT", "/streams/a", b"{", (400, "BAD_REQUEST")),
        ("PUT", "/streams/a", b"\xff\xfe", (400, "BAD_REQUEST")),
        ("PUT", "/streams/a", b"[" * 100_000, (400, "BAD_REQUEST")),
        ("PUT", "/streams/a", [], (400, "BAD_REQUEST")),
        ("PUT", "/streams/a", {"name": "b"}, (400, "BAD_REQUEST")),
        ("PUT", "/streams/a", {"asked": {"colour": "red"}}, (400, "BAD_SETTINGS")),
        ("PUT", "/streams/a", {"asked": 1}, (400, "BAD_REQUEST")),
        ("PUT", "/streams/a", b" " * (512 << 10), (413, "TOO_LARGE")),
        ("PUT", "/streams/a%2Fb", None, (400, "BAD_SETTINGS")),
        ("PUT", "/streams/..%2f..%2fx", None, (400, "BAD_SETTINGS")),
        ("PUT", "/streams/%00", None, (400, "BAD_SETTINGS")),
        ("GET", "/streams?name=a", None, (400, "BAD_REQUEST")),
        ("DELETE", "/streams/s?dead_letters=yes", None, (400, "BAD_REQUEST")),
        ("DELETE", "/streams/s?dead_letters=true&dead_letters=true", None, (400, "BAD_REQUEST")),
        ("DELETE", "/streams/s?name=b", None, (400, "BAD_REQUEST")),
        ("POST", "/streams/s/purge", {"before": "1"}, (400, "BAD_REQUEST")),
        ("POST", "/streams/s/purge", {"before": 99}, (400, "OFFSET_OUT_OF_RANGE")),
        ("POST", "/streams/s/groups/g/reset", {}, (400, "BAD_REQUEST")),
        ("POST", "/streams/s/groups/g/reset", {"to": "start"}, (404, "NO_GROUP")),
        ("POST", "/streams/air/purge", {}, (409, "NOT_PERSISTENT")),
        ("GET", "/nothing", None, (404, "NOT_FOUND")),
        ("PATCH", "/streams/s", None, (405, "BAD_METHOD")),
        ("POST", "/health", None, (405, "BAD_METHOD")),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, method: str, path: str, body: Any, expected: tuple[int, str]
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (_, web):
            await web("PUT", "/streams/s")
            await web("PUT", "/streams/air", {"asked": {"kind": "ephemeral"}})
            assert code(await web(method, path, body)) == expected
            _, streams = await web("GET", "/streams")
            assert [one["name"] for one in streams] == ["air", "s"]
            assert [path.name for path in (tmp_path / "streams").iterdir() if path.is_file()] == []

    run(main())


def test_bytes_that_are_no_http_harm_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (running, web):
            for garbage in (
                b"\x00" * 1000,
                b"RAILGUN1" + bytes(100),
                b"GET /streams HTTP/9.9\r\n\r\n",
                b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
                b"POST /streams/a/purge HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                b"PUT /streams/a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", running.http_port)
                writer.write(garbage)
                writer.write_eof()
                async with asyncio.timeout(DEADLINE):
                    answer = await reader.read()
                assert not answer or re.match(rb"HTTP/1.\d 40[01]", answer), answer[:100]
                writer.close()
            assert (await web("GET", "/health"))[0] == 200
            assert await web("GET", "/streams") == (200, [])

    run(main())


def test_errors_of_ours_and_of_the_disk_have_their_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(node: Node) -> Any:
        raise KeyError("a key")

    async def full(node: Node) -> Any:
        raise OSError(28, "No space left on device")

    more = {
        name: admin.Call(name, "It fails.", "GET", f"/{name}", (), function)
        for name, function in (("broken", broken), ("full", full))
    }
    monkeypatch.setattr(admin, "CALLS", {**admin.CALLS, **more})

    async def main() -> None:
        async with serving(tmp_path) as (_, web):
            assert code(await web("GET", "/broken")) == (500, "INTERNAL")
            assert code(await web("GET", "/full")) == (507, "NO_SPACE")
            assert await web("GET", "/streams") == (200, [])

    run(main())


# ---------------------------------------------------------------- figures and health


def test_figures_tell_what_happened(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (running, web):
            client = await running.client()
            await client.ensure("orders", dead_deliveries=2)
            await client.ensure("air", kind="ephemeral")
            await client.publish_many("orders", [b"abc"] * 10)
            await client.publish("orders", b"x", id="a")
            for stream, refusal in (("orders", "DUPLICATE_ID"), ("nothing", "NO_STREAM")):
                with pytest.raises(StreamsError, match=refusal):
                    await client.publish(stream, b"x", id="a")
            sub = await client.subscribe("orders", group="g", prefetch=5)
            found = await take(sub, 5)
            found[0].nack()
            (await sub.next(DEADLINE)).nack()
            found[1].nack(delay=60)
            sub.ack_all(found[2:3])
            await sub.flush()
            async with asyncio.timeout(DEADLINE):
                while (await client.group("orders", "g"))["floor"] < 1:
                    await asyncio.sleep(0.01)
            status, text = await web("GET", "/metrics")
            assert status == 200
            values = _values(text)
            one, group = '{stream="orders"}', '{stream="orders",group="g"}'
            expected = {
                "connections": 1, "streams": 3,
                f"stream_first{one}": 0, f"stream_end{one}": 11, f"stream_failed{one}": 0,
                f"stream_published_messages_total{one}": 11, f"stream_duplicates_total{one}": 1,
                f"stream_dead_letters_total{one}": 1,
                'publishes_refused_total{code="DUPLICATE_ID"}': 1,
                'publishes_refused_total{code="NO_STREAM"}': 1,
                f"group_lag{group}": 10, f"group_delayed{group}": 1, f"group_members{group}": 1,
                f"group_in_flight{group}": 5, f"group_redelivered_total{group}": 1,
                f"publish_seconds_count{one}": 2,
                'publish_seconds_bucket{stream="orders",le="+Inf"}': 2,
                'stream_listeners{stream="air"}': 0,
            }  # fmt: skip
            assert {name: values.get(name) for name in expected} == expected
            assert (
                values[f"stream_bytes{one}"] >= values[f"stream_published_bytes_total{one}"] > 100
            )
            assert values[f"publish_seconds_sum{one}"] > 0

    run(main())


def _values(text: str) -> dict[str, float]:
    """The values of a text for Prometheus, which has a kind and a sentence for each metric, once."""
    values: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            name, _, value = line.rpartition(" ")
            bare = re.sub(r"(_bucket|_sum|_count)?(\{.*\})?$", "", name)
            assert bare in kinds, line
            assert name not in values
            values[name.removeprefix("railgun_")] = float(value)
    return values


def test_a_node_with_a_failed_log_is_not_healthy(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (running, web):
            client = await running.client()
            for name in ("good", "bad"):
                await client.ensure(name)
                await client.publish(name, b"x")
            well = {"healthy": True, "reasons": {}, "alarms": []}
            assert await web("GET", "/health") == (200, well)
            assert running.server is not None
            stream = running.server.node.streams["bad"]
            assert isinstance(stream, Persistent)
            stream.log._tail.file.close()  # as if the disk were gone
            with pytest.raises(StreamsError, match="LOG_FAILED"):
                await client.publish("bad", b"y")
            status, told = await web("GET", "/health")
            assert (status, told["healthy"], list(told["reasons"])) == (503, False, ["bad"])
            assert "could not be written" in told["reasons"]["bad"]
            assert await client.publish("good", b"y") == 1

    run(main())


def test_a_damaged_log_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (running, web):
            client = await running.client()
            await client.ensure("orders")
            for n in range(3):
                await client.publish("orders", b"message %d" % n)
            await running.stop()
            [file] = (tmp_path / "streams" / "orders" / "log").glob("*.log")
            data = bytearray(file.read_bytes())
            data[data.index(b"message 1")] ^= 1
            file.write_bytes(data)
            await running.start()
            status, told = await web("GET", "/health")
            assert (status, list(told["reasons"])) == (503, ["orders"])
            assert "damaged" in told["reasons"]["orders"]
            _, text = await web("GET", "/metrics")
            assert _values(text)['stream_failed{stream="orders"}'] == 1

    run(main())


# ---------------------------------------------------------------- the document


def test_the_document_is_openapi_and_names_every_call(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (_, web):
            status, told = await web("GET", "/openapi.json", headers={})
            assert (status, told) == (200, json.loads(json.dumps(document("1"))))
            _check(told)
            named = {
                operation["operationId"]: (method.upper(), path)
                for path, methods in told["paths"].items()
                for method, operation in methods.items()
            }
            for call in admin.CALLS.values():
                assert named[call.name] == (call.method, call.path)
            assert set(named) == {*admin.CALLS, "health", "metrics", "openapi"}

    run(main())


def _check(told: dict[str, Any]) -> None:
    """What OpenAPI 3.1 asks of a document of this form."""
    assert re.fullmatch(r"3\.1\.\d+", told["openapi"])
    assert {"title", "version"} <= set(told["info"])
    assert set(told) <= {"openapi", "info", "security", "paths", "components"}
    schemes = told["components"]["securitySchemes"]
    assert all(name in schemes for one in told["security"] for name in one)
    seen: set[str] = set()
    for path, methods in told["paths"].items():
        assert path.startswith("/")
        for method, operation in methods.items():
            assert method in ("get", "put", "post", "delete")
            assert operation["operationId"] not in seen
            seen.add(operation["operationId"])
            assert operation["summary"].endswith(".")
            parameters = operation.get("parameters", [])
            names = [(one["name"], one["in"]) for one in parameters]
            assert len(names) == len(set(names))
            in_path = {name for name, where in names if where == "path"}
            assert in_path == set(re.findall(r"{(\w+)}", path))
            for one in parameters:
                assert one["in"] in ("path", "query")
                assert one["required"] or one["in"] == "query"
                _check_schema(one["schema"], told)
            if "requestBody" in operation:
                assert method in ("put", "post")
                _check_content(operation["requestBody"]["content"], told)
            for status, response in operation["responses"].items():
                assert re.fullmatch(r"[1-5]\d\d|default", status)
                assert response["description"]
                _check_content(response["content"], told)


def _check_content(content: dict[str, Any], told: dict[str, Any]) -> None:
    assert content
    for kind, media in content.items():
        assert re.match(r"[\w-]+/[\w-]+", kind)
        _check_schema(media["schema"], told)


def _check_schema(schema: dict[str, Any], told: dict[str, Any]) -> None:
    known = {
        "type", "enum", "minimum", "maximum", "items", "oneOf", "properties", "required", "$ref",
        "additionalProperties", "description", "minLength", "maxLength",
    }  # fmt: skip
    assert set(schema) <= known
    if "$ref" in schema:
        found: Any = told
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        _check_schema(found, told)
    kinds = ("string", "integer", "number", "boolean", "object", "array", None)
    assert schema.get("type") in kinds
    assert set(schema.get("required", ())) <= set(schema.get("properties", ()))
    for inner in (*schema.get("oneOf", ()), *schema.get("properties", {}).values()):
        _check_schema(inner, told)
    if schema.get("type") == "array":
        _check_schema(schema["items"], told)


@pytest.mark.parametrize("call", admin.CALLS.values(), ids=admin.CALLS)
def test_a_call_is_told_as_it_is(call: admin.Call) -> None:
    names = [argument.name for argument in call.arguments]
    assert len(names) == len(set(names))
    assert in_path(call) <= set(names)
    assert all(not one.optional for one in call.arguments if one.name in in_path(call))
    operation = document("1")["paths"][call.path][call.method.lower()]
    told = {one["name"] for one in operation["parameters"]}
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        told |= set(schema["properties"])
    assert told == set(names)


# ---------------------------------------------------------------- where it listens


def test_the_address_is_told_and_a_taken_port_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path / "a") as (running, web):
            told = json.loads((tmp_path / "a" / "node.json").read_text())
            assert told["http"] == web.url == f"http://127.0.0.1:{running.http_port}"
            other = Server(ServerConfig(tmp_path / "b", port=0, http_port=running.http_port))
            with pytest.raises(PortTakenError, match="http-port"):
                await other.start()
            plain = Running(tmp_path / "b")  # its directory is free again
            await plain.start()
            assert "http" not in json.loads((tmp_path / "b" / "node.json").read_text())
            await plain.stop()

    run(main())


def test_with_a_certificate_it_speaks_tls(tmp_path: Path) -> None:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )

    async def main() -> None:
        certificate = tmp_path / "cert.pem"
        config = ServerConfig(
            tmp_path / "data",
            port=0,
            http_port=0,
            certificate=certificate,
            key=tmp_path / "key.pem",
        )
        server = Server(config)
        await server.start()
        try:
            assert server.http is not None
            assert server.http.url.startswith("https://")
            async with await connect(data=tmp_path / "data") as client:
                await client.ensure("orders")
            trusted = ssl.create_default_context(cafile=str(certificate))
            headers = {"Authorization": f"Bearer {server.secret.hex()}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                async with session.get(server.http.url + "/streams", ssl=trusted) as answer:
                    assert [one["name"] for one in await answer.json()] == ["orders"]
                with pytest.raises(aiohttp.ClientError):
                    await session.get(server.http.url + "/streams")
                plain = server.http.url.replace("https", "http")
                with pytest.raises(aiohttp.ClientError):
                    await session.get(plain + "/health")
        finally:
            await server.stop()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["plain", "5f3a/orders/totals", "a/begin", "a b/%/ü"])
@pytest.mark.parametrize("safe", ["/", ""], ids=["as-it-is", "percent-2F"])
def test_producers_have_slashes_in_their_names(tmp_path: Path, name: str, safe: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as (_, web):
            assert (await web("PUT", "/streams/orders"))[0] == 200
            of = f"/streams/orders/producers/{quote(name, safe=safe)}"
            status, begun = await web("POST", f"{of}/begin", {"epoch": 1})
            assert (status, begun["epoch"]) == (200, 1)
            status, opened = await web("POST", f"{of}/open", {"epoch": 1})
            assert (status, opened["sequence"]) == (200, 1)
            status, _ = await web("POST", f"{of}/commit", {"epoch": 1, "counts": {}})
            assert status == 200
            status, known = await web("GET", "/streams/orders/producers")
            assert [one["name"] for one in known] == [name]
            assert (await web("DELETE", of))[0] == 200
            assert (await web("GET", "/streams/orders/producers"))[1] == []

    run(main())
