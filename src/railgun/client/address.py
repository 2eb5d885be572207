"""Find the address of a node, and the secret and certificate that a connection to it needs."""

from __future__ import annotations

import json
import os
import socket as sockets
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from railgun.client.errors import NoNodeError

DATA: Final = "railgun-data"
ADDRESS: Final = "node.json"
"""The file in a node's data directory that holds its address."""
SOCKET: Final = "node.sock"
"""The local socket in a node's data directory: quicker than TCP for clients on the same machine."""
SECRET: Final = "secret"
"""The file in a node's data directory that holds the secret each client must know, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a node, and perhaps of other nodes of its cluster. It can be sent to another machine.

    >>> Address.find("10.0.0.7:7171", secret="00ff")
    Address(host='10.0.0.7', port=7171)
    >>> Address.find("10.0.0.7:7171,10.0.0.8:7171", secret="00ff").others
    (('10.0.0.8', 7171),)
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    certificate: str | None = field(default=None, repr=False)
    """The certificate (PEM) that verifies the node's own."""
    socket: str | None = field(default=None, repr=False)
    """Path of the node's local socket, for clients on the same machine."""
    others: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    """Other nodes of the cluster that can be used instead."""

    @staticmethod
    def find(
        where: str | Sequence[str] | None = None,
        *,
        secret: bytes | str | None = None,
        data: str | Path = DATA,
    ) -> Address:
        """Return the address of the node at `where` ("host:port", or several).

        Without `where`, return that of the node that runs in the directory `data`. Raises `NoNodeError` if there is no
        such node, if `where` is no address, or if the secret is missing or malformed.
        """
        if secret is not None and not isinstance(secret, bytes | str):
            raise NoNodeError(f"a secret is bytes or hexadecimal digits, not {secret!r:.80}")
        home = Path(data)
        certificate = socket = None
        others: tuple[tuple[str, int], ...] = ()
        if where is None:
            try:
                entry = json.loads((home / ADDRESS).read_text("utf-8"))
                host, port = str(entry["host"]), int(entry["port"])
                if entry.get("certificate"):
                    certificate = Path(entry["certificate"]).read_text("ascii")
                if entry.get("socket"):
                    socket = str(entry["socket"])
                if _was_killed(host, port, socket, entry.get("pid")):
                    raise ConnectionRefusedError(
                        f"{home / ADDRESS} was left by a node that is gone"
                    )
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise NoNodeError(
                    f"no node works in {home}: start one (railgun serve), or say where it is"
                ) from error
        else:
            (host, port), *more = addresses_of(where)
            others = tuple(more)
        if secret is None:
            try:
                secret = (home / SECRET).read_text("ascii").strip()
            except (OSError, ValueError) as error:
                raise NoNodeError(
                    f"the node's secret is not in {home}: pass it (secret=…)"
                ) from error
        try:
            secret_bytes = bytes.fromhex(secret) if isinstance(secret, str) else secret
        except ValueError as error:
            raise NoNodeError(f"a secret is hexadecimal: {error}") from error
        return Address(host, port, secret_bytes, certificate, socket, others)

    def tls(self) -> ssl.SSLContext | None:
        """Return a TLS context that trusts the node's certificate; None if the node has none."""
        if self.certificate is None:
            return None
        return ssl.create_default_context(cadata=self.certificate)


def addresses_of(where: str | Sequence[str]) -> list[tuple[str, int]]:
    """Parse the addresses of one or several nodes: "host:port,host:port", or a list of such texts.

    Raises `NoNodeError` for anything else.

    >>> addresses_of("a:1, b:2"), addresses_of(["a:1", ":2"])
    ([('a', 1), ('b', 2)], [('a', 1), ('127.0.0.1', 2)])
    >>> addresses_of("a:1,b")
    Traceback (most recent call last):
    railgun.client.errors.NoNodeError: 'b' is no address: host:port (NO_NODE)
    """
    if isinstance(where, bytes) or not isinstance(where, Iterable):
        raise NoNodeError(f"{where!r:.80} is no address: host:port")
    texts = [where] if isinstance(where, str) else list(where)
    addresses: list[tuple[str, int]] = []
    for text in texts:
        if not isinstance(text, str):
            raise NoNodeError(f"{text!r} is no address: host:port")
        for address in text.split(","):
            host, _, port = address.strip().rpartition(":")
            if not (port.isascii() and port.isdigit() and int(port) < 65536):
                raise NoNodeError(f"{address.strip()!r} is no address: host:port")
            addresses.append((host or "127.0.0.1", int(port)))
    if not addresses:
        raise NoNodeError("there is no address to connect to: host:port")
    return addresses


def _was_killed(host: str, port: int, socket: str | None, pid: object) -> bool:
    """Return whether the node that wrote this address file was killed. A node that stops in order removes the file.

    Another process may use its port or its process id by now, so the local socket is tried first: no other process can
    have it. A socket that was removed proves nothing.
    """
    if socket is not None and os.path.exists(socket):
        return not _listens(socket)
    if isinstance(pid, int) and not _is_alive(pid):
        return True
    try:
        sockets.create_connection((host, port), timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass  # any other failure may be transient
    return False


def _listens(path: str) -> bool:
    """Return whether a process listens at the local socket; True if that cannot be known."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            pass  # a node that is frozen, or busy
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # the process belongs to another user
    return True
