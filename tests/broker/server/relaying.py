"""What tests of clients at one node and streams of another share."""

from __future__ import annotations

from tests.broker.cluster.several import Several

from railgun.broker.server.session import Session


def session_at(nodes: Several, name: str) -> Session:
    """The one session of a node."""
    server = nodes.running[name].server
    assert server is not None
    (found,) = server.sessions.values()
    return found


def numbers(count: int) -> list[bytes]:
    return [b"%d" % n for n in range(count)]
