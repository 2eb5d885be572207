"""Generate items, for load tests and for examples.

Rules:

1. An item depends only on its index and the seed: not on the partition, the worker, or earlier items. So a part can go
   on elsewhere without a trace, and the same seed gives the same items for any number of partitions.
2. Part `p` of `n` makes the items p, p + n, p + 2n, …
3. With a rate, item `i` is due at start + i / rate, whatever happened to those before it: a source that was held up
   catches up (an open loop, as real traffic is). The start is part of the position, so it moves with the part.
4. Without a rate, items are made as fast as they are taken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, TypeVar

from railgun.engine.operators.functions import reason_to_refuse
from railgun.engine.operators.operator import name_of
from railgun.flows.errors import ConnectorError
from railgun.flows.source import Reader, Source

T = TypeVar("T")

_SECOND: Final = 1_000_000
_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15


class Generate(Source[T]):
    """A source of the items `function(index, random)` for index 0, 1, 2, …; `random` is seeded for each item.

    `rate`: items a second, over all partitions. `count`: the number of items; without it, they never end.

    >>> dice = Generate(lambda index, random: (index, random.randint(1, 6)), count=5, seed=1)
    >>> dice.open(0, None).read(10, now=0)
    [(0, 5), (1, 2), (2, 1), (3, 3), (4, 4)]
    >>> slow = Generate(lambda index, random: index, rate=2.0).open(0, None)
    >>> slow.read(10, now=0), slow.read(10, now=400_000), slow.read(10, now=1_000_000)
    ([0], [], [1, 2])
    """

    def __init__(
        self,
        function: Callable[[int, Random], T],
        *,
        rate: float | None = None,
        count: int | None = None,
        partitions: int = 1,
        seed: int = 0,
    ) -> None:
        if not callable(function):
            raise ConnectorError(f"Generate needs a function of index and random, not {function!r}")
        if why := reason_to_refuse(function):
            raise ConnectorError(f"Generate: {why}")
        if rate is not None and not 0 < rate < float("inf"):
            raise ConnectorError(f"Generate needs a rate above 0 items a second, not {rate!r}")
        if count is not None and count < 0:
            raise ConnectorError(f"Generate cannot make {count} items")
        if partitions < 1:
            raise ConnectorError(f"Generate needs at least one partition, not {partitions}")
        self.function = function
        self.rate = rate
        self.count = count
        self.parts = partitions
        self.seed = seed

    def partitions(self) -> Sequence[int]:
        """Return the numbers of the parts."""
        return range(self.parts)

    def layout(self) -> dict[str, int]:
        """Return how items are divided over parts, the seed, and the count: an ended part stays ended."""
        endless = {"partitions": int(self.parts), "seed": int(self.seed)}
        return endless if self.count is None else {**endless, "count": int(self.count)}

    def as_of_now(self) -> Source[T]:
        """Return a source of the same items that ends at once, without the rate; raise an error if they never end."""
        if self.count is None:
            return super().as_of_now()
        now = copy.copy(self)
        now.rate = None
        return now

    def open(self, partition: Any, position: Any) -> Reader[T]:
        """Read the items of one part."""
        index, start = (partition, None) if position is None else position
        return _Reader(self, index, start)


class _Reader(Reader[T]):
    def __init__(self, source: Generate[T], index: int, start: int | None) -> None:
        self.source = source
        self.random = Draws(source.seed)
        self.position: tuple[int, int | None] = index, start
        """The next item's index, and the time at which item 0 was due (µs)."""

    def read(self, most: int, now: int) -> Sequence[T] | None:
        source = self.source
        at, start = self.position
        if source.count is not None and at >= source.count:
            return None
        if start is None:
            start = now
        end = at + most * source.parts
        if source.count is not None:
            end = min(end, source.count)
        if source.rate is not None:
            end = min(end, int((now - start) * source.rate // _SECOND) + 1)
        indices = range(at, end, source.parts)
        items: list[T] = []
        function, draw, append = source.function, self.random, items.append
        try:
            for index in indices:
                draw.begin(index)
                append(function(index, draw))
        except Exception as error:
            error.add_note(f"{name_of(function)} was to make item {indices[len(items)]}")
            raise
        self.position = at + len(items) * source.parts, start
        return items


class Draws(Random):
    """A random generator that is seeded anew for every item, at the cost of one multiplication (SplitMix64).

    >>> draws = Draws(seed=7)
    >>> draws.begin(3); first = draws.random(), draws.choice("abc"), draws.gauss(0, 1)
    >>> draws.begin(4); draws.begin(3); first == (draws.random(), draws.choice("abc"), draws.gauss(0, 1))
    True
    """

    def __init__(self, seed: int) -> None:
        super().__init__(0)
        self._base = _mixed(seed * _STEP & _MASK)
        self._state = self._base

    def begin(self, index: int) -> None:
        """Begin the numbers of one item."""
        self._state = _mixed((self._base + index * _STEP) & _MASK)
        self.gauss_next = None  # Random keeps the second half of a pair there

    def getrandbits(self, k: int, /) -> int:
        """Return `k` random bits."""
        if k < 0:
            raise ValueError("number of bits must be non-negative")
        bits, count = 0, 0
        while count < k:
            self._state = state = (self._state + _STEP) & _MASK
            bits |= _mixed(state) << count
            count += 64
        return bits & ((1 << k) - 1)

    def random(self) -> float:
        """Return a number from 0 up to 1."""
        self._state = state = (self._state + _STEP) & _MASK
        return (_mixed(state) >> 11) * 2.0**-53

    def seed(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the item's index is the seed."""

    def getstate(self) -> Any:
        """Return the state of the generator."""
        return self._state, self.gauss_next

    def setstate(self, state: Any) -> None:
        """Restore a state of the generator."""
        self._state, self.gauss_next = state


def _mixed(n: int) -> int:
    n = ((n ^ (n >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    n = ((n ^ (n >> 27)) * 0x94D049BB133111EB) & _MASK
    return n ^ (n >> 31)
