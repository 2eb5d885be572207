"""Reservation of response names: which node keeps a name, and the names that a node keeps for others.

The name of a response is unique in a cluster: before a request goes out, the requester's node reserves it. Rules:

1. One node keeps a name: of all nodes that are up, the one with the highest hash of node and name. Every node computes
   that alone, and a node that comes or goes moves only the names that it keeps.
2. A reserved name is refused to other nodes. The node that has it gets it again: that node knows by itself which
   responses are awaited there.
3. A name is forgotten when it is released, when its deadline is over, or when the node that has it is gone.
4. Nodes that see different sets of nodes may choose different keepers, as in a partition; then a name may be used
   twice, and each answer still goes to the node from which the request came.
"""

from __future__ import annotations

from collections.abc import Iterable

from railgun.broker.protocol.exchange import Responses
from railgun.hashing import key_hash


def keeper_of(name: str, nodes: Iterable[str]) -> str:
    """Return the node that keeps a name. `nodes`: those that are up.

    >>> keeper_of("r-1", ["a", "b", "c"])
    'b'
    >>> keeper_of("r-1", ["a", "b"])
    'b'
    >>> keeper_of("r-1", ["a", "c"])
    'a'
    """
    return max(nodes, key=lambda node: (key_hash(f"{node}/{name}"), node))


class Names:
    """The response names that a node keeps for others.

    >>> names = Names()
    >>> names.reserve("r-1", "a", deadline=100, now=0)
    True
    >>> names.reserve("r-1", "b", deadline=100, now=99)
    False
    >>> names.home("r-1")
    'a'
    >>> names.reserve("r-1", "b", deadline=200, now=100)
    True
    """

    def __init__(self) -> None:
        self._names: Responses[str] = Responses()

    def __len__(self) -> int:
        return len(self._names)

    def reserve(self, name: str, node: str, deadline: int, now: int) -> bool:
        """Reserve a name for a node until `deadline`. Return False if another node has it."""
        self._names.expired(now)
        holder = self._names.whose(name)
        if holder is not None:
            if holder != node:
                return False
            self._names.close(name)
        self._names.open(name, node, deadline)
        return True

    def release(self, name: str, node: str) -> None:
        """Free a name that its node no longer needs."""
        if self._names.whose(name) == node:
            self._names.close(name)

    def home(self, name: str) -> str | None:
        """Return the node that has reserved a name, or None."""
        return self._names.whose(name)

    def gone(self, node: str) -> None:
        """Free all names of a node that is gone."""
        self._names.gone(node)
