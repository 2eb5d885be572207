"""Keep the list of nodes that a client knows, choose the next node to try, and compute pauses between retries.

Rules:

1. The nodes that the caller configured come first, then those that a node announced. The last announcement counts.
2. Nodes are tried in turn, beginning behind the node whose connection was lost. The client pauses only when it has
   tried all of them in vain. A connection that did not last counts as a try: else a client would reconnect in circles.
3. A preferred node is tried next, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

Where = tuple[str, int]
MAX_LEARNED_NODES: Final = 100
"""The most announced nodes that are remembered besides the configured ones."""


class Pauses:
    """Back-off: seconds until the next try, doubled each time up to `most`.

    >>> pauses = Pauses(0.5, 1.5)
    >>> pauses.next(), pauses.next(), pauses.next()
    (0.5, 1.0, 1.5)
    """

    def __init__(self, first: float, most: float) -> None:
        self._first = self._pause = first
        self._most = most

    def next(self) -> float:
        """Return how long to wait now (seconds)."""
        pause, self._pause = self._pause, min(2 * self._pause, self._most)
        return pause

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self._pause = self._first


class Nodes:
    """The nodes that a client knows, tried in turn.

    >>> nodes = Nodes([("a", 1), ("b", 1)])
    >>> nodes.learn([{"host": "b", "port": 1}, {"host": "c", "port": 1}])
    >>> [(nodes.current, nodes.turn(False)) for _ in range(4)]
    [(('a', 1), False), (('b', 1), False), (('c', 1), True), (('a', 1), False)]
    >>> nodes.prefer(("a", 1))
    >>> nodes.turn(True), nodes.current
    (False, ('a', 1))
    """

    def __init__(self, configured: Sequence[Where]) -> None:
        self._configured = list(dict.fromkeys(configured))
        self._all = self._configured
        self._tried = 0
        self._preferred: Where | None = None
        self.current = self._configured[0]
        """The node that the client is connected to, or tries to reach."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Where]:
        return iter(self._all)

    def __str__(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self._all)

    def learn(self, announced: Any) -> None:
        """Remember the nodes that a node announced; skip malformed entries."""
        valid = list(_valid_nodes(announced)) if isinstance(announced, list) else []
        if valid:
            self._all = list(dict.fromkeys([*self._configured, *valid[:MAX_LEARNED_NODES]]))

    def prefer(self, where: Where) -> None:
        """Try the node at `where` next."""
        self._preferred = where

    def turn(self, lasted: bool) -> bool:
        """Make the next node current; return whether all have been tried since the last connection that lasted.

        `lasted`: whether the connection to the current node lasted for a while.
        """
        self._tried = 1 if lasted else self._tried + 1
        at = self._all.index(self.current) + 1 if self.current in self._all else 0
        preferred, self._preferred = self._preferred, None
        self.current = preferred or self._all[at % len(self._all)]
        if self._tried < len(self._all):
            return False
        self._tried = 0
        return True


def _valid_nodes(announced: Iterable[Any]) -> Iterable[Where]:
    for node in announced:
        if isinstance(node, dict):
            host, port = node.get("host"), node.get("port")
            if isinstance(host, str) and host and type(port) is int and 0 < port < 65536:
                yield host, port
