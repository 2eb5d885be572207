"""KeyStore: the state of one step's keys, wherever it is.

`states` is a plain dict, and all that a step's loop over records sees. Rules for whoever uses it:

1. `fetch(keys)` before `states` is asked for these keys, or one of them is put in or taken out. It makes `states` hold
   all of them that have state. Until the next `fetch` only these keys may be touched.
2. Between two calls of `fetch` a state object stays what it is; after the next one it may be another object, equal to
   the one before: nobody keeps it.
3. What looks at all keys asks the store (`census`, `cut`, `len`), not `states`.

In memory all of this is nothing: `states` holds every key, and `fetch` returns at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

BLOCK: Final = 2_048
Block = tuple[list[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class Cut:
    """All keys as they are at one moment, for a snapshot that is written little by little.

    The states of `hot` keys go on changing: they are to be fetched and written in pieces, each before it is touched.
    What `cold` yields (keys and their states) is as it was at the moment of the cut, whatever happens meanwhile.
    """

    hot: list[Any]
    cold: Iterator[Block]


class KeyStore(ABC):
    """The state of one step's keys on one worker."""

    __slots__ = ("states",)

    def __init__(self) -> None:
        self.states: dict[Any, Any] = {}
        """The keys that are in memory, and their states. It is the same dict as long as the store lives."""

    @property
    @abstractmethod
    def spilled(self) -> bool:
        """Whether anything is on disk: if not, `states` is all there is."""

    @abstractmethod
    def __len__(self) -> int:
        """How many keys have state."""

    @abstractmethod
    def fetch(self, keys: Sequence[Any]) -> None:
        """Bring these keys into `states`, those that have state."""

    @abstractmethod
    def put(self, keys: list[Any], states: list[Any]) -> None:
        """Take in the state of keys that have none here: from another worker, or from a snapshot."""

    @abstractmethod
    def census(self, block: int = BLOCK) -> Iterator[list[Any]]:
        """All keys that have state now, each once, in blocks."""

    @abstractmethod
    def cut(self, block: int = BLOCK) -> Cut:
        """All keys, as they are now."""

    def items(self) -> dict[Any, Any]:
        """All keys and states at once: for tests."""
        cut = self.cut()
        found = {key: self.states[key] for key in cut.hot}
        for keys, states in cut.cold:
            found.update(zip(keys, states, strict=True))
        return found


class MemoryStore(KeyStore):
    """Everything in memory.

    >>> store = MemoryStore()
    >>> store.put(["a", "b"], [1, 2])
    >>> store.fetch(["a"]); store.states["a"]
    1
    >>> list(store.census()), len(store)
    ([['a', 'b']], 2)
    """

    __slots__ = ()

    spilled = False

    def __len__(self) -> int:
        return len(self.states)

    def fetch(self, keys: Sequence[Any]) -> None:
        """They are there."""

    def put(self, keys: list[Any], states: list[Any]) -> None:
        """Into the dict with them."""
        self.states.update(zip(keys, states, strict=True))

    def census(self, block: int = BLOCK) -> Iterator[list[Any]]:
        """The keys of the dict."""
        return blocks(list(self.states), block)

    def cut(self, block: int = BLOCK) -> Cut:
        """All keys are hot."""
        return Cut(list(self.states), iter(()))


def blocks(keys: list[Any], size: int) -> Iterator[list[Any]]:
    """A list in pieces.

    >>> list(blocks([1, 2, 3], 2))
    [[1, 2], [3]]
    """
    left = iter(keys)
    return iter(lambda: list(islice(left, size)), [])
