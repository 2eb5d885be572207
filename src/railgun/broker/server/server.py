"""A node that listens: the directory, the secret, the socket, and an orderly end.

Rules:

1. Whoever connects proves that they know the secret, before anything else is read (`transport.hello`).
2. The secret is made at the first start, in a file that only its owner can read. Beside it stands where the node
   listens, so that clients on the same machine find both; and a socket, which is quicker for them than TCP.
3. It listens on loopback, and elsewhere only with TLS: without, it refuses to start. So does its HTTP API.
4. In a cluster it also listens for other nodes, with the cluster's secret, and what clients have to know is made from
   that: the same for all nodes.
5. On SIGTERM or Ctrl-C a member of a cluster first hands over what it is master of, and the lead (`railgun serve` does
   that). Then it says to all clients that it goes away: it takes nothing more (`STOPPING`), answers what it has taken,
   and when each client knows (or after `GO_AWAY_S`) it writes what has to be written, and ends. Clients that consume
   have `LAST_ACKS_S` more to go by themselves: until then their acks count.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from railgun.broker.cluster.config import ClusterConfig
from railgun.broker.cluster.errors import RemovedError
from railgun.broker.cluster.member import Member
from railgun.broker.errors import PortTakenError
from railgun.broker.log.disk import Disk, NodeDisk
from railgun.broker.server.http import Api
from railgun.broker.server.session import PULSE_S, Session, Wire
from railgun.broker.streams.node import RESPONSE_TIMEOUT_S, Node
from railgun.broker.streams.routing import Passage
from railgun.client.address import ADDRESS, DATA, SECRET, SOCKET
from railgun.transport.commands import VERSION
from railgun.transport.connection import Connection
from railgun.transport.hello import BAD_VERSION, HelloError
from railgun.transport.listen_rules import (
    BadSecretError,
    OpenListenError,
    is_loopback,
    keep_secret,
    secret_in,
)
from railgun.transport.listener import Listener

PORT: Final = 7171
HTTP_PORT: Final = 7172
HAND_OVER: Final = 8.0
"""Seconds in which others take over, before a node of a cluster ends."""


GO_AWAY_S: Final = 3.0
"""Seconds in which clients take note that a node is about to end, and get their answers."""
LAST_ACKS_S: Final = 0.5
"""Seconds in which clients that consume say what they have acked, and go."""
LINGER_S: Final = 1.0
"""Seconds in which clients read the last answers, before a node that ends closes their connections."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where a node works and listens."""

    data: Path = Path(DATA)
    host: str = "127.0.0.1"
    port: int = PORT
    secret: bytes | None = None
    certificate: Path | None = None
    key: Path | None = None
    http_port: int | None = None
    """Of the HTTP API; 0: any that is free, None: there is none."""
    cluster: ClusterConfig | None = None
    """None: it is alone."""
    rs_timeout: float = RESPONSE_TIMEOUT_S
    """How long a request waits for its response if it does not say (seconds); a cluster has a setting instead."""

    def check(self) -> None:
        """Refuse to listen openly."""
        hosts = [self.host] + ([self.cluster.host] if self.cluster is not None else [])
        open_host = next((host for host in hosts if not is_loopback(host)), None)
        if self.certificate is None and open_host is not None:
            raise OpenListenError(
                f"{open_host} can be reached from elsewhere, and what is sent there can be read: give the node a "
                "certificate and its key, or let it listen on 127.0.0.1"
            )


