"""Define the interfaces for sinks, which take the results of a flow.

A sink is a description that travels to the workers; there `open` makes a `Writer`, one for each worker (and stage).

>>> class Shout(Sink[str]):
...     def open(self, place):
...         return ShoutWriter()
>>> class ShoutWriter(Writer[str]):
...     def write(self, items):
...         print(*items, sep="!", end="!")
>>> Shout().open(Place("demo", "shout", 0, 0)).write(["a", "b"])
a!b!

The items that such a sink has written stay written. When a flow goes back to a snapshot, later items come again: the
sink delivers *at least once*. To deliver *exactly once* a sink takes part in the snapshots, in two phases. With a
snapshot each writer *prepares* the items it got since the previous one: safe, but not yet visible. Once the snapshot
is complete, the sink *commits* the output prepared for it. The two phases are tied together by a token, which is kept
in the snapshot.

Subclass `TwoPhaseSink` and `TwoPhaseWriter`. In this example the outside world is a dictionary:

>>> import uuid
>>> class Shelf(TwoPhaseSink[str]):
...     def __init__(self):
...         self.behind, self.shelf = {}, []
...     def open(self, place):
...         return ShelfWriter(self, place)
...     def commit(self, token):
...         self.shelf += self.behind.pop(token, [])  # nothing, if it was committed before
...     def recover(self, flow, step, generation, tokens):
...         for token in tokens:
...             self.commit(token)
...         for token in list(self.behind):
...             if int(token.split("/")[0]) < generation:
...                 del self.behind[token]
>>> class ShelfWriter(TwoPhaseWriter[str]):
...     def __init__(self, sink, place):
...         self.sink, self.place, self.items = sink, place, []
...     def write(self, items):
...         self.items += items
...     def prepare(self, snapshot):
...         if not self.items:
...             return None
...         token = f"{self.place.generation}/{snapshot}/{uuid.uuid4()}"
...         self.sink.behind[token], self.items = self.items, []
...         return token

Prepared output becomes visible when it is committed, and once only. Output that was not prepared when a writer ended,
or was prepared for a snapshot that was never completed, never becomes visible:

>>> sink = Shelf()
>>> writer = sink.open(Place("demo", "shelf", worker=0, generation=1, transactional=True))
>>> writer.write(["a", "b"])
>>> first = writer.prepare(7)
>>> writer.write(["c"])
>>> sink.shelf
[]
>>> sink.commit(first); sink.commit(first); sink.shelf
['a', 'b']
>>> second = writer.prepare(8)  # and now the flow goes back to snapshot 7
>>> sink.recover("demo", "shelf", generation=2, tokens=[first]); sink.shelf, sink.behind
(['a', 'b'], {})

Rules of the interface:

1. `write` gets every item that comes to this worker, those of one key in their order. It may raise for an item it
   cannot take; then no item of that batch may ever become visible.
2. If `place.transactional` is False the flow takes no snapshots: no output is ever prepared or committed, and `flush`
   makes written items visible. If it is True, `flush` makes nothing visible; it may send data on its way.
3. `prepare(snapshot)` makes safe all that was written since the last `prepare`: it survives the end of this process and
   a power failure of this machine. It returns a token, or None if there was nothing. The token is plain JSON, and all
   that is needed to commit from any worker, in any later process. Two writers never return the same token. A sink in
   two stages has two writers on one worker, and a worker that left may come back in the same generation, so a token
   (and a name of a file or transaction) needs more than the names in `place` and the number of the snapshot.
4. After `prepare` the writer goes on with items that belong to the next snapshot. If the snapshot fails but the flow
   goes on, its tokens are committed with the next one.
5. `commit(token)` makes prepared output visible. It may be called again: after it succeeded, after it failed half-way,
   and from two processes at the same time, one of which was given up for dead. Only the first call has an effect. If
   the sink can tell that the prepared output is lost, `commit` raises.
6. `recover(flow, step, generation, tokens)` is called once when a generation begins, before anything is read. It
   commits these tokens, then throws away the output that *older* generations of this step have staged or prepared. A
   process of an older generation may still be running: whatever it does then must do no harm.
7. `close` throws away items written after the last `prepare`, and leaves prepared output alone.
8. An exception from any of these methods ends the flow, unless it is an `OSError`, or was caused by one, which may pass
   (a full disk, a network that is down; not a missing file or permission): that sends the flow back to its last
   snapshot, and ends it only when it comes again and again. So retry inside the method where a retry makes sense.
9. `commit` and `recover`, and `prepare` in part, are called in another thread than `write`, while records flow. A call
   that has not returned within `Settings.hang_after` is taken for a hang: its worker is ended, and the flow goes back.
10. A sink with `commits_together` gets the tokens of all workers by one call of `commit_all`, on one worker, and makes
    their output visible all at once. Its writers are told when a rescale brings keys of other workers (`keys_arrive`):
    items they write from then on must become visible after the items those workers wrote before, so that results of
    one key stay in order. The number of the rescale tells which tokens come first.

Duties of the driver of a sink:

1. A token is committed only after the snapshot that holds it is safe.
2. A token stays in every later snapshot until its commit has returned: `recover` throws away output without a token.
3. A writer that is to be closed although the flow goes on (its worker leaves) is asked to prepare first, and its
   token goes into the next snapshot.
4. A generation is larger than all before it, also those of earlier runs; a snapshot's number is never used again.
5. The number `prepare` is given is never larger than that of the first snapshot that holds the token. A worker that
   leaves before its first snapshot may give a smaller one than snapshots that are committed: the number alone gives no
   order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

T_contra = TypeVar("T_contra", contravariant=True)

Token: TypeAlias = Any
"""A reference to prepared output: None, bool, int, float, str, or lists and dictionaries of them, as in JSON."""


def _nowhere(step: str, items: Sequence[Any]) -> None:
    raise RuntimeError(f"{step}: cannot send items to the program that started the flow from here")


@dataclass(frozen=True)
class Place:
    """The place of a writer: its flow and step, worker, and generation of the flow."""

    flow: str
    step: str
    worker: int
    generation: int
    to_driver: Callable[[str, Sequence[Any]], None] = _nowhere
    """Sends items to the program that started the flow."""
    transactional: bool = False
    """Whether the flow takes snapshots, so that output can be prepared and committed with them."""
    store: str = ""
    """Identifies the directory of the flow's snapshots: two jobs of one flow have different ones."""


