"""Which node keeps the name of a response, and the names a node keeps for others.

The name of a response is unique in a cluster: before a request goes out, the node of who asks reserves it. Rules:

1. One node keeps a name: the one with the highest hash of both, among all that are up. Every node works that out alone,
   and a node that comes or goes moves only the names that are its own.
2. A name that is reserved is refused to other nodes. To the node that has it, it is given again: that one knows by
   itself what is awaited there.
3. It is forgotten when it is released, when its time is over, or when the node that has it is gone.
4. Nodes that see different others may choose different keepers, as in a partition; then a name may be used twice,
   and each answer still goes to the node the request came from.
"""

from __future__ import annotations

from collections.abc import Iterable

from railgun.broker.protocol.exchange import Responses
from railgun.hashing import key_hash


def keeper_of(name: str, nodes: Iterable[str]) -> str:
    """The node that keeps a name, of those that are up.

    >>> keeper_of("r-1", ["a", "b", "c"])
    'b'
    >>> keeper_of("r-1", ["a", "b"])
    'b'
    >>> keeper_of("r-1", ["a", "c"])
    'a'
    """
    return max(nodes, key=lambda node: (key_hash(f"{node}/{name}"), node))


class Names:
    """The names a node keeps for others.

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
        """A node wants it; whether it may have it."""
        self._names.expired(now)
        home = self._names.whose(name)
        if home is not None:
            if home != node:
                return False
            self._names.close(name)
        self._names.open(name, node, deadline)
        return True

    def release(self, name: str, node: str) -> None:
        """That node does not need it any more."""
        if self._names.whose(name) == node:
            self._names.close(name)

    def home(self, name: str) -> str | None:
        """Which node has it."""
        return self._names.whose(name)

    def gone(self, node: str) -> None:
        """That node is gone, with all it had."""
        self._names.gone(node)
