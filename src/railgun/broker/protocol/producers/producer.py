"""The state of one producer of a stream, and the checks of each call. The rules are in `producers.registry`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from railgun.errors import RailgunError

_MOST: Final = 1 << 63


class ProducerError(RailgunError):
    """A producer that cannot do what it asks for."""

    code: ClassVar[str] = "PRODUCER"


class FencedError(ProducerError):
    """A later epoch of this producer has begun: this one is over."""

    code: ClassVar[str] = "FENCED"


class NoProducerError(ProducerError):
    """The producer has not begun, or was forgotten."""

    code: ClassVar[str] = "NO_PRODUCER"


class GapError(ProducerError):
    """A piece of a sequence does not follow the one before it."""

    code: ClassVar[str] = "STAGE_GAP"


class SequenceOverError(ProducerError):
    """A sequence that was committed takes nothing more."""

    code: ClassVar[str] = "SEQUENCE_OVER"


class LostOutputError(ProducerError):
    """What is to be committed is neither staged nor committed."""

    code: ClassVar[str] = "LOST_OUTPUT"


class LabelForgottenError(ProducerError):
    """A commit has a label of which it is not known any more whether it was committed."""

    code: ClassVar[str] = "LABEL_FORGOTTEN"


class BusyError(ProducerError):
    """A commit of this producer is under way."""

    code: ClassVar[str] = "PRODUCER_BUSY"


@dataclass(frozen=True, slots=True)
class Intent:
    """A commit that was decided."""

    number: int
    sequences: tuple[int, ...]
    since: int
    """The unit is not before this offset of the stream."""
    labels: range | None = None
    """The labels that are committed with it."""


@dataclass(slots=True)
class Staged:
    """What is staged of one sequence."""

    first: int
    """The offset of its first message in the staging log."""
    count: int = 0
    size: int = 0
    used: int = 0
    """When the last piece came (µs)."""


Ranges = list[tuple[int, int]]
"""Ranges of numbers, the last ones out, in order, none of which touches another."""


def contains(ranges: Ranges, number: int) -> bool:
    """Return whether a number is in one of the ranges.

    >>> [contains([(1, 3), (7, 8)], n) for n in (0, 2, 3, 7)]
    [False, True, False, True]
    """
    at = bisect_right(ranges, (number, _MOST)) - 1
    return at >= 0 and number < ranges[at][1]


def add_range(ranges: Ranges, first: int, end: int) -> None:
    """Add the numbers from `first` to before `end` to the ranges.

    >>> ranges = [(1, 3), (7, 8), (20, 30)]
    >>> add_range(ranges, 3, 7)
    >>> ranges
    [(1, 8), (20, 30)]
    """
    low = bisect_left(ranges, first, key=lambda one: one[1])
    high = bisect_right(ranges, end, key=lambda one: one[0])
    if low < high:
        first, end = min(first, ranges[low][0]), max(end, ranges[high - 1][1])
    ranges[low:high] = [(first, end)]


@dataclass(slots=True)
class Producer:
    """One producer."""

    name: str
    number: int
    epoch: int
    lifetime: int = 0
    """Forgotten when it is not used for so long (µs); 0: never."""
    first: int = 1
    """Sequences below were given before this producer began: to others of its name, which were forgotten."""
    next: int = 1
    """The sequence to be given next."""
    reserved: int = 1
    """Sequences below may have been given, by the note."""
    covered: int = 1
    """Sequences below may be told: a note that is safe says that they may have been given."""
    since: int = 1
    """The first sequence of this epoch."""
    floor: int = 1
    """What is staged for sequences below is dropped, but for those in `kept`."""
    kept: frozenset[int] = frozenset()
    committed: Ranges = field(default_factory=list)
    """Sequences that were committed."""
    finished: Ranges = field(default_factory=list)
    """Sequences that were dropped one by one, and those that were committed; empty: none was dropped."""
    labels: Ranges = field(default_factory=list)
    """Labels that were committed."""
    labels_from: int = 0
    """What was committed under labels below is known by `labels` no more."""
    session: str = ""
    """The session that has begun this epoch; empty: it was begun by its number."""
    past: tuple[str, ...] = ()
    """The sessions of earlier epochs, the latest ones."""
    commits: int = 0
    """The number of its last commit."""
    intent: Intent | None = None
    last: tuple[tuple[int, ...], int] | None = None
    """The sequences of its last commit, and the offset of the first message of it."""
    used: int = 0
    """When it was used last (µs)."""
    staged: dict[int, Staged] = field(default_factory=dict)
    opened: dict[int, int] = field(default_factory=dict)
    """The labels that sequences were opened for; that is not noted."""

    def is_alive(self, sequence: int) -> bool:
        """Return whether what is staged for a sequence was not dropped."""
        return (sequence >= self.floor or sequence in self.kept) and not self.is_finished(sequence)

    def is_committed(self, sequence: int) -> bool:
        """Return whether a sequence was committed."""
        return contains(self.committed, sequence)

    def is_finished(self, sequence: int) -> bool:
        """Return whether a sequence was dropped by its name, or else committed."""
        return contains(self.finished, sequence)

    def finish(self, sequence: int, most: int) -> None:
        """Drop a sequence that was not committed, for good; remember that, as `most` ranges at most."""
        self.drop(sequence)
        self.opened.pop(sequence, None)
        if not self.finished:
            self.finished = list(self.committed)
        add_range(self.finished, sequence, sequence + 1)
        del self.finished[:-most]

    def check_given(self, sequence: int) -> None:
        """Raise `NoProducerError` if a sequence was not given to this producer."""
        if sequence < self.first:
            raise NoProducerError(
                f"producer {self.name!r} was forgotten after sequence {sequence} was given, and has begun anew since: "
                "open another sequence"
            )
        if sequence >= self.next:
            raise NoProducerError(
                f"producer {self.name!r} was not given sequence {sequence}: open one"
            )

    def has_label(self, label: int) -> bool:
        """Return whether a label was committed."""
        return contains(self.labels, label)

    def add_labels(self, labels: range, most: int) -> None:
        """Remember that labels were committed, as `most` ranges at most."""
        add_range(self.labels, labels.start, labels.stop)
        if len(self.labels) > most:
            del self.labels[:-most]
            self.labels_from = self.labels[0][0]

    def drop(self, sequence: int) -> None:
        """Drop what is staged for a sequence."""
        self.staged.pop(sequence, None)

    def label_over(self, label: int) -> SequenceOverError:
        """Return what to raise if a label was committed."""
        return SequenceOverError(
            f"producer {self.name!r}: what has label {label} was committed before"
        )

    def check_label(self, labels: range | None) -> None:
        """Raise `LabelForgottenError` if it is not known whether labels were committed."""
        if labels is not None and labels[-1] < self.labels_from:
            raise LabelForgottenError(
                f"producer {self.name!r}: whether label {labels[-1]} was committed is not known any more; labels "
                f"from {self.labels_from} on are. Look into the stream; to write it all the same, take a label "
                "that was not used"
            )

    def check_staged(self, sequence: int, count: int) -> None:
        """Raise `LostOutputError` if not just so many messages are staged for a sequence."""
        found = self.staged.get(sequence)
        if sequence < self.first:
            raise LostOutputError(
                f"producer {self.name!r} was forgotten after sequence {sequence} was given, and has begun anew since: "
                f"its {count} messages are lost, unless they were committed before that"
            )
        if found is None and self.is_finished(sequence):
            raise LostOutputError(
                f"producer {self.name!r}: sequence {sequence} was dropped: its {count} messages are lost"
            )
        if found is None:
            raise LostOutputError(
                f"producer {self.name!r}: sequence {sequence} is neither staged nor committed here: its {count} "
                "messages are lost"
            )
        if found.count > count:
            raise LostOutputError(
                f"producer {self.name!r}: {found.count} messages are staged for sequence {sequence}, and this commit "
                f"names {count} of them: a commit names all that was staged"
            )
        if found.count < count:
            raise LostOutputError(
                f"producer {self.name!r}: {found.count} messages are staged for sequence {sequence}, and {count} "
                "were: what is missing is lost"
            )

    def note(self) -> dict[str, Any]:
        """Return what must not be forgotten, as plain values."""
        intent = self.intent
        return {
            "number": self.number,
            "epoch": self.epoch,
            "lifetime": self.lifetime,
            "first": self.first,
            "reserved": self.reserved,
            "since": self.since,
            "floor": self.floor,
            "kept": sorted(self.kept),
            "committed": list(map(list, self.committed)),
            "finished": list(map(list, self.finished)),
            "labels": list(map(list, self.labels)),
            "labels_from": self.labels_from,
            "session": self.session,
            "past": list(self.past),
            "commits": self.commits,
            "intent": intent and [intent.number, list(intent.sequences), intent.since],
            "intent_labels": intent and intent.labels and [intent.labels.start, intent.labels.stop],
            "last": self.last and [list(self.last[0]), self.last[1]],
            "used": self.used,
        }

    @staticmethod
    def begun(name: str, number: int, epoch: int, lifetime: int, first: int) -> Producer:
        """Return a producer that has just begun; `first`: the first sequence it is given."""
        made = Producer(name, number, epoch, lifetime, first)
        made.next = made.reserved = made.covered = made.since = made.floor = first
        return made

    @staticmethod
    def of(name: str, note: Mapping[str, Any]) -> Producer:
        """Return the producer of a note. Sequences that may have been given are not given again."""
        made = Producer(name, note["number"], note["epoch"], note["lifetime"])
        made.next = made.reserved = made.covered = note["reserved"]
        made.first = note.get("first", 1)
        made.since, made.floor = note["since"], note["floor"]
        made.kept = frozenset(note["kept"])
        made.committed = [(first, end) for first, end in note["committed"]]
        made.finished = [(first, end) for first, end in note.get("finished", ())]
        made.labels = [(first, end) for first, end in note.get("labels", ())]
        made.labels_from = note.get("labels_from", 0)
        made.session, made.past = note.get("session", ""), tuple(note.get("past", ()))
        made.commits, made.used = note["commits"], note["used"]
        if note["intent"] is not None:
            number, sequences, since = note["intent"]
            labels = note.get("intent_labels")
            made.intent = Intent(number, tuple(sequences), since, labels and range(*labels))
        if note["last"] is not None:
            made.last = tuple(note["last"][0]), note["last"][1]
        return made
