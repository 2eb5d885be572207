"""Mutants of the labels and sessions of producers: each breaks one rule, and exploring a query must find it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from railgun.broker.protocol.producers.producer import Intent, Producer
from railgun.broker.protocol.producers.registry import Producers
from verification.mutation import Verdict, registrar, verdict_of
from verification.producers.model import Habits
from verification.producers.query_model import Case, explore

Kind = TypeVar("Kind", bound=type[Producers])

ALONE: Final = Case(runs=((1,),), back=(0,), crashes=1)
SUCCESSOR: Final = Case(crashes=1)
REPEATED: Final = Case(plain=True, crashes=1)
UNHEARD: Final = Case(crashes=1, unheard=1)
SPECULATIVE: Final = Case(runs=((1,),), back=(0,), attempts=(2,), crashes=1)
EMPTY: Final = Case(runs=((0,), (1,)), crashes=1)
SKIPPED: Final = Case(runs=((0, 1), (1, 1)), back=(0, 2), skips=True, crashes=1)
JOINED: Final = Case(runs=((1,),), back=(0,), attempts=(2,), joins=True, crashes=1)

MUTANTS: dict[str, tuple[Habits, Case]] = {
    "A session begins, or a label is passed over, before the note is safe": (
        Habits(waits_for_note=False),
        EMPTY,
    ),
    "The unit of a label is appended before its intent is safe": (
        Habits(notes_first=False),
        ALONE,
    ),
}
"""By description: the driver's habits, and a case that shows the mistake."""


def mutant(case: Case) -> Callable[[Kind], Kind]:
    """Register a mutant under the first line of its docstring."""
    return registrar(MUTANTS, lambda kind: (Habits(producers=kind), case))


def hunt(name: str) -> Verdict:
    """Explore a mutant; return its name, how it was caught (empty if it was not), and the violation."""
    habits, case = MUTANTS[name]
    return verdict_of(name, explore(case, habits, limit=60_000, shortest=True))


class _Forgetful(Producers):
    """Overrides parts of the notes, as if they had not been written."""

    __slots__ = ()
    FORGOTTEN: Mapping[str, Any] = {}

    @classmethod
    def load(
        cls, notes: Mapping[str, Mapping[str, Any]], stream_note: Mapping[str, Any] | None = None
    ) -> Producers:
        return super().load(
            {name: {**note, **cls.FORGOTTEN} for name, note in notes.items()}, stream_note
        )


@mutant(SUCCESSOR)
class ForgetsLabels(_Forgetful):
    """Labels are not in the note."""

    __slots__ = ()
    FORGOTTEN: Mapping[str, Any] = {"labels": []}


@mutant(SUCCESSOR)
class ForgetsIntendedLabels(_Forgetful):
    """The labels of a commit under way are not in the note."""

    __slots__ = ()
    FORGOTTEN: Mapping[str, Any] = {"intent_labels": None}


@mutant(UNHEARD)
class ForgetsPast(_Forgetful):
    """Sessions that have a successor are not in the note."""

    __slots__ = ()
    FORGOTTEN: Mapping[str, Any] = {"past": []}


@mutant(JOINED)
class ForgetsSession(_Forgetful):
    """The session is not in the note."""

    __slots__ = ()
    FORGOTTEN: Mapping[str, Any] = {"session": ""}


@mutant(ALONE)
class LabelsTooEarly(Producers):
    """A label counts when its commit is decided, before it is safe."""

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
        intent = super().commit(name, epoch, counts, end, now, labels)
        if intent is not None and labels is not None:
            self.by_name[name].add_labels(labels, 9)
        return intent


@mutant(ALONE)
class AbandonedLabels(Producers):
    """The label of an abandoned commit counts as committed."""

    __slots__ = ()

    def abandoned(self, name: str, number: int) -> None:
        producer = self.by_name[name]
        assert producer.intent is not None
        labels = producer.intent.labels
        super().abandoned(name, number)
        if labels is not None:
            producer.add_labels(labels, 9)


@mutant(SUCCESSOR)
class SameEpoch(Producers):
    """A session takes the epoch of the one before, which is not fenced."""

    __slots__ = ()

    def _succeed(self, producer: Producer, epoch: int, session: str) -> None:
        super()._succeed(producer, max(1, epoch - 1) if producer.session else epoch, session)


@mutant(UNHEARD)
class BeginsAgain(Producers):
    """A session that has a successor begins again."""

    __slots__ = ()

    def begin_session(self, name: str, session: str, now: int, lifetime: int = 0) -> Producer:
        producer = self.by_name.get(name)
        if producer is not None:
            producer.past = ()
        return super().begin_session(name, session, now, lifetime)


