"""The producers of a persistent stream: what they have staged, and what of that is committed, each once and for good.

A producer writes in two steps. What it *stages* is kept apart, and nobody sees it; what it *commits* becomes part of
the stream, all together or not at all, and however often it is asked for, once. A flow is such a producer: it stages
what belongs to a snapshot, and commits that when the snapshot is safe.

Rules:

1. *Names and numbers.* A producer has a name, which it brings along, and a number, which the stream gives it. No number
   is ever given twice.
2. *Epochs.* A producer begins with an epoch. When it has begun with a higher one, whoever has a lower one is refused
   (`FencedError`), for ever: it was given up for dead, and its successor is at work. What was staged in earlier epochs
   may still be committed by the later one; all that this does not name when it begins (`keep`) is dropped.
   Who has no number of its own to begin with has a *session*, a name that nobody else has: the stream gives it the next
   epoch, the same one however often it begins, and drops all that was staged before. A session that has a
   successor never begins again (of the last `MOST_SESSIONS`; an older one would begin a new epoch). Sessions are in the
   order in which they begin first: one that was made earlier, and begins only now, is the later one.
3. *Sequences.* What is staged belongs to a sequence, a number that the stream gives. None is given twice, whatever a
   producer remembers or forgets, so nothing new is ever taken for something that was committed before. A producer that
   was forgotten and begins anew is given sequences above all that the stream has given before. So a commit of a
   sequence that an earlier producer of that name was given is an error (`LostOutputError`); it never means another.
4. *Staging* is in order: each piece says how many messages of its sequence lie before it. One that is sent again is
   known by that, and a gap is refused (`GapError`). A sequence that has been committed takes nothing more
   (`SequenceOverError`), nor does one that was dropped by its name (`drop`), which never comes back.
5. *Committing* some sequences is one step, in which their messages come in the order in which the sequences are named,
   and those of each in the order in which they were staged. Sequences that are committed already are left out; if
   nothing is left, it is done. So are those of no messages for which nothing is staged. Who commits says how many
   messages each sequence has. One that is not committed, and of which not just so many are staged, is lost, and that is
   an error (`LostOutputError`), never silence.
6. What was committed is remembered as ranges of sequences for as long as there is the stream. If there are more than
   `MOST_RANGES` of them the oldest are forgotten; a commit of what was forgotten is an error, too.
7. *Labels.* A commit may have labels, numbers that its producer gives it: a range, and the last of them says what the
   commit is. If that one was committed before, the commit is done, whatever sequences it names, also for an older
   epoch, and what is staged for these is dropped. So is what else was staged for a label that is committed, as far
   as sequences were opened for one (the last `MOST_OPENED`; and that is not noted: after a restart it is dropped by
   rule 2 or 8). Labels are
   remembered as sequences are; a label below those that were forgotten is an error (`LabelForgottenError`).
8. Producers that are not used for longer than they asked for when they began (`lifetime`) are forgotten, with what they
   have staged; those of flows never are. One that has committed a label is not forgotten either, and loses only what it
   has staged so long ago.

A commit, and what survives a crash at any point of it:

1. `commit` gives an *intent*, with the number of the commit. The producer's note (`note`) has to be safe with it.
2. The messages are appended to the stream as one unit of batches, the last of which bears the number of the producer
   and of the commit. When that is safe: `committed`, and the commit is answered.
3. The note is written again, without the intent. Until that is safe, nothing of the unit is trimmed.

Whoever finds a note with an intent looks in the stream for a unit with its number: it is there, and the commit is done
(`committed`); or it is not, and never was there (`abandoned`): the sequences are staged as before.

Duties of the driver:

1. What changes a note (`begin`, `open` at times, `commit`, `committed`, `pass_over`, `drop`, `forget`) is answered when
   the note is safe, and with it the one of the stream itself (`stream_note`), which is written before it.
   `noted` hears of each note that is: until then whoever opens a sequence that it has to cover waits, too.
2. `staged` is asked for each piece in the order in which pieces are appended to the staging log. If one could not be
   appended, `not_staged` takes it and all behind it back.
3. One thing at a time: while there is an intent, `begin` and `commit` raise `BusyError`, and are asked again. So nobody
   drops what is being committed.
4. After a restart or failover: `load` the notes, `found` each staged batch in its order, then settle the intents.
5. What lies before `staged_from` in the staging log is not needed any more. What is staged for a sequence may be copied
   to the end of that log, wholly or not at all, and behind all pieces of it: the copy takes its place (`anew`). When
   the copy is safe, `moved` is called. Nothing is copied while it is being committed.
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
"""So many sequences are given between two notes."""
UNNOTED_SEQUENCES: Final = 1 << 32
"""More sequences than a producer was given by a version of Railgun that did not note them for the stream."""
MOST_RANGES: Final = 10_000
"""Ranges of committed sequences, and of labels, that are remembered of a producer."""
MOST_SESSIONS: Final = 16
"""Sessions with a successor that are remembered of a producer."""
MOST_OPENED: Final = 10_000
"""Sequences that were opened for labels, and not committed, that are remembered of a producer."""


class FirstStaged(NamedTuple):
    """What is staged first in the staging log."""

    offset: int
    name: str
    """The producer."""


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
        self._names: dict[int, str] = {}  # by the numbers
        self._last_number = 0
        self._next_sequence = 1  # none from here on may have been given to anybody

    # ------------------------------------------------------------ beginning

    def begin(
        self,
        name: str,
        epoch: int,
        now: int,
        keep: Iterable[int] | None = None,
        lifetime: int = 0,
    ) -> Producer:
        """Begin an epoch, or take part in it; `keep`: drop what earlier epochs have staged for other sequences.

        Raises `FencedError` if a later epoch has begun, and `BusyError`.
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
            for kept in (producer.staged, producer.opened):
                for sequence in [one for one in kept if not producer.is_alive(one)]:
                    del kept[sequence]
        return producer

    def begin_session(self, name: str, session: str, now: int, lifetime: int = 0) -> Producer:
        """Begin the next epoch for a session, and drop what was staged before; or take part in the session's epoch.

        Raises `FencedError` if another session has begun since, and `BusyError`.
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
            producer.past = (*producer.past, producer.session)[-MOST_SESSIONS:]
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
            told = f"commit {producer.intent.number} is under way: ask again"
            raise BusyError(f"producer {producer.name!r}: {told}")

    def _find(self, name: str, epoch: int, now: int) -> Producer:
        """Return a producer that works in this epoch."""
        producer = self.by_name.get(name)
        if producer is None or epoch > producer.epoch:
            raise NoProducerError(f"producer {name!r} has not begun epoch {epoch}: begin it first")
        self._check_epoch(producer, epoch)
        producer.used = now
        return producer

    # ------------------------------------------------------------ staging

    def open(self, name: str, epoch: int, now: int, label: int | None = None) -> tuple[int, bool]:
        """Return a new sequence, and whether the note has to be safe before it is told.

        `label`: under which it will be committed. Raises `SequenceOverError` if that was done.
        """
        producer = self._find(name, epoch, now)
        if label is not None and producer.has_label(label):
            raise producer.label_over(label)
        sequence = producer.next
        producer.next += 1
        if label is not None:
            producer.opened[sequence] = label
            if len(producer.opened) > MOST_OPENED:
                del producer.opened[next(iter(producer.opened))]
        if producer.next > producer.reserved:
            producer.reserved = producer.next + RESERVED
            self._next_sequence = max(self._next_sequence, producer.reserved)
        return sequence, sequence >= producer.covered

    def noted(self, number: int, reserved: int) -> None:
        """Note that a note of a producer is safe: sequences below `reserved`, as that says, may be told."""
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
        """Take a piece of a sequence, behind the first `at` messages of it; return False if it is there already.

        `offset`: where it will be in the staging log. Raises `GapError` if something is missing before it.
        """
        producer = self.numbered(number)
        if producer is None or epoch > producer.epoch:
            raise NoProducerError(f"producer {number} has not begun epoch {epoch}: begin it first")
        self._check_epoch(producer, epoch)
        if not producer.since <= sequence < producer.next:
            raise NoProducerError(
                f"producer {producer.name!r} was not given sequence {sequence} in epoch {epoch}: open one"
            )
        intent = producer.intent
        if producer.is_committed(sequence) or (intent and sequence in intent.sequences):
            raise SequenceOverError(
                f"producer {producer.name!r}: sequence {sequence} was committed before: open another one"
            )
        if producer.is_finished(sequence):
            raise SequenceOverError(
                f"producer {producer.name!r}: sequence {sequence} was dropped before: open another one"
            )
        label = producer.opened.get(sequence)
        if label is not None and producer.has_label(label):
            raise producer.label_over(label)
        found = producer.staged.get(sequence)
        have = 0 if found is None else found.count
        if at + count <= have:
            return False
        if at != have:
            raise GapError(
                f"producer {producer.name!r}, sequence {sequence}: a piece from message {at} on cannot follow {have}"
            )
        self._take(producer, sequence, count, size, offset, now)
        return True

    def _take(
        self, producer: Producer, sequence: int, count: int, size: int, offset: int, now: int
    ) -> None:
        found = producer.staged.setdefault(sequence, Staged(offset))
        found.count += count
        found.size += size
        found.used = now
        producer.used = max(producer.used, now)

    def not_staged(self, number: int, sequence: int, at: int, size: int) -> None:
        """Take back a piece that could not be appended; those behind it will be taken back, too."""
        producer = self.numbered(number)
        found = None if producer is None else producer.staged.get(sequence)
        if producer is None or found is None:
            return
        found.count, found.size = min(found.count, at), max(0, found.size - size)
        if not found.count:
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
        """Decide to commit sequences, each with so many messages, one after the other; None: that was done before.

        `end`: of the stream, now. `labels`: that are committed with it. Raises `LostOutputError`, `BusyError` and
        `LabelForgottenError`.
        """
        if self._is_done(name, counts, labels):
            return None  # whoever asks
        producer = self._find(name, epoch, now)
        self._check_idle(producer)
        producer.check_label(labels)
        counts = self.without_empty(name, counts)
        left = tuple(one for one in counts if not producer.is_committed(one))
        if labels is None and not left:
            return None
        if not counts:
            raise ProtocolError(f"producer {name!r}: labels without messages are to be passed over")
        if labels is not None and len(left) < len(counts):
            raise SequenceOverError(
                f"producer {name!r}: sequences of {sorted(counts)} were committed before, and not under label "
                f"{labels[-1]}: stage what belongs to it for new ones"
            )
        for sequence in left:
            producer.check_staged(sequence, counts[sequence])
        producer.intent = Intent(producer.commits + 1, left, end, labels)
        return producer.intent

    def without_empty(self, name: str, counts: Mapping[int, int]) -> dict[int, int]:
        """Return the sequences of a commit without those of no messages for which nothing is staged."""
        producer = self.by_name.get(name)
        staged = () if producer is None else producer.staged
        return {one: count for one, count in counts.items() if count or one in staged}

    def _is_done(self, name: str, counts: Mapping[int, int], labels: range | None) -> bool:
        """Return whether a commit was done before; what is staged for it once more is dropped."""
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
        """Count labels as committed, with nothing; return False if they are. The note has to be safe then.

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
        """Remember labels, and drop what else was staged for them; later pieces of that are refused."""
        producer.add_labels(labels, MOST_RANGES)
        for sequence in list(producer.staged):
            label = producer.opened.get(sequence)
            if label is not None and producer.has_label(label):
                producer.drop(sequence)

    def committed(self, name: str, number: int, base: int = 0) -> None:
        """Note that the unit of a commit is safe in the stream, from the offset `base` on."""
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
        del producer.committed[:-MOST_RANGES], producer.finished[:-MOST_RANGES]
        producer.commits = number

    def base_of(self, name: str, sequences: Iterable[int]) -> int | None:
        """Return where the last commit of a producer begins, if it was of these sequences."""
        producer = self.by_name.get(name)
        last = None if producer is None else producer.last
        return last[1] if last is not None and last[0] == tuple(sequences) else None

    def drop(self, name: str, epoch: int, sequences: Iterable[int], now: int) -> None:
        """Drop what is staged for some sequences, for good; what was committed of them stays so.

        Raises `NoProducerError` if the producer was not given one of them, and `BusyError`.
        """
        producer, sequences = self._find(name, epoch, now), list(sequences)
        self._check_idle(producer)
        for sequence in sequences:
            producer.check_given(sequence)
        for sequence in sequences:
            if not producer.is_committed(sequence):
                producer.finish(sequence, MOST_RANGES)

    def abandoned(self, name: str, number: int) -> None:
        """Note that the unit of a commit is not in the stream, and never will be."""
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
        """Return the producers of some notes. `stream_note`: of the stream itself; None: it has none yet.

        Older versions of Railgun noted the last number of a producer, and no sequences: what they gave, to producers
        that were forgotten since, lies far below the sequences that are given then.
        """
        made, stream_note = cls(), {} if stream_note is None else stream_note
        made._last_number = stream_note.get("last", 0)
        for name, note in notes.items():
            made._add(Producer.of(name, note))
        first = stream_note.get("sequences", made._last_number * UNNOTED_SEQUENCES)
        made._next_sequence = max(made._next_sequence, first)
        return made

    def stream_note(self) -> dict[str, Any]:
        """Return what must not be forgotten of the stream itself, as plain values."""
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
        """Note a batch that is in the staging log; `anew`: a copy of all that was staged before begins with it."""
        producer = self.numbered(number)
        if producer is None or not producer.is_alive(sequence) or producer.is_committed(sequence):
            return
        if anew:
            producer.drop(sequence)
        self._take(producer, sequence, count, size, offset, now)

    def moved(self, number: int, sequence: int, offset: int) -> None:
        """Note that all that is staged for a sequence lies from `offset` on: it was copied there, and that is safe."""
        producer = self.numbered(number)
        found = None if producer is None else producer.staged.get(sequence)
        if found is not None:
            found.first = max(found.first, offset)

    def forget(self, name: str) -> Producer | None:
        """Forget a producer, with what it has staged; None: there is none."""
        producer = self.by_name.pop(name, None)
        if producer is not None:
            del self._names[producer.number]
        return producer

    def expired(self, now: int) -> list[str]:
        """Return the names of producers that were not used for longer than they live, and commit nothing now."""
        return [
            one.name
            for one in self.by_name.values()
            if one.lifetime and not one.intent and not one.labels and now - one.used > one.lifetime
        ]

    def drop_stale(self, now: int) -> None:
        """Drop what producers that are never forgotten have staged for longer than their lifetime (rule 8)."""
        for one in self.by_name.values():
            if one.lifetime and one.labels and not one.intent:
                for sequence, found in list(one.staged.items()):
                    if now - found.used > one.lifetime:
                        one.drop(sequence)

    def numbered(self, number: int) -> Producer | None:
        """Return the producer with this number."""
        return self.by_name.get(self._names.get(number, ""))

    @property
    def staged_size(self) -> int:
        """Bytes of all that is staged."""
        return sum(one.size for each in self.by_name.values() for one in each.staged.values())

    def first_staged(self) -> FirstStaged | None:
        """Return what is staged first in the staging log; None: nothing is staged."""
        firsts = (
            FirstStaged(staged.first, producer.name)
            for producer in self.by_name.values()
            for staged in producer.staged.values()
        )
        return min(firsts, default=None)

    def staged_from(self, end: int) -> int:
        """Return the offset in the staging log from which on something is needed; `end`: where it ends."""
        firsts = (one.first for each in self.by_name.values() for one in each.staged.values())
        return min(firsts, default=end)
