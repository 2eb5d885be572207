"""Where a node is, and what it takes to be let in."""

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
"""In its directory a node says where it listens."""
SOCKET: Final = "node.sock"
"""There it also listens, for clients of this machine: that is quicker than TCP."""
SECRET: Final = "secret"
"""And here is what whoever connects has to know, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Address:
    """A node as it is found, and perhaps others of its cluster; it can be sent to another machine.

    >>> Address.find("10.0.0.7:7171", secret="00ff")
    Address(host='10.0.0.7', port=7171)
    >>> Address.find("10.0.0.7:7171,10.0.0.8:7171", secret="00ff").others
    (('10.0.0.8', 7171),)
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    certificate: str | None = field(default=None, repr=False)
    """What the node's certificate is checked with (PEM)."""
    socket: str | None = field(default=None, repr=False)
    """On its own machine, where it also listens."""
    others: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    """Nodes that will do as well."""

    @staticmethod
    def find(
        where: str | Sequence[str] | None = None,
        *,
        secret: bytes | str | None = None,
        data: str | Path = DATA,
    ) -> Address:
        """The node at `where` ("host:port", or several); without, the one that works in the directory `data`."""
        if secret is not None and not isinstance(secret, bytes | str):
            raise NoNodeError(f"a secret is bytes or hexadecimal digits, not {secret!r:.80}")
        home = Path(data)
        certificate = socket = None
        others: tuple[tuple[str, int], ...] = ()
        if where is None:
            try:
                found = json.loads((home / ADDRESS).read_text("utf-8"))
                host, port = str(found["host"]), int(found["port"])
                if found.get("certificate"):
                    certificate = Path(found["certificate"]).read_text("ascii")
                if found.get("socket"):
                    socket = str(found["socket"])
                if _was_killed(host, port, socket, found.get("pid")):
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
                raise NoNodeError(f"the node's secret is not in {home}: give it") from error
        try:
            known = bytes.fromhex(secret) if isinstance(secret, str) else secret
        except ValueError as error:
            raise NoNodeError(f"a secret is hexadecimal: {error}") from error
        return Address(host, port, known, certificate, socket, others)

    def tls(self) -> ssl.SSLContext | None:
        """How to speak to it."""
        if self.certificate is None:
            return None
        return ssl.create_default_context(cadata=self.certificate)


def addresses_of(where: str | Sequence[str]) -> list[tuple[str, int]]:
    """Of one node or several: "host:port,host:port", or a list of these.

    >>> addresses_of("a:1, b:2"), addresses_of(["a:1", ":2"])
    ([('a', 1), ('b', 2)], [('a', 1), ('127.0.0.1', 2)])
    >>> addresses_of("a:1,b")
    Traceback (most recent call last):
    railgun.client.errors.NoNodeError: 'b' is no address: host:port (NO_NODE)
    """
    if isinstance(where, bytes) or not isinstance(where, Iterable):
        raise NoNodeError(f"{where!r:.80} is no address: host:port")
    given = [where] if isinstance(where, str) else list(where)
    found: list[tuple[str, int]] = []
    for one in given:
        if not isinstance(one, str):
            raise NoNodeError(f"{one!r} is no address: host:port")
        for each in one.split(","):
            host, _, port = each.strip().rpartition(":")
            if not (port.isascii() and port.isdigit() and int(port) < 65536):
                raise NoNodeError(f"{each.strip()!r} is no address: host:port")
            found.append((host or "127.0.0.1", int(port)))
    if not found:
        raise NoNodeError("there is no address to connect to: host:port")
    return found


def _was_killed(host: str, port: int, socket: str | None, pid: object) -> bool:
    """Return whether the node that has left word of where it listens is gone: one that stops in order takes it away.

    Another process may have its port by now, or its process id. The socket in its directory nobody else has; one that
    was removed says nothing.
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
        pass  # whatever it is, it may pass
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
        pass  # it is another user's
    return True
