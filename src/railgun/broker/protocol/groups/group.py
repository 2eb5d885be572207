"""One group of one persistent stream: who gets which message, and what becomes of it.

Rules:

1. **At least once.** Every offset from where the group began ends acked, buried as a dead letter, or missed (the
   stream does not have it any more), which is told. Until then it is with one member, or it will be delivered.
2. **Acks** are for messages in flight with the member that acks, by their delivery number and epoch. All else in an
   ack, a nack or `in_progress` is `Stale` and changes nothing; the rest of the same request counts. Each message on
   its own.
3. **Counts.** The n-th counted delivery has the number n. A nack, a dead member, an `ack_wait` that is over, and
   the end of the node count; a graceful leave, a recall and a seek do not. A delivery that ended because the node did,
   in order or not, or because it serves the member no more (`send_away`) is no **failure**: members fetch messages
   ahead, so most of what they have they never looked at. A nack, a dead member and an `ack_wait` are failures, and
   dead letters are made of those alone.
4. **Credit** is how many messages a member may have in flight. An ack or nack frees it; delayed messages use none.
   A lower credit takes nothing back.
5. **Who gets what.** The lowest offset first, so redeliveries come before new messages. Members get shares that
   level their free credit; of equals, the one that was served longest ago is first. No member ever waits for
   another.
6. **Delays** are at most `LONGEST_DELAY`. They end by the clock that `tick` is told. If that clock went back (or it is
   another node's), nothing waits longer than its delay from then on; if it leaps ahead, delays end early. The same
   is true of `ack_wait`, which takes up to a 64th longer than it says, so that messages share their timers. An ack
   that comes after `ack_wait`, but before the message was taken back, counts.
   A delay holds back the messages that were nacked, and no others. With `block` it blocks the group: nothing at all
   is delivered to its members until the delay is over, also after a restart; of several, the longest counts. What
   members have stays with them. A stale nack blocks nothing; a seek ends it.
7. **Exclusive groups** stay exclusive, also while they are empty (and shared ones shared): others are refused.
   They have one active member, the one that joined first; the others stand by. It receives in
   stream order: while an offset is delayed, or a letter is being written for it, nothing above it is delivered. A
   nack or an `ack_wait` that is over recalls all above it that the member has, so that they come again after it.
   When the active member leaves, its messages are released, and then the next one is active.
8. **Epochs** rise when a member becomes the active one, when messages are taken back in an exclusive group, and
   with each seek and redrive. Within an epoch of an exclusive group, offsets rise and none is delivered twice.
9. **Seek** only if no other member is live. Everything below is settled, everything from there on is new, counts
   are forgotten, nothing counts as acked, and what the member has is recalled.
10. **Trim.** What nobody has below the first offset is missed. What a member has there it may still ack; if it
    comes back instead, it is missed. What is missed while there is no member is told to the next that joins, even
    after a restart.
11. **Restart.** The members are gone, so all that was in flight was delivered and is released, by rule 3 without a
    failure. If the stream ends
    before where the group was (its tail was lost), what the group knew of those offsets is void: they will be other
    messages.
12. **Damage.** What cannot be read from the stream is not delivered (`unreadable`). Messages that could not be sent for
    that reason come back at once, and that delivery does not count (`unsent`). Who receives nothing more because of it
    is to be told (`at_damage`): the end of what can be read is not the end of the stream.
13. Dead letters have rules of their own: `letters.py`. What survives: `saved.py`. Who comes and goes: `members.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import nlargest

from railgun.broker.protocol.groups.explain import Explanation, explain
from railgun.broker.protocol.groups.invariants import check
from railgun.broker.protocol.groups.members import Members
from railgun.broker.protocol.groups.messages import (
    DAY,
    FRESH,
    LONGEST_DELAY,
    LONGEST_REASON,
    BadDelayError,
    Command,
    Deliver,
    Flight,
    GroupBusyError,
    GroupConfig,
    GroupKindError,
    Member,
    OffsetRangeError,
    Recalled,
    Receipt,
    Redrove,
    Stale,
    Standing,
)
from railgun.broker.protocol.groups.parts import FAR, Party
from railgun.broker.protocol.groups.persisted import Redriven, Sought, marks, sought_marks
from railgun.broker.protocol.groups.shares import shares

Claim = tuple[int, int, Flight]


class Group(Members):
    """One group of one persistent stream.

    >>> from railgun.broker.protocol.groups import Group, GroupConfig, Receipt
    >>> group = Group(GroupConfig(), None, start=0, first=0, end=5)
    >>> _ = group.join("ann", now=0), group.grant("ann", 3, now=0)
    >>> group.take(now=1)
    [Deliver(member='ann', first=0, end=3, delivery=1, epoch=0)]
    >>> group.nack("ann", [Receipt(1, 2, 1, 0)], delay=0, reason="not today", now=2)
    []
    >>> group.ack("ann", [Receipt(0, 3, 1, 0)], now=3)
    [Stale(first=1, end=2, delivery=1, epoch=0)]
    >>> for deliver in group.take(now=4):
    ...     (deliver.first, deliver.end, deliver.delivery)
    (1, 2, 2)
    (3, 5, 1)
    """

    __slots__ = ()

    # --- The stream -------------------------------------------------------------------------------

    def appended(self, end: int, now: int) -> None:
        """The stream has messages up to here."""
        if end < self.end:
            raise OffsetRangeError(f"the stream ends at {self.end}, and cannot end at {end}")
        self.look_at_clock(now)
        self.end = end

    def trimmed(self, first: int, now: int) -> list[Command]:
        """The stream begins here. What the group has missed by that."""
        if not self.first <= first <= self.end:
            span = f"{self.first} to {self.end}"
            raise OffsetRangeError(f"the stream has {span}, and cannot begin at {first}")
        self.look_at_clock(now)
        self._drop_below(first)
        return self._tell_missed()

    def unreadable(self, offset: int) -> None:
        """The stream cannot be read from this offset on: rule 12."""
        self.readable = min(self.readable, offset)

    def at_damage(self) -> bool:
        """Return whether nothing that can be read waits for a member, and something cannot be read."""
        if self.readable == FAR or self.next < min(self.readable, self.end):
            return False
        lows = (self.waiting.first, self.delayed.first)
        return all(low is None or low >= self.readable for low in lows)

    def configure(self, config: GroupConfig, now: int) -> None:
        """Serve the group by these rules from now on, what it was delivered before included.

        Raises `GroupBusyError` while there are members: their deliveries were made by the rules before; and
        `GroupKindError` if the group is exclusive and was shared, or the other way round.
        """
        if self.members:
            raise GroupBusyError(
                f"{len(self.members)} members are live: the rules stay as they are"
            )
        if self.kind not in (None, config.exclusive):
            kind = "exclusive" if self.kind else "shared"
            raise GroupKindError(f"the group is {kind}, and stays so until it is deleted")
        self.look_at_clock(now)
        self.config, self.kind = config, config.exclusive
        pieces = [*self.waiting, *self.delayed]
        pieces += [(first, end, standing) for first, end, (standing, _) in self.dead]
        self.waiting.clear()
        self.delayed.clear()
        self.dead.clear()
        self.timers.clear()
        self.old_at = FAR
        for first, end, standing in pieces:
            self.place(first, end, standing)

    # --- Positions --------------------------------------------------------------------------------

    def seek(self, offset: int, now: int, member: Member | None = None) -> list[Command]:
        """Begin anew at an offset, if nobody but `member` is there."""
        others = [name for name in self.members if name != member]
        if others:
            raise GroupBusyError(f"{len(others)} other members are live: {', '.join(others[:5])}")
        if not self.first <= offset <= self.end:
            span = f"{self.first} to {self.end}"
            raise OffsetRangeError(f"the stream has {span}, and not {offset}")
        self.look_at_clock(now)
        told: list[Command] = []
        for party in self.members.values():
            told += [Recalled(party.name, first, end) for first, end, _ in party.flights]
            party.flights.clear()
            party.spans.clear()
        for place in (self.settled, self.waiting, self.delayed, self.dead, self.unsaved):
            place.clear()
        self.proposed.clear()
        self.timers.clear()
        self.old_at = FAR
        self.pause = (0, 0)
        self.told = (*self.told[:4], self.pause)  # which `Sought` says
        self.floor = self.next = offset
        self.highest = -1
        self.epoch += 1
        self.why = "sought"
        self.redriven = sought_marks(self.redriven)
        self.voids = [Sought(offset, self.epoch), Redriven(0, FAR, 0, 0), *marks(self.redriven)]
        return told

    def redrive(
        self, letters: Iterable[tuple[int, int]], now: int
    ) -> tuple[list[Redrove], list[Command]]:
        """Deliver messages again that were given up, by their offset and how often they were redriven before.

        Return what became of each letter, and what members are to be told.
        """
        self.look_at_clock(now)
        asked = list(letters)
        became = [self.take_back(offset, redrives) for offset, redrives in asked]
        lows = [one for (one, _), how in zip(asked, became, strict=True) if how == "redriven"]
        if lows and self.active is not None:
            return became, self._recall(self.active, min(lows))
        self.epoch += bool(lows)
        return became, []

    # --- What members say of their messages -------------------------------------------------------

    def ack(self, member: Member, receipts: Sequence[Receipt], now: int) -> list[Command]:
        """A member has finished with these. What of it is stale."""
        _, claims, told = self._claim(member, receipts, now)
        for first, end, _ in claims:
            self.settle(first, end)
            self.highest = max(self.highest, end - 1)
        return told

    def nack(
        self,
        member: Member,
        receipts: Sequence[Receipt],
        delay: int,
        reason: str,
        now: int,
        *,
        block: bool = False,
    ) -> list[Command]:
        """Let messages come again after `delay` µs, which blocks the group if `block`. Return what is stale."""
        if not 0 <= delay <= LONGEST_DELAY:
            raise BadDelayError(
                f"a delay of {delay / 1e6:,.0f} seconds: it is from 0 to {LONGEST_DELAY // DAY} days; the messages "
                "stay with their consumer"
            )
        if block and not delay:
            raise BadDelayError("a nack that blocks needs a delay: for how long?")
        party, claims, told = self._claim(member, receipts, now)
        until = now + delay if delay else 0
        for first, end, flight in claims:
            reason = reason[:LONGEST_REASON]
            standing = Standing(flight.delivery, reason, until, delay, flight.since, flight.spared)
            self.put_back(first, end, standing)
        if claims:
            told += self._recall(party, min(first for first, _, _ in claims))
        if claims and block:
            self.pause = max(self.pause, (until, delay))
        return told + self._tell_missed()

    def in_progress(self, member: Member, receipts: Sequence[Receipt], now: int) -> list[Command]:
        """A member is at work with these: `ack_wait` begins anew. What of it is stale."""
        party, claims, told = self._claim(member, receipts, now, keep=True)
        expires = self.expiry(now)
        if expires is not None:
            for first, end, flight in claims:
                self.fly(party, first, end, replace(flight, expires=expires))
        return told

    def unsent(self, member: Member, receipts: Sequence[Receipt], now: int) -> list[Command]:
        """Take back what could not be sent to a member; the delivery does not count: rule 12.

        Return what members are to be told: what is recalled, as after a nack, and what is missed.
        """
        party, claims, _ = self._claim(member, receipts, now)
        for first, end, flight in claims:
            self.give_back(first, end, flight, None)
        told = self._recall(party, min(first for first, _, _ in claims)) if claims else []
        return told + self._tell_missed()

    def _claim(
        self, member: Member, receipts: Sequence[Receipt], now: int, *, keep: bool = False
    ) -> tuple[Party, list[Claim], list[Command]]:
        """Rule 2: what of these the member has, which is taken from it unless it is to keep it, and what is stale."""
        party = self.party(member)
        for receipt in receipts:
            receipt.check()
        self.look_at_clock(now)
        claims: list[Claim] = []
        told: list[Command] = []
        for receipt in receipts:
            at, delivery, epoch = receipt.first, receipt.delivery, receipt.epoch
            for claim in party.flights.pieces(receipt.first, receipt.end):
                first, end, flight = claim
                if flight.delivery != delivery or flight.epoch != epoch:
                    continue
                claims.append(claim)
                if not keep:
                    party.flights.remove(first, end)
                if at < first:
                    told.append(Stale(at, first, delivery, epoch))
                at = end
            if at < receipt.end:
                told.append(Stale(at, receipt.end, delivery, epoch))
        return party, claims, told

    def _recall(self, party: Party, lowest: int) -> list[Command]:
        """Rule 7: in an exclusive group, what the member has above an offset that came back comes again after it."""
        if not self.config.exclusive:
            return []
        self.epoch += 1
        told: list[Command] = []
        for first, end, flight in party.flights.remove(lowest, FAR):
            self.give_back(first, end, flight, None)
            told.append(Recalled(party.name, first, end))
        return told

    # --- Delivering -------------------------------------------------------------------------------

    def take(self, now: int) -> list[Deliver]:
        """Give out as much as credit allows, of what no dead-letter rule gives up."""
        self.look_at_clock(now)
        self.condemn(now)
        told: list[Deliver] = []
        if now < self.pause[0]:
            return told
        below = self.blocked()
        ready = self.ready_below(below)
        if not ready:
            return told
        for party, share in self._shares(ready):
            self.turn += 1
            party.turn = self.turn
            while share:
                first, end, standing = self._lowest(share, below)
                share -= end - first
                deliver = self.hand_out(party, first, end, standing, now)
                if told and _continues(told[-1], deliver):
                    first = told.pop().first
                    deliver = Deliver(party.name, first, end, deliver.delivery, self.epoch)
                told.append(deliver)
        return told

    def blocked(self) -> int:
        """Return from where on nothing is delivered, by rule 7 in an exclusive group or by rule 12; else `FAR`."""
        if not self.config.exclusive:
            return self.readable
        lows = [self.readable, self.delayed.first, self.dead.first]
        lows.append(min(self.proposed, default=None))
        return min(low for low in lows if low is not None)

    def _shares(self, ready: int) -> list[tuple[Party, int]]:
        """Rule 5: who gets how many of the messages that are ready, the first of them first."""
        parties: Iterable[Party] = self.members.values()
        if self.config.exclusive:
            parties = () if self.active is None else (self.active,)
        able = [party for party in parties if party.free > 0]
        able = nlargest(min(ready, len(able)), able, key=lambda party: (party.free, -party.turn))
        given = shares([party.free for party in able], ready)
        return [(party, share) for party, share in zip(able, given, strict=True) if share]

    def _lowest(self, most: int, below: int) -> tuple[int, int, Standing]:
        """Take the lowest messages that are ready."""
        piece = self.waiting.pop(most, below)
        if piece is not None:
            return piece
        first = self.next
        self.next = min(first + most, self.end, below)
        return first, self.next, FRESH

    # --- Time -------------------------------------------------------------------------------------

    def tick(self, now: int) -> list[Command]:
        """Delays that are over end; what was with a member longer than `ack_wait` is taken back."""
        self.look_at_clock(now)
        if self.pause[0] <= now:
            self.pause = (0, 0)
        expired: dict[Member, int] = {}  # the lowest that was taken back
        while self.timers and self.timers[0].at <= now:
            _, first, end, member = self.next_timer()
            if not member:
                for low, high, standing in self.delayed.pieces(first, end):
                    if standing.until <= now:
                        self.delayed.remove(low, high)
                        self.waiting.set(low, high, standing)
            elif member in self.members:
                lowest = self._expire(self.members[member], first, end, now)
                expired[member] = min(lowest, expired.get(member, FAR))
        told: list[Command] = []
        for member, lowest in expired.items():
            if lowest < FAR:
                told += self._recall(self.members[member], lowest)
        return told + self._tell_missed()

    def _expire(self, party: Party, first: int, end: int, now: int) -> int:
        """Rule 3: a delivery that was not answered in time came to nothing. The lowest of those taken back."""
        lowest = FAR
        for low, high, flight in party.flights.pieces(first, end):
            if flight.expires is not None and flight.expires <= now:
                party.flights.remove(low, high)
                self.give_back(low, high, flight, "no answer within ack_wait")
                lowest = min(low, lowest)
        return lowest

    # --- Looking ----------------------------------------------------------------------------------

    def explain(self, now: int) -> Explanation:
        """Why the group receives nothing, or what it is doing."""
        return explain(self, self.blocked(), now)

    def validate(self) -> None:
        """Raise if the state contradicts itself; for tests."""
        check(self)


def _continues(one: Deliver, other: Deliver) -> bool:
    """Whether both are one delivery."""
    return one.member == other.member and one.end == other.first and one.delivery == other.delivery
