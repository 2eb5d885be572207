"""Define the interface for sources, which bring records into a flow.

A source with positions is split in two: a *lister*, which names the parts the data comes in (files, partitions,
shards), and *readers*, one for each part, whose position is keyed state like any other. So a part moves to another
worker as any key does: the old reader stops, the new one opens at the position that came with it.

To write a source, subclass `Source` and `Reader`:

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
2. `open(partition, position)` begins after the records a reader had read when its `position` was this; `None`: at the
   start.
3. `read` returns at once: up to `most` records that are available now (`[]`: none now), or `None` when the part has
   ended and will never grow. After it returns, `position` is behind the returned records.
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
    """The reader's position: picklable, and enough to go on from there in another process."""

    @abstractmethod
    def read(self, most: int, now: int) -> Sequence[T_co] | None:
        """Return up to `most` records available at the time `now` (µs); None: the part has ended for good."""

    def close(self) -> None:
        """Release files and sockets: the part moves, or the flow ends."""


class Source(ABC, Generic[T_co]):
    """A place that records come from."""

    bounded: bool = True
    """Whether `partitions` names all parts there will ever be. If not, it is called again every `poll` seconds."""
    poll: float = 1.0

    @abstractmethod
    def partitions(self) -> Iterable[Hashable]:
        """List the names of the parts that exist now."""

    @abstractmethod
    def open(self, partition: Any, position: Any) -> Reader[T_co]:
        """Return a reader of a part, from a position on."""

    def layout(self) -> Mapping[str, Any] | None:
        """Return what the positions in the parts depend on, by name, as JSON values; None: on nothing.

        The layout is saved with snapshots. A snapshot in whose layout a name has another value is refused: its
        positions would mean something else, so that records would be left out or come twice. Names that only the
        current source has are not compared. A source needs a layout if its parts are divided anew when it is made with
        other arguments, as `Generate` with another number of partitions; not if each part is a thing of its own, like a
        file or a stream. `layout` is called in the program that starts the flow, and must not wait for anything.
        """
        return None

    def as_of_now(self) -> Source[T_co]:
        """Return the same source limited to what is there now: however often it is read, it brings the same records.

        Its readers come to an end. Later records can be read by this source, from their last positions on.
        """
        raise NotImplementedError(f"{type(self).__name__} does not know what is there now")


class Pushed(Source[T_co]):
    """A source that is not read: outside programs push into it, and each worker listens for them.

    It has no parts. The snapshots hold the position of each of its streams.
    """

    bounded = False
    poll = 3600.0
    secret: bytes
    """The secret that a program needs to push."""
    name: str
    port: int | None = None
    """The port of worker 0; worker 1 listens at the next one, and so on. None: any free port."""
    event_time: bool = False
    """Whether records have the times that messages carry, instead of those of their arrival."""

    def partitions(self) -> Iterable[Hashable]:
        """Return no parts."""
        return ()

    def open(self, partition: Any, position: Any) -> Reader[T_co]:
        """Raise `NotImplementedError`: the source cannot be read."""
        raise NotImplementedError(f"{type(self).__name__} is pushed to, not read")

    @abstractmethod
    def items(self, stream: str, batch: Any, into: list[Any]) -> None:
        """Append the items of a batch of messages (`transport.ingest_batch.Pushed`) to `into`, one by one.

        An error it raises is taken as the fault of the next message.
        """


def is_empty(source: Source[Any]) -> bool:
    """Return whether a source certainly has no records yet: then its starting position need not be given."""
    try:
        now = source.as_of_now()
        parts = list(now.partitions())
    except (NotImplementedError, RailgunError):
        return False
    ends = getattr(now, "ends", None) or getattr(now, "sizes", None)
    return not parts or (ends is not None and not any(ends.values()))
