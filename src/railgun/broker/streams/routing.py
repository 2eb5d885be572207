"""Where a stream is served: what a node has to know to pass on what it cannot do itself.

Rules:

1. A node without `Routing` is alone: it serves everything.
2. *Writes* (publishes, members of groups, calls about one stream) are the master's; readers without a group are served
   by whoever has a copy. Ephemeral streams are served everywhere. Where a stream ends, only its master knows (`end`).
3. `serves` answers at once, from what this node knows. It may be wrong for a while: who was passed on to another node
   and is not served there either is told so, and not passed on a second time.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from railgun.errors import RailgunError

MASTER_WAIT: Final = 5.0
"""Seconds that a write waits for a master, if nothing else is said."""


@dataclass(frozen=True, slots=True)
class Here:
    """This node serves it."""


@dataclass(frozen=True, slots=True)
class There:
    """Another node does; its clients reach it at this address."""

    node: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Nobody:
    """Nobody does now, which may change."""

    why: RailgunError
    hopeless: bool = False
    """There is no quorum, and has been none for a while: whoever asks is refused at once, and not kept waiting."""


Place: TypeAlias = Here | There | Nobody


@dataclass(frozen=True, slots=True)
class Passage:
    """What it takes to be let in by other nodes, as a client of theirs."""

    secret: bytes = field(repr=False)
    tls: ssl.SSLContext | None = None
    source: str | None = None
    """The address of this node that they are to see; None: any."""


class Routing(Protocol):
    """What a member of a cluster knows of its streams."""

    @property
    def master_wait(self) -> float:
        """Seconds that something waits for who can serve it."""

    def serves(self, stream: str, write: bool) -> Place:
        """Who serves it; `NoStreamError` if there is none of that name."""

    async def end(self, stream: str) -> int | None:
        """Ask the master where a stream ends, which may take a moment; None: it does not say."""

    async def wait(self, stream: str, write: bool) -> None:
        """Until the answer may be another one; whoever waits says for how long."""

    def nodes(self) -> list[tuple[str, int]]:
        """Where clients reach the nodes there are."""
