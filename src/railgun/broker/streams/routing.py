"""Which node serves a stream: what a node has to know to pass requests on.

Rules:

1. A node without `Routing` is alone: it serves every stream.
2. *Writes* (publishes, members of groups, calls about one stream) go to the master of the stream; readers without a
   group are served by any node with a copy. Ephemeral streams are served by every node. Only the master knows where a
   stream ends (`end`).
3. `serves` answers at once, from what this node knows, and may be wrong for a while. A client that was passed on to a
   node which does not serve it either gets an error, and is not passed on a second time.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from railgun.errors import RailgunError

MASTER_WAIT: Final = 5.0
"""Seconds that a write waits for a master by default."""


@dataclass(frozen=True, slots=True)
class Here:
    """This node serves the stream."""


@dataclass(frozen=True, slots=True)
class There:
    """Another node serves the stream; clients reach it at this address."""

    node: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Nobody:
    """No node serves the stream now, which may change."""

    why: RailgunError
    hopeless: bool = False
    """There has been no quorum for a while: requests are refused at once, and not kept waiting."""


Place: TypeAlias = Here | There | Nobody


@dataclass(frozen=True, slots=True)
class Passage:
    """The credentials and addresses with which this node connects to other nodes as a client."""

    secret: bytes = field(repr=False)
    tls: ssl.SSLContext | None = None
    source: str | None = None
    """The address of this node to connect from; None: any."""


class Routing(Protocol):
    """What a member of a cluster knows about the streams of the cluster."""

    @property
    def master_wait(self) -> float:
        """Return how many seconds a request waits for a node that can serve it."""

    def serves(self, stream: str, write: bool) -> Place:
        """Return which node serves a stream; raise `NoStreamError` if there is none of that name."""

    async def end(self, stream: str) -> int | None:
        """Ask the master for the end of a stream, which may take a moment; return None if it does not answer."""

    async def wait(self, stream: str, write: bool) -> None:
        """Wait until `serves` may give another answer; the caller sets the timeout."""

    def nodes(self) -> list[tuple[str, int]]:
        """Return the addresses at which clients reach the nodes of the cluster."""
