"""Keep track of the producers of a persistent stream: what each has staged, and what of that was committed, once.

A producer writes in two steps. Messages that it *stages* are stored apart from the stream, where no consumer sees them.
A *commit* makes staged messages part of the stream, all together or not at all, and once, however often it is repeated.
A flow is such a producer: it stages the output of a snapshot, and commits it when the snapshot is safe.

Rules:

1. *Names and numbers.* A producer brings its name, and the stream gives it a number. No number is ever given twice.
2. *Epochs.* A producer begins with an epoch. Once it has begun a higher epoch, a lower one is refused
   (`FencedError`) for ever: the process that uses it was given up for dead, and its successor is at work. The later
   epoch may still commit what earlier epochs staged; all that it does not name when it begins (`keep`) is dropped.
   A producer that cannot count its epochs begins with a *session* instead, a name that nobody else has. The stream
   gives a new session the next epoch, and the same epoch again however often the session begins, and drops all that was
   staged before. A session that has a successor never begins again (as far as the stream remembers: the last
   `MAX_SESSIONS`; an older session would begin a new epoch). Sessions are ordered by their first `begin`: a session
   that was created earlier, and begins only now, is the later one.
3. *Sequences.* Staged messages belong to a sequence, a number that the stream gives. No sequence is given twice,
   whatever a producer remembers or forgets, so new messages are never taken for others that were committed before. A
   producer that was forgotten and begins anew gets sequences above all that the stream has given before. So a commit of
   a sequence that an earlier producer of that name was given is an error (`LostOutputError`); it never means another
   sequence.
4. *Staging* is in order: each piece says how many messages of its sequence lie before it. This count identifies a piece
   that is sent again, and a gap is refused (`GapError`). A sequence that was committed takes no more messages
   (`SequenceOverError`), nor does a sequence that was dropped by its number (`drop`), which never comes back.
5. *Committing* several sequences is one step. Their messages come in the order in which the commit names the sequences,
   and those of each sequence in the order in which they were staged. Sequences that are committed already are left out,
   and so are those of no messages for which nothing is staged; if no sequence is left, the commit is done. A commit
   says how many messages each sequence has. If a sequence is not committed, and not exactly that many messages are
   staged, messages are lost, and that is an error (`LostOutputError`), never silence.
6. Committed sequences are remembered as ranges for as long as the stream exists. If there are more than `MAX_RANGES`
   ranges, the oldest are forgotten; a commit of a forgotten sequence is an error, too.
7. *Labels.* A commit may have labels, numbers that the producer chooses: a range, the last of which identifies the
   commit. If the last label was committed before, the commit is done, whatever sequences it names, also for an older
   epoch, and what is staged for these sequences is dropped. Other sequences that were opened for a label are dropped
   when the label is committed (the stream remembers the last `MAX_OPENED` of them, but does not note them: after a
   restart they are dropped by rule 2 or 8). Labels are remembered as sequences are; a label below the forgotten ones is
   an error (`LabelForgottenError`).
8. A producer that is idle for longer than the `lifetime` it began with is forgotten, with what it has staged; producers
   of flows have no lifetime and are never forgotten. A producer that has committed a label is not forgotten either, and
   loses only what it staged longer than its lifetime ago.

A commit has three steps, and survives a crash at any point:

1. `commit` returns an *intent*, with the number of the commit. The producer's note (`note`) with the intent has to be
   safe before the next step.
2. The messages are appended to the stream as one unit of batches. The last batch bears the numbers of the producer and
   of the commit. When the unit is safe, `committed` is called, and the commit is answered.
3. The note is written again, without the intent. Until this note is safe, nothing of the unit is trimmed.

A driver that finds a note with an intent looks in the stream for a unit with the commit's number. If the unit is there,
the commit is done (`committed`). If not, it was never there (`abandoned`), and the sequences are staged as before.

Duties of the driver:

1. Calls that change a note (`begin`, `open` at times, `commit`, `committed`, `pass_over`, `drop`, `forget`) are
   answered when the note is safe, and with it the note of the stream itself (`stream_note`), which is written before
   it. Each safe note is reported by `noted`: until then all who open a sequence that the note has to cover wait, too.
2. `staged` is called for each piece, in the order in which pieces are appended to the staging log. If a piece could not
   be appended, `not_staged` takes it back, with all pieces behind it.
3. One commit at a time: while there is an intent, `begin` and `commit` raise `BusyError`, and have to be repeated. So
   nobody drops what is being committed.
4. After a restart or failover, `load` the notes, call `found` for each staged batch in order, then settle the intents.
5. Messages before `staged_from` in the staging log are not needed any more. The messages staged for a sequence may be
   copied to the end of that log, wholly or not at all, and behind all pieces of the sequence: the copy replaces them
   (`anew`). When the copy is safe, `moved` is called. Nothing is copied while it is being committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from railgun.broker.protocol.producers.producer import (
    BusyError,
    FencedError,
    GapError,
    Intent,
    NoProducerError,
    Producer,
    SequenceOverError,
    Staged,
    add_range,
)
from railgun.errors import ProtocolError

RESERVED: Final = 1_000
"""The number of sequences that one note reserves."""
UNNOTED_SEQUENCES: Final = 1 << 32
"""More sequences than any producer got from versions of Railgun whose streams did not note them."""
MAX_RANGES: Final = 10_000
"""The most ranges of committed sequences, and of labels, that are remembered for a producer."""
MAX_SESSIONS: Final = 16
"""The most sessions with a successor that are remembered for a producer."""
MAX_OPENED: Final = 10_000
"""The most sequences, opened for labels and not committed, that are remembered for a producer."""


class FirstStaged(NamedTuple):
    """The first messages in the staging log that are needed."""

    offset: int
    name: str
    """The name of the producer."""


class Producers:
    """All producers of one stream. See the rules of the module.

    >>> producers = Producers()
    >>> flow = producers.begin("flow", epoch=1, now=0)
    >>> sequence, _ = producers.open("flow", 1, now=0)
    >>> producers.staged(flow.number, 1, sequence, at=0, count=3, size=300, offset=0)
    True
    >>> intent = producers.commit("flow", 1, {sequence: 3}, end=100, now=0)
    >>> intent
    Intent(number=1, sequences=(1,), since=100, labels=None)
    >>> producers.committed("flow", intent.number)
    >>> producers.commit("flow", 1, {sequence: 3}, end=103, now=0) is None
    True
    >>> producers.commit("flow", 1, {2: 5}, end=103, now=0)
    Traceback (most recent call last):
    railgun.broker.protocol.producers.producer.LostOutputError: producer 'flow': sequence 2 is neither staged nor ...
    """

    __slots__ = ("_last_number", "_names", "_next_sequence", "by_name")

    def __init__(self) -> None:
        self.by_name: dict[str, Producer] = {}
        self._names: dict[int, str] = {}  # by number
        self._last_number = 0
        self._next_sequence = 1  # no sequence from here on was given to any producer

    # ------------------------------------------------------------ beginning

    def begin(
        self,
        name: str,
        epoch: int,
        now: int,
        keep: Iterable[int] | None = None,
        lifetime: int = 0,
    ) -> Producer:
        """Begin an epoch, or join it if it has begun; `keep`: drop what is staged for all other sequences.

        Raises `FencedError` if a later epoch has begun, and `BusyError` if a commit is under way.
        """
        producer = self.by_name.get(name)
        if producer is None:
            self._last_number += 1
            first = self._next_sequence
            producer = self._add(Producer.begun(name, self._last_number, epoch, lifetime, first))
        self._check_epoch(producer, epoch)
        self._check_idle(producer)
        producer.used = now
        if epoch > producer.epoch:
            self._succeed(producer, epoch, "")
        if keep is not None:
            producer.floor = producer.since
            producer.kept = frozenset(keep) & producer.staged.keys()
            for by_sequence in (producer.staged, producer.opened):
                for sequence in [key for key in by_sequence if not producer.is_alive(key)]:
                    del by_sequence[sequence]
        return producer

    def begin_session(self, name: str, session: str, now: int, lifetime: int = 0) -> Producer:
        """Begin the next epoch for a session, and drop what was staged before; or join the epoch that it has begun.

        Raises `FencedError` if another session has begun since, and `BusyError` if a commit is under way.
        """
        producer = self.by_name.get(name)
        if producer is None:
            producer = self.begin(name, 0, now, lifetime=lifetime)
        if session in producer.past:
            raise FencedError(
                f"producer {name!r}: session {session!r} has a successor, {producer.session!r}: it is over"
            )
        if session != producer.session:
            self._check_idle(producer)
            self._succeed(producer, producer.epoch + 1, session)
        return self.begin(name, producer.epoch, now, keep=())

    def _succeed(self, producer: Producer, epoch: int, session: str) -> None:
        if producer.session:
            producer.past = (*producer.past, producer.session)[-MAX_SESSIONS:]
        producer.epoch, producer.since, producer.session = epoch, producer.next, session

    def _add(self, producer: Producer) -> Producer:
        self.by_name[producer.name] = producer
        self._names[producer.number] = producer.name
        self._last_number = max(self._last_number, producer.number)
        self._next_sequence = max(self._next_sequence, producer.reserved)
        return producer

    def _check_epoch(self, producer: Producer, epoch: int) -> None:
        if epoch < producer.epoch:
            raise FencedError(
                f"producer {producer.name!r} has begun epoch {producer.epoch}: epoch {epoch} is over"
            )

    def _check_idle(self, producer: Producer) -> None:
        if producer.intent is not None:
            raise BusyError(
                f"producer {producer.name!r}: commit {producer.intent.number} is under way: ask again"
            )

    def _find(self, name: str, epoch: int, now: int) -> Producer:
        """Return the producer, after a check that it has begun this epoch and no later one; mark it as used."""
        producer = self.by_name.get(name)
        if producer is None or epoch > producer.epoch:
            raise NoProducerError(f"producer {name!r} has not begun epoch {epoch}: begin it first")
        self._check_epoch(producer, epoch)
        producer.used = now
        return producer

    # ------------------------------------------------------------ staging

    def open(self, name: str, epoch: int, now: int, label: int | None = None) -> tuple[int, bool]:
        """Return a new sequence, and whether the note has to be safe before the client may learn the sequence.

        `label`: the label to commit the sequence under. Raises `SequenceOverError` if that label was committed before.
        """
        producer = self._find(name, epoch, now)
        if label is not None and producer.has_label(label):
            raise producer.label_over(label)
        sequence = producer.next
        producer.next += 1
        if label is not None:
            producer.opened[sequence] = label
            if len(producer.opened) > MAX_OPENED:
                del producer.opened[next(iter(producer.opened))]
        if producer.next > producer.reserved:
            producer.reserved = producer.next + RESERVED
            self._next_sequence = max(self._next_sequence, producer.reserved)
        return sequence, sequence >= producer.covered

    def noted(self, number: int, reserved: int) -> None:
        """Record that a note is safe: clients may learn the sequences below `reserved`, which it covers."""
        producer = self.numbered(number)
        if producer is not None:
            producer.covered = max(producer.covered, reserved)

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
        """Accept a piece of a sequence, behind its first `at` messages; return False if it is staged already.

        `offset`: where the piece will lie in the staging log. Raises `GapError` if messages before it are missing.
        """
        producer = self.numbered(number)
        if producer is None or epoch > producer.epoch:
            raise NoProducerError(f"producer {number} has not begun epoch {epoch}: begin it first")
        self._check_epoch(producer, epoch)
        if not producer.since <= sequence < producer.next:
            raise NoProducerError(
                f"producer {producer.name!r} was not given sequence {sequence} in epoch {epoch}: open a sequence first"
            )
        intent = producer.intent
        if producer.is_committed(sequence) or (intent and sequence in intent.sequences):
            raise SequenceOverError(
                f"producer {producer.name!r}: sequence {sequence} was committed before: open another sequence"
            )
        if producer.is_finished(sequence):
            raise SequenceOverError(
                f"producer {producer.name!r}: sequence {sequence} was dropped before: open another sequence"
            )
        label = producer.opened.get(sequence)
        if label is not None and producer.has_label(label):
            raise producer.label_over(label)
        staged = producer.staged.get(sequence)
        staged_count = 0 if staged is None else staged.count
        if at + count <= staged_count:
            return False
        if at != staged_count:
            raise GapError(
                f"producer {producer.name!r}, sequence {sequence}: a piece from message {at} on cannot "
                f"follow {staged_count}"
            )
        self._take(producer, sequence, count, size, offset, now)
        return True

    def _take(
        self, producer: Producer, sequence: int, count: int, size: int, offset: int, now: int
    ) -> None:
        staged = producer.staged.setdefault(sequence, Staged(offset))
        staged.count += count
        staged.size += size
        staged.used = now
        producer.used = max(producer.used, now)

    def not_staged(self, number: int, sequence: int, at: int, size: int) -> None:
        """Take back a piece that could not be appended. Pieces behind it fail, too, and are taken back later."""
        producer = self.numbered(number)
        staged = None if producer is None else producer.staged.get(sequence)
        if producer is None or staged is None:
            return
        staged.count, staged.size = min(staged.count, at), max(0, staged.size - size)
        if not staged.count:
            del producer.staged[sequence]

    # ------------------------------------------------------------ committing

    def commit(
        self,
        name: str,
        epoch: int,
        counts: Mapping[int, int],
        end: int,
        now: int,
        labels: range | None = None,
    ) -> Intent | None:
        """Decide to commit sequences in this order, each with a count of messages; None: that was done before.

        `end`: the end of the stream now. `labels`: the labels to commit with the sequences. Raises `LostOutputError`,
        `BusyError` and `LabelForgottenError`.
        """
        if self._is_done(name, counts, labels):
            return None  # whatever the epoch of the caller
        producer = self._find(name, epoch, now)
        self._check_idle(producer)
        producer.check_label(labels)
        counts = self.without_empty(name, counts)
        uncommitted = tuple(sequence for sequence in counts if not producer.is_committed(sequence))
        if labels is None and not uncommitted:
            return None
        if not counts:
            raise ProtocolError(f"producer {name!r}: labels without messages are to be passed over")
        if labels is not None and len(uncommitted) < len(counts):
            raise SequenceOverError(
                f"producer {name!r}: sequences of {sorted(counts)} were committed before, and not under label "
                f"{labels[-1]}: stage what belongs to it for new ones"
            )
        for sequence in uncommitted:
            producer.check_staged(sequence, counts[sequence])
        producer.intent = Intent(producer.commits + 1, uncommitted, end, labels)
        return producer.intent

    def without_empty(self, name: str, counts: Mapping[int, int]) -> dict[int, int]:
        """Return the sequences of a commit, except those without messages for which nothing is staged."""
        producer = self.by_name.get(name)
        staged = () if producer is None else producer.staged
        return {sequence: n for sequence, n in counts.items() if n or sequence in staged}

    def _is_done(self, name: str, counts: Mapping[int, int], labels: range | None) -> bool:
        """Return whether a commit was done before; if its label was, drop what is staged for its sequences."""
        producer = self.by_name.get(name)
        if producer is None:
            return False
        if labels is None:
            return all(map(producer.is_committed, counts))
        if not producer.has_label(labels[-1]):
            return False
        committing = () if producer.intent is None else producer.intent.sequences
        for sequence in counts:
            if sequence not in committing:
                producer.drop(sequence)
        return True

    def pass_over(self, name: str, epoch: int, labels: range, now: int) -> bool:
        """Count labels as committed without messages; return False if they are. If True, the note has to be safe.

        Raises `BusyError` and `LabelForgottenError`.
        """
        if self._is_done(name, {}, labels):
            return False
        producer = self._find(name, epoch, now)
        self._check_idle(producer)
        producer.check_label(labels)
        self._add_labels(producer, labels)
        return True

    def _add_labels(self, producer: Producer, labels: range) -> None:
        """Remember that labels were committed, and drop other sequences opened for them; refuse their later pieces."""
        producer.add_labels(labels, MAX_RANGES)
        for sequence in list(producer.staged):
            label = producer.opened.get(sequence)
            if label is not None and producer.has_label(label):
                producer.drop(sequence)

    def committed(self, name: str, number: int, base: int = 0) -> None:
        """Record that the unit of a commit is safe in the stream, beginning at the offset `base`."""
        producer, intent = self._settled(name, number)
        producer.last = intent.sequences, base
        for sequence in intent.sequences:
            add_range(producer.committed, sequence, sequence + 1)
            if producer.finished:
                add_range(producer.finished, sequence, sequence + 1)
            producer.drop(sequence)
            producer.opened.pop(sequence, None)
        if intent.labels is not None:
            self._add_labels(producer, intent.labels)
        producer.kept -= frozenset(intent.sequences)
        del producer.committed[:-MAX_RANGES], producer.finished[:-MAX_RANGES]
        producer.commits = number

    def base_of(self, name: str, sequences: Iterable[int]) -> int | None:
        """Return the offset where a producer's last commit begins, if it committed these sequences; otherwise None."""
        producer = self.by_name.get(name)
        last = None if producer is None else producer.last
        return last[1] if last is not None and last[0] == tuple(sequences) else None

    def drop(self, name: str, epoch: int, sequences: Iterable[int], now: int) -> None:
        """Drop what is staged for sequences, for good; what was committed stays committed.

        Raises `NoProducerError` if the producer was not given one of them, and `BusyError`.
        """
        producer, sequences = self._find(name, epoch, now), list(sequences)
        self._check_idle(producer)
        for sequence in sequences:
            producer.check_given(sequence)
        for sequence in sequences:
            if not producer.is_committed(sequence):
                producer.finish(sequence, MAX_RANGES)

    def abandoned(self, name: str, number: int) -> None:
        """Record that the unit of a commit is not in the stream, and never will be."""
        self._settled(name, number)

    def _settled(self, name: str, number: int) -> tuple[Producer, Intent]:
        producer = self.by_name[name]
        intent, producer.intent = producer.intent, None
        if intent is None or intent.number != number:
            producer.intent = intent
            raise ProtocolError(f"producer {name!r} has no commit {number} under way")
        return producer, intent

    # ------------------------------------------------------------ keeping, forgetting

    @classmethod
    def load(
        cls, notes: Mapping[str, Mapping[str, Any]], stream_note: Mapping[str, Any] | None = None
    ) -> Producers:
        """Restore producers from their notes. `stream_note` is the note of the stream itself; None if it has none yet.

        Older versions of Railgun noted the last number of a producer, and no sequences. The sequences that they gave to
        producers that were forgotten since lie far below those that are given then.
        """
        producers, stream_note = cls(), {} if stream_note is None else stream_note
        producers._last_number = stream_note.get("last", 0)
        for name, note in notes.items():
            producers._add(Producer.of(name, note))
        first = stream_note.get("sequences", producers._last_number * UNNOTED_SEQUENCES)
        producers._next_sequence = max(producers._next_sequence, first)
        return producers

    def stream_note(self) -> dict[str, Any]:
        """Return the state of the stream itself that has to survive a restart, as plain values."""
        return {"last": self._last_number, "sequences": self._next_sequence}

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
        """Record a batch of the staging log; `anew`: it begins a copy, which replaces all that was staged before."""
        producer = self.numbered(number)
        if producer is None or not producer.is_alive(sequence) or producer.is_committed(sequence):
            return
        if anew:
            producer.drop(sequence)
        self._take(producer, sequence, count, size, offset, now)

    def moved(self, number: int, sequence: int, offset: int) -> None:
        """Record that all messages staged for a sequence were copied to `offset`, and that the copy is safe."""
        producer = self.numbered(number)
        staged = None if producer is None else producer.staged.get(sequence)
        if staged is not None:
            staged.first = max(staged.first, offset)

    def forget(self, name: str) -> Producer | None:
        """Forget a producer and what it has staged, and return it; return None if there is no such producer."""
        producer = self.by_name.pop(name, None)
        if producer is not None:
            del self._names[producer.number]
        return producer

    def expired(self, now: int) -> list[str]:
        """Return the names of producers that were idle for longer than their lifetime, and have no commit under way."""
        return [
            producer.name
            for producer in self.by_name.values()
            if producer.lifetime
            and not producer.intent
            and not producer.labels
            and now - producer.used > producer.lifetime
        ]

    def drop_stale(self, now: int) -> None:
        """Drop sequences that were staged longer ago than the lifetime of their producer, which has labels (rule 8)."""
        for producer in self.by_name.values():
            if producer.lifetime and producer.labels and not producer.intent:
                for sequence, staged in list(producer.staged.items()):
                    if now - staged.used > producer.lifetime:
                        producer.drop(sequence)

    def numbered(self, number: int) -> Producer | None:
        """Return the producer with this number, or None."""
        return self.by_name.get(self._names.get(number, ""))

    @property
    def staged_size(self) -> int:
        """Bytes of all staged messages."""
        return sum(
            staged.size for producer in self.by_name.values() for staged in producer.staged.values()
        )

    def first_staged(self) -> FirstStaged | None:
        """Return what is staged first in the staging log; None if nothing is staged."""
        firsts = (
            FirstStaged(staged.first, producer.name)
            for producer in self.by_name.values()
            for staged in producer.staged.values()
        )
        return min(firsts, default=None)

    def staged_from(self, end: int) -> int:
        """Return the first offset in the staging log that is still needed; `end`, the end of that log, if none is."""
        firsts = (
            staged.first
            for producer in self.by_name.values()
            for staged in producer.staged.values()
        )
        return min(firsts, default=end)
