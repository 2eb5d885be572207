"""Mutants of `broker.protocol.producers` and its driver: each breaks one rule, and the exploration must find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from railgun.broker.protocol.producers.producer import Intent, LostOutputError, Producer
from railgun.broker.protocol.producers.registry import Producers
from verification.mutation import Verdict, registrar, verdict_of
from verification.producers.model import Case, Habits, explore

Kind = TypeVar("Kind", bound=type[Producers])

ALONE: Final = Case(loads=(0,), rounds=(2,), crashes=1)
SUCCESSOR: Final = Case(loads=(0, 0), rounds=(1, 1), crashes=1)
PIECES: Final = Case(loads=(0,), rounds=(1,), pieces=2, crashes=1, unheard=1)
TRIMMED: Final = Case(loads=(0, 0), rounds=(1, 1), crashes=1, trims=1)
BACK_AND_FORTH: Final = Case(loads=(0, 1, 0), rounds=(1, 0, 0), crashes=1)
FORGOTTEN: Final = Case(loads=(0, 0), rounds=(1, 1), crashes=1, forgets=1, transactions=True)
DROPPED: Final = Case(loads=(0,), rounds=(1,), crashes=1, drops=1)
MOVED: Final = Case(loads=(0,), rounds=(1,), pieces=2, crashes=1, moves=1)

MUTANTS: dict[str, tuple[Habits, Case]] = {
    "A unit is appended before its intent is safe": (Habits(notes_first=False), ALONE),
    "An intent that is found counts as done": (Habits(looks="done"), ALONE),
    "An intent that is found counts as not done": (Habits(looks="open"), ALONE),
    "A unit is trimmed before its commit is noted": (Habits(trims_late=False), TRIMMED),
    "A commit is answered before its unit is safe": (Habits(waits=False), ALONE),
    "A piece is answered before it is safe": (Habits(stages_first=False), ALONE),
    "An epoch begins before its note is safe": (Habits(waits_for_note=False), SUCCESSOR),
    "Staged messages are moved before their copy is safe": (Habits(moves_safely=False), MOVED),
    "The stream does not note which sequences it has given": (
        Habits(notes_stream=False),
        FORGOTTEN,
    ),
}
"""By description: the driver's habits, and a case that shows the mistake."""


def mutant(case: Case) -> Callable[[Kind], Kind]:
    """Register a mutant under the first line of its docstring."""
    return registrar(MUTANTS, lambda kind: (Habits(producers=kind), case))


def hunt(name: str) -> Verdict:
    """Explore a mutant; return its name, how it was caught (empty if it was not), and the violation."""
    habits, case = MUTANTS[name]
    return verdict_of(name, explore(case, habits))


@mutant(SUCCESSOR)
class NoFence(Producers):
    """An older epoch is not refused."""

    __slots__ = ()

    def _check_epoch(self, producer: Producer, epoch: int) -> None:
        pass


@mutant(SUCCESSOR)
class DropsAll(Producers):
    """A new epoch drops the sequences that it was to keep."""

    __slots__ = ()

    def begin(
        self, name: str, epoch: int, now: int, keep: Iterable[int] | None = None, lifetime: int = 0
    ) -> Producer:
        return super().begin(name, epoch, now, [], lifetime)


@mutant(BACK_AND_FORTH)
class DropsNothing(Producers):
    """A new epoch drops nothing."""

    __slots__ = ()

    def begin(
        self, name: str, epoch: int, now: int, keep: Iterable[int] | None = None, lifetime: int = 0
    ) -> Producer:
        return super().begin(name, epoch, now, None, lifetime)


@mutant(BACK_AND_FORTH)
class ForgetsDrops(Producers):
    """Dropped messages are staged again after a restart."""

    __slots__ = ()

    @classmethod
    def load(
        cls, notes: Mapping[str, Mapping[str, Any]], stream_note: Mapping[str, Any] | None = None
    ) -> Producers:
        return super().load(
            {name: {**note, "floor": 1} for name, note in notes.items()}, stream_note
        )


@mutant(ALONE)
class RepeatsSequences(Producers):
    """Sequences are given again after a restart."""

    __slots__ = ()

    @classmethod
    def load(
        cls, notes: Mapping[str, Mapping[str, Any]], stream_note: Mapping[str, Any] | None = None
    ) -> Producers:
        producers = super().load(notes, stream_note)
        for producer in producers.by_name.values():
            producer.next = 1 + max((end - 1 for _, end in producer.committed), default=0)
        return producers


@mutant(ALONE)
class Uncommitted(Producers):
    """Committed sequences are not remembered."""

    __slots__ = ()

    def committed(self, name: str, number: int, base: int = 0) -> None:
        producer = self.by_name[name]
        staged, before = dict(producer.staged), list(producer.committed)
        super().committed(name, number, base)
        producer.staged, producer.committed = staged, before


