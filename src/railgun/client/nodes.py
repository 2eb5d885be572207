"""The nodes that a client knows, and how long it waits before it tries again.

Rules:

1. Those that were given come first, then those that a node has told of. What was told last counts.
2. They are tried in turn, beginning with the one behind the one that was lost. Only when all have been tried in vain
   there is a pause. A connection that did not last counts as a try: else a client would run in circles.
3. One that is preferred is the next one to be tried, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

Where = tuple[str, int]
MOST: Final = 100
"""Nodes that are remembered besides those that were given."""


class Pauses:
    """Seconds to the next try, twice as long each time.

    >>> pauses = Pauses(0.5, 1.5)
    >>> pauses.next(), pauses.next(), pauses.next()
    (0.5, 1.0, 1.5)
    """

    def __init__(self, first: float, most: float) -> None:
        self._first = self._pause = first
        self._most = most

    def next(self) -> float:
        """How long to wait now."""
        pause, self._pause = self._pause, min(2 * self._pause, self._most)
        return pause

    def reset(self) -> None:
        """It went well."""
        self._pause = self._first


class Nodes:
    """The nodes of a client, in turn.

    >>> nodes = Nodes([("a", 1), ("b", 1)])
    >>> nodes.learn([{"host": "b", "port": 1}, {"host": "c", "port": 1}])
    >>> [(nodes.current, nodes.turn(False)) for _ in range(4)]
    [(('a', 1), False), (('b', 1), False), (('c', 1), True), (('a', 1), False)]
    >>> nodes.prefer(("a", 1))
    >>> nodes.turn(True), nodes.current
    (False, ('a', 1))
    """

    def __init__(self, given: Sequence[Where]) -> None:
        self._given = list(dict.fromkeys(given))
        self._every = self._given
        self._tried = 0
        self._preferred: Where | None = None
        self.current = self._given[0]
        """The one that is tried, or used."""

    def __len__(self) -> int:
        return len(self._every)

    def __iter__(self) -> Iterator[Where]:
        return iter(self._every)

    def __str__(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self._every)

    def learn(self, told: Any) -> None:
        """A node has said where others are; what makes no sense is passed over."""
        found = list(_sensible(told))[:MOST] if isinstance(told, list) else []
        if found:
            self._every = list(dict.fromkeys([*self._given, *found]))

    def prefer(self, where: Where) -> None:
        """Let this one be the next."""
        self._preferred = where

    def turn(self, lasted: bool) -> bool:
        """Go on to the next one; whether all have been tried. `lasted`: the current one was of use for a while."""
        self._tried = 1 if lasted else self._tried + 1
        at = self._every.index(self.current) + 1 if self.current in self._every else 0
        preferred, self._preferred = self._preferred, None
        self.current = preferred or self._every[at % len(self._every)]
        if self._tried < len(self._every):
            return False
        self._tried = 0
        return True


def _sensible(told: Iterable[Any]) -> Iterable[Where]:
    for one in told:
        if isinstance(one, dict):
            host, port = one.get("host"), one.get("port")
            if isinstance(host, str) and host and type(port) is int and 0 < port < 65536:
                yield host, port
