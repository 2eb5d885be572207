"""Who is asked where nodes are: a real etcd, a real name server on loopback, and a fake of Consul."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import platform
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from aiohttp import web
from bench._peers import ENVIRONMENTS, end_with_parent
from verification.debian import find_program
from verification.ports import free_port
from verification.stream_server import StreamServer

from railgun.broker.discovery import Address, Discovery, DiscoveryError, discovery_of
from railgun.transport.http import HttpPort

DEADLINE = 20.0


# ---------------------------------------------------------------- etcd


class EtcdServer:
    """A real etcd, of this machine or of Debian. If there is none the tests fail: they are nothing without."""

    def __init__(self, directory: Path, *more: str, tls: bool = False) -> None:
        self._program, self._environment = find_program(
            "etcd", ["etcd-server"], ENVIRONMENTS / "etcd-server"
        )
        if platform.machine() == "aarch64":
            self._environment["ETCD_UNSUPPORTED_ARCH"] = "arm64"  # else 3.4 does not start there
        self.port, self._peers = free_port(), free_port()
        self._directory, self._more, self._tls = directory, more, tls
        self._lives = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, *, empty: bool = False) -> None:
        """Run it until it answers; `empty`: as if nothing had ever been written."""
        self._lives += empty
        client = f"http{'s' if self._tls else ''}://{self.address}"
        peers = f"http://127.0.0.1:{self._peers}"
        said = self._directory / "etcd.log"
        with said.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(self._program, "--data-dir", self._directory / f"etcd-{self._lives}"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
                    *("--initial-cluster", f"default={peers}"),
                    *("--heartbeat-interval", "20", "--election-timeout", "100"),  # short leases
                    *self._more,
                ],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=end_with_parent,
            )
        end = time.monotonic() + DEADLINE
        while not self._answers():
            assert self._process.poll() is None, said.read_text(errors="replace")[-2000:]
            assert time.monotonic() < end, said.read_text(errors="replace")[-2000:]
            time.sleep(0.01)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            return True
        return False

    def stop(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE)
            self._process = None

    async def call(self, name: str, told: dict[str, Any], token: str = "") -> dict[str, Any]:
        """A call, as another program would make it."""
        url = f"http://{self.address}/v3/{name}"
        headers = {"Authorization": token} if token else {}
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=told, headers=headers) as response,
        ):
            answer: dict[str, Any] = json.loads(await response.text())
            assert response.status == 200, answer
            return answer

    async def put(self, key: str, value: bytes) -> None:
        await self.call("kv/put", {"key": in_base64(key), "value": in_base64(value)})

    async def forget(self) -> int:
        """End all leases, and so all that hangs on them; how many there were."""
        leases = (await self.call("lease/leases", {})).get("leases", [])
        for lease in leases:
            await self.call("lease/revoke", lease)
        return len(leases)


def in_base64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


@contextlib.contextmanager
def etcd(directory: Path, *more: str, tls: bool = False) -> Iterator[EtcdServer]:
    """An etcd within this."""
    server = EtcdServer(directory, *more, tls=tls)
    try:
        server.start()
        yield server
    finally:
        server.stop()


# ---------------------------------------------------------------- DNS


@dataclass
class NameServer:
    """A name server on loopback, UDP and TCP, whose zone can be changed while it runs."""

    records: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """By name and type, as in ("nodes.test.", "A")."""
    behave: str = "well"
    """Or `silent`, `refuse` (SERVFAIL), `garbage`, `truncate` (what is asked by UDP), `only A` (others: SERVFAIL),
    `just A` (others: silence)."""
    port: int = 0
    asked: list[str] = field(default_factory=list)

    def answer(self, data: bytes, by_udp: bool) -> bytes | None:
        """What it says to a question."""
        if self.behave == "silent":
            return None
        if self.behave == "garbage":
            return data[:2] + b"\xff" * 30
        try:
            question = dns.message.from_wire(data)
        except dns.exception.DNSException:
            return None
        made = dns.message.make_response(question)
        made.flags |= dns.flags.RA
        name, kind = question.question[0].name, question.question[0].rdtype
        self.asked.append(f"{'UDP' if by_udp else 'TCP'} {kind.name} {name}")
        if self.behave == "just A" and kind.name != "A":
            return None
        if self.behave == "refuse" or (self.behave == "only A" and kind.name != "A"):
            made.set_rcode(dns.rcode.SERVFAIL)
        elif self.behave == "truncate" and by_udp:
            made.flags |= dns.flags.TC
        elif found := self.records.get((str(name), kind.name)):
            made.answer.append(dns.rrset.from_text(name, 60, "IN", kind, *found))
        elif not any(known == str(name) for known, _ in self.records):
            made.set_rcode(dns.rcode.NXDOMAIN)
        return made.to_wire()


class _ByUdp(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: Any) -> None:
        answer = self._server.answer(data, by_udp=True)
        if answer is not None:
            self._transport.sendto(answer, address)


@contextlib.asynccontextmanager
async def name_server(records: dict[tuple[str, str], list[str]]) -> AsyncIterator[NameServer]:
    """A name server within this."""
    server = NameServer(dict(records))

    async def by_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            size = int.from_bytes(await reader.readexactly(2), "big")
            answer = server.answer(await reader.readexactly(size), by_udp=False)
            if answer is not None:
                writer.write(len(answer).to_bytes(2, "big") + answer)
                await writer.drain()
        writer.close()

    async with StreamServer(by_tcp) as listener:
        server.port = listener.port
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _ByUdp(server), local_addr=("127.0.0.1", server.port)
        )
        try:
            yield server
        finally:
            transport.close()


# ---------------------------------------------------------------- Consul


class FakeConsul:
    """A FAKE of a Consul agent: no Consul runs in these tests, for Debian 12 has none that could be fetched.

    It does what the source of Consul 1.11 and later says that the HTTP API of an agent does with services that have one
    TTL check: registration (`/v1/agent/service/register`, checked for what it needs), `check/pass` and
    `service/deregister` with 404 for what is not known, checks that become critical when their TTL is over,
    `/v1/health/service/:name` with and without `passing`, and tokens, with a default policy of deny: an unknown one is
    refused with 403; `weak` is known and has no rights, so changes are refused, and lists come filtered and say so in a
    header; without one it is the same, but the header is left out. With `old` an unknown check is a 500, as it was in
    older ones. It cannot show that a real agent does the same.
    """

    def __init__(self, token: str | None = None, *, old: bool = False) -> None:
        self._token, self._old = token, old
        self.services: dict[str, dict[str, Any]] = {}
        self.passes = 0
        self.registrations = 0
        self._until: dict[str, float] = {}
        """Until when a check passes, by its id."""

    def app(self) -> web.Application:
        made = web.Application()
        made.router.add_put("/v1/agent/service/register", self._register)
        made.router.add_put("/v1/agent/service/deregister/{id}", self._deregister)
        made.router.add_put("/v1/agent/check/pass/{id}", self._pass)
        made.router.add_get("/v1/health/service/{name}", self._health)
        return made

    def forget(self) -> None:
        """As an agent that begins anew, without its directory."""
        self.services.clear()
        self._until.clear()

    def _admits(self, request: web.Request) -> bool:
        given = request.headers.get("X-Consul-Token")
        if self._token is not None and given not in (None, "weak", self._token):
            raise web.HTTPForbidden(text="ACL not found")
        return self._token is None or given == self._token

    def _may_write(self, request: web.Request) -> None:
        if not self._admits(request):
            raise web.HTTPForbidden(
                text="Permission denied: token lacks permission 'service:write'"
            )

    async def _register(self, request: web.Request) -> web.Response:
        self._may_write(request)
        told = await request.json()
        check = told["Check"]
        if not told["Name"] or _seconds(check["DeregisterCriticalServiceAfter"]) < 60:
            raise web.HTTPBadRequest(text="Invalid service")
        self.services[told["ID"]] = told
        lasts = _seconds(check["TTL"]) if check.get("Status") == "passing" else 0.0
        self._until[check["CheckID"]] = time.monotonic() + lasts
        self.registrations += 1
        return web.Response()

    async def _deregister(self, request: web.Request) -> web.Response:
        self._may_write(request)
        id = request.match_info["id"]
        if self.services.pop(id, None) is None:
            raise web.HTTPNotFound(text=f'Unknown service ID "{id}"')
        return web.Response()

    async def _pass(self, request: web.Request) -> web.Response:
        self._may_write(request)
        id = request.match_info["id"]
        for service in self.services.values():
            if service["Check"]["CheckID"] == id:
                self._until[id] = time.monotonic() + _seconds(service["Check"]["TTL"])
                self.passes += 1
                return web.Response()
        if self._old:
            raise web.HTTPInternalServerError(text=f'CheckID "{id}" does not have associated TTL')
        raise web.HTTPNotFound(text=f'Unknown check ID "{id}"')

    async def _health(self, request: web.Request) -> web.Response:
        if not self._admits(request):
            told = {"X-Consul-Default-ACL-Policy": "deny"}
            if self.services and "X-Consul-Token" in request.headers:
                told["X-Consul-Results-Filtered-By-ACLs"] = "true"
            return web.json_response([], headers=told)
        found = []
        for service in self.services.values():
            passing = self._until[service["Check"]["CheckID"]] > time.monotonic()
            if service["Name"] == request.match_info["name"] and (
                passing or "passing" not in request.query
            ):
                found.append(self._entry(service, passing))
        policy = "allow" if self._token is None else "deny"
        return web.json_response(found, headers={"X-Consul-Default-ACL-Policy": policy})

    def _entry(self, service: dict[str, Any], passing: bool) -> dict[str, Any]:
        status = "passing" if passing else "critical"
        check = {"CheckID": service["Check"]["CheckID"], "Status": status}
        shown = {key: service.get(key) for key in ("ID", "Address", "Port", "Meta")}
        return {
            "Node": {"Node": "here", "Address": "127.0.0.9"},
            "Service": {**shown, "Service": service["Name"]},
            "Checks": [check],
        }


def _seconds(text: str) -> float:
    return float(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


@contextlib.asynccontextmanager
async def listening(app: web.Application, port: int = 0) -> AsyncIterator[HttpPort]:
    """An application within this."""
    made = HttpPort(app, "127.0.0.1", port)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


@contextlib.asynccontextmanager
async def saying(data: bytes) -> AsyncIterator[int]:
    """The port of somebody who says this to everybody, whatever they say; nothing, if it is empty."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not data:
            return
        with contextlib.suppress(OSError):
            await reader.read(1 << 16)
            writer.write(data)
            await writer.drain()
        writer.close()

    async with StreamServer(talk) as server:
        yield server.port


def http(body: str, status: str = "200 OK", *more: str) -> bytes:
    """An answer by HTTP."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body.encode())}", *more, "", body]
    return "\r\n".join(lines).encode()


async def until(holds: Callable[[], Any]) -> None:
    """Wait for a condition that is asked for."""
    async with asyncio.timeout(DEADLINE):
        while not await holds():
            await asyncio.sleep(0.02)


# ---------------------------------------------------------------- what is found

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
