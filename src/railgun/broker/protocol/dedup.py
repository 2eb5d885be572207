"""The IDs of messages that a stream has accepted of late, so that a publish sent twice is stored once.

A publisher that does not hear whether its publish was stored sends it again. With an ID it may: within the stream's
time box the second one is answered with the offset of the first. Rules:

1. The box of an ID starts when its message is first accepted, and lasts `box` µs. Inside it, the ID is a `Duplicate`.
   Asking does not prolong it.
2. Time is that of a steady clock, which never jumps: no time of day, right or wrong, makes an ID forgotten early.
   What is restored from a log is as old as stored time proves it to be (`Lookback`), and never older.
3. A message that is being written has no outcome yet. A `Twin` of it waits for it: if it is accepted, the twin is a
   duplicate; if it fails, the first of those who wait is fresh. Who waits holds nothing, so no two wait for each other.
4. A second message with the ID of an earlier one of the same publish is a `Repeat` of that one: it shares its outcome.
5. At most `most` IDs are inside the box or being written. Beyond that, a fresh one is refused with `PoolFull`;
   nothing is forgotten to make room. Messages without an ID always pass.

Duties of the driver:

1. Ask with `check`; then leave out all that is not fresh, and `begin` the rest at once, before it asks anything else.
   While `check` names twins, `begin` the whole publish as it came: it is refused, and the answer says whom to wait for.
2. Give `check` and `accepted` the time of one steady clock (µs), which never steps back.
3. Every ticket that began ends, by `accepted` in the order of offsets, or by `failed`. Failed means that it is not in
   the log and never will be: a publish of which that is not known (no quorum yet) is still being written.
4. Both answer with tickets that waited, in order of arrival: each is to be checked again, from the beginning.
   One who no longer wants to wait is taken out by `withdraw`.
5. After a restart or failover `restore` what `Lookback` asks for, oldest first, before the first check. A log that
   keeps less than a box cannot tell all of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from railgun.broker.protocol.stored_time import least_passed, most_advance
from railgun.errors import ProtocolError

Ticket = int
"""A publish on its way, named by the driver; never used for two at a time."""

Id = bytes | None
"""The ID of a message; None, or no bytes at all, is a message without one."""

_NEVER: Final = -(1 << 63)  # before any time


@dataclass(frozen=True, slots=True)
class Fresh:
    """Not known, or without an ID: it may be stored."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Accepted before, inside the box, at this offset."""

    code: ClassVar[str] = "DUPLICATE_ID"
    offset: int


