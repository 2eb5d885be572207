"""Where results go: the interfaces for sinks.

A sink is a description that travels to the workers; there `open` makes a `Writer`, one for each worker (and stage).

>>> class Shout(Sink[str]):
...     def open(self, place):
...         return ShoutWriter()
>>> class ShoutWriter(Writer[str]):
...     def write(self, items):
...         print(*items, sep="!", end="!")
>>> Shout().open(Place("demo", "shout", 0, 0)).write(["a", "b"])
a!b!

What such a sink has written stays written. When a flow goes back to a snapshot, what came after it comes again: the
sink delivers *at least once*. To deliver *exactly once* a sink takes part in the snapshots, in two phases. With a
snapshot each writer *prepares* what it has got since the one before: safe, but not yet seen by anybody. Once the
snapshot is whole, the sink *commits* what was prepared for it. The two are tied together by a token, which is kept in
the snapshot.

Subclass `TwoPhaseSink` and `TwoPhaseWriter`. Here the world outside is a dictionary:

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

What is prepared is seen when it is committed, and once only. What was not prepared when a writer ended, or was prepared
for a snapshot that never was, is never seen:

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
   cannot take; then nothing of that batch may be seen, ever.
2. If `place.transactional` is False the flow takes no snapshots: nothing is ever prepared or committed, and `flush`
   lets others see what was written. If it is True, `flush` shows nothing to anybody; it may send data on its way.
3. `prepare(snapshot)` makes all that was written since the last `prepare` safe: it outlives this process and this
   machine's power. It returns a token, or None if there was nothing. The token is plain JSON, and all that is needed to
   commit from any worker, in any later process. Two writers never give the same token. A sink in two stages has two
   writers on one worker, and a worker that left may come back in the same generation, so a token (and a name
   of a file or transaction) needs more than the names in `place` and the number of the snapshot.
4. After `prepare` the writer goes on with what belongs to the next snapshot. If the snapshot comes to nothing but the
   flow goes on, its tokens are committed with the next one.
5. `commit(token)` lets others see what was prepared. It may come again: after it succeeded, after it failed half-way,
   and from two processes at the same time, one of which was given up for dead. Only the first has an effect. If
   it can tell that what was prepared is lost, it raises.
6. `recover(flow, step, generation, tokens)` is called once when a generation begins, before anything is read. It
   commits these tokens, then throws away what *older* generations of this step have staged or prepared. A process of
   an older generation may still be running: whatever it does then must do no harm.
7. `close` throws away what was written after the last `prepare`, and leaves alone what was prepared.
8. An exception from any of these ends the flow, unless it is an `OSError`, or was caused by one, which may pass (a full
   disk, a network that is down; not a missing file or permission): that sends the flow back to its last snapshot, and
   ends it only when it comes again and again. So retry inside what can be retried.
9. `commit` and `recover`, and `prepare` in part, are called in another thread than `write`, while records flow. A call
   that has not returned within `Settings.hang_after` is taken for a hang: its worker is ended, and the flow goes back.
10. A sink with `commits_together` gets the tokens of all workers by one call of `commit_all`, on one worker, and shows
    what they hold all at once. Its writers are told when a rescale brings keys of other workers (`keys_arrive`): what
    they write from then on has to be shown after what those workers wrote before, so that results of one key stay in
    order. The number of the rescale tells which tokens come first.

Duties of whoever drives a sink:

1. A token is committed only after the snapshot that holds it is safe.
2. A token stays in every later snapshot until its commit has returned: `recover` throws away what it is not told of.
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
"""What a writer prepared: None, bool, int, float, str, or lists and dictionaries of them, as JSON has them."""


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
    transactional: bool = False
    """Whether the flow takes snapshots, so that output can be prepared and committed with them."""
    store: str = ""
    """What tells the directory of its snapshots from others: two jobs of one flow have different ones."""


class Writer(ABC, Generic[T_contra]):
    """Writes what arrives at one worker."""

    @abstractmethod
    def write(self, items: Sequence[T_contra]) -> None:
        """Take a batch of items. Called in order; items of one key always come in their order."""

    def flush(self) -> None:
        """Let others see what was written. Called about every second, and before the flow ends.

        If the flow takes snapshots, also with each of them: what was written by then must outlive the process.
        """

    def close(self) -> None:
        """The worker ends, or the flow does."""


class Sink(ABC, Generic[T_contra]):
    """A place results go to."""

    @abstractmethod
    def open(self, place: Place) -> Writer[T_contra]:
        """The writer for one worker."""


class TwoPhaseWriter(Writer[T_contra]):
    """Writes what arrives at one worker, to be seen when the snapshot it belongs to is whole."""

    @abstractmethod
    def prepare(self, snapshot: int) -> Token | None:
        """Make safe, and do not show, what was written since the last time; None: nothing is left to commit."""

    def cut(self, snapshot: int) -> Callable[[], Token | None]:
        """As `prepare`, but what takes long (an fsync) may be left to the function it returns.

        That one is called by another thread, while further items are written; they belong to the next snapshot.
        """
        token = self.prepare(snapshot)
        return lambda: token

    def keys_arrive(self, rescale: int) -> None:
        """Note that keys of other workers come to this one; `rescale`: a number that grows with each rescale.

        No key leaves this worker in the same rescale, unless workers join and leave in one.
        """


class TwoPhaseSink(Sink[T_contra]):
    """A place results go to exactly once, if the flow takes snapshots. Its writers are `TwoPhaseWriter`s then."""

    commits_together: ClassVar[bool] = False
    """Whether one worker commits what all workers prepared for a snapshot, by one call of `commit_all`."""

    @abstractmethod
    def commit(self, token: Token) -> None:
        """Let others see what was prepared. A second time, or at the same time, it has no effect."""

    def commit_all(self, tokens: Sequence[Token]) -> None:
        """Commit what all workers prepared: all of it is seen at once. Called if `commits_together`."""
        for token in tokens:
            self.commit(token)

    @abstractmethod
    def recover(self, flow: str, step: str, generation: int, tokens: Sequence[Token]) -> None:
        """A generation begins: commit these, throw away what else older generations prepared."""

    def recover_at(self, place: Place, tokens: Sequence[Token]) -> object:
        """Do `recover`, for a sink that wants to know more of its place: whose snapshots these are (`store`)."""
        return self.recover(place.flow, place.step, place.generation, tokens)