@mutant(ALONE)
class ForgetsCommits(Producers):
    """Committed sequences are not in the note."""

    __slots__ = ()

    @classmethod
    def load(
        cls, notes: Mapping[str, Mapping[str, Any]], stream_note: Mapping[str, Any] | None = None
    ) -> Producers:
        return super().load(
            {name: {**note, "committed": []} for name, note in notes.items()}, stream_note
        )


@mutant(PIECES)
class TakesTwice(Producers):
    """A piece that is sent again is accepted again."""

    __slots__ = ()

    def staged(
        self,
        number: int,
        epoch: int,
        sequence: int,
        at: int,
        count: int,
        size: int,
        offset: int,
        now: int = 0,
    ) -> bool:
        producer = self.numbered(number)
        staged = None if producer is None else producer.staged.get(sequence)
        at = 0 if staged is None else staged.count
        return super().staged(number, epoch, sequence, at, count, size, offset, now)


@mutant(PIECES)
class TakesGaps(Producers):
    """A piece is accepted that does not follow the piece before it."""

    __slots__ = ()

    def commit(
        self,
        name: str,
        epoch: int,
        counts: Mapping[int, int],
        end: int,
        now: int,
        labels: range | None = None,
    ) -> Intent | None:
        producer = self.by_name[name]
        staged = {
            key: producer.staged[key].count if key in producer.staged else 0 for key in counts
        }
        return super().commit(name, epoch, staged, end, now, labels)

    def found(
        self,
        number: int,
        sequence: int,
        count: int,
        size: int,
        offset: int,
        now: int = 0,
        *,
        anew: bool = False,
    ) -> None:
        if offset:  # the first one is lost
            super().found(number, sequence, count, size, offset, now, anew=anew)


@mutant(BACK_AND_FORTH)
class LosesInSilence(Producers):
    """Lost messages count as committed."""

    __slots__ = ()

    def commit(
        self,
        name: str,
        epoch: int,
        counts: Mapping[int, int],
        end: int,
        now: int,
        labels: range | None = None,
    ) -> Intent | None:
        try:
            return super().commit(name, epoch, counts, end, now, labels)
        except LostOutputError:
            return None


@mutant(SUCCESSOR)
class BeginsMeanwhile(Producers):
    """A new epoch begins while a commit is under way."""

    __slots__ = ()

    def _check_idle(self, producer: Producer) -> None:
        pass


@mutant(ALONE)
class CountsCommitsAnew(Producers):
    """Numbers of commits are used again."""

    __slots__ = ()

    def committed(self, name: str, number: int, base: int = 0) -> None:
        super().committed(name, number, base)
        self.by_name[name].commits = 0


@mutant(FORGOTTEN)
class BeginsAtOne(Producers):
    """A producer that begins anew is given the first sequences again."""

    __slots__ = ()

    def begin(
        self, name: str, epoch: int, now: int, keep: Iterable[int] | None = None, lifetime: int = 0
    ) -> Producer:
        if name not in self.by_name:
            self._next_sequence = 1
        return super().begin(name, epoch, now, keep, lifetime)


@mutant(DROPPED)
class ForgetsFinished(Producers):
    """Sequences that were dropped by number are not in the note."""

    __slots__ = ()

    @classmethod
    def load(
        cls, notes: Mapping[str, Mapping[str, Any]], stream_note: Mapping[str, Any] | None = None
    ) -> Producers:
        return super().load(
            {name: {**note, "finished": []} for name, note in notes.items()}, stream_note
        )


@mutant(DROPPED)
class TakesDropped(Producers):
    """A sequence that was dropped accepts more messages."""

    __slots__ = ()

    def staged(
        self,
        number: int,
        epoch: int,
        sequence: int,
        at: int,
        count: int,
        size: int,
        offset: int,
        now: int = 0,
    ) -> bool:
        producer = self.numbered(number)
        if producer is not None:
            producer.finished = []
        return super().staged(number, epoch, sequence, at, count, size, offset, now)


@mutant(MOVED)
class CountsCopies(Producers):
    """A copy counts in addition to its originals."""

    __slots__ = ()

    def found(
        self,
        number: int,
        sequence: int,
        count: int,
        size: int,
        offset: int,
        now: int = 0,
        *,
        anew: bool = False,
    ) -> None:
        super().found(number, sequence, count, size, offset, now)


@mutant(MOVED)
class HoldsBack(Producers):
    """The originals of moved messages count as needed."""

    __slots__ = ()

    def moved(self, number: int, sequence: int, offset: int) -> None:
        pass
