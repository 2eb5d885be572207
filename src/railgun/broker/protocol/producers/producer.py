"""Keep the state of one producer of a stream, and check its calls. The rules are in `producers.registry`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from railgun.errors import RailgunError

_LARGEST: Final = 1 << 63


class ProducerError(RailgunError):
    """A call that a producer may not make now."""

    code: ClassVar[str] = "PRODUCER"


class FencedError(ProducerError):
    """The call names an epoch that a later epoch of the producer has replaced."""

    code: ClassVar[str] = "FENCED"


class NoProducerError(ProducerError):
    """The producer has not begun the epoch or was forgotten, or the stream did not give it the sequence."""

    code: ClassVar[str] = "NO_PRODUCER"


class GapError(ProducerError):
    """A staged piece does not follow the piece before it in its sequence."""

    code: ClassVar[str] = "STAGE_GAP"


class SequenceOverError(ProducerError):
    """The call uses a sequence or label that was committed before, or a sequence that was dropped."""

    code: ClassVar[str] = "SEQUENCE_OVER"


class LostOutputError(ProducerError):
    """Messages of a commit are neither staged nor committed."""

    code: ClassVar[str] = "LOST_OUTPUT"


class LabelForgottenError(ProducerError):
    """The stream no longer remembers whether the label of a commit was committed."""

    code: ClassVar[str] = "LABEL_FORGOTTEN"


class BusyError(ProducerError):
    """Another commit of this producer is under way."""

    code: ClassVar[str] = "PRODUCER_BUSY"


@dataclass(frozen=True, slots=True)
class Intent:
    """A commit that is decided and not finished."""

    number: int
    sequences: tuple[int, ...]
    since: int
    """The end of the stream when the commit was decided: the unit does not begin before this offset."""
    labels: range | None = None
    """The labels to commit with the sequences."""


@dataclass(slots=True)
class Staged:
    """The messages that are staged for one sequence."""

    first: int
    """The offset of the first message in the staging log."""
    count: int = 0
    size: int = 0
    """Bytes."""
    used: int = 0
    """When the last piece came (µs)."""


Ranges = list[tuple[int, int]]
"""Ranges of numbers, sorted; each excludes its end, and no two touch."""


def contains(ranges: Ranges, number: int) -> bool:
    """Return whether a number is in one of the ranges.

    >>> [contains([(1, 3), (7, 8)], n) for n in (0, 2, 3, 7)]
    [False, True, False, True]
    """
    at = bisect_right(ranges, (number, _LARGEST)) - 1
    return at >= 0 and number < ranges[at][1]


def add_range(ranges: Ranges, first: int, end: int) -> None:
    """Add the numbers from `first` to before `end` to the ranges.

    >>> ranges = [(1, 3), (7, 8), (20, 30)]
    >>> add_range(ranges, 3, 7)
    >>> ranges
    [(1, 8), (20, 30)]
    """
    low = bisect_left(ranges, first, key=lambda bounds: bounds[1])
    high = bisect_right(ranges, end, key=lambda bounds: bounds[0])
    if low < high:
        first, end = min(first, ranges[low][0]), max(end, ranges[high - 1][1])
    ranges[low:high] = [(first, end)]


@dataclass(slots=True)
class Producer:
    """The state of one producer."""

    name: str
    number: int
    epoch: int
    lifetime: int = 0
    """Forget the producer after it was idle for this long (µs); 0: never."""
    first: int = 1
    """The first sequence of this producer: lower ones were given to forgotten producers of its name."""
    next: int = 1
    """The sequence to give next."""
    reserved: int = 1
    """The note says that sequences below this one may have been given."""
    covered: int = 1
    """Sequences below this one may be returned to clients: a safe note says that they may have been given."""
    since: int = 1
    """The first sequence of this epoch."""
    floor: int = 1
    """Sequences below this one are dropped, except those in `kept`."""
    kept: frozenset[int] = frozenset()
    committed: Ranges = field(default_factory=list)
    """Sequences that were committed."""
    finished: Ranges = field(default_factory=list)
    """Sequences that were dropped one by one, and those that were committed; empty: none was dropped."""
    labels: Ranges = field(default_factory=list)
    """Labels that were committed."""
    labels_from: int = 0
    """Labels below this one were forgotten: `labels` does not say whether they were committed."""
    session: str = ""
    """The session that began this epoch; empty: the epoch was begun by its number."""
    past: tuple[str, ...] = ()
    """The latest sessions of earlier epochs."""
    commits: int = 0
    """The number of the last commit."""
    intent: Intent | None = None
    """The commit under way."""
    last: tuple[tuple[int, ...], int] | None = None
    """The sequences of the last commit, and the offset of its first message."""
    used: int = 0
    """When the producer was last used (µs)."""
    staged: dict[int, Staged] = field(default_factory=dict)
    """Staged messages by sequence."""
    opened: dict[int, int] = field(default_factory=dict)
    """The label that each sequence was opened for; the note does not have this."""

    def is_alive(self, sequence: int) -> bool:
        """Return whether the messages staged for a sequence were not dropped."""
        return (sequence >= self.floor or sequence in self.kept) and not self.is_finished(sequence)

    def is_committed(self, sequence: int) -> bool:
        """Return whether a sequence was committed."""
        return contains(self.committed, sequence)

    def is_finished(self, sequence: int) -> bool:
        """Return whether a sequence was dropped by its number or committed; False for all if none was dropped."""
        return contains(self.finished, sequence)

    def finish(self, sequence: int, max_ranges: int) -> None:
        """Drop a sequence that was not committed, for good, and remember that; keep at most `max_ranges` ranges."""
        self.drop(sequence)
        self.opened.pop(sequence, None)
        if not self.finished:
            self.finished = list(self.committed)
        add_range(self.finished, sequence, sequence + 1)
        del self.finished[:-max_ranges]

    def check_given(self, sequence: int) -> None:
        """Raise `NoProducerError` if the stream did not give a sequence to this producer."""
        if sequence < self.first:
            raise NoProducerError(
                f"producer {self.name!r} was forgotten after sequence {sequence} was given, and has begun anew since: "
                "open another sequence"
            )
        if sequence >= self.next:
            raise NoProducerError(
                f"producer {self.name!r} was not given sequence {sequence}: open a sequence first"
            )

    def has_label(self, label: int) -> bool:
        """Return whether a label was committed."""
        return contains(self.labels, label)

    def add_labels(self, labels: range, max_ranges: int) -> None:
        """Remember that labels were committed; keep at most `max_ranges` ranges."""
        add_range(self.labels, labels.start, labels.stop)
        if len(self.labels) > max_ranges:
            del self.labels[:-max_ranges]
            self.labels_from = self.labels[0][0]

    def drop(self, sequence: int) -> None:
        """Drop the messages staged for a sequence."""
        self.staged.pop(sequence, None)

    def label_over(self, label: int) -> SequenceOverError:
        """Return the error to raise for a label that was committed before."""
        return SequenceOverError(f"producer {self.name!r}: label {label} was committed before")

    def check_label(self, labels: range | None) -> None:
        """Raise `LabelForgottenError` if it is no longer remembered whether the last of `labels` was committed."""
        if labels is not None and labels[-1] < self.labels_from:
            raise LabelForgottenError(
                f"producer {self.name!r}: whether label {labels[-1]} was committed is not known any more; only labels "
                f"from {self.labels_from} on are remembered. Look into the stream; to write the messages all the "
                "same, use a label that was never used"
            )

    def check_staged(self, sequence: int, count: int) -> None:
        """Raise `LostOutputError` unless exactly `count` messages are staged for a sequence."""
        staged = self.staged.get(sequence)
        if sequence < self.first:
            raise LostOutputError(
                f"producer {self.name!r} was forgotten after sequence {sequence} was given, and has begun anew since: "
                f"its {count} messages are lost, unless they were committed before that"
            )
        if staged is None and self.is_finished(sequence):
            raise LostOutputError(
                f"producer {self.name!r}: sequence {sequence} was dropped: its {count} messages are lost"
            )
        if staged is None:
            raise LostOutputError(
                f"producer {self.name!r}: sequence {sequence} is neither staged nor committed here: its {count} "
                "messages are lost"
            )
        if staged.count > count:
            raise LostOutputError(
                f"producer {self.name!r}: {staged.count} messages are staged for sequence {sequence}, but the commit "
                f"names {count}: a commit has to name all that are staged"
            )
        if staged.count < count:
            raise LostOutputError(
                f"producer {self.name!r}: {staged.count} messages are staged for sequence {sequence}, but the commit "
                f"names {count}: the missing messages are lost"
            )

    def note(self) -> dict[str, Any]:
        """Return the state that has to survive a restart, as plain values."""
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
        """Return a producer that has just begun; `first` is the first sequence it is given."""
        producer = Producer(name, number, epoch, lifetime, first)
        producer.next = producer.reserved = producer.covered = producer.since = producer.floor = (
            first
        )
        return producer

    @staticmethod
    def of(name: str, note: Mapping[str, Any]) -> Producer:
        """Restore a producer from its note. Sequences that may have been given are not given again."""
        producer = Producer(name, note["number"], note["epoch"], note["lifetime"])
        producer.next = producer.reserved = producer.covered = note["reserved"]
        producer.first = note.get("first", 1)
        producer.since, producer.floor = note["since"], note["floor"]
        producer.kept = frozenset(note["kept"])
        producer.committed = [(first, end) for first, end in note["committed"]]
        producer.finished = [(first, end) for first, end in note.get("finished", ())]
        producer.labels = [(first, end) for first, end in note.get("labels", ())]
        producer.labels_from = note.get("labels_from", 0)
        producer.session, producer.past = note.get("session", ""), tuple(note.get("past", ()))
        producer.commits, producer.used = note["commits"], note["used"]
        if note["intent"] is not None:
            number, sequences, since = note["intent"]
            labels = note.get("intent_labels")
            producer.intent = Intent(number, tuple(sequences), since, labels and range(*labels))
        if note["last"] is not None:
            producer.last = tuple(note["last"][0]), note["last"][1]
        return producer