@dataclass(frozen=True, slots=True)
class Twin:
    """One with the same ID is being written."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Repeat:
    """The ID of an earlier message of the same publish: the one at this index."""

    index: int


@dataclass(frozen=True, slots=True)
class PoolFull:
    """Fresh, but there are as many IDs as there may be: to be sent again later."""

    code: ClassVar[str] = "ID_POOL_FULL"


Verdict = Fresh | Duplicate | Twin | Repeat | PoolFull
FRESH: Final = Fresh()
FULL: Final = PoolFull()


@dataclass(frozen=True, slots=True)
class _Batch:
    """Messages that were accepted together; those without an ID are None."""

    time: int
    base: int
    ids: tuple[Id, ...]
    before: int  # IDs of all batches before


class Lookback:
    """What of a log has to be restored so that no ID is forgotten inside its box: epoch by epoch, the newest first.

    Within an epoch, stored time advances by little more than the time that has passed (`broker.protocol.stored_time`).
    Between two epochs it may have advanced by anything, as the clock of another master, or of a restarted node, tells
    another time: what lies between two epochs proves no age at all, and counts nothing. For each epoch:

    1. Read the batches with a stored time from `oldest(last)` on, where `last` is the stored time of its last batch.
    2. Restore each as accepted at `time_of(stored, last, now)`, by the steady clock.
    3. Call `passed(first, last)` with the stored times of its first and last batch, and stop when it says that nothing
       before it can be inside a box.

    >>> from railgun.broker.protocol.stored_time import SLEW
    >>> look = Lookback(box=1000)
    >>> look.oldest(last=50_000)
    48900
    >>> look.passed(first=49_450, last=50_000)  # all of it is inside: go on with the epoch before
    True
    >>> look.oldest(last=7_000), look.time_of(stored=7_000, last=7_000, now=0)
    (6450, -500)
    >>> look.passed(first=0, last=7_000)
    False
    """

    def __init__(self, box: int) -> None:
        self._left = most_advance(box)
        self._advance = 0  # of stored time, in the epochs that were looked at

    def oldest(self, last: int) -> int:
        """Return the least stored time that may be inside a box."""
        return last - self._left

    def time_of(self, stored: int, last: int, now: int) -> int:
        """Return when a batch was accepted at the latest, by a steady clock that shows `now`."""
        return now - least_passed(self._advance + last - stored)

    def passed(self, first: int, last: int) -> bool:
        """Go on to the epoch before; return False if nothing in it can be inside a box."""
        self._advance += last - first
        self._left -= last - first
        return self._left > 0


class IdBox:
    """The IDs of one stream.

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
        self._head = 0  # those before are let go
        self._total = 0  # IDs of all batches ever
        self._last = _NEVER  # when something was accepted last
        self._end = 0  # behind the last offset
        self._time = _NEVER  # of the last check
        self._written: dict[bytes, Ticket] = {}
        self._flights: dict[Ticket, tuple[Id, ...]] = {}
        self._waiting: dict[Ticket, dict[Ticket, None]] = {}  # for whom
        self._waiters: dict[Ticket, dict[Ticket, None]] = {}  # who for it

    def check(self, ids: Sequence[Id], now: int) -> list[Verdict]:
        """What is to become of each message of a publish."""
        self._time = max(now, self._last)
        if self._all_fresh([one for one in ids if one]):
            return [FRESH] * len(ids)
        return self._each(ids)

    def begin(self, ids: Sequence[Id], ticket: Ticket) -> tuple[Ticket, ...]:
        """These are being written, in this order; or they wait for the tickets in the answer, and nothing began."""
        if ticket in self._flights or ticket in self._waiting:
            raise ProtocolError(f"ticket {ticket} is used already: give every publish its own")
        twins = {self._written[one]: None for one in ids if one and one in self._written}
        if twins:
            self._waiting[ticket] = twins
            for twin in twins:
                self._waiters.setdefault(twin, {})[ticket] = None
            return tuple(twins)
        given = [one for one in ids if one]
        if not self._all_fresh(given):
            wrong = next((verdict for verdict in self._each(given) if verdict != FRESH), None)
            if wrong is not None:
                raise ProtocolError(
                    f"ticket {ticket} is to begin with {wrong}: leave out what check() refuses"
                )
        self._flights[ticket] = tuple(ids)
        self._written.update(dict.fromkeys(given, ticket))
        return ()

    def accepted(self, ticket: Ticket, base: int, time: int) -> tuple[Ticket, ...]:
        """They are stored, at the offsets from `base`, and were accepted at `time` (of the steady clock).

        Returns who waited for it, and can be looked at again.
        """
        if ticket not in self._flights:
            raise ProtocolError(f"ticket {ticket} is not being written")
        self._in_order(base, time)
        self._remember(self._land(ticket), base, time)
        return self._wake(ticket)

    def failed(self, ticket: Ticket) -> tuple[Ticket, ...]:
        """They are not stored and never will be; who waited for it can be looked at again."""
        if ticket not in self._flights:
            raise ProtocolError(f"ticket {ticket} is not being written")
        self._land(ticket)
        return self._wake(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """It no longer waits."""
        if ticket not in self._waiting:
            raise ProtocolError(f"ticket {ticket} is not waiting, so it cannot be withdrawn")
        for twin in self._waiting.pop(ticket):
            del self._waiters[twin][ticket]

    def restore(self, ids: Sequence[Id], base: int, time: int) -> None:
        """Remember a batch of the log that was accepted in an earlier life, or by another master.

        `time`: when, by the steady clock, at the earliest by which it may have been (`Lookback.time_of`).
        """
        if self._flights:
            raise ProtocolError("restore before the first publish begins: its offsets come after")
        self._in_order(base, time)
        self._remember(tuple(ids), base, time)

    def resize(self, box: int, most: int) -> None:
        """From now on IDs are remembered for `box` µs from their acceptance, and `most` of them.

        A box that becomes longer holds for those that are remembered still; what was let go is not brought back.
        """
        if box <= 0 or most <= 0:
            raise ProtocolError(f"a box of {box} µs and {most} IDs can hold nothing")
        self.box, self.most = box, most
        self._let_go()

    def known(self, now: int) -> int:
        """How many IDs are inside the box."""
        return self._inside(max(now, self._last))

    def relief(self, now: int) -> int | None:
        """When the next ID leaves the box: until then a full pool stays full, unless something fails."""
        at = self._first_inside(max(now, self._last))
        return self._batches[at].time + self.box if at < len(self._batches) else None

    # --- How it is done ---------------------------------------------------------------------------

    def _all_fresh(self, given: list[bytes]) -> bool:
        """The usual case, at the speed of C; False does not say that one is not."""
        return (
            len(given) <= self._room()
            and self._offsets.keys().isdisjoint(given)
            and self._written.keys().isdisjoint(given)
            and len(set(given)) == len(given)
        )

    def _each(self, ids: Sequence[Id]) -> list[Verdict]:
        room = self._room()
        firsts: dict[bytes, int] = {}
        verdicts: list[Verdict] = []
        for index, one in enumerate(ids):
            if not one:
                verdicts.append(FRESH)
            elif (offset := self._offset(one)) is not None:
                verdicts.append(Duplicate(offset))
            elif one in self._written:
                verdicts.append(Twin(self._written[one]))
            elif one in firsts:
                verdicts.append(Repeat(firsts[one]))
            elif len(firsts) < room:
                firsts[one] = index
                verdicts.append(FRESH)
            else:
                verdicts.append(FULL)
        return verdicts

    def _over(self, time: int) -> bool:
        """Whether the box of what was stored then is over, at the time of the last check."""
        return time + self.box <= self._time

    def _offset(self, one: bytes) -> int | None:
        """Where it was accepted, if that is inside the box."""
        offset = self._offsets.get(one)
        if offset is None:
            return None
        at = bisect_right(self._batches, offset, self._head, key=lambda batch: batch.base) - 1
        return None if self._over(self._batches[at].time) else offset

    def _room(self) -> int:
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
        self._let_go()
        offsets = {one: offset for offset, one in enumerate(ids, base) if one}
        if offsets:
            self._batches.append(_Batch(time, base, ids, self._total))
            self._total += len(offsets)
            self._offsets.update(offsets)

    def _let_go(self) -> None:
        """Let go of those whose box is over; each is looked at once in its life."""
        head = self._first_inside(self._last)
        for batch in self._batches[self._head : head]:
            for offset, one in enumerate(batch.ids, batch.base):
                if one and self._offsets.get(one) == offset:  # not if accepted anew since
                    del self._offsets[one]
        self._head = head
        if 2 * head > len(self._batches):
            del self._batches[:head]
            self._head = 0

    def _land(self, ticket: Ticket) -> tuple[Id, ...]:
        ids = self._flights.pop(ticket)
        for one in ids:
            if one:
                del self._written[one]
        return ids

    def _wake(self, ticket: Ticket) -> tuple[Ticket, ...]:
        """Those who waited for this one last."""
        awake = []
        for waiter in self._waiters.pop(ticket, ()):
            del self._waiting[waiter][ticket]
            if not self._waiting[waiter]:
                del self._waiting[waiter]
                awake.append(waiter)
        return tuple(awake)

    def validate(self) -> None:
        """The tables agree with each other."""
        flying = {one: ticket for ticket, ids in self._flights.items() for one in ids if one}
        assert flying == self._written
        waiters = {(w, t) for w, tickets in self._waiting.items() for t in tickets}
        assert waiters == {(w, t) for t, found in self._waiters.items() for w in found}
        assert all(ticket in self._flights for _, ticket in waiters), "waits for what has ended"
        assert all(self._waiting.values()), "waits for nobody"
        assert not self._waiting.keys() & self._flights.keys()
        kept = self._batches[self._head :]
        assert all(batch.time + self.box > self._last for batch in kept), "kept beyond its box"
        offsets = {one: offset for b in kept for offset, one in enumerate(b.ids, b.base) if one}
        assert offsets == self._offsets
        assert 2 * self._head <= len(self._batches), "what was let go takes room"
