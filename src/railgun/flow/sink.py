"""Where results go: the interface for sinks.

A sink is a description that travels to the workers; there `open` makes a `Writer`, one for each worker (and stage).

>>> class Shout(Sink[str]):
...     def open(self, place):
...         return ShoutWriter()
>>> class ShoutWriter(Writer[str]):
...     def write(self, items):
...         print(*items, sep="!", end="!")
>>> Shout().open(Place("demo", "shout", 0, 0)).write(["a", "b"])
a!b!
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T_contra = TypeVar("T_contra", contravariant=True)


def _nowhere(step: str, items: Sequence[Any]) -> None:
    raise RuntimeError(f"{step}: this place has no way to the program that started the flow")


@dataclass(frozen=True)
class Place:
    """Where a writer is: which flow and step, on which worker, in which generation of the flow."""

    flow: str
    step: str
    worker: int
    generation: int
    to_driver: Callable[[str, Sequence[Any]], None] = _nowhere
    """Hands items to the program that started the flow."""


class Writer(ABC, Generic[T_contra]):
    """Writes what arrives at one worker."""

    @abstractmethod
    def write(self, items: Sequence[T_contra]) -> None:
        """Take a batch of items. Called in order; items of one key always come in their order."""

    def flush(self) -> None:
        """Let others see what was written. Called about every second, and before the flow ends."""

    def close(self) -> None:
        """The worker ends, or the flow does."""


class Sink(ABC, Generic[T_contra]):
    """A place results go to."""

    @abstractmethod
    def open(self, place: Place) -> Writer[T_contra]:
        """The writer for one worker."""
