"""Where records come from: the interface for sources.

A source with positions is split in two: a *lister*, which names the parts the data comes in (files, partitions,
shards), and *readers*, one for each part, whose position is keyed state like any other. So a part moves to another
worker as any key does: the old reader stops, the new one opens at the position that came with it.

To write one, subclass `Source` and `Reader`:

>>> class Countdown(Source[int]):
...     def partitions(self):
...         return ["down"]
...     def open(self, partition, position):
...         return CountdownReader(10 if position is None else position)
>>> class CountdownReader(Reader[int]):
...     def __init__(self, left):
...         self.position = left
...     def read(self, most, now):
...         if self.position == 0:
...             return None
...         self.position -= 1
...         return [self.position]

Rules of the interface:

1. `partitions` is stateless and may be called at any time, on any worker, more than once. A name that was listed before
   means the same part as before. Names are keys: hashable, picklable, with a stable hash.
2. `open(partition, position)` begins after what a reader had read when its `position` was this; `None`: at the start.
3. `read` returns at once: up to `most` records that are there now (`[]`: none now), or `None` when the part has ended
   and nothing will ever be added. After it returns, `position` stands behind what it returned.
4. An exception ends the flow with that error (later: rolls it back), so a reader retries what can be retried.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from railgun.errors import RailgunError

T_co = TypeVar("T_co", covariant=True)


class Reader(ABC, Generic[T_co]):
    """Reads one part of a source on one worker."""

    position: Any = None
    """Where the reader stands: picklable, and enough to go on from there in another process."""

    @abstractmethod
    def read(self, most: int, now: int) -> Sequence[T_co] | None:
        """Up to `most` records that are there at the time `now` (µs); None: ended for good."""

    def close(self) -> None:
        """Let go of files and sockets: the part moves, or the flow ends."""


class Source(ABC, Generic[T_co]):
    """A place records come from."""

    bounded: bool = True
    """Whether `partitions` names all there will ever be. If not, it is asked again every `poll` seconds."""
    poll: float = 1.0

    @abstractmethod
    def partitions(self) -> Iterable[Hashable]:
        """The lister: names of the parts that are there now."""

    @abstractmethod
    def open(self, partition: Any, position: Any) -> Reader[T_co]:
        """A reader of a part, from a position on."""

    def layout(self) -> Mapping[str, Any] | None:
        """Return what the positions in the parts depend on, by name, as JSON values; None: on nothing.

        It is saved with snapshots. A snapshot in whose layout a name has another value is refused: its positions would
        mean something else, so that records would be left out or come twice. Names that only the source has now are not
        compared. A source needs a layout if its parts are divided anew when it is made with other arguments, as
        `Generate` with another number of partitions; not if each part is a thing of its own, as a file or a stream is.
        It is asked in the program that starts the flow, and does not wait for anything.
        """
        return None

    def as_of_now(self) -> Source[T_co]:
        """The same source with nothing but what is there now: however often it is read, it brings the same.

        Its readers come to an end. What came after can be read by this source, from their last positions on.
        """
        raise NotImplementedError(f"{type(self).__name__} does not know what is there now")


class Pushed(Source[T_co]):
    """A source that is not read: programs outside push into it, and each worker listens for them.

    It has no parts. How far each of its streams is stands in the snapshots.
    """

    bounded = False
    poll = 3600.0
    secret: bytes
    """What whoever pushes has to know."""
    name: str
    port: int | None = None
    """Where worker 0 listens, worker 1 at the next one, and so on; None: anywhere."""
    event_time: bool = False
    """Whether records have the times that messages say, and not those of their arrival."""

    def partitions(self) -> Iterable[Hashable]:
        """There are none."""
        return ()

    def open(self, partition: Any, position: Any) -> Reader[T_co]:
        """Nothing can be opened."""
        raise NotImplementedError(f"{type(self).__name__} is pushed to, not read")

    @abstractmethod
    def items(self, stream: str, batch: Any, into: list[Any]) -> None:
        """Put the items of a batch of messages (`wire.outside.Pushed`) into a list, one by one.

        What it raises is the fault of the message that would have been next.
        """


def is_empty(source: Source[Any]) -> bool:
    """Whether a source has nothing yet, for certain: then nobody has to say where it begins."""
    try:
        now = source.as_of_now()
        parts = list(now.partitions())
    except (NotImplementedError, RailgunError):
        return False
    ends = getattr(now, "ends", None) or getattr(now, "sizes", None)
    return not parts or (ends is not None and not any(ends.values()))
