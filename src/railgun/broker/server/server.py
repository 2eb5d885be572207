"""Run a node that listens: its directory, its secret, its sockets, and an orderly stop.

Rules:

1. A client proves that it knows the secret before anything else is read (`transport.hello`).
2. The secret is made at the first start, in a file that only its owner can read. Beside it the node writes its address,
   so that clients on the same machine find both, and opens a Unix socket, which is faster for them than TCP.
3. The node listens on loopback; on other addresses it refuses to start without TLS. The same holds for its HTTP API.
4. In a cluster the node also listens for other nodes, with the cluster's secret. The clients' secret is derived from
   it, so it is the same on all nodes.
5. On SIGTERM or Ctrl-C a member of a cluster first hands over its masterships and the leadership (`railgun serve` does
   that). Then the node tells all clients that it goes away: it takes nothing more (`STOPPING`), answers what it has
   taken, and once every client has confirmed (or after `GO_AWAY_S`) writes what has to be written, and ends. Clients
   that consume have `LAST_ACKS_S` more to leave by themselves: until then their acks count.
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
HAND_OVER_S: Final = 8.0
"""Seconds that other nodes have to take over before a node of a cluster ends."""


GO_AWAY_S: Final = 3.0
"""Seconds that clients have to confirm that a node is about to end, and to get their answers."""
LAST_ACKS_S: Final = 0.5
"""Seconds that consuming clients have to send their last acks, and to leave."""
LINGER_S: Final = 1.0
"""Seconds that clients have to read the last answers before an ending node closes their connections."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The directory, addresses and secrets of a node."""

    data: Path = Path(DATA)
    host: str = "127.0.0.1"
    port: int = PORT
    secret: bytes | None = None
    certificate: Path | None = None
    key: Path | None = None
    http_port: int | None = None
    """Port of the HTTP API; 0: any free port, None: no HTTP API."""
    cluster: ClusterConfig | None = None
    """Settings of the cluster; None: the node runs alone."""
    rs_timeout: float = RESPONSE_TIMEOUT_S
    """Seconds that a request without a timeout waits for its response. A cluster has a setting of its own instead."""

    def check(self) -> None:
        """Raise `OpenListenError` if the node would listen beyond loopback without TLS."""
        hosts = [self.host] + ([self.cluster.host] if self.cluster is not None else [])
        open_host = next((host for host in hosts if not is_loopback(host)), None)
        if self.certificate is None and open_host is not None:
            raise OpenListenError(
                f"{open_host} can be reached from other machines, and traffic to it would be readable: "
                "give the node a certificate and its key, or let it listen on 127.0.0.1"
            )


class Server:
    """A listening node and the sessions of its clients."""

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
        self._local = False  # whether clients can connect by the Unix socket
        self.member: Member | None = None
        self._socket = config.data.absolute() / SOCKET
        self._stopping = False
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> list[str]:
        """Open the node and listen. Return what recovery has to report."""
        config = self.config
        config.check()
        config.data.mkdir(parents=True, exist_ok=True)
        disk = self._disk or NodeDisk(config.data)
        in_cluster = config.cluster is not None
        self.node = Node(config.data, disk=disk, clock=self._clock, in_cluster=in_cluster)
        self.node.response_timeout_s = lambda: config.rs_timeout
        notes = self.node.open()
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
                # Nodes are authenticated by the secret and their certificate.
                trusted.check_hostname = False
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
                notes += await self._join(disk, config.cluster, tls, trusted)
        except BaseException:
            if self.member is not None:
                await self.member.stop()
            if self.http is not None:
                await self.http.close()
            await self._listener.close()
            await self.node.close()
            raise
        notes += filter(None, [self._write_address()])
        self._watch = loop.create_task(self._watch_silence())
        return notes

    async def _join(
        self,
        disk: Disk,
        cluster: ClusterConfig,
        tls: ssl.SSLContext | None,
        trusted: ssl.SSLContext | None,
    ) -> list[str]:
        """Join the cluster. Raise `PortTakenError` if the port for nodes is taken."""
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
        """Write the secret where clients on this machine find it, unless it is there: the disk may be full."""
        with contextlib.suppress(OSError, BadSecretError):
            if path.exists() and secret_in(path) == self.secret:
                return
        keep_secret(path, self.secret)

    def _write_address(self) -> str:
        """Write this node's address for clients on the same machine. Return why that failed, or an empty text."""
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
                path.unlink()  # half written, or left by another process
            return f"{path} cannot be written ({error.strerror or error}): clients need --node"
        return ""

    async def _listen_locally(self) -> bool:
        """Open the Unix socket in the directory. Return False where the system has none, or its path is too long."""
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
            error_text = f"this node speaks version {VERSION}, and the client speaks {version!r}"
            raise HelloError(error_text, BAD_VERSION)
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

    def moved(self, affected: Callable[[str], bool]) -> None:
        """Let clients come again to the streams, for which `affected` is true, whose master has changed
        (`Session.moved`)."""
        for session in list(self.sessions.values()):
            session.moved(affected)

    async def _watch_silence(self) -> None:
        last_check_s = time.monotonic()
        while True:
            await asyncio.sleep(PULSE_S)
            now_s = time.monotonic()
            is_late, last_check_s = now_s - last_check_s > 2 * PULSE_S, now_s
            for connection, session in list(self.sessions.items()):
                session.move_readers()
                if session.paused:
                    session.send_sign_of_life()
                elif is_late:
                    # This node was busy or suspended: data of clients waits in the sockets.
                    session.heard = now_s
                elif session.silent(now_s):
                    connection.transport.abort()

    async def hand_over(self, timeout: float = HAND_OVER_S) -> None:
        """Let other nodes take over this node's duties in the cluster before it ends, for at most `timeout` seconds."""
        if self.member is not None:
            await self.member.governing.leave_for_now(timeout)

    async def _go_away(self) -> None:
        """Tell all clients that this node ends, and wait until none of their requests is under way."""
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
        """Stop in order. Return the errors of data that could not be written: an empty list if all is well."""
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
        if self.http is not None:
            await self.http.close()
        self._listener.stop()
        await self._go_away()
        for session in list(self.sessions.values()):
            session.pause_reading(for_good=True)  # clients send further requests to the next node
            for subscription in list(session.subscriptions.values()):
                subscription.send_away()
            session.subscriptions.clear()
        lost = []
        if self.member is not None:
            await self.member.regions.write_groups()
            await self.member.stop()
            failed = self.member.failed
            if failed is not None and not isinstance(failed, RemovedError):
                lost.append(f"the Raft log: {failed}")
        lost += await self.node.close()
        await asyncio.sleep(0)  # let the last answers go out
        for connection in list(self.sessions):
            connection.close()
        await self._listener.close(LINGER_S)
        with contextlib.suppress(OSError):
            (self.config.data / ADDRESS).unlink()
            self._socket.unlink()
        return lost


@contextlib.asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[Server]:
    """Run a server within this context."""
    server = Server(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def secret_of(data: Path) -> bytes:
    """Return the secret of a node's directory, making it if there is none."""
    return secret_in(data / SECRET)
