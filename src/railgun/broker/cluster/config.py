"""Settings of a node's membership in a cluster, read from the node's settings file."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from railgun.broker.discovery.plugin import Address
from railgun.broker.protocol.metadata.options import OPTIONS
from railgun.errors import RailgunError

CLUSTER_PORT: Final = 7173
ROLES: Final = ("master", "replica")


class BadClusterError(RailgunError):
    """The section `[cluster]` of the settings file is invalid."""

    code: ClassVar[str] = "BAD_CLUSTER"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Settings of a node as a member of a cluster."""

    secret: bytes = field(repr=False)
    """The cluster's secret, which nodes know and clients do not."""
    name: str = ""
    """The node's name, for people; empty: its host and port."""
    host: str = "127.0.0.1"
    port: int = CLUSTER_PORT
    advertise: Address | None = None
    """The address at which other nodes reach this node; None: the address where it listens."""
    advertise_client: Address | None = None
    """The address at which clients reach this node; None: the address where it listens."""
    regions: dict[str, str] = field(default_factory=lambda: {"global": "master"})
    discovery: str = ""
    bootstrap_expect: int = 0
    """Number of nodes that form a new cluster when there is none; 0: only join one."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the cluster, used if this node forms it."""

    @property
    def client_secret(self) -> bytes:
        """The secret of clients, derived from the cluster's: it does not let a client pass for a node."""
        return hmac.new(self.secret, b"railgun client", hashlib.sha256).digest()

    def election(self) -> float:
        """Return for how many seconds nodes wait for a leader, if this node forms the cluster."""
        seconds = self.settings.get("election", OPTIONS["election"].default)
        assert seconds is not None
        return float(seconds)


def read_secret(path: Path) -> bytes:
    """Return the cluster's secret from its file. Raise `BadClusterError` if the file is missing or invalid: it is
    never made automatically, because all nodes need the same secret."""
    try:
        secret = bytes.fromhex(path.read_text("ascii").strip())
    except OSError as error:
        raise BadClusterError(
            f"the cluster's secret {path} cannot be read: {error.strerror}. Make one for all nodes: "
            f"openssl rand -hex 32 > {path.name}"
        ) from error
    except ValueError as error:
        raise BadClusterError(f"{path} holds no secret: write 64 hexadecimal digits") from error
    if len(secret) < 16:
        raise BadClusterError(f"the secret in {path} is too short: write 64 hexadecimal digits")
    return secret


def address_of(text: str) -> Address | None:
    """Parse a host and a port. Return None if the text is something else.

    >>> address_of("127.0.0.1:7173"), address_of("[::1]:7173"), address_of("here")
    (('127.0.0.1', 7173), ('::1', 7173), None)
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        return None
    return host, int(port)
