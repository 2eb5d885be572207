"""What a node's file says of its cluster, and of the node as a member of it."""

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
    """The section `[cluster]` is not what it has to be."""

    code: ClassVar[str] = "BAD_CLUSTER"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A node as a member of a cluster."""

    secret: bytes = field(repr=False)
    """Of the cluster: nodes know it, and clients do not."""
    name: str = ""
    """Of the node, for people; its host and port if there is none."""
    host: str = "127.0.0.1"
    port: int = CLUSTER_PORT
    advertise: Address | None = None
    """Where other nodes reach it; where it listens, if nothing is said."""
    advertise_client: Address | None = None
    """Where clients reach it, likewise."""
    regions: dict[str, str] = field(default_factory=lambda: {"global": "master"})
    discovery: str = ""
    bootstrap_expect: int = 0
    """So many nodes form a cluster, if there is none; 0: join one."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the cluster is to be like, when it is formed."""

    @property
    def client_secret(self) -> bytes:
        """What clients know: whoever has it cannot pass for a node."""
        return hmac.new(self.secret, b"railgun client", hashlib.sha256).digest()

    def election(self) -> float:
        """How long nodes are to wait for a leader, if this one forms the cluster."""
        told = self.settings.get("election", OPTIONS["election"].default)
        assert told is not None
        return float(told)


def read_secret(path: Path) -> bytes:
    """The secret of a cluster, from its file; it is not made by itself, for all nodes must have the same."""
    try:
        secret = bytes.fromhex(path.read_text("ascii").strip())
    except OSError as error:
        raise BadClusterError(
            f"the cluster's secret {path} cannot be read: {error.strerror}. Make one for all nodes: "
            f"openssl rand -hex 32 > {path.name}"
        ) from error
    except ValueError as error:
        raise BadClusterError(f"{path} holds no secret: 64 hexadecimal digits") from error
    if len(secret) < 16:
        raise BadClusterError(f"the secret in {path} is too short: 64 hexadecimal digits")
    return secret


def address_of(text: str) -> Address | None:
    """A host and a port; None if it is no such thing.

    >>> address_of("127.0.0.1:7173"), address_of("[::1]:7173"), address_of("here")
    (('127.0.0.1', 7173), ('::1', 7173), None)
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        return None
    return host, int(port)