class Writer(ABC, Generic[T_contra]):
    """Writes the items that arrive at one worker."""

    @abstractmethod
    def write(self, items: Sequence[T_contra]) -> None:
        """Write a batch of items. Called in order; items of one key always come in their order."""

    def flush(self) -> None:
        """Make written items visible. Called about every second, and before the flow ends.

        If the flow takes snapshots, also called with each of them: items written by then must survive the process.
        """

    def close(self) -> None:
        """Release the writer's resources: the worker or the flow ends."""


class Sink(ABC, Generic[T_contra]):
    """A place that results are written to."""

    @abstractmethod
    def open(self, place: Place) -> Writer[T_contra]:
        """Return a writer for one worker."""


class TwoPhaseWriter(Writer[T_contra]):
    """Writes the items that arrive at one worker; they become visible when their snapshot is complete."""

    @abstractmethod
    def prepare(self, snapshot: int) -> Token | None:
        """Make safe, but not visible, the items written since the last call; return None if nothing needs a commit."""

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        """Do the same as `prepare`, but leave slow work (an fsync) to the returned function.

        Another thread calls that function while further items are written; those belong to the next snapshot.
        """
        token = self.prepare(snapshot)
        return lambda: token

    def keys_arrive(self, rescale: int) -> None:
        """Take note that keys of other workers come to this one; `rescale` is a number that grows with each rescale.

        No key leaves this worker in the same rescale, unless workers join and leave in one.
        """


class TwoPhaseSink(Sink[T_contra]):
    """A place that results are written to exactly once, if the flow takes snapshots.

    Its writers are `TwoPhaseWriter`s then.
    """

    commits_together: ClassVar[bool] = False
    """Whether one worker commits what all workers prepared for a snapshot, by one call of `commit_all`."""

    @abstractmethod
    def commit(self, token: Token) -> None:
        """Make prepared output visible. A repeated or concurrent call has no effect."""

    def commit_all(self, tokens: Sequence[Token]) -> None:
        """Commit the output of all workers, so that it becomes visible at once. Called if `commits_together`."""
        for token in tokens:
            self.commit(token)

    @abstractmethod
    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Token]) -> None:
        """Begin a generation: commit these tokens, and throw away other output that older generations prepared."""

    def recover_at(self, place: Place, tokens: Sequence[Token]) -> object:
        """Do `recover`, for a sink that needs more of its place, such as the snapshots' `store`."""
        return self.recover(place.flow, place.step, place.generation, tokens)