@mutant(SUCCESSOR)
class KeepsWhatWasStaged(Producers):
    """A session keeps messages that were staged before."""

    __slots__ = ()

    def begin_session(self, name: str, session: str, now: int, lifetime: int = 0) -> Producer:
        producer = self.by_name.get(name)
        if producer is None:
            return super().begin_session(name, session, now, lifetime)
        if session in producer.past:
            return super().begin_session(name, session, now, lifetime)
        if session != producer.session:
            self._check_idle(producer)
            self._succeed(producer, producer.epoch + 1, session)
        return self.begin(name, producer.epoch, now)


@mutant(JOINED)
class DropsItsOwn(Producers):
    """A session that begins again drops what it has staged itself."""

    __slots__ = ()

    def begin_session(self, name: str, session: str, now: int, lifetime: int = 0) -> Producer:
        producer = super().begin_session(name, session, now, lifetime)
        for sequence in list(producer.staged):
            producer.drop(sequence)
        return producer


@mutant(SUCCESSOR)
class BeginsMeanwhile(Producers):
    """A session begins while a commit is under way."""

    __slots__ = ()

    def begin_session(self, name: str, session: str, now: int, lifetime: int = 0) -> Producer:
        producer = self.by_name.get(name)
        if producer is None or producer.intent is None:
            return super().begin_session(name, session, now, lifetime)
        intent, producer.intent = producer.intent, None
        begun = super().begin_session(name, session, now, lifetime)
        begun.intent = intent
        return begun


@mutant(REPEATED)
class CommitsAgain(Producers):
    """Messages staged for a label that was committed are committed, too."""

    __slots__ = ()

    def _is_done(self, name: str, counts: Mapping[int, int], labels: range | None) -> bool:
        return super()._is_done(name, counts, None if counts else labels)


@mutant(REPEATED)
class KeepsRepeated(Producers):
    """Messages staged once more for a label that was committed are not dropped."""

    __slots__ = ()

    def _is_done(self, name: str, counts: Mapping[int, int], labels: range | None) -> bool:
        return super()._is_done(name, {} if labels else counts, labels)


@mutant(SPECULATIVE)
class KeepsLosers(Producers):
    """Messages of other attempts stay staged when the label is committed."""

    __slots__ = ()

    def _add_labels(self, producer: Producer, labels: range) -> None:
        producer.add_labels(labels, 9)


@mutant(SPECULATIVE)
class TakesLosers(Producers):
    """Messages of other attempts are accepted after the label is committed."""

    __slots__ = ()

    def _add_labels(self, producer: Producer, labels: range) -> None:
        super()._add_labels(producer, labels)
        producer.opened.clear()


@mutant(SPECULATIVE)
class CommitsLosers(Producers):
    """Messages of all attempts are committed for a label."""

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
        every = {sequence: staged.count for sequence, staged in producer.staged.items()} | dict(
            counts
        )
        return super().commit(name, epoch, every, end, now, labels)


@mutant(EMPTY)
class PassesInMemory(Producers):
    """Labels that were passed over are not in the note."""

    __slots__ = ()

    def pass_over(self, name: str, epoch: int, labels: range, now: int) -> bool:
        return super().pass_over(name, epoch, labels, now) and False


@mutant(Case(runs=((0,),), back=(0,), crashes=1))
class PassesNothing(Producers):
    """A label that is passed over does not count as committed."""

    __slots__ = ()

    def pass_over(self, name: str, epoch: int, labels: range, now: int) -> bool:
        self._find(name, epoch, now)
        return False


@mutant(REPEATED)
class LabelsWithoutLast(Producers):
    """The last label of a range is not noted."""

    __slots__ = ()

    def _add_labels(self, producer: Producer, labels: range) -> None:
        if len(labels) > 1:
            super()._add_labels(producer, labels[:-1])


@mutant(SKIPPED)
class LabelsWithoutFirst(Producers):
    """The first label of a range is not noted."""

    __slots__ = ()

    def _add_labels(self, producer: Producer, labels: range) -> None:
        super()._add_labels(producer, labels[-1:])


@mutant(Case(runs=((1, 1),), back=(0,), crashes=1))
class LabelsOneMore(Producers):
    """A label more than those of a range is noted."""

    __slots__ = ()

    def _add_labels(self, producer: Producer, labels: range) -> None:
        super()._add_labels(producer, range(labels.start, labels.stop + 1))


@mutant(SPECULATIVE)
class TellsSequencesEarly(Producers):
    """A sequence is told before a note that covers it is safe, if another one waits for that note."""

    __slots__ = ()

    def open(self, name: str, epoch: int, now: int, label: int | None = None) -> tuple[int, bool]:
        sequence, has_to_note = super().open(name, epoch, now, label)
        producer = self.by_name[name]
        producer.covered = producer.reserved
        return sequence, has_to_note
