"""Hold the state of one step's keys, in memory or on disk (`KeyStore`).

`states` is a plain dict, the only part that a step's loop over records sees. Rules for callers:

1. Call `fetch(keys)` before reading, adding or deleting any of these keys in `states`. It makes `states` hold all of
   them that have state. Until the next `fetch` only these keys may be touched.
2. Between two calls of `fetch` a state stays the same object. After the next call it may be another object, equal to
   the one before, so callers must not keep references.
3. To look at all keys, use the store (`census`, `cut`, `len`), not `states`.

In memory all of this costs nothing: `states` holds every key, and `fetch` returns at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

BLOCK: Final = 2_048  # keys
Block = tuple[list[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class Cut:
    """All keys as they are at one moment, for a snapshot that is written in pieces.

    The states of `hot` keys go on changing: the caller fetches and writes them in pieces, each before its keys are
    touched. `cold` yields keys with their states as they were at the moment of the cut.
    """

    hot: list[Any]
    cold: Iterator[Block]


class KeyStore(ABC):
    """The state of one step's keys on one worker."""

    __slots__ = ("states",)

    def __init__(self) -> None:
        self.states: dict[Any, Any] = {}
        """The states of the keys in memory. It stays the same dict as long as the store lives."""

    @property
    @abstractmethod
    def spilled(self) -> bool:
        """Return whether any state is on disk. If not, `states` holds all of it."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of keys that have state."""

    @abstractmethod
    def fetch(self, keys: Sequence[Any]) -> None:
        """Load those of `keys` that have state into `states`."""

    @abstractmethod
    def put(self, keys: list[Any], states: list[Any]) -> None:
        """Add the states of keys that have none here: from another worker, or from a snapshot."""

    @abstractmethod
    def census(self, block: int = BLOCK) -> Iterator[list[Any]]:
        """Yield all keys that have state now, each once, in lists of up to `block` keys."""

    @abstractmethod
    def cut(self, block: int = BLOCK) -> Cut:
        """Return all keys as they are now. `cold` yields up to `block` keys at a time."""

    def items(self) -> dict[Any, Any]:
        """Return all keys with their states, for tests."""
        cut = self.cut()
        states_by_key = {key: self.states[key] for key in cut.hot}
        for keys, states in cut.cold:
            states_by_key.update(zip(keys, states, strict=True))
        return states_by_key


class MemoryStore(KeyStore):
    """A store that keeps all states in memory.

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
        """Do nothing: all keys are in memory."""

    def put(self, keys: list[Any], states: list[Any]) -> None:
        """Add the states to the dict."""
        self.states.update(zip(keys, states, strict=True))

    def census(self, block: int = BLOCK) -> Iterator[list[Any]]:
        """Yield the keys of the dict in blocks."""
        return blocks(list(self.states), block)

    def cut(self, block: int = BLOCK) -> Cut:
        """Return all keys as hot keys."""
        return Cut(list(self.states), iter(()))


def blocks(keys: list[Any], size: int) -> Iterator[list[Any]]:
    """Yield `keys` in lists of up to `size` keys.

    >>> list(blocks([1, 2, 3], 2))
    [[1, 2], [3]]
    """
    remaining = iter(keys)
    return iter(lambda: list(islice(remaining, size)), [])
