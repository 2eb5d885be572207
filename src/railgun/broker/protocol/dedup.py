"""Deduplication window ("ID time box") of a stream: the IDs of recently accepted messages.

A publisher that does not hear whether its publish was stored sends it again. With message IDs it may do so: within the
stream's time box, the second publish is answered with the offset of the first. Rules:

1. The box of an ID starts when its message is first accepted, and lasts `box` µs. Inside it, the ID is a `Duplicate`. A
   check does not prolong the box.
2. Time is that of a steady clock, which never jumps: no time of day, right or wrong, makes an ID forgotten early. An ID
   restored from a log is as old as stored time proves it to be (`Lookback`), and never older.
3. A message that is being written has no outcome yet. A `Twin` of it waits for it: if the first one is accepted, the
   twin is a duplicate; if it fails, the first of the waiting twins is fresh. A waiting publish holds nothing, so no two
   wait for each other.
4. A second message with the ID of an earlier one of the same publish is a `Repeat` of that one: it shares its outcome.
5. At most `most` IDs are inside the box or being written. Beyond that, a fresh ID is refused with `PoolFull`; no ID is
   forgotten to make room. Messages without an ID always pass.

Duties of the driver:

1. Call `check`; then leave out all messages that are not fresh, and `begin` the rest at once, before the next call.
   While `check` names twins, `begin` the whole publish as it came: it is refused, and the result names the tickets to
   wait for.
2. Give `check` and `accepted` the time of one steady clock (µs), which never steps back.
3. End every ticket that began, by `accepted` in the order of offsets, or by `failed`. Failed means that the publish is
   not in the log and never will be: if that is not known (no quorum yet), it is still being written.
4. Both return tickets that waited, in order of arrival: check each again, from the beginning. Take out a ticket that no
   longer wants to wait with `withdraw`.
5. After a restart or failover, `restore` what `Lookback` asks for, oldest first, before the first check. A log that
   keeps less than a box cannot restore all of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from railgun.broker.protocol.stored_time import max_advance, min_elapsed
from railgun.errors import ProtocolError

Ticket = int
"""The driver's number of a publish that is being written; never used for two at a time."""

Id = bytes | None
"""The ID of a message; None or empty for a message without an ID."""

_NEVER: Final = -(1 << 63)  # before any time


@dataclass(frozen=True, slots=True)
class Fresh:
    """The ID is unknown, or the message has none: it may be stored."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The ID was accepted at this offset and is still inside the box."""

    code: ClassVar[str] = "DUPLICATE_ID"
    offset: int


