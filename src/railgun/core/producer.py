"""One producer of a stream: what is known of it, and what it may be told. The rules are in `core.producers`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from railgun.core.errors import RailgunError

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


@dataclass(slots=True)
class Staged:
    """What is staged of one sequence."""

    first: int
    """The offset of its first message in the staging log."""
    count: int = 0
    size: int = 0


@dataclass(slots=True)
class Producer:
    """One producer."""

    name: str
    number: int
    epoch: int
    lifetime: int = 0
    """Forgotten when it is not used for so long (µs); 0: never."""
    next: int = 1
    """The sequence to be given next."""
    reserved: int = 1
    """Sequences below may have been given, by the note."""
    since: int = 1
    """The first sequence of this epoch."""
    floor: int = 1
    """What is staged for sequences below is dropped, but for those in `kept`."""
    kept: frozenset[int] = frozenset()
    committed: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of sequences, the last ones out, in order."""
    commits: int = 0
    """The number of its last commit."""
    intent: Intent | None = None
    last: tuple[tuple[int, ...], int] | None = None
    """The sequences of its last commit, and the offset of the first message of it."""
    used: int = 0
    """When it was used last (µs)."""
    staged: dict[int, Staged] = field(default_factory=dict)

    def is_alive(self, sequence: int) -> bool:
        """Return whether what is staged for a sequence was not dropped."""
        return sequence >= self.floor or sequence in self.kept

    def is_committed(self, sequence: int) -> bool:
        """Return whether a sequence was committed."""
        at = bisect_right(self.committed, (sequence, _MOST)) - 1
        return at >= 0 and sequence < self.committed[at][1]

    def add_committed(self, sequence: int) -> None:
        """Remember that a sequence was committed."""
        ranges = self.committed
        at = bisect_right(ranges, (sequence, _MOST))
        first, end = sequence, sequence + 1
        if at < len(ranges) and ranges[at][0] == end:
            end = ranges.pop(at)[1]
        if at and ranges[at - 1][1] == first:
            at -= 1
            first = ranges.pop(at)[0]
        ranges.insert(at, (first, end))

    def note(self) -> dict[str, Any]:
        """Return what must not be forgotten, as plain values."""
        intent = self.intent
        return {
            "number": self.number,
            "epoch": self.epoch,
            "lifetime": self.lifetime,
            "reserved": self.reserved,
            "since": self.since,
            "floor": self.floor,
            "kept": sorted(self.kept),
            "committed": list(map(list, self.committed)),
            "commits": self.commits,
            "intent": intent and [intent.number, list(intent.sequences), intent.since],
            "last": self.last and [list(self.last[0]), self.last[1]],
            "used": self.used,
        }

    @staticmethod
    def of(name: str, note: Mapping[str, Any]) -> Producer:
        """Return the producer of a note. Sequences that may have been given are not given again."""
        made = Producer(name, note["number"], note["epoch"], note["lifetime"])
        made.next = made.reserved = note["reserved"]
        made.since, made.floor = note["since"], note["floor"]
        made.kept = frozenset(note["kept"])
        made.committed = [(first, end) for first, end in note["committed"]]
        made.commits, made.used = note["commits"], note["used"]
        if note["intent"] is not None:
            number, sequences, since = note["intent"]
            made.intent = Intent(number, tuple(sequences), since)
        if note["last"] is not None:
            made.last = tuple(note["last"][0]), note["last"][1]
        return made