class Server:
    """A node and those who are connected to it."""

    def __init__(
        self,
        config: ServerConfig,
        disk: Disk | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.config = config
        self.node: Node
        self._disk, self._clock = disk, clock
        self.sessions: dict[Connection, Session] = {}
        self.secret = b""
        self.port = 0
        self.http: Api | None = None
        self._listener = Listener(self._accept)
        self._local = False  # whether clients can come by the Unix socket
        self.member: Member | None = None
        self._socket = config.data.absolute() / SOCKET
        self._stopping = False
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> list[str]:
        """Open everything and listen; what recovery has to tell."""
        config = self.config
        config.check()
        config.data.mkdir(parents=True, exist_ok=True)
        disk = self._disk or NodeDisk(config.data)
        in_cluster = config.cluster is not None
        self.node = Node(config.data, disk=disk, clock=self._clock, in_cluster=in_cluster)
        self.node.response_timeout_s = lambda: config.rs_timeout
        told = self.node.open()
        try:
            if config.cluster is not None:
                self.secret = config.cluster.client_secret
                self._keep_secret(config.data / SECRET)
            else:
                self.secret = config.secret or secret_of(config.data)
            loop = asyncio.get_running_loop()
            tls = trusted = None
            if config.certificate is not None:
                trusted = ssl.create_default_context(cafile=config.certificate)
                trusted.check_hostname = (
                    False  # nodes are known by the secret, and by what they trust
                )
                tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                tls.load_cert_chain(config.certificate, config.key)
            source = config.host if in_cluster and is_loopback(config.host) else None
            self.node.passage = Passage(self.secret, trusted, source)
            try:
                self.port = await self._listener.open(config.host, config.port, tls)
            except OSError as error:
                raise PortTakenError(
                    f"cannot listen on {config.host}:{config.port}: {error.strerror or error}"
                ) from error
            self._local = await self._listen_locally()
            if config.http_port is not None:
                self.http = Api(self, config.host, config.http_port, tls)
                await self.http.start()
            if config.cluster is not None:
                told += await self._join(disk, config.cluster, tls, trusted)
        except BaseException:
            if self.member is not None:
                await self.member.stop()
            if self.http is not None:
                await self.http.close()
            await self._listener.close()
            await self.node.close()
            raise
        told += filter(None, [self._tell_where()])
        self._watch = loop.create_task(self._watch_silence())
        return told

    async def _join(
        self,
        disk: Disk,
        cluster: ClusterConfig,
        tls: ssl.SSLContext | None,
        trusted: ssl.SSLContext | None,
    ) -> list[str]:
        """Be a member of a cluster."""
        self.member = member = Member(
            self.node, disk, cluster, self.moved, server_tls=tls, client_tls=trusted
        )
        self.node.cluster = self.node.routing = member
        self.node.response_timeout_s = partial(member.seconds, "rs_timeout")
        try:
            where = (self.config.host, self.port)
            return await member.start(where, self.http.url if self.http is not None else None)
        except OSError as error:
            raise PortTakenError(
                f"cannot listen on {cluster.host}:{cluster.port}: {error.strerror or error}"
            ) from error

    def _keep_secret(self, path: Path) -> None:
        """Let clients on this machine have the secret; unless it is there, for the disk may be full."""
        with contextlib.suppress(OSError, BadSecretError):
            if path.exists() and secret_in(path) == self.secret:
                return
        keep_secret(path, self.secret)

    def _tell_where(self) -> str:
        """Let clients on this machine find it; return why they cannot, if so: a node on a full disk serves readers."""
        where: dict[str, Any] = {"host": self.config.host, "port": self.port, "pid": os.getpid()}
        if self.config.certificate is not None:
            where["certificate"] = str(self.config.certificate.resolve())
        if self.http is not None:
            where["http"] = self.http.url
        if self._local:
            where["socket"] = str(self._socket)
        path = self.config.data / ADDRESS
        try:
            path.write_text(json.dumps(where), "utf-8")
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()  # a part of it, or that of another process
            return f"{path} cannot be written ({error.strerror or error}): clients have to be told --node"
        return ""

    async def _listen_locally(self) -> bool:
        """In the directory; not where there are no such sockets, or its name is too long for one."""
        try:
            self._socket.unlink(missing_ok=True)
            await self._listener.open_unix(str(self._socket))
            self._socket.chmod(0o600)
        except (OSError, NotImplementedError):
            return False
        return True

    def _accept(self) -> Wire:
        return Wire(self.secret, self._opened, self._received, self._closed)

    def _opened(self, connection: Connection) -> None:
        version = connection.who.get("version")
        if version != VERSION:
            told = f"this node speaks version {VERSION}, and you {version!r}"
            raise HelloError(told, BAD_VERSION)
        if self._stopping:
            raise HelloError("this node is about to end")
        assert isinstance(connection, Wire)
        self.sessions[connection] = Session(self.node, connection)

    def _received(self, connection: Connection, data: bytes) -> None:
        session = self.sessions.get(connection)
        if session is not None:
            session.received(data)

    def _closed(self, connection: Connection, error: Exception | None) -> None:
        session = self.sessions.pop(connection, None)
        if session is not None:
            session.ended()

    def moved(self, gone: Callable[[str], bool]) -> None:
        """Streams have another master than before (`gone` says which): who uses them comes again (`Session.moved`)."""
        for session in list(self.sessions.values()):
            session.moved(gone)

    async def _watch_silence(self) -> None:
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(PULSE_S)
            now_s = time.monotonic()
            late, looked_s = now_s - looked_s > 2 * PULSE_S, now_s
            for connection, session in list(self.sessions.items()):
                session.move_readers()
                if session.paused:
                    session.live_on()
                elif (
                    late
                ):  # this node was busy or stopped itself: what clients said lies in the sockets
                    session.heard = now_s
                elif session.silent(now_s):
                    connection.transport.abort()

    async def hand_over(self, timeout: float = HAND_OVER) -> None:
        """Let other nodes of the cluster do what only this one does, before it ends; not longer than that."""
        if self.member is not None:
            await self.member.governing.leave_for_now(timeout)

    async def _go_away(self) -> None:
        """Tell all clients that this node ends, and wait until nothing of theirs is under way."""
        for session in list(self.sessions.values()):
            session.go_away()
        deadline = time.monotonic() + GO_AWAY_S
        while time.monotonic() < deadline:
            if all(session.drained for session in self.sessions.values()):
                break
            await asyncio.sleep(0.005)
        deadline = min(deadline, time.monotonic() + LAST_ACKS_S)
        while time.monotonic() < deadline:
            if not any(session.consumes for session in self.sessions.values()):
                break
            await asyncio.sleep(0.005)

    async def stop(self) -> list[str]:
        """End in order; return what is not on disk, and why: nothing, if all is well."""
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
        if self.http is not None:
            await self.http.close()
        self._listener.stop()
        await self._go_away()
        for session in list(self.sessions.values()):
            session.rest(for_good=True)  # whoever asks for more asks the next node
            for subscription in list(session.subscriptions.values()):
                subscription.send_away()
            session.subscriptions.clear()
        lost = []
        if self.member is not None:
            await self.member.regions.write_groups()
            await self.member.stop()
            failed = self.member.failed
            if failed is not None and not isinstance(failed, RemovedError):
                lost.append(f"what this node agrees on with others: {failed}")
        lost += await self.node.close()
        await asyncio.sleep(0)  # what was answered goes out
        for connection in list(self.sessions):
            connection.close()
        await self._listener.close(LINGER_S)
        with contextlib.suppress(OSError):
            (self.config.data / ADDRESS).unlink()
            self._socket.unlink()
        return lost


@contextlib.asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[Server]:
    """A server within this."""
    server = Server(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def secret_of(data: Path) -> bytes:
    """The secret of a node's directory, made if there is none."""
    return secret_in(data / SECRET)