@dataclass(frozen=True, slots=True)
class Twin:
    """Another publish with the same ID is being written."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Repeat:
    """The ID of an earlier message of the same publish, which is at this index."""

    index: int


@dataclass(frozen=True, slots=True)
class PoolFull:
    """The ID is fresh, but the maximum number of IDs is reached: send the message again later."""

    code: ClassVar[str] = "ID_POOL_FULL"


Verdict = Fresh | Duplicate | Twin | Repeat | PoolFull
FRESH: Final = Fresh()
FULL: Final = PoolFull()


@dataclass(frozen=True, slots=True)
class _Batch:
    """Messages that were accepted together; the ID of a message without one is None."""

    time: int
    base: int
    ids: tuple[Id, ...]
    before: int  # how many IDs all earlier batches have


class Lookback:
    """Compute which part of a log to restore so that no ID is forgotten inside its box.

    Epochs are examined one by one, the newest first. Within an epoch, stored time advances by little more than the time
    that has passed (`broker.protocol.stored_time`). Between two epochs it may have advanced by anything, as the clock
    of another master, or of a restarted node, shows another time: a difference between two epochs proves no age at all,
    and counts as zero. For each epoch:

    1. Read the batches with a stored time from `oldest(last)` on, where `last` is the stored time of its last batch.
    2. Restore each as accepted at `time_of(stored, last, now)`, by the steady clock.
    3. Call `passed(first, last)` with the stored times of its first and last batch, and stop when it returns that no
       earlier batch can be inside a box.

    >>> from railgun.broker.protocol.stored_time import SLEW
    >>> look = Lookback(box=1000)
    >>> look.oldest(last=50_000)
    48900
    >>> look.passed(first=49_450, last=50_000)  # all of it is inside: continue with the epoch before
    True
    >>> look.oldest(last=7_000), look.time_of(stored=7_000, last=7_000, now=0)
    (6450, -500)
    >>> look.passed(first=0, last=7_000)
    False
    """

    def __init__(self, box: int) -> None:
        self._left = max_advance(box)
        self._advance = 0  # of stored time, in the epochs examined so far

    def oldest(self, last: int) -> int:
        """Return the lowest stored time that may be inside a box. `last`: the stored time of the epoch's last batch."""
        return last - self._left

    def time_of(self, stored: int, last: int, now: int) -> int:
        """Return when a batch was accepted at the latest, by a steady clock that now shows `now`."""
        return now - min_elapsed(self._advance + last - stored)

    def passed(self, first: int, last: int) -> bool:
        """Finish an epoch; return False if no batch of earlier epochs can be inside a box."""
        self._advance += last - first
        self._left -= last - first
        return self._left > 0


class IdBox:
    """The deduplication window of one stream.

    >>> box = IdBox(box=60_000_000, most=1000)
    >>> box.check([b"a", b"b"], now=0)
    [Fresh(), Fresh()]
    >>> box.begin([b"a", b"b"], ticket=1)
    ()
    >>> box.check([b"b"], now=10)  # sent again, while the first one is being written
    [Twin(ticket=1)]
    >>> box.begin([b"b"], ticket=2)
    (1,)
    >>> box.accepted(1, base=70, time=20)
    (2,)
    >>> box.check([b"b"], now=30)
    [Duplicate(offset=71)]
    """

    def __init__(self, box: int, most: int) -> None:
        if box <= 0 or most <= 0:
            raise ProtocolError(f"a box of {box} µs and {most} IDs can hold nothing")
        self.box = box
        self.most = most
        self._offsets: dict[bytes, int] = {}
        self._batches: list[_Batch] = []
        self._head = 0  # batches before this index are expired
        self._total = 0  # number of IDs in all batches ever
        self._last = _NEVER  # when a batch was accepted last
        self._end = 0  # one past the last offset
        self._time = _NEVER  # time of the last check
        self._written: dict[bytes, Ticket] = {}  # IDs that are being written
        self._flights: dict[Ticket, tuple[Id, ...]] = {}  # publishes that are being written
        self._waiting: dict[Ticket, dict[Ticket, None]] = {}  # waiting ticket → those it waits for
        self._waiters: dict[Ticket, dict[Ticket, None]] = {}  # ticket → those that wait for it

    def check(self, ids: Sequence[Id], now: int) -> list[Verdict]:
        """Return for each message of a publish whether it may be stored, and if not, why."""
        self._time = max(now, self._last)
        if self._all_fresh([message_id for message_id in ids if message_id]):
            return [FRESH] * len(ids)
        return self._verdicts(ids)

    def begin(self, ids: Sequence[Id], ticket: Ticket) -> tuple[Ticket, ...]:
        """Begin to write these messages, in this order, and return ().

        If some of their IDs are being written by other tickets, return those: nothing began, and `ticket` waits for
        them. Raises `ProtocolError` if the ticket is in use, or if `check` would refuse a message.
        """
        if ticket in self._flights or ticket in self._waiting:
            raise ProtocolError(f"ticket {ticket} is used already: give every publish its own")
        twins = {
            self._written[message_id]: None
            for message_id in ids
            if message_id and message_id in self._written
        }
        if twins:
            self._waiting[ticket] = twins
            for twin in twins:
                self._waiters.setdefault(twin, {})[ticket] = None
            return tuple(twins)
        real_ids = [message_id for message_id in ids if message_id]
        if not self._all_fresh(real_ids):
            refusal = next(
                (verdict for verdict in self._verdicts(real_ids) if verdict != FRESH), None
            )
            if refusal is not None:
                raise ProtocolError(
                    f"ticket {ticket} begins with {refusal}: leave out what check() refuses"
                )
        self._flights[ticket] = tuple(ids)
        self._written.update(dict.fromkeys(real_ids, ticket))
        return ()

    def accepted(self, ticket: Ticket, base: int, time: int) -> tuple[Ticket, ...]:
        """Record that a publish is stored at the offsets from `base`, accepted at `time` (of the steady clock).

        Return the tickets that waited for it and can be checked again.
        """
        if ticket not in self._flights:
            raise ProtocolError(f"ticket {ticket} is not being written")
        self._in_order(base, time)
        self._remember(self._end_write(ticket), base, time)
        return self._wake(ticket)

    def failed(self, ticket: Ticket) -> tuple[Ticket, ...]:
        """Record that a publish is not stored and never will be. Return the tickets that waited for it."""
        if ticket not in self._flights:
            raise ProtocolError(f"ticket {ticket} is not being written")
        self._end_write(ticket)
        return self._wake(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Remove a waiting ticket. Raises `ProtocolError` if it is not waiting."""
        if ticket not in self._waiting:
            raise ProtocolError(f"ticket {ticket} is not waiting, so it cannot be withdrawn")
        for twin in self._waiting.pop(ticket):
            del self._waiters[twin][ticket]

    def restore(self, ids: Sequence[Id], base: int, time: int) -> None:
        """Remember a batch of the log that was accepted before a restart, or by another master.

        `time`: the latest time, by the steady clock, at which it may have been accepted (`Lookback.time_of`).
        """
        if self._flights:
            raise ProtocolError("restore before the first publish begins: its offsets come after")
        self._in_order(base, time)
        self._remember(tuple(ids), base, time)

    def resize(self, box: int, most: int) -> None:
        """Change the length of the box to `box` µs from acceptance, and the number of IDs to at most `most`.

        A longer box applies to IDs that are still remembered; forgotten IDs are not brought back.
        """
        if box <= 0 or most <= 0:
            raise ProtocolError(f"a box of {box} µs and {most} IDs can hold nothing")
        self.box, self.most = box, most
        self._forget_expired()

    def known(self, now: int) -> int:
        """Return how many IDs are inside the box."""
        return self._inside(max(now, self._last))

    def next_expiry(self, now: int) -> int | None:
        """Return when the next ID leaves the box, or None: until then a full pool stays full, unless a write fails."""
        at = self._first_inside(max(now, self._last))
        return self._batches[at].time + self.box if at < len(self._batches) else None

    # --- Lookups and bookkeeping ------------------------------------------------------------------

    def _all_fresh(self, real_ids: list[bytes]) -> bool:
        """Return True if all IDs are surely fresh: the usual case, at the speed of C. False proves nothing."""
        return (
            len(real_ids) <= self._free_places()
            and self._offsets.keys().isdisjoint(real_ids)
            and self._written.keys().isdisjoint(real_ids)
            and len(set(real_ids)) == len(real_ids)
        )

    def _verdicts(self, ids: Sequence[Id]) -> list[Verdict]:
        room = self._free_places()
        firsts: dict[bytes, int] = {}
        verdicts: list[Verdict] = []
        for index, message_id in enumerate(ids):
            if not message_id:
                verdicts.append(FRESH)
            elif (offset := self._offset(message_id)) is not None:
                verdicts.append(Duplicate(offset))
            elif message_id in self._written:
                verdicts.append(Twin(self._written[message_id]))
            elif message_id in firsts:
                verdicts.append(Repeat(firsts[message_id]))
            elif len(firsts) < room:
                firsts[message_id] = index
                verdicts.append(FRESH)
            else:
                verdicts.append(FULL)
        return verdicts

    def _is_expired(self, time: int) -> bool:
        """Return whether a box that began at `time` is over, at the time of the last check."""
        return time + self.box <= self._time

    def _offset(self, message_id: bytes) -> int | None:
        """Return the offset at which an ID was accepted, if it is inside the box."""
        offset = self._offsets.get(message_id)
        if offset is None:
            return None
        at = bisect_right(self._batches, offset, self._head, key=lambda batch: batch.base) - 1
        return None if self._is_expired(self._batches[at].time) else offset

    def _free_places(self) -> int:
        return self.most - self._inside(self._time) - len(self._written)

    def _inside(self, time: int) -> int:
        at = self._first_inside(time)
        return self._total - self._batches[at].before if at < len(self._batches) else 0

    def _first_inside(self, time: int) -> int:
        return bisect_right(
            self._batches, time - self.box, self._head, key=lambda batch: batch.time
        )

    def _in_order(self, base: int, time: int) -> None:
        if base < self._end:
            raise ProtocolError(f"offset {base} comes after {self._end - 1}: keep the log's order")
        if time < self._last:
            raise ProtocolError(
                f"time {time} comes after {self._last}: a steady clock never steps back"
            )

    def _remember(self, ids: tuple[Id, ...], base: int, time: int) -> None:
        self._last = time
        self._end = base + len(ids)
        self._forget_expired()
        offsets = {message_id: offset for offset, message_id in enumerate(ids, base) if message_id}
        if offsets:
            self._batches.append(_Batch(time, base, ids, self._total))
            self._total += len(offsets)
            self._offsets.update(offsets)

    def _forget_expired(self) -> None:
        """Forget the batches whose box is over. Each batch is examined once in its life."""
        head = self._first_inside(self._last)
        for batch in self._batches[self._head : head]:
            for offset, message_id in enumerate(batch.ids, batch.base):
                # Keep an ID that was accepted again since.
                if message_id and self._offsets.get(message_id) == offset:
                    del self._offsets[message_id]
        self._head = head
        if 2 * head > len(self._batches):
            del self._batches[:head]
            self._head = 0

    def _end_write(self, ticket: Ticket) -> tuple[Id, ...]:
        ids = self._flights.pop(ticket)
        for message_id in ids:
            if message_id:
                del self._written[message_id]
        return ids

    def _wake(self, ticket: Ticket) -> tuple[Ticket, ...]:
        """Return the tickets that waited for this one and for no other."""
        awake = []
        for waiter in self._waiters.pop(ticket, ()):
            del self._waiting[waiter][ticket]
            if not self._waiting[waiter]:
                del self._waiting[waiter]
                awake.append(waiter)
        return tuple(awake)

    def validate(self) -> None:
        """Assert that the tables agree with each other."""
        flying = {
            message_id: ticket
            for ticket, ids in self._flights.items()
            for message_id in ids
            if message_id
        }
        assert flying == self._written
        waiters = {(w, t) for w, tickets in self._waiting.items() for t in tickets}
        assert waiters == {(w, t) for t, tickets in self._waiters.items() for w in tickets}
        assert all(ticket in self._flights for _, ticket in waiters), (
            "waits for a ticket that has ended"
        )
        assert all(self._waiting.values()), "waits for no ticket"
        assert not self._waiting.keys() & self._flights.keys()
        kept = self._batches[self._head :]
        assert all(batch.time + self.box > self._last for batch in kept), "kept beyond its box"
        offsets = {
            message_id: offset
            for b in kept
            for offset, message_id in enumerate(b.ids, b.base)
            if message_id
        }
        assert offsets == self._offsets
        assert 2 * self._head <= len(self._batches), "what was let go takes room"
